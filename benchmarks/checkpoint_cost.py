"""What checkpoints cost: the time of the same fit with and without, and the bytes that each iteration stores.

    python benchmarks/checkpoint_cost.py                      # 4 chunks of 1,000,000 x 16, 0.5 GB of disk
    python benchmarks/checkpoint_cost.py --rows 40000 --chunk-rows 10000 --repeats 1

EM-Tau without revisits, 16 components, `tol=0`. Every fit is a process of its own, with and
without checkpoint in turn; a ratio is of medians over the repeats. What a fit of its own process spends on
imports and on opening the data is not counted, nor are times in which the whole machine stood still
(`pauses.py`), where that can be seen. Beside the ratios stands what the fits with checkpoints say of
themselves: the share of their commits, between which and the passes over the data nothing else runs, and of
the sampled chunks of the data, read once. What digests of chunks cost all fits: `digest_cost.py`.
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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import zarr
from pauses import Interval, Pauses
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.checkpoint.writer import CheckpointStateStore
from emtau_dask.datasets import make_dataset
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting
from emtau_dask.storage.commits import CommitLog
from emtau_dask.storage.stores import LocalObjects

SIZES = ("rows", "chunk_rows", "features", "components", "iterations", "tau", "threads")


class Spent:
    """What a fit's checkpoint does: when, and how many bytes it stores for each commit."""

    def __init__(self) -> None:
        self.commits: list[Interval] = []
        self.fingerprint: list[Interval] = []
        self.per_commit: list[int] = []
        self._stored = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        put, append = LocalObjects.put, CommitLog.append

        def counting_put(store: LocalObjects, key: str, data: bytes) -> None:
            self._stored += len(data)
            put(store, key, data)

        def counting_append(log: CommitLog, *arguments: Any) -> Any:
            self.per_commit.append(self._stored)
            self._stored = 0
            return append(log, *arguments)

        with (
            patch.object(LocalObjects, "put", counting_put),
            patch.object(CommitLog, "append", counting_append),
            patch.object(CheckpointStateStore, "save", clocked(CheckpointStateStore.save, self.commits)),
            patch.object(fitting, "compare_samples", clocked(fitting.compare_samples, self.fingerprint)),
        ):
            yield


def clocked(function: Callable[..., Any], times: list[Interval]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*arguments, **options)
        finally:
            times.append((began, time.monotonic()))

    return run


def fit(data: Path, checkpoint: str | None, every: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fit in this process; say when what ran, the bytes of each commit, the active rows and the bound."""
    X = zarr.open_group(str(data), mode="r")["X"]
    mixture = GaussianMixture(
        options.components,
        algorithm=EMTau(options.tau, revisit=None),
        init_params="k-means++",
        random_state=0,
        tol=0,
        max_iter=options.iterations,
        checkpoint=checkpoint,
        checkpoint_every=every,
    )
    spent = Spent()
    with (
        warnings.catch_warnings(),
        dask.config.set(scheduler="threads", num_workers=options.threads),
        spent.watching(),
    ):
        warnings.simplefilter("ignore", ConvergenceWarning)
        began = time.monotonic()
        mixture.fit(X)
        whole = began, time.monotonic()
    return {
        "whole": whole,
        "parts": {"commits": spent.commits, "fingerprint": spent.fingerprint},
        "stored": spent.per_commit,
        "active": [record.active_rows for record in mixture.history_],
        "bound": mixture.lower_bound_,
    }


def run(arguments: list[str]) -> dict[str, Any]:
    """Fit in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return found


def without_pauses(found: dict[str, Any], pauses: Pauses) -> dict[str, Any]:
    """Return what a fit said with seconds in place of intervals."""
    parts = {
        name: sum(pauses.seconds_without(part) for part in parts) for name, parts in found["parts"].items()
    }
    return found | {"seconds": pauses.seconds_without(found["whole"]), "parts": parts}


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
    parser.add_argument("--folder", type=Path, help="where the data and the checkpoints go")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--fit", help="one fit in this process, as JSON; for internal use")
    options = parser.parse_args(arguments)
    if options.fit:
        data, checkpoint, every = json.loads(options.fit)
        print(json.dumps(fit(Path(data), checkpoint, every, options)))
        return {}
    sizes = [text for name in SIZES for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory(dir=options.folder) as place, Pauses() as pauses:
        folder = Path(place)
        data = folder / "rows.zarr"
        make_dataset(
            "mixture",
            data,
            observer=SilentObserver(),
            rows=options.rows,
            chunk_rows=options.chunk_rows,
            features=options.features,
            components=options.components,
        )
        kinds = [0, *options.every]
        found: dict[int, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for repeat in range(options.repeats):
            for kind in kinds:
                checkpoint = str(folder / f"run-{kind}-{repeat}.zarr") if kind else None
                told = json.dumps([str(data), checkpoint, kind or 1])
                found[kind].append(without_pauses(run([*sizes, "--fit", told]), pauses))
        print(f"one fsync of 64 kB: {1e3 * fsync_seconds(folder):.1f} ms")
        print(f"{options.iterations} iterations; shares are of the fit's own time")
        print("| checkpoint_every | seconds | ratio | commits | fingerprint |")
        print("|---|---|---|---|---|")
        for kind in kinds:
            spent, plain = (statistics.median(one["seconds"] for one in found[each]) for each in (kind, 0))
            commits, fingerprint = (
                statistics.median(one["parts"][part] / one["seconds"] for one in found[kind])
                for part in ("commits", "fingerprint")
            )
            ratio = spent / plain
            print(f"| {kind or 'none'} | {spent:.2f} | {ratio:.3f} | {commits:.4f} | {fingerprint:.4f} |")
        assert len({one["bound"] for same in found.values() for one in same}) == 1
        if 1 in found:
            one = found[1][0]
            print("iteration   active rows   bytes stored")
            for number, active in enumerate(one["active"], 1):
                print(f"{number:9}   {active:11,}   {one['stored'][number + 1]:12,}")
        if options.json:
            seconds = {kind: statistics.median(one["seconds"] for one in found[kind]) for kind in kinds}
            every = {f"checkpoint_every {kind or 'none'}, s": seconds[kind] for kind in kinds}
            stored = {f"checkpoint_every {kind}, bytes": sum(found[kind][0]["stored"]) for kind in kinds[1:]}
            options.json.write_text(json.dumps(every | stored))
        return found


if __name__ == "__main__":
    main()
