"""What a pass over many chunks costs a cluster beside its arithmetic: tasks, messages, the scheduler's time.

    python benchmarks/cluster_tasks.py               # 9 minutes of CPU time, 45 MB of disk
    python benchmarks/cluster_tasks.py --chunks 20 --workers 1 2

EM with 16 components on tiny chunks of 16 features in a zarr array. They share tasks as if each had 128 MB,
the most chunks also with a task each (*alone*). Scheduler, driver and workers of one thread are processes of
this machine. All is counted in all iterations but the first, which loads code. Three tables:

- What an iteration costs: tasks and merges; messages that the scheduler receives and sends; CPU seconds of
  the scheduler, less what it takes with no work, and milliseconds of them for a task or merge; CPU seconds
  of the driver; kB from the scheduler to all workers (tasks, and what these share); kB from workers to
  others and to the driver (results, and again what tasks share). Of a worker after the fit: keys of results
  that it holds, tasks that it knows, MB resident.
- Seconds of an iteration of tiny tasks, of one chunk each, divided by tasks and merges, by number of workers.
- Clusters that cannot be had here, simulated: the driver makes the graph, the scheduler takes the
  milliseconds of the first table's last lines for each task before it begins, and workers do tasks of 0.17 s
  a chunk in turn. *Scheduler* is the part of the wall seconds in which it works, *ideal* all work divided by
  the workers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapreplace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import numpy as np
import psutil
from distributed import Client
from distributed.deploy.subprocess import SubprocessCluster
from scheduling import Marked, draw, fit

from emtau_dask import FullEM
from emtau_dask.data.source import RangeSource
from emtau_dask.execution import graph

CHUNK_NUMBERS = 2.0**24
LARGE = {"MIN_BATCH_COST": 0, "MAX_BATCH_COST": 0}
LIMITS = {False: LARGE, True: LARGE | {"ENOUGH_TASKS": float("inf")}}
"""Of `execution.graph`: chunks share a task only where there are so many, and never."""


@dataclass(frozen=True)
class Cost:
    """What an iteration took, by name (see `clocks`), and what is left of the fit in the largest worker."""

    chunks: int
    alone: bool
    workers: int
    of: Counter[str]
    kept: dict[str, int]

    @property
    def tasks(self) -> float:
        return self.of["tasks"] + self.of["merges"]


@contextmanager
def cluster(workers: int, place: Path) -> Iterator[Client]:
    options = {"local_directory": str(place), "memory_limit": 0, "dashboard": False}
    with (
        patch.dict(os.environ, {"DASK_TEMPORARY_DIRECTORY": str(place)}),
        SubprocessCluster(
            n_workers=workers,
            threads_per_worker=1,
            worker_class="distributed.Worker",
            worker_kwargs=options,
            dashboard_address=None,
        ) as processes,
        Client(processes) as client,
    ):
        client.wait_for_workers(workers)
        yield client


def of_scheduler(dask_scheduler: Any) -> dict[str, float]:
    to_workers = list(dask_scheduler.stream_comms.values())
    streams = to_workers + list(dask_scheduler.client_comms.values())
    done = {name: prefix.state_counts["memory"] for name, prefix in dask_scheduler.task_prefixes.items()}
    return {
        "scheduler": time.process_time(),
        "sent": sum(stream.message_count for stream in streams),
        "to workers": sum(stream.byte_count for stream in to_workers),
        "tasks": done.get("emtau-estep", 0),
        "merges": done.get("emtau-merge", 0),
    }


def of_worker(dask_worker: Any) -> dict[str, float]:
    return {
        "received": dask_worker.batched_stream.message_count,
        "from workers": dask_worker.transfer_outgoing_bytes_total,
    }


def kept_by_worker(dask_worker: Any) -> dict[str, int]:
    resident = psutil.Process().memory_info().rss
    return {"keys": len(dask_worker.data), "known": len(dask_worker.state.tasks), "MB": resident // 10**6}


def clocks(client: Client) -> Counter[str]:
    """Return all that is counted, so far: seconds, CPU seconds, messages, bytes, tasks."""
    found = Counter({"seconds": time.perf_counter(), "driver": time.process_time()})
    found.update(received=client.scheduler_comm.message_count)
    for counts in (client.run_on_scheduler(of_scheduler), *client.run(of_worker).values()):
        found.update(counts)
    return found


def rates(first: Counter[str], last: Counter[str], per: float) -> Counter[str]:
    return Counter({name: (last[name] - first[name]) / per for name in last})


def cost(client: Client, X: RangeSource, centres: np.ndarray, alone: bool, options: Any) -> Cost:
    marks: list[Counter[str]] = []
    with patch.multiple(graph, **LIMITS[alone]), dask.config.set({"emtau.compiled": "never"}):
        fit(X, centres, Marked(FullEM(), lambda: marks.append(clocks(client))), options.iterations)
    time.sleep(1)  # for what the fit has left to do
    idle = clocks(client)
    time.sleep(options.idle_seconds)
    idle = rates(idle, clocks(client), options.idle_seconds)
    each = rates(marks[0], marks[-1], options.iterations - 1)
    for process in ("scheduler", "driver"):
        each[process] = max(0.0, each[process] - idle[process] * each["seconds"])
    kept = max(client.run(kept_by_worker).values(), key=lambda worker: worker["MB"])
    return Cost(len(X.chunk_rows), alone, len(client.nthreads()), each, kept)


def wall(seconds: list[float], workers: int, begin: float, each: float) -> float:
    """Return when the last of some tasks ends; from ``begin`` on one is handed out each ``each`` seconds."""
    free = [begin] * workers
    for number, task in enumerate(seconds, start=1):
        heapreplace(free, max(free[0], begin + number * each) + task)
    return max(free)


def simulated(chunks: int, workers: int, by: Cost, chunk_seconds: float) -> tuple[Any, ...]:
    """Return tasks, the longest one's seconds, wall seconds, the scheduler's part, and the ideal seconds."""
    with patch.multiple(graph, **LIMITS[by.alone]):
        batches = graph.batches_of(dict.fromkeys(range(chunks), CHUNK_NUMBERS))
    seconds = [chunk_seconds * len(batch.chunks) for batch in batches]
    seconds += [0.0] * len(graph.merge_tree(batches).children)
    each, begin = by.of["scheduler"] / by.tasks, chunks * by.of["driver"] / by.chunks
    total = wall(seconds, workers, begin, each)
    return len(seconds), max(seconds), total, len(seconds) * each / total, chunks * chunk_seconds / workers


def table(*header: str) -> None:
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)


def row(*cells: Any) -> None:
    texts = (f"{cell:,.3g}" if isinstance(cell, float) and cell < 100 else f"{cell:,.0f}" for cell in cells)
    print(f"| {' | '.join(texts)} |", flush=True)


def main(arguments: list[str] | None = None) -> list[Cost]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--chunk-rows", type=int, default=10)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="of the second table")
    parser.add_argument("--iterations", type=int, default=2, help="of each fit; the first is not counted")
    parser.add_argument("--chunk-seconds", type=float, default=0.17, help="of a chunk of 128 MB")
    parser.add_argument("--simulated", type=int, nargs="+", default=[10, 100, 1_000], help="workers")
    parser.add_argument("--idle-seconds", type=float, default=3, help="that a cluster is watched for")
    parser.add_argument("--folder", type=Path, help="where the data go for as long as this runs")
    options = parser.parse_args(arguments)
    found: list[Cost] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        place = Path(name)
        data = {chunks: draw(place / f"{chunks}.zarr", chunks, options) for chunks in options.chunks}
        names = "received", "sent", "scheduler s", "ms a task", "driver s", "kB to workers", "kB from workers"
        table("chunks", "alone", "tasks", "merges", *names, "keys kept", "tasks known", "MB")
        with cluster(2, place) as client:
            for chunks, alone in [*((chunks, False) for chunks in sorted(data)), (max(data), True)]:
                each = cost(client, *data[chunks], alone, options)
                of, ms = each.of, 1e3 * each.of["scheduler"] / each.tasks
                counts = [of[name] for name in ("tasks", "merges", "received", "sent", "scheduler")]
                sizes = [of[name] / 1e3 for name in ("to workers", "from workers")]
                row(chunks, alone, *counts, ms, of["driver"], *sizes, *each.kept.values())
                found.append(each)
        table("workers", "chunks", "s an iteration", "ms a task")
        middle = sorted(data)[len(data) // 2]
        for workers in options.workers:
            with cluster(workers, place) as client:
                each = cost(client, *data[middle], True, options)
            row(workers, middle, each.of["seconds"], 1e3 * each.of["seconds"] / each.tasks)
            found.append(each)
    table("chunks", "alone", "workers", "tasks", "longest s", "wall s", "scheduler", "ideal s")
    for chunks in (*options.chunks, 10 * max(options.chunks)):
        for by in (found[len(data) - 1], found[len(data)]):
            for workers in options.simulated:
                row(chunks, by.alone, workers, *simulated(chunks, workers, by, options.chunk_seconds))
    return found


if __name__ == "__main__":
    main()
