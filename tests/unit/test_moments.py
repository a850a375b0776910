"""Signed moments against sums over rows, and their metric against the covariance of complete data."""

from itertools import product

import numpy as np
import pytest
from references import COVARIANCE_TYPES, LONG, drawn, full_covariances, shaped, statistics_of
from scipy.stats import multivariate_normal

from emtau_dask.em.moments import MomentSpace
from emtau_dask.mixture.covariance_types import structure_named

STRUCTURES = pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
K, D = 3, 3


def naive_moments(rows, responsibilities, origins, covariance_type):
    """Sums over rows of w (1, x - a, (x - a)(x - a)ᵀ), row by row, in longdouble."""
    k, d = origins.shape
    weights, firsts, seconds = np.zeros(k, LONG), np.zeros((k, d), LONG), np.zeros((k, d, d), LONG)
    for row, row_weights in zip(rows.astype(LONG), responsibilities.astype(LONG), strict=True):
        for component in range(k):
            difference = row - origins[component]
            weights[component] += row_weights[component]
            firsts[component] += row_weights[component] * difference
            seconds[component] += row_weights[component] * np.outer(difference, difference)
    seconds = np.asarray(shaped(seconds, covariance_type))
    return np.concatenate([weights, firsts.ravel(), seconds.ravel()])


def draw(n=60, seed=0, signed=False):
    """Rows, responsibilities (those that sum to 1, or signed ones), and two sets of origins."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, D)) * [1.0, 3.0, 0.5] + [0.5, -1.0, 2.0]
    responsibilities = rng.dirichlet(np.ones(K), size=n)
    if signed:
        responsibilities = responsibilities - rng.dirichlet(np.ones(K), size=n) * rng.uniform(0, 2, (n, 1))
    return rows, responsibilities, rng.normal(size=(K, D)), rng.normal(size=(K, D))


def close(found, expected, limit=1e-13):
    expected = np.asarray(expected, dtype=np.float64)
    scale = np.abs(expected).max()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= limit * scale


@STRUCTURES
def test_moments_of_statistics_are_sums_over_rows_and_lead_back_to_them(covariance_type):
    structure = structure_named(covariance_type)
    rows, responsibilities, origins, _ = draw()
    statistics, space = statistics_of(structure, rows, responsibilities), MomentSpace(structure, origins)
    found = space.of(statistics)
    close(found, naive_moments(rows, responsibilities, origins, covariance_type))
    again = space.statistics(found)
    for name in ("weights", "means", "scatter"):
        close(np.asarray(getattr(again, name)), getattr(statistics, name))


@STRUCTURES
def test_the_parts_of_a_vector_are_views_that_make_it_up(covariance_type):
    structure = structure_named(covariance_type)
    space = MomentSpace(structure, np.zeros((K, D)))
    vector = np.arange(float(space.size))
    weights, firsts, seconds = space.split(vector)
    assert [weights.shape, firsts.shape, seconds.shape] == [(K,), (K, D), structure.shape(K, D)]
    np.testing.assert_array_equal(np.concatenate([weights, firsts.ravel(), seconds.ravel()]), vector)
    assert all(np.shares_memory(part, vector) for part in (weights, firsts, seconds))


@STRUCTURES
@pytest.mark.parametrize("weight", [0.0, -1e-3])
def test_moments_of_a_component_without_weight_are_no_statistics(covariance_type, weight):
    structure = structure_named(covariance_type)
    rows, responsibilities, origins, _ = draw()
    space = MomentSpace(structure, origins)
    moments = space.of(statistics_of(structure, rows, responsibilities))
    moments[1] = weight
    assert space.statistics(moments) is None


@STRUCTURES
@pytest.mark.parametrize("signed", [False, True], ids=["positive", "signed"])
def test_moved_moments_are_sums_about_the_new_origin(covariance_type, signed):
    """Moved back they are those given, which are kept; nothing moves them to where they are."""
    structure = structure_named(covariance_type)
    rows, responsibilities, origins, others = draw(seed=2, signed=signed)
    moments = naive_moments(rows, responsibilities, origins, covariance_type).astype(np.float64)
    given = moments.copy()
    found = MomentSpace(structure, origins).moved(moments, others)
    close(found, naive_moments(rows, responsibilities, others, covariance_type), limit=1e-12)
    close(MomentSpace(structure, others).moved(found, origins), given, limit=1e-12)
    np.testing.assert_array_equal(MomentSpace(structure, origins).moved(moments, origins), given)
    np.testing.assert_array_equal(moments, given)


@STRUCTURES
@pytest.mark.parametrize("signed", [False, True], ids=["positive", "signed"])
def test_expected_log_density_is_the_sum_over_rows(covariance_type, signed):
    parameters = drawn(covariance_type, k=K, d=D, seed=5)
    rows, responsibilities, origins, _ = draw(seed=5, signed=signed)
    moments = naive_moments(rows, responsibilities, origins, covariance_type).astype(np.float64)
    covariances = full_covariances(parameters.covariances, covariance_type, K, D)
    logs = np.stack(
        [
            np.log(parameters.weights[k])
            + multivariate_normal(parameters.means[k], covariances[k]).logpdf(rows)
            for k in range(K)
        ],
        axis=1,
    )
    found = MomentSpace(structure_named(covariance_type), origins).expected_log_density(moments, parameters)
    assert abs(found - np.sum(responsibilities * logs)) <= 1e-12 * np.sum(np.abs(responsibilities * logs))


def complete_statistics(parameters, covariance_type):
    """The statistics of complete data of one row and their probabilities, on points exact for their moments.

    A Gaussian's moments up to the fifth order are those of three points a dimension (Gauss and Hermite).
    """
    k, d = parameters.means.shape
    points = np.array(list(product([-np.sqrt(3.0), 0.0, np.sqrt(3.0)], repeat=d)))
    chances = np.prod(np.where(points == 0, 2 / 3, 1 / 6), axis=1)
    covariances = full_covariances(parameters.covariances, covariance_type, k, d)
    found, shares = [], []
    for component in range(k):
        for point, chance in zip(points, chances, strict=True):
            row = parameters.means[component] + np.linalg.cholesky(covariances[component]) @ point
            one = np.eye(k)[[component]]
            found.append(naive_moments(row[np.newaxis], one, parameters.means, covariance_type))
            shares.append(parameters.weights[component] * chance)
    return np.array(found, dtype=np.float64), np.array(shares)


@STRUCTURES
def test_standardised_products_are_those_of_the_complete_datas_information(covariance_type):
    """Information of expectation parameters: the inverse of the covariance of the statistics."""
    parameters = drawn(covariance_type, k=K, d=D, seed=6)
    statistics, shares = complete_statistics(parameters, covariance_type)
    centred = statistics - shares @ statistics
    covariance = (centred.T * shares) @ centred
    information = np.linalg.pinv(covariance, rcond=1e-10, hermitian=True)
    space = MomentSpace(structure_named(covariance_type), parameters.means)
    differences = []
    for seed in range(4):
        rows, responsibilities, _, _ = draw(seed=seed)
        moments = naive_moments(rows, responsibilities, parameters.means, covariance_type) / len(rows)
        differences.append(moments.astype(np.float64) - shares @ statistics)
    expected = np.array(differences) @ information @ np.array(differences).T
    standard = np.array([space.standardised(difference, parameters) for difference in differences])
    close(standard @ standard.T, expected, limit=1e-9)


@STRUCTURES
def test_standardised_is_linear(covariance_type):
    parameters = drawn(covariance_type, k=K, d=D, seed=7)
    space = MomentSpace(structure_named(covariance_type), parameters.means)
    a, b = (
        naive_moments(*draw(seed=seed, signed=True)[:2], parameters.means, covariance_type).astype(np.float64)
        for seed in (1, 2)
    )
    together = space.standardised(a - 2 * b, parameters)
    close(together, space.standardised(a, parameters) - 2 * space.standardised(b, parameters), limit=1e-12)


@STRUCTURES
def test_rows_far_from_the_origin_keep_their_digits(covariance_type):
    """Rows near 1e8 are known to 1e-8, and so are their moments about origins near them."""
    structure = structure_named(covariance_type)
    rows, responsibilities, origins, others = draw(seed=8)
    rows, origins, others = rows + 1e8, np.round(origins + 1e8), np.round(others + 1e8)
    expected = naive_moments(rows, responsibilities, origins, covariance_type)
    statistics = statistics_of(structure, rows, responsibilities)
    space = MomentSpace(structure, origins)
    found = space.of(statistics)
    close(found, expected, limit=1e-7)
    again = space.statistics(found)
    close(np.asarray(again.scatter), statistics.scatter, limit=1e-7)
    assert np.abs(again.means - statistics.means).max() <= 1e-7
    moved = naive_moments(rows, responsibilities, others, covariance_type)
    close(space.moved(expected.astype(np.float64), others), moved, limit=1e-13)
