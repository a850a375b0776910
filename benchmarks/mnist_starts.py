"""Example 2 of the EM-Tau paper from fifteen random starts: how many end in its confusion matrix?

    emtau dataset mnist runs/mnist.zarr --source mnist12456.npz
    python benchmarks/mnist_starts.py runs/mnist.zarr

Traditional EM, K = 5, full covariances, reg_covar = 0, tol = 1e-12, from responsibilities
`default_rng(seed).dirichlet(ones(5), rows)`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import zarr

from emtau_dask import GaussianMixture
from emtau_dask.compare import classification_error, confusion

PAPER = np.array(
    [
        [5669, 0, 1, 0, 0],
        [533, 5931, 148, 47, 86],
        [535, 15, 5675, 2, 7],
        [2, 5, 7, 5363, 297],
        [3, 7, 11, 9, 5528],
    ]
)


@dataclass(frozen=True)
class Start:
    seed: int
    iterations: int
    lower_bound: float
    error: float
    is_the_papers: bool


def fit(X: np.ndarray, labels: np.ndarray, seed: int) -> Start:
    responsibilities = np.random.default_rng(seed).dirichlet(np.ones(5), len(X))
    model = GaussianMixture(5, algorithm="em", reg_covar=0.0, tol=1e-12, max_iter=2000)
    components = model.fit_predict(X, responsibilities_init=responsibilities)
    classes, known = np.unique(labels, return_inverse=True)
    table = np.zeros((5, len(classes)), dtype=np.intp)
    np.add.at(table, (components, known), 1)
    return Start(
        seed,
        model.n_iter_,
        model.lower_bound_,
        classification_error(table),
        np.array_equal(confusion(table), PAPER),
    )


def main(arguments: list[str] | None = None) -> list[Start]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="what `emtau dataset mnist` wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(15)))
    options = parser.parse_args(arguments)
    group = zarr.open_group(options.data, mode="r")
    X, labels = np.asarray(group["X"][:]), np.asarray(group["labels"][:])
    starts = []
    for seed in options.seeds:
        start = fit(X, labels, seed)
        starts.append(start)
        verdict = "the paper's confusion matrix" if start.is_the_papers else "another optimum"
        print(
            f"seed {seed:>2}: {start.iterations:>4} iterations, bound {start.lower_bound:.6f}, "
            f"error {start.error:.6f}, {verdict}"
        )
    print(f"{sum(start.is_the_papers for start in starts)} of {len(starts)} starts")
    return starts


if __name__ == "__main__":
    main()
