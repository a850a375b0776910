"""What the first compilation on a machine costs: a fit in a process that compiles, beside one that loads.

    python benchmarks/first_compilation.py
    python benchmarks/first_compilation.py --repeats 1 --rows 200000

Each repeat has a folder of its own for what numba compiles (``NUMBA_CACHE_DIR``), and fits the same rows in
two new processes, one after the other: the first finds nothing there, the second what the first has left.
Both import numba. The difference of the two is what a first fit waits for, once a machine. If the second has
compiled anything as well, the comparison ends.
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


def fit(algorithm: str, rows: int) -> float:
    """Return the seconds of a fit in this process."""
    data, _ = make_blobs(rows, n_features=4, centers=8, random_state=0)
    began = time.perf_counter()
    with dask.config.set({"emtau.compiled": "always"}):
        GaussianMixture(8, algorithm=algorithm, random_state=0).fit(np.asarray(data))
    return time.perf_counter() - began


def in_new_process(algorithm: str, rows: int, cache: str) -> float:
    command = [sys.executable, __file__, "--fit", algorithm, "--rows", str(rows)]
    done = subprocess.run(
        command, env=os.environ | {"NUMBA_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def compared(algorithm: str, rows: int) -> tuple[float, float, int]:
    """Return the seconds of a fit that compiles, of one that loads, and how many functions there are."""
    with tempfile.TemporaryDirectory() as cache:
        first = in_new_process(algorithm, rows, cache)
        left = sorted(Path(cache).rglob("*.nbc"))
        later = in_new_process(algorithm, rows, cache)
        if sorted(Path(cache).rglob("*.nbc")) != left:
            raise SystemExit("the second process did not find all that it needed, and compiled as well")
    return first, later, len(left)


def main(arguments: list[str] | None = None) -> dict[str, list[tuple[float, float, int]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--algorithms", nargs="+", default=["auto", "em"])
    parser.add_argument("--fit", help="fit by this algorithm in this process; for internal use")
    options = parser.parse_args(arguments)
    if options.fit:
        print(fit(options.fit, options.rows))
        return {}
    found = {}
    for algorithm in options.algorithms:
        found[algorithm] = []
        for _ in range(options.repeats):
            found[algorithm].append(compared(algorithm, options.rows))
            first, later, functions = found[algorithm][-1]
            print(
                f"{algorithm}: {first:.2f} s, {functions} functions compiled; {later:.2f} s where loaded",
                flush=True,
            )
        waits = [first - later for first, later, _ in found[algorithm]]
        print(
            f"{algorithm}: the first compilation costs {statistics.median(waits):.2f} s, "
            f"{min(waits):.2f} to {max(waits):.2f}"
        )
    return found


if __name__ == "__main__":
    main()
