"""Parquet files as addressable sources: one chunk for each row group.

Needs pyarrow, the ``[parquet]`` extra.
"""

from __future__ import annotations

import io
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
    """

    part: int
    number: int
    start: int
    stop: int
    stored: int


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
    squeeze : bool
        Whether the single column is given as shape (n,).
    """

    parts: tuple[ParquetPart, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
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
            with self.parts[group.part].opened() as file:
                table = file.read_row_group(group.number, columns=list(self.columns))
                if table.num_rows != group.stop - group.start:
                    raise ValueError(f"row group {group.number} has {table.num_rows} rows now")
            if any(table.column(name).null_count for name in self.columns):
                rows = rows.astype(np.float64, copy=False)
            inside = slice(max(start - group.start, 0), stop - group.start)
            first = max(group.start - start, 0)
            for j, name in enumerate(self.columns):
                values = table.column(name).to_numpy()[inside]
                rows[first : first + len(values), j] = values
        return (rows[:, 0] if self.squeeze else rows), sum(group.stored for group in touched)

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
        """Return an upper bound of the bytes that `read` holds: the rows, and a row group as it is decoded."""
        width = len(self.columns) * max(self.dtype.itemsize, 8)
        group = max((8 + g.stored + (g.stop - g.start) * width for g in self._touched(start, stop)), default=0)
        return (stop - start) * width + group
