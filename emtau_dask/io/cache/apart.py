"""Arrays in memory of their own, which the system takes back when they go."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_APART = 2**18
"""Fewer bytes stay where malloc put them: the last page of a map is partly empty."""
ALIGNED = 64


def apart(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return read-only copies of arrays that lie in one map of anonymous memory.

    What is kept between passes lies among what tasks allocate, and leaves gaps when it goes. malloc rarely
    fills or returns them: a process would need up to twice the bytes that it keeps. Arrays of few bytes in
    all are returned as they are, as are all where no memory can be mapped.
    """
    spans = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]
    if sum(spans) < LEAST_APART:
        return list(arrays)
    try:
        mapped = mmap.mmap(-1, sum(spans), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return list(arrays)
    found, begin = [], 0
    for array, span in zip(arrays, spans, strict=True):
        copied = np.ndarray(array.shape, array.dtype, mapped, begin)
        copied[...] = array
        copied.setflags(write=False)
        found.append(copied)
        begin += span
    return found
