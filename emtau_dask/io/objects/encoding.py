"""Arrays as zarr v3 objects: encoded, digested, and decoded within a bound.

The metadata documents are zarr's own, so that ``zarr.open`` reads what is written here. This module does
not trust them when it reads, because a checkpoint may come from a stranger: it compares a chunk's bytes
with their digest, and decodes them into a buffer of the expected size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from emtau_dask.errors import CheckpointCorruptError
from emtau_dask.io.objects.base import ObjectStore
from emtau_dask.io.objects.documents import digest

LEVEL = 1


@dataclass(frozen=True)
class ArrayLayout:
    """A zarr array in the folder ``name``, of which single chunks are written; ``dtype`` is NumPy's name.

    A chunk is its values, little-endian, in C order; compressed by zstd, if ``compressed`` says so.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    compressed: bool = False
    attributes: Mapping[str, Any] | None = None

    def chunk_key(self, *place: int) -> str:
        """Return the key of a chunk, its remaining indices zero."""
        rest = (0,) * (len(self.shape) - len(place))
        return f"{self.name}/c.{'.'.join(map(str, place + rest))}"

    def document(self) -> bytes:
        """Return the metadata document that zarr itself writes."""
        array = zarr.create_array(
            store=MemoryStore(),
            shape=self.shape,
            chunks=self.chunks,
            dtype=self.dtype,
            serializer=BytesCodec() if np.dtype(self.dtype).itemsize == 1 else BytesCodec(endian="little"),
            compressors=ZstdCodec(level=LEVEL) if self.compressed else None,
            filters=None,
            fill_value=0,
            dimension_names=self.axes,
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes=dict(self.attributes or {}),
            zarr_format=3,
        )
        return array.metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes()


UNWRITTEN = 255
"""Bytes of a buffer have this value before decompression; few have it after."""


def encode(values: NDArray[Any]) -> bytes:
    """Return a chunk's bytes: its values, little-endian, in C order."""
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()


def decode(data: bytes, layout: ArrayLayout, where: str) -> NDArray[Any]:
    """Return the values, read-only, of a chunk of one step that `encode` wrote.

    Raises `CheckpointCorruptError`, which names ``where``, for bytes that are not a chunk of this size.
    """
    dtype, shape = np.dtype(layout.dtype), layout.chunks[1:]
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise CheckpointCorruptError(f"{where} cannot be decoded: {len(data)} bytes, {size} expected.")
    values = np.frombuffer(data, dtype=dtype.newbyteorder("<")).reshape(shape).astype(dtype, copy=False)
    values.setflags(write=False)
    return values


def compress(values: NDArray[Any]) -> bytes:
    """Return what `encode` does, compressed by zstd."""
    return bytes(Zstd(level=LEVEL).encode(np.frombuffer(encode(values), dtype=np.uint8)))


def decompress(data: bytes, shape: Sequence[int], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Return the values that `compress` was given; allocates what ``shape`` and ``dtype`` say and no more.

    Raises `CheckpointCorruptError` as `decode` does.
    """
    size = math.prod(shape) * dtype.itemsize
    buffer = np.full(size, UNWRITTEN, dtype=np.uint8)
    try:
        Zstd(level=LEVEL).decode(data, buffer)
    except (RuntimeError, ValueError) as error:
        raise CheckpointCorruptError(f"{where} cannot be decoded: {error}.") from error
    if size and buffer[-1] == UNWRITTEN and _fits(data, size - 1):
        raise CheckpointCorruptError(f"{where} cannot be decoded: fewer than {size} bytes when decompressed.")
    return buffer.view(dtype.newbyteorder("<")).reshape(shape).astype(dtype, copy=False)


def _fits(data: bytes, size: int) -> bool:
    """Return whether ``data`` decompresses to at most ``size`` bytes."""
    try:
        Zstd(level=LEVEL).decode(data, np.empty(size, dtype=np.uint8))
    except ValueError:
        return False
    return True


def read_verified(objects: ObjectStore, key: str, expected: str, limit: int) -> bytes:
    """Return the bytes, at most ``limit``, of an object with the digest ``expected``.

    Raises `CheckpointCorruptError` where it is missing, or not what was written.
    """
    data = objects.get(key, limit)
    if data is None:
        raise CheckpointCorruptError(f"{key} in {objects.location} is missing.")
    found = digest(data)
    if found != expected:
        raise CheckpointCorruptError(
            f"{key} in {objects.location} has been altered: its SHA-256 begins with {found[:12]}, the commit "
            f"says {expected[:12]}."
        )
    return data
