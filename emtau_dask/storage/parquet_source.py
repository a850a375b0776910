"""Parquet files as addressable sources: one chunk for each row group.

Needs pyarrow, the ``[parquet]`` extra.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError, InvalidDtypeError
from emtau_dask.storage.objects import each
from emtau_dask.storage.sources import RangeSource
from emtau_dask.storage.urls import Url, is_url, plain_path, read_errors, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["is_parquet", "open_parquet", "parquet_names"]

SUFFIXES = (".parquet", ".pq")
SLACK, SLACK_BYTES = 1.05, 2**24
"""For what arrow's allocator keeps, and for pages."""
ZARR_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray")


class _UrlFile(io.RawIOBase):
    """A file behind a URL for pyarrow: each read is one range."""

    def __init__(self, url: Url, size: int) -> None:
        self._url = url
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data = self._url.read(self._position, self._position + wanted)
        if len(data) != wanted:
            raise OSError(f"it gave {len(data):,} bytes for a range of {wanted:,}")
        self._position += wanted
        return data


@dataclass(frozen=True)
class ParquetPart:
    """One parquet file.

    Attributes
    ----------
    place : str or Url
        An absolute path, or a URL.
    size : int
        Bytes.
    """

    place: str | Url
    size: int

    @property
    def remote(self) -> bool:
        """Whether it is behind a URL."""
        return isinstance(self.place, Url)

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file with pyarrow; whatever goes wrong is an `InvalidDataError`."""
        pq = _pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote):
            source = _UrlFile(self.place, self.size) if isinstance(self.place, Url) else self.place
            with pq.ParquetFile(source, pre_buffer=self.remote) as file:
                yield file


@dataclass(frozen=True)
class RowGroup:
    """One row group of one file.

    Attributes
    ----------
    part : int
        Number of the file.
    number : int
        Its own, in the file.
    start, stop : int
        Rows.
    stored : int
        Compressed bytes of the columns that are read.
    nulls : bool
        Whether they may hold nulls.
    """

    part: int
    number: int
    start: int
    stop: int
    stored: int
    nulls: bool


@dataclass(frozen=True)
class ParquetReader:
    """Reads rows from the row groups that hold them; a null is NaN, whatever the column's type.

    Attributes
    ----------
    parts : tuple of ParquetPart
    groups : tuple of RowGroup
    columns : tuple of str
    dtype : dtype
        Of the rows, where there are no nulls.
    decoded : int
        Bytes of a row as pyarrow holds it.
    squeeze : bool
        Whether the single column is given as shape (n,).
    """

    parts: tuple[ParquetPart, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    decoded: int
    squeeze: bool

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return the rows; the bytes are the compressed sizes of the column chunks read.

        Raises
        ------
        InvalidDataError
            A file cannot be read, or is not the one that was opened.
        """
        rows = np.empty((stop - start, len(self.columns)), dtype=self.dtype)
        touched = self._touched(start, stop)
        for group in touched:
            rows = self._filled(rows, start, group)
        return (rows[:, 0] if self.squeeze else rows), sum(group.stored for group in touched)

    def _filled(self, rows: NDArray[Any], start: int, group: RowGroup) -> NDArray[Any]:
        """Return ``rows``, which begin at ``start``, with those of a group filled in."""
        with self.parts[group.part].opened() as file:
            table = file.read_row_group(group.number, columns=list(self.columns))
            if table.num_rows != group.stop - group.start:
                raise ValueError(f"row group {group.number} has {table.num_rows} rows now")
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
        """Return the files' sizes and their numbers of rows and row groups, digested.

        Raises
        ------
        InvalidDataError
            This process does not see a file.
        """
        shapes = each(_shape_of, [part.place for part in self.parts])
        return f"{len(shapes)} parquet file(s), SHA-256 {sha256(repr(shapes).encode()).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds.

        The rows, and of one row group after the other what is stored (from a
        network also in pieces), what is decoded, and the columns being decoded.
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
    """Return bytes, rows and row groups of the file that this process sees."""
    part = _part(place)
    if part is None:
        raise InvalidDataError(f"the parquet file {place} is a folder now; open the data anew.")
    with part.opened() as file:
        return part.size, file.metadata.num_rows, file.metadata.num_row_groups


def _part(place: str | Url) -> ParquetPart | None:
    """Return a file with the size that it has now; None where it is a folder."""
    with read_errors(f"the parquet file {place}", remote=isinstance(place, Url)):
        if not isinstance(place, Url):
            return None if Path(place).is_dir() else ParquetPart(place, Path(place).stat().st_size)
        info = place.info()
        if info["type"] == "directory":
            return None
        if info["size"] is None:
            raise ValueError("its server does not tell its size")
        return ParquetPart(place, info["size"])


def _parts(path: str) -> list[ParquetPart]:
    """Return the file, or all files of a folder in name order."""
    place = Url.of(path) if is_url(path) else str(Path(path).absolute())
    one = _part(place) if suffix_of(path) in SUFFIXES else None
    if one is not None:
        return [one]
    if isinstance(place, Url):
        with read_errors(str(place), remote=True):
            return [ParquetPart(place / name, size) for name, size in place.find(".parquet")]
    files = sorted(Path(place).rglob("*.parquet"))
    return [ParquetPart(str(file), file.stat().st_size) for file in files]


def _row_group(part: int, number: int, start: int, metadata: Any, columns: Sequence[str]) -> RowGroup:
    chunks = [metadata.column(j) for j in range(metadata.num_columns)]
    chunks = [chunk for chunk in chunks if chunk.path_in_schema in columns]
    statistics = [chunk.statistics for chunk in chunks]
    nulls = any(s is None or not s.has_null_count or s.null_count for s in statistics)
    stored = sum(chunk.total_compressed_size for chunk in chunks)
    return RowGroup(part, number, start, start + metadata.num_rows, stored, nulls)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidDataError(
            "reading parquet needs pyarrow; install it with: pip install 'emtau_dask[parquet]'"
        ) from error
    return pyarrow


def _column_dtype(field: pa.Field, path: str) -> np.dtype[Any]:
    pa = _pyarrow()
    kind = field.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise InvalidDtypeError(
            f"column {field.name!r} of {path} holds {kind}, not real numbers. Choose the numeric columns "
            "(data.columns in a config), or convert it."
        )
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def is_parquet(path: str) -> bool:
    """Return whether ``path`` is a parquet file, or a folder that holds any at any depth.

    Parameters
    ----------
    path : str
        A local path or a URL. Where its name says what it is, nothing is looked at.

    Raises
    ------
    InvalidDataError
        It is a URL that cannot be looked at.
    """
    path = plain_path(path)
    if suffix_of(path) in SUFFIXES:
        return True
    if is_url(path):
        return suffix_of(path) not in (".zarr", ".npy") and _holds_parquet(Url.of(path))
    place = Path(path)
    return (
        place.is_dir()
        and not any((place / name).exists() for name in ZARR_DOCUMENTS)
        and any(place.rglob("*.parquet"))
    )


def _holds_parquet(url: Url) -> bool:
    with read_errors(str(url), remote=True):
        return not any((url / name).exists() for name in ZARR_DOCUMENTS) and bool(url.find(".parquet"))


def parquet_names(path: str) -> list[str]:
    """Return the column names of a parquet file, or of a folder's first.

    Raises
    ------
    InvalidDataError
        Nothing readable is there.
    """
    with _found(path)[0].opened() as file:
        return list(file.schema_arrow.names)


def _found(path: str) -> list[ParquetPart]:
    parts = _parts(plain_path(path))
    if not parts:
        raise InvalidDataError(f"the folder {path} holds no file named *.parquet.")
    return parts


def _footer(part: ParquetPart) -> tuple[Any, Any]:
    with part.opened() as file:
        return file.schema_arrow, file.metadata


def open_parquet(path: str, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open a parquet file, or all parquet files of a folder in name order, as a source.

    Parameters
    ----------
    path : str
        A local path or a URL.
    columns : sequence of str or None
        Features in this order; by default all columns, as the first file has them.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.

    Raises
    ------
    InvalidDataError
        Nothing readable is there, pyarrow is missing, or columns differ between files.
    InvalidDtypeError
        A column does not hold real numbers.
    """
    _pyarrow()
    parts = _found(path)
    groups: list[RowGroup] = []
    chosen: tuple[str, ...] = tuple(columns or ())
    dtypes: list[np.dtype[Any]] = []
    end = 0
    for i, (schema, metadata) in enumerate(each(_footer, parts)):
        place = str(parts[i].place)
        chosen = chosen or tuple(schema.names)
        missing = [name for name in chosen if name not in schema.names]
        if missing:
            raise InvalidDataError(
                f"{place} has no column {missing[0]!r}; its columns are {', '.join(schema.names)}."
            )
        dtypes += [_column_dtype(schema.field(name), place) for name in chosen]
        for number in range(metadata.num_row_groups):
            groups.append(_row_group(i, number, end, metadata.row_group(number), chosen))
            end = groups[-1].stop
    if squeeze and len(chosen) != 1:
        raise InvalidDataError(f"{path}: one column is wanted, but {len(chosen)} are named: {chosen}.")
    dtype = np.result_type(*dtypes)
    decoded = len(chosen) * max(kind.itemsize for kind in dtypes)
    reader = ParquetReader(tuple(parts), tuple(groups), chosen, dtype, decoded, squeeze)
    shape = (end,) if squeeze else (end, len(chosen))
    rows = tuple(group.stop - group.start for group in groups)
    return RangeSource(reader, shape, dtype, rows, None if squeeze else chosen)
