"""One pass over chunks: a task for each batch of them, and a tree of merges fixed by chunk number."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast
from uuid import uuid4

import dask
import dask.local
import dask.threaded
from dask.callbacks import Callback
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from emtau_dask.cluster import (
    Sealed,
    active_client,
    cluster_errors,
    in_process,
    in_use,
    local_scheduler,
    missing_workers_told,
    opened,
)
from emtau_dask.execution.merge_tree import Batch, batches_of, children, reduction
from emtau_dask.execution.observer import PassObserver
from emtau_dask.execution.read_ahead import AheadBudget, ReadAhead
from emtau_dask.execution.threads import compute_here, compute_in_threads
from emtau_dask.versions import software

T = TypeVar("T")
L = TypeVar("L")
CARRIED_BYTES = 2**16
"""Of what tasks need, at most, for each of them to carry it where it depends on blocks. Distributed
lets a task run only where one of its dependencies is. Were what tasks need one of them, they would
run where it is, and the blocks be moved there; beyond this size that is the lesser evil."""


class ChunkInput(Protocol):
    """The half of a `Source` that decides what a chunk's task depends on."""

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


class _NoSource:
    """Nothing to read: no references, no tasks."""

    addressable = True

    def references(self, chunk: int) -> list[Hashable]:
        return []

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        return {}


NO_SOURCE: ChunkInput = _NoSource()
"""Stands in the place of an input that a task does not have."""


class ReadingTask(ABC, Generic[L, T]):
    """A task of a chunk, ``task(item, *blocks) -> T``, in two steps, of which the first may be done ahead."""

    @abstractmethod
    def read(self, item: Any, *blocks: Any) -> L:
        """Return all that ``compute`` needs from storage."""

    @abstractmethod
    def compute(self, item: Any, found: L) -> T:
        """Return the task's result from what ``read`` returned."""

    def __call__(self, item: Any, *blocks: Sequence[Any]) -> T:
        """Do both steps."""
        return self.compute(item, self.read(item, *blocks))


@dataclass(frozen=True, eq=False)
class _Shared(Generic[T]):
    """What every task of a pass needs; one key of the graph, not a copy in each task."""

    task: Callable[..., T]
    merge: Callable[[Iterable[T]], T]
    ahead: ReadAhead[Any] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay here with what is read ahead: another process reads for itself."""
        return type(self), (self.task, self.merge, None)

    def run(self, chunk: int, item: Any, *blocks: Sequence[Any]) -> T:
        if self.ahead is None:
            return self.task(item, *blocks)
        return cast("ReadingTask[Any, T]", self.task).compute(item, self.ahead.take(chunk))


def _run_chunk(chunk: int, item: Any, shared: _Shared[T] | Sealed[_Shared[T]], *blocks: Sequence[Any]) -> T:
    with in_use(shared) as needed:
        return needed.run(chunk, item, *blocks)


def _run_batch(
    level: int,
    items: Mapping[int, Any] | Sealed[Mapping[int, Any]],
    n_sources: int,
    shared: _Shared[T] | Sealed[_Shared[T]],
) -> T:
    with in_use(shared) as needed:
        return _run_node(level, opened(items), n_sources, needed)


def _run_node(level: int, items: Mapping[int, Any], n_sources: int, shared: _Shared[T]) -> T:
    if len(items) == 1:
        ((chunk, item),) = items.items()
        return shared.run(chunk, item, *[[] for _ in range(n_sources)])
    below = list(children(level - 1, list(items)))
    parts = (
        _run_node(level - 1, {chunk: items[chunk] for chunk in child.chunks}, n_sources, shared)
        for child in below
    )
    return shared.merge(parts) if len(below) > 1 else next(parts)


def _merge_all(results: Sequence[T], shared: _Shared[T] | Sealed[_Shared[T]]) -> T:
    return opened(shared).merge(results)


def _read_ahead(
    task: Callable[..., Any],
    items: Mapping[int, Any],
    n_sources: int,
    budget: AheadBudget | None,
) -> ReadAhead[Any] | None:
    """Return what reads the chunks of tasks that this process runs; None where nothing is read ahead.

    Elsewhere no process knows which tasks it will run next.
    """
    if budget is None or not isinstance(task, ReadingTask):
        return None
    if active_client() is not None or not in_process():
        return None

    def read(chunk: int) -> Any:
        return task.read(items[chunk], *[[] for _ in range(n_sources)])

    return ReadAhead(read, budget)


def _addressable(sources: Sequence[ChunkInput]) -> bool:
    """Return whether tasks read chunks by themselves from all of ``sources``."""
    return all(source.addressable for source in sources)


def _batches(
    sources: Sequence[ChunkInput], chunks: Sequence[int], costs: Mapping[int, float] | None
) -> list[Batch]:
    """Return which ``chunks`` (ascending) share a task; none do where blocks come with the tasks."""
    if _addressable(sources):
        return batches_of({chunk: costs[chunk] if costs else 0.0 for chunk in chunks})
    return [Batch(0, chunk, (chunk,)) for chunk in chunks]


def _leaf(
    batch: Batch, items: Mapping[int, Any], sources: Sequence[ChunkInput], shared: Any, *, sealed: bool
) -> tuple[Any, ...]:
    """Return the task of a batch; ``shared`` is what all tasks need, or its key."""
    if batch.level:
        told = {chunk: items[chunk] for chunk in batch.chunks}
        carried: Any = Sealed.of(told, pickle.dumps) if sealed else told
        return (partial(_run_batch, batch.level, carried, len(sources)), shared)
    (chunk,) = batch.chunks
    blocks = (source.references(chunk) for source in sources)
    return (partial(_run_chunk, chunk, items[chunk]), shared, *blocks)


@dataclass(frozen=True, eq=False)
class _Graph:
    """The tasks of a pass.

    Attributes
    ----------
    layer : str
        What the tasks over chunks are called.
    tasks : dict
    root : Hashable
        The key of the result.
    chunks_of : mapping of key to tuple of int
        The chunks of each task over chunks.
    addressable : bool
        Whether tasks hold nothing before they run, no blocks that others have computed.
    """

    layer: str
    tasks: dict[Hashable, Any]
    root: Hashable
    chunks_of: Mapping[Hashable, tuple[int, ...]]
    addressable: bool


def _graph(
    name: str,
    payload: _Shared[Any] | Sealed[_Shared[Any]],
    sources: Sequence[ChunkInput],
    items: Mapping[int, Any],
    batches: Sequence[Batch],
) -> _Graph:
    """Return what is behind the blocks, the payload, a task for each batch, and the merges."""
    token = uuid4().hex
    layer, shared = f"emtau-{name}-{token}", f"emtau-pass-{token}"
    tasks: dict[Hashable, Any] = {}
    told: Any = shared
    if not _addressable(sources):
        for source in sources:
            tasks.update(source.graph(sorted(items)))
        if isinstance(payload, Sealed) and payload.nbytes <= CARRIED_BYTES:
            told = payload
    tasks[shared] = payload
    leaves: dict[int, dict[int, Hashable]] = {}
    chunks_of: dict[Hashable, tuple[int, ...]] = {}
    for batch in batches:
        key = (layer, batch.chunks[0])
        tasks[key] = _leaf(batch, items, sources, told, sealed=isinstance(payload, Sealed))
        leaves.setdefault(batch.level, {})[batch.number] = key
        chunks_of[key] = batch.chunks
    root, merges = reduction(leaves, lambda members: (_merge_all, members, shared), f"emtau-merge-{token}")
    tasks.update(merges)
    return _Graph(layer, tasks, root, chunks_of, _addressable(sources))


def _upcoming(
    chunks_of: Mapping[Hashable, tuple[int, ...]], state: Mapping[str, Any]
) -> list[tuple[int, ...]]:
    """Return the chunks of each task that can run, in the order in which dask's local schedulers will.

    They take tasks from the end of those that are ready.
    """
    return [chunks_of[key] for key in reversed(state["ready"]) if key in chunks_of]


def _computed(graph: _Graph, reading: ReadAhead[Any] | None, observer: PassObserver) -> Any:
    """Return the value of the root; the readers learn what will run, the observer what has."""

    def expect(_: Any, state: Mapping[str, Any]) -> None:
        if reading is not None:
            reading.expect(_upcoming(graph.chunks_of, state))

    def count(key: Hashable, *_: Any) -> None:
        if key in graph.chunks_of:
            observer.chunks_done(len(graph.chunks_of[key]))

    ahead_of_tasks: AbstractContextManager[Any] = reading or nullcontext()
    with cluster_errors(), ahead_of_tasks, Callback(start_state=expect, posttask=count):
        schedule = local_scheduler()
        if schedule is dask.threaded.get:
            return compute_in_threads(graph.tasks, graph.root, per_thread=2 if graph.addressable else 1)
        if schedule is not None:
            return compute_here(graph.tasks, graph.root)
        layers = HighLevelGraph.from_collections(graph.layer, graph.tasks)
        (value,) = dask.compute(Delayed(graph.root, layers, layer=graph.layer), traverse=False)
    return value


def run_pass(
    task: Callable[..., T],
    merge: Callable[[Iterable[T]], T],
    sources: Sequence[ChunkInput],
    items: Mapping[int, Any],
    *,
    name: str,
    stage: str,
    observer: PassObserver,
    costs: Mapping[int, float] | None = None,
    ahead: AheadBudget | None = None,
) -> T | None:
    """Run ``task(item, *blocks)`` for each chunk and merge the results.

    Runs wherever dask's own precedence says: the scheduler of a config or
    context, else the active distributed client, else threads. Where every
    source is addressable, consecutive small chunks travel in one task.

    Parameters
    ----------
    task : callable (item, *blocks) -> T
        ``blocks`` are the computed references of the chunk, a list for each
        source. What a `ReadingTask` reads may be read ahead of its turn.
    merge : callable (iterable of T) -> T
        Called with results in the order of their chunks, `FAN_IN` at most.
    sources : sequence of ChunkInput
        Sources, all of the same chunks.
    items : mapping of int to object
        What the task of each chunk is told, by chunk; none for others. Other
        processes must be able to import their types.
    name : str
        Names the tasks ``emtau-<name>-…``.
    stage : str
        Told to the observer.
    observer : PassObserver
    costs : mapping of int to float, optional
        Roughly the numbers that a chunk's task reads and scores; by default
        nothing but what every chunk costs.
    ahead : AheadBudget, optional
        What may be read ahead where every source is addressable and tasks run
        in this process; by default nothing.

    Returns
    -------
    T or None
        None where there are no chunks.

    Raises
    ------
    ClusterError
        The cluster failed.

    Warns
    -----
    UserWarning
        The cluster has no workers.
    """
    observer.stage(stage, len(items))
    if not items:
        return None
    batches = _batches(sources, sorted(items), costs)
    reading = _read_ahead(task, items, len(sources), ahead if _addressable(sources) else None)
    shared = _Shared(task, merge, reading)
    with cluster_errors():
        payload = shared if active_client() is None else Sealed.of(shared, made_with=software())
    graph = _graph(name, payload, sources, items, batches)
    with missing_workers_told(stage):
        return cast("T", _computed(graph, reading, observer))
