"""The layout of a zarr array: which objects hold its chunks, their memory, and which are not stored."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.codecs import Crc32cCodec, ShardingCodec
from zarr.codecs.bytes import Endian
from zarr.codecs.sharding import ShardingCodecIndexLocation
from zarr.core.buffer import Buffer

from emtau_dask.mixture.linalg import Bools
from emtau_dask.storage.zarr_check import SERIALIZERS, StoredArray

COPYING = frozenset({"bz2", "gzip", "lzma", "zlib"})
"""Codecs that hold their input or their output twice."""
CALL_BYTES = 2**12
"""Maximum memory of zarr for each chunk in addition to its values (bytes)."""
OVERHEAD = 1.01
"""Maximum growth of values that a compressor cannot compress (a factor)."""
SLACK, SLACK_BYTES = 1.05, 2**22
"""Factor for what the allocator keeps of earlier chunks, and bytes that a read of no rows takes."""
ENTRY_BYTES, NOT_STORED = 16, 2**64 - 1
"""Size of a chunk's entry in the index of a shard (bytes): its offset and its length. Both are ``NOT_STORED``
if there is no such chunk.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html"""
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard of ``shape`` chunks: ``size`` bytes at its end, or at its beginning."""

    shape: tuple[int, ...]
    size: int
    at_end: bool
    dtype: str

    @classmethod
    def of(cls, sharding: ShardingCodec, stored: tuple[int, ...]) -> ShardIndex:
        """Return the index of shards of shape ``stored``."""
        shape = tuple(shard // chunk for shard, chunk in zip(stored, sharding.chunk_shape, strict=True))
        checksums = sum(isinstance(codec, Crc32cCodec) for codec in sharding.index_codecs)
        big = any(getattr(codec, "endian", None) is Endian.big for codec in sharding.index_codecs)
        return cls(
            shape,
            ENTRY_BYTES * math.prod(shape) + CHECKSUM_BYTES * checksums,
            sharding.index_location is ShardingCodecIndexLocation.end,
            ">u8" if big else "<u8",
        )

    def lacking(self, value: Buffer, byte_range: ByteRequest | None) -> Bools | None:
        """Return which chunks a shard lacks; None if ``value``, read from ``byte_range``, has no index."""
        if byte_range is None:
            data = value[-self.size :] if self.at_end else value[: self.size]
        elif byte_range == (SuffixByteRequest(self.size) if self.at_end else RangeByteRequest(0, self.size)):
            data = value
        else:
            return None
        if len(data) != self.size:  # Zarr will raise.
            return None
        entries = np.frombuffer(data.to_bytes(), self.dtype, 2 * math.prod(self.shape))
        lacks: Bools = (entries.reshape(*self.shape, 2) == NOT_STORED).all(axis=-1)
        return lacks


@dataclass(frozen=True)
class ZarrLayout:
    """How the rows of an array are stored, which determines the memory for reading them.

    Attributes
    ----------
    shape, chunks, stored : tuple of int
        Shapes of the array, of a chunk (decoded at a time), and of a stored object (a chunk or a shard).
    row_bytes, chunk_bytes, object_bytes : int
        Decoded sizes of a row, a chunk and an object.
    n_objects : int
        Number of objects that hold all rows.
    decoding : int
        Memory for decoding a chunk, in chunks, in addition to the stored bytes and the rows.
    outer : str
        The codec that encodes an object last; "" for none.
    whole_rows : bool
        Whether the bytes of a decoded chunk are those of its rows in C order, with at most one codec.
    index : ShardIndex or None
        The index of a shard, if there are shards.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    stored: tuple[int, ...]
    row_bytes: int
    chunk_bytes: int
    object_bytes: int
    n_objects: int
    decoding: int
    outer: str
    whole_rows: bool
    index: ShardIndex | None

    @classmethod
    def of(cls, stored_array: StoredArray) -> ZarrLayout:
        """Return the layout of an array."""
        array, codecs = stored_array.array, [name for name in stored_array.codecs if name not in SERIALIZERS]
        stored = array.shards or array.chunks
        sharding = array.metadata.codecs[0] if array.shards and array.metadata.zarr_format == 3 else None
        swapped = getattr(array.serializer, "endian", None) not in (None, Endian(sys.byteorder))
        across = array.shape[1:] == array.chunks[1:]
        return cls(
            shape=array.shape,
            chunks=array.chunks,
            stored=stored,
            row_bytes=math.prod(array.shape[1:]) * array.dtype.itemsize,
            chunk_bytes=math.prod(array.chunks) * array.dtype.itemsize,
            object_bytes=math.prod(stored) * array.dtype.itemsize,
            n_objects=n_parts(array.shape, stored),
            decoding=2 if COPYING.intersection(codecs) else min(2, len(codecs)),
            outer=codecs[-1] if codecs and sharding is None else "",
            whole_rows=not swapped
            and array.order == "C"
            and across
            and sharding is None
            and len(codecs) <= 1,
            index=ShardIndex.of(sharding, stored) if isinstance(sharding, ShardingCodec) else None,
        )

    @property
    def chunks_across(self) -> int:
        """Number of chunks that hold parts of one row."""
        return max(1, n_parts(self.shape[1:], self.chunks[1:]))

    def is_whole_objects(self, start: int, stop: int) -> bool:
        """Return whether the stored objects that hold these rows hold no others."""
        at_end = stop % self.stored[0] == 0 or stop == self.shape[0]
        return start % self.stored[0] == 0 and at_end

    def peak_bytes(self, start: int, stop: int, *, copied: bool, remote: bool) -> int:
        """Return an upper bound of the bytes held at once while rows are read, the rows included.

        Chunks are read and decoded whole, as many at once as zarr's ``async.concurrency`` allows, and
        ``copied`` into the rows. For a shard, zarr first reads the stored bytes of all wanted chunks, decodes
        them into an array for the shard, and copies that array. The response of a ``remote`` store is held in
        pieces until it is complete.
        """
        if stop <= start:
            return 0
        at_once = int(zarr.config.get("async.concurrency"))
        chunk, chunks = self.chunk_bytes, self._touched(self.chunks, start, stop)
        rows = (stop - start) * self.row_bytes if copied else 0
        stored = OVERHEAD * (2 if remote and not self.decoding else 1)
        if self.index is None:
            held = rows + min(chunks, at_once) * chunk * (stored + self.decoding)
        else:
            shard = self.object_bytes
            under_way = min(self._touched(self.stored, start, stop), at_once)
            wanted = min(chunks * chunk, under_way * shard)
            decoding = min(chunks, under_way * min(at_once, shard // chunk)) * chunk * self.decoding
            held = max(0, rows - under_way * shard) + wanted * (stored + 1) + decoding
        return math.ceil(SLACK * held) + CALL_BYTES * chunks + SLACK_BYTES

    def _touched(self, part: tuple[int, ...], start: int, stop: int) -> int:
        """Return how many chunks (or shards) of shape ``part`` hold some of the rows."""
        rows = -(-stop // part[0]) - start // part[0]
        return rows * n_parts(self.shape[1:], part[1:])


def n_parts(shape: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Return how many parts of shape ``part`` cover ``shape``."""
    return math.prod(-(-size // step) for size, step in zip(shape, part, strict=True))


def place_of_object(key: str) -> tuple[int, ...]:
    """Return the position of a stored object along each axis, from its key below the array, such as c/7/0."""
    return tuple(map(int, re.findall(r"\d+", key)))


def count_unstored(
    layout: ZarrLayout, start: int, stop: int, objects: Mapping[tuple[int, ...], Bools | None]
) -> tuple[int, int]:
    """Return how many of the chunks that begin in some rows are not stored, and how many begin there.

    Parameters
    ----------
    layout : ZarrLayout
    start, stop : int
    objects : mapping of tuple of int to ndarray of bool or None
        Which chunks an object lacks, by the object's position along each axis; None if it does not exist.
    """
    rows, *widths = layout.chunks
    limits = [(-(-start // rows), -(-stop // rows))]
    limits += [(0, -(-size // width)) for size, width in zip(layout.shape[1:], widths, strict=True)]
    per_object = [stored // chunk for stored, chunk in zip(layout.stored, layout.chunks, strict=True)]
    n_unstored = 0
    for place, lacking in objects.items():
        here = tuple(
            slice(max(0, low - p * m), max(0, min(m, high - p * m)))
            for p, m, (low, high) in zip(place, per_object, limits, strict=True)
        )
        lacks = np.ones(per_object, np.bool_) if lacking is None else lacking
        n_unstored += int(np.count_nonzero(lacks[here]))
    return n_unstored, (limits[0][1] - limits[0][0]) * n_parts(layout.shape[1:], layout.chunks[1:])
