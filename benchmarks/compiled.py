"""What compiled tiles gain over calls of NumPy, on one thread and on two.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --work full-d4 --shapes full-16-32 --repeats 3

The first table is of whole iterations of full EM by the public `GaussianMixture.fit`, with dask's
`emtau.compiled` "always" and "never", in turn: medians of milliseconds. The second is of the E-step of a
chunk alone, by shape (covariance type, components, features), in nanoseconds per row; there threads
are each given a chunk of their own. The third is of the two products of a tile, features by coefficients
and responsibilities by features, by SciPy's BLAS and by `kernels.products`, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import warnings
from collections import defaultdict
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
from kernels import mixture
from numba import njit
from side_by_side import known_start
from speed import WORK, Work, chunks_of, drawn, scaled, table

from emtau_dask import FullEM, GaussianMixture
from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.kernels.products import multiply, multiply_transposed
from emtau_dask.kernels.tiling import lines, rows_of_tile
from emtau_dask.mixture.plan import KernelPlan, plan_kernel
from emtau_dask.process import threads_side_by_side

THREADS = (1, 2)
SHAPES = [
    *("full-2-2", "full-8-4", "full-100-2", "full-16-16", "full-16-24", "full-64-24", "full-16-32"),
    *("full-64-32", "full-32-44", "full-96-44", "full-64-80"),
    *("diag-16-16", "diag-3-200", "diag-100-16", "tied-16-16", "tied-8-200", "spherical-16-16"),
]
NUMBERS = 2**23
"""Rows times components times features of a chunk."""
SPREAD = 0.1
"""Of the means, so that every shape goes by features."""


class Pair(NamedTuple):
    """Times by calls of NumPy and by compiled tiles."""

    numpy: float
    compiled: float

    @property
    def gain(self) -> float:
        return self.numpy / self.compiled


def iterations(
    work: Work, X: da.Array, start: dict[str, np.ndarray], threads: int, compiled: str, n: int
) -> list[float]:
    """Return the milliseconds of all iterations but the first."""
    model = GaussianMixture(
        work.components,
        covariance_type=work.covariance_type,
        algorithm=FullEM(),
        max_iter=n,
        tol=0.0,
        **start,
    )
    settings = {"scheduler": "threads", "num_workers": threads, "emtau.compiled": compiled}
    with dask.config.set(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is not to converge.
        model.fit(X)
    return [1e3 * record.seconds for record in model.history_][1:]


def of_fits(work: Work, dtype: str, repeats: int, n_iterations: int) -> dict[int, Pair]:
    """Return the times of an iteration by threads."""
    rows, labels = drawn(work)
    start = known_start(work, rows, labels)
    X = da.from_array(rows.astype(dtype), chunks=(-(-len(rows) // chunks_of(work, 2)), -1))
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for compiled in ("always", "never"):
        iterations(work, X, start, 2, compiled, 2)
    for _ in range(repeats):
        for threads in THREADS:
            for compiled in ("never", "always"):
                times[threads, compiled] += iterations(work, X, start, threads, compiled, n_iterations)
    median = {key: statistics.median(found) for key, found in times.items()}
    return {threads: Pair(median[threads, "never"], median[threads, "always"]) for threads in THREADS}


def seconds_of_chunks(plan: KernelPlan, chunks: list[np.ndarray], *, compiled: bool) -> float:
    """Return the time in which as many threads accumulate a chunk each, from the first that begins on."""
    ready = threading.Barrier(len(chunks))
    n_rows, spans = len(chunks[0]), []

    def accumulate(rows: np.ndarray) -> None:
        kernels = Kernels(plan, compiled=compiled)
        assert kernels.by_tiles is compiled, "the plan does not go by tiles"
        kernel = kernels.acquire(n_rows)
        ready.wait()
        began = time.perf_counter()
        for begin in range(0, n_rows, kernel.n_rows):
            kernel.accumulate(rows[begin : begin + kernel.n_rows])
        spans.append((began, time.perf_counter()))

    absorbing = [threading.Thread(target=accumulate, args=(rows,)) for rows in chunks]
    for thread in absorbing:
        thread.start()
    for thread in absorbing:
        thread.join()
    begins, ends = zip(*spans, strict=True)
    return max(ends) - min(begins)


def of_shape(plan: KernelPlan, n_rows: int, repeats: int) -> dict[int, Pair]:
    """Return nanoseconds per row by threads."""
    d, rng = plan.parameters.n_features, np.random.default_rng(0)
    chunks = [rng.normal(size=(n_rows, d)) for _ in THREADS]
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    with threads_side_by_side():
        for _ in range(repeats):
            for threads in THREADS:
                for compiled in (False, True):
                    taken = seconds_of_chunks(plan, chunks[:threads], compiled=compiled)
                    times[threads, compiled].append(1e9 * taken / (threads * n_rows))
    median = {key: statistics.median(found) for key, found in times.items()}
    return {threads: Pair(median[threads, False], median[threads, True]) for threads in THREADS}


@njit(nogil=True)
def scored_by_blas(coefficients, features, scores, times):
    for _ in range(times):
        np.dot(coefficients, features, scores)


@njit(nogil=True)
def scored_by_tiles(coefficients, features, scores, times):
    for _ in range(times):
        multiply(coefficients, features, scores)


@njit(nogil=True)
def summed_by_blas(scores, features, sums, times):
    for _ in range(times):
        np.dot(scores, features.T, sums)


@njit(nogil=True)
def summed_by_tiles(scores, features, sums, times):
    for _ in range(times):
        multiply_transposed(scores, features, sums)


def rates_of_products(plan: KernelPlan, repeats: int) -> list[float]:
    """Return GFlop/s of scores by BLAS and by vectors, and of sums."""
    rng = np.random.default_rng(0)
    coefficients = rng.normal(size=plan.coefficients.shape)
    K, F = coefficients.shape
    T = rows_of_tile(F, coefficients.itemsize)
    features, scores = (lines(rows, T, coefficients.dtype) for rows in (F, K))
    features[...] = rng.normal(size=features.shape)
    sums = np.empty((K, F))
    rates = []
    with threads_side_by_side():
        for function, *arrays in (
            (scored_by_blas, coefficients, features, scores),
            (scored_by_tiles, coefficients, features, scores),
            (summed_by_blas, scores, features, sums),
            (summed_by_tiles, scores, features, sums),
        ):
            function(*arrays, 1)
            times = max(1, NUMBERS // features.size)
            taken = []
            for _ in range(repeats):
                began = time.perf_counter()
                function(*arrays, times)
                taken.append(time.perf_counter() - began)
            rates.append(2e-9 * K * features.size * times / statistics.median(taken))
    return rates


def cells(found: dict[int, Pair]) -> list[str]:
    return [
        cell
        for pair in found.values()
        for cell in (f"{pair.numpy:.1f}", f"{pair.compiled:.1f}", f"{pair.gain:.2f}")
    ]


def main(arguments: list[str] | None = None) -> dict[str, dict[int, Pair]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    usual = ["full-d4", "full-d16", "full-near", "full-d32", "full-d128"]
    usual += ["diag-d16", "diag-near", "spherical-d16", "tied-d16"]
    parser.add_argument("--work", nargs="*", choices=list(WORK), default=usual)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=9, help="of each fit; the first is not counted")
    parser.add_argument("--scale", type=int, default=1, help="divide the rows by this")
    options = parser.parse_args(arguments)
    found: dict[str, dict[int, Pair]] = {}
    columns = ["one thread, NumPy", "compiled", "gain", "two threads, NumPy", "compiled", "gain"]
    rows = []
    for name in options.work:
        work = scaled(WORK[name], options.scale, None)
        for dtype in ["float64", *(["float32"] if work.float32 else [])]:
            found[f"{name} {dtype}"] = of_fits(work, dtype, options.repeats, options.iterations)
            rows.append([f"{work}, {dtype}", *cells(found[f"{name} {dtype}"])])
    table("Milliseconds of an iteration", ["rows × features, components", *columns], rows)
    rows, rates = [], []
    for name in options.shapes:
        covariance_type, k, d = name.split("-")
        plan = plan_kernel(mixture(covariance_type, int(k), int(d), SPREAD))
        if plan.frame is None:
            parser.error(f"{name} does not go by features; give fewer of them, or more components")
        n_rows = max(64, NUMBERS // (int(k) * int(d) * options.scale))
        found[name] = of_shape(plan, n_rows, options.repeats)
        features = plan.coefficients.shape[1]
        rows.append([name, str(features), *cells(found[name])])
        rates.append(
            [name, str(features), *(f"{rate:.1f}" for rate in rates_of_products(plan, options.repeats))]
        )
    table("Nanoseconds of a row", ["shape", "features", *columns], rows)
    columns = ["scores, BLAS", "by vectors", "sums, BLAS", "by vectors"]
    table("GFlop/s of a tile's products, one thread", ["shape", "features", *columns], rates)
    return found


if __name__ == "__main__":
    main()
