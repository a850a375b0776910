"""Fits on a cluster whose workers are killed or frozen all the time, held against threaded ones.

Runs until the time is up, one fit at least, and prints a line for each: the algorithm,
whether it had a checkpoint, what was done to workers, and whether every bit is
that of the threaded fit. Exits with 1 where one was not.

    python benchmarks/worker_kills.py --minutes 10 --every 3 --workers 3
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clusters import Processes, addresses, alive, processes
from reliability.zygote import Zygote

from emtau_dask import EMLazy, EMStar, EMTau, FullEM, GaussianMixture

ALGORITHMS = (FullEM(), EMTau(tau=3, revisit=4), EMStar(), EMLazy(threshold=0.9, full_every=3))
FITTED = ("weights_", "means_", "covariances_", "lower_bounds_")
WORKER_TTL = 5


def fit(X: Any, algorithm: Any, iterations: int, checkpoint: Path | None = None) -> GaussianMixture:
    mixture = GaussianMixture(
        5, algorithm=algorithm, tol=0, max_iter=iterations, random_state=0, checkpoint=checkpoint
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mixture.fit(X)


@contextmanager
def disturbed(cluster: Processes, client: Any, every: float, rng: random.Random) -> Iterator[Counter[str]]:
    """Kill or freeze a worker every so many seconds; frozen ones wake after they are given up for lost."""
    over, done = threading.Event(), Counter[str]()
    frozen: list[tuple[float, str]] = []

    def wake(now: float) -> None:
        for since, name in [item for item in frozen if now - item[0] > 2 * WORKER_TTL]:
            frozen.remove((since, name))
            os.kill(cluster.workers[name].pid, signal.SIGCONT)
            done["woken"] += 1

    def disturb() -> None:
        while not over.wait(rng.uniform(0, 2 * every)):
            wake(time.monotonic())
            for name in [name for name, worker in cluster.workers.items() if not alive(worker)]:
                del cluster.workers[name]
                cluster.start_worker()
            awake = sorted(set(cluster.workers) - {name for _, name in frozen} & set(addresses(client)))
            if len(awake) < 2:
                continue
            name = rng.choice(awake)
            if rng.random() < 0.75:
                cluster.kill_worker(name)
                cluster.start_worker()
                done["killed"] += 1
            else:
                os.kill(cluster.workers[name].pid, signal.SIGSTOP)
                frozen.append((time.monotonic(), name))
                done["frozen"] += 1

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
        wake(float("inf"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=3, help="mean seconds between two disturbances")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, different = random.Random(options.seed), 0
    config = {"scheduler__allowed_failures": "999", "scheduler__worker_ttl": f"{WORKER_TTL}s"}
    with tempfile.TemporaryDirectory() as name, Zygote("clusters") as zygote:
        folder = Path(name)
        centres = np.random.default_rng(0).uniform(-5, 5, (5, 4))
        rows = np.random.default_rng(1).normal(centres[np.arange(options.rows) % 5], 1)
        X = zarr.create_array(store=folder / "rows.zarr", data=rows, chunks=(options.rows // 40, 4))
        with dask.config.set(scheduler="threads"):
            expected = [fit(X, algorithm, options.iterations) for algorithm in ALGORITHMS]
        with (
            processes(zygote, folder / "cluster", options.workers, **config) as cluster,
            cluster.client() as client,
        ):
            end = time.monotonic() + 60 * options.minutes
            for number in count():
                which, kept = number % len(ALGORITHMS), number // len(ALGORITHMS) % 2 == 1
                began = time.monotonic()
                with disturbed(cluster, client, options.every, rng) as done:
                    checkpoint = folder / f"run-{number}" if kept else None
                    found = fit(X, ALGORITHMS[which], options.iterations, checkpoint)
                same = all(
                    np.array_equal(getattr(found, name), getattr(expected[which], name)) for name in FITTED
                )
                different += not same
                print(
                    f"{type(ALGORITHMS[which]).__name__:8} {'checkpoint' if kept else '':10} "
                    f"{time.monotonic() - began:6.1f} s  {dict(done)}  {'same' if same else 'DIFFERENT'}",
                    flush=True,
                )
                if time.monotonic() >= end:
                    break
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
