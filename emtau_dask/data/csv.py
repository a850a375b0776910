"""CSV tables as addressable sources: read once into a scratch file of float64, from which chunks are read.

Parsing is pyarrow's, of the extra ``[parquet]``.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from emtau_dask.dask_config import scratch_place
from emtau_dask.data.npy import NpyHeader, NpyReader
from emtau_dask.data.parquet import check_names, check_single, loaded_pyarrow
from emtau_dask.data.source import RangeSource, even_chunks
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, StorageError, cause_of, short, warn_user
from emtau_dask.storage.errors import read_errors, writing_errors
from emtau_dask.storage.files import ScratchFolder, check_regular, read_regular
from emtau_dask.storage.locations import Place, paths_at, place_text
from emtau_dask.storage.urls import Url, is_url, opened_stream, suffix_of

DELIMITERS = {".csv": ",", ".tsv": "\t"}
BLOCK_BYTES = 2**20
"""Of text that is parsed at a time; a row has no more. pyarrow reads up to 32 blocks ahead."""
DOUBLE = np.dtype(np.float64)


class ReadObserver(Protocol):
    """Told how much of a table is read."""

    def stage(self, name: str, chunks: int) -> None:
        """Reading begins, in about so many chunks."""

    def chunks_done(self, count: int) -> None:
        """So many more are read."""


@dataclass(frozen=True)
class CsvTable:
    """A table of ``size`` bytes, at an absolute path or behind a URL, whose first row are ``fields``.

    ``n_lines`` is an estimate from the beginning.
    """

    place: str | Url
    size: int
    delimiter: str
    fields: list[str]
    n_lines: float

    @classmethod
    def at(cls, path: str) -> CsvTable:
        """Read the beginning of a table; raises `InvalidDataError` where there is none."""
        place: str | Url = Url.of(path) if is_url(path) else str(Path(path).absolute())
        delimiter = DELIMITERS[suffix_of(path).lower()]
        with read_errors(str(place), remote=isinstance(place, Url)):
            if isinstance(place, Url):
                size = place.size_in(place.info())
                beginning = place.read_range(0, min(size, BLOCK_BYTES))
            else:
                size = check_regular(place)
                beginning = read_regular(place, 0, BLOCK_BYTES).tobytes()
            lines = (line.decode("utf-8-sig") for line in io.BytesIO(beginning))
            fields = next(csv.reader(lines, delimiter=delimiter), [])
        if not fields:
            raise InvalidDataError(f"{place} begins with an empty line; a table of columns is wanted.")
        if len(fields) == 1 and ";" in fields[0]:
            raise InvalidDataError(
                f"{place} separates values by ';', which is not read. Convert it once, for example with "
                "pandas.read_csv(path, sep=';', decimal=',').to_parquet('rows.parquet')."
            )
        n_lines = size * (beginning.count(b"\n") + 1) / len(beginning)
        return cls(place, size, delimiter, fields, n_lines)

    @property
    def named(self) -> bool:
        """Whether the first line names the columns: one of its values is no number."""
        return not all(map(_is_number, self.fields))

    def default_names(self) -> list[str] | None:
        """Return the columns but the index that pandas writes, which has no name; None where none has one.

        Warns of an index.
        """
        if not self.named:
            return None
        if self.fields[0]:
            return self.fields
        warn_user(
            f"the first column of {self.place} has no name: it is the index of a DataFrame, and is left out."
        )
        return self.fields[1:]

    def chosen(self, names: Sequence[str] | None) -> list[int]:
        """Return the numbers of columns; raises `InvalidDataError` where there are none of these names."""
        if not self.named and names is not None:
            raise InvalidDataError(f"{self.place} names no columns in its first line; leave out columns.")
        names = self.default_names() if names is None else names
        if names is None:
            return list(range(len(self.fields)))
        check_names(self.fields, names, str(self.place))
        return [self.fields.index(name) for name in names]

    def blocks(self, columns: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Yield the rows from first to last, NaN where a value is empty; raises as `open_csv`."""
        pa = loaded_pyarrow()
        from pyarrow import csv as pa_csv

        names = [str(column) for column in range(len(self.fields))]
        wanted = [names[column] for column in columns]
        with read_errors(str(self.place), remote=isinstance(self.place, Url)):
            try:
                batches = pa_csv.open_csv(
                    opened_stream(self.place, self.size) if isinstance(self.place, Url) else self.place,
                    pa_csv.ReadOptions(
                        column_names=names, skip_rows_after_names=int(self.named), block_size=BLOCK_BYTES
                    ),
                    pa_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                    pa_csv.ConvertOptions(
                        column_types=dict.fromkeys(wanted, pa.float64()), include_columns=wanted
                    ),
                )
                for batch in batches:
                    yield np.column_stack([values.to_numpy(zero_copy_only=False) for values in batch.columns])
            except pa.ArrowInvalid as error:
                raise self._refused(str(error)) from cause_of(error)

    def _refused(self, said: str) -> InvalidDataError:
        """Return the error for what pyarrow says."""
        found = re.search(r"column #(\d+): .*invalid value '(.*)'", said, re.DOTALL)
        if found is None:
            return InvalidDataError(
                f"{self.place} is no table of {len(self.fields)} columns, in rows of at most {BLOCK_BYTES:,}"
                f" bytes: {said}. Correct or convert it."
            )
        name = f"column {self.fields[int(found[1])]!r}" if self.named else f"column number {found[1]}"
        return InvalidDtypeError(
            f"{name} of {self.place} holds text ({short(found[2])}), not real numbers. Choose the numeric "
            "columns (columns=, --columns), or convert it."
        )


@dataclass(frozen=True)
class CsvRows(NpyReader):
    """Reads rows of ``tables``, as messages call them, from the scratch file that they were read into.

    The file is removed with the reader that `open_csv` returns, and not with copies in other processes.
    """

    tables: str

    def identity(self) -> str:
        """Return the size of the file and the shape of the rows."""
        if not Path(self.path).exists():
            raise InvalidDataError(
                f"the rows of {self.tables} were read into {self.path}, which is not there. Set dask's "
                "emtau.scratch to a folder that every worker sees under the same path."
            )
        return f"CSV, {super().identity()}"


def is_csv(place: Place) -> bool:
    """Return whether all of a place is CSV by its ending: ``.csv``, or ``.tsv`` with tabs; see `paths_at`.

    Raises `InvalidDataError` where one cannot be looked at.
    """
    with read_errors(place_text(place), remote=False):
        return all(
            suffix_of(path).lower() in DELIMITERS and (is_url(path) or not Path(path).is_dir())
            for path in paths_at(place)
        )


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def open_csv(
    place: Place,
    columns: Sequence[str] | None,
    *,
    squeeze: bool = False,
    observer: ReadObserver | None = None,
) -> RangeSource:
    """Open CSV tables as a source of float64, in chunks of at most 16 MiB; reads them once.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    columns : sequence of str or None
        Features in this order; by default all columns, as the first table has them, but one without a name,
        which is the index that pandas writes. Columns have no names where the first line holds numbers only.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.
    observer : ReadObserver, optional

    Raises
    ------
    InvalidDataError
        A table cannot be read, has no such columns, or pyarrow is missing.
    InvalidDtypeError
        A column does not begin with a number.
    StorageError
        The scratch file cannot be written, or would not fit.

    Warns
    -----
    UserWarning
        An index is left out.
    """
    loaded_pyarrow()
    tables = [CsvTable.at(path) for path in paths_at(place)]
    names = tables[0].default_names() if columns is None else list(columns)
    chosen = [table.chosen(names) for table in tables]
    width, where = len(chosen[0]), place_text([str(table.place) for table in tables])
    if squeeze:
        check_single(where, names or range(width))
    for table, numbers in zip(tables, chosen, strict=True):
        if len(numbers) != width:
            raise InvalidDataError(
                f"{table.place} has {len(numbers)} feature(s), but {tables[0].place} has {width}. Give the "
                "same features in all tables."
            )
    scratch = _scratch(where, width * sum(table.n_lines for table in tables))
    path = scratch.path.absolute() / "rows"
    try:
        with writing_errors(f"the rows of {where}", path), path.open("xb") as file:
            counts = _written(file, where, tables, chosen, observer)
    except BaseException:
        scratch.remove()
        raise
    shape = (sum(counts),) if squeeze else (sum(counts), width)
    rows = CsvRows(str(path), NpyHeader(shape, by_column=False, dtype=DOUBLE, begin=0), b"", where)
    weakref.finalize(rows, scratch.remove)
    chunks = tuple(chain(*(even_chunks(count, width * DOUBLE.itemsize, where) for count in counts)))
    return RangeSource(rows, shape, DOUBLE, chunks, None if squeeze or names is None else tuple(names))


def _scratch(where: str, n_values: float) -> ScratchFolder:
    """Return a new scratch folder; raises `StorageError` where there is no room for about so many values."""
    place = scratch_place()
    with writing_errors(f"the rows of {where}", place):
        scratch = ScratchFolder("emtau-csv-", place)
        free = shutil.disk_usage(place).free
    if n_values * DOUBLE.itemsize > free:
        raise StorageError(
            f"the rows of {where} take about {n_values * DOUBLE.itemsize / 1e6:,.0f} MB as float64, but "
            f"{place} has {free / 1e6:,.0f} MB free. Free space, or set dask's emtau.scratch "
            "(DASK_EMTAU__SCRATCH=FOLDER before a command) to a folder with more."
        )
    return scratch


def _written(
    file: BinaryIO,
    where: str,
    tables: Sequence[CsvTable],
    chosen: Sequence[Sequence[int]],
    observer: ReadObserver | None,
) -> list[int]:
    """Write the chosen columns of all tables, row by row; return the tables' numbers of rows."""
    if observer is not None:
        observer.stage(f"reading {where}", sum(-(-table.size // BLOCK_BYTES) for table in tables))
    counts = []
    for table, columns in zip(tables, chosen, strict=True):
        counts.append(0)
        for rows in table.blocks(columns):
            file.write(rows.data)
            counts[-1] += len(rows)
            if observer is not None:
                observer.chunks_done(1)
    return counts
