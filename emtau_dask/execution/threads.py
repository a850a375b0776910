"""Passes in threads of this process: each takes batches of chunks, and merges results as soon as it can.

The threads do not belong to Python's `ThreadPoolExecutor`, except for graphs that dask computes: an interrupt
may leave a lock of such an executor taken (see `interrupts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.pool import Pool
from typing import Any, Generic, TypeVar, cast
from uuid import uuid4

import dask
import dask.threaded
from dask.callbacks import Callback
from dask.local import MultiprocessingPoolExecutor

from emtau_dask.data.source import BlocksNeededError
from emtau_dask.execution.executor import Executor, MapReduce, PassObserver, ReadAhead, ReadingTask
from emtau_dask.execution.graph import (
    Batch,
    MergeTree,
    Node,
    SharedWork,
    batches_of_pass,
    graph_of,
    merge_tree,
)
from emtau_dask.execution.scheduler import cluster_errors
from emtau_dask.interrupts import Calls, Stop, Threads, interruptible_at_once

T = TypeVar("T")
Submit = Callable[[Callable[[], None]], Any]
"""Passes a call to a thread."""
BATCHES_PER_THREAD = 2
"""Batches that are submitted for each thread: one waits while the thread computes the other."""


def call_here(call: Callable[[], None]) -> None:
    """Make a call in the calling thread."""
    call()


@dataclass(frozen=True, eq=False)
class ThreadExecutor:
    """Runs passes in this process.

    Attributes
    ----------
    threads : int
    get : callable (tasks, key) -> value
        Dask's scheduler of graphs in this process. `dask.threaded.get` computes only data with graphs of
        their own. `dask.get` computes all passes in the calling thread, without reading ahead.
    submit : callable (callable) -> object, optional
        Passes a call to a thread; by default each pass has threads of its own.
    """

    threads: int
    get: Callable[..., Any] = dask.threaded.get
    submit: Submit | None = None

    @property
    def client(self) -> None:
        """None."""
        return

    @property
    def in_process(self) -> bool:
        """Yes."""
        return True

    @property
    def workers(self) -> int:
        """The number of threads."""
        return self.threads

    def map_reduce(self, work: MapReduce[T], observer: PassObserver) -> T | None:
        """See `Executor.map_reduce`."""
        observer.stage(work.stage, len(work.items))
        if not work.items:
            return None
        if self.get is dask.get:
            if work.addressable:
                return _by_graph(work, observer)
            return _by_blocks(work, observer, dask.get, call_here)
        if not work.addressable:
            with _pool(self.threads) as pool, _own_threads(self.threads) as submit:
                return _by_blocks(work, observer, partial(self.get, pool=pool), submit)
        given = call_here if work.interpreted else self.submit
        with _own_threads(self.threads) if given is None else nullcontext(given) as submit:
            return _by_threads(work, observer, submit, BATCHES_PER_THREAD * self.threads)


def _by_graph(work: MapReduce[T], observer: PassObserver) -> T:
    """Return the result of a pass that dask's synchronous scheduler computes."""
    graph = graph_of(work, SharedWork(work.task, work.merge, None, Stop()))
    with Callback(posttask=graph.count(observer)), interruptible_at_once():
        return cast("T", dask.get(graph.inputs | graph.tasks, graph.root))


def _by_blocks(work: MapReduce[T], observer: PassObserver, get: Callable[..., Any], submit: Submit) -> T:
    """Return the result of a pass over blocks, which one of dask's schedulers in this process computes.

    Chunks whose rows are cached come first, and their blocks are not computed.
    """
    batches, stop = batches_of_pass(work), Stop()
    shared = SharedWork(work.task, work.merge, None, stop)
    results = _Results(merge_tree(batches), work.merge)

    def run(batch: Batch, *blocks: Sequence[Any]) -> bool:
        """Add the result of a batch, which is one chunk; return False if that needs blocks."""
        (chunk,) = batch.chunks
        try:
            found = shared.of_chunk(chunk, work.items[chunk], *(blocks or [[] for _ in work.sources]))
        except BlocksNeededError:
            return False
        results.put(batch.node, found)
        observer.chunks_done(1)
        return True

    with interruptible_at_once():
        if isinstance(work.task, ReadingTask) and work.task.cached_as is not None:
            with Calls[Batch, bool](submit, stop) as calls:
                for batch in batches:
                    calls.begin(batch, partial(run, batch))
                was_cached = dict(calls.take() for _ in batches)
            batches = [batch for batch in batches if not was_cached[batch]]
        tasks: dict[Hashable, Any] = {}
        keys, layer = [], f"emtau-{work.name}-{uuid4().hex}"
        for source in work.sources:
            tasks.update(source.graph([batch.chunks[0] for batch in batches]))
        for batch in batches:
            keys.append((layer, batch.chunks[0]))
            tasks[keys[-1]] = (
                partial(run, batch),
                *(source.references(batch.chunks[0]) for source in work.sources),
            )
        # Blocks of the user's own graph may be futures of a cluster.
        with cluster_errors():
            get(tasks, keys)
    return results.total()


@contextmanager
def _pool(threads: int) -> Iterator[Any]:
    """Yield the pool of dask's settings, else a new one for the block: a fork does not copy threads."""
    given = dask.config.get("pool", None)
    if given is not None:
        yield given
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="emtau")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _by_threads(work: MapReduce[T], observer: PassObserver, submit: Submit, n_submitted: int) -> T:
    """Return the result of a pass whose batches threads compute, ``n_submitted`` of them at a time."""
    batches, stop = batches_of_pass(work), Stop()
    results = _Results(merge_tree(batches), work.merge)
    with _reading(work) as reading:
        shared = SharedWork(work.task, work.merge, reading, stop)
        if reading is not None:
            reading.expect([batch.chunks for batch in batches])

        def run(batch: Batch) -> None:
            items = {chunk: work.items[chunk] for chunk in batch.chunks}
            results.put(batch.node, shared.of_batch(batch.level, items, len(work.sources)))

        waiting = iter(batches)
        with Calls[Batch, None](submit, stop) as calls:
            for batch in islice(waiting, n_submitted):
                calls.begin(batch, partial(run, batch))
            for _ in batches:
                done, _ = calls.take()
                for batch in islice(waiting, 1):
                    calls.begin(batch, partial(run, batch))
                observer.chunks_done(len(done.chunks))
    return results.total()


class _Results(Generic[T]):
    """Results of batches; the children of a node merge as soon as all are there, in any thread."""

    def __init__(self, tree: MergeTree, merge: Callable[[Iterable[T]], T]) -> None:
        self._tree, self._merge, self._lock = tree, merge, threading.Lock()
        self._parent = {member: node for node, members in tree.children.items() for member in members}
        self._missing = {node: len(members) for node, members in tree.children.items()}
        self._found: dict[Node, T] = {}

    def put(self, node: Node, result: T) -> None:
        """Add the result of a node, and merge the nodes above it that are complete."""
        while (parent := self._parent.get(node)) is not None:
            with self._lock:
                self._found[node] = result
                self._missing[parent] -= 1
                if self._missing[parent]:
                    return
                members = [self._found.pop(member) for member in self._tree.children[parent]]
            node, result = parent, self._merge(members)
        self._found[node] = result

    def total(self) -> T:
        """Return the result of the pass."""
        return self._found[self._tree.root]


def _reading(work: MapReduce[Any]) -> AbstractContextManager[ReadAhead[Any] | None]:
    """Return the reading ahead of a pass; None if nothing is read ahead."""
    task = work.task
    if work.ahead is None or not work.addressable or not isinstance(task, ReadingTask):
        return nullcontext()

    def read(chunk: int) -> Any:
        return task.read(work.items[chunk], *[[] for _ in work.sources])

    return ReadAhead(read, work.ahead)


@contextmanager
def _own_threads(threads: int) -> Iterator[Submit]:
    """Yield ``submit`` of new threads, which end with the block; after an error it does not wait for them."""
    own = Threads(threads, "emtau")
    try:
        yield own.submit
    except BaseException:
        own.end(0.0)
        raise
    own.end()


def threads_of_dask(threads: int) -> ThreadExecutor:
    """Return the executor of dask's own ``pool``, if it has one, else of new threads."""
    pool = dask.config.get("pool", None)
    if pool is None:
        return ThreadExecutor(threads)
    executor: Any = MultiprocessingPoolExecutor(pool) if isinstance(pool, Pool) else pool
    return ThreadExecutor(executor._max_workers, submit=executor.submit)


@contextmanager
def lasting_threads(executor: Executor) -> Iterator[Executor]:
    """Yield an executor that keeps its threads from pass to pass until the block ends.

    A new thread waits for the interpreter's lock while others compute, and the caller waits for the thread,
    which costs milliseconds in each pass.
    """
    if not isinstance(executor, ThreadExecutor) or executor.submit is not None:
        yield executor
        return
    with _own_threads(executor.threads) as submit:
        yield replace(executor, submit=submit)
