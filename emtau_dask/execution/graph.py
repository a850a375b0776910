"""The merge tree by chunk number, and a pass as a dask graph.

A node depends on chunk numbers alone, so a chunk merges with the same neighbours
whatever other chunks are absent, and wherever they are computed.
"""

from __future__ import annotations

import pickle
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from typing import Any, Generic, TypeVar
from uuid import uuid4

import cloudpickle

from emtau_dask.errors import CheckpointCorruptError, ClusterError, EmtauError
from emtau_dask.execution.executor import MapReduce, PassObserver, ReadAhead, ReadingTask, Task
from emtau_dask.interrupts import Stop
from emtau_dask.process import OWN, other_versions, software, this_process

T = TypeVar("T")
FAN_IN = 8
"""Maximum number of results that merge at once."""
TASKS_WANTED = 12
MIN_BATCH_COST, MAX_BATCH_COST = 2**19, 2**22
"""Minimum and maximum cost of a batch (values); within these limits a pass has about 12 tasks. 2**22 values
take about 0.2 s, and a cluster's scheduler takes 2 ms for each task (`benchmarks/scheduling.py`)."""
ENOUGH_TASKS = 1000
"""A node of less than 1/1000 of a pass is not divided, whatever its cost; so equal chunks make at most FAN_IN
times as many tasks. A scheduler handles tasks one by one (`benchmarks/cluster_tasks.py`)."""
CHUNK_COST = 2**14
"""Fixed cost of a chunk (values): a read from zarr takes about a millisecond."""
MAX_CHUNKS = FAN_IN**3
"""Maximum chunks of a task, which may keep their row state in memory until it ends."""
MAX_CARRIED_BYTES = 2**16
"""Maximum size of a payload (bytes) that each task carries if it depends on blocks. Distributed runs a task
where one of its dependencies is. A larger payload is a dependency itself, and blocks may be moved to it."""


class Payload(Generic[T]):
    """The pickle of a value, which other processes pass on unchanged.

    A worker may send a value to others while its own tasks use it, and to pickle it
    then is unsafe. For example, zarr's codecs add to their ``__dict__`` at their
    first use, and pickle fails for a dictionary that grows. (Distributed then waits
    for the result for ever.) A cluster's scheduler, which unpickles every graph,
    does not unpickle the value.

    Parameters
    ----------
    pickled : bytes
        Without the contents of the large buffers of the value.
    buffers : sequence of buffer
        These contents.
    made_with : mapping of str to str, optional
        The `software` of the process that made it. A process with another version of this
        package does not unpickle it.
    """

    def __init__(
        self, pickled: bytes, buffers: Sequence[Any], made_with: Mapping[str, str] | None = None
    ) -> None:
        self._pickled, self._buffers = pickled, buffers
        self._made_with = made_with
        self._lock = threading.Lock()
        self._unpickled: list[T] = []

    @classmethod
    def of(
        cls,
        value: T,
        dumps: Callable[..., bytes] = cloudpickle.dumps,
        made_with: Mapping[str, str] | None = None,
    ) -> Payload[T]:
        """Return the pickle of ``value``; its large arrays are not copied. Raises what pickling raises.

        Parameters
        ----------
        value : object
        dumps : callable
            ``pickle.dumps`` takes a tenth of the time, for types that all processes can import.
        made_with : mapping of str to str, optional
            The `software` of this process, which is compared before unpickling.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return cls(pickled, buffers, made_with)

    @property
    def nbytes(self) -> int:
        """Bytes that are sent to other processes."""
        return len(self._pickled) + sum(pickle.PickleBuffer(buffer).raw().nbytes for buffer in self._buffers)

    @property
    def value(self) -> T:
        """The value; the same object for all threads.

        Raises
        ------
        ClusterError
            This process cannot unpickle it.
        """
        with self._lock:
            if not self._unpickled:
                self._check_version()
                try:
                    self._unpickled.append(pickle.loads(self._pickled, buffers=self._buffers))
                except Exception as error:
                    raise ClusterError(self._unpickling_message(error)) from error
            return self._unpickled[0]

    def _check_version(self) -> None:
        """Raise `ClusterError` if this process has another version of the package."""
        if self._made_with is None:
            return
        mine = software()
        if mine[OWN] != self._made_with[OWN]:
            raise ClusterError(
                f"{this_process()} has {OWN} {mine[OWN]}, the process that fits {self._made_with[OWN]}. "
                "Install the same version on every worker."
            )

    def _other_versions(self) -> str:
        return "" if self._made_with is None else other_versions(software(), self._made_with)

    @contextmanager
    def in_use(self) -> Iterator[T]:
        """Yield the value; errors of the block in a process with other package versions are `ClusterError`.

        Errors of this package are unchanged, except for row state that cannot be read.
        """
        value = self.value
        try:
            yield value
        except Exception as error:
            versions = self._other_versions()
            if not versions or (
                isinstance(error, EmtauError) and not isinstance(error, CheckpointCorruptError)
            ):
                raise
            raise ClusterError(
                f"{this_process()} failed ({type(error).__name__}: {error}). {versions.rstrip()}"
            ) from error

    def _unpickling_message(self, error: Exception) -> str:
        return (
            f"{this_process()} cannot unpickle what tasks need ({type(error).__name__}: {error}). "
            f"{self._other_versions()}All that it refers to, such as a policy of your own, must be "
            "importable on every worker: install it there; or set dask.config.set(scheduler='threads')."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return Payload, (self._pickled, buffers, self._made_with)


def in_use(value: T | Payload[T]) -> AbstractContextManager[T]:
    """Yield the value of a payload as `Payload.in_use` does, and any other value unchanged."""
    return value.in_use() if isinstance(value, Payload) else nullcontext(value)


def unpickled(value: T | Payload[T]) -> T:
    """Return the value of a payload, and any other value unchanged."""
    return value.value if isinstance(value, Payload) else value


@dataclass(frozen=True)
class Batch:
    """The chunks of one task: all present chunks below one node of the merge tree.

    Attributes
    ----------
    level : int
        Of the node: 0 for a single chunk.
    number : int
        Of the node in its level: chunk number // FAN_IN**level.
    chunks : tuple of int
        Ascending.
    """

    level: int
    number: int
    chunks: tuple[int, ...]

    @property
    def node(self) -> Node:
        """The node of these chunks."""
        return self.level, self.number


def nodes_at(level: int, chunks: Sequence[int]) -> Iterator[Batch]:
    """Yield the nodes of a level that contain any of ``chunks`` (ascending)."""
    groups: dict[int, list[int]] = {}
    for chunk in chunks:
        groups.setdefault(chunk // FAN_IN**level, []).append(chunk)
    for number, members in groups.items():
        yield Batch(level, number, tuple(members))


def batches_of(costs: Mapping[int, float]) -> list[Batch]:
    """Return the batches of chunks that share a task: the largest nodes of the tree that are small enough.

    The batches do not change the bits of the result: a batch merges its chunks as the tree does.

    Parameters
    ----------
    costs : mapping of int to float
        Approximate number of values that a task reads and scores, by chunk.
    """
    chunks = sorted(costs)
    upto = [0.0, *accumulate([costs[chunk] + CHUNK_COST for chunk in chunks])]
    usual = min(MAX_BATCH_COST, max(MIN_BATCH_COST, upto[-1] / TASKS_WANTED))
    limit = max(usual, upto[-1] / ENOUGH_TASKS)
    found: list[Batch] = []

    def divide(level: int, number: int, begin: int, end: int) -> None:
        """Add the batches of the node of ``chunks[begin:end]``."""
        if end == begin + 1:
            found.append(Batch(0, chunks[begin], (chunks[begin],)))
        elif upto[end] - upto[begin] <= limit and end - begin <= MAX_CHUNKS:
            found.append(Batch(level, number, tuple(chunks[begin:end])))
        else:
            width = FAN_IN ** (level - 1)
            while begin < end:
                child = chunks[begin] // width
                after = bisect_left(chunks, (child + 1) * width, begin, end)
                divide(level - 1, child, begin, after)
                begin = after

    height = 0
    while chunks[-1] // FAN_IN**height:
        height += 1
    divide(height, 0, 0, len(chunks))
    return found


Node = tuple[int, int]
"""A node of the merge tree: its level, 0 for a single chunk, and its number there."""


@dataclass(frozen=True)
class MergeTree:
    """The merges of the results of batches.

    Attributes
    ----------
    root : Node
        The node with the result of the pass.
    children : mapping of Node to tuple of Node
        The children of each node, in the order of their chunks; children come before parents. A node with one
        child is replaced by that child.
    """

    root: Node
    children: Mapping[Node, tuple[Node, ...]]


def merge_tree(batches: Iterable[Batch]) -> MergeTree:
    """Return the tree above at least one batch."""
    given: dict[int, dict[int, Node]] = {}
    for batch in batches:
        given.setdefault(batch.level, {})[batch.number] = batch.node
    children: dict[Node, tuple[Node, ...]] = {}
    level, highest = 0, max(given)
    nodes = given.get(0, {})
    while len(nodes) > 1 or level < highest:
        groups: dict[int, list[Node]] = {}
        for number in sorted(nodes):
            groups.setdefault(number // FAN_IN, []).append(nodes[number])
        level += 1
        nodes = dict(given.get(level, {}))
        for number, members in groups.items():
            nodes[number] = (level, number) if len(members) > 1 else members[0]
            if len(members) > 1:
                children[level, number] = tuple(members)
    return MergeTree(next(iter(nodes.values())), children)


@dataclass(frozen=True, eq=False)
class SharedWork(Generic[T]):
    """What all tasks of a pass share; one key of the graph instead of a copy in each task."""

    task: Task[T]
    merge: Callable[[Iterable[T]], T]
    ahead: ReadAhead[Any] | None
    stop: Stop

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what belongs to this process: another has no reading ahead, and a `Stop` of its own."""
        return type(self), (self.task, self.merge, None, Stop())

    def of_chunk(self, chunk: int, item: Any, *blocks: Sequence[Any]) -> T:
        """Return the result of the task of a chunk."""
        return self._finish(self._run(chunk, item, *blocks))

    def of_batch(self, level: int, items: Mapping[int, Any], n_sources: int) -> T:
        """Return the result of the task of the chunks below a node, which needs no blocks."""
        return self._finish(self._of_node(level, items, n_sources))

    def _run(self, chunk: int, item: Any, *blocks: Sequence[Any]) -> T:
        self.stop.look()
        if not isinstance(self.task, ReadingTask):
            return self.task(item, *blocks)
        found = self.task.read(item, *blocks) if self.ahead is None else self.ahead.take(chunk)
        return self.task.compute(item, found)

    def _of_node(self, level: int, items: Mapping[int, Any], n_sources: int) -> T:
        blocks: list[list[Any]] = [[] for _ in range(n_sources)]
        if len(items) == 1:
            ((chunk, item),) = items.items()
            return self._run(chunk, item, *blocks)
        if level == 1:
            return self.merge(map(self._run, items, items.values(), *map(repeat, blocks)))
        below = list(nodes_at(level - 1, list(items)))
        parts = (
            self._of_node(level - 1, {chunk: items[chunk] for chunk in child.chunks}, n_sources)
            for child in below
        )
        return self.merge(parts) if len(below) > 1 else next(parts)

    def _finish(self, result: T) -> T:
        return self.task.finish(result) if isinstance(self.task, ReadingTask) else result


def _run_chunk(
    chunk: int, item: Any, shared: SharedWork[T] | Payload[SharedWork[T]], *blocks: Sequence[Any]
) -> T:
    with in_use(shared) as needed:
        return needed.of_chunk(chunk, item, *blocks)


def _run_batch(
    level: int,
    items: Mapping[int, Any] | Payload[Mapping[int, Any]],
    n_sources: int,
    shared: SharedWork[T] | Payload[SharedWork[T]],
) -> T:
    with in_use(shared) as needed:
        return needed.of_batch(level, unpickled(items), n_sources)


def _merge_all(results: Sequence[T], shared: SharedWork[T] | Payload[SharedWork[T]]) -> T:
    return unpickled(shared).merge(results)


@dataclass(frozen=True, eq=False)
class PassGraph:
    """The tasks of a pass.

    Attributes
    ----------
    layer : str
        The name of the tasks over chunks.
    inputs : dict
        What these tasks depend on: blocks, and what all of them share.
    tasks : dict
        The tasks over chunks and the merges.
    root : Hashable
        The key of the result.
    chunks_of : mapping of key to tuple of int
        The chunks of each task over chunks.
    worker_of : mapping of key to str
        The worker of each task over a chunk whose rows that worker caches.
    """

    layer: str
    inputs: dict[Hashable, Any]
    tasks: dict[Hashable, Any]
    root: Hashable
    chunks_of: Mapping[Hashable, tuple[int, ...]]
    worker_of: Mapping[Hashable, str]

    def count(self, observer: PassObserver) -> Callable[..., None]:
        """Return a function that dask calls after each task, which reports its chunks to ``observer``."""

        def after(key: Hashable, *_: Any) -> None:
            if key in self.chunks_of:
                observer.chunks_done(len(self.chunks_of[key]))

        return after


def batches_of_pass(work: MapReduce[Any]) -> list[Batch]:
    """Return the batches of a pass; a batch is one chunk if tasks depend on blocks."""
    chunks = sorted(work.items)
    if not work.addressable:
        return [Batch(0, chunk, (chunk,)) for chunk in chunks]
    return batches_of({chunk: work.costs[chunk] if work.costs else 0.0 for chunk in chunks})


def _leaf(batch: Batch, work: MapReduce[Any], shared: Any, *, pickled: bool, cached: bool) -> tuple[Any, ...]:
    """Return the task of a batch; ``shared`` is the `SharedWork`, or its key."""
    if batch.level:
        items = {chunk: work.items[chunk] for chunk in batch.chunks}
        carried: Any = Payload.of(items, pickle.dumps) if pickled else items
        return (partial(_run_batch, batch.level, carried, len(work.sources)), shared)
    (chunk,) = batch.chunks
    blocks = ([] if cached else source.references(chunk) for source in work.sources)
    return (partial(_run_chunk, chunk, work.items[chunk]), shared, *blocks)


def graph_of(
    work: MapReduce[T],
    payload: SharedWork[T] | Payload[SharedWork[T]],
    holders: Mapping[int, str] | None = None,
) -> PassGraph:
    """Return the tasks of a pass: those behind blocks, the payload, a task for each batch, and the merges.

    ``holders`` are the workers that cache the rows of chunks, by chunk; these need no blocks.
    """
    holders = holders or {}
    token = uuid4().hex
    layer, shared = f"emtau-{work.name}-{token}", f"emtau-pass-{token}"
    inputs: dict[Hashable, Any] = {shared: payload}
    tasks: dict[Hashable, Any] = {}
    carried: Any = shared
    if not work.addressable:
        for source in work.sources:
            inputs.update(source.graph(sorted(work.items.keys() - holders.keys())))
        if isinstance(payload, Payload) and payload.nbytes <= MAX_CARRIED_BYTES:
            carried = payload
    batches = batches_of_pass(work)
    keys: dict[Node, Hashable] = {batch.node: (layer, batch.chunks[0]) for batch in batches}
    pickled = isinstance(payload, Payload)
    for batch in batches:
        cached = batch.chunks[0] in holders
        tasks[keys[batch.node]] = _leaf(batch, work, carried, pickled=pickled, cached=cached)
    tree = merge_tree(batches)
    for node, members in tree.children.items():
        keys[node] = (f"emtau-merge-{token}", *node)
        tasks[keys[node]] = (_merge_all, [keys[member] for member in members], shared)
    chunks_of = {keys[batch.node]: batch.chunks for batch in batches}
    worker_of: dict[Hashable, str] = {(layer, chunk): worker for chunk, worker in holders.items()}
    return PassGraph(layer, inputs, tasks, keys[tree.root], chunks_of, worker_of)
