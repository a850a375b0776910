"""The best of several starts, by short runs of EM on rows in memory."""

import numpy as np
import pytest
from oracles import naive, starts
from references import drawn, full_covariances, rows_near, started, theta_of

from emtau_dask.data.opening import as_source
from emtau_dask.em import short_runs
from emtau_dask.em.problem import Context, make_problem
from emtau_dask.em.sampling import RowSample
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.short_runs import ON_ALL_ROWS, Effort, ShortRun, best_start, em_step
from emtau_dask.errors import SingularComponentError
from emtau_dask.execution.choice import one_thread
from emtau_dask.mixture.covariance_types import STRUCTURES, structure_named
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.full import FullEM
from emtau_dask.settings import Settings

ROUNDING = 1e-9


def problem_of(rows, k, covariance_type="full", weights=None, *, compiled=False):
    """The problem of rows in memory, and the sample that has all of them."""
    source = None if weights is None else as_source(weights, ndim=1, what="sample_weight")
    problem = make_problem(
        as_source(rows, ndim=2, what="X"),
        source,
        k,
        structure_named(covariance_type),
        one_thread(),
        Context(),
        compiled=compiled,
    )
    sample = RowSample(rows, np.ones(len(rows)) if weights is None else weights, np.arange(len(rows)))
    return problem, sample


def naive_step(rows, weights, theta, covariance_type, reg_covar=0.0):
    """The M-step and the log-likelihood per row, written out."""
    bound = float(np.average(naive.log_likelihoods(rows, theta), weights=weights))
    return naive.m_step(rows, weights, naive.e_step(rows, theta), covariance_type, reg_covar), bound


def settings_of(n_starts, max_iter=100, k=2):
    requested = Settings(n_components=k, max_iter=max_iter, reg_covar=0.0)
    return EmSettings(requested, FullEM(), 0.0, seeds=(0,) * n_starts)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("covariance_type", STRUCTURES)
def test_a_step_is_that_of_the_naive_loops(covariance_type, weighted):
    parameters = drawn(covariance_type)
    rows = rows_near(parameters, 500)
    weights = np.random.default_rng(2).uniform(0.2, 3.0, 500) if weighted else None
    problem, sample = problem_of(rows, 3, covariance_type, weights)
    after, bound = em_step(problem, sample, parameters, 1e-3)
    wanted, wanted_bound = naive_step(rows, sample.weights, theta_of(parameters), covariance_type, 1e-3)
    assert bound == pytest.approx(wanted_bound, rel=1e-12)
    assert np.allclose(after.weights, wanted.weights, rtol=1e-11)
    assert np.allclose(after.means, wanted.means, rtol=1e-10, atol=1e-12)
    found = full_covariances(after.covariances, covariance_type, 3, 4)
    assert np.allclose(found, wanted.covariances, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_by_compiled_loops_is_that_of_the_naive_ones(dtype):
    """They multiply rows of float32 in float32; a sample has them in float64."""
    pytest.importorskip("numba")
    parameters = drawn("full")
    rows = rows_near(parameters, 500, dtype)
    problem, _ = problem_of(rows, 3, compiled=True)
    sample = RowSample(rows.astype(np.float64), np.ones(500), np.arange(500))
    after, bound = em_step(problem, sample, parameters, 1e-3)
    wanted, wanted_bound = naive_step(sample.rows, sample.weights, theta_of(parameters), "full", 1e-3)
    limit = 1e-5 if dtype == np.float32 else 1e-11
    assert bound == pytest.approx(wanted_bound, rel=limit)
    assert np.allclose(after.means, wanted.means, rtol=limit, atol=limit)
    assert np.allclose(after.covariances, wanted.covariances, rtol=10 * limit, atol=10 * limit)


def test_a_step_keeps_its_digits_where_products_lose_them():
    """A component that shrinks to 1e-6 of its extent, at 1,000 from the origin of all."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(size=(300, 2)), 1e3 + 1e-6 * rng.normal(size=(300, 2))])
    wide, means = np.stack([2500.0 * np.eye(2)] * 2), np.array([[0.0, 0.0], [1e3, 1e3]])
    start = MixtureParameters("full", np.array([0.5, 0.5]), means, wide, wide / 50.0**3)
    problem, sample = problem_of(rows, 2)
    after, _ = em_step(problem, sample, start, 0.0)
    wanted, _ = naive_step(rows, sample.weights, theta_of(start), "full")
    assert wanted.covariances[1, 0, 0] < 1e-11
    assert np.allclose(after.covariances[1], wanted.covariances[1], rtol=1e-3, atol=1e-15)


def test_a_row_beyond_float64_changes_nothing():
    parameters = drawn("full", k=2, d=2)
    rows = rows_near(parameters, 100)
    rows[17] = 1e200
    problem, sample = problem_of(rows, 2)
    after, bound = em_step(problem, sample, parameters, 0.0)
    assert after is parameters
    assert bound == -np.inf


@pytest.fixture
def begun(monkeypatch):
    """Make starts begin from given parameters; an error in their place is raised."""

    def begin(*found):
        def begun(problem, settings, sample, number):
            if isinstance(found[number], Exception):
                raise found[number]
            return ShortRun(number, found[number], 0)

        monkeypatch.setattr(short_runs, "_begun", begun)

    return begin


@pytest.mark.parametrize("swapped", [False, True])
def test_the_start_that_is_better_after_some_steps_goes_on(begun, swapped):
    rows, _ = starts.mixture(400, 3, 2, separation=3.0, seed=3)
    problem, sample = problem_of(rows, 3)
    found = [started(rows, 3, "full", seed=seed) for seed in ((1, 0) if swapped else (0, 1))]
    bounds = []
    for start in found:
        theta = theta_of(start)
        for _ in range(ON_ALL_ROWS.steps):
            theta, bound = naive_step(rows, sample.weights, theta, "full")
        bounds.append(bound)
    assert abs(bounds[0] - bounds[1]) > 1e-3
    begun(*found)
    best = best_start(problem, settings_of(2, k=3), sample, ON_ALL_ROWS, ROUNDING)
    theta, bound = theta_of(found[int(np.argmax(bounds))]), -np.inf
    while True:
        theta, after = naive_step(rows, sample.weights, theta, "full")
        if after - bound < ON_ALL_ROWS.min_gain:
            break
        bound = after
    assert np.allclose(best.parameters.means, theta.means, rtol=1e-6, atol=1e-8)
    assert best.records[-1].lower_bound == pytest.approx(after, rel=1e-9)
    assert best.left_out == ()


def test_of_starts_at_one_optimum_the_first_goes_on(begun):
    rows, _ = starts.mixture(400, 2, 2, separation=6.0, seed=3)
    problem, sample = problem_of(rows, 2)
    start = started(rows, 2, "full")
    other = type(start)(
        "full", *(values[::-1] for values in (start.weights, start.means, start.covariances)),
        start.precisions_cholesky[::-1],
    )  # fmt: skip
    for first, second in ((start, other), (other, start)):
        found = []
        for runs in ((first, second), (first, first)):
            begun(*runs)
            found.append(best_start(problem, settings_of(2), sample, ON_ALL_ROWS, ROUNDING).parameters.means)
        assert np.array_equal(*found)


def test_records_count_the_rows_that_runs_score(begun):
    rows, _ = starts.mixture(400, 2, 2, separation=1.0, seed=3)
    problem, sample = problem_of(rows, 2)
    begun(*[started(rows, 2, "full", seed=seed) for seed in range(4)])
    records = best_start(problem, settings_of(4), sample, Effort(3, -np.inf), ROUNDING).records
    steps = 4 * 3, 2 * 3, short_runs.MAX_LAST_STEPS
    assert [record.active_rows for record in records] == [400 * made for made in steps]
    assert [record.iteration for record in records] == [1, 2, 3]
    assert [record.lower_bound for record in records] == sorted(record.lower_bound for record in records)
    assert not any(record.full_pass or record.bytes_read for record in records)


@pytest.mark.parametrize("max_iter", [0, 1, 2, 5])
def test_runs_make_at_most_half_of_max_iter(begun, max_iter):
    rows, _ = starts.mixture(400, 2, 2, separation=1.0, seed=3)
    problem, sample = problem_of(rows, 2)
    found = [started(rows, 2, "full", seed=seed) for seed in range(4)]
    begun(*found)
    best = best_start(problem, settings_of(4, max_iter), sample, Effort(3, -np.inf), ROUNDING)
    assert len(best.records) == min(3, max_iter // 2)
    if max_iter < 2:
        assert best.parameters is found[0]


def test_a_run_that_collapses_is_left_out_with_a_warning(begun):
    rows, _ = starts.mixture(400, 2, 2, separation=3.0, seed=3)
    problem, sample = problem_of(rows, 2)
    collapse = SingularComponentError(1, 2.0, "no row is left in it", "")
    good = started(rows, 2, "full")
    begun(collapse, good)
    with pytest.warns(UserWarning, match="start 1 of 2 is left out: .*no row is left"):
        best = best_start(problem, settings_of(2), sample, ON_ALL_ROWS, ROUNDING)
    assert len(best.left_out) == 1
    begun(good, good)
    same = best_start(problem, settings_of(2), sample, ON_ALL_ROWS, ROUNDING)
    assert np.array_equal(best.parameters.means, same.parameters.means)
    begun(collapse, collapse)
    with pytest.raises(SingularComponentError):
        best_start(problem, settings_of(2), sample, ON_ALL_ROWS, ROUNDING)


def test_of_runs_that_gain_little_no_more_steps_are_made(begun):
    """Both starts are at the optimum: a second step shows it, after which there is no round to record."""
    rows, _ = starts.mixture(400, 2, 2, separation=6.0, seed=3)
    problem, sample = problem_of(rows, 2)
    start = started(rows, 2, "full")
    for _ in range(100):
        start, _ = em_step(problem, sample, start, 0.0)
    begun(start, start)
    records = best_start(problem, settings_of(2), sample, ON_ALL_ROWS, ROUNDING).records
    assert [record.active_rows for record in records] == [2 * 2 * 400]
