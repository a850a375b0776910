"""Every covariance type is fitted, resumed, saved and read again by all algorithms, compiled or not."""

import warnings

import dask
import numpy as np
import pytest
from oracles import starts

from emtau_dask import EMLazy, EMStar, EMTau, FullEM, GaussianMixture

ROWS, K = starts.data("overlapping")
WEIGHTS = np.random.default_rng(3).uniform(0.5, 2.0, len(ROWS))
ALGORITHMS = [FullEM(), EMTau(tau=2), EMStar(), EMLazy()]
TYPES = pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
FITTED = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")


@pytest.fixture(autouse=True)
def _unconverged():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_same_bits(model, other):
    for name in FITTED:
        found, expected = getattr(model, name), getattr(other, name)
        assert isinstance(found, np.ndarray)
        assert (found.shape, found.dtype) == (expected.shape, np.float64)
        assert found.tobytes() == expected.tobytes(), name


@TYPES
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("compiled", ["never", "always"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_a_fit_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, covariance_type, algorithm, compiled, dtype):
    rows = ROWS.astype(dtype)
    settings = {"covariance_type": covariance_type, "algorithm": algorithm, "tol": 0, "random_state": 0}
    with dask.config.set({"emtau.compiled": compiled}):
        whole = GaussianMixture(K, max_iter=6, **settings).fit(rows, sample_weight=WEIGHTS)
        path = tmp_path / "run.zarr"
        GaussianMixture(K, max_iter=3, checkpoint=path, **settings).fit(rows, sample_weight=WEIGHTS)
        resumed = GaussianMixture.resume(path, rows, sample_weight=WEIGHTS, max_iter=6)
    assert_same_bits(resumed, whole)


def by_numpy_and_by_tiles(**settings):
    models = []
    for compiled in ("never", "always"):
        with dask.config.set({"emtau.compiled": compiled}):
            models.append(GaussianMixture(K, random_state=0, **settings).fit(ROWS))
    return models


@TYPES
def test_compiled_or_not_a_fit_is_the_same_to_rounding(covariance_type):
    plain, tiles = by_numpy_and_by_tiles(covariance_type=covariance_type, algorithm="em", tol=1e-9)
    assert plain.n_iter_ == tiles.n_iter_
    for name in FITTED:
        assert np.allclose(getattr(plain, name), getattr(tiles, name), rtol=1e-9, atol=1e-10), name


@TYPES
def test_compiled_or_not_a_default_fit_ends_at_one_optimum(covariance_type):
    """Its extrapolated steps magnify rounding; both ends are within the gap that it leaves of one optimum."""
    plain, tiles = by_numpy_and_by_tiles(covariance_type=covariance_type)
    most = plain.gap_ + tiles.gap_
    assert most <= 2 / (8 * len(ROWS))
    assert abs(plain.lower_bound_ - tiles.lower_bound_) <= most


@TYPES
def test_a_saved_model_is_read_again(tmp_path, covariance_type):
    model = GaussianMixture(K, covariance_type=covariance_type, random_state=0).fit(ROWS)
    model.save(tmp_path / "model.zarr")
    read = GaussianMixture.load(tmp_path / "model.zarr")
    assert read.covariance_type == covariance_type
    assert f"{covariance_type} covariance" in str(read.summary())
    assert_same_bits(read, model)
    assert np.array_equal(read.predict(ROWS), model.predict(ROWS))
    assert read.bic(ROWS) == model.bic(ROWS)
    assert read.aic(ROWS) == model.aic(ROWS)


@TYPES
def test_draws_have_the_moments_of_the_model(covariance_type):
    model = GaussianMixture(K, covariance_type=covariance_type, random_state=0).fit(ROWS)
    draws, labels = model.sample(20_000)
    parameters = model.parameters_
    variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
    for k in range(K):
        own = draws[labels == k]
        assert np.allclose(own.mean(axis=0), model.means_[k], atol=0.1)
        assert np.allclose(own.var(axis=0), variances[k], rtol=0.1)
