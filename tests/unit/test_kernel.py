"""The forms of the E-step over a block against scipy's densities and Bayes' theorem, row by row."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
from references import COVARIANCE_TYPES, LONG, assert_naive, drawn, log_joint, naive_statistics, summed
from tiers import exhaustive_but, exhaustive_but_each_value_once

from emtau_dask.mixture.covariance import Frame
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import BlockKernel, exponentials, normalise
from emtau_dask.mixture.features import conditions
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import block_bytes, block_rows, even_length, plan_kernel

N, K, D = 50, 3, 4


def whitened(plan):
    """The full covariances' second frame, that of the pooled covariance."""
    factor = np.triu(np.random.default_rng(8).normal(size=(D, D))) + 3 * np.eye(D)
    return replace(plan, frame=Frame(plan.frame.centre, factor))


FORMS = {"features": lambda plan: plan, "centred": lambda plan: plan.centred, "whitened": whitened}


CASES = [
    (covariance_type, form)
    for covariance_type in COVARIANCE_TYPES
    for form in FORMS
    if form != "whitened" or covariance_type == "full"
]


@pytest.fixture(params=exhaustive_but_each_value_once(CASES), ids="-".join)
def case(request):
    return request.param


@pytest.fixture
def parameters(case):
    return drawn(case[0])


@pytest.fixture
def form(case):
    return FORMS[case[1]]


@pytest.fixture
def rows():
    return np.random.default_rng(1).normal(size=(N, D)) * 3


@pytest.fixture
def scored(parameters, form):
    def score(rows, n_rows=None, of=parameters):
        plan = plan_kernel(of)
        assert plan.frame is not None
        responsibilities, log_likelihoods, _ = BlockKernel(form(plan), n_rows or len(rows)).score(rows)
        return responsibilities.T.copy(), log_likelihoods

    return score


def test_rows_are_scored_by_bayes_theorem_and_not_touched(rows, parameters, form, scored):
    """Also by a kernel for more rows, and by one that scored others before."""
    before, scores = rows.copy(), log_joint(rows, parameters)
    responsibilities, log_likelihoods = scored(rows)
    assert np.allclose(log_likelihoods, scipy.special.logsumexp(scores, axis=1), rtol=1e-12)
    expected = scipy.special.softmax(scores, axis=1)
    assert np.allclose(responsibilities, expected, rtol=1e-10, atol=1e-300)
    assert np.abs(responsibilities.sum(axis=1) - 1).max() <= 4 * np.finfo(float).eps
    assert np.array_equal(rows, before)
    for same, roomy in zip((responsibilities, log_likelihoods), scored(rows, N + 17), strict=True):
        assert np.array_equal(same, roomy)
    kernel = BlockKernel(form(plan_kernel(parameters)), N)
    kernel.score(rows * 100)
    again = kernel.score(rows[:20]).responsibilities
    assert np.array_equal(again.T, scored(rows[:20], N)[0])


def test_rows_whose_densities_underflow_are_scored_all_the_same(rows, parameters, scored):
    far = rows + 1e6
    expected = scipy.special.logsumexp(log_joint(far, parameters), axis=1)
    responsibilities, log_likelihoods = scored(far)
    assert np.allclose(log_likelihoods, expected, rtol=1e-9)
    assert np.allclose(responsibilities.sum(axis=1), 1)
    beyond = rows.copy()
    beyond[7] = 1e200
    assert np.array_equal(np.flatnonzero(~np.isfinite(scored(beyond)[1])), [7])


def test_a_row_beyond_the_reach_of_features_alone_is_scored():
    """One component is so narrow that the row's distance from it overflows; the other is not."""
    narrow = MixtureParameters(
        "diag",
        np.full(2, 0.5),
        np.zeros((2, 1)),
        np.array([[1e-20], [1.0]]),
        np.array([[1e10], [1.0]]),
    )
    plan = plan_kernel(narrow)
    assert plan.frame is not None
    kernel = BlockKernel(plan, 2)
    responsibilities, log_likelihoods, total = kernel.score(np.array([[1e149], [1.0]]))
    assert np.array_equal(responsibilities, [[0.0, 0.0], [1.0, 1.0]])
    assert np.isclose(log_likelihoods[1], np.log(0.5) + scipy.stats.norm.logpdf(1.0))
    assert np.isclose(total, log_likelihoods.sum())
    kernel.collect()
    assert np.isclose(summed(kernel).means[1, 0], 5e148)


@pytest.mark.parametrize("k", [1, 2])
def test_equal_components_tie_exactly_and_one_has_all_the_responsibility(rows, k):
    twins = MixtureParameters("diag", np.full(k, 1 / k), np.ones((k, D)), np.ones((k, D)), np.ones((k, D)))
    assert np.array_equal(
        BlockKernel(plan_kernel(twins), N).score(rows).responsibilities, np.full((k, N), 1 / k)
    )


@pytest.mark.parametrize("shares", ["of all components", "of some rows, and none of the last component"])
def test_the_statistics_are_the_sums_over_rows(rows, parameters, form, shares):
    """And those of no rows are none, before and after."""
    kernel, rng = BlockKernel(form(plan_kernel(parameters)), 16), np.random.default_rng(2)
    responsibilities = rng.dirichlet(np.ones(K), N)
    if shares != "of all components":
        responsibilities = np.eye(K)[rng.integers(K - 1, size=N)] * rng.random((N, 1))
    assert kernel.sums() is None
    for begin in range(0, N, 16):
        where = slice(begin, begin + 16)
        kernel.score(rows[where]).responsibilities[...] = responsibilities[where].T
        kernel.collect()
    assert_naive(
        summed(kernel),
        rows,
        responsibilities,
        parameters.covariance_type,
        rtol=(1e-14, 1e-12, 1e-12),
        atol=(1e-13, 1e-11),
    )
    assert kernel.sums() is None


def test_a_kernel_begins_again_after_its_sums(rows, parameters, form):
    plan = form(plan_kernel(parameters))
    kernel, new = BlockKernel(plan, 16), BlockKernel(plan, 16)
    for begin in range(0, N, 16):
        kernel.accumulate(-rows[begin : begin + 16])
    kernel.sums()
    for each in (kernel, new):
        for begin in range(0, N, 16):
            each.accumulate(rows[begin : begin + 16])
    found, expected = summed(kernel), summed(new)
    assert found.scatter.tobytes() == expected.scatter.tobytes()
    assert found.means.tobytes() == expected.means.tobytes()


def ill_conditioned(k, d, ill, seed=0, condition=1e8):
    """Components far from the origin; of those in ``ill``, correlations of the given condition."""
    rng = np.random.default_rng(seed)
    rotations = np.linalg.qr(rng.normal(size=(k, d, d)))[0]
    spectra = np.where(np.isin(np.arange(k), ill)[:, None], np.geomspace(1.0, 1 / condition, d), 1.0)
    covariances = (rotations * spectra[:, None, :]) @ rotations.swapaxes(1, 2)
    covariances = (covariances + covariances.swapaxes(1, 2)) / 2
    means = 1e3 + 3 * rng.normal(size=(k, d))
    factors = structure_named("full").factor(covariances, means, np.ones(k))
    return MixtureParameters("full", np.full(k, 1 / k), means, covariances, factors)


def scatter_errors(found, weights, means, scatter):
    """The largest error of each scatter, relative to the standard deviations, (K,).

    Where all rows of a component are the same, its deviations are what the means of the reference lose.
    """
    resolved = 1e8 * np.finfo(LONG).eps * np.abs(means) * np.sqrt(weights)[:, None]
    deviations = np.sqrt(np.einsum("kii->ki", scatter)) + resolved
    sizes = deviations[:, :, None] * deviations[:, None, :]
    sizes[weights == 0] = 1.0
    return (np.abs(found.scatter - scatter) / sizes).max(axis=(1, 2)).astype(float)


ILL = {"few": [1, 4], "most": [0, 1, 2, 4]}


@pytest.mark.parametrize("d", [2, 4, 15, 16, 20])
@pytest.mark.parametrize("ill", ILL)
@pytest.mark.parametrize("shares", ["their own", "overlapping"])
def test_ill_conditioned_components_beside_others_keep_their_digits(d, ill, shares):
    """Weights, blocks of several lengths, an empty component of either kind, and one that shrinks 1e12 times.

    Rows are those of float32, so that one of each component may be repeated exactly.
    """
    k, n = 6, 400
    parameters = ill_conditioned(k, d, ILL[ill])
    plan = plan_kernel(parameters)
    assert plan.exact
    rng = np.random.default_rng(1)
    owners = rng.integers(k, size=n)
    roots = np.linalg.cholesky(parameters.covariances)
    rows = parameters.means[owners] + np.einsum("nij,nj->ni", roots[owners], rng.normal(size=(n, d)))
    rows[owners == 4] = parameters.means[4] + 1e-6 * (rows[owners == 4] - parameters.means[4])
    rows = rows.astype(np.float32 if d == 4 else np.float64).astype(np.float64)
    given = np.eye(k)[owners] if shares == "their own" else rng.dirichlet(np.ones(k), n)
    given[owners == 4] = np.eye(k)[4]
    given[owners != 4, 4] = 0.0
    given[:, [2, 5]] = 0.0
    row_weights = rng.integers(4, size=n) * rng.random(n)
    kernel = BlockKernel(plan, 150)
    for begin, end in [(0, 150), (150, 190), (190, 340), (340, 400)]:
        kernel.score(rows[begin:end]).responsibilities[...] = given[begin:end].T
        kernel.collect(row_weights[begin:end])
    found = summed(kernel)
    weights, means, scatter = naive_statistics(rows, given * row_weights[:, None], "full")
    assert np.allclose(found.weights, weights.astype(float), rtol=1e-14, atol=0)
    assert np.allclose(found.means, means.astype(float), rtol=1e-15, atol=1e-12)
    errors = scatter_errors(found, weights, means, scatter)
    assert errors.max() <= 1e-13
    assert (found.weights[[2, 5]] == 0).all()
    assert (found.scatter[[2, 5]] == 0).all()


@pytest.mark.parametrize("d", [4, 20])
@pytest.mark.parametrize("condition", [1e4, 1e8])
def test_ill_conditioned_components_beside_others_are_scored_exactly(d, condition):
    """Judged in longdouble from the same factors, near the components, where no term is large."""
    parameters = ill_conditioned(6, d, [1, 4], condition=condition)
    rng = np.random.default_rng(2)
    owners = rng.integers(6, size=200)
    roots = np.linalg.cholesky(parameters.covariances)
    rows = parameters.means[owners] + np.einsum("nij,nj->ni", roots[owners], rng.normal(size=(200, d)))
    responsibilities, log_likelihoods, _ = BlockKernel(plan_kernel(parameters), 200).score(rows)
    exact = exact_log_densities(rows, parameters).astype(LONG)
    peaks = exact.max(axis=1)
    shares = np.exp(exact - peaks[:, None])
    expected = np.log(shares.sum(axis=1)) + peaks
    # A row is rounded to 1e-13 where it lies; an ill-conditioned factor multiplies that by 1e4.
    assert np.abs(log_likelihoods - expected).max() < 1e-8
    shares /= shares.sum(axis=1)[:, None]
    assert np.abs(responsibilities.T - shares).max() < 1e-8


def test_blocks_beyond_the_reach_of_products_are_summed_with_the_others():
    """A row overflows in the features of one block, in which all components go centred then."""
    parameters = drawn("full", k=6)
    rng = np.random.default_rng(3)
    rows = parameters.means[rng.integers(6, size=90)] + rng.normal(size=(90, 4))
    rows[40] = 1e160
    given = rng.dirichlet(np.ones(6), 90)
    given[40] = 0.0
    plan = plan_kernel(parameters)
    assert not plan.exact
    kernel = BlockKernel(plan, 30)
    for begin in (0, 30, 60):
        scored = kernel.score(rows[begin : begin + 30])
        scored.responsibilities[...] = given[begin : begin + 30].T
        kernel.collect()
    weights, means, scatter = naive_statistics(rows, given, "full")
    found = summed(kernel)
    assert np.allclose(found.weights, weights.astype(float), rtol=1e-14)
    assert np.allclose(found.means, means.astype(float), rtol=1e-12)
    assert scatter_errors(found, weights, means, scatter).max() <= 1e-9


def exact_log_densities(rows, parameters):
    """In longdouble, from the precision factors."""
    factors = parameters.precisions_cholesky.astype(LONG)
    distances = [
        (((rows.astype(LONG) - mean) @ factor) ** 2).sum(axis=1)
        for mean, factor in zip(parameters.means.astype(LONG), factors, strict=True)
    ]
    return parameters.log_scales - np.array(distances).T / 2


@pytest.mark.parametrize("d", [2, 8, 32, 96])
@pytest.mark.parametrize("kappa", [1.5, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0, 1000.0])
def test_no_log_density_near_its_component_is_off_by_more_than_the_limit(d, kappa, spread):
    """Where products would cost more than 1e-12 nats, the plan does without; judged in longdouble."""
    rng = np.random.default_rng(d)
    rotations = np.linalg.qr(rng.normal(size=(6, d, d)))[0]
    spectra = np.exp(rng.uniform(0, np.log(kappa), (6, d)))
    covariances = (rotations * spectra[:, None, :]) @ rotations.swapaxes(1, 2)
    means = rng.normal(size=(6, d)) * spread
    factors = structure_named("full").factor(covariances, means, np.ones(6))
    mixture = MixtureParameters("full", np.full(6, 1 / 6), means, covariances, factors)
    components = zip(means, covariances, strict=True)
    rows = np.concatenate([rng.multivariate_normal(*component, 50) for component in components])
    exact = exact_log_densities(rows, mixture)
    expected = scipy.special.logsumexp(exact.astype(float), axis=1)
    _, log_likelihoods, _ = BlockKernel(plan_kernel(mixture), len(rows)).score(rows)
    assert np.abs(log_likelihoods - expected).max() <= 2e-12


class TestPlan:
    def test_features_take_what_is_near_and_round(self):
        assert not plan_kernel(drawn("full")).exact

    @pytest.mark.parametrize("covariance_type", ["diag", "tied", "full"])
    def test_a_far_component_sends_all_centred(self, covariance_type):
        near = drawn(covariance_type)
        means = near.means.copy()
        means[1] += 1e5
        weights = np.array([0.5, 1e-9, 0.5]) / (1 + 1e-9)
        assert not plan_kernel(near).exact
        assert plan_kernel(replace(near, means=means, weights=weights)).exact

    def test_an_ill_conditioned_component_sends_all_centred(self):
        assert plan_kernel(ill_conditioned(6, 4, [1], condition=1e4)).exact

    def test_what_components_have_in_common_is_whitened_away(self):
        shared = drawn("full", spread=0.5)
        rotation = np.linalg.qr(np.random.default_rng(4).normal(size=(D, D)))[0]
        mixing = np.array([1e-2, 1.0, 1.0, 1e2])[:, None] * rotation
        covariances = mixing.T @ shared.covariances @ mixing
        means = shared.means @ mixing
        factors = structure_named("full").factor(covariances, means, np.ones(K))
        tilted = MixtureParameters("full", shared.weights, means, covariances, factors)
        plan = plan_kernel(tilted)
        assert plan.frame.transform is not None
        assert (conditions(tilted, Frame(plan.frame.centre, None)) > 1e6).any()

    @pytest.mark.parametrize(
        ("covariance_type", "k", "d", "exact"),
        [("full", 16, 40, False), ("full", 3, 40, True), ("full", 2, 400, True), ("diag", 3, 400, False)],
    )
    def test_width_decides_about_the_form_of_full_covariances(self, covariance_type, k, d, exact):
        assert plan_kernel(drawn(covariance_type, k=k, d=d, spread=0.1)).exact is exact

    def test_statistics_of_a_collapse_are_not_admitted(self):
        before = drawn("full")
        plan = plan_kernel(before)
        tiny = before.covariances * np.array([1.0, 1.0, 1e-14])[:, None, None]
        factors = structure_named("full").factor(tiny, before.means, np.ones(K))
        after = replace(before, covariances=tiny, precisions_cholesky=factors)
        assert plan.kept_digits(before)
        assert not plan.kept_digits(after)
        assert plan.centred.exact
        assert plan.centred.kept_digits(after)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_rows_of_float32_are_scored_in_float64(covariance_type):
    parameters = drawn(covariance_type, spread=0.1)
    rows = np.random.default_rng(3).normal(size=(500, D)).astype(np.float32)
    rows[7] = 1e25
    found, expected = (BlockKernel(plan_kernel(parameters), 500) for _ in range(2))
    for kernel, given in ((found, rows), (expected, rows.astype(float))):
        kernel.score(given)
        kernel.collect()
    assert np.array_equal(summed(found).scatter, summed(expected).scatter)


SHAPES = [(1, 1), (5, 42), (16, 16), (3, 784), (1000, 2), (20, 1000)]


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_a_block_is_a_multiple_of_64_rows_within_limits(covariance_type, features, k, d):
    rows = block_rows(covariance_type, k, d, features=features)
    assert rows % 64 == 0
    assert 64 <= rows <= 32768


@pytest.mark.parametrize("wanted", [64, 512, 3712, 32768])
@pytest.mark.parametrize(
    "n_rows",
    exhaustive_but({0, 1, 64, 65, 5569, 1_000_003}, [0, 1, 63, 64, 65, 500, 5000, 5569, 100_000, 1_000_003]),
)
def test_blocks_are_about_as_long_as_wanted_and_all_alike(n_rows, wanted):
    length = even_length(n_rows, wanted)
    count = -(-n_rows // length)
    assert length % 64 == 0
    assert 64 <= length <= 3 * wanted // 2 + 64
    assert count == 1 or length <= wanted
    assert count <= max(1, -(-n_rows // wanted))
    assert (
        length < n_rows / max(count, 1) + 64 or n_rows == 0
    )  # none is longer than an equal share, but for 64


EXPONENTS = {
    "ordinary": np.linspace(-50, 0, 999),
    "some vanish": -np.logspace(-3, 5, 999),
    "all vanish": np.linspace(-5000, -750, 999),
    "with infinity": np.array([0.0, -np.inf, -3.0]),
    "NaN": np.array([0.0, np.nan, -1e4]),
    "none": np.empty(0),
}


@pytest.mark.parametrize(("dtype", "small"), [("f8", 1e-300), ("f4", 1e-34)])
@pytest.mark.parametrize("case", EXPONENTS)
def test_exponentials_are_scipys_where_they_count_and_else_zero(case, dtype, small):
    values = EXPONENTS[case].astype(dtype)
    expected = np.array([scipy.special.exp10(value / np.log(10)) for value in values.astype("f8")])
    with np.errstate(all="ignore"):
        exponentials(values, np.empty_like(values))
    assert np.allclose(values, expected, rtol=1e-11 if dtype == "f8" else 1e-5, atol=small, equal_nan=True)
    assert not ((values != 0) & (np.abs(values) < np.finfo(dtype).tiny)).any()
    assert (values[expected < small / 1e8] == 0).all()


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("n", exhaustive_but({1, 2, 7, 8, 9, 16, 17, 1003}, [*range(1, 40), 1000, 1003]))
def test_exponentials_that_vanish_are_zero_wherever_they_stand(n, dtype):
    whole = np.full((3, n + 2), -1e5, dtype=dtype)
    values = whole[:, :n]
    values[1, n // 2] = -1.0
    exponentials(values, np.empty(n, dtype=dtype))
    assert np.flatnonzero(values).tolist() == [n + n // 2]
    assert values[1, n // 2] == pytest.approx(np.exp(-1.0), rel=1e-6)
    assert (whole[:, n:] == -1e5).all()


@pytest.mark.parametrize("d", exhaustive_but({1, 2, 15, 16, 17, 33}, [1, 2, 3, 4, 15, 16, 17, 18, 33]))
def test_features_are_the_products_of_all_pairs_of_coordinates(d):
    whole = np.random.default_rng(0).normal(size=(d, 9))
    for coordinates in (whole, whole[:, :7]):
        squares = np.full((d * (d + 1) // 2, coordinates.shape[1] + 2), np.nan)
        structure_named("full").squares.write(coordinates, squares[:, :-2])
        expected = [coordinates[i] * coordinates[j] for i in range(d) for j in range(i, d)]
        assert np.array_equal(np.sort(squares[:, :-2], axis=0), np.sort(expected, axis=0))
        assert np.isnan(squares[:, -2:]).all()


def peak_of(plan, share, n_blocks):
    """The most bytes allocated while blocks of the greatest length are scored and summed."""
    rng, d = np.random.default_rng(0), plan.parameters.n_features
    tracemalloc.start()
    try:
        kernel = BlockKernel(plan, 3 * plan.block_rows // 2)
        for _ in range(n_blocks):
            kernel.score(rng.standard_normal((kernel.n_rows, d)))
            kernel.collect((rng.random(kernel.n_rows) < share).astype(float))
        kernel.sums()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("covariance_type", ["full", "diag"])
@pytest.mark.parametrize(("k", "d"), [(1, 1), (5, 42), (16, 16), (3, 200), (1000, 2)])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_a_kernel_takes_no_more_than_it_says(covariance_type, k, d, share):
    """Beside the kernel itself the block of rows that is given to it, and some arrays of statistics."""
    parameters = drawn(covariance_type, k, d, spread=0.1)
    plan = plan_kernel(parameters)
    matrices = np.prod(structure_named(covariance_type).shape(k, d)) + k * (d + 1)
    for chosen in (plan, plan.centred):
        peak = peak_of(chosen, share, 3)
        rows = 3 * chosen.block_rows // 2 * (d + k) * 8
        assert peak <= block_bytes(covariance_type, k, d, 10**6) + rows + 16 * 8 * matrices


@pytest.mark.parametrize(("k", "d"), [(4, 16), (3, 700)])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_centred_statistics_take_no_more_than_it_says(share, k, d):
    """The rows gathered, those that are picked out of them, and residuals; beside these a few (K, d, d)."""
    plan = plan_kernel(drawn("full", k, d)).centred
    peak = peak_of(plan, share, 3)
    assert peak <= block_bytes("full", k, d, 10**6) + 16 * 8 * k * d * (d + 1)


def normalised(scores):
    """Scores, normalised; what they become, and what SciPy makes of them."""
    log_sums = scipy.special.logsumexp(scores.astype(float), axis=0)
    found = scores.copy()
    log_likelihoods = normalise(found, *np.empty((2, scores.shape[1])))
    epsilon = np.finfo(float).eps
    assert np.allclose(log_likelihoods, log_sums, rtol=2 * epsilon, atol=8 * epsilon)
    return found, np.exp(scores - log_sums), epsilon


@pytest.mark.parametrize("near", [-1.0, -4.0, -60.0, -90.0])
def test_far_components_do_not_count_beside_a_near_one(near):
    scores = np.random.default_rng(1).uniform(-2_000.0, 0.0, size=(5, 400))
    scores[0] = near
    scores[1:] += near
    found, expected, epsilon = normalised(scores)
    assert np.allclose(found, expected, rtol=2_000 * epsilon, atol=np.exp(-75.0))


@pytest.mark.parametrize("lowest", [-60.0, -600.0, -5_000.0])
def test_scores_become_responsibilities_wherever_they_lie(lowest):
    rng = np.random.default_rng(0)
    scores = rng.uniform(lowest, 0.0, size=(5, 400))
    scores[:, 0] = lowest
    scores[:, 1] = [lowest / 2, *[lowest] * 4]
    found, expected, epsilon = normalised(scores)
    assert np.allclose(found, expected, rtol=-lowest * epsilon, atol=np.exp(-75.0))
    assert found.max() <= 1.0
    assert (found[:, 0] == found[0, 0]).all()
    alone = scores[:1].copy()
    normalise(alone, *np.empty((2, 400)))
    assert (alone == 1.0).all()
