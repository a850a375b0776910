"""Passes in threads of this process, by dask's own scheduler, which tasks need not wait for.

Dask's thread learns that a task is done before it hands out another one, so that between two tasks a
thread waits until two others have woken up: a good part of what a small chunk takes. Here dask hands
out one task more for each thread than can run, which lies ready; and the last one, beside which
nothing else is left to do, runs in the thread that waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar, cast
from weakref import WeakSet

import dask.config
import dask.threaded
from dask.callbacks import Callback
from dask.local import get_async

from emtau_dask.cluster import cluster_errors, local_threads
from emtau_dask.execution.executor import Executor, Pass, ReadingTask
from emtau_dask.execution.graph import SharedWork, graph_of
from emtau_dask.execution.interrupts import interrupts_as_they_are
from emtau_dask.execution.observer import PassObserver
from emtau_dask.execution.read_ahead import ReadAhead

T = TypeVar("T")
Compute = Callable[[Mapping[Any, Any], Hashable, int], Any]


@dataclass(frozen=True, eq=False)
class ThreadExecutor:
    """Runs passes in this process.

    Attributes
    ----------
    threads : int
    compute : callable (tasks, key, per_thread) -> value
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
        reading = _read_ahead(work)
        graph = graph_of(work, SharedWork(work.task, work.merge, reading))

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
            return cast("T", compute(graph.tasks, graph.root, per_thread))


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


def _run_here(run: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
    """Run a task in the calling thread; an interrupt is raised, also where it falls beside the task.

    Dask's own executor gives it to the future, which may have its result by then: an
    InvalidStateError.
    """
    done: Future[Any] = Future()
    done.set_result(run(*arguments))
    return done


class _HandedOut:
    """What dask submits tasks to, ``per_thread`` for each of ``pool``, of which ``last`` is the last."""

    def __init__(self, pool: ThreadPoolExecutor, last: Hashable, per_thread: int) -> None:
        self._pool, self._last = pool, last
        self.at_once = per_thread * pool._max_workers
        self._at_last = False
        self._futures: WeakSet[Future[Any]] = WeakSet()

    def expect(self, key: Hashable, *_: Any) -> None:
        """Learn that a task will be submitted: several, and then they are, or the last one alone."""
        self._at_last = key == self._last

    def submit(self, run: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Run the last task; have any other run by a thread of the pool."""
        if self._at_last:
            return _run_here(run, *arguments)
        future = self._pool.submit(copy_context().run, run, *arguments)
        self._futures.add(future)
        return future

    def cancel(self) -> list[Future[Any]]:
        """Let no other task begin; return those that have."""
        return [future for future in list(self._futures) if not future.cancel()]


def compute_here(tasks: Mapping[Any, Any], key: Hashable, per_thread: int = 1) -> Any:
    """Return the value of a key of a graph, whose tasks all run in the calling thread."""
    return get_async(_run_here, 1, tasks, key)


def compute_in_threads(tasks: Mapping[Any, Any], key: Hashable, per_thread: int) -> Any:
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
    """
    given = dask.config.get("pool", None)
    if given is None:
        return compute_in_own_threads(tasks, key, per_thread, threads=local_threads())
    if isinstance(given, ThreadPoolExecutor):
        return _computed(given, tasks, key, per_thread)
    return dask.threaded.get(tasks, key)


@contextmanager
def _own_threads(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool of so many threads, which end with the block; after an error it does not wait for them."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="emtau")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def compute_in_own_threads(tasks: Mapping[Any, Any], key: Hashable, per_thread: int, *, threads: int) -> Any:
    """Do as `compute_in_threads` by so many threads, which are there for this call alone."""
    with _own_threads(threads) as pool:
        return _computed(pool, tasks, key, per_thread)


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
    with _own_threads(executor.threads) as pool:
        yield ThreadExecutor(executor.threads, partial(_computed, pool))


def _packed(error: BaseException, _: Any) -> tuple[BaseException, TracebackType | None]:
    """Return what dask raises again in the calling thread, where no text of it is needed."""
    return error, sys.exc_info()[2]


def _computed(pool: ThreadPoolExecutor, tasks: Mapping[Any, Any], key: Hashable, per_thread: int) -> Any:
    handed_out = _HandedOut(pool, key, per_thread)
    # Not by a context of its own, which all threads that compute would share.
    callbacks = [(None, None, handed_out.expect, None, None), *Callback.active]
    try:
        with interrupts_as_they_are():
            # Not by dask.threaded.get, whose threads and lock a forked process would wait for without end.
            return get_async(
                handed_out.submit,
                handed_out.at_once,
                tasks,
                key,
                get_id=get_ident,
                pack_exception=_packed,
                callbacks=callbacks,
            )
    except Exception:
        wait(handed_out.cancel())  # They may write, which has to end before anything is cleared away.
        raise
    except BaseException:
        handed_out.cancel()  # An interrupt may have left locks half taken that waiting would take.
        raise
