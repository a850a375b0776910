"""Default fits of few rows beside scikit-learn's: seconds, and log-likelihoods per row.

    python benchmarks/small_fits.py

Rows are of K normal components about random centres, which overlap. Both programs fit each data set by their
defaults, in turn: ours compares several starts, scikit-learn makes one. A ratio is of the minima of the
repeats; medians over the data sets. With OMP_NUM_THREADS=1 scikit-learn is faster on few rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.mixture import GaussianMixture as InMemory

from emtau_dask import GaussianMixture

SHAPES = ["1000x4x4", "1000x4x8", "10000x4x4", "10000x4x8", "10000x16x8", "100000x4x8", "100000x16x8"]


def mixture(rows: int, features: int, components: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 2, (components, features))
    return centres[rng.integers(0, components, rows)] + rng.normal(size=(rows, features))


def least_seconds(estimator: Any, X: NDArray[np.float64], repeats: int) -> tuple[float, Any]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        model = estimator.fit(X)
        seconds.append(time.perf_counter() - began)
    return min(seconds), model


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxFEATURESxCOMPONENTS")
    parser.add_argument("--data-sets", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of fits that did not converge
    print("rows x features, components: ms ours, scikit-learn, ratio; log-likelihood above (least, median)")
    found = []
    for shape in options.shapes:
        rows, features, components = map(int, shape.split("x"))
        ours, theirs, ratios, above = [], [], [], []
        for seed in range(options.data_sets):
            X = mixture(rows, features, components, seed)
            GaussianMixture(components, random_state=seed).fit(X)
            mine, model = least_seconds(GaussianMixture(components, random_state=seed), X, options.repeats)
            others, other = least_seconds(InMemory(components, random_state=seed), X, options.repeats)
            ours.append(1e3 * mine)
            theirs.append(1e3 * others)
            ratios.append(mine / others)
            above.append(model.score(X) - other.score(X))
        ratio, gain = statistics.median(ratios), statistics.median(above)
        times = f"{statistics.median(ours):.1f}, {statistics.median(theirs):.1f}, {ratio:.2f}"
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"{rows:,} x {features}, {components}: {times} {spread}; {min(above):+.4f}, {gain:+.4f}",
            flush=True,
        )
        found.append((ratio, min(above)))
    return found


if __name__ == "__main__":
    main()
