"""What zarr holds in memory while it reads rows, and how it copies no more than it must."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.codecs.bytes import Endian
from zarr.core.buffer import BufferPrototype, cpu, default_buffer_prototype

MAX_CHUNKS_AT_ONCE = 2**16
"""Chunks that zarr is asked for by one call."""
CALL_BYTES = 2**12
"""What zarr holds for each of them beside its values, at most."""

OVERHEAD = 1.01
"""What a compressor may add to what it cannot compress, at most."""
SLACK, SLACK_BYTES = 1.05, 2**22
"""For what the allocator keeps of chunks that are done with, and for a read of nothing."""


class AdoptingBuffer(cpu.NDBuffer):
    """An array that, when it is assigned another of its shape and type, becomes that one: no copy."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write ``value``, or take it over where it is all that there is to write."""
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

    Attributes
    ----------
    shape, chunks : tuple of int
    shards : tuple of int or None
    itemsize : int
        Bytes.
    steps : int
        Of decoding a chunk, at most two of which matter: each holds what it began with and what it makes.
    plain : bool
        Whether a decoded chunk is laid out as the rows are.
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
        swapped = getattr(array.serializer, "endian", None) is Endian.big
        return cls(
            shape=array.shape,
            chunks=array.chunks,
            shards=array.shards,
            itemsize=array.dtype.itemsize,
            steps=min(2, len(array.compressors) + len(array.filters)),
            plain=not array.filters and array.order == "C" and not swapped,
        )

    @property
    def object_bytes(self) -> int:
        """Bytes of what a stored object holds, a chunk or a shard, decoded."""
        return math.prod(self.shards or self.chunks) * self.itemsize

    @property
    def object_rows(self) -> int:
        """Rows of a stored object."""
        return (self.shards or self.chunks)[0]

    @property
    def chunks_across(self) -> int:
        """Chunks that hold parts of one row."""
        across = zip(self.shape[1:], self.chunks[1:], strict=True)
        return max(1, math.prod(-(-size // step) for size, step in across))

    def rows_at_once(self, start: int) -> int:
        """Return how many rows from ``start`` on zarr is asked for by one call."""
        chunks = max(1, MAX_CHUNKS_AT_ONCE // self.chunks_across)
        return chunks * self.chunks[0] - start % self.chunks[0]

    @property
    def n_objects(self) -> int:
        """Stored objects that hold all rows."""
        sizes = zip(self.shape, self.shards or self.chunks, strict=True)
        return math.prod(-(-size // step) for size, step in sizes)

    def is_whole_objects(self, start: int, stop: int) -> bool:
        """Return whether no stored object holds other rows as well."""
        step = (self.shards or self.chunks)[0]
        return start % step == 0 and (stop % step == 0 or stop == self.shape[0])

    def is_one_chunk(self, start: int, stop: int) -> bool:
        """Return whether the rows are a decoded chunk, of the last one maybe the beginning.

        zarr decodes shards into buffers of its own.
        """
        if self.shards is not None or not self.plain or self.shape[1:] != self.chunks[1:]:
            return False
        return start % self.chunks[0] == 0 and stop == min(start + self.chunks[0], self.shape[0])

    def prototype(self, start: int, stop: int) -> BufferPrototype:
        """Return the buffers to read rows into: those of one chunk are its decoded bytes.

        zarr would copy them into an array of the result's own.
        """
        return ADOPTING if self.is_one_chunk(start, stop) else default_buffer_prototype()

    def peak_bytes(self, start: int, stop: int, *, remote: bool) -> int:
        """Return an upper bound of the bytes held at once while rows are read, the rows included.

        A chunk is read and decoded whole, and so many of them are under way as zarr's
        ``async.concurrency`` allows. Of a shard, all that is stored of the chunks wanted
        is read first; they are decoded into an array of the shard's own, which is copied
        into the result. A single chunk is not copied, it becomes the result. An answer of a
        ``remote`` store is held in pieces until it is whole.
        """
        if not self.shape or stop <= start:
            return 0
        at_once = int(zarr.config.get("async.concurrency"))
        calls = CALL_BYTES * min(self._touched(self.chunks, start, stop), MAX_CHUNKS_AT_ONCE)
        one = self.is_one_chunk(start, stop)
        rows = 0 if one else (stop - start) * math.prod(self.shape[1:]) * self.itemsize
        chunk, chunks = math.prod(self.chunks) * self.itemsize, self._touched(self.chunks, start, stop)
        stored = OVERHEAD * (2 if remote and self.steps == 0 else 1)
        if self.shards is None:
            held = rows + min(chunks, at_once) * chunk * (stored + self.steps)
        else:
            shard = math.prod(self.shards) * self.itemsize
            under_way = min(self._touched(self.shards, start, stop), at_once)
            wanted = min(chunks * chunk, under_way * shard)
            decoding = min(chunks, under_way * min(at_once, shard // chunk)) * chunk * self.steps
            held = max(0, rows - under_way * shard) + wanted * (stored + 1) + decoding
        return math.ceil(SLACK * held) + calls + SLACK_BYTES

    def _touched(self, part: tuple[int, ...], start: int, stop: int) -> int:
        """Return how many chunks (or shards) of shape ``part`` hold some of the rows."""
        rows = -(-stop // part[0]) - start // part[0]
        across = zip(self.shape[1:], part[1:], strict=True)
        return rows * math.prod(-(-size // step) for size, step in across)
