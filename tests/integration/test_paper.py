"""Example 2 of the paper, in short: its confusion matrix, and what EM-Tau makes of it."""

import os
from pathlib import Path

import numpy as np
import pytest
import zarr

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.datasets import make_dataset
from emtau_dask.em.history import SilentObserver

DIGITS = [1, 2, 4, 5, 6]
CONFUSION = [
    [5669, 0, 1, 0, 0],
    [533, 5931, 148, 47, 86],
    [535, 15, 5675, 2, 7],
    [2, 5, 7, 5363, 297],
    [3, 7, 11, 9, 5528],
]
SEED = 1
PLACES = [
    os.environ.get("EMTAU_MNIST", ""),
    str(Path(__file__).parents[3] / "shared" / "data" / "mnist12456.npz"),
]
SOURCE = next((place for place in PLACES if place and Path(place).is_file()), None)

pytestmark = pytest.mark.skipif(
    SOURCE is None, reason="no mnist12456.npz in ../shared/data or where EMTAU_MNIST says"
)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    place = tmp_path_factory.mktemp("mnist") / "mnist.zarr"
    make_dataset("mnist", place, source=SOURCE, observer=SilentObserver())
    group = zarr.open_group(place, mode="r")
    return np.asarray(group["X"][:]), np.asarray(group["labels"][:])


def fit(X, algorithm):
    start = np.random.default_rng(SEED).dirichlet(np.ones(5), len(X))
    model = GaussianMixture(5, algorithm=algorithm, reg_covar=0.0, tol=1e-12, max_iter=2000)
    return model.fit(X, responsibilities_init=start)


@pytest.fixture(scope="module")
def em(mnist):
    return fit(mnist[0], "em")


def test_traditional_em_ends_in_the_papers_confusion_matrix(mnist, em):
    X, y = mnist
    components = em.predict(X)
    counts = np.array([[np.sum((components == k) & (y == digit)) for digit in DIGITS] for k in range(5)])
    assert counts[np.argsort(counts.argmax(axis=1))].tolist() == CONFUSION


@pytest.mark.parametrize("tau", [10, 20, 30])
def test_em_tau_with_revisits_ends_where_em_ends(mnist, em, tau):
    model = fit(mnist[0], EMTau(tau, "on-empty"))
    assert model.converged_
    assert abs(model.score(mnist[0]) - em.score(mnist[0])) <= 1e-7


def test_em_tau_without_revisits_ends_lower(mnist, em):
    model = fit(mnist[0], EMTau(10, None))
    assert 0.1 <= em.score(mnist[0]) - model.score(mnist[0]) <= 3
