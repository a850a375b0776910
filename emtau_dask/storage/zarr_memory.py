"""What zarr holds in memory while it reads rows."""

from __future__ import annotations

import math
from typing import Any

import zarr

__all__ = ["peak_bytes"]

OVERHEAD = 1.01
"""What a compressor may add to what it cannot compress, at most."""
SLACK, SLACK_BYTES = 1.05, 2**22
"""For what the allocator keeps of chunks that are done with, and for a read of nothing."""


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
    the result.

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
    rows = (stop - start) * math.prod(array.shape[1:]) * itemsize
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
