"""How often four rules find the true number of components from fits to a small sample.

    python benchmarks/choosing_k.py [--sets 20] [--rows 100000] [--sample-rows 1000]

Each data set is drawn from three components. All rules judge the same fits to one sample: by BIC on all rows;
by BIC with the expected loss added back; by the sample's own BIC; and as `select_components` does, which fits
finalists to all rows.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from emtau_dask import select_components

MEANS = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]])
CASES = {"even": (0.4, 0.3, 0.3), "one of 1%": (0.55, 0.44, 0.01)}
NUMBERS = (2, 3, 4, 5)
RULES = ("all rows", "corrected", "sample", "select_components")


def drawn(rows: int, weights: tuple[float, ...], seed: int) -> np.ndarray:
    """Return rows of the three components."""
    rng = np.random.default_rng(seed)
    return MEANS[rng.choice(3, size=rows, p=weights)] + rng.normal(size=(rows, 2))


def choices(X: np.ndarray, sample_rows: int, seed: int) -> dict[str, int]:
    """Return the number that each rule chooses."""
    found = select_components(X, NUMBERS, sample_rows=sample_rows, random_state=seed)
    N, n = found.n_rows_, found.sample_rows_

    def sample_bic(record) -> float:
        inside = N * record.log_likelihood - (N - n) * record.held_out
        return -2 * inside + record.parameters * math.log(n)

    rules = {
        "all rows": lambda record: record.bic,
        "corrected": lambda record: record.bic - 2 * N * record.expected_loss,
        "sample": sample_bic,
    }
    best = {name: min(found.table_, key=rule).n_components for name, rule in rules.items()}
    return best | {"select_components": found.best_n_components_, "finalists": len(found.finalists_)}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Counter]]:
    """Print a table, and return how often each rule chose each number, by case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--sample-rows", type=int, default=1_000)
    options = parser.parse_args(arguments)
    print(f"{options.sets} data sets of {options.rows:,} rows, samples of {options.sample_rows:,}; K: times")
    found_in = {}
    for case, weights in CASES.items():
        counts = {rule: Counter() for rule in (*RULES, "finalists")}
        for seed in range(options.sets):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = choices(drawn(options.rows, weights, seed), options.sample_rows, seed)
            for rule, chosen in found.items():
                counts[rule][chosen] += 1
        found_in[case] = counts
        for rule, counter in counts.items():
            print(f"{case:<10} {rule:<18}", dict(sorted(counter.items())), flush=True)
    return found_in


if __name__ == "__main__":
    main()
