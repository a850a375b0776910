"""A file behind a URL as a binary stream, for libraries that want one."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

from emtau_dask.io.remote.filesystem import RemotePath

TAIL_BYTES = 2**16
"""Bytes at a file's end that are read at once: there formats such as parquet have their footer."""


def opened_stream(path: RemotePath, size: int) -> BinaryIO:
    """Return a file of ``size`` bytes as a stream: each read is one range, and the end is read once."""
    return cast("BinaryIO", _Stream(path, size))


class _Stream(io.RawIOBase):
    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size = path, size
        self._position, self._tail = 0, b""

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
        begin = max(0, self._size - TAIL_BYTES)
        if self._position < begin:
            data = self._path.read_range(self._position, self._position + wanted)
        else:
            self._tail = self._tail or self._path.read_range(begin, self._size)
            data = self._tail[self._position - begin :][:wanted]
        self._position += wanted
        return data
