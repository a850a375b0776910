"""Fits of many features, beside scikit-learn's; their bits."""

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SklearnMixture
from threadpoolctl import threadpool_limits

from emtau_dask import EMTau, FullEM, GaussianMixture

D = 390
ARRAYS = ("weights_", "means_", "covariances_", "precisions_cholesky_")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(500, D)) + shift for shift in (0.0, 0.1, -0.1)])
    rng.shuffle(rows)
    return rows


@pytest.fixture
def start(rows):
    return {
        "n_components": 3,
        "weights_init": [0.5, 0.3, 0.2],
        "means_init": rows[:3],
        "precisions_init": np.stack([np.eye(D)] * 3),
        "reg_covar": 1.0,
        "tol": 0.0,
        "max_iter": 6,
    }


@pytest.fixture(autouse=True)
def unconverged():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def fitted(rows, start, algorithm, **options):
    return GaussianMixture(**{**start, **options}, algorithm=algorithm).fit(
        da.from_array(rows, chunks=(400, -1))
    )


def assert_same_bits(one, other):
    for name in ARRAYS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.lower_bounds_ == other.lower_bounds_


def test_full_em_is_scikit_learns(rows, start):
    expected = SklearnMixture(**start).fit(rows)
    found = fitted(rows, start, FullEM())
    for name in ARRAYS:
        assert np.allclose(getattr(found, name), getattr(expected, name), rtol=1e-7, atol=1e-9), name
    assert np.allclose(found.score_samples(rows), expected.score_samples(rows), rtol=1e-10)


@pytest.mark.parametrize("algorithm", [FullEM(), EMTau(tau=2, revisit=3)])
def test_threads_and_a_stop_between_change_no_bit(rows, start, algorithm, tmp_path):
    whole = fitted(rows, start, algorithm)
    with dask.config.set(scheduler="threads", num_workers=3):
        assert_same_bits(fitted(rows, start, algorithm), whole)
    fitted(rows, start, algorithm, max_iter=3, checkpoint=tmp_path / "run.zarr")
    data = da.from_array(rows, chunks=(400, -1))
    with threadpool_limits(2, user_api="blas"):
        assert_same_bits(GaussianMixture.resume(tmp_path / "run.zarr", data, max_iter=6), whole)
