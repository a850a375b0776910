"""The forms in which labels and other results of rows are written: a zarr group, a cube, a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.columns import KeptColumns, RowsInOrder, kept_columns
from emtau_dask.data.cube_files import CubeWriter
from emtau_dask.data.cubes import Cube
from emtau_dask.data.opening import has_columns
from emtau_dask.em.predict import LABELS, inliers
from emtau_dask.errors import ConfigError, EmtauError
from emtau_dask.estimator.frames import COLUMNS
from emtau_dask.settings import DROP
from emtau_dask.storage.locations import PARQUET, Place, kind_by_ending, place_text
from emtau_dask.storage.publishing import (
    ResultKind,
    RowWriter,
    new_group,
    refuse_existing,
    run_that_wrote,
)
from emtau_dask.storage.tables import (
    Table,
    columns_and_attributes,
    holds,
    is_table,
    loaded_pyarrow,
    new_table,
)

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = ".zarr, .parquet, .pq, .csv or .tsv"
ABSENT = {"labels": LABELS.absent, "outliers": inliers(0.0).absent}
"""What rows have that are dropped; NaN where it is no integer."""
_RESULT = re.compile(r"label|probability_\d+|score|outlier")


@dataclass(frozen=True)
class RowResult:
    """What is found for every row: its name, type, and the shape of one row's values, () or (K,)."""

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it takes in a table."""
        name = COLUMNS[self.name]
        return tuple(f"{name}_{j}" for j in range(self.row_shape[0])) if self.row_shape else (name,)


@dataclass(frozen=True)
class RowContent:
    """What is written of ``n_rows`` rows: ``results``, the labels first, and ``attributes`` of them all."""

    results: tuple[RowResult, ...]
    n_rows: int
    attributes: Mapping[str, Any]


class RowOutput(Protocol):
    """A place that results of rows are being written to."""

    def append(self, found: Sequence[NDArray[Any]]) -> None:
        """Add the results of the next n rows: an array (n,) or (n, K) for each."""


class OutputForm(Protocol):
    """A form in which results are written."""

    def refuse_existing(self, path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = ()) -> None:
        """Raise `EmtauError` unless results may be written to a path; see `publishing.refuse_existing`."""

    def run_that_wrote(self, path: Path) -> object:
        """Return the id of the run whose results lie at a path, None where it is not known."""

    def opened(self, path: Path, content: RowContent, overwrite: bool) -> AbstractContextManager[RowOutput]:
        """Open an output that appears at the path, whole, when the block ends without an error."""


def form_at(path: Path) -> OutputForm:
    """Return the form that a name stands for; raises `EmtauError` for that of another format."""
    if is_table(path):
        loaded_pyarrow()
        return TableForm()
    kind = "a text file" if path.suffix.lower() == ".txt" else kind_by_ending(str(path))
    if kind is not None:
        raise EmtauError(
            f"{path} is the name of {kind}, which labels are not written as; give a name that ends in "
            f"{ENDINGS}, such as {path.with_suffix('.zarr')}"
        )
    return GroupForm()


@dataclass(frozen=True)
class GroupForm:
    """A zarr group with an array for each result."""

    def refuse_existing(self, path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = ()) -> None:
        """See `OutputForm`."""
        refuse_existing(path, overwrite, inputs=inputs)

    def run_that_wrote(self, path: Path) -> object:
        """See `OutputForm`."""
        return run_that_wrote(path)

    @contextmanager
    def opened(self, path: Path, content: RowContent, overwrite: bool) -> Iterator[RowOutput]:
        """See `OutputForm`."""
        with new_group(path, overwrite=overwrite) as group:
            group.attrs.update(content.attributes)
            writers = [
                RowWriter(group, each.name, (content.n_rows, *each.row_shape), each.dtype)
                for each in content.results
            ]
            yield _GroupRows(writers)
            for writer in writers:
                writer.flush()


@dataclass(frozen=True)
class CubeForm(GroupForm):
    """A zarr group as xarray writes them, with the dimensions and coordinates of the rows of a cube.

    ``dropping`` says that rows may have no value.
    """

    cube: Cube
    dropping: bool

    @contextmanager
    def opened(self, path: Path, content: RowContent, overwrite: bool) -> Iterator[RowOutput]:
        """See `OutputForm`."""
        results = [
            (
                each.name,
                each.dtype,
                each.row_shape,
                ABSENT.get(each.name, math.nan) if self.dropping else None,
            )
            for each in content.results
        ]
        with new_group(path, overwrite=overwrite) as group:
            writer = CubeWriter(group, self.cube, results)
            group.attrs.update(content.attributes)
            yield writer
            writer.finish()


def form_of_cube(path: Path, cube: Cube, missing: str) -> CubeForm:
    """Return the form of the results of a cube at a path; raises as `check_cube_name`."""
    check_cube_name(path)
    return CubeForm(cube, missing == DROP)


def check_cube_name(path: Path) -> None:
    """Raise `ConfigError` for a name of a table, which cannot hold the results of a cube."""
    if is_table(path):
        raise ConfigError(
            f"{path} is a table, but the rows of a cube lie along dimensions; give a name such as "
            f"{path.with_suffix('.zarr')}, which xarray opens"
        )


@dataclass(frozen=True)
class _GroupRows:
    writers: Sequence[RowWriter]

    def append(self, found: Sequence[NDArray[Any]]) -> None:
        for writer, values in zip(self.writers, found, strict=True):
            writer.append(values)


def _is_our_table(path: Path) -> bool:
    """Return whether emtau wrote a table: parquet says so, and CSV ends with the columns of results."""
    names, attributes = columns_and_attributes(path)
    if attributes:
        return True
    ours = names[names.index(COLUMNS["labels"]) :] if COLUMNS["labels"] in names else []
    return path.suffix.lower() not in PARQUET.endings and bool(ours) and all(map(_RESULT.fullmatch, ours))


TABLE = ResultKind(lambda path: None, _is_our_table)


@dataclass(frozen=True)
class TableForm:
    """A table of parquet or CSV: the columns that are ``kept`` of the input, then the results."""

    kept: KeptColumns | None = None

    def refuse_existing(self, path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = ()) -> None:
        """See `OutputForm`."""
        refuse_existing(path, overwrite, inputs=inputs, kind=TABLE)

    def run_that_wrote(self, path: Path) -> object:
        """See `OutputForm`."""
        return columns_and_attributes(path)[1].get("run")

    @contextmanager
    def opened(self, path: Path, content: RowContent, overwrite: bool) -> Iterator[RowOutput]:
        """See `OutputForm`."""
        pa = loaded_pyarrow()
        fields = [] if self.kept is None else list(self.kept.schema)
        for each in content.results:
            fields += [pa.field(name, pa.from_numpy_dtype(each.dtype)) for name in each.columns]
        schema = pa.schema(fields)
        with new_table(path, schema, content.attributes, overwrite=overwrite, kind=TABLE) as table:
            kept = None if self.kept is None else RowsInOrder(self.kept)
            yield _TableRows(table, schema, content.results, kept)
            if kept is not None:
                kept.finish()


@dataclass(frozen=True)
class _TableRows:
    table: Table
    schema: pa.Schema
    results: Sequence[RowResult]
    kept: RowsInOrder | None

    def append(self, found: Sequence[NDArray[Any]]) -> None:
        pa, n_rows, start = loaded_pyarrow(), len(found[0]), 0
        for piece in [None] if self.kept is None else self.kept.take(n_rows):
            stop = n_rows if piece is None else start + piece.num_rows
            columns = [] if piece is None else list(piece.columns)
            for result, values in zip(self.results, found, strict=True):
                of_piece = values[start:stop].reshape(stop - start, len(result.columns))
                columns += [pa.array(column) for column in of_piece.T.astype(result.dtype, "C")]
            self.table.append(pa.table(columns, schema=self.schema))
            start = stop


def keeping(
    form: OutputForm,
    path: Path,
    place: Place,
    names: Sequence[str],
    features: Sequence[str] | None,
    results: Sequence[RowResult],
) -> TableForm:
    """Return the form of a table at ``path`` with columns of the input; only metadata are read.

    Parameters
    ----------
    form : OutputForm
        That of the path, which must be a table's.
    path : Path
    place : str or sequence of str
        The input; ``features`` are the columns that it is opened with.
    names : sequence of str
        The columns to keep.
    results : sequence of RowResult
        What stands beside them.

    Raises
    ------
    ConfigError
        The output or the input is no table, the output cannot hold a column, or it would have a name twice.
    InvalidDataError
        As `kept_columns`.
    """
    if not isinstance(form, TableForm):
        raise ConfigError(
            f"--keep is for tables, and {path} is a zarr group; give a name such as "
            f"{path.with_suffix('.parquet')} or {path.with_suffix('.csv')}"
        )
    if not has_columns(place):
        raise ConfigError(
            f"--keep {','.join(names)} names columns of parquet or CSV, but {place_text(place)} is none; "
            "leave it out: the rows of the table are in the order of the input"
        )
    taken = {column for each in results for column in each.columns}
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f"--keep names the column {name!r} twice; give it once")
        if name in taken:
            raise ConfigError(
                f"--keep {name}: the table has a column {name!r} of its own; rename that of "
                f"{place_text(place)}, or leave it out"
            )
    kept = kept_columns(place, names, features)
    for field in kept.schema:
        if not holds(path, field.type):
            raise ConfigError(
                f"--keep {field.name}: the column holds {field.type}, which CSV cannot hold; leave it out, "
                f"or give a name such as {path.with_suffix('.parquet')}"
            )
    return TableForm(kept)
