"""The lower bound never falls by more than 1e-11·max(1, |bound|) with reg_covar=0, whatever the algorithm."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from oracles import cases, starts
from sklearn.exceptions import ConvergenceWarning

import emtau_dask


@st.composite
def problems(draw):
    """A mixture of some 40 rows a component or more: X (dask), start, covariance type, weights."""
    seed = draw(st.integers(0, 2**32 - 1))
    k, d = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n = k * draw(st.integers(40, 90)) + draw(st.integers(0, 30))
    X, _ = starts.mixture(n, k, d, separation=draw(st.sampled_from([0.3, 1.5, 4.0, 9.0])), seed=seed)
    X = X * draw(st.sampled_from([1e-3, 1.0, 1e3])) + draw(st.sampled_from([0.0, 0.0, 10.0]))
    covariance_type = draw(st.sampled_from(starts.COVARIANCE_TYPES))
    start = starts.start(X, k, covariance_type, seed=seed)
    weights = np.random.default_rng(seed).uniform(0.2, 3, size=n) if draw(st.booleans()) else None
    chunking = draw(st.sampled_from(["one-chunk", "ragged", "zero-row-chunks", "features-split"]))
    return starts.chunked(X, chunking), start, covariance_type, weights


@pytest.mark.parametrize("case", cases.ALL, ids=str)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
def test_the_lower_bound_never_falls(case, problem):
    X, start, covariance_type, weights = problem
    model = emtau_dask.GaussianMixture(
        len(start["means_init"]),
        covariance_type=covariance_type,
        algorithm=case.package(emtau_dask),
        tol=0,
        reg_covar=0,
        max_iter=12,
        **start,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            model.fit(X, sample_weight=weights)
        except emtau_dask.SingularComponentError:
            event("a singular component")
            assume(False)
    bounds = np.asarray(model.lower_bounds_)
    falls = bounds[:-1] - bounds[1:]
    assert np.all(falls <= 1e-11 * np.maximum(1, np.abs(bounds[1:])))
