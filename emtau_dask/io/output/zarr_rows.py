"""Writing rows to a new zarr group in bounded memory, visible only when it is complete."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, ZstdCodec

from emtau_dask.errors import EmtauError
from emtau_dask.io.files import followed, writing_errors
from emtau_dask.io.formats import kind_by_ending
from emtau_dask.io.output.publishing import published
from emtau_dask.io.remote import is_url, plain_path
from emtau_dask.io.zarr_format import own_group

CHUNK_BYTES = 4 * 2**20


def refuse_existing(path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = ()) -> None:
    """Raise `EmtauError` unless a zarr group may be written at the local path ``path``.

    With ``overwrite`` it may replace a group that emtau wrote, and nothing else. It never replaces what the
    run reads, ``inputs``.
    """
    refuse_url(path)
    kind = kind_by_ending(str(path))
    if kind is not None:
        raise EmtauError(
            f"{path} would be {kind} by its name, but results are zarr groups; give a name such as "
            f"{path.with_suffix('.zarr')}"
        )
    refuse_inputs(path, inputs)
    with writing_errors("the result", path):
        if not path.exists():
            return
    if not overwrite:
        raise EmtauError(f"{path} already exists; use --overwrite to replace it, or choose another place")
    if not _is_ours(path):
        raise EmtauError(
            f"{path} was not written by emtau, so --overwrite does not replace it; choose another place"
        )


def refuse_url(path: Path) -> None:
    """Raise `EmtauError` for a path that is made of a URL."""
    if path.parts and path.parts[0].endswith(":") and len(path.parts[0]) > 2:
        raise EmtauError(f"{path} is a URL, but results are written to local folders only; give a local path")


def refuse_inputs(path: Path, inputs: Sequence[str | Path]) -> None:
    """Raise `EmtauError` where a result would lie at, in or around what its run reads."""
    for source in (plain_path(str(each)) for each in inputs):
        if is_url(source):
            continue
        ours, theirs = followed(path), followed(source)
        if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
            raise EmtauError(
                f"{path} is, holds or lies inside {source}, which this run reads; choose another place"
            )


def check_writable(path: Path) -> None:
    """Raise `EmtauError` unless files can be written beside ``path``; folders above it are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EmtauError(
            f"nothing can be written in {path.parent} ({error.strerror}); choose another place"
        ) from error


def _attributes(path: Path) -> Mapping[str, Any]:
    """Return the attributes of the zarr group at a path; {} where no readable group is there."""
    try:
        group = own_group(path)
    except EmtauError:
        return {}
    return {} if group is None else group.attributes


def _is_ours(path: Path) -> bool:
    attributes = _attributes(path)
    return "dataset" in attributes or str(attributes.get("format", "")).startswith("emtau-")


def mark_as_of(path: Path, run: str | None) -> None:
    """Note in a zarr group the id of the run that it is a result of, if that is given."""
    if run is not None:
        zarr.open_group(str(path), mode="r+", zarr_format=3).attrs["run"] = run


def run_that_wrote(path: Path) -> object:
    """Return the id that `mark_as_of` noted at a path, or None."""
    return _attributes(path).get("run")


@contextmanager
def replacing(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield where to write what appears at ``path`` when the block ends without an error; see `published`.

    With ``overwrite`` it replaces a group that emtau wrote, also one that appears there meanwhile. Raises
    `EmtauError` where something else is at ``path``, before the block or when it has ended.
    """
    with (
        writing_errors("the result", path),
        published(path, replaceable=lambda found: overwrite and _is_ours(found)) as private,
    ):
        refuse_existing(path, overwrite)
        yield private


@contextmanager
def new_group(path: Path, *, overwrite: bool) -> Iterator[zarr.Group]:
    """Yield a new zarr v3 group; see `replacing`."""
    with replacing(path, overwrite=overwrite) as private:
        yield zarr.create_group(str(private), zarr_format=3)


class RowWriter:
    """Appends rows to a new array of a group, one whole zarr chunk at a time.

    Parameters
    ----------
    group : zarr.Group
        Where the array is created.
    name : str
    shape : tuple of int
        The array's final shape, rows first.
    dtype : numpy dtype
    chunk_rows : int or None
        Rows of a chunk, the buffer in memory; by default as many as fit in 4 MiB.
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
        chunk_rows: int | None = None,
        compressed: bool = True,
    ) -> None:
        fitting = CHUNK_BYTES // max(dtype.itemsize * math.prod(shape[1:]), 1)
        chunks = (max(1, min(chunk_rows or fitting, shape[0])), *shape[1:])
        compressor = _compressor(dtype) if compressed else None
        self._array = group.create_array(
            name, shape=shape, dtype=dtype, chunks=chunks, compressors=compressor
        )
        self._buffer: NDArray[Any] = np.empty(chunks, dtype=dtype)
        self._written = self._buffered = 0

    def append(self, values: NDArray[Any]) -> int:
        """Add rows, write every chunk that they fill, and return how many these were."""
        start, written = 0, 0
        while start < len(values):
            stop = min(len(values), start + len(self._buffer) - self._buffered)
            self._buffer[self._buffered : self._buffered + stop - start] = values[start:stop]
            self._buffered += stop - start
            start = stop
            if self._buffered == len(self._buffer):
                written += self.flush()
        return written

    def flush(self) -> int:
        """Write buffered rows, as after the last `append`; return how many chunks these were, 0 or 1."""
        if not self._buffered:
            return 0
        stop = self._written + self._buffered
        self._array[self._written : stop] = self._buffer[: self._buffered]
        self._written, self._buffered = stop, 0
        return 1


def _compressor(dtype: np.dtype[Any]) -> BloscCodec | ZstdCodec:
    """The codec for values of a type; bits of responsibilities, transposed, would take more bytes."""
    if dtype.kind == "f":
        return ZstdCodec(level=1)
    return BloscCodec(cname="lz4", clevel=1, shuffle="bitshuffle")
