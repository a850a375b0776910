"""What scheduling costs an iteration over many small chunks, in threads and on a local cluster.

    python benchmarks/scheduling.py                  # 1,000 and 10,000 chunks of 1,000 x 16, 1.4 GB of disk
    python benchmarks/scheduling.py --chunks 20 --chunk-rows 50

Rows from a zarr array, 16 components, full covariances; EM, and EM-Tau with every row active, whose
tasks also read and write row state. Three shares, each of all iterations but the first, which loads code:

- outside: of workers times seconds, what no chunk's task ran in. Beside scheduling that is the M-step,
  removing old row state, waiting for the last task and, on a cluster, merging.
- driver: of the CPU seconds of all processes, those of what schedules: in threads the thread that called
  `fit`; on a cluster the process of client and scheduler.
- idle: what the driver's process would have taken in that time had it done nothing, measured after the
  fit; on a cluster only.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import numpy as np
import psutil
import zarr
from distributed import Client, LocalCluster, get_task_stream
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, FullEM, GaussianMixture
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import RangeSource
from emtau_dask.policies.policy import ActivityPolicy, Evidence, PassSummary, RowArray, RowState, Schedule

ALGORITHMS = {"em": FullEM(), "em-tau": EMTau(tau=100, revisit=None)}
KEY = re.compile(r"emtau-(?P<name>[a-z]+)-(?P<token>[0-9a-f]{32})")


@dataclass(frozen=True)
class Mark:
    """The clocks at the end of an iteration: seconds, and CPU seconds of the driver and of all processes."""

    seconds: float
    driver: float
    processes: float


@dataclass(frozen=True)
class Marked:
    """A policy that reads the clocks after every iteration; in other processes, the policy alone."""

    policy: ActivityPolicy
    mark: Callable[[], None]

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (cloudpickle.dumps(self.policy),)

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        return self.policy.row_arrays(n_components, max_iter)

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, Any]:
        return self.policy.update(state, evidence)

    def schedule(self, summary: PassSummary) -> Schedule:
        self.mark()
        return self.policy.schedule(summary)


@dataclass(frozen=True)
class Ran:
    """A task that ran: its key, and for how long. In threads batches have keys, and merge themselves."""

    key: str
    seconds: float


@dataclass
class Clocks:
    """Where a fit leaves its marks and its tasks.

    Attributes
    ----------
    driver : callable () -> float
        CPU seconds so far of what schedules.
    others : sequence of psutil.Process
        The processes that compute beside this one.
    idle : float or None
        CPU seconds that what schedules takes in a second with no work; None where it is a thread.
    """

    driver: Callable[[], float]
    others: Sequence[psutil.Process] = ()
    idle: float | None = None
    marks: list[Mark] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)

    def mark(self) -> None:
        times = [process.cpu_times() for process in self.others]
        spent = time.process_time() + sum(spent.user + spent.system for spent in times)
        self.marks.append(Mark(time.perf_counter(), self.driver(), spent))


class TimedThreads(ThreadPoolExecutor):
    """Threads that note how long each batch of an iteration took."""

    def __init__(self, workers: int, clocks: Clocks) -> None:
        super().__init__(workers)
        self.clocks = clocks

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        key = f"emtau-estep-{len(self.clocks.marks):032x}"

        def timed() -> Any:
            began = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self.clocks.ran.append(Ran(key, time.perf_counter() - began))

        return super().submit(timed)


@contextmanager
def threads(options: argparse.Namespace) -> Iterator[Clocks]:
    clocks = Clocks(time.thread_time)
    with (
        TimedThreads(options.workers, clocks) as pool,
        dask.config.set(scheduler="threads", pool=pool),
    ):
        yield clocks


@contextmanager
def cluster(options: argparse.Namespace) -> Iterator[Clocks]:
    with (
        dask.config.set({"temporary-directory": str(options.place)}),
        LocalCluster(options.workers, threads_per_worker=1, dashboard_address=None) as local,
        Client(local) as client,
    ):
        pids = client.run(os.getpid).values()
        clocks = Clocks(time.process_time, [psutil.Process(pid) for pid in pids])
        with get_task_stream(client) as stream:
            yield clocks
        clocks.idle = idle_rate(options.idle_seconds)
        clocks.ran = [
            Ran(str(task["key"]), sum(part["stop"] - part["start"] for part in task["startstops"]))
            for task in stream.data
        ]


def idle_rate(seconds: float) -> float:
    """Return the CPU seconds that this process takes in a second while nothing is asked of it."""
    time.sleep(min(1.0, seconds))  # for what the fit before has left to do
    began, spent = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - spent) / (time.perf_counter() - began)


SCHEDULERS = {"threads": threads, "cluster": cluster}


@dataclass(frozen=True)
class Cost:
    """What an iteration took, all of them but the first together.

    Attributes
    ----------
    tasks : int
        Of chunks, in an iteration.
    merges : int
    seconds : float
    outside, driver : float
        Two of the shares.
    idle : float or None
        The third; None in threads.
    """

    scheduler: str
    algorithm: str
    chunks: int
    tasks: int
    merges: int
    seconds: float
    outside: float
    driver: float
    idle: float | None


def draw(
    path: Path, chunks: int, options: argparse.Namespace, spread: float = 3.0
) -> tuple[RangeSource, np.ndarray]:
    """Write rows around some centres with a standard deviation of ``spread``, and return both."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(options.components, options.features)) * spread
    stored = zarr.create_array(
        store=path,
        shape=(chunks * options.chunk_rows, options.features),
        chunks=(options.chunk_rows, options.features),
        dtype="float64",
    )
    step = options.chunk_rows * 64
    for start in range(0, stored.shape[0], step):
        which = centres[rng.integers(options.components, size=min(step, stored.shape[0] - start))]
        stored[start : start + step] = which + rng.normal(size=which.shape)
    return as_source(stored, ndim=2, what="X"), centres


def fit(
    X: RangeSource, centres: np.ndarray, policy: Any, iterations: int, covariance_type: str = "full"
) -> None:
    n_components, n_features = centres.shape
    precisions = {
        "full": np.array([np.eye(n_features)] * n_components),
        "tied": np.eye(n_features),
        "diag": np.ones((n_components, n_features)),
        "spherical": np.ones(n_components),
    }
    mixture = GaussianMixture(
        n_components,
        covariance_type=covariance_type,
        algorithm=policy,
        tol=0,
        max_iter=iterations,
        weights_init=np.full(n_components, 1 / n_components),
        means_init=centres,
        precisions_init=precisions[covariance_type],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture.fit(X)


def cost(X: RangeSource, centres: np.ndarray, scheduler: str, algorithm: str, options: Any) -> Cost:
    with SCHEDULERS[scheduler](options) as clocks:
        fit(X, centres, Marked(ALGORITHMS[algorithm], clocks.mark), options.iterations)
    first, last, n = clocks.marks[0], clocks.marks[-1], options.iterations - 1
    passes: dict[str, list[tuple[str, Ran]]] = {}
    for task in clocks.ran:
        if found := KEY.search(task.key):
            passes.setdefault(found["token"], []).append((found["name"], task))
    counted = [named for tasks in list(passes.values())[-n:] for named in tasks]
    of_chunks = [task for name, task in counted if name == "estep"]
    seconds, processes = last.seconds - first.seconds, last.processes - first.processes
    return Cost(
        scheduler,
        algorithm,
        len(X.chunk_rows),
        len(of_chunks) // n,
        sum(name == "merge" for name, _ in counted) // n,
        seconds / n,
        1 - sum(task.seconds for task in of_chunks) / (options.workers * seconds),
        (last.driver - first.driver) / processes,
        None if clocks.idle is None else clocks.idle * seconds / processes,
    )


def main(arguments: list[str] | None = None) -> list[Cost]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--chunk-rows", type=int, default=1_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="threads, or processes of one thread")
    parser.add_argument("--iterations", type=int, default=4, help="of each fit; the first is not counted")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--schedulers", nargs="+", choices=list(SCHEDULERS), default=list(SCHEDULERS))
    parser.add_argument(
        "--idle-seconds", type=float, default=5, help="for which a cluster is watched with no work"
    )
    parser.add_argument("--folder", type=Path, help="where the data go for as long as this runs")
    options = parser.parse_args(arguments)
    found = []
    print("| scheduler | algorithm | chunks | tasks | merges | seconds | outside | driver | idle |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        options.place = Path(place)
        for chunks in options.chunks:
            X, centres = draw(options.place / f"rows-{chunks}.zarr", chunks, options)
            for scheduler in options.schedulers:
                for algorithm in options.algorithms:
                    each = cost(X, centres, scheduler, algorithm, options)
                    idle = "-" if each.idle is None else f"{each.idle:.3f}"
                    print(
                        f"| {scheduler} | {algorithm} | {chunks:,} | {each.tasks} | {each.merges} "
                        f"| {each.seconds:.3f} | {each.outside:.3f} | {each.driver:.3f} "
                        f"| {idle} |",
                        flush=True,
                    )
                    found.append(each)
    return found


if __name__ == "__main__":
    main()
