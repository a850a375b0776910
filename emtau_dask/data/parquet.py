"""Parquet by row groups, by pyarrow.

pyarrow reads footers too. But its accessors of row groups and columns do not expect C++ exceptions: a
footer that contradicts itself ends the process there.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.source import Loaded, RangeReader, RangeSource
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, warn_user
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import check_regular, each, paths_below
from emtau_dask.storage.locations import Place, paths_at, place_text
from emtau_dask.storage.urls import Url, is_url, opened_stream, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa


MAGIC = b"PAR1"
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(1, 14)
INTEGERS = (I32, I64, I16)
FIXED = {TRUE: 1, FALSE: 1, BYTE: 1, DOUBLE: 8, UUID: 16}
"""Bytes of an item of a list, or of a field."""
DEPTH = 32
"""The deepest nesting of structs and lists that is read; the format has fewer than ten levels."""
COLUMNS, NUM_ROWS = 1, 3
META_DATA = 3
PHYSICAL_TYPE, PATH_IN_SCHEMA, NUM_VALUES, COMPRESSED_SIZE, STATISTICS = 1, 3, 5, 7, 12
NULL_COUNT = 3
PHYSICAL_TYPES = range(8)
"""From BOOLEAN to FIXED_LEN_BYTE_ARRAY."""
_Wanted = Mapping[int, "_Wanted"]
SLACK, SLACK_BYTES = 1.05, 2**24
"""For what arrow's allocator keeps, and for pages."""
SUFFIXES = (".parquet", ".pq")
ZARR_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray")


# Numbers of fields, as parquet.thrift has them.
ROW_GROUPS = 4
WANTED: _Wanted = {
    ROW_GROUPS: {
        COLUMNS: {
            META_DATA: {
                PHYSICAL_TYPE: {},
                PATH_IN_SCHEMA: {},
                NUM_VALUES: {},
                COMPRESSED_SIZE: {},
                STATISTICS: {NULL_COUNT: {}},
            }
        },
        NUM_ROWS: {},
    }
}
"""The fields that are kept, and those of the structs in them; most of a footer is skipped."""


@dataclass(frozen=True)
class ColumnChunk:
    """The values of one column in one row group: ``stored`` compressed bytes.

    ``path`` joins the names of the column and of what holds it by points. ``n_values`` counts nulls too; it
    is the number of rows, unless the column holds lists. ``null_count`` is None where it is not declared.
    """

    path: str
    n_values: int
    stored: int
    null_count: int | None


@dataclass(frozen=True)
class StoredGroup:
    """One row group; its columns are in the order of the schema's leaves."""

    n_rows: int
    columns: tuple[ColumnChunk, ...]


def row_groups_of(file: BinaryIO, size: int) -> list[StoredGroup]:
    """Return the row groups of a parquet file of ``size`` bytes.

    Raises
    ------
    ValueError
        It is no parquet file, or its footer is damaged.
    """
    if size < 12:
        raise ValueError(f"it has {size} bytes, too few for a parquet file")
    file.seek(size - 8)
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or length > size - 12:
        raise ValueError("its end is not that of a parquet file without encryption")
    file.seek(size - 8 - length)
    try:
        footer = _Compact(file.read(length)).struct(WANTED, DEPTH)
        return [_group(group, size) for group in footer[ROW_GROUPS]]
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"its footer is damaged ({type(error).__name__}: {error})") from error


def _group(group: dict[int, Any], size: int) -> StoredGroup:
    columns = tuple(_column(column[META_DATA], size) for column in group[COLUMNS])
    if not 0 <= group[NUM_ROWS] < 2**48:
        raise ValueError(f"its footer is damaged: a row group has {group[NUM_ROWS]:,} rows")
    return StoredGroup(group[NUM_ROWS], columns)


def _column(meta: dict[int, Any], size: int) -> ColumnChunk:
    path = b".".join(meta[PATH_IN_SCHEMA]).decode()
    if meta[PHYSICAL_TYPE] not in PHYSICAL_TYPES:
        raise ValueError(f"its footer is damaged: a column has the physical type {meta[PHYSICAL_TYPE]}")
    stored = meta[COMPRESSED_SIZE]
    if not 0 <= stored <= size:
        raise ValueError(f"its footer is damaged: of {size:,} bytes, a column has {stored:,}")
    return ColumnChunk(path, int(meta[NUM_VALUES]), stored, meta.get(STATISTICS, {}).get(NULL_COUNT))


def _check_depth(depth: int) -> None:
    if depth < 0:
        raise ValueError("its footer is damaged: it is nested too deeply")


class _Compact:
    """Reads thrift's compact protocol: structs as dicts by field number, lists as lists.

    It never reads past the end of the bytes, whatever lengths they declare.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, wanted: _Wanted, depth: int) -> dict[int, Any]:
        """Return the wanted fields of the struct that begins here."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            if kind in (TRUE, FALSE):
                continue
            inner = wanted.get(number)
            if inner is None:
                self._skip(kind, depth)
            else:
                fields[number] = self._value(kind, inner, depth)
        return fields

    def _value(self, kind: int, wanted: _Wanted, depth: int) -> Any:
        _check_depth(depth)
        if kind in INTEGERS:
            return self._integer()
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind == STRUCT:
            return self.struct(wanted, depth - 1)
        if kind == LIST:
            inner, length = self._list()
            return [self._value(inner, wanted, depth - 1) for _ in range(length)]
        raise ValueError(f"its footer is damaged: it holds a value of type {kind}")

    def _skip(self, kind: int, depth: int) -> None:
        _check_depth(depth)
        if kind in INTEGERS:
            self._varint()
        elif kind == BINARY:
            self._bytes(self._varint())
        elif kind == STRUCT:
            self.struct({}, depth - 1)
        elif kind in (LIST, SET):
            inner, length = self._list()
            for _ in range(length):
                self._skip(inner, depth - 1)
        elif kind in FIXED:
            self._bytes(FIXED[kind])
        else:
            raise ValueError(f"its footer is damaged: it holds a value of type {kind}")

    def _list(self) -> tuple[int, int]:
        """Return the kind of a list's items and their number."""
        head = self._byte()
        length = self._varint() if head >> 4 == 15 else head >> 4
        if length > len(self._data) - self._at:
            raise ValueError(f"its footer is damaged: a list of {length:,} items")
        return head & 15, length

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("its footer is damaged: an integer of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _bytes(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError(f"its footer is damaged: {length:,} bytes where fewer are left")
        self._at += length
        return self._data[self._at - length : self._at]


def loaded_pyarrow() -> Any:
    """Return pyarrow with its parquet module; raises `InvalidDataError` where it is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidDataError(
            "reading parquet needs pyarrow; install it with: pip install 'emtau_dask[parquet]'"
        ) from error
    return pyarrow


@dataclass(frozen=True)
class ParquetPart:
    """One parquet file of ``size`` bytes, at an absolute path or behind a URL."""

    place: str | Url
    size: int

    @property
    def remote(self) -> bool:
        """Whether it is behind a URL."""
        return isinstance(self.place, Url)

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file with pyarrow; any error, here or in the block, becomes an `InvalidDataError`."""
        pq = loaded_pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote):
            source = opened_stream(self.place, self.size) if isinstance(self.place, Url) else self.place
            with pq.ParquetFile(source, pre_buffer=self.remote) as file:
                yield file

    def footer(self) -> tuple[pa.Schema, list[StoredGroup]]:
        """Return the file's schema and its row groups; raises `InvalidDataError` if it is no parquet file."""
        pq = loaded_pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote), self._stream() as stream:
            groups = row_groups_of(stream, self.size)
            with pq.ParquetFile(stream) as file:
                n_columns = file.metadata.num_columns
                if any(len(group.columns) != n_columns for group in groups):
                    raise ValueError(f"not every row group has the schema's {n_columns} columns")
                return file.schema_arrow, groups

    def _stream(self) -> BinaryIO:
        if isinstance(self.place, Url):
            return opened_stream(self.place, self.size)
        return Path(self.place).open("rb")


@dataclass(frozen=True)
class RowGroup:
    """Row group ``number`` of file ``part``, with rows ``start`` to ``stop``.

    The columns that are read have ``stored`` compressed bytes, and may hold nulls if ``nulls``.
    """

    part: int
    number: int
    start: int
    stop: int
    stored: int
    nulls: bool


@dataclass(frozen=True)
class ParquetReader(RangeReader):
    """Reads rows from the row groups that hold them; a null is NaN, whatever the column's type.

    ``dtype`` is that of rows without nulls, ``decoded`` the bytes of a row as pyarrow holds it. With
    ``squeeze``, rows of the single column have shape (n,).
    """

    parts: tuple[ParquetPart, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    decoded: int
    squeeze: bool

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows; the bytes are the compressed sizes of the column chunks read."""
        rows: NDArray[Any] | None = None
        touched = self._touched(start, stop)
        for group in touched:
            with self.parts[group.part].opened() as file:
                table = file.read_row_group(group.number, columns=list(self.columns))
                if table.num_rows != group.stop - group.start:
                    raise ValueError(f"row group {group.number} has {table.num_rows} rows now")
                if rows is None:  # Only now is it known that the file has as many rows as it declares.
                    rows = self._room(start, stop)
                rows = self._filled(rows, start, group, table)
        if rows is None:
            rows = self._room(start, stop)
        return Loaded(rows[:, 0] if self.squeeze else rows, sum(group.stored for group in touched))

    def _room(self, start: int, stop: int) -> NDArray[Any]:
        return np.empty((stop - start, len(self.columns)), dtype=self.dtype)

    def _filled(self, rows: NDArray[Any], start: int, group: RowGroup, table: pa.Table) -> NDArray[Any]:
        """Return ``rows``, which begin at ``start``, with those of a group filled in."""
        if any(table.column(name).null_count for name in self.columns):
            rows = rows.astype(np.float64, copy=False)
        inside = slice(max(start - group.start, 0), start + len(rows) - group.start)
        first = max(group.start - start, 0)
        for j, name in enumerate(self.columns):
            values = table.column(name).to_numpy()[inside]
            rows[first : first + len(values), j] = values
        return rows

    def _touched(self, start: int, stop: int) -> list[RowGroup]:
        return [group for group in self.groups if group.stop > start and group.start < stop]

    def identity(self) -> str:
        """Return a digest of the files' sizes and their numbers of rows and row groups."""
        shapes = each(_shape_of, [part.place for part in self.parts])
        return f"{len(shapes)} parquet file(s), SHA-256 {sha256(repr(shapes).encode()).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds.

        That is the rows and, for one row group at a time, its stored bytes (twice from a network, also in
        pieces), its decoded rows, and the columns that are being decoded.
        """
        touched = self._touched(start, stop)
        nulls = any(group.nulls for group in touched)
        rows = (stop - start) * len(self.columns) * (8 if nulls else self.dtype.itemsize)
        side_by_side = min(len(self.columns), os.cpu_count() or 1)
        width = self.decoded * (1 + side_by_side / len(self.columns))
        groups = [
            group.stored * (1 + self.parts[group.part].remote) + (group.stop - group.start) * width
            for group in touched
        ]
        return math.ceil(SLACK * (rows + max(groups, default=0))) + SLACK_BYTES


def _shape_of(place: str | Url) -> tuple[int, int, int]:
    """Return the numbers of bytes, rows and row groups of the file that this process sees."""
    part = part_at(place)
    if part is None:
        raise InvalidDataError(f"the parquet file {place} is a folder now; open the data anew.")
    with part.opened() as file:
        return part.size, file.metadata.num_rows, file.metadata.num_row_groups


def part_at(place: str | Url) -> ParquetPart | None:
    """Return a file with the size that it has now; None where it is a folder."""
    with read_errors(f"the parquet file {place}", remote=isinstance(place, Url)):
        if not isinstance(place, Url):
            return None if Path(place).is_dir() else ParquetPart(place, check_regular(place))
        info = place.info()
        if info["type"] == "directory":
            return None
        return ParquetPart(place, place.size_in(info))


def _parts(place: Place) -> list[ParquetPart]:
    """Return the files of a place, see `paths_at`, those of a folder in name order."""
    return [part for path in paths_at(place) for part in _parts_of(path)]


def _parts_of(path: str) -> list[ParquetPart]:
    """Return the file, or all files of a folder in name order; raises `InvalidDataError` for none."""
    place = Url.of(path) if is_url(path) else str(Path(path).absolute())
    one = part_at(place) if suffix_of(path) in SUFFIXES else None
    if one is not None:
        return [one]
    if isinstance(place, Url):
        with read_errors(str(place), remote=True):
            parts = [ParquetPart(place / name, size) for name, size in place.find(".parquet")]
    else:
        with read_errors(path, remote=False):
            files = sorted(_files_below(place), key=lambda file: Path(file).parts)
        parts = [ParquetPart(file, check_regular(file)) for file in files]
    if not parts:
        raise InvalidDataError(f"the folder {path} holds no file named *.parquet.")
    return parts


def _row_group(
    part: int, number: int, start: int, group: StoredGroup, columns: Sequence[str], where: str
) -> RowGroup:
    """Return a row group; raises `InvalidDataError` unless its columns have as many values as it has rows.

    pyarrow trusts the number of rows: it would read a part of a column, or of the one after it.
    """
    chunks = [chunk for chunk in group.columns if chunk.path in columns]
    for chunk in chunks:
        if chunk.n_values != group.n_rows:
            raise InvalidDataError(
                f"the parquet file {where} contradicts itself: of {group.n_rows:,} rows, its column "
                f"{chunk.path!r} has {chunk.n_values:,}. Restore it, or write it again."
            )
    nulls = any(chunk.null_count != 0 for chunk in chunks)
    stored = sum(chunk.stored for chunk in chunks)
    return RowGroup(part, number, start, start + group.n_rows, stored, nulls)


def _column_dtype(field: pa.Field, path: str) -> np.dtype[Any]:
    pa = loaded_pyarrow()
    kind = field.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise InvalidDtypeError(
            f"column {field.name!r} of {path} holds {kind}, not real numbers. Choose the numeric columns "
            "(columns=, --columns), or convert it."
        )
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def is_parquet(place: Place) -> bool:
    """Return whether all of a place is parquet: files, or folders that hold any at any depth; see `paths_at`.

    Where a suffix decides, nothing is opened. Raises `InvalidDataError` where one cannot be looked at.
    """
    return all(_is_parquet(path) for path in paths_at(place))


def _is_parquet(path: str) -> bool:
    if suffix_of(path) in SUFFIXES:
        return True
    if is_url(path) and suffix_of(path) in (".zarr", ".npy"):
        return False
    place = Url.of(path) if is_url(path) else Path(path)
    with read_errors(str(place), remote=isinstance(place, Url)):
        if any((place / name).exists() for name in ZARR_DOCUMENTS):
            return False
        if isinstance(place, Url):
            return bool(place.find(".parquet"))
        return place.is_dir() and any(_files_below(place))


def _files_below(folder: str | Path) -> Iterator[str]:
    return (path for path in paths_below(folder) if path.endswith(".parquet"))


def parquet_names(place: Place) -> tuple[str, ...]:
    """Return the columns that are features by default; warns and raises as `open_parquet`."""
    part = _parts(place)[0]
    schema, _ = part.footer()
    return _features(schema, str(part.place))


def _features(schema: pa.Schema, place: str) -> tuple[str, ...]:
    """Return the names of all columns but those that hold the index of a DataFrame; warns of these."""
    index = _index_columns(schema)
    chosen = tuple(name for name in schema.names if name not in index)
    left_out = ", ".join(repr(name) for name in schema.names if name in index)
    if left_out and not chosen:
        raise InvalidDataError(
            f"{place} has no columns but the index {left_out}. Name it in columns to use it."
        )
    if left_out:
        warn_user(
            f"the column {left_out} is the index of the DataFrame in {place}, and is left out. To keep it, "
            "name it in columns, with all others that you want."
        )
    return chosen


def _index_columns(schema: pa.Schema) -> frozenset[str]:
    """Return the columns that pandas' metadata, if there are any, name as the index of a DataFrame."""
    empty: frozenset[str] = frozenset()
    try:
        described = schema.pandas_metadata
    except (ValueError, RecursionError):  # they are no JSON
        return empty
    names = described.get("index_columns") if isinstance(described, dict) else None
    return (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
    )


def _check_names(schema: pa.Schema, chosen: Sequence[str], place: str) -> None:
    """Raise `InvalidDataError` unless the file has every chosen column once."""
    if not chosen:
        raise InvalidDataError(f"{place} has no columns.")
    found = Counter(schema.names)
    for name in chosen:
        if found[name] != 1:
            how = "no column" if not found[name] else f"{found[name]} columns"
            raise InvalidDataError(f"{place} has {how} {name!r}; its columns are {', '.join(schema.names)}.")


def open_parquet(place: Place, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open parquet files as a source, those of a folder in name order.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    columns : sequence of str or None
        Features in this order; by default all columns, as the first file has them, but those that pandas'
        metadata name as the index of a DataFrame.
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
        An index is left out.
    """
    loaded_pyarrow()
    parts = _parts(place)
    groups: list[RowGroup] = []
    chosen: tuple[str, ...] = () if columns is None else tuple(columns)
    dtypes: list[np.dtype[Any]] = []
    end = 0
    for i, (schema, stored) in enumerate(each(ParquetPart.footer, parts)):
        where = str(parts[i].place)
        chosen = chosen or _features(schema, where)
        _check_names(schema, chosen, where)
        dtypes += [_column_dtype(schema.field(name), where) for name in chosen]
        for number, group in enumerate(stored):
            groups.append(_row_group(i, number, end, group, chosen, where))
            end = groups[-1].stop
    if squeeze and len(chosen) != 1:
        raise InvalidDataError(
            f"{place_text(place)}: one column is wanted, but {len(chosen)} are named: {chosen}."
        )
    dtype = np.result_type(*dtypes)
    decoded = len(chosen) * max(kind.itemsize for kind in dtypes)
    reader = ParquetReader(tuple(parts), tuple(groups), chosen, dtype, decoded, squeeze)
    shape = (end,) if squeeze else (end, len(chosen))
    rows = tuple(group.stop - group.start for group in groups)
    return RangeSource(reader, shape, dtype, rows, None if squeeze else chosen)
