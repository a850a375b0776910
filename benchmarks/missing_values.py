"""What missing values cost: fits of rows of which a tenth of the values is missing, and of complete rows.

    python benchmarks/missing_values.py                       # 1,000,000 rows of 4, 8 and 16 features
    python benchmarks/missing_values.py --rows 200000 --whole # fits by the defaults, until they converge

Times are CPU seconds of this process, the start included, after a fit that compiles the loops.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import numpy as np

from emtau_dask import GaussianMixture

COMPONENTS = 8


def rows(n_rows: int, features: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = rng.normal(scale=2, size=(COMPONENTS, features))
    return centres[rng.integers(COMPONENTS, size=n_rows)] + rng.normal(size=(n_rows, features))


def seconds(data: np.ndarray, whole: bool, covariance_type: str) -> float:
    settings = {"missing": "marginalise", "random_state": 0, "covariance_type": covariance_type}
    if not whole:
        settings |= {"algorithm": "em", "max_iter": 10, "tol": 0, "init_params": "random_from_data"}
    began = time.process_time()
    GaussianMixture(COMPONENTS, **settings).fit(data)
    return time.process_time() - began


def main(arguments: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--missing", type=float, default=0.1)
    parser.add_argument("--covariance-type", default="full")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="fits by the defaults, until they converge")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    ratios = {}
    print("| features | complete, s | with missing values, s | ratio |\n|---|---|---|---|")
    for features in options.features:
        complete = rows(options.rows, features)
        lost = np.random.default_rng(1).random(complete.shape) < options.missing
        kinds = complete, np.where(lost, np.nan, complete)
        how = options.whole, options.covariance_type
        found = [[seconds(data, *how) for data in kinds] for _ in range(options.pairs + 1)][1:]
        ratios[features] = statistics.median(b / a for a, b in found)
        medians = [statistics.median(times) for times in zip(*found, strict=True)]
        print(f"| {features} | {medians[0]:.2f} | {medians[1]:.2f} | {ratios[features]:.2f} |", flush=True)
    return ratios


if __name__ == "__main__":
    main()
