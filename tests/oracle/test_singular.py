"""Components that collapse: a clear error or the regularised answer, never NaN, never LinAlgError."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from oracles import cases, naive, starts
from sklearn.exceptions import ConvergenceWarning

import emtau_dask

CHUNKINGS = pytest.mark.parametrize("chunking", starts.CHUNKINGS)
OWN = pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical"])  # each component its own
SHARED = pytest.mark.parametrize("covariance_type", ["tied", "tied_diag", "tied_spherical"])
DIRECTION = np.array([1 / 3, -0.7, 1.1])


def with_identical_rows(distance, *, cloud=40, identical=20):
    """A cloud at the origin and identical rows at `distance`, shuffled: X, and means on each."""
    rng = np.random.default_rng(6)
    point = distance * DIRECTION
    X = np.concatenate([rng.normal(size=(cloud, 3)), np.tile(point, (identical, 1))])
    return X[rng.permutation(len(X))], np.array([np.zeros(3), point])


def start_at(means, covariance_type):
    return {
        "weights_init": np.array([0.6, 0.4]),
        "means_init": means,
        "precisions_init": naive.packed(np.array([np.eye(means.shape[1])] * 2), covariance_type),
    }


def as_full(array):
    return {0: lambda: array * np.eye(3), 1: lambda: np.diag(array), 2: lambda: array}[array.ndim]()


@CHUNKINGS
@pytest.mark.parametrize("distance", [300, 1e5])
@OWN
def test_a_component_on_identical_rows_is_refused_or_has_reg_covar(fit, covariance_type, distance, chunking):
    X, means = with_identical_rows(distance)
    given, options = start_at(means, covariance_type), {"covariance_type": covariance_type}
    with pytest.raises(emtau_dask.SingularComponentError):
        fit(starts.chunked(X, chunking), given, cases.FULL, **options)
    model = fit(starts.chunked(X, chunking), given, cases.FULL, reg_covar=1e-6, max_iter=10, **options)
    np.testing.assert_allclose(as_full(model.covariances_[1]), 1e-6 * np.eye(3), rtol=0, atol=1e-15)


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_every_algorithm_refuses_a_component_on_identical_rows_or_has_reg_covar(fit, case):
    X, means = with_identical_rows(300)
    with pytest.raises(emtau_dask.SingularComponentError):
        fit(starts.chunked(X, "ragged"), start_at(means, "full"), case)
    X, means = with_identical_rows(1e5)
    model = fit(starts.chunked(X, "ragged"), start_at(means, "full"), case, reg_covar=1e-6)
    np.testing.assert_allclose(model.covariances_[1], 1e-6 * np.eye(3), rtol=0, atol=1e-15)


@CHUNKINGS
@OWN
def test_a_component_that_shrinks_onto_identical_rows_is_refused(fit, covariance_type, chunking):
    X, means = with_identical_rows(0.9)  # inside the cloud: the cloud's rows leave it one after another
    given = start_at(means, covariance_type)
    with pytest.raises(emtau_dask.SingularComponentError):
        fit(starts.chunked(X, chunking), given, cases.FULL, covariance_type=covariance_type, max_iter=60)


@CHUNKINGS
@SHARED
@pytest.mark.parametrize("distance", [400, 1e5])
def test_tied_components_all_on_identical_rows_are_refused_or_have_reg_covar(
    fit, covariance_type, distance, chunking
):
    means = np.array([DIRECTION, distance * DIRECTION])
    X = np.repeat(means, [25, 35], axis=0)
    given, options = start_at(means, covariance_type), {"covariance_type": covariance_type}
    with pytest.raises(emtau_dask.SingularComponentError):
        fit(starts.chunked(X, chunking), given, cases.FULL, **options)
    model = fit(starts.chunked(X, chunking), given, cases.FULL, reg_covar=1e-6, max_iter=10, **options)
    np.testing.assert_allclose(as_full(model.covariances_), 1e-6 * np.eye(3), rtol=0, atol=1e-15)


@pytest.mark.parametrize("reg_covar", [0, 1e-6])
def test_a_component_without_rows_is_refused(fit, reg_covar):
    X, means = with_identical_rows(300)
    far = np.array([means[0], means[1] * 1e6])  # every responsibility underflows to 0
    with pytest.raises(emtau_dask.SingularComponentError):
        fit(starts.chunked(X, "ragged"), start_at(far, "full"), cases.FULL, reg_covar=reg_covar)


def test_the_error_names_the_component_and_the_remedies(fit):
    X, means = with_identical_rows(300)
    with pytest.raises(emtau_dask.SingularComponentError, match=r"(?i)\bcomponent 1\b") as caught:
        fit(starts.chunked(X, "ragged"), start_at(means, "full"), cases.FULL)
    assert all(remedy in str(caught.value) for remedy in ("number of components", "reg_covar", "scale"))


@st.composite
def degenerate(draw):
    """Few distinct values, constant or equal columns, huge or tiny units: X, component count."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, d, k = draw(st.integers(8, 60)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    X = rng.integers(0, draw(st.integers(1, 6)), size=(n, d)).astype(float)
    X += draw(st.sampled_from([0.0, 1e-9, 1e-3])) * rng.normal(size=(n, d))
    if draw(st.booleans()):
        X[:, -1] = X[:, 0]
    return X * draw(st.sampled_from([1e-100, 1e-8, 1.0, 1e8, 1e100])) + draw(st.sampled_from([0, 1, 1e8])), k


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=degenerate(),
    case=st.sampled_from(cases.ONE_EACH),
    covariance_type=st.sampled_from(starts.COVARIANCE_TYPES),
    reg_covar=st.sampled_from([0, 1e-6]),
)
def test_degenerate_data_give_numbers_or_the_error(drawn, case, covariance_type, reg_covar):
    X, k = drawn
    model = emtau_dask.GaussianMixture(
        k,
        algorithm=case.package(emtau_dask),
        covariance_type=covariance_type,
        reg_covar=reg_covar,
        max_iter=8,
        init_params="random_from_data",
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            model.fit(X)
        except emtau_dask.SingularComponentError:
            event("singular")
            return
    event("numbers")
    arrays = (model.weights_, model.means_, model.covariances_, model.precisions_, model.lower_bounds_)
    assert all(np.isfinite(array).all() for array in arrays)
