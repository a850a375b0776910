"""Full EM is scikit-learn's from the same start after 25 iterations, to 1e-9 of each array's largest."""

import warnings

import numpy as np
import pytest
import zarr
from oracles import agree, cases, starts
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

ARRAYS = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")


def judge(X, k, covariance_type, given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(k, covariance_type=covariance_type, tol=0, max_iter=25, **given).fit(X)


def assert_same(fit, name, covariance_type, stored):
    """The fit to what ``stored`` makes of named data is scikit-learn's to them."""
    X, k = starts.data(name)
    given = starts.start(X, k, covariance_type)
    model = fit(stored(X), given, cases.FULL, covariance_type=covariance_type, reg_covar=1e-6)
    expected = judge(X, k, covariance_type, given)
    errors = {array: agree.worst(getattr(model, array), getattr(expected, array)) for array in ARRAYS}
    assert max(errors.values()) <= 1e-9, errors
    assert model.lower_bound_ == pytest.approx(expected.lower_bound_, rel=1e-11)


@pytest.mark.parametrize("covariance_type", starts.SCIKIT_LEARN_TYPES)
@pytest.mark.parametrize(
    "name", ["overlapping", "separated", "one-feature", "one-component", "tall", "wide", "far-out"]
)
def test_parameters_and_bound(fit, name, covariance_type):
    assert_same(fit, name, covariance_type, lambda X: starts.chunked(X, "ragged"))


@pytest.mark.parametrize("chunking", starts.CHUNKINGS)
@pytest.mark.parametrize("covariance_type", starts.SCIKIT_LEARN_TYPES)
def test_parameters_under_odd_chunkings(fit, covariance_type, chunking):
    assert_same(fit, "small", covariance_type, lambda X: starts.chunked(X, chunking))


@pytest.mark.parametrize("source", ["numpy", "zarr"])
@pytest.mark.parametrize("covariance_type", starts.SCIKIT_LEARN_TYPES)
def test_parameters_from_other_sources(fit, tmp_path, covariance_type, source):
    def in_zarr(X):
        return zarr.create_array(tmp_path / "X.zarr", data=X, chunks=(100, 2))

    assert_same(fit, "overlapping", covariance_type, in_zarr if source == "zarr" else np.asarray)


@pytest.mark.parametrize(
    ("covariance_type", "name", "theirs"),
    [
        ("tied_diag", "one-component", "diag"),
        ("tied_diag", "one-feature", "tied"),
        ("tied_spherical", "one-component", "spherical"),
        ("tied_spherical", "one-feature", "tied"),
    ],
)
def test_shared_variances_where_the_data_make_them_a_type_of_scikit_learn(fit, covariance_type, name, theirs):
    X, k = starts.data(name)
    given = starts.start(X, k, covariance_type)
    model = fit(
        starts.chunked(X, "ragged"), given, cases.FULL, covariance_type=covariance_type, reg_covar=1e-6
    )
    shape = {"diag": (k, X.shape[1]), "spherical": (k,), "tied": (1, 1)}[theirs]
    expected = judge(X, k, theirs, {**given, "precisions_init": given["precisions_init"].reshape(shape)})
    for array in ("weights_", "means_"):
        assert agree.worst(getattr(model, array), getattr(expected, array)) <= 1e-9, array
    for array in ("covariances_", "precisions_", "precisions_cholesky_"):
        found = getattr(model, array).reshape(shape)
        assert agree.worst(found, getattr(expected, array)) <= 1e-9, array
    assert model.lower_bound_ == pytest.approx(expected.lower_bound_, rel=1e-11)


@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
def test_the_twin_says_the_same_of_all_rows(fit, covariance_type):
    X, k = starts.data("overlapping")
    model = fit(X, starts.start(X, k, covariance_type), cases.FULL, covariance_type=covariance_type)
    twin = model.to_sklearn()
    assert np.allclose(twin.predict_proba(X), model.predict_proba(X), rtol=1e-10, atol=1e-14)
    assert np.allclose(twin.score_samples(X), model.score_samples(X), rtol=1e-11)
    draws, _ = twin.sample(10)
    assert draws.shape == (10, X.shape[1])
