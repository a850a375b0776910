"""Time of the forms of the E-step, features, joint and centred, over components and features.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --types full diag --components 2 16 --features 4 32

Nanoseconds per row, best of several, one thread: scoring a chunk of 4,096 rows and summing
its statistics. The rule of `mixture.estep.plan` should choose the fastest form, or one
that is hardly slower; the last column says what its choice costs. A second table has the
centred form at many features, with components that overlap and components far apart: from
`LEAST_SOLVED` features on the distances of the latter are not computed to their end. A third
has the rates of products with features in GFlop/s, as NumPy forms them as a whole and in slices
(`numerics.products`), on one thread and on two at once. A fourth has the time of an exponential, NumPy's
and ours, of values that do and do not underflow.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import BlockKernel, exponentials
from emtau_dask.mixture.features import frames_of
from emtau_dask.mixture.linalg import perform, product, summed_product
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import Form, KernelPlan, block_rows, even_length, plan_kernel

CHUNK_ROWS = 4096
PRODUCTS = 20
EXPONENTS = 2**16
RANGES = {"-100 to 0": (-100, 0), "-745 to -708": (-745, -708), "-3000 to 0": (-3000, 0)}


def mixture(
    covariance_type: str, n_components: int, n_features: int, spread: float = 1.0
) -> MixtureParameters:
    """Return a mixture of unit covariances, with means about ``spread`` from 0 in each feature."""
    structure = structure_named(covariance_type)
    means = spread * np.random.default_rng(0).normal(size=(n_components, n_features))
    identity = {"full": np.eye(n_features), "tied": np.eye(n_features), "diag": np.ones(n_features)}
    shape = structure.shape(n_components, n_features)
    covariances = np.broadcast_to(identity.get(covariance_type, 1.0), shape).copy()
    factors = structure.factor(covariances, means, np.ones(n_components))
    weights = np.full(n_components, 1 / n_components)
    return MixtureParameters(covariance_type, weights, means, covariances, factors).factorised()


def best(run: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of a call, in seconds."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def nanoseconds(plan: KernelPlan, repeats: int) -> float:
    """Return the time per row of a chunk under ``plan``."""
    means, rng = plan.parameters.means, np.random.default_rng(1)
    rows = rng.normal(size=(CHUNK_ROWS, means.shape[1])) + means[rng.integers(len(means), size=CHUNK_ROWS)]
    size = even_length(CHUNK_ROWS, plan.block_rows)

    def run() -> None:
        kernel = BlockKernel(plan, size)
        for begin in range(0, CHUNK_ROWS, size):
            kernel.score(rows[begin : begin + size])
            kernel.collect()
        kernel.sums()

    return best(run, repeats) / CHUNK_ROWS * 1e9


def print_forms(parameters: MixtureParameters, repeats: int) -> None:
    """Print a line of the first table: nanoseconds per row in each form."""
    shape = parameters.covariance_type, parameters.n_components, parameters.n_features
    frame, everything = next(iter(frames_of(parameters))), np.ones(shape[1], dtype=np.bool_)
    times = {}
    for form in Form:
        if form is not Form.JOINT or parameters.structure.own_factors:
            plan = KernelPlan(parameters, form, frame, everything)
            times[form] = nanoseconds(plan.centred if form is Form.CENTRED else plan, repeats)
    plan = plan_kernel(parameters)
    chosen = plan.form if plan.together.all() else Form.CENTRED
    cells = [f"{times[form]:.0f} ns" if form in times else "-" for form in Form]
    cost = times[chosen] / min(times.values())
    print("|", " | ".join(map(str, [*shape, *cells, chosen.name.lower(), f"{cost:.2f}"])), "|", flush=True)


def rate(
    compute: Callable[..., object], shape: tuple[int, int], n_rows: int, threads: int, repeats: int
) -> float:
    """Return the GFlop/s of ``compute(coefficients, scores, features, sums)`` in so many threads together."""
    k, f = shape
    together = threading.Barrier(threads)

    def run(seed: int) -> list[float]:
        rng = np.random.default_rng(seed)
        features, scores = rng.normal(size=(f, n_rows)), rng.normal(size=(k, n_rows))
        coefficients, sums = rng.normal(size=shape), np.empty(shape)
        times = []
        for _ in range(repeats):
            together.wait()
            began = time.perf_counter()
            for _ in range(PRODUCTS):
                compute(coefficients, scores, features, sums)
            together.wait()
            times.append(time.perf_counter() - began)
        return times

    with ThreadPoolExecutor(threads) as pool:
        seconds = min(map(max, zip(*pool.map(run, range(threads)), strict=True)))
    return threads * PRODUCTS * 2e-9 * k * f * n_rows / seconds


def print_products(n_components: int, n_features: int, repeats: int) -> None:
    """Print a line of the third table: the rates of products with features, as a whole and in slices."""
    shape = n_components, structure_named("full").n_row_features(n_features)
    n_rows = block_rows("full", n_components, n_features, Form.FEATURES)
    ways: list[Callable[..., object]] = [
        lambda coefficients, scores, features, sums: np.matmul(coefficients, features, out=scores),
        lambda coefficients, scores, features, sums: perform(product(coefficients, features, scores)),
        lambda coefficients, scores, features, sums: np.matmul(scores, features.T, out=sums),
        lambda coefficients, scores, features, sums: perform(summed_product(scores, features, sums)),
    ]
    rates = [f"{rate(way, shape, n_rows, threads, repeats):.3g}" for way in ways for threads in (1, 2)]
    print(f"| {n_components} | {n_features} | {' | '.join(rates)} |", flush=True)


def print_exponentials(name: str, low: float, high: float, repeats: int) -> None:
    """Print a line of the fourth table: nanoseconds of an exponential, less those of copying its argument."""
    values = np.random.default_rng(0).uniform(low, high, EXPONENTS)
    out, spare = np.empty_like(values), np.empty_like(values)

    def ours() -> None:
        np.copyto(out, values)
        exponentials(out, spare)

    def numpys() -> None:
        np.copyto(out, values)
        np.exp(out, out=out)

    with np.errstate(under="ignore"):
        spent = [best(run, repeats) for run in (lambda: np.copyto(out, values), numpys, ours)]
    cells = (f"{(each - spent[0]) / EXPONENTS * 1e9:.2f} ns" for each in spent[1:])
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=["full", "tied", "diag", "spherical"])
    parser.add_argument("--components", nargs="+", type=int, default=[2, 5, 16, 64])
    parser.add_argument("--features", nargs="+", type=int, default=[2, 4, 8, 16, 32, 48, 64, 128])
    parser.add_argument("--wide", nargs="+", type=int, default=[256, 384, 784], help="for the second table")
    parser.add_argument("--narrow", nargs="+", type=int, default=[2, 4, 8, 16], help="for the third table")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    print("| covariances | K | d | features | joint | centred | chosen | costs |")
    print("|---|---|---|---|---|---|---|---|")
    with threadpool_limits(1):
        for covariance_type in options.types:
            for k in options.components:
                for d in options.features:
                    print_forms(mixture(covariance_type, k, d), options.repeats)
        print("\n| full, K | d | overlapping | far apart | ratio |\n|---|---|---|---|---|")
        for k in options.components:
            for d in options.wide:
                overlapping, apart = (
                    nanoseconds(plan_kernel(mixture("full", k, d, spread)).centred, options.repeats)
                    for spread in (0.0, 3.0)
                )
                print(
                    f"| {k} | {d} | {overlapping:.0f} ns | {apart:.0f} ns | {overlapping / apart:.2f} |",
                    flush=True,
                )
        ways = (f"{what}, {how}" for what in ("scores", "sums") for how in ("whole", "slices"))
        header = " | ".join(
            f"{way}, {threads} thread{'s'[threads < 2 :]}" for way in ways for threads in (1, 2)
        )
        print(f"\n| full, K | d | {header} |\n{'|---' * 10}|")
        for k in options.components:
            for d in options.narrow:
                print_products(k, d, options.repeats)
        print("\n| exponents | NumPy | ours |\n|---|---|---|")
        for name, (low, high) in RANGES.items():
            print_exponentials(name, low, high, options.repeats)


if __name__ == "__main__":
    main()
