"""Memory of large reads that is read into again, once nothing refers to what it held.

Fresh memory comes from the system page by page, each filled with zeros, which takes half as long as a copy
from the page cache. malloc keeps little of what large arrays leave, and nothing of more than 32 MiB.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_REUSED = 2**20
"""Less is malloc's: it keeps that."""
KEPT_BYTES = 2**26
"""The most that is kept for the next reads, unless a single read takes more."""


class ReusedMemory:
    """Gives memory for reads; takes it back when the last array that lies in it is gone.

    What came back is kept only while other memory of this is in use: nothing is kept between passes, and in a
    pass of equal chunks no more is held than was in use at once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Reentrant: while it is held, Python may collect what holds other memory."""
        self._in_use = 0
        self._kept: deque[NDArray[np.uint8]] = deque()

    def room(self, size: int) -> NDArray[np.uint8]:
        """Return ``size`` bytes of any values, that nothing else refers to."""
        if size < LEAST_REUSED:
            return np.empty(size, np.uint8)
        with self._lock:
            memory = self._kept.pop() if self._kept else None
        if memory is None or len(memory) != size:
            memory = np.empty(size, np.uint8)
        with self._lock:
            self._in_use += 1
        return np.asarray(_Lent(memory, self))

    def take_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep memory to which nothing refers any more, or let it go."""
        with self._lock:
            self._in_use -= 1
            if self._in_use == 0:
                self._kept.clear()
            elif not self._kept or sum(map(len, self._kept)) + len(memory) <= KEPT_BYTES:
                self._kept.append(memory)


class _Lent:
    """Owner of memory that arrays lie in: all views of them refer to this, so it goes after the last one."""

    def __init__(self, memory: NDArray[np.uint8], reused: ReusedMemory) -> None:
        self._memory, self._reused = memory, reused

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._reused.take_back(self._memory)
