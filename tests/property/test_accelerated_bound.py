"""The log-likelihood of accepted full passes never falls, and is exact, with every part switched on.

That is by more than 1e-11·max(1, |bound|) with reg_covar=0, whatever samples, extrapolations, sampled rows
and refused steps were between. Where rows are float32, what is reported is within 1e-5 nats of the
log-likelihood of the parameters; see test_bound.py.
"""

from contextlib import contextmanager

import dask
import numpy as np
import pytest
from accelerated import few_rows_suffice, iterations, log_likelihood, quiet_fit
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from oracles import starts

import emtau_dask
from emtau_dask.mixture.plan import SINGLE_LIMIT

LIMIT = 1e-11
SINGLE = np.dtype(np.float32)
ALGORITHMS = {
    "auto": {"algorithm": "auto"},
    "em": {"algorithm": "em", "acceleration": "quasi-newton"},
    "em-tau": {"algorithm": emtau_dask.EMTau(tau=3), "acceleration": "quasi-newton"},
    "em-tau, revisit": {"algorithm": emtau_dask.EMTau(tau=4, revisit=5), "acceleration": "quasi-newton"},
    "em-lazy": {"algorithm": emtau_dask.EMLazy(full_every=4), "acceleration": "quasi-newton"},
    "em-sampled": {"algorithm": emtau_dask.EMSampled(share=0.2, most=6)},
    "em-sampled, without": {"algorithm": emtau_dask.EMSampled(share=0.2, most=6), "acceleration": None},
}
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS)
SOME = pytest.mark.parametrize("algorithm", ["auto", "em-tau, revisit", "em-sampled"])
FEW = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw):
    """A mixture of some hundred rows a component or more: X (dask), K, covariance type, weights, seed."""
    seed = draw(st.integers(0, 2**31 - 1))
    k, d = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    n = draw(st.integers(1500, 3000))
    X, _ = starts.mixture(n, k, d, separation=draw(st.sampled_from([0.3, 1.5, 4.0, 9.0])), seed=seed)
    X = X * draw(st.sampled_from([1e-3, 1.0, 1e3])) + draw(st.sampled_from([0.0, 0.0, 10.0]))
    covariance_type = draw(st.sampled_from(starts.COVARIANCE_TYPES))
    weights = np.random.default_rng(seed).uniform(0.2, 3, size=n) if draw(st.booleans()) else None
    chunking = draw(st.sampled_from(["one-chunk", "ragged", "zero-row-chunks"]))
    return starts.chunked(X, chunking), k, covariance_type, weights, seed


def fitted(algorithm, problem, **more):
    """The fit without regularisation and its iterations."""
    X, k, covariance_type, weights, seed = problem
    options = {"tol": 0, "reg_covar": 0, "max_iter": 70, "random_state": seed} | ALGORITHMS[algorithm] | more
    with few_rows_suffice(), iterations() as made:
        try:
            model = quiet_fit(X, k, covariance_type=covariance_type, sample_weight=weights, **options)
        except emtau_dask.SingularComponentError:
            event("a singular component")
            assume(False)
    return model, made


def full_passes(made):
    return [iteration for iteration in made if iteration.record.full_pass]


def exact_bounds(problem, made):
    """The log-likelihood of the parameters of every full pass, written out in float64."""
    X, _, _, weights, _ = problem
    rows = X.compute(scheduler="synchronous").astype(np.float64)
    return np.array([log_likelihood(rows, weights, one.scored) for one in full_passes(made)])


def worst_fall(bounds):
    """By how much a bound is below the highest before it, relative to max(1, |bound|)."""
    return np.max((np.maximum.accumulate(bounds) - bounds) / np.maximum(1, np.abs(bounds)), initial=0)


def assert_kept(model, made, bounds):
    """The fit ends with the last bound that was accepted on all rows, after a pass over all of them."""
    passes = full_passes(made)
    assert made[-1].record.full_pass
    assert [one.record for one in made] == list(model.history_)
    kept = [bound for one, bound in zip(passes, bounds, strict=True) if one.record.accepted]
    assert model.lower_bound_ == pytest.approx(kept[-1], rel=LIMIT)


@EVERY
@FEW
@given(problem=problems())
def test_the_log_likelihood_of_accepted_full_passes_is_exact_and_never_falls(algorithm, problem):
    model, made = fitted(algorithm, problem)
    reported = np.array([one.record.lower_bound for one in full_passes(made)])
    accepted = np.array([one.record.accepted for one in full_passes(made)])
    exact = exact_bounds(problem, made)
    assert worst_fall(reported[accepted]) <= LIMIT
    assert worst_fall(exact[accepted]) <= LIMIT
    assert np.all(np.abs(reported - exact) <= LIMIT * np.maximum(1, np.abs(exact)))
    assert_kept(model, made, reported)
    for stage in {one.stage for one in made}:
        event(stage)


@SOME
@FEW
@given(problem=problems())
def test_what_a_fit_returns_is_no_worse_than_its_bound(algorithm, problem):
    """Its parameters are EM's own step from those of the bound."""
    model, _ = fitted(algorithm, problem, max_iter=30)
    X, _, _, weights, _ = problem
    found = log_likelihood(X.compute(scheduler="synchronous"), weights, model.parameters_)
    assert model.lower_bound_ - found <= LIMIT * max(1, abs(found))


@SOME
@FEW
@given(problem=problems())
def test_of_rows_of_float32_it_falls_by_their_rounding_at_most(algorithm, problem):
    X, *others = problem
    problem = (X.astype(SINGLE), *others)
    with dask.config.set({"emtau.compiled": "always"}):
        model, made = fitted(algorithm, problem, max_iter=40)
    reported = np.array([one.record.lower_bound for one in full_passes(made)])
    accepted = np.array([one.record.accepted for one in full_passes(made)])
    exact = exact_bounds(problem, made)
    assert np.all(np.abs(reported - exact) <= SINGLE_LIMIT * np.maximum(1, np.abs(exact)))
    assert worst_fall(exact[accepted]) <= 2 * SINGLE_LIMIT
    assert worst_fall(reported[accepted]) <= 2 * SINGLE_LIMIT
    assert_kept(model, made, reported)


@SOME
@FEW
@given(problem=problems(), reg_covar=st.sampled_from([1e-6, 1e-2, 1.0]))
def test_with_reg_covar_only_steps_of_em_lower_it(algorithm, problem, reg_covar):
    model, made = fitted(algorithm, problem, reg_covar=reg_covar)
    kept = -np.inf
    for one in full_passes(made):
        bound = one.record.lower_bound
        if one.record.accepted:
            assert one.kind in ("plain", "given") or bound >= kept - LIMIT * max(1, abs(bound))
            kept = bound
    assert made[-1].record.full_pass
    assert model.lower_bound_ == kept


@SOME
@pytest.mark.parametrize(
    ("covariance_type", "reg_covar"), [*((name, 0.0) for name in starts.COVARIANCE_TYPES), ("full", 1e-6)]
)
def test_components_on_identical_rows_collapse_or_not_but_never_loop(algorithm, covariance_type, reg_covar):
    """A third of the rows are one point, and there are more components than anything to tell apart."""
    rng = np.random.default_rng(5)
    X = np.concatenate([np.zeros((500, 2)), rng.normal(size=(1000, 2)) + 4])[rng.permutation(1500)]
    with few_rows_suffice(), iterations() as made:
        try:
            model = quiet_fit(
                starts.chunked(X, "ragged"),
                4,
                covariance_type=covariance_type,
                reg_covar=reg_covar,
                tol=0,
                max_iter=60,
                random_state=3,
                **ALGORITHMS[algorithm],
            )
        except emtau_dask.SingularComponentError:
            assert len(made) <= 60 * 8
            return
    assert model.n_iter_ <= 60
    assert made[-1].record.full_pass
    assert np.isfinite(model.lower_bound_)
    exact = log_likelihood(X, None, [one for one in full_passes(made) if one.record.accepted][-1].scored)
    assert model.lower_bound_ == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("max_iter", [1, 2, 5, 23, 30, 40, 60])
def test_a_fit_that_is_cut_ends_on_all_rows_with_what_was_the_best(max_iter):
    """In the contest of starts, too: what is returned is a step of EM from what was scored on all rows."""
    X, _ = starts.mixture(1589, 2, 1, separation=1.5, seed=0)
    problem = (starts.chunked(X, "ragged"), 2, "full", None, 0)
    model, made = fitted("auto", problem, max_iter=max_iter)
    assert len(made) == model.n_iter_ == max_iter
    assert_kept(model, made, exact_bounds(problem, made))
    assert log_likelihood(X, None, model.parameters_) >= model.lower_bound_ - LIMIT


def test_every_part_is_switched_on():
    """Annealed passes apart: those of a fit that is too small for samples have a test below."""
    X, _ = starts.mixture(4000, 3, 2, separation=2.0, seed=1)
    problem = (starts.chunked(X, "ragged"), 3, "full", None, 0)
    _, made = fitted("auto", problem, max_iter=400)
    assert {one.stage for one in made} >= {"contest", "sample 0", "sample 1", "cycle", "all rows", "refused"}
    assert {one.kind for one in made} == {"given", "plain", "extrapolated", "cycle"}


@contextmanager
def annealed():
    """Samples are too small for anything but annealing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emtau_dask.em.settings, "MAX_SAMPLE_SHARE", 0.01)
        patch.setattr(emtau_dask.em.settings, "MIN_ROWS_WITHOUT_ANNEALING", 10**6)
        patch.setattr(emtau_dask.em.fit, "has_few_rows", lambda *shape: False)
        yield


def test_where_a_sixteenth_is_too_few_rows_a_quarter_is_annealed():
    X, _ = starts.mixture(600, 3, 2, separation=2.0, seed=7)
    problem = (starts.chunked(X, "ragged"), 3, "full", None, 0)
    with annealed():
        model, made = fitted("auto", problem, max_iter=200)
    assert {one.stage for one in made} >= {"annealed", "contest", "all rows"}
    exact = exact_bounds(problem, made)
    accepted = [one.record.accepted for one in full_passes(made)]
    assert worst_fall(exact[accepted]) <= LIMIT
    assert_kept(model, made, [one.record.lower_bound for one in full_passes(made)])


def test_annealed_passes_are_not_counted_among_those_of_a_sample_nor_compared():
    """Their bounds are of flatter densities; the start that is chosen goes on from where it was."""
    X, _ = starts.mixture(600, 3, 2, separation=6.0, seed=7)
    problem = (starts.chunked(X, "ragged"), 3, "full", None, 0)
    with annealed():
        _, made = fitted("auto", problem, max_iter=200)
    flatter = [one for one in made if one.stage == "annealed"]
    assert flatter
    for one in flatter:
        assert one.state.progress.sample_began == one.state.iteration
    after = [one for one in made if one.chosen and not one.record.full_pass]
    assert len(after) < 10


@pytest.mark.parametrize("max_iter", [1, 3, 8, 20])
def test_annealing_that_is_cut_leaves_the_bound_of_all_rows_exact(max_iter):
    """The temperature is that of passes over samples alone."""
    X, _ = starts.mixture(600, 3, 2, separation=2.0, seed=7)
    problem = (starts.chunked(X, "ragged"), 3, "full", None, 0)
    with annealed():
        model, made = fitted("auto", problem, max_iter=max_iter)
    assert max_iter < 3 or made[0].stage == "annealed"
    assert sum(one.record.full_pass for one in made) >= max_iter - max_iter // 2
    assert_kept(model, made, exact_bounds(problem, made))
