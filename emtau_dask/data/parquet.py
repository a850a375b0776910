"""Parquet files as a source: rows read by row groups with pyarrow."""

from __future__ import annotations

import csv
import io
import math
import os
import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.parquet_files import ParquetPart, part_at, partition_columns, parts_at
from emtau_dask.data.source import Loaded, RangeReader, RangeSource
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, counted, did_you_mean, listed, warn_user
from emtau_dask.storage.files import each
from emtau_dask.storage.locations import Place, place_text
from emtau_dask.storage.tables import loaded_pyarrow
from emtau_dask.storage.urls import Url

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


SLACK, SLACK_BYTES = 1.05, 2**24
"""Factor for what arrow's allocator keeps, and bytes for pages."""
MAX_READY = 400
"""Maximum characters of the option that chooses numeric columns in a message."""


@dataclass(frozen=True)
class RowGroup:
    """Row group ``number`` of a file, with rows ``start`` to ``stop``.

    The columns that are read have ``stored_bytes`` compressed bytes, and may hold nulls if ``nulls``. A read
    needs ``buffer_bytes`` in addition to the rows: the stored bytes (twice from a network, which delivers
    pieces), the decoded columns, and those that are being decoded.
    """

    part: ParquetPart
    number: int
    start: int
    stop: int
    stored_bytes: int
    nulls: bool
    buffer_bytes: int


@dataclass(frozen=True)
class ParquetReader(RangeReader):
    """Reads rows from the row groups that hold them; a null becomes NaN, whatever the column's type.

    ``dtype`` is the type of rows without nulls. The columns ``partitions`` are given by the names of folders.
    With ``squeeze``, rows of the single column have shape (n,).
    """

    parts: tuple[ParquetPart, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    squeeze: bool
    partitions: frozenset[str] = frozenset()

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows; the bytes are the compressed sizes of the column chunks read."""
        rows: NDArray[Any] | None = None
        touched, stored = self._touched(start, stop), self._stored
        for group in touched:
            with group.part.opened() as file:
                table = file.read_row_group(group.number, columns=stored)
                if table.num_rows != group.stop - group.start:
                    raise ValueError(f"row group {group.number} has {table.num_rows} rows now")
                if rows is None:  # Now the file is known to have as many rows as it declares.
                    rows = self._empty_rows(start, stop)
                rows = self._fill(rows, start, group, table)
        if rows is None:
            rows = self._empty_rows(start, stop)
        return Loaded(rows[:, 0] if self.squeeze else rows, sum(group.stored_bytes for group in touched))

    @property
    def _stored(self) -> list[str]:
        return [name for name in self.columns if name not in self.partitions]

    def _empty_rows(self, start: int, stop: int) -> NDArray[Any]:
        return np.empty((stop - start, len(self.columns)), dtype=self.dtype)

    def _fill(self, rows: NDArray[Any], start: int, group: RowGroup, table: pa.Table) -> NDArray[Any]:
        """Fill the rows of a group into ``rows``, which begin at row ``start``, and return them.

        They are converted to float64 first if the group has nulls.
        """
        if any(table.column(name).null_count for name in self._stored):
            rows = rows.astype(np.float64, copy=False)
        inside = slice(max(start - group.start, 0), start + len(rows) - group.start)
        first = max(group.start - start, 0)
        last = min(group.stop - start, len(rows))
        partition = dict(group.part.partition)
        for j, name in enumerate(self.columns):
            if name in self.partitions:
                value = partition.get(name)
                rows[first:last, j] = np.nan if value is None else int(value)
            else:
                rows[first:last, j] = table.column(name).to_numpy()[inside]
        return rows

    def _touched(self, start: int, stop: int) -> tuple[RowGroup, ...]:
        first = bisect_right(self.groups, start, key=lambda group: group.stop)
        return self.groups[first : bisect_left(self.groups, stop, key=lambda group: group.start)]

    def identity(self) -> str:
        """Return a digest of the files' sizes and their numbers of rows and row groups."""
        shapes = each(_shape_of, [part.place for part in self.parts])
        return f"{len(shapes)} parquet file(s), SHA-256 {sha256(repr(shapes).encode()).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds: the rows, and one row group at a time."""
        touched = self._touched(start, stop)
        width = 8 if any(group.nulls for group in touched) else self.dtype.itemsize
        buffers = max((group.buffer_bytes for group in touched), default=0)
        return math.ceil(SLACK * ((stop - start) * len(self.columns) * width + buffers)) + SLACK_BYTES


def _shape_of(place: str | Url) -> tuple[int, int, int]:
    """Return the numbers of bytes, rows and row groups of a file, as this process sees it."""
    part = part_at(place)
    if part is None:
        raise InvalidDataError(f"the parquet file {place} is a folder now; open the data again.")
    with part.opened() as file:
        return part.size, file.metadata.num_rows, file.metadata.num_row_groups


def _row_groups(
    part: ParquetPart, metadata: pq.FileMetaData, columns: Mapping[str, np.dtype[Any]], start: int
) -> Iterator[RowGroup]:
    """Yield the row groups of a file whose rows begin at ``start``.

    Raises `InvalidDataError` if a column has more or fewer values than its row group has rows: pyarrow would
    read too few values, or those of the next row group.
    """
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    leaves = [paths.index(name) for name in columns]
    widest = max((dtype.itemsize for dtype in columns.values()), default=0)
    decoded = widest * (len(columns) + min(len(columns), os.cpu_count() or 1))
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(leaf) for leaf in leaves]
        for name, chunk in zip(columns, chunks, strict=True):
            if chunk.num_values != group.num_rows:
                raise InvalidDataError(
                    f"the parquet file {part.place} is damaged: its column {name!r} has "
                    f"{chunk.num_values:,} values for {group.num_rows:,} rows. Restore it, or write it again."
                )
        stored = sum(chunk.total_compressed_size for chunk in chunks)
        nulls = not all(_has_no_nulls(chunk) for chunk in chunks)
        buffers = stored * (1 + part.remote) + group.num_rows * decoded
        yield RowGroup(part, number, start, start + group.num_rows, stored, nulls, buffers)
        start += group.num_rows


def _has_no_nulls(chunk: pq.ColumnChunkMetaData) -> bool:
    statistics = chunk.statistics
    return statistics is not None and statistics.has_null_count and statistics.null_count == 0


def _column_dtypes(schema: pa.Schema, names: Sequence[str], path: str) -> dict[str, np.dtype[Any]]:
    """Return the types of columns; raises `InvalidDtypeError` if some are not of real numbers."""
    types = loaded_pyarrow().types
    kinds = {name: schema.field(name).type for name in names}
    numeric = [
        name
        for name, kind in kinds.items()
        if types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)
    ]
    if others := [name for name in names if name not in numeric]:
        held = listed(dict.fromkeys(str(kinds[name]) for name in others))
        raise InvalidDtypeError(not_numbers_text(path, others, numeric, held))
    return {name: np.dtype(kind.to_pandas_dtype()) for name, kind in kinds.items()}


def not_numbers_text(place: str, others: Sequence[str], numeric: Sequence[str], held: str) -> str:
    """Return the message for columns ``others`` that hold something else than numbers.

    It has the ``numeric`` ones as an option and an argument, if these are not too long.
    """
    named = f"column{'s' * (len(others) > 1)} {listed(map(repr, others))} of {place}"
    option = shlex.quote(comma_separated(numeric))
    ready = f": --columns {option}, columns={list(numeric)!r}"
    if not numeric or len(option) > MAX_READY:
        ready = " (columns=, --columns)"
    return (
        f"{named} hold{'s' * (len(others) == 1)} {held}, not real numbers. Choose the numeric columns{ready};"
        f" or convert {'them' if len(others) > 1 else 'it'}."
    )


def comma_separated(names: Sequence[str]) -> str:
    """Return names as a line of CSV, the form of ``--columns``."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names)
    return line.getvalue()


def _checked_partitions(
    columns: Mapping[str, np.dtype[Any] | None], chosen: Sequence[str], part: ParquetPart
) -> Iterator[np.dtype[Any]]:
    """Yield the types of chosen columns that names of folders give; raises `InvalidDtypeError` for text."""
    for name in chosen:
        if name in columns:
            dtype = columns[name]
            if dtype is None:
                raise InvalidDtypeError(
                    f"column {name!r} of {part.place} is not of whole numbers of 32 bits: a folder is named "
                    f"{name}={dict(part.partition).get(name)}. Remove it from columns."
                )
            yield dtype


def parquet_names(place: Place) -> tuple[str, ...]:
    """Return the columns that are features by default; warns and raises as `open_parquet`."""
    parts, _ = parts_at(place)
    schema, _ = parts[0].footer()
    return _features(schema, parts, partition_columns(parts))


def _features(
    schema: pa.Schema, parts: Sequence[ParquetPart], partitions: Mapping[str, np.dtype[Any] | None]
) -> tuple[str, ...]:
    """Return the columns that are features by default: those of the file without an index, then of folders.

    Warns of an index, of text in the names of folders, and of a number that is the same in all of them.
    """
    place = str(parts[0].place)
    numbers = [name for name, dtype in partitions.items() if dtype and name not in schema.names]
    text = [name for name, dtype in partitions.items() if dtype is None and name not in schema.names]
    if text:
        warn_user(
            f"the names of the folders of {place} give {counted(len(text), 'column')} that "
            f"are not whole numbers of 32 bits and are left out: {', '.join(map(repr, text))}."
        )
    for name in numbers:
        if len({dict(part.partition).get(name) for part in parts}) == 1:
            warn_user(
                f"the names of the folders of {place} give all rows the same {name!r}: a constant feature. "
                "To leave it out, name the other columns in columns."
            )
    return (*_stored_features(schema, place), *numbers)


def _stored_features(schema: pa.Schema, place: str) -> tuple[str, ...]:
    index = _index_columns(schema)
    chosen = tuple(name for name in schema.names if name not in index)
    ignored = ", ".join(repr(name) for name in schema.names if name in index)
    if ignored and not chosen:
        raise InvalidDataError(
            f"{place} has no columns but the index {ignored}. Name it in columns to use it."
        )
    if ignored:
        warn_user(
            f"the column {ignored} is the index of the DataFrame in {place}, and is left out. To keep it, "
            "name it in columns, with all others that you want."
        )
    return chosen


def _index_columns(schema: pa.Schema) -> frozenset[str]:
    """Return the columns that are the index of a DataFrame, as the metadata of pandas name them."""
    try:
        metadata = schema.pandas_metadata
    except (ValueError, RecursionError):  # The metadata are not JSON.
        return frozenset()
    names = metadata.get("index_columns") if isinstance(metadata, dict) else None
    return (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
    )


def check_names(found: Sequence[str], chosen: Sequence[str], place: str) -> None:
    """Raise `InvalidDataError` unless a table has every chosen column exactly once."""
    if not chosen:
        raise InvalidDataError(f"{place} has no columns.")
    for name in chosen:
        if found.count(name) != 1:
            how = f"{found.count(name) or 'no'} column{'s' * (name in found)}"
            near = "" if name in found else did_you_mean(name, found)
            raise InvalidDataError(f"{place} has {how} {name!r}.{near} Its columns are {', '.join(found)}.")


def check_stored_names(place: Place, chosen: Sequence[str]) -> None:
    """Raise `InvalidDataError` unless the first parquet file of a place has every chosen column once."""
    parts, _ = parts_at(place)
    schema, _ = parts[0].footer()
    of_folders = [name for name in partition_columns(parts) if name not in schema.names]
    check_names([*schema.names, *of_folders], chosen, str(parts[0].place))


def check_single(place: str, chosen: Sequence[object]) -> None:
    """Raise `InvalidDataError` unless one column is chosen."""
    if len(chosen) != 1:
        raise InvalidDataError(f"{place}: name one column, not {len(chosen)}: {tuple(chosen)}.")


def open_parquet(place: Place, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open parquet files as a source; those of a folder in dask's natural order, without hidden ones.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    columns : sequence of str or None
        Features in this order. By default all columns of the first file except the index of a DataFrame, then
        the columns of whole numbers that the names of folders give. A column of the files takes precedence
        over one of folders with the same name.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.

    Raises
    ------
    InvalidDataError
        Nothing readable is there, pyarrow is missing, or columns differ between files.
    InvalidDtypeError
        A column does not hold real numbers.

    Warns
    -----
    UserWarning
        An index, or text in the names of folders, is left out.
    """
    loaded_pyarrow()
    parts, n_ignored = parts_at(place)
    partitions = partition_columns(parts)
    folder_columns: dict[str, np.dtype[Any] | None] = {}
    groups: list[RowGroup] = []
    chosen: tuple[str, ...] = () if columns is None else tuple(columns)
    dtypes: list[np.dtype[Any]] = []
    for part, (schema, metadata) in zip(parts, each(ParquetPart.footer, parts), strict=True):
        where = str(part.place)
        chosen = chosen or _features(schema, parts, partitions)
        if part is parts[0]:
            folder_columns = {name: partitions[name] for name in partitions if name not in schema.names}
        check_names([*schema.names, *folder_columns], chosen, where)
        stored = [name for name in chosen if name not in folder_columns]
        typed = _column_dtypes(schema, stored, where)
        groups += _row_groups(part, metadata, typed, groups[-1].stop if groups else 0)
        dtypes += [*typed.values(), *_checked_partitions(folder_columns, chosen, part)]
    if squeeze:
        check_single(place_text(place), chosen)
    dtype = np.result_type(*dtypes)
    reader = ParquetReader(tuple(parts), tuple(groups), chosen, dtype, squeeze, frozenset(folder_columns))
    rows = tuple(group.stop - group.start for group in groups)
    shape = (sum(rows),) if squeeze else (sum(rows), len(chosen))
    names = None if squeeze else chosen
    return RangeSource(reader, shape, dtype, rows, names, _files_text(place, len(parts), n_ignored))


def _files_text(place: Place, n_files: int, n_ignored: int) -> str:
    """Return a text for people about the files that are read of a place; "" for a single file."""
    if n_files == 1 and not n_ignored:
        return ""
    others = f"; not read: {counted(n_ignored, 'other file')}" if n_ignored else ""
    return f"{counted(n_files, 'parquet file')} of {place_text(place)}{others}"
