"""What zarr holds in memory while it reads rows, and how it copies no more than it must."""

from __future__ import annotations

import math
from typing import Any

import zarr
from zarr.codecs.bytes import Endian
from zarr.core.buffer import BufferPrototype, cpu, default_buffer_prototype

__all__ = ["peak_bytes", "prototype_for"]

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


def _is_adopted(array: zarr.Array[Any], start: int, stop: int) -> bool:
    """Return whether the rows are one chunk, laid out in it as in the result.

    Of the array's last chunk they may be the beginning. Shards allow no buffers.
    """
    if array.shards is not None or array.filters or array.order != "C":
        return False
    swapped = getattr(array.serializer, "endian", None) is Endian.big
    begins, ends = start % array.chunks[0] == 0, stop == min(start + array.chunks[0], array.shape[0])
    return begins and ends and array.shape[1:] == array.chunks[1:] and not swapped


def prototype_for(array: zarr.Array[Any], start: int, stop: int) -> BufferPrototype:
    """Return the buffers to read rows into: where they are one whole chunk, its decoded bytes are the rows.

    zarr would copy them into an array of the result's own.
    """
    return ADOPTING if _is_adopted(array, start, stop) else default_buffer_prototype()


def _touched(array: zarr.Array[Any], part: tuple[int, ...], start: int, stop: int) -> int:
    """Return how many chunks (or shards) of shape ``part`` hold some of the rows."""
    rows = -(-stop // part[0]) - start // part[0]
    return rows * math.prod(-(-size // step) for size, step in zip(array.shape[1:], part[1:], strict=True))


def peak_bytes(array: zarr.Array[Any], start: int, stop: int, *, remote: bool) -> int:
    """Return an upper bound of the bytes held at once while rows are read, the rows included.

    A chunk is read and decoded whole, and so many of them are under way as zarr's
    ``async.concurrency`` allows; each step of decoding holds what it began with
    and what it makes. Of a shard, all that is stored of the chunks wanted is read
    first; they are decoded into an array of the shard's own, which is copied into
    the result. A single chunk is not copied, it becomes the result.

    Parameters
    ----------
    array : zarr.Array
    start, stop : int
        Rows.
    remote : bool
        Whether it is read from a network, where an answer is held in pieces
        until it is whole.
    """
    if array.ndim == 0 or stop <= start:
        return 0
    at_once = int(zarr.config.get("async.concurrency"))
    itemsize = array.dtype.itemsize
    rows = 0 if _is_adopted(array, start, stop) else (stop - start) * math.prod(array.shape[1:]) * itemsize
    chunk, chunks = math.prod(array.chunks) * itemsize, _touched(array, array.chunks, start, stop)
    steps = min(2, len(array.compressors) + len(array.filters))
    stored = OVERHEAD * (2 if remote and steps == 0 else 1)
    if array.shards is None:
        held = rows + min(chunks, at_once) * chunk * (stored + steps)
    else:
        shard = math.prod(array.shards) * itemsize
        under_way = min(_touched(array, array.shards, start, stop), at_once)
        wanted = min(chunks * chunk, under_way * shard)
        decoding = min(chunks, under_way * min(at_once, shard // chunk)) * chunk * steps
        held = max(0, rows - under_way * shard) + wanted * (stored + 1) + decoding
    return math.ceil(SLACK * held) + SLACK_BYTES
