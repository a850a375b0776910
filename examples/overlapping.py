"""Compare EM with the default where clusters overlap: how far from the optimum, after how many passes?

python examples/overlapping.py                # 100,000 rows
python examples/overlapping.py 1000000 gap.png
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import GaussianMixture

FEATURES, CLUSTERS, APART = 4, 6, 2.2
LEAST_GAP = 1e-8


def points(rows: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    centres = random.normal(scale=APART, size=(CLUSTERS, FEATURES))
    return centres[random.integers(CLUSTERS, size=rows)] + random.normal(size=(rows, FEATURES))


def main(rows: int = 100_000) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return, by algorithm, the work and the gap to the better fit after each pass over all rows."""
    X = points(rows)
    start = GaussianMixture(CLUSTERS, algorithm="em", max_iter=1, random_state=0)
    curves, bounds = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # they end by max_iter, where they do
        start.fit(X)
        given = {"weights_init": start.weights_, "means_init": start.means_}
        given["precisions_init"] = start.precisions_
        for algorithm in ("em", "auto"):
            model = GaussianMixture(CLUSTERS, algorithm=algorithm, tol=1e-9, max_iter=100, **given).fit(X)
            work = np.cumsum([record.active_rows / record.rows for record in model.history_])
            full = [record.full_pass and record.accepted for record in model.history_]
            bounds[algorithm] = np.array(model.lower_bounds_)[full]
            curves[algorithm] = work[full]
            print(f"{algorithm:>5}: {work[-1]:.1f} passes, log-likelihood {model.lower_bound_:.9f} per row")
    best = max(values.max() for values in bounds.values())
    return {name: (curves[name], best - bounds[name]) for name in curves}


def picture(curves: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> Any:
    """Draw the gaps, in log-likelihood per row, against the work."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, (work, gap) in curves.items():
        axes.semilogy(work, np.maximum(gap, LEAST_GAP), ".-", label=f'algorithm="{name}"')
    axes.set_xlabel("work, in passes over the rows")
    axes.set_ylabel("gap in log-likelihood per row")
    axes.legend()
    return figure


if __name__ == "__main__":
    gaps = main(*map(int, sys.argv[1:2]))
    if len(sys.argv) > 2:
        picture(gaps).savefig(sys.argv[2])
