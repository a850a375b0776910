"""Tiles that leave out components which do not count for a row, against scipy and naive sums."""

import math
import pickle
import tracemalloc
from dataclasses import replace

import dask.array
import numpy as np
import pytest
import scipy.special
from hypothesis import example, given
from hypothesis import strategies as st
from references import drawn, log_joint, naive_statistics, room, summed
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import GaussianMixture
from emtau_dask.em.memory import STATISTICS_COPIES
from emtau_dask.kernels.dispatch import Kernels, TileKernel
from emtau_dask.mixture.cutoff import NEGLIGIBLE_SHARE, cutoffs_if_few, cutoffs_of
from emtau_dask.mixture.estep import BlockKernel
from emtau_dask.mixture.linalg import precision_factors
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import block_bytes, plan_tiles

K, D, TILE = 70, 9, 24
LENGTHS = (1, TILE - 1, TILE, TILE + 1, 400)
MANY_ROWS = 10**6


def clusters(k=K, d=D, spread=6.0, condition=9.0, seed=0):
    """Components of unequal weights whose covariances have eigenvalues between 1 / condition and 1."""
    rng = np.random.default_rng(seed)
    weights, means = rng.dirichlet(np.full(k, 2.0)), spread * rng.normal(size=(k, d))
    turns = np.linalg.qr(rng.normal(size=(k, d, d)))[0]
    lengths = condition ** -rng.uniform(0, 1, size=(k, 1, d))
    covariances = (turns * lengths) @ turns.swapaxes(1, 2)
    covariances = (covariances + covariances.swapaxes(1, 2)) / 2
    return MixtureParameters(
        "full", weights, means, covariances, precision_factors(covariances, means, weights)
    )


def planned(parameters):
    """A plan that leaves out components, whether or not that pays."""
    plan = plan_tiles(parameters).centred
    return replace(plan, cutoffs=cutoffs_of(parameters, parameters.weights @ parameters.means))


def rows_of(parameters, n, seed=1, noise=1.0):
    rng = np.random.default_rng(seed)
    owners = rng.integers(parameters.n_components, size=n)
    roots = np.linalg.cholesky(parameters.covariances)[owners]
    steps = noise * rng.normal(size=(n, parameters.n_features, 1))
    return parameters.means[owners] + (roots @ steps)[..., 0]


def kernel_of(parameters, n):
    kernel = Kernels(planned(parameters), compiled=True).acquire(n)
    assert isinstance(kernel, TileKernel)
    return kernel


def assert_statistics(found, rows, responsibilities):
    wanted = naive_statistics(rows, responsibilities, "full")
    assert np.allclose(found.weights, wanted[0].astype(float), rtol=1e-11)
    full = found.weights > 1e-3
    assert np.allclose(found.means[full], wanted[1][full].astype(float), rtol=1e-11, atol=1e-11)
    assert np.allclose(found.scatter[full], wanted[2][full].astype(float), rtol=1e-11, atol=1e-10)


def assert_equal(found, wanted):
    for name in ("weights", "means", "scatter"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("spread", [0.5, 6.0])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_scored_and_summed_as_by_naive_sums(spread, n, weighted):
    """Of components that overlap and such as are apart, in blocks shorter and longer than a tile."""
    parameters = clusters(spread=spread)
    rows, seen, kernel = rows_of(parameters, n), room(n), kernel_of(parameters, n)
    weights = np.random.default_rng(3).uniform(0, 3, n) if weighted else None
    found, scores = kernel.accumulate(rows, weights, seen), log_joint(rows, parameters)
    expected, responsibilities = (
        of(scores, axis=1) for of in (scipy.special.logsumexp, scipy.special.softmax)
    )
    assert np.allclose(found.log_likelihoods, expected, rtol=1e-12)
    assert np.isclose(found.total, expected.sum(), rtol=1e-12)
    assert np.isclose(found.squared, (rows**2).sum(), rtol=1e-12)
    assert np.array_equal(seen.labels, responsibilities.argmax(axis=1))
    assert np.allclose(seen.largest, responsibilities.max(axis=1), rtol=1e-11)
    if weighted:
        responsibilities = responsibilities * weights[:, np.newaxis]
    assert_statistics(summed(kernel), rows, responsibilities)


@pytest.mark.parametrize(("k", "d"), [(8, 128), (4, 131), (2, 257)])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_sums_of_few_components_in_many_features_are_those_of_naive_loops(k, d, spread):
    """Groups are finished several times, and merged."""
    parameters = clusters(k, d, spread, condition=4.0)
    rows = 100.0 + rows_of(parameters, 600)
    moved = replace(parameters, means=100.0 + parameters.means)
    kernel = kernel_of(moved, 600)
    found = kernel.accumulate(rows)
    assert np.allclose(
        found.log_likelihoods, scipy.special.logsumexp(log_joint(rows, moved), axis=1), rtol=1e-11
    )
    assert_statistics(summed(kernel), rows, scipy.special.softmax(log_joint(rows, moved), axis=1))


@pytest.mark.parametrize("condition", [1e2, 1e8])
@pytest.mark.parametrize("noise", [1.0, 10.0])
def test_rows_far_from_all_components_and_wrong_guesses_change_nothing(condition, noise):
    """Guesses assume one covariance for all, of which these are far."""
    parameters = clusters(spread=2.0, condition=condition)
    rows = rows_of(parameters, 300, noise=noise)
    kernel, exact = kernel_of(parameters, 300), BlockKernel(plan_tiles(parameters).centred, 300)
    found, wanted = kernel.accumulate(rows), exact.accumulate(rows, None, None)
    assert np.allclose(found.log_likelihoods, wanted.log_likelihoods, rtol=1e-10)
    statistics, expected = summed(kernel), summed(exact)
    assert np.allclose(statistics.weights, expected.weights, rtol=1e-9, atol=1e-15)
    assert np.allclose(statistics.scatter, expected.scatter, rtol=1e-8, atol=1e-9)


@given(st.integers(0, 10**6), st.floats(0.1, 20), st.floats(1, 1e6), st.integers(1, 6))
@example(0, 1.0, 10.0, 70)
@example(0, 2.0, 1e4, 140)
def test_a_component_out_of_reach_counts_for_no_row(seed, spread, condition, d):
    """Whatever the direction in which the row lies: at the largest distance, and within."""
    parameters = clusters(6, d, spread, condition, seed)
    cutoffs, rng = cutoffs_of(parameters, parameters.means.mean(axis=0)), np.random.default_rng(seed)
    roots = np.linalg.cholesky(parameters.covariances)
    for a, k in np.argwhere(cutoffs.distances >= 0):
        towards = np.linalg.solve(roots[a], parameters.means[k] - parameters.means[a])
        steps = np.vstack([rng.normal(size=(5, d)), towards])
        steps *= math.sqrt(cutoffs.distances[a, k]) / np.linalg.norm(steps, axis=1, keepdims=True)
        rows = parameters.means[a] + np.vstack([steps, 0.5 * steps]) @ roots[a].T
        scores = log_joint(rows, parameters)
        assert (scores[:, k] <= scores[:, a] - cutoffs.margins[k] + 1e-9 * np.abs(scores[:, k])).all()


def test_margins_are_of_responsibilities_relative_to_weights():
    parameters = clusters()
    cutoffs = cutoffs_of(parameters, np.zeros(D))
    assert np.allclose(np.exp(-cutoffs.margins), NEGLIGIBLE_SHARE * parameters.weights)


def test_of_components_that_are_apart_few_are_scored():
    parameters = clusters(spread=20.0)
    kernel, rows = kernel_of(parameters, 400), rows_of(parameters, 400)
    assert kernel.tiling.constants.cutoffs.max() > 0
    kernel.tiling.buffers.centred.scores.fill(-1.0)
    kernel.accumulate(rows)
    assert (kernel.tiling.buffers.centred.scores[5:] == -1).all()


def test_of_a_block_with_a_value_that_is_not_finite_nothing_is_added():
    parameters = clusters()
    rows = rows_of(parameters, 100)
    spoilt = rows.copy()
    spoilt[50, 3] = np.nan
    kernel, other = kernel_of(parameters, 100), kernel_of(parameters, 100)
    assert not np.isfinite(kernel.accumulate(spoilt).total)
    kernel.accumulate(rows)
    other.accumulate(rows)
    assert_equal(summed(kernel), summed(other))


@pytest.mark.parametrize("value", [1e140, 1e160], ids=["beyond float32", "out of any cutoffs"])
def test_a_row_beyond_the_range_of_numbers_leaves_the_others_as_they_are(value):
    parameters = clusters()
    rows = rows_of(parameters, 100)
    rows[17] = value
    kernel, exact = kernel_of(parameters, 100), BlockKernel(plan_tiles(parameters).centred, 100)
    with np.errstate(over="ignore", invalid="ignore"):
        found, wanted = kernel.accumulate(rows), exact.accumulate(rows, None, None)
    scored = np.isfinite(found.log_likelihoods)
    assert np.flatnonzero(~scored).tolist() == ([] if value == 1e140 else [17])
    assert np.allclose(found.log_likelihoods[scored], wanted.log_likelihoods[scored], rtol=1e-12)
    assert np.isfinite(found.total) == scored.all()


def spoil(buffers):
    """Fill with NaN, or with nonsense, what need not hold anything where a block begins."""
    for name, buffer in buffers._asdict().items():
        if isinstance(buffer, tuple):
            spoil(buffer)
        elif name == "groups":
            buffer[..., :D] = np.nan
        elif name == "coordinates":
            buffer[:D] = np.nan
        elif name not in ("counts", "totals"):
            buffer.fill(np.nan if buffer.dtype.kind == "f" else 3)
    buffers._asdict().get("differences", np.empty((1, 0)))[-1] = 1.0


def test_what_buffers_held_before_changes_no_bit():
    parameters = clusters()
    rows = rows_of(parameters, 400)
    kernel, other = kernel_of(parameters, 400), kernel_of(parameters, 400)
    spoil(kernel.tiling.buffers)
    found, wanted = kernel.accumulate(rows), other.accumulate(rows)
    assert np.array_equal(found.log_likelihoods, wanted.log_likelihoods)
    assert_equal(summed(kernel), summed(other))


def test_equal_components_tie_exactly_and_the_first_of_them_is_named():
    parameters = clusters(spread=10.0)
    pairs = np.repeat(np.arange(K // 2), 2)
    parameters = MixtureParameters(
        "full",
        np.full(K, 1 / K),
        parameters.means[pairs],
        parameters.covariances[pairs],
        parameters.precisions_cholesky[pairs],
    )
    rows, seen = rows_of(parameters, 200), room(200)
    kernel_of(parameters, 200).accumulate(rows, None, seen)
    assert (seen.largest == 0.5).all()
    assert (seen.labels % 2 == 0).all()


class TestChoice:
    @pytest.mark.parametrize(("k", "d"), [(K, D), (4, 128)], ids=["many components", "many features"])
    def test_components_that_are_apart_are_left_out_of_tiles(self, k, d):
        assert plan_tiles(clusters(k, d), chunk_rows=MANY_ROWS).cutoffs is not None

    @pytest.mark.parametrize(
        ("k", "d", "spread", "pays"),
        [(8, 64, 1.0, False), (8, 64, 1.3, True), (64, 16, 2.0, False), (64, 16, 2.5, True)],
    )
    def test_components_that_are_just_apart_are_left_out(self, k, d, spread, pays):
        """By benchmarks of components with standard deviations of 0.5 to 1.5."""
        rng = np.random.default_rng(0)
        turns = np.linalg.qr(rng.normal(size=(k, d, d)))[0]
        covariances = (turns * rng.uniform(0.5, 1.5, (k, 1, d)) ** 2) @ turns.swapaxes(1, 2)
        covariances = (covariances + covariances.swapaxes(1, 2)) / 2
        weights, means = np.full(k, 1 / k), spread * rng.normal(size=(k, d))
        factors = precision_factors(covariances, means, weights)
        parameters = MixtureParameters("full", weights, means, covariances, factors)
        assert (plan_tiles(parameters, chunk_rows=MANY_ROWS).cutoffs is not None) is pays

    @pytest.mark.parametrize("k", [8, 32, 33, 70])
    def test_distances_are_the_same_whether_all_components_are_probed_or_some(self, k):
        parameters = clusters(k, 64)
        found, wanted = (of(parameters, np.zeros(64)) for of in (cutoffs_if_few, cutoffs_of))
        assert np.array_equal(found.distances, wanted.distances)
        assert np.array_equal(found.discriminants, wanted.discriminants)
        assert np.array_equal(found.margins, wanted.margins)

    @pytest.mark.parametrize(
        ("parameters", "chunk_rows"),
        [
            (clusters(spread=0.5), MANY_ROWS),
            (clusters(), 31 * K),
            (clusters(k=28), MANY_ROWS),
            (clusters(k=40, d=7), MANY_ROWS),
            (clusters(k=2, d=127), MANY_ROWS),
            (drawn("diag", K, D, spread=10.0), MANY_ROWS),
            (drawn("tied", K, D, spread=10.0), MANY_ROWS),
        ],
    )
    def test_where_that_would_not_pay_all_are_scored(self, parameters, chunk_rows):
        assert plan_tiles(parameters, chunk_rows=chunk_rows).cutoffs is None

    def test_a_pass_in_which_a_component_lost_nearly_all_of_its_weight_is_done_again(self):
        parameters = clusters()
        plan = planned(parameters)
        assert plan.kept_digits(parameters)
        shrunk = parameters.weights.copy()
        shrunk[3] *= 2.0**-21
        assert not plan.kept_digits(replace(parameters, weights=shrunk))

    def test_plans_travel_and_the_centred_one_leaves_nothing_out(self):
        plan = pickle.loads(pickle.dumps(planned(clusters())))
        assert np.array_equal(plan.cutoffs.distances, planned(clusters()).cutoffs.distances)
        assert not plan.exact
        assert plan.centred.exact
        assert plan.centred.cutoffs is None


@pytest.mark.parametrize(("k", "d"), [(64, 32), (300, 8), (256, 16), (8, 128), (2, 300)])
def test_memory_is_within_what_plans_foretell(k, d):
    parameters = clusters(k, d, spread=5.0)
    plan, rows = planned(parameters), rows_of(parameters, 40 * k)
    warm = Kernels(plan, compiled=True).acquire(10)
    warm.accumulate(rows[:10], None, None)  # loads code
    tracemalloc.start()
    kernel = Kernels(planned(parameters), compiled=True).acquire(len(rows))
    kernel.accumulate(rows, None, None)
    kernel.sums()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = STATISTICS_COPIES * 8 * (k * d**2 + k * (d + 1))
    assert peak <= block_bytes("full", k, d, len(rows)) + held


def test_a_fit_by_such_tiles_is_that_by_numpy_and_has_the_same_bits_on_any_number_of_threads():
    parameters = clusters(64, 8, spread=5.0)
    rows = dask.array.from_array(rows_of(parameters, 3 * 64 * 40), chunks=(64 * 40, 8))

    def fitted(compiled, threads):
        start = {"weights_init": parameters.weights, "means_init": parameters.means, "random_state": 0}
        gm = GaussianMixture(64, algorithm="em", max_iter=3, tol=0, **start)
        settings = {"emtau.compiled": compiled, "scheduler": "threads", "num_workers": threads}
        with dask.config.set(settings), pytest.warns(ConvergenceWarning):
            return gm.fit(rows)

    one, two, plain = fitted("always", 1), fitted("always", 2), fitted("never", 1)
    assert np.array_equal(one.means_, two.means_)
    assert np.array_equal(one.covariances_, two.covariances_)
    assert np.allclose(one.means_, plain.means_, rtol=1e-9)
    assert np.allclose(one.covariances_, plain.covariances_, rtol=1e-9, atol=1e-11)
