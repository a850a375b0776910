"""``.npy`` files as addressable sources: local ones are mapped, others are read by byte ranges."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.files import LEAST_BYTES, each, opened_regular, passes_cache, read_directly
from emtau_dask.io.formats.base import RangeReader, RangeSource
from emtau_dask.io.formats.checks import check_dtype, even_chunks
from emtau_dask.io.remote import Url, is_url, read_errors

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
        """Return an upper bound of the bytes that reading holds: twice the rows, and pages of a map."""
        return 2 * self.row_bytes * n_rows + 2**20

    def mapped(self, path: str) -> NDArray[Any]:
        """Return the values of the local file ``path``, which has this header, as a memory map."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        order: Literal["F", "C"] = "F" if self.by_column else "C"
        return np.memmap(path, self.dtype, "r", self.begin, self.shape, order)

    def of_file(self, size: int) -> str:
        """Return a text that identifies a file of ``size`` bytes with this header."""
        order = "by column" if self.by_column else "by row"
        return f".npy file of {size} bytes, {self.dtype} of shape {self.shape} {order}"


def _header(beginning: bytes) -> NpyHeader:
    """Return the header at the beginning of a file; raises ValueError where there is none."""
    if beginning.startswith(b"PK"):
        raise ValueError(
            "it is an .npz archive; take its array out: numpy.save(path, numpy.load(path)[name])"
        )
    file = io.BytesIO(beginning)
    try:
        shape, by_column, dtype = _HEADERS[npy_format.read_magic(file)](file)
    except Exception as error:  # whatever Python's parser raises
        raise ValueError(f"it has no header of a .npy file: {error}") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if not all(0 <= size < 2**62 for size in shape) or len(shape) > 32:
        raise ValueError(f"it has the shape {str(shape)[:60]}")
    return NpyHeader(shape, by_column and len(shape) > 1, dtype, file.tell())


def _check_size(header: NpyHeader, size: int) -> None:
    """Raise ValueError where a file of ``size`` bytes is too short."""
    if size < header.end:
        raise ValueError(f"it has {size:,} bytes of {header.end:,}")


def _local_header(path: str | Path) -> NpyHeader:
    """Return the header of a file that is as long as it declares; else raises ValueError or OSError."""
    with opened_regular(path) as (descriptor, size):
        header = _header(os.pread(descriptor, HEADER_BYTES, 0))
    _check_size(header, size)
    return header


@dataclass(frozen=True)
class NpyReader(RangeReader):
    """Reads a local ``.npy`` file through a memory map that is closed after each read.

    A file stored by row that is too large for the page cache is read past it.
    """

    path: str

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return a copy of the rows."""
        path, found = Path(self.path), None
        with read_errors(self.path, remote=False):
            header = _local_header(path)
            size = (stop - start) * header.row_bytes
            if passes_cache(path.stat().st_size) and size >= LEAST_BYTES and not header.by_column:
                found = read_directly(path, header.begin + start * header.row_bytes, size)
            if found is not None:
                rows = found.view(header.dtype).reshape(-1, *header.shape[1:])
            else:
                rows = np.array(header.mapped(self.path)[start:stop])
        return rows, rows.nbytes

    def identity(self) -> str:
        """Return the file's size and header."""
        return self._header().of_file(Path(self.path).stat().st_size)

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds."""
        return self._header().peak_bytes(stop - start)

    def _header(self) -> NpyHeader:
        with read_errors(self.path, remote=False):
            return _local_header(self.path)


@dataclass(frozen=True)
class UrlNpyReader(RangeReader):
    """Reads byte ranges of a ``.npy`` file behind a URL."""

    url: Url
    header: NpyHeader

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return the rows, read as one range; as one for each feature where the file is by column."""
        header, width = self.header, math.prod(self.header.shape[1:])
        if stop <= start:
            return np.empty((0, *header.shape[1:]), header.dtype), 0
        if header.by_column:
            n_rows = header.shape[0]
            columns = each(lambda j: self._values(j * n_rows + start, stop - start), range(width))
            rows = np.stack(columns, axis=1)
        else:
            rows = self._values(start * width, (stop - start) * width)
        rows = rows.reshape(stop - start, *header.shape[1:])
        return rows, rows.nbytes

    def _values(self, first: int, count: int) -> NDArray[Any]:
        begin = self.header.begin + first * self.header.dtype.itemsize
        size = count * self.header.dtype.itemsize
        with read_errors(str(self.url), remote=True):
            return np.frombuffer(self.url.read_range(begin, begin + size), self.header.dtype)

    def identity(self) -> str:
        """Return the file's size and header."""
        header, size = _remote_header(self.url)
        return header.of_file(size or header.end)

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds."""
        return self.header.peak_bytes(stop - start)


def _remote_header(url: Url) -> tuple[NpyHeader, int | None]:
    """Return the header, and the file's size in bytes, None where the server does not tell it."""
    with read_errors(f"the header of {url}", remote=True):
        size = url.info()["size"]
        first = HEADER_BYTES if size is None else min(HEADER_BYTES, size)
        header = _header(url.read(0, first, first))
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
        header = _local_header(path)
    except (ValueError, OSError) as error:
        raise InvalidDataError(
            f"{path} cannot be memory-mapped as a .npy file ({error}); write it with numpy.save."
        ) from error
    return _source(NpyReader(str(Path(path).absolute())), header, path)


def _source(reader: NpyReader | UrlNpyReader, header: NpyHeader, where: str) -> RangeSource:
    check_dtype(header.dtype, where)
    chunks = even_chunks(header.shape[0] if header.shape else 0, header.row_bytes, where)
    return RangeSource(reader, header.shape, header.dtype, chunks)
