"""What digests of whole chunks cost in an iteration: fits with and without them in turn, in one process.

    python benchmarks/digest_cost.py                     # both shapes, both memory orders, 1 and 2 threads
    python benchmarks/digest_cost.py --pairs 40 --orders C

Without means that `GrowingDigest` takes nothing and gives a constant. An iteration's time is the median over
those of a fit but the first two; a pair is a fit with and one without, in alternating order. Printed are the
median of the pairs' ratios and an interval that holds it with 95%, from the order statistics of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from unittest.mock import patch

import dask
import numpy as np
from order_statistics import interval

from emtau_dask import FullEM, GaussianMixture
from emtau_dask.data.source import GrowingDigest

SHAPES = {"d4": (1_000_000, 4, 8), "d16": (400_000, 16, 16)}
ITERATIONS = 22


def rows_of(n_rows: int, n_features: int, n_components: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    means = 3.0 * random.normal(size=(n_components, n_features))
    return random.normal(size=(n_rows, n_features)) + means[random.integers(n_components, size=n_rows)], means


def iteration_seconds(rows: np.ndarray, means: np.ndarray) -> float:
    n_components, n_features = means.shape
    mixture = GaussianMixture(
        n_components,
        algorithm=FullEM(),
        tol=0.0,
        max_iter=ITERATIONS,
        weights_init=np.full(n_components, 1 / n_components),
        means_init=means + 0.2,
        precisions_init=np.stack([np.eye(n_features)] * n_components),
    ).fit(rows)
    return statistics.median(record.seconds for record in mixture.history_[2:])


def without_digests() -> patch:
    return patch.multiple(GrowingDigest, feed=lambda *_: None, digest=lambda _: bytes(16))


def pair(rows: np.ndarray, means: np.ndarray, *, first: bool) -> tuple[float, float]:
    found = {}
    for noting in (first, not first):
        if noting:
            found[True] = iteration_seconds(rows, means)
        else:
            with without_digests():
                found[False] = iteration_seconds(rows, means)
    return found[True], found[False]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--orders", nargs="*", choices=["C", "F"], default=["C", "F"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print("| rows x features, K | order | threads | ms without | ratio | interval |")
    print("|---|---|---|---|---|---|")
    for name in options.shapes:
        n_rows, n_features, n_components = SHAPES[name]
        rows, means = rows_of(n_rows, n_features, n_components)
        for order in options.orders:
            ordered = np.asarray(rows, order=order)
            for threads in options.threads:
                with dask.config.set(scheduler="threads", num_workers=threads):
                    pair(ordered, means, first=True)
                    pairs = [pair(ordered, means, first=i % 2 == 0) for i in range(options.pairs)]
                ratios = [noting / plain for noting, plain in pairs]
                low, high = interval(ratios)
                least = 1000 * statistics.median(plain for _, plain in pairs)
                print(
                    f"| {n_rows:,} x {n_features}, {n_components} | {order} | {threads} | {least:.1f} | "
                    f"{statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
