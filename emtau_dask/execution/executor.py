"""The executor interface: map a task over chunks, and reduce the results by a fixed tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from emtau_dask.execution.observer import PassObserver
from emtau_dask.execution.read_ahead import AheadBudget

T = TypeVar("T")
L = TypeVar("L")


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
    """A task of a chunk in three steps, of which ``task(item, *blocks) -> T`` does the first two.

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

    def __call__(self, item: Any, *blocks: Sequence[Any]) -> T:
        """Do the first two steps."""
        return self.compute(item, self.read(item, *blocks))


@dataclass(frozen=True, eq=False)
class Pass(Generic[T]):
    """One pass over chunks.

    Attributes
    ----------
    task : callable (item, *blocks) -> T
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

    task: Callable[..., T]
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

    def map_reduce(self, work: Pass[T], observer: PassObserver) -> T | None:
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
