"""How the cost of a fit grows: with the data, with workers, and with the load of a cluster's scheduler.

    python benchmarks/scale.py growth                # CPU time of an iteration; 4 minutes, 0.2 GB of disk
    python benchmarks/scale.py workers               # 1 to 8 worker processes of this machine; 2 minutes
    python benchmarks/scale.py scheduler             # up to 1,000 workers and 100,000 chunks; 6 minutes
    python benchmarks/scale.py paper                 # 10,000,000,000 rows, by arithmetic

- *growth*: CPU milliseconds of an iteration of EM by one thread on a zarr array, the median of all but the
  first. The exponent is that of a power law through this line and the one before.
- *workers*: an iteration on a local cluster of one thread each. *Idle* is the part of the workers' time in
  which no task ran; *stretched* are the seconds of tasks beside those with one worker.
- *scheduler*: one pass. The scheduler is a process of its own. All workers are objects of one other process,
  with connections, heartbeats and merges of their own; a task returns at once what a real one would. So
  *seconds* are those of that process. Of use are CPU seconds of scheduler and driver, messages to clients and
  workers, bytes of the graph, most MB of the scheduler, and *idle*, the share of a core that it takes with no
  work, which *gross* has and *scheduler* has not. *Busy* workers are those that it can serve, *wall* what
  `cluster_tasks.simulated` makes of it.
- *paper*: `--plan` of an array of which only the metadata exist, and arithmetic.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import cluster_tasks
import dask
import numpy as np
import zarr
from cluster_tasks import CHUNK_NUMBERS, Cost, clocks, cluster, of_scheduler, rates, row, table
from distributed import Client, get_task_stream
from distributed.deploy.subprocess import SubprocessCluster
from scheduling import KEY, Marked, draw, fit

from emtau_dask import EMTau, FullEM
from emtau_dask.cli.config import load_config
from emtau_dask.cli.fit import run_plan
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import ChunkRange
from emtau_dask.em.history import SilentObserver
from emtau_dask.em.state_store import row_fields
from emtau_dask.em.sums import ChunkOutcome, PassSums, merge_passes
from emtau_dask.em.task import EStepItem
from emtau_dask.execution import graph
from emtau_dask.execution.dask_graph import GraphExecutor
from emtau_dask.execution.executor import MapReduce
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.statistics import RowSums, SufficientStatistics

USUAL = {"rows": 300_000, "chunk_rows": 100_000, "features": 16, "components": 16, "covariance_type": "full"}
GROWTH: dict[str, list[Any]] = {
    "rows": [100_000, 300_000, 1_000_000, 3_000_000],
    "features": [4, 16, 64, 128],
    "components": [4, 16, 64, 256],
    "chunk_rows": [300, 1_000, 10_000, 100_000, 300_000],
    "covariance_type": ["full", "tied", "diag", "spherical"],
}
HOST = """
import asyncio, sys
from distributed import Worker

async def main(address, workers):
    started = [Worker(address, nthreads=1, memory_limit=0, dashboard=False) for _ in range(workers)]
    for begin in range(0, workers, 50):
        await asyncio.gather(*started[begin : begin + 50])
    await started[0].finished()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""
QUIET = {
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1h",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "1h",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}
"""What the many workers of a process would do besides their tasks, all of it for their own dashboards."""


def iteration_ms(folder: Path, shape: argparse.Namespace, iterations: int) -> float:
    """Return the CPU milliseconds of an iteration by one thread, in the second of two fits."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        chunks = math.ceil(shape.rows / shape.chunk_rows)
        X, centres = draw(Path(name) / "rows.zarr", chunks, shape, shape.spread)
        marks: list[float] = []
        policy = Marked(FullEM(), lambda: marks.append(time.process_time()))
        with dask.config.set(scheduler="threads", num_workers=1):
            for _ in range(2):  # The first loads compiled code.
                marks.clear()
                fit(X, centres, policy, iterations, shape.covariance_type)
    return 1e3 * float(np.median(np.diff(marks)))


def growth(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in options.growing:
        values = GROWTH[name]
        table(name, "ms an iteration", "ns a row", "exponent")
        found[name] = []
        for number, value in enumerate(values):
            shape = argparse.Namespace(**USUAL | {name: value}, spread=options.spread)
            shape.rows //= options.divide
            shape.chunk_rows = max(10, shape.chunk_rows // options.divide)
            found[name].append(iteration_ms(folder, shape, options.iterations))
            cells = [found[name][-1], 1e6 * found[name][-1] / shape.rows]
            if number and name != "covariance_type":
                cells.append(math.log(cells[0] / found[name][-2]) / math.log(value / values[number - 1]))
            print(f"| {value} | {' | '.join(f'{cell:,.3g}' for cell in cells)} |", flush=True)
    return found


def by_workers(folder: Path, options: argparse.Namespace) -> list[Counter[str]]:
    shape = argparse.Namespace(chunk_rows=100_000 // options.divide, features=16, components=16)
    X, centres = draw(folder / "rows.zarr", 32, shape)
    names = ["tasks", "merges", "received", "sent", "scheduler", "seconds", "task seconds", "idle"]
    table("workers", *names, "stretched")
    found: list[Counter[str]] = []
    for workers in options.workers:
        marks: list[Counter[str]] = []
        with cluster(workers, folder) as client, get_task_stream(client) as stream:
            policy = Marked(FullEM(), lambda marks=marks, client=client: marks.append(clocks(client)))
            fit(X, centres, policy, options.iterations)
            each = rates(marks[0], marks[-1], len(marks) - 1)
        passes: dict[str, float] = {}
        for task in stream.data:
            if match := KEY.search(str(task["key"])):
                ran = sum(part["stop"] - part["start"] for part in task["startstops"])
                passes[match["token"]] = passes.get(match["token"], 0.0) + ran
        each["task seconds"] = sum(list(passes.values())[1 - len(marks) :]) / (len(marks) - 1)
        each["idle"] = 1 - each["task seconds"] / (workers * each["seconds"])
        found.append(each)
        row(workers, *(each[name] for name in names), each["task seconds"] / found[0]["task seconds"])
    return found


@contextmanager
def many(workers: int, place: Path) -> Iterator[Client]:
    """A scheduler in a process of its own, and one more process with all workers."""
    with (
        patch.dict(
            os.environ, {"DASK_TEMPORARY_DIRECTORY": str(place), "DASK_LOGGING__DISTRIBUTED": "error"}
        ),
        SubprocessCluster(n_workers=0, dashboard_address=None) as processes,
        Client(processes) as client,
    ):
        address = client.scheduler.address
        command = [sys.executable, "-c", HOST, address, str(workers)]
        host = subprocess.Popen(command, env=os.environ | QUIET, cwd=place, stderr=subprocess.DEVNULL)
        try:
            client.wait_for_workers(workers)
            yield client
        finally:
            host.terminate()
            host.wait()


def at_once(item: EStepItem) -> PassSums:
    """Return sums of the size of those of a chunk: 16 components, 16 features, full covariances."""
    statistics = SufficientStatistics(np.ones(16), np.ones((16, 16)), np.ones((16, 16, 16)))
    chunk, n = item.chunk_range.chunk, item.chunk_range.n_rows
    return PassSums(RowSums(None, statistics), scored=n, chunks=(ChunkOutcome(chunk, n, None),))


def peak_bytes() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def load(client: Client, chunks: int, options: argparse.Namespace) -> Cost:
    """Run a pass of tasks that return at once, with the costs of chunks of 128 MB."""

    def now() -> Counter[str]:
        own = Counter(driver=time.process_time(), graph=client.scheduler_comm.byte_count)
        return own + Counter(client.run_on_scheduler(of_scheduler)) + Counter(seconds=time.perf_counter())

    ranges = (ChunkRange(chunk, 100 * chunk, 100 * chunk + 100) for chunk in range(chunks))
    items = {of.chunk: EStepItem(of, None) for of in ranges}
    costs = dict.fromkeys(items, CHUNK_NUMBERS)
    merge = partial(merge_passes, structure_named("full"))
    work = MapReduce(at_once, merge, (), items, "estep", "a pass", costs)
    idle = now()
    time.sleep(options.idle_seconds)
    before = now()
    result = GraphExecutor(client).map_reduce(work, SilentObserver())
    assert result is not None
    assert result.scored == 100 * chunks
    of, idle = rates(before, now(), 1), rates(idle, before, options.idle_seconds)
    of["idle"] = idle["scheduler"]
    of["gross"] = of["scheduler"]
    of["scheduler"] = max(0.0, of["gross"] - of["idle"] * of["seconds"])
    kept = {"MB": client.run_on_scheduler(peak_bytes) // 10**6}
    return Cost(chunks, False, len(client.nthreads()), of, kept)


def scheduler(folder: Path, options: argparse.Namespace) -> list[Cost]:
    counts = ["tasks", "merges", "graph", "scheduler", "gross", "driver", "sent", "seconds", "idle"]
    table("workers", "chunks", *counts, "MB", "levels", "ms a task", "busy", "wall", "ideal")
    found = []
    for workers in options.workers_of_scheduler:
        with many(workers, folder) as client:
            load(client, 10, options)  # loads code
            for chunks in sorted(options.chunks):
                each = load(client, chunks, options)
                found.append(each)
                batches = graph.batches_of(dict.fromkeys(range(chunks), CHUNK_NUMBERS))
                levels = graph.merge_tree(batches).root[0] - batches[0].level
                by_task, seconds = each.of["scheduler"] / each.tasks, options.chunk_seconds
                busy = seconds * chunks / each.of["tasks"] / by_task
                *_, wall, _, ideal = cluster_tasks.simulated(chunks, workers, each, seconds)
                cells = [*(each.of[name] for name in counts), each.kept["MB"], levels, 1e3 * by_task]
                row(workers, chunks, *cells, busy, wall, ideal)
    return found


def paper(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return what a fit of 16 components needs for rows of 16 features of which only the metadata exist."""
    place, size = folder / "rows.zarr", (options.rows, 16)
    X = zarr.create_array(store=place, shape=size, chunks=(1_000_000, 16), dtype="float64")
    config = folder / "config.yaml"
    config.write_text(
        f"data: {{path: {place}}}\nmodel: {{n_components: 16}}\noutput: {{directory: {folder}}}"
    )
    demand = run_plan(load_config(config, ["cluster.workers=1"]), overwrite=True).demand
    state = row_fields(as_source(X, ndim=2, what="X"), 16, EMTau(), 100)
    assert state is not None
    reading = demand.pass_bytes / options.bytes_per_second
    scoring = demand.chunks * options.chunk_seconds / options.paper_workers
    found = {
        "bytes": demand.pass_bytes,
        "chunks": demand.chunks,
        "tasks": demand.tasks,
        "MB of a process, without its cache": (demand.memory - demand.cache) / 1e6,
        "seconds to read": reading,
        "seconds to score": scoring,
        "GB of row state": options.rows * sum(each.itemsize for each in state.by_name.values()) / 1e9,
    }
    found |= {f"hours of {n} passes": n * max(reading, scoring) / 3600 for n in options.passes}
    table(f"{options.rows:,} rows", "")
    for name, value in found.items():
        print(f"| {name} | {value:,.4g} |")
    return found


PARTS = {"growth": growth, "workers": by_workers, "scheduler": scheduler, "paper": paper}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--divide", type=int, default=1, help="the rows of growth and workers, for a try")
    parser.add_argument("--iterations", type=int, default=6, help="of each fit; the first is not counted")
    parser.add_argument(
        "--spread", type=float, default=0.5, help="of the means, in standard deviations of rows"
    )
    parser.add_argument("--growing", nargs="+", choices=list(GROWTH), default=list(GROWTH))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--workers-of-scheduler", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--chunk-seconds", type=float, default=0.17, help="of a chunk of 128 MB")
    parser.add_argument("--idle-seconds", type=float, default=5, help="that a cluster is watched for")
    parser.add_argument("--rows", type=int, default=10**10, help="of paper")
    parser.add_argument("--passes", type=int, nargs="+", default=[5, 90], help="of paper")
    parser.add_argument("--paper-workers", type=int, default=100)
    parser.add_argument("--bytes-per-second", type=float, default=1e9, help="of all workers, of paper")
    parser.add_argument("--folder", type=Path, help="where the data go for as long as this runs")
    options = parser.parse_args(arguments)
    cloudpickle.register_pickle_by_value(cluster_tasks)  # Schedulers and workers cannot import it.
    found = {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found[part] = PARTS[part](Path(folder), options)
    return found


if __name__ == "__main__":
    main()
