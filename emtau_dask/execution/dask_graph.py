"""Passes that dask computes in other processes, and the monitor of a cluster's workers."""

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
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from emtau_dask.data.source import BlocksNeededError
from emtau_dask.errors import ClusterError, line_of_user, warn_user
from emtau_dask.execution.executor import MapReduce, PassObserver, ReadingTask
from emtau_dask.execution.graph import PassGraph, Payload, SharedWork, graph_of
from emtau_dask.execution.scheduler import cluster_errors, local_threads
from emtau_dask.interrupts import Stop, interruptible_at_once
from emtau_dask.process import software

POLL_SECONDS, JOIN_SECONDS = 2.0, 1.0
"""Interval of the monitor, and maximum wait for it at the end: it may be waiting for a lost scheduler."""
PATIENCE_SECONDS = 60.0
"""Maximum time that a computation goes on while workers die and no task is done."""
STABLE_SECONDS = 30.0
"""Minimum life of a worker that does not count as one that dies again and again."""
MAX_NAMED = 3
"""Maximum number of workers that a message names, the last ones."""
PROGRESS_SECONDS, PROGRESS_JOIN_SECONDS = 1.0, 5.0
"""Interval of progress reports, and maximum wait for the last one."""
NOT_DONE = ("waiting", "queued", "no-worker", "processing")
"""States of tasks that have not run."""
T = TypeVar("T")


@contextmanager
def in_background(poll: Callable[[threading.Event], None], name: str, join_seconds: float) -> Iterator[None]:
    """Run ``poll`` in a thread during the block.

    Its argument is the event that the block is over. Then it is waited for at most ``join_seconds``.
    """
    over = threading.Event()
    thread = threading.Thread(target=poll, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(join_seconds)


def _no_workers_message(client: Any, what: str) -> str:
    address = client.scheduler.address
    return (
        f"the scheduler at {address} has no workers: {what} waits until there is one. Start one (dask worker "
        f"{address}), or end this with Ctrl-C or SIGTERM. Where dask's "
        "distributed.scheduler.no-workers-timeout is set for the scheduler, the wait ends after that time "
        "with an error."
    )


def _workers(client: Any) -> set[str] | None:
    """Return the addresses of the scheduler's workers; None if it does not answer."""
    with suppress(Exception):
        return set(client.nthreads())
    return None


def _running(client: Any) -> set[str] | None:
    """Return the workers that get tasks, as `_workers`: not those that pause or retire."""
    with suppress(Exception):
        workers = client.sync(client.scheduler.identity)["workers"]
        return {address for address, worker in workers.items() if worker["status"] == "running"}
    return None


def _count_tasks() -> Callable[..., int | None]:
    """Return a function for the scheduler: a local one, which travels as code, if it lacks this package."""

    def n_tasks(keys: list[Any], dask_scheduler: Any = None) -> int | None:
        """Return how many tasks have to run for ``keys``; None if the scheduler does not know them (yet)."""
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

    return n_tasks


def _closed(client: Any) -> list[str]:
    """Return the workers of the client's own cluster if it has closed all of them, else none.

    A cluster that starts its workers closes one that is away for longer than dask's ``lost-worker-timeout``.
    """
    wanted = getattr(client.cluster, "worker_spec", None)
    return [] if not wanted or client.cluster.workers else [str(name) for name in wanted]


class _WorkerMonitor:
    """Observes a cluster's workers while a computation waits for them.

    Attributes
    ----------
    keys : list of Hashable
        Keys of the results, once they are known.
    error : Exception or None
        The error to raise: a warning that the user's filters make an error, or why the computation was ended.
    """

    def __init__(self, client: Any, what: str, needed: frozenset[str]) -> None:
        self.keys: list[Hashable] = []
        self.error: Exception | None = None
        self._client, self._what, self._needed, self._line = client, what, needed, line_of_user()
        self._seen_since: dict[str, float] = {}
        self._max_workers = 0
        self._lost: list[str] = []
        self._restart(None)

    def _restart(self, waiting: int | None) -> None:
        """Restart the clock after progress; ``waiting`` tasks have to run."""
        self._waiting, self._since, self._lost_before = waiting, time.monotonic(), len(self._lost)

    def poll(self, over: threading.Event) -> None:
        """Observe the workers until the computation is over, or cancel it if it cannot go on."""
        warned = False
        while not over.wait(POLL_SECONDS):
            workers = _workers(self._client)
            if workers is None or over.is_set():
                continue
            if not workers and not warned:
                self._warn()
            warned = not workers
            self._update(workers)
            lost = self._lacks_a_needed_one()
            if lost or self._is_stuck():
                self.error = BlocksNeededError() if lost else ClusterError(self._message())
                self._client.cancel(
                    [sys.modules["distributed"].Future(key, self._client) for key in self.keys]
                )
                return

    def _lacks_a_needed_one(self) -> bool:
        """Return whether a needed worker is lost, or gets no tasks."""
        running = _running(self._client) if self._needed else None
        return running is not None and not self._needed <= running

    def _warn(self) -> None:
        try:
            warn_user(_no_workers_message(self._client, self._what), line=self._line)
        except Warning as error:
            self.error = error

    def _update(self, workers: set[str]) -> None:
        """Update the lists of workers, and restart the clock if tasks were done."""
        now = time.monotonic()
        self._lost += sorted(self._seen_since.keys() - workers)
        self._seen_since = {worker: self._seen_since.get(worker, now) for worker in workers}
        self._max_workers = max(self._max_workers, len(workers))
        if self._waiting is not None and not self._recently_lost:
            return
        waiting = None
        with suppress(Exception):  # A scheduler may run no functions for clients: then nothing is cancelled.
            waiting = self._client.run_on_scheduler(_count_tasks(), self.keys)
        if waiting is None or self._waiting is None or waiting < self._waiting:
            self._restart(waiting)

    def _is_stuck(self) -> bool:
        """Return whether no task was done for long, and new workers died as well or none will come."""
        now = time.monotonic()
        if now - self._since < PATIENCE_SECONDS:
            return False
        if any(now - seen >= STABLE_SECONDS for seen in self._seen_since.values()):
            return False
        return self._recently_lost > self._max_workers or bool(self._lost and _closed(self._client))

    @property
    def _recently_lost(self) -> int:
        return len(self._lost) - self._lost_before

    def _message(self) -> str:
        address, seconds = self._client.scheduler.address, time.monotonic() - self._since
        happened = f"{self._recently_lost} workers were lost, of at most {self._max_workers} at a time"
        if closed := _closed(self._client):
            limit = dask.config.get("distributed.deploy.lost-worker-timeout")
            happened = (
                f"the cluster has closed its workers {', '.join(closed)}, each of which was away for longer "
                f"than dask's distributed.deploy.lost-worker-timeout ({limit})"
            )
        last = f" (the last: {', '.join(self._lost[-MAX_NAMED:])})" if self._lost else ""
        return (
            f"the workers of {address} die again and again: for {seconds:.0f} s no task of {self._what} "
            f"was done, and {happened}{last}. Their logs say why they die. Mostly it is memory: raise "
            "their memory limit, or use smaller chunks (see emtau fit --plan). A fit with a checkpoint can "
            "be resumed on a cluster whose workers stay."
        )


def computed(
    client: Any, what: str, *collections: Any, needed: frozenset[str] = frozenset()
) -> tuple[Any, ...]:
    """Return the values of collections, computed by a client's cluster.

    Parameters
    ----------
    client : distributed.Client or None
        None for what dask's own precedence chooses.
    what : str
        What waits for the values, for messages.
    *collections : dask collection
    needed : frozenset of str
        The workers that tasks cannot do without.

    Raises
    ------
    ClusterError
        The cluster failed, or its workers die again and again: for a minute no task was done, and no worker
        stayed.
    BlocksNeededError
        A worker that is needed is lost, or gets no tasks because it pauses or retires.

    Warns
    -----
    UserWarning
        The cluster has no workers; once, until there are workers again.
    """
    if client is None:
        with cluster_errors():
            return tuple(dask.compute(*collections, traverse=False))
    monitor = _WorkerMonitor(client, what, needed)

    def get(graph: Any, keys: Any, **options: Any) -> Any:
        monitor.keys = list(flatten([keys]))
        return client.get(graph, keys, **options)

    with cluster_errors():
        try:
            with in_background(monitor.poll, "emtau-workers", JOIN_SECONDS):
                found = dask.compute(*collections, traverse=False, scheduler=get)
        except CancelledError as error:
            if monitor.error is not None:
                raise monitor.error from error
            raise
    if monitor.error is not None:
        raise monitor.error
    return tuple(found)


def warn_without_workers(client: Any, what: str) -> None:
    """Warn if a client's cluster has no workers now.

    Parameters
    ----------
    client : distributed.Client or None
    what : str
        What will wait for one.
    """
    if client is not None and _workers(client) == set():
        warn_user(_no_workers_message(client, what))


def _task_states() -> Callable[..., dict[str, int] | None]:
    """Return a function for the scheduler; see `_count_tasks`."""

    def states(layer: str, dask_scheduler: Any = None) -> dict[str, int] | None:
        group = dask_scheduler.task_groups.get(layer)
        return None if group is None else dict(group.states)

    return states


def chunks_of_states(states: Mapping[str, int], n_chunks: int) -> int:
    """Return about how many chunks are done if all tasks, by state, have equally many chunks."""
    n_tasks = sum(states.values())
    waiting = sum(states.get(state, 0) for state in NOT_DONE)
    return n_chunks * (n_tasks - waiting) // n_tasks if n_tasks else 0


@contextmanager
def counted(client: Any, graph: PassGraph, observer: PassObserver) -> Iterator[None]:
    """Report chunks to ``observer`` while the block computes a graph on a cluster, and the rest at its end.

    If the scheduler does not answer, or runs no functions for clients, the rest are reported at the end only.
    """
    n_chunks = sum(map(len, graph.chunks_of.values()))
    reported = 0

    def poll(over: threading.Event) -> None:
        nonlocal reported
        task_states = _task_states()
        with suppress(Exception):
            while not over.wait(PROGRESS_SECONDS):
                states = client.run_on_scheduler(task_states, graph.layer)
                done = 0 if states is None else chunks_of_states(states, n_chunks)
                if done > reported and not over.is_set():
                    observer.chunks_done(done - reported)
                    reported = done

    with in_background(poll, "emtau-progress", PROGRESS_JOIN_SECONDS):
        yield
    observer.chunks_done(n_chunks - reported)


def _delayed(graph: PassGraph) -> Delayed:
    """Return the result of a graph, whose tasks over cached chunks run on the workers that cache them."""
    inputs, cached = f"{graph.layer}-inputs", f"{graph.layer}-cached"
    bound = {key: graph.tasks[key] for key in graph.worker_of}
    there = {**dask.get_annotations(), "workers": graph.worker_of.__getitem__, "allow_other_workers": False}
    layers = {
        inputs: MaterializedLayer(graph.inputs),
        cached: MaterializedLayer(bound, there),
        graph.layer: MaterializedLayer({key: task for key, task in graph.tasks.items() if key not in bound}),
    }
    layer = cached if graph.root in bound else graph.layer
    depends: dict[str, set[str]] = {inputs: set(), cached: {inputs}, graph.layer: {inputs, cached}}
    return Delayed(graph.root, HighLevelGraph(layers, depends), layer=layer)


@dataclass(frozen=True, eq=False)
class GraphExecutor:
    """Runs passes in other processes, by the scheduler that dask's own precedence chooses.

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
        """The threads that dask would use in this process."""
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
        if not work.items:
            observer.stage(work.stage, 0)
            return None
        with cluster_errors():
            if holders := self._holders(work):
                with suppress(BlocksNeededError):
                    return self._computed(work, observer, holders)
            return self._computed(work, observer, {})

    def _holders(self, work: MapReduce[Any]) -> dict[int, str]:
        """Return a worker that caches the rows of a chunk, for each chunk that would be computed again."""
        task = work.task
        if self.client is None or not work.computed_again or not isinstance(task, ReadingTask):
            return {}
        cached_as, running = task.cached_as, _running(self.client)
        if cached_as is None or not running:
            return {}
        answers = self.client.run(cached_as.chunks, workers=list(running), on_error="ignore")
        return {
            chunk: worker
            for worker, chunks in sorted(answers.items())
            for chunk, state in chunks.items()
            if chunk in work.items and task.is_cached(work.items[chunk], state)
        }

    def _computed(self, work: MapReduce[T], observer: PassObserver, holders: Mapping[int, str]) -> T:
        """Return the result of a pass; chunks with a worker in ``holders`` are taken from its cache.

        Raises
        ------
        BlocksNeededError
            A worker does not cache them any more, or is lost.
        """
        observer.stage(work.stage, len(work.items))
        shared = SharedWork(work.task, work.merge, None, Stop())
        payload = shared if self.client is None else Payload.of(shared, made_with=software())
        graph = graph_of(work, payload, holders)
        watched = (
            Callback(posttask=graph.count(observer))
            if self.client is None
            else counted(self.client, graph, observer)
        )
        with watched, interruptible_at_once():
            root = _delayed(graph)
            (value,) = computed(self.client, work.stage, root, needed=frozenset(holders.values()))
        return cast("T", value)
