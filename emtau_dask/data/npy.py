"""``.npy`` files as addressable sources, read by byte ranges."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from emtau_dask.data.source import Loaded, RangeReader, RangeSource, check_dtype, even_chunks
from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.direct_reads import LEAST_BYTES, passes_cache, read_directly
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import each, fill, opened_regular
from emtau_dask.storage.urls import Url, is_url

HEADER_BYTES = 2**14
_HEADERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


@dataclass(frozen=True)
class NpyHeader:
    """The header of a ``.npy`` file; ``begin`` is the byte at which the values begin."""

    shape: tuple[int, ...]
    by_column: bool
    dtype: np.dtype[Any]
    begin: int

    @property
    def end(self) -> int:
        """The byte at which the values end."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def peak_bytes(self, n_rows: int) -> int:
        """Return an upper bound of the memory for a read of rows (bytes): twice the rows."""
        return 2 * self.row_bytes * n_rows + 2**20

    def rows(self, start: int, stop: int, read: Callable[[int, int], NDArray[np.uint8]]) -> NDArray[Any]:
        """Return rows ``start`` to ``stop``; ``read(begin, size)`` returns so many bytes of the file.

        They are one range, or one for each feature if the file is by column.
        """
        shape, width = (stop - start, *self.shape[1:]), math.prod(self.shape[1:])
        if not math.prod(shape):
            return np.empty(shape, self.dtype)
        size = (stop - start) * self.dtype.itemsize
        if not self.by_column:
            return read(self.begin + start * self.row_bytes, size * width).view(self.dtype).reshape(shape)

        def column(j: int) -> NDArray[Any]:
            return read(self.begin + (j * self.shape[0] + start) * self.dtype.itemsize, size).view(self.dtype)

        columns = each(column, range(width))
        return np.stack(columns, axis=1, dtype=self.dtype, casting="equiv").reshape(shape, order="F")

    def of_file(self, size: int) -> str:
        """Return a text that identifies a file of ``size`` bytes with this header."""
        order = "by column" if self.by_column else "by row"
        return f".npy file of {size} bytes, {self.dtype} of shape {self.shape} {order}"


def _header(beginning: bytes) -> NpyHeader:
    """Return the header at the beginning of a file; raises ValueError if there is none."""
    if beginning.startswith(b"PK"):
        raise ValueError(
            "it is an .npz archive; take its array out: numpy.save(path, numpy.load(path)[name])"
        )
    file = io.BytesIO(beginning)
    try:
        shape, by_column, dtype = _HEADERS[npy_format.read_magic(file)](file)
    except Exception as error:  # whatever Python's parser raises
        raise ValueError(f"it has no header of a .npy file: {error}") from None  # A traceback would show it.
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if not all(0 <= size < 2**62 for size in shape) or len(shape) > 32:
        raise ValueError(f"it has the shape {str(shape)[:60]}")
    return NpyHeader(shape, by_column and len(shape) > 1, dtype, file.tell())


def _check_size(header: NpyHeader, size: int) -> None:
    """Raise ValueError if a file of ``size`` bytes is too short."""
    if size < header.end:
        raise ValueError(f"it has {size:,} bytes of {header.end:,}")


@dataclass(frozen=True)
class NpyReader(RangeReader):
    """Reads byte ranges of a local ``.npy`` file.

    A file stored by row that is too large for the page cache is read past it. The header is parsed again only
    if the bytes at the ``beginning`` have changed: Python 3.11 may fail if several threads parse at once.
    """

    path: str
    header: NpyHeader
    beginning: bytes

    @classmethod
    def of(cls, path: str) -> NpyReader:
        """Return the reader of a file that is as long as it declares; else raises ValueError or OSError."""
        with opened_regular(path) as (descriptor, size):
            beginning = os.pread(descriptor, HEADER_BYTES, 0)
        header = _header(beginning)
        _check_size(header, size)
        return cls(str(Path(path).absolute()), header, beginning[: header.begin])

    def _current_header(self, descriptor: int, size: int) -> NpyHeader:
        beginning = os.pread(descriptor, HEADER_BYTES, 0)
        header = self.header if beginning.startswith(self.beginning) else _header(beginning)
        _check_size(header, size)
        return header

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows, of whatever file is there now."""
        with read_errors(self.path, remote=False), opened_regular(self.path) as (descriptor, size):
            header = self._current_header(descriptor, size)

            def values(begin: int, n_bytes: int) -> NDArray[np.uint8]:
                read = None
                if n_bytes >= LEAST_BYTES and not header.by_column and passes_cache(size):
                    read = read_directly(Path(self.path), begin, n_bytes)
                if read is None:
                    read = np.empty(n_bytes, np.uint8)
                    if fill(read, n_bytes, descriptor, begin) < n_bytes:
                        raise ValueError(f"it ends before byte {begin + n_bytes:,}")
                return read

            rows = header.rows(start, stop, values)
        return Loaded(rows, rows.nbytes)

    def identity(self) -> str:
        """Return the file's size and header."""
        with read_errors(self.path, remote=False), opened_regular(self.path) as (descriptor, size):
            return self._current_header(descriptor, size).of_file(size)

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds."""
        return self.header.peak_bytes(stop - start)


@dataclass(frozen=True)
class UrlNpyReader(RangeReader):
    """Reads byte ranges of a ``.npy`` file behind a URL."""

    url: Url
    header: NpyHeader

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows, read as one range, or as one for each feature if the file is by column."""
        with read_errors(str(self.url), remote=True):
            rows = self.header.rows(
                start,
                stop,
                lambda begin, size: np.frombuffer(self.url.read_range(begin, begin + size), np.uint8),
            )
        return Loaded(rows, rows.nbytes)

    def identity(self) -> str:
        """Return the file's size and header."""
        header, size = _remote_header(self.url)
        return header.of_file(size or header.end)

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds."""
        return self.header.peak_bytes(stop - start)


def _remote_header(url: Url) -> tuple[NpyHeader, int | None]:
    """Return the header, and the file's size in bytes, None if the server does not tell it."""
    with read_errors(f"the header of {url}", remote=True):
        size = url.info()["size"]
        first = HEADER_BYTES if size is None else min(HEADER_BYTES, size)
        header = _header(url.read(0, first))
        if size is not None:
            _check_size(header, size)
    return header, size


def npy_source(path: str) -> RangeSource:
    """Return a ``.npy`` file as a source, in chunks of at most 16 MiB; only its header is read.

    Parameters
    ----------
    path : str
        A local path or a URL.

    Raises
    ------
    InvalidDataError
        It is no ``.npy`` file, or it holds Python objects.
    InvalidDtypeError
        It does not hold real numbers.
    """
    if is_url(path):
        url = Url.of(path)
        header, _ = _remote_header(url)
        return _source(UrlNpyReader(url, header), header, str(url))
    try:
        reader = NpyReader.of(path)
    except (ValueError, OSError) as error:
        raise InvalidDataError(
            f"{path} cannot be read as a .npy file ({error}); write it with numpy.save."
        ) from error
    return _source(reader, reader.header, path)


def _source(reader: NpyReader | UrlNpyReader, header: NpyHeader, where: str) -> RangeSource:
    check_dtype(header.dtype, where)
    chunks = even_chunks(header.shape[0] if header.shape else 0, header.row_bytes, where)
    return RangeSource(reader, header.shape, header.dtype, chunks)
