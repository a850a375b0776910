"""Passes that dask computes elsewhere, and what is said and done while a cluster's workers are away."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import dask
from dask.callbacks import Callback
from dask.core import flatten
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from emtau_dask.errors import ClusterError, line_of_user, warn_user
from emtau_dask.execution.executor import MapReduce, PassObserver
from emtau_dask.execution.graph import PassGraph, Payload, SharedWork, graph_of
from emtau_dask.execution.scheduler import cluster_errors, local_threads
from emtau_dask.interrupts import Stop, interruptible_at_once
from emtau_dask.process import software

LOOK_SECONDS = 2.0
LEAVE_SECONDS = 1.0
"""How long the end waits for the thread that looks, which may wait for a scheduler that is gone."""
PATIENCE_SECONDS = 60.0
"""How long a computation goes on while workers die and none of its tasks gets done."""
SETTLED_SECONDS = 30.0
"""A worker that has been there for so long is not one of those that die again and again."""
NAMED = 3
"""Workers that a message names, at most: the last ones."""
PROGRESS_SECONDS, PROGRESS_LEAVE_SECONDS = 1.0, 5.0
NOT_DONE = ("waiting", "queued", "no-worker", "processing")
"""States of tasks that have not run."""
T = TypeVar("T")


@contextmanager
def looking(look: Callable[[threading.Event], None], name: str, leave_seconds: float) -> Iterator[None]:
    """Run ``look`` in a thread beside the block.

    It is given the event that the block is over, after which it is waited for so long: it may wait for a
    scheduler that is gone.
    """
    over = threading.Event()
    thread = threading.Thread(target=look, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(leave_seconds)


def _none_message(client: Any, what: str) -> str:
    address = client.scheduler.address
    return (
        f"the scheduler at {address} has no workers: {what} waits until there is one. Start one (dask worker "
        f"{address}), or end this with Ctrl-C or SIGTERM. Where dask's "
        "distributed.scheduler.no-workers-timeout is set for the scheduler, the wait ends after that time "
        "with an error."
    )


def _workers(client: Any) -> set[str] | None:
    """Return the addresses of the workers that the scheduler has; None where it says nothing."""
    with suppress(Exception):
        return set(client.nthreads())
    return None


def _tasks_question() -> Callable[..., int | None]:
    """Return what a scheduler runs. Being local, it travels as code: the scheduler may lack this package."""

    def left(keys: list[Any], dask_scheduler: Any = None) -> int | None:
        """Return how many tasks have to run for ``keys``; None where it does not know them (yet)."""
        waiting = [dask_scheduler.tasks.get(key) for key in keys]
        if None in waiting:
            return None
        found = set()
        while waiting:
            task = waiting.pop()
            if task.state != "memory" and task not in found:
                found.add(task)
                waiting.extend(task.dependencies)
        return len(found)

    return left


def _closed(client: Any) -> list[str]:
    """Return the workers that the client's own cluster was to have, where it has closed all of them.

    Dask's clusters that start their workers close one that is gone for ``lost-worker-timeout``.
    """
    wanted = getattr(client.cluster, "worker_spec", None)
    return [] if not wanted or client.cluster.workers else [str(name) for name in wanted]


class _Watch:
    """What is seen of a cluster's workers while a computation waits for them.

    Attributes
    ----------
    keys : list of Hashable
        Of what is computed, once they are known.
    error : Exception or None
        What to raise: a warning that is an error by the user's filters, or why the computation was ended.
    """

    def __init__(self, client: Any, what: str) -> None:
        self.keys: list[Hashable] = []
        self.error: Exception | None = None
        self._client, self._what, self._line = client, what, line_of_user()
        self._first_seen: dict[str, float] = {}
        self._most = 0
        self._lost: list[str] = []
        self._done_more(None)

    def _done_more(self, left: int | None) -> None:
        """Begin to wait anew; ``left`` tasks have to run."""
        self._left, self._since, self._lost_before = left, time.monotonic(), len(self._lost)

    def look(self, over: threading.Event) -> None:
        """Look until the computation is over, or ended here."""
        warned = False
        while not over.wait(LOOK_SECONDS):
            workers = _workers(self._client)
            if workers is None or over.is_set():
                continue
            if not workers and not warned:
                self._warn()
            warned = not workers
            self._note(workers)
            if self._hopeless():
                self.error = ClusterError(self._why())
                self._client.cancel(
                    [sys.modules["distributed"].Future(key, self._client) for key in self.keys]
                )
                return

    def _warn(self) -> None:
        try:
            warn_user(_none_message(self._client, self._what), line=self._line)
        except Warning as error:
            self.error = error

    def _note(self, workers: set[str]) -> None:
        """Note which workers are there, and whether more is done than before."""
        now = time.monotonic()
        self._lost += sorted(self._first_seen.keys() - workers)
        self._first_seen = {worker: self._first_seen.get(worker, now) for worker in workers}
        self._most = max(self._most, len(workers))
        if self._left is not None and not self._lost_meanwhile:
            return
        left = None
        with suppress(Exception):  # A scheduler may run no functions for clients: then nothing is ended.
            left = self._client.run_on_scheduler(_tasks_question(), self.keys)
        if left is None or self._left is None or left < self._left:
            self._done_more(left)

    def _hopeless(self) -> bool:
        """Return whether for long nothing was done, and either new workers died as well or none will come."""
        now = time.monotonic()
        if now - self._since < PATIENCE_SECONDS:
            return False
        if any(now - seen >= SETTLED_SECONDS for seen in self._first_seen.values()):
            return False
        return self._lost_meanwhile > self._most or bool(self._lost and _closed(self._client))

    @property
    def _lost_meanwhile(self) -> int:
        return len(self._lost) - self._lost_before

    def _why(self) -> str:
        address, seconds = self._client.scheduler.address, time.monotonic() - self._since
        happened = f"{self._lost_meanwhile} workers were lost, of at most {self._most} at a time"
        if closed := _closed(self._client):
            limit = dask.config.get("distributed.deploy.lost-worker-timeout")
            happened = (
                f"the cluster has closed its workers {', '.join(closed)}, each of which was away for longer "
                f"than dask's distributed.deploy.lost-worker-timeout ({limit})"
            )
        last = f" (the last: {', '.join(self._lost[-NAMED:])})" if self._lost else ""
        return (
            f"the workers of {address} die again and again: for {seconds:.0f} s no task of {self._what} "
            f"was done, and {happened}{last}. Their logs say why they die. Mostly it is memory: raise "
            "their memory limit, or use smaller chunks (see emtau fit --plan). A fit with a checkpoint can "
            "be resumed on a cluster whose workers stay."
        )


def computed(client: Any, what: str, *collections: Any) -> tuple[Any, ...]:
    """Return the values of collections, computed by a client's cluster.

    Parameters
    ----------
    client : distributed.Client or None
        None for what dask's own precedence chooses.
    what : str
        What waits for it, for messages.
    *collections : dask collection

    Raises
    ------
    ClusterError
        The cluster failed, or its workers die again and again: for a minute no task was done, and none of
        the workers stayed.

    Warns
    -----
    UserWarning
        The cluster has no workers; within some seconds, and once until there are workers again.
    """
    if client is None:
        with cluster_errors():
            return tuple(dask.compute(*collections, traverse=False))
    watch = _Watch(client, what)

    def get(graph: Any, keys: Any, **options: Any) -> Any:
        watch.keys = list(flatten([keys]))
        return client.get(graph, keys, **options)

    with cluster_errors():
        try:
            with looking(watch.look, "emtau-workers", LEAVE_SECONDS):
                found = dask.compute(*collections, traverse=False, scheduler=get)
        except CancelledError as error:
            if watch.error is not None:
                raise watch.error from error
            raise
    if watch.error is not None:
        raise watch.error
    return tuple(found)


def warn_without_workers(client: Any, what: str) -> None:
    """Warn where a client's cluster has no workers now.

    Parameters
    ----------
    client : distributed.Client or None
    what : str
        What will wait for one.
    """
    if client is not None and _workers(client) == set():
        warn_user(_none_message(client, what))


def _progress_question() -> Callable[..., dict[str, int] | None]:
    """Return what a scheduler runs. Being local, it travels as code: the scheduler may lack this package."""

    def states(layer: str, dask_scheduler: Any = None) -> dict[str, int] | None:
        group = dask_scheduler.task_groups.get(layer)
        return None if group is None else dict(group.states)

    return states


def chunks_of_states(states: Mapping[str, int], n_chunks: int) -> int:
    """Return about how many chunks are done, where tasks of equal numbers of chunks are in these states."""
    n_tasks = sum(states.values())
    waiting = sum(states.get(state, 0) for state in NOT_DONE)
    return n_chunks * (n_tasks - waiting) // n_tasks if n_tasks else 0


@contextmanager
def counted(client: Any, graph: PassGraph, observer: PassObserver) -> Iterator[None]:
    """Tell ``observer`` of chunks while the block computes a graph on a cluster, and of all at its end.

    A scheduler that does not answer, or runs no functions for clients, is not asked again in this pass.
    """
    n_chunks = sum(map(len, graph.chunks_of.values()))
    told = 0

    def look(over: threading.Event) -> None:
        nonlocal told
        question = _progress_question()
        with suppress(Exception):
            while not over.wait(PROGRESS_SECONDS):
                states = client.run_on_scheduler(question, graph.layer)
                done = 0 if states is None else chunks_of_states(states, n_chunks)
                if done > told and not over.is_set():
                    observer.chunks_done(done - told)
                    told = done

    with looking(look, "emtau-progress", PROGRESS_LEAVE_SECONDS):
        yield
    observer.chunks_done(n_chunks - told)


@dataclass(frozen=True, eq=False)
class GraphExecutor:
    """Runs passes by the scheduler that dask's own precedence chooses, in other processes.

    Attributes
    ----------
    client : distributed.Client or None
        None for a scheduler of this machine's processes, or of the user's.
    """

    client: Any

    @property
    def in_process(self) -> bool:
        """No."""
        return False

    @property
    def threads(self) -> int:
        """As many as dask would use in this process."""
        return local_threads()

    @property
    def workers(self) -> int:
        """The threads of all workers now; without a client, those of this process."""
        if self.client is None:
            return self.threads
        with cluster_errors():
            return max(1, sum(int(threads) for threads in self.client.nthreads().values()))

    def map_reduce(self, work: MapReduce[T], observer: PassObserver) -> T | None:
        """See `Executor.map_reduce`."""
        observer.stage(work.stage, len(work.items))
        if not work.items:
            return None
        shared = SharedWork(work.task, work.merge, None, Stop())
        with cluster_errors():
            payload = shared if self.client is None else Payload.of(shared, made_with=software())
            graph = graph_of(work, payload)
            layers = HighLevelGraph.from_collections(graph.layer, graph.tasks)
            watched = (
                Callback(posttask=graph.count(observer))
                if self.client is None
                else counted(self.client, graph, observer)
            )
            with watched, interruptible_at_once():
                root = Delayed(graph.root, layers, layer=graph.layer)
                (value,) = computed(self.client, work.stage, root)
        return cast("T", value)
