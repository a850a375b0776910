"""Compiled tiles against scipy's densities, extended precision, and naive sums; which plans go by them."""

import math
import pickle
import subprocess
import sys
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import dask
import numpy as np
import pytest
import references
import scipy.special
from references import COVARIANCE_TYPES, assert_naive, log_joint, naive_statistics, room, rows_near, summed
from tiers import exhaustive_but

from emtau_dask import ConfigError
from emtau_dask.em.compiling import MIN_PRODUCTS, worth_compiling
from emtau_dask.em.memory import STATISTICS_COPIES
from emtau_dask.kernels import dispatch, tiling
from emtau_dask.kernels.dispatch import Kernels, TileKernel, tiled
from emtau_dask.kernels.loop import divide, exponentiate, logarithm
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import MIN_EXPONENT, BlockKernel
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import block_bytes, plan_kernel, plan_tiles

K, D = 3, 4
TILE = tiling.rows_of_tile(1 + D + D * (D + 1) // 2, 8)
FORMS = [*((name, D) for name in COVARIANCE_TYPES), ("full", 16), ("full", 20)]
"""Covariance types and features; with 20, all are scored in the centred form. In that form all rows of a tile
are summed for each component with up to 12; with more, those for which it is responsible may be gathered."""
LENGTHS = (1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE + 5)
DTYPES = (np.float32, np.float64)


drawn = partial(references.drawn, spread=0.1)


def planned(parameters, dtype=np.float64):
    return plan_tiles(parameters, np.dtype(dtype))


def absorber(plan, n, *, compiled):
    return Kernels(plan, compiled=compiled).acquire(n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_are_exact_to_about_a_unit_in_the_last_place(dtype):
    least = MIN_EXPONENT[np.dtype(dtype)]
    values = np.concatenate([np.linspace(least, 0, 300_001), -np.geomspace(1e-12, 1, 1000)]).astype(dtype)
    values = values[values >= dtype(least)]
    found, sums = values[np.newaxis].copy(), np.empty(len(values), dtype)
    exponentiate(found, sums, dtype(least), found[0])
    exact = np.exp(values.astype(np.longdouble))
    last_place = np.spacing(exact.astype(dtype)).astype(np.longdouble)
    assert (np.abs(found[0] - exact) / last_place).max() <= 1.1
    assert np.array_equal(sums, found[0])
    assert found[0, values == 0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_responsibilities_are_rounded_as_quotients_are(dtype):
    rng = np.random.default_rng(0)
    smallest = {np.float32: 1e-25, np.float64: 1e-280}[dtype]
    sums = (1000 ** rng.uniform(-1, 1, size=200_000)).astype(dtype)
    found = (sums * smallest ** rng.uniform(size=(3, len(sums)))).astype(dtype)
    found[0, :1000], found[1, :1000], found[2, :1000] = sums[:1000], sums[:1000] / 2, 0
    exact = found / sums
    divide(found, sums, np.empty_like(sums))
    assert np.array_equal(found, exact)


def test_logarithms_are_exact_to_about_a_unit_in_the_last_place():
    """Over all sums that there are, next to 1, and where fractions begin; against extended precision."""
    tiny = np.finfo(float).tiny
    near_one = 1 + np.concatenate([-np.geomspace(1e-16, 0.5, 20_000), np.geomspace(1e-16, 2, 20_000)])
    edges = math.sqrt(0.5) * 2.0 ** np.arange(-1000, 1000) * (1 + np.arange(-3, 4)[:, np.newaxis] * 2.0**-52)
    values = np.concatenate([np.geomspace(tiny, 1e300, 300_001), near_one, edges.ravel(), [1.0]])
    found = np.array([logarithm(value) for value in values])
    exact = np.log(values.astype(np.longdouble))
    last_place = np.spacing(np.abs(exact).astype(float)).astype(np.longdouble)
    assert (np.abs(found - exact) / last_place).max() <= 1.1
    assert logarithm(1.0) == 0
    assert not np.isfinite([logarithm(np.inf), logarithm(np.nan)]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_that_vanish_are_0_and_nan_stays(dtype):
    least = MIN_EXPONENT[np.dtype(dtype)]
    scores = np.array([[0, least * 1.01, -np.inf, np.nan], [least * 1.01, -1, -np.inf, 0]], dtype)
    sums = np.empty(4, dtype)
    exponentiate(scores, sums, dtype(least), scores[0])
    assert np.array_equal(scores[:, :3] > 0, [[True, False, False], [False, True, False]])
    assert np.array_equal(np.isnan(scores), [[False] * 3 + [True], [False] * 4])
    assert np.isnan(sums[3])
    assert sums[2] == 0


@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_rows_are_scored_and_summed_as_by_naive_sums(covariance_type, d, n, weighted, spread):
    """In float64, of blocks shorter and longer than a tile."""
    parameters = drawn(covariance_type, d=d, spread=spread)
    rows, seen = rows_near(parameters, n), room(n)
    weights = np.random.default_rng(3).uniform(0, 3, n) if weighted else None
    kernel = absorber(planned(parameters), n, compiled=True)
    assert isinstance(kernel, TileKernel)
    found, scores = kernel.accumulate(rows, weights, seen), log_joint(rows, parameters)
    expected, responsibilities = (
        of(scores, axis=1) for of in (scipy.special.logsumexp, scipy.special.softmax)
    )
    assert np.allclose(found.log_likelihoods, expected, rtol=1e-12)
    assert np.isclose(found.total, expected.sum(), rtol=1e-12)
    assert np.array_equal(seen.labels, responsibilities.argmax(axis=1))
    assert np.allclose(seen.largest, responsibilities.max(axis=1), rtol=1e-11)
    assert seen.largest.max() <= 1
    if weighted:
        responsibilities = responsibilities * weights[:, np.newaxis]
    assert_naive(summed(kernel), rows, responsibilities, covariance_type)


@pytest.mark.parametrize("weighted", [False, True])
def test_scatters_of_components_that_are_apart_are_the_sums_over_rows(weighted):
    """Of the rows that a component is responsible for; in a few tiles it is so for none."""
    parameters = drawn("full", k=12, d=40, spread=10.0)
    rows = rows_near(parameters, 3 * TILE + 5)
    rows = rows[np.argsort(np.linalg.norm(rows - parameters.means[0], axis=1))]
    weights = np.random.default_rng(3).uniform(0, 3, len(rows)) if weighted else None
    plan = planned(parameters)
    assert plan.exact
    kernel = absorber(plan, len(rows), compiled=True)
    kernel.accumulate(rows, weights, None)
    responsibilities = scipy.special.softmax(log_joint(rows, parameters), axis=1)
    assert (responsibilities > 1e-20).mean() < 0.1
    if weighted:
        responsibilities = responsibilities * weights[:, np.newaxis]
    assert_naive(summed(kernel), rows, responsibilities, rtol=(1e-10, 1e-10, 1e-9), atol=(1e-10, 1e-8))


@pytest.mark.parametrize(("d", "summed_for_two"), [(13, True), (20, True), (26, True), (33, False)])
def test_rows_are_gathered_for_some_components_of_a_tile_and_summed_for_others(d, summed_for_two):
    """Two components cover most rows, and each of the others has a few of its own, apart from these.

    From 32 features on rows are gathered for all of them.
    """
    parameters = drawn("full", k=6, d=d, spread=10.0)
    means = parameters.means.copy()
    means[1] = means[0] + 0.1
    parameters = replace(parameters, means=means)
    plan = planned(parameters).centred
    rng, owners = np.random.default_rng(d), np.repeat(np.arange(6), [400, 400, 9, 9, 9, 9])
    rng.shuffle(owners)
    rows = means[owners] + rng.normal(size=(len(owners), d))
    kernel = absorber(plan, len(rows), compiled=True)
    kernel.accumulate(rows)
    gathered = kernel.tiling.buffers.n_significant <= kernel.tiling.constants.few
    assert np.array_equal(gathered, [not summed_for_two] * 2 + [True] * 4)
    responsibilities = scipy.special.softmax(log_joint(rows, parameters), axis=1)
    assert_naive(summed(kernel), rows, responsibilities, rtol=(1e-10, 1e-10, 1e-9), atol=(1e-10, 1e-8))


@pytest.mark.parametrize(
    "n", exhaustive_but({1, 63, 64, 65, TILE + 64}, [1, 63, 64, 65, 128, 129, TILE + 64])
)
@pytest.mark.parametrize("d", [1, 2, 4, 9, 13])
def test_scatters_of_few_features_are_the_sums_over_rows_however_many_a_component_has(d, n):
    """In the centred form, since components are far apart; two have no rows at all, or one."""
    parameters = drawn("full", d=d)
    means = 100.0 * np.arange(K)[:, np.newaxis] + parameters.means
    parameters = replace(parameters, means=means)
    plan = planned(parameters).centred
    rng = np.random.default_rng(n)
    rows = np.vstack([means[0] + rng.normal(size=(n, d)), means[1] + rng.normal(size=(1, d))])
    kernel = absorber(plan, len(rows), compiled=True)
    assert isinstance(kernel, TileKernel)
    kernel.accumulate(rows)
    responsibilities = scipy.special.softmax(log_joint(rows, parameters), axis=1)
    found, wanted = summed(kernel), naive_statistics(rows, responsibilities, "full")
    assert np.allclose(found.weights, wanted[0].astype(float), rtol=1e-12)
    assert np.allclose(found.means[:2], wanted[1].astype(float)[:2], rtol=1e-12, atol=1e-9)
    assert np.allclose(found.scatter, wanted[2].astype(float), rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("weight", [1e-24, 1e-3, 1.0])
@pytest.mark.parametrize("d", [1, 4, 13])
def test_scatters_lose_no_digit_where_rows_come_by_place(d, weight):
    """A tile of rows far away, of some weight, comes before two tiles of rows that lie close together."""
    plan = planned(drawn("full", k=1, d=d)).centred
    rng = np.random.default_rng(d)
    rows = 1e-3 * rng.normal(size=(3 * TILE, d))
    rows[:TILE] += 1e6
    weights = np.repeat([weight, 1.0], [TILE, 2 * TILE])
    kernel = absorber(plan, len(rows), compiled=True)
    kernel.accumulate(rows, weights)
    found, wanted = summed(kernel), naive_statistics(rows, weights[:, np.newaxis], "full")
    assert np.allclose(found.weights, wanted[0].astype(float), rtol=1e-13)
    assert np.allclose(found.means, wanted[1].astype(float), rtol=0, atol=np.spacing(1e6))
    lengths = np.sqrt(np.diag(wanted[2][0]))
    assert (np.abs(found.scatter[0] - wanted[2][0]) <= 1e-8 * np.outer(lengths, lengths)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_the_squares_of_all_values_are_summed(covariance_type, d, dtype):
    """With them whoever reads rows knows that none is too large."""
    parameters = drawn(covariance_type, d=d)
    plan = planned(parameters, dtype)
    rows = rows_near(parameters, 3 * TILE + 5, plan.dtype)
    expected = (rows.astype(np.longdouble) ** 2).sum()
    for compiled in (False, True):
        found = absorber(plan, len(rows), compiled=compiled).accumulate(rows, None, None)
        assert np.isclose(found.squared, float(expected), rtol=1e-5 if plan.single else 1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_of_rows_with_a_value_that_is_not_finite_nothing_is_added(covariance_type, d, compiled, value):
    parameters = drawn(covariance_type, d=d)
    rows = rows_near(parameters, TILE + 5)
    kernel, clean = (absorber(planned(parameters), len(rows), compiled=compiled) for _ in range(2))
    spoilt = rows.copy()
    spoilt[TILE + 1, d - 1] = value
    found = kernel.accumulate(spoilt, None, None)
    assert not np.isfinite(found.squared)
    assert not np.isfinite(found.total)
    assert kernel.sums() is None
    again, expected = kernel.accumulate(rows, None, None), clean.accumulate(rows, None, None)
    assert np.array_equal(again.log_likelihoods, expected.log_likelihoods)
    assert np.array_equal(summed(kernel).scatter, summed(clean).scatter)


@pytest.mark.parametrize(("d", "spread"), [(D, 0.1), (19, 0.1), (19, 30.0)])
def test_statistics_of_many_blocks_are_those_of_one(d, spread):
    """Where components are apart, scatters leave out most rows."""
    parameters = drawn("full", d=d, spread=spread)
    rows = rows_near(parameters, 2000)
    kernel, whole = (absorber(planned(parameters), 2000, compiled=True) for _ in range(2))
    whole.accumulate(rows, None, None)
    for begin in range(0, 2000, 300):
        kernel.accumulate(rows[begin : begin + 300], None, None)
    found, expected = summed(kernel), summed(whole)
    assert np.allclose(found.weights, expected.weights, rtol=1e-13)
    assert np.allclose(found.scatter, expected.scatter, rtol=1e-12, atol=1e-12)
    assert kernel.sums() is None


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("n", [1, 500, 2000])
def test_single_precision_stays_within_its_limit(covariance_type, n):
    parameters = drawn(covariance_type)
    rows, seen = rows_near(parameters, n, np.float32), room(n)
    plan = planned(parameters, np.float32)
    kernel = absorber(plan, n, compiled=True)
    assert plan.single
    assert isinstance(kernel, TileKernel)
    accumulated = kernel.accumulate(rows, None, seen)
    exact = log_joint(rows.astype(float), parameters)
    assert np.abs(accumulated.log_likelihoods - scipy.special.logsumexp(exact, axis=1)).max() <= 1e-5
    assert np.abs(seen.largest - scipy.special.softmax(exact, axis=1).max(axis=1)).max() <= 1e-5
    shares = scipy.special.softmax(exact, axis=1)
    assert_naive(summed(kernel), rows, shares, covariance_type, rtol=(1e-5, 1e-5, 1e-4), atol=(1e-5, 1e-3))


@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_rows_whose_densities_underflow_are_scored_all_the_same(covariance_type, d):
    """From the middle of a block on, some of them, each relative to its largest score then."""
    parameters = drawn(covariance_type, d=d)
    rows, seen = rows_near(parameters, 3 * TILE), room(3 * TILE)
    rows[TILE + 3 :: 5] *= 60
    expected = log_joint(rows, parameters)
    assert (expected.max(axis=1) < MIN_EXPONENT[np.dtype("f8")]).any()
    plan = planned(parameters)
    assert tiled(plan)
    found = absorber(plan, len(rows), compiled=True).accumulate(rows, None, seen)
    assert np.allclose(found.log_likelihoods, scipy.special.logsumexp(expected, axis=1), rtol=1e-11)
    assert np.array_equal(seen.labels, expected.argmax(axis=1))


OVERFLOWS = [(name, D, np.float32) for name in COVARIANCE_TYPES]
OVERFLOWS += [(name, d, np.float64) for name, d in FORMS if not structure_named(name).shared]


@pytest.mark.parametrize(("covariance_type", "d", "dtype"), OVERFLOWS)
def test_rows_of_which_products_overflow_are_scored_too_and_spoil_no_others(covariance_type, d, dtype):
    """In float64 the distance overflows to one component, which is narrow, and not to the others."""
    parameters = drawn(covariance_type, d=d, spread=0.0)
    if dtype is np.float64:
        covariances, factors = parameters.covariances.copy(), parameters.precisions_cholesky.copy()
        covariances[0], factors[0] = covariances[0] * 1e-20, factors[0] * 1e10
        parameters = replace(parameters, covariances=covariances, precisions_cholesky=factors)
    plan = planned(parameters, dtype)
    rows, others = (rows_near(parameters, 50, dtype, seed=seed) for seed in (1, 2))
    rows[-20:] = 1e25 if dtype is np.float32 else 1e149
    seen, plain = room(50), BlockKernel(plan, 50)
    kernel, alone = (absorber(plan, 50, compiled=True) for _ in range(2))
    assert isinstance(kernel, TileKernel)
    found, expected = kernel.accumulate(rows, np.full(50, 0.5), seen), plain.score(rows)
    assert np.allclose(found.log_likelihoods, expected.log_likelihoods, rtol=1e-14, atol=0.0)
    assert np.isfinite(found.total)
    assert np.array_equal(seen.labels, expected.responsibilities.argmax(axis=0))
    again, only = (each.accumulate(others[:30], None, None) for each in (kernel, alone))
    assert np.array_equal(again.log_likelihoods, only.log_likelihoods)
    assert np.isclose(summed(kernel).weights.sum(), 25 + 30, rtol=1e-6)


def test_a_row_out_of_any_reach_has_no_finite_log_likelihood():
    parameters = drawn("diag")
    rows = rows_near(parameters, 10)
    rows[7] = 1e160
    with np.errstate(over="ignore"):
        accumulated = absorber(planned(parameters), 10, compiled=True).accumulate(rows, None, None)
    assert np.array_equal(np.flatnonzero(~np.isfinite(accumulated.log_likelihoods)), [7])
    assert not np.isfinite(accumulated.total)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("covariance_type", "d"), FORMS)
def test_a_kernel_goes_on_with_the_memory_of_one_that_is_finished(covariance_type, d, compiled):
    """To the bit as by new ones: after values that are not finite, that overflow, and rows far away.

    Tiles are those of a kernel of any length; NumPy's buffers those of one of the same.
    """
    parameters = drawn(covariance_type, d=d)
    kernels, rows = Kernels(planned(parameters), compiled=compiled), rows_near(parameters, 300)
    held = (lambda kernel: kernel.tiling) if compiled else (lambda kernel: kernel)
    n = 500 if compiled else 300
    for before in (np.full((n, d), np.inf), np.full((n, d), 1e149), rows_near(parameters, 290) * 60):
        first, beside = kernels.acquire(n), Kernels(kernels.plan, compiled=compiled).acquire(300)
        with np.errstate(over="ignore"):
            first.accumulate(before)
            kernels.release(first)
        again = kernels.acquire(290)
        assert held(again) is held(first)
        assert held(kernels.acquire(300)) is not held(first)
        for part in (rows[:3], rows[:290], rows[280:]):
            found, expected = again.accumulate(part), beside.accumulate(part)
            assert np.array_equal(found.log_likelihoods, expected.log_likelihoods)
        found = kernels.plan.statistics(kernels.release(again))
        assert np.array_equal(found.scatter, summed(beside).scatter)
        assert compiled or kernels.acquire(500) is not first


def test_kernels_travel_without_tiles_and_copies_share_those_of_a_process():
    """As tasks do that carry what they need; when the last is gone, so are the tiles."""
    kernels = Kernels(planned(drawn("full")), compiled=True)
    travelled = pickle.dumps(kernels)
    assert len(travelled) < len(pickle.dumps(kernels.plan)) + 300
    one, two = pickle.loads(travelled), pickle.loads(travelled)
    assert one.by_tiles
    kernel = one.acquire(100)
    tiling = weakref.ref(kernel.tiling)
    one.release(kernel)
    del kernel
    assert two.acquire(100).tiling is tiling()
    del kernels, one, two
    assert tiling() is None


def test_threads_have_tiles_of_their_own():
    """As many threads as there are, each with one kernel after another, find what one thread does."""
    parameters = drawn("full", d=19)
    kernels = Kernels(planned(parameters), compiled=True)
    chunks = [rows_near(parameters, 300, seed=seed) for seed in range(40)]

    def scatter(rows):
        kernel = kernels.acquire(len(rows))
        kernel.accumulate(rows)
        return kernels.plan.statistics(kernels.release(kernel)).scatter

    expected = [scatter(rows) for rows in chunks]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(scatter, chunks), expected, strict=True):
            assert np.array_equal(found, alone)


def test_equal_components_tie_exactly_and_the_first_of_them_is_named():
    twins = MixtureParameters("diag", np.full(2, 0.5), np.ones((2, D)), np.ones((2, D)), np.ones((2, D)))
    seen = room(50)
    kernel = absorber(planned(twins), 50, compiled=True)
    kernel.accumulate(np.random.default_rng(0).normal(size=(50, D)), None, seen)
    assert (seen.labels == 0).all()
    assert (seen.largest == 0.5).all()
    assert np.array_equal(*summed(kernel).weights[:, np.newaxis])


@pytest.mark.parametrize("d", [D, 19])
def test_neither_rows_nor_weights_are_touched_and_rows_may_be_read_only(d):
    parameters = drawn("full", d=d)
    rows, weights = rows_near(parameters, 100), np.full(100, 2.0)
    before = rows.copy()
    rows.setflags(write=False)
    kernel = absorber(planned(parameters), 100, compiled=True)
    kernel.accumulate(rows, weights, room(100))
    assert np.array_equal(rows, before)
    assert (weights == 2).all()


@pytest.mark.parametrize("overflowing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize(("k", "d"), [(3, 4), (16, 16), (64, 32), (43, 96), (5, 42), (8, 128)])
def test_memory_is_within_what_plans_foretell(covariance_type, k, d, dtype, overflowing):
    """Of the longest blocks, and of those that go by NumPy after all."""
    parameters = drawn(covariance_type, k, d, spread=0.0)
    plan = planned(parameters, dtype)
    longest = 3 * absorber(plan, 10**7, compiled=True).n_rows // 2
    n = min(longest, absorber(plan, longest, compiled=True).n_rows)
    rows = np.zeros((n, d), plan.dtype)
    absorber(plan, 10, compiled=True).accumulate(rows[:10])  # loads code
    if overflowing:
        rows[::1000] = 1e25 if plan.single else 1e160
    tracemalloc.start()
    kernel = absorber(plan, n, compiled=True)
    assert isinstance(kernel, TileKernel)
    with np.errstate(over="ignore"):
        kernel.accumulate(rows, None, room(n))
        kernel.accumulate(rows[:100], None, None)
    kernel.sums()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    statistics = 16 * 8 * k * (d + 1) * ((d + 1) if covariance_type == "full" else 2)
    evidence = n * 9  # labels and largest responsibilities, which belong to the chunk
    assert peak <= block_bytes(covariance_type, k, d, n) + statistics + evidence


@pytest.mark.parametrize(("k", "d"), [(1000, 1), (1000, 2), (200, 9), (64, 17)])
def test_memory_of_squares_that_are_longer_than_features_is_foretold(k, d):
    """In the centred form, since components are far apart."""
    means, unit = 200 * np.random.default_rng(0).normal(size=(k, d)), np.broadcast_to(np.eye(d), (k, d, d))
    parameters = MixtureParameters("full", np.full(k, 1 / k), means, unit, unit)
    plan, rows = planned(parameters).centred, rows_near(parameters, 100_000)
    absorber(plan, 10, compiled=True).accumulate(rows[:10])  # loads code
    tracemalloc.start()
    kernel = absorber(plan, len(rows), compiled=True)
    assert isinstance(kernel, TileKernel)
    for begin in range(0, len(rows), kernel.n_rows):
        kernel.accumulate(rows[begin : begin + kernel.n_rows])
    kernel.sums()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = STATISTICS_COPIES * 8 * (k * d**2 + k * (d + 1))
    assert peak <= block_bytes("full", k, d, len(rows)) + held


def test_rows_that_are_gathered_lose_no_digit_to_the_rounding_of_their_mean():
    """Deviations are 1e-14 of the distance from the origin; less 1e8, rows are summed naively."""
    d, rng = 25, np.random.default_rng(0)
    unit = np.eye(d)[np.newaxis]
    parameters = MixtureParameters("full", np.ones(1), np.full((1, d), 1e8), 1e-12 * unit, 1e6 * unit)
    rows, weights = 1e8 + 1e-6 * rng.normal(size=(60, d)), rng.uniform(0.1, 2, 60)
    kernel = absorber(planned(parameters), len(rows), compiled=True)
    assert isinstance(kernel, TileKernel)
    kernel.accumulate(rows, weights)
    expected = naive_statistics(rows - 1e8, weights[:, np.newaxis], "full")[2].astype(float)
    assert np.allclose(summed(kernel).scatter, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def spoil(buffers, d):
    """Fill with NaN all buffers but those that must be finite, and groups but for what is beyond features."""
    for name, buffer in buffers._asdict().items():
        if isinstance(buffer, tuple):
            spoil(buffer, d)
        elif name not in ("features", "differences", "coordinates", "counts", "totals", "n_significant"):
            buffer[..., : d if name == "groups" else None] = np.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize(("k", "d"), [(1, 1), (1, 4), (2, 1), (40, 5), (3, 8), (3, 12), (2, 25)])
def test_what_buffers_held_before_changes_no_bit(covariance_type, dtype, k, d):
    """All of them hold NaN but what must be finite; the numbers are those of NumPy."""
    parameters = drawn(covariance_type, k, d)
    plan = planned(parameters, dtype)
    rows, weights = rows_near(parameters, 1000, plan.dtype), np.random.default_rng(0).uniform(0, 2, 1000)
    rows[700::7] *= 100
    clean, spoilt, plain = *(absorber(plan, 1000, compiled=True) for _ in range(2)), BlockKernel(plan, 1000)
    spoil(spoilt.tiling.buffers, d)
    spoilt._sums.numbers.fill(np.nan)
    kernels, room_of = (clean, spoilt, plain), room(1000)
    found = [(kernel.accumulate(rows, weights, room_of), summed(kernel)) for kernel in kernels]
    rtol, atol = (1e-3, 1e-2) if plan.single else (1e-9, 1e-8)
    for name in ("weights", "means", "scatter"):
        one, two, three = (getattr(statistics, name) for _, statistics in found)
        assert np.array_equal(one, two)
        assert np.allclose(one, three, rtol=rtol, atol=atol)
    one, two, three = (accumulated.log_likelihoods for accumulated, _ in found)
    assert np.array_equal(one, two)
    assert np.allclose(one, three, rtol=rtol)


def test_sums_that_overflow_in_float32_go_by_numpy():
    """Every log-likelihood is finite, and so are the sums of short blocks."""
    parameters = drawn("diag")
    plan = planned(parameters, np.float32)
    rows = np.zeros((400, D), np.float32)
    rows[:300:100] = 9e18
    accumulated = (kernel := absorber(plan, 400, compiled=True)).accumulate(rows, None, None)
    assert np.isfinite(accumulated.total)
    assert np.isfinite(summed(kernel).scatter).all()


@pytest.mark.parametrize(
    ("shape", "weights", "seen"),
    [
        ((5, D), np.ones(4), None),
        ((5, D), None, room(4)),
        ((5, D), None, room(6)),
        ((65, D), None, None),
        ((5, D + 1), None, None),
    ],
)
def test_what_does_not_fit_is_refused(shape, weights, seen):
    """Compiled code does not look where arrays end."""
    with pytest.raises(ValueError, match="do not fit"):
        absorber(planned(drawn("full")), 10, compiled=True).accumulate(np.zeros(shape), weights, seen)


class TestChoice:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
    def test_components_that_go_by_features_together_go_by_tiles(self, covariance_type, dtype):
        plan = planned(drawn(covariance_type), dtype)
        assert isinstance(absorber(plan, 10, compiled=True), TileKernel)
        assert isinstance(absorber(plan, 10, compiled=False), BlockKernel)

    @pytest.mark.parametrize(("k", "d", "spread"), [(3, 40, 0.1), (3, 4, 100.0), (3, 4, 1e7)])
    def test_components_with_factors_of_their_own_go_by_tiles_in_the_centred_form(self, k, d, spread):
        plan = planned(drawn("full", k=k, d=d, spread=spread))
        assert plan.exact
        assert isinstance(absorber(plan, 10, compiled=True), TileKernel)
        assert isinstance(absorber(plan, 10, compiled=False), BlockKernel)

    @pytest.mark.parametrize(
        ("covariance_type", "k", "d", "spread"),
        [("full", 2, 400, 0.1), ("diag", 3, 4, 1e7), ("tied", 3, 4, 1e7)],
    )
    def test_other_plans_with_centred_components_go_by_blocks(self, covariance_type, k, d, spread):
        plan = planned(drawn(covariance_type, k=k, d=d, spread=spread))
        assert plan.exact
        assert isinstance(absorber(plan, 10, compiled=True), BlockKernel)

    def test_components_go_centred_before_they_must(self):
        """Between the limits of tiles and of blocks."""
        parameters = drawn("full")
        means = parameters.means.copy()
        means[1] += 25.0
        parameters = replace(parameters, means=means, weights=np.array([0.5, 1e-9, 0.5]))
        assert not plan_kernel(parameters).exact
        plan = planned(parameters)
        assert plan.exact
        assert isinstance(absorber(plan, 10, compiled=True), TileKernel)

    @pytest.mark.parametrize("itemsize", [4, 8])
    @pytest.mark.parametrize("count", [3, 15, 153, 561, 1200, 5000])
    def test_rows_of_tiles_are_odd_multiples_of_three_cache_lines_that_fit_a_cache(self, count, itemsize):
        rows = tiling.rows_of_tile(count, itemsize)
        assert rows * itemsize % 384 == 192
        assert rows * itemsize * count <= max(tiling.TILE_BYTES, 9 * 64 * count)
        assert rows * itemsize <= 27 * 64

    @pytest.mark.parametrize(
        ("setting", "rows", "expected"),
        [
            ("auto", MIN_PRODUCTS // 9 - 1, False),
            ("auto", MIN_PRODUCTS // 9 + 1, True),
            ("always", 1, True),
            ("never", 10**12, False),
        ],
    )
    def test_the_setting_and_the_size_decide(self, setting, rows, expected):
        """Three components, each with three coefficients: of 1, of the feature and of its square."""
        with dask.config.set({"emtau.compiled": setting}):
            assert worth_compiling(None, (rows, 1), "diag", 3) is expected

    def test_nothing_is_compiled_for_components_that_go_centred(self):
        assert not worth_compiling(None, (10**9, 400), "full", 3)
        assert worth_compiling(None, (10**9, 380), "full", 3)
        assert worth_compiling(None, (10**9, 400), "diag", 3)

    @pytest.mark.parametrize("setting", [True, "yes", 3, None])
    def test_other_settings_are_refused(self, setting):
        with (
            dask.config.set({"emtau.compiled": setting}),
            pytest.raises(ConfigError, match=r"emtau\.compiled"),
        ):
            worth_compiling(None, (1, 1), "diag", 1)


ERRORS = ["ImportError", "OSError", "RuntimeError", "AttributeError", "SystemError"]
WITHOUT = """
import builtins, os, sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise kind("numba is not what it should be")
sys.meta_path.insert(0, Broken())
import dask, numpy as np
from emtau_dask import ClusterError, ConfigError, GaussianMixture
from emtau_dask.em.compiling import MIN_PRODUCTS, check_compiler, worth_compiling
assert "numba" not in sys.modules
for name in sys.argv[1:]:  # each in a process that asks for numba for the first time
    kind = getattr(builtins, name)
    if forked := os.fork():
        assert os.waitpid(forked, 0)[1] == 0
        continue
    assert not worth_compiling(None, (MIN_PRODUCTS, 1), "diag", 1)
    dask.config.set({"emtau.compiled": "always"})
    for expected, call in [
        (ConfigError, lambda: GaussianMixture(2).fit(np.random.default_rng(0).normal(size=(500, 2)))),
        (ClusterError, check_compiler),
    ]:
        try:
            call()
        except expected as error:
            print(error, flush=True)
    os._exit(0)
"""


def test_without_numba_nothing_is_compiled_and_who_asks_is_told_why():
    command = [sys.executable, "-c", WITHOUT, *ERRORS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for error, refused, elsewhere in zip(ERRORS, lines[::2], lines[1::2], strict=True):
        for message in (refused, elsewhere):
            assert f"{error}: numba is not what it should be" in message
            assert "pip install numba" in message
        assert "on every worker" in elsewhere


LATER_LIBRARIES = """
import sys
import numpy as np
import numba.core.caching as caching
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda *_: None)
from emtau_dask.kernels.dispatch import compilation_noted, compile_loops, why_not_compiled
from emtau_dask.mixture.covariance_types import structure_named

def libraries():
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file for file in files if file and file.endswith(".so")}

assert why_not_compiled() is None
before = libraries()
with compilation_noted(lambda: print("compiles")):
    compile_loops(structure_named("full"), 2, 3, np.dtype("f8"), missing=False)
print(sorted(libraries() - before))

import dask
from emtau_dask import GaussianMixture
dask.config.set({"emtau.compiled": "always"})
print(GaussianMixture(1, algorithm="em").fit(np.arange(20.0).reshape(10, 2)).means_[0])
"""


@pytest.mark.exhaustive
def test_no_library_is_loaded_while_loops_are_compiled_which_need_not_be_kept():
    """A thread that compiles would stop for ever where threadpoolctl goes through them meanwhile."""
    command = [sys.executable, "-c", LATER_LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "compiles\n[]\n[ 9. 10.]\n"


def test_numba_told_to_compile_nothing_is_as_good_as_none(monkeypatch):
    tiling.compiled_loops.cache_clear()
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    try:
        assert "NUMBA_DISABLE_JIT" in dispatch.why_not_compiled()
        with pytest.raises(RuntimeError, match="NUMBA_DISABLE_JIT"):
            absorber(planned(drawn("full")), 10, compiled=True)
    finally:
        tiling.compiled_loops.cache_clear()
