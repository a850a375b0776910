"""The E-step over a block against scipy's densities and Bayes' theorem, row by row."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
from references import COVARIANCE_TYPES, full_covariances, random_covariances

from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.estep import EStepWorkspace, block_rows, e_step
from emtau_dask.mixture.parameters import MixtureParameters

N, K, D = 50, 3, 4


@pytest.fixture(params=COVARIANCE_TYPES)
def parameters(request):
    rng = np.random.default_rng(0)
    structure = structure_named(request.param)
    covariances = random_covariances(rng, request.param, K, D)
    weights, means = rng.dirichlet(np.ones(K) * 5), rng.normal(size=(K, D)) * 2
    factors = structure.factor(covariances, means, np.ones(K))
    return MixtureParameters(request.param, weights, means, covariances, factors)


@pytest.fixture
def rows():
    return np.random.default_rng(1).normal(size=(N, D)) * 3


def scored(rows, parameters, workspace_rows=None):
    workspace = EStepWorkspace(workspace_rows or len(rows), parameters.n_components, parameters.n_features)
    responsibilities, log_likelihoods = e_step(rows, parameters, parameters.log_scales, workspace)
    return responsibilities.copy(), log_likelihoods


def log_joint(rows, parameters):
    full = full_covariances(parameters.covariances, parameters.covariance_type, K, D)
    joint = np.empty((len(rows), K))
    for n, row in enumerate(rows):
        for k in range(K):
            density = scipy.stats.multivariate_normal(parameters.means[k], full[k])
            joint[n, k] = np.log(parameters.weights[k]) + density.logpdf(row)
    return joint


def test_log_likelihoods_are_scipys(rows, parameters):
    expected = scipy.special.logsumexp(log_joint(rows, parameters), axis=1)
    assert np.allclose(scored(rows, parameters)[1], expected, rtol=1e-12)


def test_responsibilities_follow_bayes_theorem(rows, parameters):
    expected = scipy.special.softmax(log_joint(rows, parameters), axis=1)
    assert np.allclose(scored(rows, parameters)[0], expected, rtol=1e-10, atol=1e-300)


def test_responsibilities_sum_to_one(rows, parameters):
    sums = scored(rows, parameters)[0].sum(axis=1)
    assert np.abs(sums - 1).max() <= 4 * np.finfo(float).eps


def test_rows_whose_densities_underflow_are_scored_all_the_same(rows, parameters):
    far = rows + 1e6
    expected = scipy.special.logsumexp(log_joint(far, parameters), axis=1)
    responsibilities, log_likelihoods = scored(far, parameters)
    assert np.allclose(log_likelihoods, expected, rtol=1e-9)
    assert np.allclose(responsibilities.sum(axis=1), 1)


def test_a_row_beyond_float64_has_no_finite_log_likelihood(rows, parameters):
    beyond = rows.copy()
    beyond[7] = 1e200
    assert np.array_equal(np.flatnonzero(~np.isfinite(scored(beyond, parameters)[1])), [7])


def test_a_workspace_may_be_larger_than_the_block(rows, parameters):
    exact, roomy = scored(rows, parameters), scored(rows, parameters, workspace_rows=N + 17)
    assert np.array_equal(exact[0], roomy[0])
    assert np.array_equal(exact[1], roomy[1])


def test_a_workspace_keeps_nothing_from_the_block_before(rows, parameters):
    workspace = EStepWorkspace(N, K, D)
    e_step(rows * 100, parameters, parameters.log_scales, workspace)
    again, _ = e_step(rows[:20], parameters, parameters.log_scales, workspace)
    assert np.array_equal(again, scored(rows[:20], parameters)[0])


def test_the_rows_are_not_touched(rows, parameters):
    before = rows.copy()
    scored(rows, parameters)
    assert np.array_equal(rows, before)


def test_one_component_has_all_the_responsibility(rows):
    one = MixtureParameters("diag", np.ones(1), np.zeros((1, D)), np.ones((1, D)), np.ones((1, D)))
    assert np.array_equal(scored(rows, one)[0], np.ones((N, 1)))


def test_equal_components_tie_exactly(rows):
    twins = MixtureParameters("diag", np.full(2, 0.5), np.ones((2, D)), np.ones((2, D)), np.ones((2, D)))
    assert np.array_equal(scored(rows, twins)[0], np.full((N, 2), 0.5))


SHAPES = [(1, 1), (5, 42), (16, 16), (3, 784), (1000, 2), (2, 100_000)]


@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_a_block_is_a_multiple_of_64_rows_within_limits(k, d):
    rows = block_rows(k, d)
    assert rows % 64 == 0
    assert 64 <= rows <= 8192


@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_a_blocks_buffers_take_about_a_mebibyte_where_64_rows_allow(k, d):
    workspace = EStepWorkspace(block_rows(k, d), k, d)
    taken = sum(buffer.nbytes for buffer in vars(workspace).values())
    assert taken <= max(2**20, 64 * 8 * (3 * d + k))
