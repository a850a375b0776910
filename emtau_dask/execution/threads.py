"""Passes in threads of this process: each takes batches of chunks, and merges what is ready to be merged.

They are not of Python's `ThreadPoolExecutor`, but for graphs that dask computes: an interrupt that falls into
one may leave a lock of its own taken (see `interrupts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.pool import Pool
from typing import Any, Generic, TypeVar, cast

import dask
import dask.threaded
from dask.callbacks import Callback
from dask.local import MultiprocessingPoolExecutor

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
"""Has a call made."""
PER_THREAD = 2
"""Batches that are handed out for each thread: one lies ready while it computes another."""


def in_turn(call: Callable[[], None]) -> None:
    """Make a call in the calling thread."""
    call()


@dataclass(frozen=True, eq=False)
class ThreadExecutor:
    """Runs passes in this process.

    Attributes
    ----------
    threads : int
    get : callable (tasks, key) -> value
        Dask's scheduler of graphs in this process: `dask.threaded.get`, or `dask.get`, whose tasks run in the
        calling thread. The former computes only data that have graphs of their own, the latter all passes,
        without reading ahead.
    submit : callable (callable) -> object, optional
        Has a call made by a thread; by default each pass has threads of its own.
    """

    threads: int
    get: Callable[..., Any] = dask.threaded.get
    submit: Submit | None = None

    @property
    def client(self) -> None:
        """There is none."""
        return

    @property
    def in_process(self) -> bool:
        """Yes."""
        return True

    @property
    def workers(self) -> int:
        """As many as threads."""
        return self.threads

    def map_reduce(self, work: MapReduce[T], observer: PassObserver) -> T | None:
        """See `Executor.map_reduce`."""
        observer.stage(work.stage, len(work.items))
        if not work.items:
            return None
        if self.get is dask.get:
            return _by_graph(work, observer, dask.get)
        if not work.addressable:
            with _pool(self.threads) as pool:
                return _by_graph(work, observer, partial(self.get, pool=pool))
        given = in_turn if work.interpreted else self.submit
        with _own_threads(self.threads) if given is None else nullcontext(given) as submit:
            return _by_threads(work, observer, submit, PER_THREAD * self.threads)


def _by_graph(work: MapReduce[T], observer: PassObserver, get: Callable[..., Any]) -> T:
    """Return the result of a pass as one of dask's schedulers computes it in this process."""
    graph = graph_of(work, SharedWork(work.task, work.merge, None, Stop()))
    # Blocks of the user's own graph may be futures of a cluster.
    with cluster_errors(), Callback(posttask=graph.count(observer)), interruptible_at_once():
        return cast("T", get(graph.tasks, graph.root))


@contextmanager
def _pool(threads: int) -> Iterator[Any]:
    """Give the pool that users set in dask, else one of the block's own: a fork does not copy threads."""
    given = dask.config.get("pool", None)
    if given is not None:
        yield given
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="emtau")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _by_threads(work: MapReduce[T], observer: PassObserver, submit: Submit, ready: int) -> T:
    """Return the result of a pass whose batches threads take, of which so many are handed out at a time."""
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
            for batch in islice(waiting, ready):
                calls.begin(batch, partial(run, batch))
            for _ in batches:
                done, _ = calls.take()
                for batch in islice(waiting, 1):
                    calls.begin(batch, partial(run, batch))
                observer.chunks_done(len(done.chunks))
    return results.of_all()


class _Results(Generic[T]):
    """What batches gave, merged as soon as all that a node of the tree waits for is there; for any thread."""

    def __init__(self, tree: MergeTree, merge: Callable[[Iterable[T]], T]) -> None:
        self._tree, self._merge, self._lock = tree, merge, threading.Lock()
        self._parent = {member: node for node, members in tree.children.items() for member in members}
        self._missing = {node: len(members) for node, members in tree.children.items()}
        self._found: dict[Node, T] = {}

    def put(self, node: Node, result: T) -> None:
        """Take the result of a node, and merge all that waited for nothing else."""
        while (parent := self._parent.get(node)) is not None:
            with self._lock:
                self._found[node] = result
                self._missing[parent] -= 1
                if self._missing[parent]:
                    return
                members = [self._found.pop(member) for member in self._tree.children[parent]]
            node, result = parent, self._merge(members)
        self._found[node] = result

    def of_all(self) -> T:
        """Return the result of the pass."""
        return self._found[self._tree.root]


def _reading(work: MapReduce[Any]) -> AbstractContextManager[ReadAhead[Any] | None]:
    """Give what reads the chunks of upcoming tasks; None where nothing is read ahead."""
    task = work.task
    if work.ahead is None or not work.addressable or not isinstance(task, ReadingTask):
        return nullcontext()

    def read(chunk: int) -> Any:
        return task.read(work.items[chunk], *[[] for _ in work.sources])

    return ReadAhead(read, work.ahead)


@contextmanager
def _own_threads(threads: int) -> Iterator[Submit]:
    """Give so many threads, which end with the block; after an error it does not wait for them."""
    own = Threads(threads, "emtau")
    try:
        yield own.submit
    except BaseException:
        own.end(0.0)
        raise
    own.end()


def threads_of_dask(threads: int) -> ThreadExecutor:
    """Return the executor of dask's own ``pool``, if it has one, else of so many threads."""
    pool = dask.config.get("pool", None)
    if pool is None:
        return ThreadExecutor(threads)
    executor: Any = MultiprocessingPoolExecutor(pool) if isinstance(pool, Pool) else pool
    return ThreadExecutor(executor._max_workers, submit=executor.submit)


@contextmanager
def lasting_threads(executor: Executor) -> Iterator[Executor]:
    """Give an executor whose threads stay from pass to pass until the block ends, where they are its own.

    A thread that begins while another computes waits for the interpreter's lock, and who hands out tasks
    waits for the thread: milliseconds of each pass.
    """
    if not isinstance(executor, ThreadExecutor) or executor.submit is not None:
        yield executor
        return
    with _own_threads(executor.threads) as submit:
        yield replace(executor, submit=submit)
