"""Scatters of many features: kept as upper triangles, whitened by solving; against naive sums and SciPy."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from references import LONG, naive_statistics, random_covariances, statistics_of

from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import BlockKernel, CentredStatistics
from emtau_dask.mixture.linalg import Triangles
from emtau_dask.mixture.parameters import MixtureParameters, m_step, tempered
from emtau_dask.mixture.plan import plan_kernel
from emtau_dask.mixture.statistics import (
    SufficientStatistics,
    chosen,
    merge,
    merged,
    remainder,
    spread_out,
    zero,
)

FULL = structure_named("full")
D = FULL.solving.least_features + 5
SHAPES = [(1, 1), (2, 5), (3, 128), (2, 129), (2, 260)]


def symmetric(rng, k, d):
    matrices = rng.normal(size=(k, d, d))
    return matrices + matrices.swapaxes(1, 2)


def strips_alone(matrices, side=128):
    """The same, but NaN where strips do not reach: below the squares on the diagonal."""
    found = matrices.copy()
    for begin in range(0, matrices.shape[-1], side):
        found[:, begin + side :, begin : begin + side] = np.nan
    return found


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_triangles_are_the_sum_of_what_they_are_made_of(k, d, parts):
    rng = np.random.default_rng(d)
    matrices = [symmetric(rng, k, d) for _ in range(parts)]
    weights, vectors = rng.normal(size=(4, k)), rng.normal(size=(4, k, d))
    expected = sum(matrices) + np.einsum("ik,ika,ikb->kab", weights, vectors, vectors)
    triangles = Triangles(tuple(map(strips_alone, matrices)), weights, vectors)
    whole = triangles.whole()
    assert np.allclose(whole, expected, rtol=1e-13, atol=1e-12)
    assert np.array_equal(whole, whole.swapaxes(1, 2))
    above = np.triu_indices(d)
    assert np.array_equal(triangles.upper[:, *above], whole[:, *above])


def test_one_part_alone_is_not_copied_and_negligible_products_are_left_out():
    rng = np.random.default_rng(0)
    (part,), vectors = [symmetric(rng, 2, 70) + 100 * np.eye(70)], rng.normal(size=(1, 2, 70))
    nothing = Triangles((part,), np.array([[1e-20, -1e-20]]), vectors)
    assert nothing.upper is part
    one = Triangles((part,), np.array([[1e-20, 1.0]]), vectors)
    assert np.array_equal(one.whole()[0], part[0])
    assert np.allclose(one.whole()[1], part[1] + np.outer(vectors[0, 1], vectors[0, 1]), rtol=1e-14)


def drawn(n, d=D, k=2, shift=0.0):
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, d)) + shift, rng.dirichlet(np.ones(k), size=n)


def assert_naive(found, rows, responsibilities):
    expected = naive_statistics(rows, responsibilities, "full")
    for actual, reference in zip((found.weights, found.means, found.scatter), expected, strict=True):
        assert np.abs(actual.astype(LONG) - reference).max() <= 2e-13 * np.abs(reference).max()
    assert np.array_equal(found.scatter, found.scatter.swapaxes(1, 2))


@pytest.mark.parametrize(("parts", "shift"), [(1, 0.0), (1, 1e8), (2, 0.0), (3, 0.0), (7, 0.0)])
def test_merged_statistics_of_many_features_are_the_naive_sums(parts, shift):
    rows, responsibilities = drawn(21, shift=shift)
    responsibilities[:5, 1] = 0.0
    pieces = [
        statistics_of(FULL, rows[some], responsibilities[some])
        for some in np.array_split(np.arange(21), parts)
    ]
    found = merged(FULL, pieces)
    assert_naive(found, rows, responsibilities)
    if parts == 7:
        tree = merge(FULL, merged(FULL, pieces[:3]), merge(FULL, pieces[3], merged(FULL, pieces[4:])))
        assert_naive(tree, rows, responsibilities)
        assert_naive(merge(FULL, found, zero(FULL, *found.means.shape)), rows, responsibilities)


def test_what_is_left_of_merged_triangles_and_some_components_of_them():
    rows, responsibilities = drawn(24)
    pieces = [
        statistics_of(FULL, rows[some], responsibilities[some])
        for some in (slice(10), slice(10, 16), slice(16, 24))
    ]
    whole = merged(FULL, pieces)
    left = remainder(FULL, whole, pieces[0], np.zeros(2))
    expected = naive_statistics(rows[10:], responsibilities[10:], "full")[2]
    assert np.abs(left.scatter - expected).max() <= 1e-13 * np.abs(expected).max()
    components = np.array([False, True])
    some = chosen(whole, components)
    assert np.array_equal(some.scatter[0], whole.scatter[1])
    again = spread_out(some, components)
    assert np.array_equal(again.scatter[1], whole.scatter[1])
    assert not again.scatter[0].any()


def test_what_is_kept_of_a_sum_is_the_scatter_alone():
    rows, responsibilities = drawn(20)
    found = merge(
        FULL,
        statistics_of(FULL, rows[:9], responsibilities[:9]),
        statistics_of(FULL, rows[9:], responsibilities[9:]),
    )
    kept = found.summed()
    assert kept.given_scatter is found.scatter
    assert np.array_equal(m_step(kept, FULL, 1.0).covariances, m_step(found, FULL, 1.0).covariances)


def test_a_stretch_longer_than_a_block_has_the_statistics_of_all_its_rows():
    rows, responsibilities = drawn(50)
    gathered = CentredStatistics(FULL, 2, D, block_rows=8)
    for begin in range(0, 50, 8):
        some = slice(begin, begin + 8)
        weights = np.ascontiguousarray(responsibilities[some].T)
        gathered.push(rows[some], weights, np.ones(2, dtype=bool))
    assert_naive(gathered.total(), rows, responsibilities)
    assert gathered.total() is None


def test_given_covariances_that_rounding_left_not_positive_definite_have_the_inverses_of_precision_factors():
    """Precisions that a user gives are not judged: only an M-step refuses what is nearly singular."""
    unit = np.eye(D)
    covariances = np.stack([unit, 4.0 * unit])
    covariances[0, 0, 1] = covariances[0, 1, 0] = 1.0 + 1e-9
    precision_factors = np.stack([unit, 0.5 * unit])
    given = MixtureParameters("full", np.full(2, 0.5), np.zeros((2, D)), covariances, precision_factors)
    assert np.allclose(given.factorised().covariance_factors, np.stack([unit, 2.0 * unit]), rtol=1e-15)


def test_what_is_sent_has_the_same_bits_and_is_one_array():
    rows, responsibilities = drawn(20)
    found = merge(
        FULL,
        statistics_of(FULL, rows[:9], responsibilities[:9]),
        statistics_of(FULL, rows[9:], responsibilities[9:]),
    )
    pickled = pickle.dumps(found)
    assert len(pickled) < found.scatter.nbytes * 1.1
    assert np.array_equal(pickle.loads(pickled).scatter, found.scatter)


@pytest.fixture(scope="module")
def statistics():
    rng = np.random.default_rng(1)
    weights = np.array([3.0, 0.5, 7.0])
    scatter = weights[:, None, None] * random_covariances(rng, "full", 3, D)
    return SufficientStatistics(weights, rng.normal(size=(3, D)), scatter)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_m_step_of_many_features_gives_scipys_factors(statistics, threads):
    found = m_step(statistics, FULL, 0.25, threads)
    expected = statistics.scatter / statistics.weights[:, None, None] + 0.25 * np.eye(D)
    assert np.allclose(found.covariances, expected, rtol=1e-14)
    factors = np.stack([scipy.linalg.cholesky(covariance) for covariance in expected])
    assert np.allclose(found.covariance_factors, factors, rtol=1e-10, atol=1e-12)
    inverses = np.stack([scipy.linalg.solve_triangular(factor, np.eye(D)) for factor in factors])
    assert np.allclose(found.precisions_cholesky, inverses, rtol=1e-9, atol=1e-11)
    logs = np.linalg.slogdet(expected)[1]
    constant = D * np.log(2 * np.pi)
    assert np.allclose(found.log_scales, np.log(found.weights) - 0.5 * (logs + constant), rtol=1e-12)


def test_threads_change_no_bit_and_parts_no_more_than_rounding(statistics):
    alone, together = (m_step(statistics, FULL, 0.25, threads) for threads in (1, 3))
    assert np.array_equal(alone.covariances, together.covariances)
    assert np.array_equal(alone.covariance_factors, together.covariance_factors)
    halves = [SufficientStatistics(statistics.weights / 2, statistics.means, statistics.scatter / 2)] * 2
    assert np.allclose(m_step(merged(FULL, halves), FULL, 0.25).covariances, alone.covariances, rtol=1e-14)


@pytest.mark.parametrize("threads", [1, 3])
def test_of_singular_components_of_many_features_the_first_is_named(statistics, threads):
    scatter = statistics.scatter.copy()
    for k in (1, 2):
        scatter[k, 3] = scatter[k, 2]
        scatter[k, :, 3] = scatter[k, :, 2]
    broken = SufficientStatistics(statistics.weights, statistics.means, scatter)
    with pytest.raises(SingularComponentError, match="feature 3 is a linear combination") as caught:
        m_step(broken, FULL, 0.0, threads)
    assert (caught.value.component, caught.value.weight) == (1, 0.5)


def test_factors_are_the_same_bits_where_precision_factors_are_given(statistics):
    """As when a fit goes on from a checkpoint, which has these and covariances."""
    made = m_step(statistics, FULL, 0.25)
    again = MixtureParameters("full", made.weights, made.means, made.covariances, made.precisions_cholesky)
    assert again.covariance_factors is None
    assert np.array_equal(again.factorised().covariance_factors, made.covariance_factors)
    assert np.array_equal(again.factorised().log_scales, made.log_scales)
    assert np.allclose(again.log_scales, made.log_scales, rtol=1e-13)


def test_rows_are_whitened_by_the_factors_at_hand(statistics):
    """A fitted model has precision factors; covariances are not factorised for its predictions."""
    made = m_step(statistics, FULL, 0.25)
    rows = np.random.default_rng(3).normal(size=(200, D)) + made.means[0]
    expected = np.logaddexp.reduce(
        [
            np.log(weight) + scipy.stats.multivariate_normal(mean, covariance).logpdf(rows)
            for weight, mean, covariance in zip(made.weights, made.means, made.covariances, strict=True)
        ]
    )
    given = replace(made, precision_factors=made.precisions_cholesky, covariance_factors=None)
    for parameters in (made, given):
        found = BlockKernel(plan_kernel(parameters), len(rows)).score(rows).log_likelihoods
        assert np.allclose(found, expected, rtol=1e-11)


def test_what_was_made_of_parameters_is_not_sent(statistics):
    made = m_step(statistics, FULL, 0.25)
    before = len(pickle.dumps(made))
    assert made.precisions_cholesky.shape == made.covariances.shape
    assert len(pickle.dumps(made)) == before


def test_tempered_parameters_of_many_features_are_those_of_scaled_covariances(statistics):
    made = m_step(statistics, FULL, 0.25)
    cooler = tempered(made, 0.5)
    rows = np.random.default_rng(2).normal(size=(6, D))
    expected = np.stack(
        [
            0.5 * (np.log(weight) + scipy.stats.multivariate_normal(mean, covariance).logpdf(rows))
            for weight, mean, covariance in zip(made.weights, made.means, made.covariances, strict=True)
        ]
    )
    found = cooler.log_scales[:, None] + np.zeros((3, 6))
    for k in range(3):
        differences = rows - cooler.means[k]
        FULL.solving.whitening(differences, cooler.covariance_factors, k, np.sqrt(0.5))()
        found[k] -= (differences**2).sum(axis=1)
    shifts = found - expected
    assert np.allclose(shifts, shifts[0, 0], rtol=0, atol=1e-8)
    log_det = np.linalg.slogdet(cooler.covariances)[1]
    assert np.allclose(cooler.log_det, -0.5 * log_det, rtol=1e-12)
