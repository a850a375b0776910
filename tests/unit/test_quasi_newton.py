"""Quasi-Newton steps against dense BFGS and plain EM, with an E-step written out here."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import references
from oracles import naive, starts
from references import COVARIANCE_TYPES, statistics_of, theta_of
from scipy import optimize
from tiers import exhaustive_but

from emtau_dask.em.acceleration import (
    MIN_CURVATURE,
    Kind,
    Maximiser,
    Pair,
    Proposal,
    QuasiNewtonState,
    accelerated_step,
    begin_cycle,
    direction,
    end_cycle,
    memory_for,
)
from emtau_dask.em.moments import MomentSpace
from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import m_step

STRUCTURES = pytest.mark.parametrize(
    "covariance_type", exhaustive_but({"full", "diag", "tied_spherical"}, COVARIANCE_TYPES)
)
ROWS, _ = starts.mixture(400, 3, 2, separation=2.5, seed=7)
K, D = 3, 2


started = partial(references.started, ROWS, K)


def scored(parameters, maximiser, rows=ROWS):
    """Objective, statistics and M-step of an E-step."""
    theta = theta_of(parameters)
    statistics = statistics_of(maximiser.structure, rows, naive.e_step(rows, theta))
    try:
        em_parameters = m_step(statistics, maximiser.structure, maximiser.reg_covar)
    except SingularComponentError:
        em_parameters = None
    return float(naive.log_likelihoods(rows, theta).mean()), statistics, em_parameters


class Run:
    """A run, step by step: ``steps`` has each `AcceleratedStep`, ``objectives`` those that were scored."""

    def __init__(self, parameters, memory=10, reg_covar=0.0):
        self.maximiser = Maximiser(parameters.structure, reg_covar, 1, memory)
        self.quasi_newton, self.parameters = QuasiNewtonState(parameters.means), parameters
        self.steps, self.objectives, self.proposals = [], [], []

    def step(self, objective=None, **changes):
        """Score and step; an ``objective`` or other arguments take the place of the real ones."""
        found, statistics, em_parameters = scored(self.parameters, self.maximiser)
        arguments = {"objective": found if objective is None else objective} | {
            "statistics": statistics,
            "em_parameters": em_parameters,
        }
        arguments |= changes
        self.proposals.append(self.quasi_newton.proposal)
        result = accelerated_step(self.quasi_newton, self.maximiser, self.parameters, **arguments)
        self.objectives.append(arguments["objective"])
        self.steps.append(result)
        self.quasi_newton, self.parameters = result.quasi_newton, result.parameters
        return result

    def until(self, kind, most=30):
        """Go on until such a step is scored next."""
        for _ in range(most):
            if self.quasi_newton.proposal.kind is kind:
                return self
            self.step()
        raise AssertionError(f"no step was {kind} within {most}")

    def taken(self, n):
        for _ in range(n):
            self.step()
        return self


def same(a, b, limit=1e-12):
    for name in ("weights", "means", "covariances"):
        left, right = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        assert np.abs(left - right).max() <= limit * np.abs(right).max(), name


class TestDirection:
    def vectors(self, seed, n=12, m=5):
        rng = np.random.default_rng(seed)
        root = rng.normal(size=(n, n))
        curvature = root @ root.T / n + np.diag(rng.uniform(0.1, 1, n))
        steps = rng.normal(size=(m, n))
        return rng.normal(size=n), steps, steps @ curvature + 0.01 * rng.normal(size=(m, n))

    def dense(self, gradient, steps, decreases):
        inverse = np.eye(len(gradient))
        for s, y in zip(steps, decreases, strict=True):
            if s @ y <= MIN_CURVATURE * np.linalg.norm(s) * np.linalg.norm(y):
                continue
            left = np.eye(len(s)) - np.outer(s, y) / (s @ y)
            inverse = left @ inverse @ left.T + np.outer(s, s) / (s @ y)
        return inverse @ gradient

    def found(self, gradient, steps, decreases):
        coefficients, slope = direction(gradient, list(steps), list(decreases))
        step = coefficients @ np.array([gradient, *steps, *decreases])
        assert slope == pytest.approx(step @ gradient, rel=1e-9)
        return step

    @pytest.mark.parametrize("m", [0, 1, 2, 5, 10])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_it_is_that_of_dense_bfgs(self, m, seed):
        given = self.vectors(seed, m=m)
        np.testing.assert_allclose(self.found(*given), self.dense(*given), rtol=1e-9, atol=1e-9)

    def test_pairs_without_positive_curvature_are_left_out(self):
        gradient, steps, decreases = self.vectors(3)
        decreases[1] = -decreases[1]
        steps[3] = 0.0
        kept = [0, 2, 4]
        expected = self.dense(gradient, steps[kept], decreases[kept])
        np.testing.assert_allclose(self.found(gradient, steps, decreases), expected, rtol=1e-9, atol=1e-9)

    def test_exact_pairs_of_a_quadratic_in_conjugate_directions_give_newtons_step(self):
        gradient, steps, _ = self.vectors(4, n=5, m=5)
        curvature = np.diag([1.0, 0.5, 0.2, 0.05, 0.01])
        for i in range(5):  # conjugate, by Gram and Schmidt
            for j in range(i):
                steps[i] -= (steps[i] @ curvature @ steps[j]) / (steps[j] @ curvature @ steps[j]) * steps[j]
        found = self.found(gradient, steps, steps @ curvature)
        np.testing.assert_allclose(found, np.linalg.solve(curvature, gradient), rtol=1e-8)


@STRUCTURES
def test_without_memory_the_steps_are_those_of_em(covariance_type):
    theta = theta_of(started(covariance_type))
    run = Run(started(covariance_type), memory=0)
    for _ in range(12):
        step = run.step()
        theta = naive.m_step(ROWS, np.ones(len(ROWS)), naive.e_step(ROWS, theta), covariance_type, 0.0)
        found = theta_of(step.parameters)
        for name in ("weights", "means", "covariances"):
            np.testing.assert_allclose(getattr(found, name), getattr(theta, name), rtol=1e-10, atol=1e-10)
        assert step.accepted
        assert step.quasi_newton.proposal.kind is Kind.EM_STEP
        assert not step.quasi_newton.pairs


@STRUCTURES
def test_accepted_steps_never_lower_the_objective_and_end_where_em_ends_after_fewer(covariance_type):
    run = Run(started(covariance_type)).taken(100)
    kept = [value for value, step in zip(run.objectives, run.steps, strict=True) if step.accepted]
    assert np.diff(kept).min() >= -1e-11
    assert any(proposal.kind is Kind.EXTRAPOLATED for proposal in run.proposals)
    em_parameters = Run(started(covariance_type), memory=0).taken(100)
    assert kept[-1] >= em_parameters.objectives[-1] - 1e-12
    further = Run(run.quasi_newton.point.parameters, memory=0).taken(100)
    assert further.objectives[-1] - kept[-1] <= 1e-9


@STRUCTURES
def test_the_gap_is_that_to_the_end_once_it_is_near(covariance_type):
    run = Run(started(covariance_type)).taken(80)
    end = max(run.objectives)
    for objective, step in zip(run.objectives, run.steps, strict=True):
        gap = end - objective
        if step.accepted and 1e-9 < gap < 1e-6:
            assert gap / 30 <= step.gap <= 30 * gap


def test_what_is_climbed_stays_at_the_m_step_of_its_moments():
    """The proposal's parameters are the M-step of its moments, whatever they were moved about."""
    run = Run(started("full"))
    for _ in range(25):
        step = run.step()
        space = MomentSpace(run.maximiser.structure, step.quasi_newton.origins)
        same(
            run.maximiser.parameters(space, step.quasi_newton.proposal.moments), step.parameters, limit=1e-11
        )
        if len(run.steps) > 1:  # before, only what the point was given by is known
            known = run.maximiser.parameters(space, step.quasi_newton.point.moments)
            same(known, step.quasi_newton.point.parameters, limit=1e-9)


class TestRefusal:
    @pytest.fixture
    def run(self):
        return Run(started("full")).until(Kind.EXTRAPOLATED)

    @pytest.mark.parametrize("objective", [-math.inf, math.nan, "lower"])
    def test_a_fall_is_refused_and_the_next_step_is_shorter_from_the_same_point(self, run, objective):
        before = run.quasi_newton
        if objective == "lower":
            objective = before.point.objective - 1e-9
        step = run.step(objective)
        assert not step.accepted
        assert step.quasi_newton.point.parameters is before.point.parameters
        assert step.quasi_newton.point.objective == before.point.objective
        own = MomentSpace(run.maximiser.structure, before.origins).standardised(
            before.point.gradient, before.point.parameters
        )
        assert step.quasi_newton.proposal.length <= max(0.5 * before.proposal.length, np.linalg.norm(own))
        assert step.quasi_newton.radius == step.quasi_newton.proposal.length

    @pytest.mark.parametrize("times", [8.0, 16.0])
    def test_the_shorter_step_goes_as_far_as_the_objective_rises(self, run, times):
        """Where that is, SciPy's search along the step says; the cubic is near it."""
        run.taken(6)
        space, point = MomentSpace(run.maximiser.structure, run.quasi_newton.origins), run.quasi_newton.point
        step = times * (run.quasi_newton.proposal.moments - point.moments)

        def fall(share):
            found = run.maximiser.parameters(space, point.moments + share * step)
            return -scored(found, run.maximiser)[0]

        best = optimize.minimize_scalar(fall, bounds=(0, 1), method="bounded", options={"xatol": 1e-6}).x
        assert best < 0.5
        proposal = Proposal(point.moments + step, Kind.EXTRAPOLATED, times * run.quasi_newton.proposal.length)
        run.quasi_newton = replace(run.quasi_newton, proposal=proposal, pairs=())
        run.parameters = run.maximiser.parameters(space, proposal.moments)
        shorter = run.step().quasi_newton.proposal
        assert shorter.kind is Kind.EXTRAPOLATED
        assert best / 1.5 < shorter.length / proposal.length < best * 1.5
        assert run.step().accepted

    def test_a_fall_by_rounding_alone_is_accepted(self, run):
        objective = run.quasi_newton.point.objective
        assert run.step(objective - 1e-14 * abs(objective)).accepted

    def test_what_a_refused_step_found_is_learnt(self, run):
        before = run.quasi_newton
        step = run.step(before.point.objective - 1.0)
        assert step.quasi_newton.pairs[:-1] == before.pairs
        learnt = step.quasi_newton.pairs[-1]
        np.testing.assert_array_equal(learnt.step, before.proposal.moments - before.point.moments)

    def test_refused_again_and_again_it_comes_to_ems_own_step_which_is_accepted(self, run):
        point = run.quasi_newton.point
        for _ in range(60):
            if run.quasi_newton.proposal.kind is Kind.EM_STEP:
                break
            assert not run.step(point.objective - 1.0).accepted
        assert run.quasi_newton.proposal.kind is Kind.EM_STEP
        space = MomentSpace(run.maximiser.structure, run.quasi_newton.origins)
        same(run.parameters, run.maximiser.parameters(space, point.response))
        assert run.step(point.objective - 5.0).accepted

    @pytest.mark.parametrize("kind", [Kind.EM_STEP, Kind.GIVEN])
    def test_a_plain_step_is_accepted_however_much_it_loses(self, kind):
        run = Run(started("full")).taken(3)
        run.quasi_newton = replace(run.quasi_newton, proposal=replace(run.quasi_newton.proposal, kind=kind))
        assert run.step(run.quasi_newton.point.objective - 100.0).accepted

    def test_rows_that_determine_no_mixture_send_an_extrapolation_back(self, run):
        point = run.quasi_newton.point
        step = run.step(statistics=None, em_parameters=None)
        assert not step.accepted
        assert step.quasi_newton.point is point
        assert not math.isnan(step.gap)

    @pytest.mark.parametrize("at_the_start", [True, False])
    def test_after_a_plain_step_to_them_or_at_the_start_nothing_is_left_to_try(self, at_the_start):
        run = Run(started("full"))
        if not at_the_start:
            run.until(Kind.EM_STEP)
        before = run.parameters if at_the_start else run.quasi_newton.point.parameters
        step = run.step(em_parameters=None, **({"statistics": None} if at_the_start else {}))
        assert not step.accepted
        assert math.isnan(step.gap)
        assert step.parameters is before

    def test_a_refused_cycle_is_followed_by_a_shorter_step_or_ems_own(self, run):
        run.quasi_newton = replace(
            run.quasi_newton, proposal=replace(run.quasi_newton.proposal, kind=Kind.CYCLE)
        )
        point, proposal = run.quasi_newton.point, run.quasi_newton.proposal
        step = run.step(point.objective - 1.0)
        assert not step.accepted
        assert step.quasi_newton.proposal.kind in (Kind.EM_STEP, Kind.EXTRAPOLATED)
        assert step.quasi_newton.proposal.length < proposal.length
        assert step.quasi_newton.point is point


class TestMemory:
    @pytest.mark.parametrize("memory", [1, 3])
    def test_no_more_pairs_are_kept_than_it_says_and_they_are_the_last(self, memory):
        run = Run(started("full"), memory=memory)
        for taken in range(1, 8):
            before = run.quasi_newton
            step = run.step()
            assert len(step.quasi_newton.pairs) == min(
                memory, max(0, taken - 2)
            )  # the first gradient is unknown
            if step.quasi_newton.pairs:
                space = MomentSpace(run.maximiser.structure, before.origins)
                step_taken = space.moved(
                    before.proposal.moments - before.point.moments, step.quasi_newton.origins
                )
                np.testing.assert_allclose(
                    step.quasi_newton.pairs[-1].step, step_taken, rtol=1e-9, atol=1e-12
                )

    def test_pairs_are_a_step_and_the_gradients_decrease_along_it(self):
        """Both from E-steps at the two ends, with moments about the same origins."""
        run = Run(started("full")).taken(4)
        start = run.quasi_newton.point.parameters
        end = run.parameters
        pair = run.step().quasi_newton.pairs[-1]
        space = MomentSpace(run.maximiser.structure, run.quasi_newton.origins)

        def moments(parameters, responsibilities):
            found = space.of(statistics_of(run.maximiser.structure, ROWS, responsibilities))
            return found / len(ROWS)

        def of_mixture(parameters):  # moments whose M-step is Θ
            covariances = np.asarray(parameters.covariances)
            shifts = parameters.means - space.origins
            seconds = covariances + shifts[:, :, None] * shifts[:, None, :]
            pi = parameters.weights
            return np.concatenate([pi, (pi[:, None] * shifts).ravel(), (pi[:, None, None] * seconds).ravel()])

        responses = [moments(p, naive.e_step(ROWS, theta_of(p))) for p in (start, end)]
        points = [of_mixture(p) for p in (start, end)]
        np.testing.assert_allclose(pair.step, points[1] - points[0], atol=1e-10)
        decrease = (responses[0] - points[0]) - (responses[1] - points[1])
        np.testing.assert_allclose(pair.decrease, decrease, atol=1e-10)

    def test_it_is_ten_or_less_where_moments_are_large(self):
        assert memory_for(structure_named("full"), 3, 4) == 10
        assert memory_for(structure_named("diag"), 10, 784) == 10
        assert memory_for(structure_named("full"), 10, 784) == 3
        size = 10 * (1 + 300 + 300**2)
        assert memory_for(structure_named("full"), 10, 300) == max(3, 2**26 // (16 * size))


@pytest.mark.parametrize("reg_covar", [1e-6, 1e-2, 1.0])
@STRUCTURES
def test_with_reg_covar_it_ends_at_the_fixed_point_of_regularised_em(covariance_type, reg_covar):
    """Such a step may lower the likelihood: it is accepted, and nothing loops."""
    run = Run(started(covariance_type), reg_covar=reg_covar).taken(100)
    point = run.quasi_newton.point.parameters
    same(scored(point, run.maximiser)[2], point, limit=1e-4)


def test_an_extrapolation_is_not_singular_without_reg_covar():
    maximiser = Maximiser(structure_named("full"), 1e-2, 1, 10)
    parameters = started("full")
    space = MomentSpace(maximiser.structure, parameters.means)
    moments = space.of(statistics_of(maximiser.structure, ROWS, naive.e_step(ROWS, theta_of(parameters))))
    space.split(moments)[2][1] -= 2 * np.eye(D) * np.trace(space.split(moments)[2][1])
    assert maximiser.extrapolated(space, moments) is None
    flat = space.of(statistics_of(maximiser.structure, ROWS * [1, 0], np.full((len(ROWS), K), 1 / K)))
    assert maximiser.parameters(space, flat) is not None
    assert maximiser.extrapolated(space, flat) is None


class TestCycle:
    def test_its_first_step_is_ems_own_where_nothing_is_remembered(self):
        run = Run(started("full")).taken(2)
        quasi_newton = replace(run.quasi_newton, pairs=())
        step = begin_cycle(quasi_newton, run.maximiser, 0.0)
        space = MomentSpace(run.maximiser.structure, quasi_newton.origins)
        same(step.parameters, run.maximiser.parameters(space, quasi_newton.point.response))

    @pytest.mark.parametrize("damping", [0.02, 1.0])
    def test_damping_shortens_the_gradient(self, damping):
        run = Run(started("full")).taken(3)
        point = run.quasi_newton.point
        begun = begin_cycle(run.quasi_newton, run.maximiser, damping).quasi_newton.point
        np.testing.assert_allclose(begun.gradient, point.gradient / (1 + damping), atol=1e-14)
        assert begun.objective == pytest.approx(point.objective / (1 + damping))
        np.testing.assert_array_equal(begun.moments, point.moments)

    @pytest.mark.parametrize("damping", [0.02, 1.0])
    def test_what_is_remembered_has_the_curvature_of_the_damped_objective_in_it_alone(self, damping):
        """A damped gradient is, by its definition, (response + λ · that of the point) / (1 + λ) − moments."""
        run = Run(started("full")).taken(4)
        outer = run.quasi_newton
        about, pair = outer.point.moments, outer.pairs[-1]
        begun = begin_cycle(outer, run.maximiser, damping).quasi_newton

        def damped(moments, response):
            return (response + damping * about) / (1 + damping) - moments

        # The pair's step led to the point; its decrease is that of the gradients at both ends.
        before = outer.point.moments - pair.step
        response = before + outer.point.gradient + pair.decrease
        expected = damped(before, response) - damped(outer.point.moments, outer.point.response)
        np.testing.assert_allclose(begun.pairs[-1].decrease, expected, rtol=1e-9, atol=1e-13)
        back = end_cycle(begun, outer, run.maximiser, started("full", seed=9), damping)
        np.testing.assert_allclose(back.quasi_newton.pairs[-1].decrease, pair.decrease, rtol=1e-9, atol=1e-13)

    def test_on_all_rows_it_leads_to_what_is_scored_next_with_its_gain_predicted(self):
        run = Run(started("full")).taken(3)
        outer = run.quasi_newton
        begun = begin_cycle(outer, run.maximiser, 0.0)
        inner = Run(started("full"))
        inner.quasi_newton, inner.parameters = begun.quasi_newton, begun.parameters
        inner.taken(6)
        step = end_cycle(inner.quasi_newton, outer, run.maximiser, inner.parameters, 0.0)
        assert step.accepted
        assert step.quasi_newton.proposal.kind is Kind.CYCLE
        assert step.parameters is inner.parameters
        assert step.quasi_newton.point is outer.point
        assert step.quasi_newton.proposal.predicted > 0
        assert len(step.quasi_newton.pairs) == len(inner.quasi_newton.pairs)
        moved = MomentSpace(run.maximiser.structure, inner.quasi_newton.origins).moved(
            inner.quasi_newton.pairs[-1].step, outer.origins
        )
        np.testing.assert_array_equal(step.quasi_newton.pairs[-1].step, moved)
        run.quasi_newton, run.parameters = step.quasi_newton, step.parameters
        after = run.step()
        assert after.accepted
        assert run.objectives[-1] > outer.point.objective

    def test_from_a_point_whose_gradient_is_unknown_it_leads_to_what_is_scored_next(self):
        """As from given parameters: nothing can be predicted there, and a fall would be refused."""
        run = Run(started("full")).taken(1)
        assert not run.quasi_newton.point.known
        begun = begin_cycle(run.quasi_newton, run.maximiser, 0.0)
        inner = Run(started("full"))
        inner.quasi_newton, inner.parameters = begun.quasi_newton, begun.parameters
        inner.taken(6)
        step = end_cycle(inner.quasi_newton, run.quasi_newton, run.maximiser, inner.parameters, 0.0)
        assert step.quasi_newton.proposal.kind is Kind.CYCLE
        run.quasi_newton, run.parameters = step.quasi_newton, step.parameters
        after = run.step()
        assert after.accepted
        assert len(after.quasi_newton.pairs) == len(step.quasi_newton.pairs)

    def test_one_that_should_bring_nothing_gives_way_to_a_step_of_all_rows(self):
        run = Run(started("full")).taken(3)
        outer = run.quasi_newton
        worse = started("full", seed=9)
        inner = replace(outer, proposal=Proposal(outer.point.moments, Kind.EM_STEP), pairs=())
        step = end_cycle(inner, outer, run.maximiser, worse, 0.0)
        gradient = outer.point.gradient
        space = MomentSpace(run.maximiser.structure, outer.origins)
        gains = [space.expected_log_density(gradient, p) for p in (worse, outer.point.parameters)]
        assert gains[0] < gains[1]
        assert step.quasi_newton.proposal.kind is not Kind.CYCLE
        same(step.parameters, run.maximiser.parameters(space, outer.point.response))


def test_with_a_new_objective_pairs_are_kept_and_nothing_is_compared():
    run = Run(started("full")).until(Kind.EXTRAPOLATED)
    quasi_newton = run.quasi_newton.with_new_objective()
    assert quasi_newton.pairs == run.quasi_newton.pairs
    assert all(isinstance(pair, Pair) for pair in quasi_newton.pairs)
    assert quasi_newton.point is None
    assert quasi_newton.proposal.kind is Kind.GIVEN
    assert quasi_newton.radius == math.inf
    run.quasi_newton = quasi_newton
    assert run.step(-1e9).accepted
