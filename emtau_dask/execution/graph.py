"""The tasks of a pass as a graph of dask: one for each batch of chunks, and one for each merge."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast
from uuid import uuid4

from emtau_dask.cluster import Payload, in_use, opened
from emtau_dask.execution.executor import Pass, ReadingTask
from emtau_dask.execution.merge_tree import Batch, batches_of, children, reduction
from emtau_dask.execution.observer import PassObserver
from emtau_dask.execution.read_ahead import ReadAhead
from emtau_dask.interrupts import Stop

T = TypeVar("T")
CARRIED_BYTES = 2**16
"""Of what tasks need, at most, for each of them to carry it where it depends on blocks. Distributed
lets a task run only where one of its dependencies is. Were what tasks need one of them, they would
run where it is, and the blocks be moved there; beyond this size that is the lesser evil."""


@dataclass(frozen=True, eq=False)
class SharedWork(Generic[T]):
    """What every task of a pass needs; one key of the graph, not a copy in each task."""

    task: Callable[..., T]
    merge: Callable[[Iterable[T]], T]
    ahead: ReadAhead[Any] | None
    stop: Stop

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay here with what is read ahead: another process reads for itself, and is stopped by its own."""
        return type(self), (self.task, self.merge, None, Stop())

    def run(self, chunk: int, item: Any, *blocks: Sequence[Any]) -> T:
        """Return the result of a chunk's task."""
        self.stop.look()
        if self.ahead is None:
            return self.task(item, *blocks)
        return cast("ReadingTask[Any, T]", self.task).compute(item, self.ahead.take(chunk))

    def finish(self, result: T) -> T:
        """Return the result of all chunks of a task, once what they leave to be done is done."""
        return self.task.finish(result) if isinstance(self.task, ReadingTask) else result


def _run_chunk(
    chunk: int, item: Any, shared: SharedWork[T] | Payload[SharedWork[T]], *blocks: Sequence[Any]
) -> T:
    with in_use(shared) as needed:
        return needed.finish(needed.run(chunk, item, *blocks))


def _run_batch(
    level: int,
    items: Mapping[int, Any] | Payload[Mapping[int, Any]],
    n_sources: int,
    shared: SharedWork[T] | Payload[SharedWork[T]],
) -> T:
    with in_use(shared) as needed:
        return needed.finish(_run_node(level, opened(items), n_sources, needed))


def _run_node(level: int, items: Mapping[int, Any], n_sources: int, shared: SharedWork[T]) -> T:
    if len(items) == 1:
        ((chunk, item),) = items.items()
        return shared.run(chunk, item, *[[] for _ in range(n_sources)])
    below = list(children(level - 1, list(items)))
    parts = (
        _run_node(level - 1, {chunk: items[chunk] for chunk in child.chunks}, n_sources, shared)
        for child in below
    )
    return shared.merge(parts) if len(below) > 1 else next(parts)


def _merge_all(results: Sequence[T], shared: SharedWork[T] | Payload[SharedWork[T]]) -> T:
    return opened(shared).merge(results)


@dataclass(frozen=True, eq=False)
class PassGraph:
    """The tasks of a pass.

    Attributes
    ----------
    layer : str
        The name of the tasks over chunks.
    tasks : dict
    root : Hashable
        The key of the result.
    chunks_of : mapping of key to tuple of int
        The chunks of each task over chunks.
    """

    layer: str
    tasks: dict[Hashable, Any]
    root: Hashable
    chunks_of: Mapping[Hashable, tuple[int, ...]]

    def count(self, observer: PassObserver) -> Callable[..., None]:
        """Return what dask calls after each task, to tell ``observer`` of the chunks that are done."""

        def after(key: Hashable, *_: Any) -> None:
            if key in self.chunks_of:
                observer.chunks_done(len(self.chunks_of[key]))

        return after


def _batches(work: Pass[Any]) -> list[Batch]:
    """Return which chunks share a task; none do where blocks come with the tasks."""
    chunks = sorted(work.items)
    if not work.addressable:
        return [Batch(0, chunk, (chunk,)) for chunk in chunks]
    return batches_of({chunk: work.costs[chunk] if work.costs else 0.0 for chunk in chunks})


def _leaf(batch: Batch, work: Pass[Any], shared: Any, *, pickled: bool) -> tuple[Any, ...]:
    """Return the task of a batch; ``shared`` is what all tasks need, or its key."""
    if batch.level:
        items = {chunk: work.items[chunk] for chunk in batch.chunks}
        carried: Any = Payload.of(items, pickle.dumps) if pickled else items
        return (partial(_run_batch, batch.level, carried, len(work.sources)), shared)
    (chunk,) = batch.chunks
    blocks = (source.references(chunk) for source in work.sources)
    return (partial(_run_chunk, chunk, work.items[chunk]), shared, *blocks)


def graph_of(work: Pass[T], payload: SharedWork[T] | Payload[SharedWork[T]]) -> PassGraph:
    """Return what is behind the blocks, the payload, a task for each batch, and the merges."""
    token = uuid4().hex
    layer, shared = f"emtau-{work.name}-{token}", f"emtau-pass-{token}"
    tasks: dict[Hashable, Any] = {}
    carried: Any = shared
    if not work.addressable:
        for source in work.sources:
            tasks.update(source.graph(sorted(work.items)))
        if isinstance(payload, Payload) and payload.nbytes <= CARRIED_BYTES:
            carried = payload
    tasks[shared] = payload
    leaves: dict[int, dict[int, Hashable]] = {}
    chunks_of: dict[Hashable, tuple[int, ...]] = {}
    for batch in _batches(work):
        key = (layer, batch.chunks[0])
        tasks[key] = _leaf(batch, work, carried, pickled=isinstance(payload, Payload))
        leaves.setdefault(batch.level, {})[batch.number] = key
        chunks_of[key] = batch.chunks
    root, merges = reduction(leaves, lambda members: (_merge_all, members, shared), f"emtau-merge-{token}")
    tasks.update(merges)
    return PassGraph(layer, tasks, root, chunks_of)
