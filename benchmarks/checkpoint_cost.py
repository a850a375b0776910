"""What checkpoints cost: the time of the same fit with and without, and the bytes that each iteration stores.

    python benchmarks/checkpoint_cost.py                      # 4 chunks of 1,000,000 x 16, 0.5 GB of disk
    python benchmarks/checkpoint_cost.py --rows 40000 --chunk-rows 10000 --repeats 1

EM-Tau without revisits, 16 components, `tol=0`. Every fit is a process of its own, with and
without checkpoint in turn; a ratio is of medians over the repeats. What a fit of its own process spends on
imports and on opening the data is not counted, nor are times in which the whole machine stood still
(`pauses.py`), where that can be seen. Beside the ratios stands what the fits with checkpoints say of
themselves: the share of their commits, between which and the passes over the data nothing else runs, and of
the fingerprint of the data, taken once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pauses import Pauses

FIT = """
import json, sys, time, warnings
import dask, zarr
from emtau_dask import EMTau, GaussianMixture
from emtau_dask.engine.checkpoint import CheckpointJournal
from emtau_dask.face import fits
from emtau_dask.storage.commits import CommitLog
from emtau_dask.storage.objects import LocalObjects

data, checkpoint, every, threads, components, iterations, tau = json.loads(sys.argv[1])
stored, per_commit = [0], []
put, append = LocalObjects.put, CommitLog.append

def counting_put(self, key, data):
    stored[0] += len(data)
    return put(self, key, data)

def counting_append(self, *arguments):
    per_commit.append(stored[0])
    stored[0] = 0
    return append(self, *arguments)

parts = {"commits": [], "fingerprint": []}

def clocked(name, function):
    def run(*arguments, **options):
        began = time.monotonic()
        try:
            return function(*arguments, **options)
        finally:
            parts[name].append((began, time.monotonic()))
    return run

LocalObjects.put, CommitLog.append = counting_put, counting_append
CheckpointJournal.save = clocked("commits", CheckpointJournal.save)
fits.fingerprint = clocked("fingerprint", fits.fingerprint)
X = zarr.open_group(data, mode="r")["X"]
mixture = GaussianMixture(
    components, algorithm=EMTau(tau, revisit=None), init_params="k-means++", random_state=0,
    tol=0, max_iter=iterations, checkpoint=checkpoint, checkpoint_every=every or 1,
)
warnings.simplefilter("ignore")
with dask.config.set(scheduler="threads", num_workers=threads):
    began = time.monotonic()
    mixture.fit(X)
    whole = began, time.monotonic()
active = [record.active_rows for record in mixture.history_]
print(json.dumps({
    "whole": whole, "parts": parts, "stored": per_commit, "active": active, "bound": mixture.lower_bound_,
}))
"""


def fit(
    options: argparse.Namespace, data: Path, checkpoint: Path | None, every: int, pauses: Pauses
) -> dict[str, Any]:
    arguments = [
        str(data),
        None if checkpoint is None else str(checkpoint),
        every,
        options.threads,
        options.components,
        options.iterations,
        options.tau,
    ]
    command = [sys.executable, "-c", FIT, json.dumps(arguments)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    found["seconds"] = pauses.seconds_without(found["whole"])
    found["parts"] = {
        name: sum(pauses.seconds_without(part) for part in parts) for name, parts in found["parts"].items()
    }
    return found


def fsync_seconds(folder: Path) -> float:
    """Return the median time of writing and syncing 64 kB."""
    times = []
    for number in range(20):
        began = time.perf_counter()
        with (folder / f"probe-{number}").open("wb") as file:
            file.write(bytes(65536))
            file.flush()
            os.fsync(file.fileno())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> dict[int, list[dict[str, Any]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--chunk-rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--tau", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--folder", type=Path, help="Where the data and the checkpoints go.")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as place, Pauses() as pauses:
        folder = Path(place)
        data = folder / "rows.zarr"
        emtau = [sys.executable, "-c", "from emtau_dask.face.cli import main; main()"]
        size = ["--rows", str(options.rows), "--chunk-rows", str(options.chunk_rows)]
        shape = ["--features", str(options.features), "--components", str(options.components)]
        make = [*emtau, "dataset", "mixture", str(data), *size, *shape]
        subprocess.run(make, check=True, capture_output=True)
        kinds = [0, *options.every]
        found: dict[int, list[dict]] = {kind: [] for kind in kinds}
        for repeat in range(options.repeats):
            for kind in kinds:
                checkpoint = folder / f"run-{kind}-{repeat}.zarr" if kind else None
                found[kind].append(fit(options, data, checkpoint, kind, pauses))
        print(f"one fsync of 64 kB: {1e3 * fsync_seconds(folder):.1f} ms")
        print(f"{options.iterations} iterations; shares are of the fit's own time")
        print("| checkpoint_every | seconds | ratio | commits | fingerprint |")
        print("|---|---|---|---|---|")
        for kind in kinds:
            spent, plain = (statistics.median(run["seconds"] for run in found[each]) for each in (kind, 0))
            commits, fingerprint = (
                statistics.median(run["parts"][part] / run["seconds"] for run in found[kind])
                for part in ("commits", "fingerprint")
            )
            ratio = spent / plain
            print(f"| {kind or 'none'} | {spent:.2f} | {ratio:.3f} | {commits:.4f} | {fingerprint:.4f} |")
        assert len({run["bound"] for runs in found.values() for run in runs}) == 1
        if 1 in found:
            run = found[1][0]
            print("iteration   active rows   bytes stored")
            for number, active in enumerate(run["active"], 1):
                print(f"{number:9}   {active:11,}   {run['stored'][number + 1]:12,}")
        return found


if __name__ == "__main__":
    main()
