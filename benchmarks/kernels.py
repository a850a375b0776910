"""Time of the forms of the E-step by NumPy, features and centred, over components and features.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --types full diag --components 2 16 --features 4 32

Nanoseconds per row, best of several, one thread: scoring a chunk of 4,096 rows and summing its statistics.
The last columns have the form that the rule of `mixture.plan` chooses, and what its choice costs beside the
faster one. A second table has the time of an exponential, NumPy's and ours, of values that do and do not
underflow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import BlockKernel, exponentials
from emtau_dask.mixture.features import frames_of
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import KernelPlan, even_length, plan_kernel

CHUNK_ROWS = 4096
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
    return MixtureParameters(covariance_type, weights, means, covariances, factors)


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
    plans = {
        "features": KernelPlan(parameters, next(frames_of(parameters))),
        "centred": KernelPlan(parameters),
    }
    times = {form: nanoseconds(plan, repeats) for form, plan in plans.items()}
    chosen = "centred" if plan_kernel(parameters).exact else "features"
    cells = [*(f"{time:.0f} ns" for time in times.values()), chosen]
    cells.append(f"{times[chosen] / min(times.values()):.2f}")
    print("|", " | ".join(map(str, [*shape, *cells])), "|", flush=True)


def print_exponentials(name: str, low: float, high: float, repeats: int) -> None:
    """Print a line of the second table: nanoseconds of an exponential, less those of copying its argument."""
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
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    print("| covariances | K | d | features | centred | chosen | costs |")
    print("|---|---|---|---|---|---|---|")
    with threadpool_limits(1):
        for covariance_type in options.types:
            for k in options.components:
                for d in options.features:
                    print_forms(mixture(covariance_type, k, d), options.repeats)
        print("\n| exponents | NumPy | ours |\n|---|---|---|")
        for name, (low, high) in RANGES.items():
            print_exponentials(name, low, high, options.repeats)


if __name__ == "__main__":
    main()
