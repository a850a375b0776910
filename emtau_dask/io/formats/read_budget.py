"""A bound on the memory that concurrent reads take in one process.

While zarr reads a chunk it holds the stored bytes, the decoded chunk and, where a result has several
chunks, the array that it copies into: two or three times the chunk. With chunks of 128 MB two reads at
once take more than the fit itself. So reads share a budget; small chunks are still read side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

READ_BYTES = 2**28
"""The budget of a process."""


class ReadBudget:
    """Lets reads begin while they take at most ``limit`` bytes together; one alone always may."""

    def __init__(self, limit: int = READ_BYTES) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()  # An interrupt in a condition's own `with` could leave it taken.
        self._freed = threading.Condition(self._lock)

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """Take ``size`` bytes of the budget; wait until they are free."""
        with self._lock:
            self._freed.wait_for(lambda: self._taken == 0 or self._taken + size <= self.limit)
            self._taken += size
        try:
            yield
        finally:
            with self._lock:
                self._taken -= size
                self._freed.notify_all()
