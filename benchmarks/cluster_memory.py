"""Whether a fit on a local cluster stays within its workers' memory: spills, pauses, restarts, and the peak.

    python benchmarks/cluster_memory.py                # 20,000,000 x 16 on 2 workers of 1 GB, 2.6 GB of disk
    python benchmarks/cluster_memory.py --rows 40000 --chunk-rows 10000 --iterations 2

EM-Tau, after k-means by default, on the cluster that `emtau fit --scheduler processes` starts. What
happened is told by those to whom it did: the scheduler's log of its workers (one that pauses, one that
leaves, also to be restarted by its nanny), and each worker's count of what it has written to disk. The peak
is the kernel's high-water mark of a worker's resident memory. Exits with 1 where a worker spilled, paused
or left.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
from sklearn.exceptions import ConvergenceWarning

from emtau_dask.cli.cluster import computing
from emtau_dask.cli.config import RunConfig, estimator_of, load_config
from emtau_dask.cli.inputs import open_inputs
from emtau_dask.cli.plan import plan_of
from emtau_dask.em.history import SilentObserver
from emtau_dask.execution.scheduler import active_client

CONFIG = """
data:
  path: {folder}/rows.zarr
  dataset: mixture
  dataset_options: {{rows: {rows}, chunk_rows: {chunk_rows}, features: {features}, components: {components}}}
model: {{n_components: {components}, covariance_type: full, init_params: {init}, random_state: 0}}
algorithm: {{name: em-tau, tau: {tau}}}
stop: {{tol: 0.0, max_iter: {iterations}}}
cluster: {{scheduler: processes, workers: {workers}, threads: 1, memory_limit: "{memory_limit}"}}
output: {{directory: {folder}/run}}
"""


@dataclass(frozen=True)
class WorkerMemory:
    """What a worker says of itself, in bytes: resident at its peak; written to disk for lack of room."""

    peak: int
    spilled: int


@dataclass(frozen=True)
class Outcome:
    """Of a fit.

    Attributes
    ----------
    workers : mapping of str to WorkerMemory
        Those that are there at the end.
    pauses, departures : int
        As the scheduler counted them.
    predicted : int
        Bytes, of one worker, by the plan.
    seconds : float
    """

    workers: Mapping[str, WorkerMemory]
    pauses: int
    departures: int
    predicted: int
    seconds: float

    @property
    def undisturbed(self) -> bool:
        spilled = any(worker.spilled for worker in self.workers.values())
        return not (spilled or self.pauses or self.departures)


def memory_of(dask_worker: Any) -> WorkerMemory:
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    written = getattr(dask_worker.data, "cumulative_metrics", {}).get(("disk-write", "bytes"), 0)
    return WorkerMemory(1024 * int(peak[1]), int(written))


def happened(client: Any) -> tuple[int, int]:
    """Return how often workers have paused and left since the scheduler began."""
    topics = client.get_events()
    logged = [event for topic, events in topics.items() if topic != "all" for _, event in events]
    events = [event for event in logged if isinstance(event, Mapping) and "action" in event]
    pauses = sum(
        event["action"] == "worker-status-change" and event["status"] == "paused" for event in events
    )
    return pauses, sum(event["action"] == "remove-worker" for event in events)


def fit(config: RunConfig) -> Outcome:
    observer = SilentObserver()
    inputs = open_inputs(config, overwrite=False, observer=observer)
    predicted = plan_of(config, inputs).demand.memory
    with computing(config.cluster, observer), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        client, began = active_client(), time.perf_counter()
        estimator_of(config).fit(inputs.rows)
        seconds = time.perf_counter() - began
        return Outcome(client.run(memory_of), *happened(client), predicted, seconds)


def main(arguments: list[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--chunk-rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--tau", type=int, default=2, help="iterations after which rows go inactive")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--init", default="kmeans", help="an init_params")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-limit", default="1 GB", help="of each worker")
    parser.add_argument("--folder", type=Path, help="keep the data here; by default a temporary folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(temporary) / "config.yaml"
        path.write_text(CONFIG.format(**vars(options) | {"folder": folder}))
        with dask.config.set({"temporary-directory": temporary}):
            outcome = fit(load_config(path, []))
    for name, worker in outcome.workers.items():
        print(
            f"{name}: peak {worker.peak / 1e6:.0f} MB resident, predicted at most "
            f"{outcome.predicted / 1e6:.0f} MB, {worker.spilled / 1e6:.0f} MB spilled"
        )
    print(
        f"{options.rows:,} rows in {outcome.seconds:.1f} s: "
        f"{outcome.pauses} pauses, {outcome.departures} departures of workers"
    )
    return outcome


if __name__ == "__main__":
    sys.exit(0 if main().undisturbed else 1)
