"""Default fits against scikit-learn's best of several starts, on data where components are well apart."""

import numpy as np
import pytest
from sklearn.mixture import GaussianMixture as Reference

from emtau_dask import GaussianMixture

CENTRES = {
    "two": [[-3, 0], [3, 0]],
    "on a line": [[-4, 0], [0, 0], [4, 0]],
    "on a grid": [[x, y] for x in (-5, 0, 5) for y in (-5, 0, 5)],
}


@pytest.mark.parametrize(
    ("centres", "beside"), [("two", 0), ("on a line", 0), ("on a grid", 0), ("two", 18), ("on a line", 18)]
)
@pytest.mark.parametrize("n", [4_500, 9_000, 18_000])
def test_components_that_are_apart_stay_apart(n, centres, beside):
    """With 18 features beside, which say nothing, rows are few for each parameter, and runs are annealed."""
    rng = np.random.default_rng(0)
    means = np.array(CENTRES[centres], dtype=float)
    X = rng.normal(size=(n, 2 + beside))
    X[:, :2] += means[rng.integers(len(means), size=n)]
    found = GaussianMixture(len(means), random_state=0).fit(X)
    best = Reference(len(means), n_init=5, tol=1e-6, max_iter=500, random_state=0).fit(X)
    assert found.score(X) >= best.score(X) - 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_of_few_rows_the_best_of_several_starts_is_found(seed):
    rng = np.random.default_rng(0)
    means = np.array(CENTRES["on a grid"], dtype=float)
    X = rng.normal(size=(900, 2)) + means[rng.integers(len(means), size=900)]
    found = GaussianMixture(len(means), random_state=seed).fit(X)
    best = Reference(len(means), n_init=10, tol=1e-6, max_iter=500, random_state=0).fit(X)
    assert found.score(X) >= best.score(X) - 1e-4


def test_given_means_stay_where_they_are_given():
    """Annealing forgets them; a run that is not annealed is compared."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(6_000, 20))
    X[:, 0] += 8.0 * rng.integers(2, size=len(X))
    means = np.zeros((2, 20))
    means[1, 0] = 8.0
    precisions = np.broadcast_to(np.eye(20), (2, 20, 20))
    start = {"weights_init": [0.5, 0.5], "means_init": means, "precisions_init": precisions}
    found = GaussianMixture(2, **start).fit(X)
    best = Reference(2, tol=1e-8, max_iter=500, **start).fit(X)
    assert found.score(X) >= best.score(X) - 1e-5
