"""Passes in threads of this process, by a loop over dask's own account of which tasks can run.

In dask's loop a thread waits between two tasks until two others have woken up: a good part of what a small
chunk takes. Here one task more is handed out for each thread than can run, which lies ready; and the last
one, beside which nothing else is left to do, runs in the thread that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import dask.threaded
from dask._task_spec import convert_legacy_graph
from dask.callbacks import Callback, unpack_callbacks
from dask.local import finish_task, start_state_from_dask
from dask.order import order

from emtau_dask.execution.executor import Executor, Pass, PassObserver, ReadAhead, ReadingTask
from emtau_dask.execution.graph import SharedWork, graph_of
from emtau_dask.execution.scheduler import cluster_errors, local_threads
from emtau_dask.interrupts import Calls, Stop, Threads

T = TypeVar("T")
Compute = Callable[[Mapping[Any, Any], Hashable, int, Stop], Any]


@dataclass(frozen=True, eq=False)
class ThreadExecutor:
    """Runs passes in this process.

    Attributes
    ----------
    threads : int
    compute : callable (tasks, key, per_thread, stop) -> value
        Returns the value of a key of a graph, as `compute_in_threads` and `compute_here` do.
    """

    threads: int
    compute: Compute

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

    def map_reduce(self, work: Pass[T], observer: PassObserver) -> T | None:
        """See `Executor.map_reduce`."""
        observer.stage(work.stage, len(work.items))
        if not work.items:
            return None
        reading, stop = _read_ahead(work), Stop()
        graph = graph_of(work, SharedWork(work.task, work.merge, reading, stop))

        def expect(_: Any, state: Mapping[str, Any]) -> None:
            upcoming = _upcoming(graph.chunks_of, state)
            if reading is not None and upcoming:  # Nothing where dask begins with the graph of another fit.
                reading.expect(upcoming)

        compute = compute_here if work.interpreted else self.compute
        ahead_of_tasks: AbstractContextManager[Any] = reading or nullcontext()
        per_thread = 2 if work.addressable else 1
        with (
            cluster_errors(),  # Blocks of the user's own graph may be futures of one.
            ahead_of_tasks,
            Callback(start_state=expect, posttask=graph.count(observer)),
        ):
            return cast("T", compute(graph.tasks, graph.root, per_thread, stop))


def _read_ahead(work: Pass[Any]) -> ReadAhead[Any] | None:
    """Return what reads the chunks of upcoming tasks; None where nothing is read ahead."""
    task = work.task
    if work.ahead is None or not work.addressable or not isinstance(task, ReadingTask):
        return None

    def read(chunk: int) -> Any:
        return task.read(work.items[chunk], *[[] for _ in work.sources])

    return ReadAhead(read, work.ahead)


def _upcoming(
    chunks_of: Mapping[Hashable, tuple[int, ...]], state: Mapping[str, Any]
) -> list[tuple[int, ...]]:
    """Return the chunks of each task that can run, in the order in which dask's local schedulers will.

    They take tasks from the end of those that are ready.
    """
    return [chunks_of[key] for key in reversed(state["ready"]) if key in chunks_of]


def _computed(
    submit: Callable[[Callable[[], None]], Any],
    threads: int,
    tasks: Mapping[Any, Any],
    key: Hashable,
    per_thread: int,
    stop: Stop,
) -> Any:
    """Return the value of a key of a graph, whose own task runs here; threads run the others."""
    graph = convert_legacy_graph(tasks)
    rank = order(graph).get
    begun, known, before, after, ended = unpack_callbacks(tuple(Callback.active))
    for tell in begun:
        tell(graph)
    state = start_state_from_dask(graph, sortkey=rank)
    for tell in known:
        tell(graph, state)
    failed = True
    try:
        with Calls[Hashable, Any](submit, stop) as calls:
            while state["ready"] or state["running"]:
                while state["ready"] and len(state["running"]) < per_thread * threads:
                    name = state["ready"].pop()
                    state["running"].add(name)
                    for tell in before:
                        tell(name, graph, state)
                    found = {other: state["cache"][other] for other in state["dependencies"][name]}
                    give = calls.make if name == key else calls.begin
                    give(name, partial(graph[name], found))
                name, value = calls.take()
                state["cache"][name] = value
                finish_task(graph, name, state, {key}, rank)
                for tell in after:
                    tell(name, value, graph, state, None)
        failed = False
    finally:
        for tell in ended:
            tell(graph, state, failed)
    return state["cache"][key]


def compute_here(tasks: Mapping[Any, Any], key: Hashable, per_thread: int, stop: Stop) -> Any:
    """Return the value of a key of a graph, whose tasks all run in the calling thread."""
    return _computed(lambda call: call(), 1, tasks, key, 1, stop)


def compute_in_threads(tasks: Mapping[Any, Any], key: Hashable, per_thread: int, stop: Stop) -> Any:
    """Return the value of a key of a graph, by dask's ``pool`` or as many threads as its ``num_workers``.

    The task of that key runs in the calling thread. The others see the caller's context variables, as
    in dask's own pools. Threads begin with the first task that needs one, and end with the graph: a
    forked process has none of its parent's, and does not wait for them.

    Parameters
    ----------
    tasks : mapping
        Of keys to tasks.
    key : Hashable
        Of a task that all others are computed for.
    per_thread : int
        How many tasks are handed out for each thread: 2, so that one lies ready while another runs, or 1
        where tasks hold a chunk while they wait.
    stop : Stop
        Is asked for where the computation is broken off.
    """
    given = dask.config.get("pool", None)
    if given is None:
        return compute_in_own_threads(tasks, key, per_thread, stop, threads=local_threads())
    if isinstance(given, ThreadPoolExecutor):
        return _computed(given.submit, given._max_workers, tasks, key, per_thread, stop)
    return dask.threaded.get(tasks, key)


@contextmanager
def _own_threads(threads: int) -> Iterator[Threads]:
    """Give so many threads, which end with the block; after an error it does not wait for them."""
    own = Threads(threads, "emtau")
    try:
        yield own
    except BaseException:
        own.end(0.0)
        raise
    own.end()


def compute_in_own_threads(
    tasks: Mapping[Any, Any], key: Hashable, per_thread: int, stop: Stop, *, threads: int
) -> Any:
    """Do as `compute_in_threads` by so many threads, which are there for this call alone."""
    with _own_threads(threads) as own:
        return _computed(own.submit, threads, tasks, key, per_thread, stop)


@contextmanager
def lasting_threads(executor: Executor) -> Iterator[Executor]:
    """Give an executor whose threads stay from pass to pass until the block ends, where they are its own.

    A thread that begins while another computes waits for the interpreter's lock, and who hands out tasks
    waits for the thread: milliseconds of each pass.
    """
    own = isinstance(executor, ThreadExecutor) and executor.compute is compute_in_threads
    if not own or dask.config.get("pool", None) is not None:
        yield executor
        return
    with _own_threads(executor.threads) as threads:
        yield ThreadExecutor(executor.threads, partial(_computed, threads.submit, executor.threads))
