"""Parquet by row groups, by pyarrow.

Folders below the given one that are named ``name=value`` give their files a column, as Hive has it.
"""

from __future__ import annotations

import difflib
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

import numpy as np
from dask.utils import natural_sort_key
from numpy.typing import NDArray

from emtau_dask.data.source import Loaded, RangeReader, RangeSource
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, warn_user
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import check_regular, each, paths_below
from emtau_dask.storage.locations import ENDINGS_OF_ROWS, PARQUET, Place, paths_at, place_text
from emtau_dask.storage.tables import loaded_pyarrow
from emtau_dask.storage.urls import Url, is_url, opened_stream, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


END_BYTES = 8
"""At a file's end: the length of its footer, and the magic number."""
SIGNATURE_BYTES = 28
"""Of a footer that is signed and not encrypted; it is counted in the length."""
SLACK, SLACK_BYTES = 1.05, 2**24
"""For what arrow's allocator keeps, and for pages."""
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
LEAST_INT32, MOST_INT32 = -(2**31), 2**31 - 1
"""Whole numbers in the names of folders are of int32, as pyarrow infers it; others are text."""
ZARR_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray")


@dataclass(frozen=True)
class ParquetPart:
    """One parquet file of ``size`` bytes, at an absolute path or behind a URL.

    ``partition`` are the names and values that folders above it give; None is a null.
    """

    place: str | Url
    size: int
    partition: tuple[tuple[str, str | None], ...] = ()

    @property
    def remote(self) -> bool:
        """Whether it is behind a URL."""
        return isinstance(self.place, Url)

    @contextmanager
    def opened(self) -> Iterator[pq.ParquetFile]:
        """Open the file with pyarrow; any error, here or in the block, becomes an `InvalidDataError`."""
        parquet = loaded_pyarrow().parquet
        with (
            read_errors(f"the parquet file {self.place}", remote=self.remote),
            arrow_input(self.place, self.size) as source,
            parquet.ParquetFile(source, pre_buffer=self.remote) as file,
        ):
            yield file

    def footer(self) -> tuple[pa.Schema, pq.FileMetaData]:
        """Return the file's schema and metadata.

        Raises `InvalidDataError` if it is no parquet file, or encrypted. pyarrow refuses that only where the
        whole footer is encrypted. Where it is signed, the description of a column would end the process.
        """
        parquet = loaded_pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote), self._stream() as stream:
            with parquet.ParquetFile(stream) as file:
                schema, metadata = file.schema_arrow, file.metadata
            stream.seek(self.size - END_BYTES)
            if int.from_bytes(stream.read(4), "little") == metadata.serialized_size + SIGNATURE_BYTES:
                raise ValueError("its columns are encrypted")
            return schema, metadata

    def _stream(self) -> BinaryIO:
        if isinstance(self.place, Url):
            return opened_stream(self.place, self.size)
        return Path(self.place).open("rb")


@contextmanager
def arrow_input(place: str | Url, size: int) -> Iterator[str | BinaryIO]:
    """Open what pyarrow reads: a path, or a stream behind a URL or of a file whose name is not UTF-8."""
    if isinstance(place, Url):
        yield opened_stream(place, size)
        return
    try:
        place.encode()
    except UnicodeEncodeError:
        with Path(place).open("rb") as stream:
            yield stream
    else:
        yield place


@dataclass(frozen=True)
class RowGroup:
    """Row group ``number`` of a file, with rows ``start`` to ``stop``.

    The columns that are read have ``stored`` compressed bytes, and may hold nulls if ``nulls``. To read them
    takes ``held`` bytes beside the rows: those that are stored (twice from a network, also in pieces), the
    decoded columns, and those that are being decoded.
    """

    part: ParquetPart
    number: int
    start: int
    stop: int
    stored: int
    nulls: bool
    held: int


@dataclass(frozen=True)
class ParquetReader(RangeReader):
    """Reads rows from the row groups that hold them; a null is NaN, whatever the column's type.

    ``dtype`` is that of rows without nulls. The names of folders give the columns ``partitions``. With
    ``squeeze``, rows of the single column have shape (n,).
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
                if rows is None:  # Only now is it known that the file has as many rows as it declares.
                    rows = self._room(start, stop)
                rows = self._filled(rows, start, group, table)
        if rows is None:
            rows = self._room(start, stop)
        return Loaded(rows[:, 0] if self.squeeze else rows, sum(group.stored for group in touched))

    @property
    def _stored(self) -> list[str]:
        return [name for name in self.columns if name not in self.partitions]

    def _room(self, start: int, stop: int) -> NDArray[Any]:
        return np.empty((stop - start, len(self.columns)), dtype=self.dtype)

    def _filled(self, rows: NDArray[Any], start: int, group: RowGroup, table: pa.Table) -> NDArray[Any]:
        """Return ``rows``, which begin at ``start``, with those of a group filled in."""
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
        held = max((group.held for group in touched), default=0)
        return math.ceil(SLACK * ((stop - start) * len(self.columns) * width + held)) + SLACK_BYTES


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


def parts_at(place: Place) -> tuple[list[ParquetPart], int]:
    """Return the files of a place, see `paths_at`, and how many of its folders are left out."""
    paths = paths_at(place)
    found = [_parts_of(path) for path in paths]
    left_out = sum(others for _, others in found)
    if len(paths) == 1:
        return found[0][0], left_out
    folders = [_folders(path) for path in paths]
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False)))
    above = (_partition("/".join([*names[shared:], ""])) for names in folders)
    parts = [
        replace(part, partition=(*given, *part.partition))
        for (of_path, _), given in zip(found, above, strict=True)
        for part in of_path
    ]
    return parts, left_out


def _folders(path: str) -> list[str]:
    """Return the names in a path or URL but that of a file."""
    names = (path.partition("?")[0] if is_url(path) else path).split("/")
    return names[:-1] if suffix_of(path) in PARQUET.endings else names


def _parts_of(path: str) -> tuple[list[ParquetPart], int]:
    """Return the file, or those of a folder, see `_below_folder`; raises `InvalidDataError` for none."""
    place = Url.of(path) if is_url(path) else str(Path(path).absolute())
    one = part_at(place) if suffix_of(path) in PARQUET.endings else None
    if one is not None:
        return [one], 0
    with read_errors(str(place), remote=isinstance(place, Url)):
        if isinstance(place, Url):
            sizes, left_out = _below_url(place)
            parts = [ParquetPart(place / name, size, _partition(name)) for name, size in sizes]
        else:
            files, left_out = _below_folder(place)
            parts = [
                ParquetPart(file, check_regular(file), _partition(file.removeprefix(place))) for file in files
            ]
    if not parts:
        raise InvalidDataError(f"the folder {path} holds no file named *.parquet.")
    return parts, left_out


def _partition(name: str) -> tuple[tuple[str, str | None], ...]:
    """Return what the folders in the name of a file give it, by name."""
    pairs = [folder.split("=", 1) for folder in name.split("/")[:-1] if "=" in folder]
    return tuple((unquote(key), None if value == NULL_PARTITION else unquote(value)) for key, value in pairs)


def partition_columns(parts: Sequence[ParquetPart]) -> dict[str, np.dtype[Any] | None]:
    """Return the type of each column that the names of folders give; None for what is no whole number.

    Files that lack one have a null in it.
    """
    names = dict.fromkeys(name for part in parts for name, _ in part.partition)
    values = {name: [dict(part.partition).get(name) for part in parts] for name in names}
    return {name: _partition_dtype(found) for name, found in values.items()}


def _partition_dtype(values: Sequence[str | None]) -> np.dtype[Any] | None:
    given = [value for value in values if value is not None]
    if not given or not all(value.isascii() and value.removeprefix("-").isdecimal() for value in given):
        return None
    if not all(LEAST_INT32 <= int(value) <= MOST_INT32 for value in given):
        return None
    return np.dtype(np.float64 if len(given) < len(values) else np.int32)


def _below_folder(folder: str) -> tuple[list[str], int]:
    """Return the parquet files at any depth below a folder, in dask's natural order, and how many others are.

    Others are hidden files, and those with other endings.
    """
    found = [os.path.relpath(path, folder) for path in paths_below(folder)]
    names = sorted(filter(_is_read, found), key=natural_sort_key)
    return [f"{folder}/{name}" for name in names], len(found) - len(names)


def _below_url(folder: Url) -> tuple[list[tuple[str, int]], int]:
    """Return what `_below_folder` does, as names and sizes."""
    sizes = folder.find()
    names = sorted(filter(_is_read, sizes), key=natural_sort_key)
    return [(name, sizes[name]) for name in names], len(sizes) - len(names)


def _is_read(name: str) -> bool:
    """Return whether a file is parquet, and no part of its name is one that dask and pyarrow leave out."""
    return name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in name.split("/"))


def _row_groups(
    part: ParquetPart, metadata: pq.FileMetaData, columns: Mapping[str, np.dtype[Any]], start: int
) -> Iterator[RowGroup]:
    """Yield the row groups of a file whose rows begin at ``start``.

    Raises `InvalidDataError` for a column with more or fewer values than its row group has rows: pyarrow
    would read a part of it, or of the next.
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
                    f"the parquet file {part.place} contradicts itself: of {group.num_rows:,} rows, its "
                    f"column {name!r} has {chunk.num_values:,}. Restore it, or write it again."
                )
        stored = sum(chunk.total_compressed_size for chunk in chunks)
        nulls = not all(_has_no_nulls(chunk) for chunk in chunks)
        held = stored * (1 + part.remote) + group.num_rows * decoded
        yield RowGroup(part, number, start, start + group.num_rows, stored, nulls, held)
        start += group.num_rows


def _has_no_nulls(chunk: pq.ColumnChunkMetaData) -> bool:
    known = chunk.statistics
    return known is not None and known.has_null_count and known.null_count == 0


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


def _checked_partitions(
    columns: Mapping[str, np.dtype[Any] | None], chosen: Sequence[str], part: ParquetPart
) -> Iterator[np.dtype[Any]]:
    """Yield the types of those chosen columns that the names of folders give; refuse text."""
    for name in chosen:
        if name in columns:
            dtype = columns[name]
            if dtype is None:
                raise InvalidDtypeError(
                    f"column {name!r} of {part.place} is not of whole numbers of 32 bits: a folder is named "
                    f"{name}={dict(part.partition).get(name)}. Leave it out of columns."
                )
            yield dtype


def is_parquet(place: Place) -> bool:
    """Return whether all of a place is parquet: files, or folders that hold any at any depth; see `paths_at`.

    Where a suffix decides, nothing is opened. Raises `InvalidDataError` where one cannot be looked at.
    """
    return all(_is_parquet(path) for path in paths_at(place))


def _is_parquet(path: str) -> bool:
    if suffix_of(path) in PARQUET.endings:
        return True
    if is_url(path) and suffix_of(path) in ENDINGS_OF_ROWS:
        return False
    place = Url.of(path) if is_url(path) else Path(path)
    with read_errors(str(place), remote=isinstance(place, Url)):
        if any((place / name).exists() for name in ZARR_DOCUMENTS):
            return False
        if isinstance(place, Url):
            return bool(_below_url(place)[0])
        return place.is_dir() and bool(_below_folder(str(place))[0])


def parquet_names(place: Place) -> tuple[str, ...]:
    """Return the columns that are features by default; warns and raises as `open_parquet`."""
    parts, _ = parts_at(place)
    schema, _ = parts[0].footer()
    return _features(schema, parts, partition_columns(parts))


def _features(
    schema: pa.Schema, parts: Sequence[ParquetPart], partitions: Mapping[str, np.dtype[Any] | None]
) -> tuple[str, ...]:
    """Return the names of all columns of numbers, those of folders last, but the index of a DataFrame.

    Warns of an index, of text in the names of folders, and of a number that is the same in all of them.
    """
    place = str(parts[0].place)
    numbers = [name for name, dtype in partitions.items() if dtype and name not in schema.names]
    text = [name for name, dtype in partitions.items() if dtype is None and name not in schema.names]
    if text:
        warn_user(
            f"the names of folders above {place} give it the column(s) {', '.join(map(repr, text))}, which "
            "hold no whole numbers of 32 bits and are left out."
        )
    for name in numbers:
        if len({dict(part.partition).get(name) for part in parts}) == 1:
            warn_user(
                f"the names of folders above {place} give all rows the same {name!r}: a constant feature. "
                "Name the others in columns to leave it out."
            )
    return (*_stored_features(schema, place), *numbers)


def _stored_features(schema: pa.Schema, place: str) -> tuple[str, ...]:
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


def check_names(found: Sequence[str], chosen: Sequence[str], place: str) -> None:
    """Raise `InvalidDataError` unless a table has every chosen column once."""
    if not chosen:
        raise InvalidDataError(f"{place} has no columns.")
    for name in chosen:
        if found.count(name) != 1:
            how = f"{found.count(name) or 'no'} column{'s' * (name in found)}"
            near = [] if name in found else difflib.get_close_matches(name, found, 1)
            hint = f" (the nearest is {near[0]!r})" if near else ""
            raise InvalidDataError(f"{place} has {how} {name!r}{hint}; its columns are {', '.join(found)}.")


def check_single(place: str, chosen: Sequence[object]) -> None:
    """Raise `InvalidDataError` unless one column is chosen."""
    if len(chosen) != 1:
        raise InvalidDataError(
            f"{place}: one column is wanted, but {len(chosen)} are named: {tuple(chosen)}."
        )


def open_parquet(place: Place, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open parquet files as a source, those of a folder in dask's natural order, but hidden ones.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    columns : sequence of str or None
        Features in this order; by default all columns, as the first file has them, but those that pandas'
        metadata name as the index of a DataFrame, and then those that the names of folders give, if these are
        whole numbers. A column of the files hides one of folders with the same name.
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
    parts, left_out = parts_at(place)
    partitions = partition_columns(parts)
    of_folders: dict[str, np.dtype[Any] | None] = {}
    groups: list[RowGroup] = []
    chosen: tuple[str, ...] = () if columns is None else tuple(columns)
    dtypes: list[np.dtype[Any]] = []
    for part, (schema, metadata) in zip(parts, each(ParquetPart.footer, parts), strict=True):
        where = str(part.place)
        chosen = chosen or _features(schema, parts, partitions)
        if part is parts[0]:
            of_folders = {name: partitions[name] for name in partitions if name not in schema.names}
        check_names([*schema.names, *of_folders], chosen, where)
        typed = {name: _column_dtype(schema.field(name), where) for name in chosen if name not in of_folders}
        groups += _row_groups(part, metadata, typed, groups[-1].stop if groups else 0)
        dtypes += [*typed.values(), *_checked_partitions(of_folders, chosen, part)]
    if squeeze:
        check_single(place_text(place), chosen)
    dtype = np.result_type(*dtypes)
    reader = ParquetReader(tuple(parts), tuple(groups), chosen, dtype, squeeze, frozenset(of_folders))
    rows = tuple(group.stop - group.start for group in groups)
    shape = (sum(rows),) if squeeze else (sum(rows), len(chosen))
    names = None if squeeze else chosen
    return RangeSource(reader, shape, dtype, rows, names, _files_text(place, len(parts), left_out))


def _files_text(place: Place, n_files: int, left_out: int) -> str:
    """Return what was read of a place, for people; "" where it is one file."""
    if n_files == 1 and not left_out:
        return ""
    others = f"; {left_out:,} other file(s) are not read" if left_out else ""
    return f"{n_files:,} parquet file(s) of {place_text(place)}{others}"
