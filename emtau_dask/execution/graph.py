"""The merge tree by chunk number, and a pass as a dask graph.

A node's place depends on chunk numbers alone, so a chunk merges with the same
neighbours whichever chunks are absent, and whoever computes them.
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
TASKS_WANTED = 12
MIN_BATCH_COST, MAX_BATCH_COST = 2**19, 2**22
"""In numbers: as many as MAX_BATCH_COST take about 0.2 s, beside which the 2 ms that a cluster's
scheduler spends on a task are small (`benchmarks/scheduling.py`)."""
ENOUGH_TASKS = 1000
"""A node that costs at most this part of a pass is not divided, however much that is; so equal chunks
make at most FAN_IN times as many. A scheduler handles them one by one (`benchmarks/cluster_tasks.py`)."""
CHUNK_COST = 2**14
"""What a chunk costs beside its numbers: a read from zarr takes about a millisecond."""
MOST_CHUNKS = FAN_IN**3
"""Chunks of a task, at most: it may hold their row state until it ends."""
CARRIED_BYTES = 2**16
"""Of what tasks need, at most, for each of them to carry it where it depends on blocks. Distributed
lets a task run only where one of its dependencies is. Were what tasks need one of them, they would
run where it is, and the blocks be moved there; beyond this size that is the lesser evil."""


class Payload(Generic[T]):
    """The pickle of a value, which other processes pass on as it is.

    A worker that has a task's result sends it to others while tasks of its own
    use it. To pickle then what tasks use is unsafe: zarr's codecs, for one, keep
    what they make at their first use in their ``__dict__``, and pickle does not
    bear a dictionary that grows. (Distributed then waits for ever for the result.)
    And a cluster's scheduler, which unpickles every graph, need not unpickle
    what is in it.

    Parameters
    ----------
    pickled : bytes
        Without the contents of the large buffers of the value.
    buffers : sequence of buffer
        These contents.
    made_with : mapping of str to str, optional
        The `software` of the process that made it. Another one with another version of this
        package does not unpickle it.
    """

    def __init__(
        self, pickled: bytes, buffers: Sequence[Any], made_with: Mapping[str, str] | None = None
    ) -> None:
        self._pickled, self._buffers = pickled, buffers
        self._made_with = made_with
        self._opening = threading.Lock()
        self._opened: list[T] = []

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
            ``pickle.dumps`` takes a tenth of the time, for what all processes can import.
        made_with : mapping of str to str, optional
            What `software` returns here, to be compared where it is unpickled.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return cls(pickled, buffers, made_with)

    @property
    def nbytes(self) -> int:
        """Bytes that other processes get."""
        return len(self._pickled) + sum(pickle.PickleBuffer(buffer).raw().nbytes for buffer in self._buffers)

    @property
    def value(self) -> T:
        """The same object for all threads.

        Raises
        ------
        ClusterError
            This process cannot unpickle it.
        """
        with self._opening:
            if not self._opened:
                self._check_version()
                try:
                    self._opened.append(pickle.loads(self._pickled, buffers=self._buffers))
                except Exception as error:
                    raise ClusterError(self._unopened(error)) from error
            return self._opened[0]

    def _check_version(self) -> None:
        """Raise `ClusterError` where this process has another version of the package."""
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
        """Give the value; what fails in a process with other versions of packages is a `ClusterError`.

        Not what is the data's or the fit's own: errors of this package, but for state that cannot be read.
        """
        value = self.value
        try:
            yield value
        except Exception as error:
            why = self._other_versions()
            if not why or (isinstance(error, EmtauError) and not isinstance(error, CheckpointCorruptError)):
                raise
            raise ClusterError(
                f"{this_process()} failed ({type(error).__name__}: {error}). {why.rstrip()}"
            ) from error

    def _unopened(self, error: Exception) -> str:
        return (
            f"{this_process()} cannot unpickle what tasks need ({type(error).__name__}: {error}). "
            f"{self._other_versions()}All that it refers to, such as a policy of your own, must be "
            "importable on every worker: install it there; or set dask.config.set(scheduler='threads')."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return Payload, (self._pickled, buffers, self._made_with)


def in_use(thing: T | Payload[T]) -> AbstractContextManager[T]:
    """Give the value of a payload, as by `Payload.in_use`; anything else as it is."""
    return thing.in_use() if isinstance(thing, Payload) else nullcontext(thing)


def opened(thing: T | Payload[T]) -> T:
    """Return the value of a payload; anything else as it is."""
    return thing.value if isinstance(thing, Payload) else thing


@dataclass(frozen=True)
class Batch:
    """Chunks that one task processes: all of those present below one node of the merge tree.

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
        """The node whose chunks these are."""
        return self.level, self.number


def children(level: int, chunks: Sequence[int]) -> Iterator[Batch]:
    """Yield the nodes of ``level`` that hold ``chunks`` (ascending)."""
    groups: dict[int, list[int]] = {}
    for chunk in chunks:
        groups.setdefault(chunk // FAN_IN**level, []).append(chunk)
    for number, members in groups.items():
        yield Batch(level, number, tuple(members))


def batches_of(costs: Mapping[int, float]) -> list[Batch]:
    """Return the batches in which chunks travel: the largest nodes of the tree that are small enough.

    Which chunks share a task changes no bit of the result: a batch merges
    exactly as the tree would have merged its chunks.

    Parameters
    ----------
    costs : mapping of int to float
        By chunk: roughly the numbers that its task reads and scores.
    """
    chunks = sorted(costs)
    upto = [0.0, *accumulate([costs[chunk] + CHUNK_COST for chunk in chunks])]
    usual = min(MAX_BATCH_COST, max(MIN_BATCH_COST, upto[-1] / TASKS_WANTED))
    limit = max(usual, upto[-1] / ENOUGH_TASKS)
    found: list[Batch] = []

    def divide(level: int, number: int, begin: int, end: int) -> None:
        """Add the batches of the node that holds ``chunks[begin:end]``."""
        if end == begin + 1:
            found.append(Batch(0, chunks[begin], (chunks[begin],)))
        elif upto[end] - upto[begin] <= limit and end - begin <= MOST_CHUNKS:
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
    """How the results of batches become one.

    Attributes
    ----------
    root : Node
        Whose result is that of the pass.
    children : mapping of Node to tuple of Node
        The nodes that are merged into each, in the order of their chunks; children come before parents. A
        node with one child is that child.
    """

    root: Node
    children: Mapping[Node, tuple[Node, ...]]


def merge_tree(batches: Iterable[Batch]) -> MergeTree:
    """Return the tree above batches, of which there is at least one."""
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
    """What every task of a pass needs; one key of the graph, not a copy in each task."""

    task: Task[T]
    merge: Callable[[Iterable[T]], T]
    ahead: ReadAhead[Any] | None
    stop: Stop

    def __reduce__(self) -> tuple[Any, ...]:
        """Stay here with what is read ahead: another process reads for itself, and is stopped by its own."""
        return type(self), (self.task, self.merge, None, Stop())

    def of_chunk(self, chunk: int, item: Any, *blocks: Sequence[Any]) -> T:
        """Return the result of a chunk's task, once what it leaves to be done is done."""
        return self._finish(self._run(chunk, item, *blocks))

    def of_batch(self, level: int, items: Mapping[int, Any], n_sources: int) -> T:
        """Return the merged result of the chunks below a node, likewise; their tasks need no blocks."""
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
        below = list(children(level - 1, list(items)))
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
        return needed.of_batch(level, opened(items), n_sources)


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


def batches_of_pass(work: MapReduce[Any]) -> list[Batch]:
    """Return which chunks share a task; none do where blocks come with the tasks."""
    chunks = sorted(work.items)
    if not work.addressable:
        return [Batch(0, chunk, (chunk,)) for chunk in chunks]
    return batches_of({chunk: work.costs[chunk] if work.costs else 0.0 for chunk in chunks})


def _leaf(batch: Batch, work: MapReduce[Any], shared: Any, *, pickled: bool) -> tuple[Any, ...]:
    """Return the task of a batch; ``shared`` is what all tasks need, or its key."""
    if batch.level:
        items = {chunk: work.items[chunk] for chunk in batch.chunks}
        carried: Any = Payload.of(items, pickle.dumps) if pickled else items
        return (partial(_run_batch, batch.level, carried, len(work.sources)), shared)
    (chunk,) = batch.chunks
    blocks = (source.references(chunk) for source in work.sources)
    return (partial(_run_chunk, chunk, work.items[chunk]), shared, *blocks)


def graph_of(work: MapReduce[T], payload: SharedWork[T] | Payload[SharedWork[T]]) -> PassGraph:
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
    batches = batches_of_pass(work)
    keys: dict[Node, Hashable] = {batch.node: (layer, batch.chunks[0]) for batch in batches}
    for batch in batches:
        tasks[keys[batch.node]] = _leaf(batch, work, carried, pickled=isinstance(payload, Payload))
    tree = merge_tree(batches)
    for node, members in tree.children.items():
        keys[node] = (f"emtau-merge-{token}", *node)
        tasks[keys[node]] = (_merge_all, [keys[member] for member in members], shared)
    return PassGraph(layer, tasks, keys[tree.root], {keys[batch.node]: batch.chunks for batch in batches})
