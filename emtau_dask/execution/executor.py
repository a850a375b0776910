"""The port of executors, which map a task over chunks and merge the results; reading ahead.

A task that has its chunk begins the read of one more: the next chunk of its batch, or
the first chunk of a later task. So about as many chunks are read ahead as tasks run,
and the bytes of all of them are bounded.
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

from emtau_dask.data.cache import CachedName
from emtau_dask.interrupts import LEAVE_SECONDS, Calls, Stop, Threads

L = TypeVar("L")
MAX_READERS = 32
"""Maximum number of threads that read ahead for a pass."""
T = TypeVar("T")


class PassObserver(Protocol):
    """Is notified of a pass and its chunks; must not raise."""

    def stage(self, name: str, chunks: int) -> None:
        """A pass over ``chunks`` chunks begins."""
        ...

    def chunks_done(self, count: int) -> None:
        """``count`` more chunks are done; may be called from another thread."""
        ...


@dataclass(frozen=True)
class AheadBudget:
    """The limit of reading ahead.

    Attributes
    ----------
    limit : int
        Maximum bytes of chunks that are read ahead.
    sizes : mapping of int to int
        Bytes of each chunk after it is read, by chunk.
    """

    limit: int
    sizes: Mapping[int, int]


class ReadAhead(Generic[L]):
    """Returns loaded chunks, and reads the next ones ahead; for any number of threads.

    At the end of its context reading ends, chunks that were read ahead are dropped, and threads are joined.

    Parameters
    ----------
    read : callable (int) -> L
        Reads a chunk; called once for each chunk.
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
        self._readers = Threads(MAX_READERS, "emtau-read-ahead")
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
        """Set the chunks of each task, in the order in which tasks will run."""
        with self._lock:
            self._after = {chunk: following for batch in batches for chunk, following in pairwise(batch)}
            self._firsts = deque(batch[0] for batch in batches)

    def take(self, chunk: int) -> L:
        """Return a chunk, or raise the error of its read; then begin to read one more ahead."""
        with self._lock:
            self._begun.add(chunk)
            reading = self._ahead.pop(chunk, None)
        value = self._read(chunk) if reading is None else reading.take()[1]
        with self._lock:
            self._begin_one(chunk)
        return value

    def _begin_one(self, taken: int) -> None:
        """Begin to read the chunk after ``taken``, if there is room."""
        if self._readers is None:
            return
        chunk = self._after.get(taken)
        while chunk is None and self._firsts:
            first = self._firsts.popleft()
            chunk = None if first in self._begun else first
        if chunk is None:
            return
        ahead = sum(self._budget.sizes[other] for other in self._ahead)
        if ahead + self._budget.sizes[chunk] <= self._budget.limit:
            self._ahead[chunk] = Calls(self._readers.submit, self._stop)
            self._ahead[chunk].begin(chunk, partial(self._read, chunk))


class ChunkInput(Protocol):
    """The dependencies of tasks on a `Source`."""

    @property
    def addressable(self) -> bool:
        """Whether tasks read chunks by themselves, so that one may take several."""
        ...

    @property
    def computed_again(self) -> bool:
        """Whether tasks of the user's own compute a chunk each time."""
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
    computed_again: bool = False

    def references(self, chunk: int) -> list[Hashable]:
        return []

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        return {}


NO_SOURCE: ChunkInput = _NoSource()
"""Used instead of an input that a task does not have."""


class ReadingTask(ABC, Generic[L, T]):
    """A task of a chunk in three steps: `read`, which may be called ahead, `compute` and `finish`.

    Chunks that share a task are read and computed one by one, and finished together.
    """

    @property
    def cached_as(self) -> CachedName | None:
        """Where `read` may find rows in the cache of its process; None if it looks nowhere.

        Without blocks it raises `BlocksNeededError` if they are not there.
        """
        return None

    def is_cached(self, item: Any, state: Hashable) -> bool:
        """Return whether `read` finds an item's rows in a process that caches them with this row state."""
        return False

    @abstractmethod
    def read(self, item: Any, *blocks: Any) -> L:
        """Return everything that ``compute`` needs from storage."""

    @abstractmethod
    def compute(self, item: Any, found: L) -> T:
        """Return the result from the return value of ``read``."""

    def finish(self, result: T) -> T:
        """Complete a task whose chunks have the merged ``result``, and return the result."""
        return result


Task = Callable[..., T] | ReadingTask[Any, T]


@dataclass(frozen=True, eq=False)
class MapReduce(Generic[T]):
    """A pass over chunks: a task for each chunk, and the merge of results.

    Attributes
    ----------
    task : callable (item, *blocks) -> T, or ReadingTask
        ``blocks`` are the computed references of the chunk, a list for each
        source. The reads of a `ReadingTask` may be done ahead.
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
        Approximate number of values that a chunk's task reads and scores, in
        addition to the fixed cost of a chunk; by default 0.
    ahead : AheadBudget, optional
        The limit of reading ahead if tasks run in this process; by default nothing is read ahead.
    interpreted : bool, default=False
        Whether tasks hold the interpreter's lock for most of their time. In this process one thread then runs
        them all, which is faster.
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

    @property
    def computed_again(self) -> bool:
        """Whether tasks of the user's own compute chunks of a source each time."""
        return any(source.computed_again for source in self.sources)


class Executor(Protocol):
    """Runs passes; `choose_executor` chooses one for each fit."""

    @property
    def client(self) -> Any:
        """The distributed client whose workers run tasks; None if there is none."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether tasks run in this process and share its memory."""
        ...

    @property
    def threads(self) -> int:
        """Number of threads that this process may use between passes."""
        ...

    @property
    def workers(self) -> int:
        """Approximate number of tasks that run at a time, at least 1."""
        ...

    def map_reduce(self, work: MapReduce[T], observer: PassObserver) -> T | None:
        """Run the task of each chunk, and merge the results by the tree of chunk numbers.

        If every source is addressable, consecutive small chunks share a task.

        Returns
        -------
        T or None
            None if there are no chunks.

        Raises
        ------
        ClusterError
            The cluster failed. Errors of tasks are raised unchanged.

        Warns
        -----
        UserWarning
            The cluster has no workers.
        """
        ...
