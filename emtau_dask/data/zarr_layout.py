"""Which objects hold a zarr array's chunks, the memory they take, and which are not stored."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.codecs.bytes import Endian
from zarr.core.buffer import Buffer, BufferPrototype, cpu, default_buffer_prototype

from emtau_dask.mixture.linalg import Bools
from emtau_dask.storage.zarr_check import INDEX, StoredArray, allowed

MAX_CHUNKS_AT_ONCE = 2**16
"""Chunks that zarr is asked for by one call."""
CALL_BYTES = 2**12
"""At most what zarr holds for each of them beside its values."""
OVERHEAD = 1.01
"""At most how many times as long a compressor makes what it cannot compress."""
SLACK, SLACK_BYTES = 1.05, 2**22
"""For what the allocator keeps of earlier chunks, and for what a read of no rows takes."""
ENTRY_BYTES, NOT_STORED = 16, 2**64 - 1
"""Of a chunk in the index of a shard: its offset and its length, which both are this where there is none.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html"""
CHECKSUM_BYTES = 4


class AdoptingBuffer(cpu.NDBuffer):
    """An array that, when all of it is assigned another of its shape and type, becomes that one: no copy."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take ``value`` over where it fills the array; else copy it."""
        if (
            isinstance(value, cpu.NDBuffer)
            and value.as_numpy_array().flags.c_contiguous
            and (value.shape, value.dtype) == (self.shape, self.dtype)
            and self[key].shape == self.shape
        ):
            self._data = value.as_ndarray_like()
        else:
            super().__setitem__(key, value)


ADOPTING = BufferPrototype(buffer=cpu.Buffer, nd_buffer=AdoptingBuffer)


@dataclass(frozen=True)
class ZarrLayout:
    """How the rows of an array are stored, and so what reading them takes.

    ``steps`` is the number of codecs that decode a chunk, at most two: each holds its input and its output,
    so that more add nothing. ``plain`` says whether a decoded chunk is laid out as the rows are.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    itemsize: int
    steps: int
    plain: bool

    @classmethod
    def of(cls, array: zarr.Array[Any]) -> ZarrLayout:
        """Return the layout of an array."""
        swapped = getattr(array.serializer, "endian", None) not in (None, Endian(sys.byteorder))
        return cls(
            shape=array.shape,
            chunks=array.chunks,
            shards=array.shards,
            itemsize=array.dtype.itemsize,
            steps=min(2, len(array.compressors) + len(array.filters)),
            plain=not array.filters and array.order == "C" and not swapped,
        )

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of a stored object: of a shard, or of a chunk where there are none."""
        return self.shards or self.chunks

    @property
    def object_bytes(self) -> int:
        """Bytes of the values in a stored object, decoded."""
        return math.prod(self.stored) * self.itemsize

    @property
    def object_rows(self) -> int:
        """Rows of a stored object."""
        return self.stored[0]

    @property
    def chunks_across(self) -> int:
        """Chunks that hold parts of one row."""
        return max(1, n_parts(self.shape[1:], self.chunks[1:]))

    def rows_at_once(self, start: int) -> int:
        """Return how many rows from ``start`` on zarr is asked for by one call."""
        chunks = max(1, MAX_CHUNKS_AT_ONCE // self.chunks_across)
        return chunks * self.chunks[0] - start % self.chunks[0]

    @property
    def n_objects(self) -> int:
        """Stored objects that hold all rows."""
        return n_parts(self.shape, self.stored)

    def is_whole_objects(self, start: int, stop: int) -> bool:
        """Return whether no stored object holds other rows as well."""
        at_end = stop % self.object_rows == 0 or stop == self.shape[0]
        return start % self.object_rows == 0 and at_end

    def is_one_chunk(self, start: int, stop: int) -> bool:
        """Return whether the rows are the decoded bytes of one chunk, or the last chunk's first ones.

        Never of shards, which zarr decodes into buffers of its own.
        """
        if self.shards is not None or not self.plain or self.shape[1:] != self.chunks[1:]:
            return False
        return start % self.chunks[0] == 0 and stop == min(start + self.chunks[0], self.shape[0])

    def is_stored_as_it_is(self, start: int, stop: int) -> bool:
        """Return whether the rows are the bytes of one stored object, or its first ones."""
        return self.steps == 0 and stop > start and self.is_one_chunk(start, stop)

    def prototype(self, start: int, stop: int) -> BufferPrototype:
        """Return the buffers to read rows into; with them zarr does not copy a single decoded chunk."""
        return ADOPTING if self.is_one_chunk(start, stop) else default_buffer_prototype()

    def peak_bytes(self, start: int, stop: int, *, remote: bool) -> int:
        """Return an upper bound of the bytes held at once while rows are read, the rows included.

        Chunks are read and decoded whole, as many at once as zarr's ``async.concurrency`` allows. Of a
        shard, zarr first reads the stored bytes of all wanted chunks, decodes them into an array for the
        shard, and copies this into the result. A single chunk is not copied: it becomes the result. The
        answer of a ``remote`` store is held in pieces until it is complete.
        """
        if not self.shape or stop <= start:
            return 0
        at_once = int(zarr.config.get("async.concurrency"))
        chunk, chunks = math.prod(self.chunks) * self.itemsize, self._touched(self.chunks, start, stop)
        calls = CALL_BYTES * min(chunks, MAX_CHUNKS_AT_ONCE)
        one = self.is_one_chunk(start, stop)
        rows = 0 if one else (stop - start) * math.prod(self.shape[1:]) * self.itemsize
        stored = OVERHEAD * (2 if remote and self.steps == 0 else 1)
        if self.shards is None:
            held = rows + min(chunks, at_once) * chunk * (stored + self.steps)
        else:
            shard = self.object_bytes
            under_way = min(self._touched(self.shards, start, stop), at_once)
            wanted = min(chunks * chunk, under_way * shard)
            decoding = min(chunks, under_way * min(at_once, shard // chunk)) * chunk * self.steps
            held = max(0, rows - under_way * shard) + wanted * (stored + 1) + decoding
        return math.ceil(SLACK * held) + calls + SLACK_BYTES

    def _touched(self, part: tuple[int, ...], start: int, stop: int) -> int:
        """Return how many chunks (or shards) of shape ``part`` hold some of the rows."""
        rows = -(-stop // part[0]) - start // part[0]
        return rows * n_parts(self.shape[1:], part[1:])


def n_parts(shape: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Return how many parts of shape ``part`` cover ``shape``."""
    return math.prod(-(-size // step) for size, step in zip(shape, part, strict=True))


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard of ``shape`` chunks: ``size`` bytes at its end, or at its beginning."""

    shape: tuple[int, ...]
    size: int
    at_end: bool
    dtype: str

    @classmethod
    def of(cls, stored: StoredArray) -> ShardIndex | None:
        """Return the index of an array's shards; None where it has none."""
        described = stored.description
        if described.shards is None:
            return None
        sharding = described.document["codecs"][0]["configuration"]
        codecs = dict(allowed(codec, INDEX, described.where) for codec in sharding["index_codecs"])
        shape = tuple(shard // chunk for shard, chunk in zip(described.shards, described.chunks, strict=True))
        return cls(
            shape,
            ENTRY_BYTES * math.prod(shape) + (CHECKSUM_BYTES if "crc32c" in codecs else 0),
            sharding.get("index_location", "end") == "end",
            ">u8" if codecs["bytes"].get("endian") == "big" else "<u8",
        )

    def lacking(self, value: Buffer, byte_range: ByteRequest | None) -> Bools | None:
        """Return which chunks a shard lacks, from what a range of it was read as; None for another part."""
        if byte_range is None:
            data = value[-self.size :] if self.at_end else value[: self.size]
        elif byte_range == (SuffixByteRequest(self.size) if self.at_end else RangeByteRequest(0, self.size)):
            data = value
        else:
            return None
        if len(data) != self.size:  # Zarr will say so.
            return None
        entries = np.frombuffer(data.to_bytes(), self.dtype, 2 * math.prod(self.shape))
        found: Bools = (entries.reshape(*self.shape, 2) == NOT_STORED).all(axis=-1)
        return found


def place_of_object(key: str) -> tuple[int, ...]:
    """Return the place of a stored object along each axis, from its key below the array, such as c/7/0."""
    return tuple(map(int, re.findall(r"\d+", key)))


def count_unstored(
    layout: ZarrLayout, start: int, stop: int, objects: Mapping[tuple[int, ...], Bools | None]
) -> tuple[int, int]:
    """Return how many of the chunks that begin in some rows are not stored, and how many these are.

    Parameters
    ----------
    layout : ZarrLayout
    start, stop : int
    objects : mapping of tuple of int to ndarray of bool or None
        Which chunks objects lack, by the object's place along each axis; None where it is not there at all.
    """
    rows, *widths = layout.chunks
    limits = [(-(-start // rows), -(-stop // rows))]
    limits += [(0, -(-size // width)) for size, width in zip(layout.shape[1:], widths, strict=True)]
    per_object = [stored // chunk for stored, chunk in zip(layout.stored, layout.chunks, strict=True)]
    found = 0
    for place, lacking in objects.items():
        here = tuple(
            slice(max(0, low - p * m), max(0, min(m, high - p * m)))
            for p, m, (low, high) in zip(place, per_object, limits, strict=True)
        )
        lacks = np.ones(per_object, np.bool_) if lacking is None else lacking
        found += int(np.count_nonzero(lacks[here]))
    return found, (limits[0][1] - limits[0][0]) * n_parts(layout.shape[1:], layout.chunks[1:])
