"""Time of an iteration of full EM by the length of blocks, with one thread and with two.

    python benchmarks/blocks.py                                  # 1 to 32 MiB, all shapes
    python benchmarks/blocks.py --work full-d4 --mebibytes 1 8

One process fits the same rows with every length in turn, several times over. A figure is the
shortest iteration of all, as the fits' `history_` has them: what a length costs where nothing
else disturbs.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict

import dask
import dask.array as da
import numpy as np
from speed import WORK, Work, drawn, scaled, table

from emtau_dask import FullEM, GaussianMixture
from emtau_dask.mixture import plan

CHUNKS = 8
ROWS_OF_WORK = {
    **{name: WORK[name] for name in ("full-d4", "full-d16", "full-d32")},
    "full-d42": Work("full-d42", 29_881, 42, 5),
    "full-d128": WORK["full-d128"],
}


def shortest_iteration(work: Work, rows: np.ndarray, means: np.ndarray, threads: int, length: int) -> float:
    """Return the milliseconds of the shortest of ``length`` iterations."""
    model = GaussianMixture(
        work.components, algorithm=FullEM(), means_init=means, max_iter=length, tol=0.0, random_state=0
    )
    X = da.from_array(rows, chunks=(-(-len(rows) // CHUNKS), -1))
    settings = {"scheduler": "threads", "num_workers": threads, "emtau.compiled": "never"}
    with dask.config.set(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is not to converge.
        model.fit(X)
    return min(1e3 * record.seconds for record in model.history_)


def measure(work: Work, options: argparse.Namespace) -> dict[tuple[int, int], float]:
    """Return the shortest iteration by mebibytes and threads."""
    rows, labels = drawn(work)
    means = np.array([rows[labels == component].mean(axis=0) for component in range(work.components)])
    found: dict[tuple[int, int], float] = defaultdict(lambda: float("inf"))
    chosen = plan.BLOCK_BYTES
    try:
        for _ in range(options.repeats):
            for mebibytes in options.mebibytes:
                plan.BLOCK_BYTES = mebibytes * 2**20
                for threads in (1, 2):
                    shortest = shortest_iteration(work, rows, means, threads, options.iterations)
                    found[mebibytes, threads] = min(found[mebibytes, threads], shortest)
    finally:
        plan.BLOCK_BYTES = chosen
    return found


def main(arguments: list[str] | None = None) -> dict[str, dict[tuple[int, int], float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=ROWS_OF_WORK, default=list(ROWS_OF_WORK))
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--scale", type=int, default=1, help="divide the rows by this")
    options = parser.parse_args(arguments)
    found = {}
    for name in options.work:
        work = scaled(ROWS_OF_WORK[name], options.scale, None)
        found[name] = measure(work, options)
        lines = [
            [str(mebibytes), *(f"{found[name][mebibytes, threads]:.1f}" for threads in (1, 2))]
            for mebibytes in options.mebibytes
        ]
        header = ["MiB of a block", "one thread", "two threads"]
        table(f"{work}: shortest of {options.repeats} x {options.iterations} iterations, ms", header, lines)
    return found


if __name__ == "__main__":
    main()
