"""What the first compilation on a machine costs: a fit in a process that compiles, beside one that loads.

    python benchmarks/first_compilation.py
    python benchmarks/first_compilation.py --repeats 1 --rows 200000 --missing 0.1

Each repeat has a folder of its own for what numba compiles (``NUMBA_CACHE_DIR``), and fits the same rows in
two new processes, one after the other: the first finds nothing there, the second what the first has left.
Both import numba. The difference of the two is what a first fit waits for, once a machine. If the second has
compiled anything as well, the comparison ends. Seconds are of the clock and, in brackets, of all processors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dask
import numpy as np
from sklearn.datasets import make_blobs

from emtau_dask import GaussianMixture

Seconds = tuple[float, float]
"""Of the clock, and of all processors."""


def fit(algorithm: str, rows: int, features: int, missing: float) -> Seconds:
    """Return the seconds of a fit in this process."""
    data, _ = make_blobs(rows, n_features=features, centers=8, random_state=0)
    rng = np.random.default_rng(0)
    data = np.where(rng.random(data.shape) < missing, np.nan, data) if missing else np.asarray(data)
    settings = {"missing": "marginalise" if missing else "raise", "random_state": 0}
    began, began_cpu = time.perf_counter(), time.process_time()
    with dask.config.set({"emtau.compiled": "always"}):
        GaussianMixture(8, algorithm=algorithm, **settings).fit(data)
    return time.perf_counter() - began, time.process_time() - began_cpu


def in_new_process(fitted: list[str], cache: str) -> Seconds:
    command = [sys.executable, __file__, *fitted]
    done = subprocess.run(
        command, env=os.environ | {"NUMBA_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, of_processors = map(float, done.stdout.split())
    return seconds, of_processors


def compared(fitted: list[str]) -> tuple[Seconds, Seconds, int]:
    """Return the seconds of a fit that compiles, of one that loads, and how many functions there are."""
    with tempfile.TemporaryDirectory() as cache:
        first = in_new_process(fitted, cache)
        left = sorted(Path(cache).rglob("*.nbc"))
        later = in_new_process(fitted, cache)
        if sorted(Path(cache).rglob("*.nbc")) != left:
            raise SystemExit("the second process did not find all that it needed, and compiled as well")
    return first, later, len(left)


def main(arguments: list[str] | None = None) -> dict[str, list[tuple[Seconds, Seconds, int]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--missing", type=float, default=0.0, help="share of the values that are missing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--algorithms", nargs="+", default=["auto", "em"])
    parser.add_argument("--fit", help="fit by this algorithm in this process; for internal use")
    options = parser.parse_args(arguments)
    if options.fit:
        print(*fit(options.fit, options.rows, options.features, options.missing))
        return {}
    shape = ["--rows", options.rows, "--features", options.features, "--missing", options.missing]
    found = {}
    for algorithm in options.algorithms:
        found[algorithm] = []
        for _ in range(options.repeats):
            first, later, functions = compared(["--fit", algorithm, *map(str, shape)])
            found[algorithm].append((first, later, functions))
            print(
                f"{algorithm}: {first[0]:.2f} s ({first[1]:.2f}), {functions} functions compiled; "
                f"{later[0]:.2f} s ({later[1]:.2f}) where loaded",
                flush=True,
            )
        waits, of_processors = (
            sorted(first[i] - later[i] for first, later, _ in found[algorithm]) for i in range(2)
        )
        print(
            f"{algorithm}: the first compilation costs {statistics.median(waits):.2f} s, {waits[0]:.2f} to "
            f"{waits[-1]:.2f} ({statistics.median(of_processors):.2f}, {of_processors[0]:.2f} to "
            f"{of_processors[-1]:.2f})"
        )
    return found


if __name__ == "__main__":
    main()
