"""A bound on the memory that reads under way take in one process.

While zarr reads a chunk it holds the stored bytes, the decoded chunk and, where
several make a result, the array that it copies into: two or three times the chunk.
With chunks of 128 MB two such reads at once cost more than the fit itself, so reads
share a budget; small chunks are still read side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadBudget:
    """Lets reads begin while their bytes together stay within ``limit``; one alone always may.

    Parameters
    ----------
    limit : int
        Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._freed = threading.Condition()

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """Hold ``size`` bytes of the budget, waiting for them if need be."""
        with self._freed:
            self._freed.wait_for(lambda: self._taken == 0 or self._taken + size <= self.limit)
            self._taken += size
        try:
            yield
        finally:
            with self._freed:
                self._taken -= size
                self._freed.notify_all()


READ_BUDGET = ReadBudget(2**28)
"""Of this process."""
