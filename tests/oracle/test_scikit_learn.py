"""Full EM is scikit-learn's from the same start after 25 iterations, to 1e-9 of each array's largest."""

import warnings

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


def assert_same(model, expected):
    errors = {name: agree.worst(getattr(model, name), getattr(expected, name)) for name in ARRAYS}
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
@pytest.mark.parametrize(
    "name", ["overlapping", "separated", "one-feature", "one-component", "tall", "wide", "far-out"]
)
def test_parameters(fit, name, covariance_type):
    X, k = starts.data(name)
    given = starts.start(X, k, covariance_type)
    model = fit(
        starts.chunked(X, "ragged"), given, cases.FULL, covariance_type=covariance_type, reg_covar=1e-6
    )
    assert_same(model, judge(X, k, covariance_type, given))


@pytest.mark.parametrize("chunking", starts.CHUNKINGS)
@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
def test_parameters_under_odd_chunkings(fit, covariance_type, chunking):
    X, k = starts.data("small")
    given = starts.start(X, k, covariance_type)
    model = fit(
        starts.chunked(X, chunking), given, cases.FULL, covariance_type=covariance_type, reg_covar=1e-6
    )
    assert_same(model, judge(X, k, covariance_type, given))


@pytest.mark.parametrize("source", ["numpy", "zarr"])
@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
def test_parameters_from_other_sources(fit, tmp_path, covariance_type, source):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, covariance_type)
    stored = X
    if source == "zarr":
        stored = zarr.create_array(tmp_path / "X.zarr", data=X, chunks=(100, 2))
    model = fit(stored, given, cases.FULL, covariance_type=covariance_type, reg_covar=1e-6)
    assert_same(model, judge(X, k, covariance_type, given))


@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
def test_lower_bound(fit, covariance_type):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, covariance_type)
    model = fit(
        starts.chunked(X, "ragged"), given, cases.FULL, covariance_type=covariance_type, reg_covar=1e-6
    )
    assert model.lower_bound_ == pytest.approx(judge(X, k, covariance_type, given).lower_bound_, rel=1e-11)
