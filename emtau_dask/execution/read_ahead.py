"""Chunks are read before their tasks ask for them, while other chunks are being scored.

Every task of a pass that has its chunk in hand has one more read: the next of its
batch, or the first of the next task's. So about as many chunks are ahead as
there are tasks under way, and the bytes of all of them are bounded.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Generic, TypeVar

from emtau_dask.calls import LEAVE_SECONDS, Calls, Threads
from emtau_dask.interrupts import Stop

L = TypeVar("L")
READERS = 32
"""Threads that read ahead for a pass, at most."""


@dataclass(frozen=True)
class AheadBudget:
    """How much may be read ahead.

    Attributes
    ----------
    limit : int
        Bytes held at a time.
    sizes : mapping of int to int
        Bytes that each chunk takes once it is read, by chunk.
    """

    limit: int
    sizes: Mapping[int, int]


class ReadAhead(Generic[L]):
    """Returns loaded chunks, and reads the next ones before they are asked for; for any number of threads.

    On leaving its context nothing more is read ahead, what was is let go, and no thread is left.

    Parameters
    ----------
    read : callable (int) -> L
        Reads a chunk; called once for each chunk that is taken.
    budget : AheadBudget
    """

    def __init__(self, read: Callable[[int], L], budget: AheadBudget) -> None:
        self._read, self._budget = read, budget
        self._after: dict[int, int] = {}
        self._firsts: deque[int] = deque()
        self._begun: set[int] = set()
        self._ahead: dict[int, Calls[int, L]] = {}
        self._lock, self._stop = threading.Lock(), Stop()
        self._readers: Threads | None = None

    def __enter__(self) -> ReadAhead[L]:
        self._readers = Threads(READERS, "emtau-read-ahead")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            readers, self._readers = self._readers, None
            self._ahead.clear()
            self._stop.asked = True
        assert readers is not None
        readers.end(LEAVE_SECONDS if isinstance(error, KeyboardInterrupt) else math.inf)

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """Learn what will be taken: the chunks of each task, in the order in which tasks will run."""
        with self._lock:
            self._after = {chunk: following for batch in batches for chunk, following in pairwise(batch)}
            self._firsts = deque(batch[0] for batch in batches)

    def take(self, chunk: int) -> L:
        """Return what reading ``chunk`` gives, or raise what it raises; then one more is read ahead."""
        with self._lock:
            self._begun.add(chunk)
            reading = self._ahead.pop(chunk, None)
        value = self._read(chunk) if reading is None else reading.take()[1]
        with self._lock:
            self._begin_one(chunk)
        return value

    def _begin_one(self, taken: int) -> None:
        """Begin to read what follows ``taken``, where there is room."""
        if self._readers is None:
            return
        chunk = self._after.get(taken)
        while chunk is None and self._firsts:
            first = self._firsts.popleft()
            chunk = None if first in self._begun else first
        if chunk is None:
            return
        held = sum(self._budget.sizes[other] for other in self._ahead)
        if held + self._budget.sizes[chunk] <= self._budget.limit:
            self._ahead[chunk] = Calls(self._readers.submit, self._stop)
            self._ahead[chunk].begin(chunk, partial(self._read, chunk))
