"""Arrays as zarr v3 objects: encoded, digested, and decoded within a bound.

The metadata documents are zarr's own, so that ``zarr.open`` reads what is
written here. Reading goes another way: a checkpoint may come from a stranger,
so a chunk's bytes are compared with their digest and decoded into a buffer of
the size that is expected, and no metadata of the file is believed.
"""

from __future__ import annotations

import hashlib
import json
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
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from emtau_dask.errors import CheckpointCorruptError
from emtau_dask.io.objects.base import ObjectStore

LEVEL = 1


@dataclass(frozen=True)
class ArrayLayout:
    """A zarr array of which single chunks are written.

    Attributes
    ----------
    name : str
        Its folder.
    shape, chunks : tuple of int
    dtype : str
        A NumPy name.
    axes : tuple of str
        Names of the axes.
    compressed : bool
        By zstd; otherwise a chunk is its values, little-endian, in C order.
    attributes : mapping
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
        rest = len(self.shape) - len(place)
        return f"{self.name}/c.{'.'.join(map(str, (*place, *[0] * rest)))}"

    def document(self) -> bytes:
        """Return the metadata document that zarr itself writes for it."""
        store = MemoryStore()
        zarr.create_array(
            store=store,
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
        document = sync(store.get("zarr.json", default_buffer_prototype()))
        assert document is not None
        return document.to_bytes()


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """Return the metadata document of a zarr v3 group with these attributes.

    Raises
    ------
    ValueError
        An attribute is NaN or infinite, which JSON does not have.
    """
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def digest(data: bytes) -> str:
    """Return the SHA-256 of an object's bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


UNWRITTEN = 255
"""What a byte that nothing was decompressed into holds, and few others."""


def _raw(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def encode(values: NDArray[Any], *, compressed: bool) -> bytes:
    """Return a chunk's bytes."""
    plain = np.ascontiguousarray(values, dtype=_raw(values.dtype))
    return bytes(Zstd(level=LEVEL).encode(plain.view(np.uint8))) if compressed else plain.tobytes()


def _fits(data: bytes, size: int) -> bool:
    """Return whether what zstd has compressed is at most ``size`` bytes; otherwise it decompresses none."""
    try:
        Zstd(level=LEVEL).decode(data, np.empty(size, dtype=np.uint8))
    except ValueError:
        return False
    return True


def decode(data: bytes, shape: Sequence[int], dtype: np.dtype[Any], *, compressed: bool) -> NDArray[Any]:
    """Return a chunk's values; allocates what ``shape`` and ``dtype`` say and no more.

    Raises
    ------
    ValueError
        The bytes are not a chunk of this size.
    """
    size = math.prod(shape) * dtype.itemsize
    if compressed:
        buffer = np.full(size, UNWRITTEN, dtype=np.uint8)
        try:
            Zstd(level=LEVEL).decode(data, buffer)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if size and buffer[-1] == UNWRITTEN and _fits(data, size - 1):
            raise ValueError(f"fewer than {size} bytes when decompressed")
    else:
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes, {size} expected")
        buffer = np.frombuffer(data, dtype=np.uint8)
    return buffer.view(_raw(dtype)).reshape(shape).astype(dtype, copy=False)


def read_verified(objects: ObjectStore, key: str, expected: str, limit: int) -> bytes:
    """Return an object's bytes.

    Parameters
    ----------
    objects : ObjectStore
    key : str
    expected : str
        Its digest.
    limit : int
        Bytes that it has at most.

    Raises
    ------
    CheckpointCorruptError
        It is missing, or not what was written.
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


def read_array(
    objects: ObjectStore,
    key: str,
    expected: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    *,
    compressed: bool = False,
) -> NDArray[Any]:
    """Return the values of a chunk of known shape and type after checking its digest.

    Raises
    ------
    CheckpointCorruptError
        It is missing, altered, or not of this size.
    """
    size = math.prod(shape) * dtype.itemsize
    data = read_verified(objects, key, expected, size + size // 128 + 1024)
    try:
        return decode(data, shape, dtype, compressed=compressed)
    except ValueError as error:
        raise CheckpointCorruptError(f"{key} in {objects.location} cannot be decoded: {error}.") from error
