"""Writing rows to a new zarr group in bounded memory, visible only once it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from emtau_dask.errors import EmtauError

__all__ = ["RowWriter", "new_group", "refuse_existing", "rows_of_bytes"]

CHUNK_BYTES = 4 * 2**20


def rows_of_bytes(row_bytes: int, limit: int = CHUNK_BYTES) -> int:
    """Return how many rows of `row_bytes` bytes fit in `limit` bytes; at least 1."""
    return max(1, limit // max(row_bytes, 1))


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse to write at `path` where that would lose something.

    Parameters
    ----------
    path : Path
        Where a zarr array or group is to be written.
    overwrite : bool
        Allow a zarr array or group there, and nothing else.

    Raises
    ------
    EmtauError
        If something is there that may not be replaced.
    """
    if "://" in str(path):
        raise EmtauError(f"{path} is a URL, but results are written to local folders only; give a local path")
    if not path.exists():
        return
    if not overwrite:
        raise EmtauError(f"{path} already exists; use --overwrite to replace it, or choose another place")
    if not (path / "zarr.json").is_file():
        raise EmtauError(f"{path} is not zarr data, so --overwrite does not replace it; choose another place")


@contextmanager
def new_group(path: Path, *, overwrite: bool) -> Iterator[zarr.Group]:
    """Create a zarr v3 group that appears at `path` when the block ends well.

    Parameters
    ----------
    path : Path
        A local path; folders above it are made.
    overwrite : bool
        Replace a zarr array or group at `path`.

    Yields
    ------
    zarr.Group
        The group, to be filled; kept at ``<path>.partial`` meanwhile.

    Raises
    ------
    EmtauError
        If something is at `path` that may not be replaced.
    """
    refuse_existing(path, overwrite)
    partial = path.with_name(f"{path.name}.partial")
    if partial.exists():
        refuse_existing(partial, overwrite=True)
        shutil.rmtree(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield zarr.create_group(str(partial), zarr_format=3)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


class RowWriter:
    """Appends rows to a new array of a group, one whole zarr chunk at a time.

    Parameters
    ----------
    group : zarr.Group
        Where the array is created.
    name : str
        The array's name.
    shape : tuple of int
        Its final shape, rows first.
    dtype : numpy dtype
        Its dtype.
    chunk_rows : int
        Rows in a chunk; so many are held in memory.
    compressed : bool
        False for values that do not compress, such as random float64.
    """

    def __init__(
        self,
        group: zarr.Group,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        chunk_rows: int,
        compressed: bool = True,
    ) -> None:
        chunk_rows = max(1, min(chunk_rows, shape[0]))
        chunks = (chunk_rows, *shape[1:])
        self._array = group.create_array(
            name, shape=shape, dtype=dtype, chunks=chunks, compressors="auto" if compressed else None
        )
        self._buffer: NDArray[Any] = np.empty(chunks, dtype=dtype)
        self._held = 0
        self._written = 0

    def append(self, values: NDArray[Any]) -> int:
        """Add rows, write every chunk that they fill, and return how many these were."""
        start, written = 0, 0
        while start < len(values):
            stop = min(len(values), start + len(self._buffer) - self._held)
            self._buffer[self._held : self._held + stop - start] = values[start:stop]
            self._held += stop - start
            start = stop
            if self._held == len(self._buffer):
                written += self.flush()
        return written

    def flush(self) -> int:
        """Write what is held, once more after the last `append`; return 1 if that was anything, else 0."""
        if not self._held:
            return 0
        stop = self._written + self._held
        self._array[self._written : stop] = self._buffer[: self._held]
        self._written, self._held = stop, 0
        return 1
