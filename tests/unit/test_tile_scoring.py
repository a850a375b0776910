"""Rows that compiled tiles score, and sum nothing of, against scipy's densities."""

import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import references
import scipy.special
from references import log_joint, rows_near

from emtau_dask.kernels.dispatch import TileKernel, scoring_kernels
from emtau_dask.mixture.estep import MIN_EXPONENT

FORMS = [("full", 3), ("full", 19), ("tied", 3), ("diag", 3), ("spherical", 3)]
"""Covariance types and features. With 19 all components are scored in the centred form."""
LENGTHS = (1, 2, 1000, 2500)
mixture = partial(references.drawn, spread=1.0)


def scorer(parameters, n):
    kernel = scoring_kernels(parameters, compiled=True).acquire(n)
    assert isinstance(kernel, TileKernel)
    return kernel


def scored(kernel, rows, *, responsibilities=True):
    squared, parts = kernel.score(rows, responsibilities=responsibilities)
    labels, log_likelihoods = np.full(len(rows), -1), np.full(len(rows), np.nan)
    found = np.full((len(rows), 3), np.nan)
    for part in parts:
        labels[part.places], log_likelihoods[part.places] = part.labels, part.log_likelihoods
        if responsibilities:
            found[part.places] = part.responsibilities.T
    return squared, labels, log_likelihoods, found


@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
@pytest.mark.parametrize("n", LENGTHS)
def test_rows_follow_bayes_theorem(covariance_type, d, n):
    parameters = mixture(covariance_type, d=d)
    rows = rows_near(parameters, n)
    squared, labels, log_likelihoods, found = scored(scorer(parameters, n), rows)
    expected = log_joint(rows, parameters)
    assert np.array_equal(labels, expected.argmax(axis=1))
    assert np.allclose(log_likelihoods, scipy.special.logsumexp(expected, axis=1), rtol=1e-12)
    assert np.allclose(found, scipy.special.softmax(expected, axis=1), rtol=1e-10, atol=1e-14)
    assert np.isclose(squared, (rows**2).sum(), rtol=1e-13)


@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_without_responsibilities_all_else_is_the_same(covariance_type, d):
    parameters = mixture(covariance_type, d=d)
    rows, kernel = rows_near(parameters, 500), scorer(parameters, 500)
    whole, part = (scored(kernel, rows, responsibilities=wanted) for wanted in (True, False))
    assert np.array_equal(whole[1], part[1])
    assert np.array_equal(whole[2], part[2])
    assert kernel.score(rows, responsibilities=False)[1][0].responsibilities.shape == (0, 500)


@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_rows_whose_densities_underflow_are_scored_all_the_same(covariance_type, d):
    parameters = mixture(covariance_type, d=d, spread=0.1)
    rows = rows_near(parameters, 3000)
    rows[1500::5] *= 60
    expected = log_joint(rows, parameters)
    assert (expected.max(axis=1) < MIN_EXPONENT[np.dtype("f8")]).any()
    _, labels, log_likelihoods, _ = scored(scorer(parameters, 3000), rows)
    assert np.array_equal(labels, expected.argmax(axis=1))
    assert np.allclose(log_likelihoods, scipy.special.logsumexp(expected, axis=1), rtol=1e-11)


@pytest.mark.parametrize(("covariance_type", "d"), [form for form in FORMS if form[0] != "tied"])
def test_rows_of_which_products_overflow_are_scored_too_and_spoil_no_later_ones(covariance_type, d):
    """The distance overflows to one component, which is narrow, and not to the others."""
    parameters = mixture(covariance_type, d=d, spread=0.0)
    covariances, factors = parameters.covariances.copy(), parameters.precisions_cholesky.copy()
    covariances[0], factors[0] = covariances[0] * 1e-20, factors[0] * 1e10
    parameters = replace(parameters, covariances=covariances, precisions_cholesky=factors)
    rows, others = rows_near(parameters, 1200), rows_near(parameters, 300, seed=2)
    rows[-20:] = 1e149
    kernel = scorer(parameters, 1200)
    _, labels, log_likelihoods, found = scored(kernel, rows)
    with np.errstate(over="ignore"):
        expected = log_joint(rows, parameters)
    assert np.isfinite(log_likelihoods).all()
    assert np.array_equal(labels[:-20], expected[:-20].argmax(axis=1))
    assert (found[-20:, 0] == 0).all()
    for seen, wanted in zip(scored(kernel, others), scored(scorer(parameters, 300), others), strict=True):
        assert np.array_equal(seen, wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_the_squares_of_rows_that_are_not_finite_say_so(covariance_type, d, value):
    parameters = mixture(covariance_type, d=d)
    rows = rows_near(parameters, 900)
    rows[700, d - 1] = value
    assert not np.isfinite(scorer(parameters, 900).score(rows, responsibilities=False)[0])


def test_rows_that_do_not_fit_are_refused_before_compiled_code_sees_them():
    kernel = scorer(mixture("full", d=3), 100)
    for rows in (np.zeros((kernel.n_rows + 1, 3)), np.zeros((5, 4)), np.zeros((5, 3), np.float32)):
        with pytest.raises(ValueError, match="do not fit"):
            kernel.score(rows, responsibilities=False)


def test_what_cannot_go_by_tiles_goes_by_blocks():
    parameters = mixture("full", d=3)
    rows = rows_near(parameters, 200)
    expected = scored(scorer(parameters, 200), rows)
    far = replace(parameters, means=1e7 * parameters.means)
    assert not scoring_kernels(far, compiled=True, missing=True).by_tiles
    for missing in (False, True):
        kernels = scoring_kernels(parameters, compiled=False, missing=missing)
        assert not kernels.by_tiles
        found = scored(kernels.acquire(200), rows)
        assert np.array_equal(found[1], expected[1])
        assert np.allclose(found[2], expected[2], rtol=1e-12)
    assert scoring_kernels(parameters, compiled=True).by_tiles
    assert scoring_kernels(parameters, compiled=True, missing=True).by_tiles


def test_a_copy_in_another_process_scores_alike():
    parameters = mixture("full", d=3)
    rows, kernels = rows_near(parameters, 200), scoring_kernels(parameters, compiled=True)
    there = pickle.loads(pickle.dumps(kernels))
    assert np.array_equal(scored(there.acquire(200), rows)[2], scored(kernels.acquire(200), rows)[2])
