"""The port of executors: a task mapped over chunks, a fixed tree of merges; and reading ahead.

Every task of a pass that has its chunk in hand has one more read: the next of its
batch, or the first of the next task's. So about as many chunks are ahead as
there are tasks under way, and the bytes of all of them are bounded.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from emtau_dask.interrupts import LEAVE_SECONDS, Calls, Stop, Threads

L = TypeVar("L")
READERS = 32
"""Threads that read ahead for a pass, at most."""
T = TypeVar("T")


class PassObserver(Protocol):
    """Told of a pass and its chunks; must not raise."""

    def stage(self, name: str, chunks: int) -> None:
        """A pass over ``chunks`` chunks begins."""
        ...

    def chunks_done(self, count: int) -> None:
        """So many of them are done; may be called from another thread."""
        ...


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


class ChunkInput(Protocol):
    """The part of a `Source` that says what a chunk's task depends on."""

    @property
    def addressable(self) -> bool:
        """Whether tasks read chunks by themselves, so that one may take several."""
        ...

    def references(self, chunk: int) -> list[Hashable]:
        """Return the keys of the tasks that a chunk's task depends on."""
        ...

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        """Return the tasks behind the references of ``chunks``."""
        ...


@dataclass(frozen=True)
class _NoSource:
    """Nothing to read: no references, no tasks."""

    addressable: bool = True

    def references(self, chunk: int) -> list[Hashable]:
        return []

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        return {}


NO_SOURCE: ChunkInput = _NoSource()
"""Stands in the place of an input that a task does not have."""


class ReadingTask(ABC, Generic[L, T]):
    """A task of a chunk in three steps.

    The first may be done ahead. The third is done once for all chunks that share a task.
    """

    @abstractmethod
    def read(self, item: Any, *blocks: Any) -> L:
        """Return all that ``compute`` needs from storage."""

    @abstractmethod
    def compute(self, item: Any, found: L) -> T:
        """Return the task's result from what ``read`` returned."""

    def finish(self, result: T) -> T:
        """Do what is left to do for all chunks of a task, whose merged ``result`` this is; return it."""
        return result


Task = Callable[..., T] | ReadingTask[Any, T]


@dataclass(frozen=True, eq=False)
class MapReduce(Generic[T]):
    """What a pass over chunks computes: a task for each chunk, and how results merge.

    Attributes
    ----------
    task : callable (item, *blocks) -> T, or ReadingTask
        ``blocks`` are the computed references of the chunk, a list for each
        source. What a `ReadingTask` reads may be read ahead of its turn.
    merge : callable (iterable of T) -> T
        Called with results in the order of their chunks, `FAN_IN` at most.
    sources : sequence of ChunkInput
        Sources, all of the same chunks.
    items : mapping of int to object
        The argument of each chunk's task, by chunk; other chunks have no task.
        Other processes must be able to import their types.
    name : str
        Names the tasks ``emtau-<name>-…``.
    stage : str
        Names the pass to the observer.
    costs : mapping of int to float, optional
        Roughly the numbers that a chunk's task reads and scores; by default
        nothing but what every chunk costs.
    ahead : AheadBudget, optional
        What may be read ahead where tasks run in this process; by default nothing.
    interpreted : bool, default=False
        Whether tasks hold the interpreter's lock for most of their time. Threads would wait for each other;
        in this process one does it all, in less time.
    """

    task: Task[T]
    merge: Callable[[Iterable[T]], T]
    sources: Sequence[ChunkInput]
    items: Mapping[int, Any]
    name: str
    stage: str
    costs: Mapping[int, float] | None = None
    ahead: AheadBudget | None = None
    interpreted: bool = False

    @property
    def addressable(self) -> bool:
        """Whether tasks read chunks by themselves from all sources."""
        return all(source.addressable for source in self.sources)


class Executor(Protocol):
    """Runs passes somewhere; chosen once for a fit, by `choose_executor`."""

    @property
    def client(self) -> Any:
        """The distributed client whose workers run tasks; None where there is none."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether tasks run in this process, and see its memory."""
        ...

    @property
    def threads(self) -> int:
        """Threads that this process may use for what it does between passes."""
        ...

    @property
    def workers(self) -> int:
        """Roughly how many tasks run at a time, at least 1."""
        ...

    def map_reduce(self, work: MapReduce[T], observer: PassObserver) -> T | None:
        """Run the task of each chunk, and merge the results by the tree of chunk numbers.

        Where every source is addressable, consecutive small chunks travel in one task.

        Returns
        -------
        T or None
            None where there are no chunks.

        Raises
        ------
        ClusterError
            The cluster failed. What a task raises comes out as it is.

        Warns
        -----
        UserWarning
            The cluster has no workers.
        """
        ...
