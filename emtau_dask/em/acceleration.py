"""Quasi-Newton steps between the E-step and the M-step, and when they are refused.

An EM step is a gradient step of length 1 in the metric of the complete data's Fisher information.
Limited-memory BFGS (Liu and Nocedal 1989) in that metric starts from the EM step. It learns from the last
steps in which directions EM is slow. Jamshidian and Jennrich (1997, method QN2) do the same in the
coordinates of the parameters. Here moments are extrapolated, and the M-step turns them into parameters.
A step is accepted if the objective does not fall. An EM step is always accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from emtau_dask.em.moments import MomentSpace
from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters, m_step
from emtau_dask.mixture.statistics import SufficientStatistics

ROUNDING = 1e-13
"""Maximum difference between two objectives that counts as rounding, relative to them."""
MIN_CURVATURE = 1e-8
"""Minimum cosine of a step and the change of the gradient along it; other pairs are not used."""
GOOD_GAIN, GROWTH = 0.25, 2.0
"""The radius grows by the factor 2 if a step gains at least a quarter of the predicted gain."""
MIN_SHARE, MAX_SHARE = 0.01, 0.5
"""Minimum and maximum share of a refused step that is tried next."""
SMALL_PART = 0.5
"""Maximum part of ``reg_covar`` in an eigenvalue of a covariance that cannot be singular without it."""
MAX_HALVINGS = 6
"""Maximum halvings of a step whose M-step is singular."""
MAX_MEMORY, MIN_MEMORY, MAX_MEMORY_BYTES = 10, 3, 2**26
"""Maximum and minimum number of steps that are kept, and maximum bytes of their moments."""


class Kind(Enum):
    """How the parameters that are scored next were found; commits store the values."""

    GIVEN = "given"
    EM_STEP = "plain"
    EXTRAPOLATED = "extrapolated"
    CYCLE = "cycle"


REFUSABLE = (Kind.EXTRAPOLATED, Kind.CYCLE)


@dataclass(frozen=True, eq=False)
class Pair:
    """A step of the moments, and the decrease of the gradient along it."""

    step: Floats
    decrease: Floats


@dataclass(frozen=True, eq=False)
class EvaluatedPoint:
    """Parameters after an E-step: Θ is the M-step of ``moments``, and EM maps these to ``response``.

    Both moments are means over the rows, and ``objective`` is in nats per row.
    """

    parameters: MixtureParameters
    objective: float
    moments: Floats
    response: Floats

    @property
    def gradient(self) -> Floats:
        """The gradient of the objective with respect to natural parameters."""
        return self.response - self.moments

    @property
    def known(self) -> bool:
        """Whether ``moments`` are known; otherwise they are a copy of ``response``."""
        return bool(self.gradient.any())


@dataclass(frozen=True, eq=False)
class Proposal:
    """The step to the parameters that are scored next.

    Attributes
    ----------
    moments : ndarray or None
        The parameters are the M-step of these moments; None if the moments are not known.
    kind : Kind
    length : float
        Length of the step to these parameters, in the metric.
    predicted : float
        Predicted gain of the step, nats per row.
    """

    moments: Floats | None = None
    kind: Kind = Kind.GIVEN
    length: float = 0.0
    predicted: float = 0.0


@dataclass(frozen=True, eq=False)
class QuasiNewtonState:
    """The state of quasi-Newton steps between two passes.

    Attributes
    ----------
    origins : ndarray of shape (K, d)
        Origins of all moments of this record.
    pairs : tuple of Pair
        The oldest first.
    point : EvaluatedPoint or None
        The last accepted point of the current objective.
    proposal : Proposal
    radius : float
        Maximum length of a step, in the metric; an EM step may be longer.
    """

    origins: Floats
    pairs: tuple[Pair, ...] = ()
    point: EvaluatedPoint | None = None
    proposal: Proposal = Proposal()
    radius: float = math.inf

    def with_new_objective(self) -> QuasiNewtonState:
        """Return the state for other rows, and so another objective: only the pairs are kept."""
        return replace(self, point=None, proposal=replace(self.proposal, kind=Kind.GIVEN), radius=math.inf)


@dataclass(frozen=True, eq=False)
class AcceleratedStep:
    """A step: what is remembered from now on, the parameters to be scored next, and the estimated gap.

    Attributes
    ----------
    quasi_newton : QuasiNewtonState
    parameters : MixtureParameters
    accepted : bool
        Whether the parameters that were scored are kept.
    gap : float
        Estimated nats per row between the accepted point and a stationary point: half of the product of
        gradient and quasi-Newton step (the Newton decrement), at least that of the EM step. NaN if there
        is no estimate.
    """

    quasi_newton: QuasiNewtonState
    parameters: MixtureParameters
    accepted: bool
    gap: float


@dataclass(frozen=True, eq=False)
class Maximiser:
    """The M-step of moments; ``memory`` is the number of steps that are kept, with 0 every step is EM's."""

    structure: CovarianceStructure
    reg_covar: float
    threads: int
    memory: int

    def parameters(self, space: MomentSpace, moments: Floats) -> MixtureParameters | None:
        """Return the M-step of moments; None if it is singular."""
        statistics = space.statistics(moments)
        if statistics is None:
            return None
        try:
            return m_step(statistics, self.structure, self.reg_covar, self.threads)
        except SingularComponentError:
            return None

    def extrapolated(self, space: MomentSpace, moments: Floats) -> MixtureParameters | None:
        """Return the M-step of moments; None if it would be singular without ``reg_covar``.

        It is not if ``reg_covar`` is at most half of every eigenvalue of the covariances, of whose inverses
        the sum of squares of the factors bounds the eigenvalues.
        """
        produced = self.parameters(space, moments)
        if not self.reg_covar or produced is None:
            return produced
        factors = produced.precisions_cholesky
        if self.reg_covar * float(np.vdot(factors, factors)) <= SMALL_PART:
            return produced
        return None if replace(self, reg_covar=0.0).parameters(space, moments) is None else produced


def rounding(objective: float) -> float:
    """Return the maximum difference between objectives that counts as rounding, nats per row."""
    return ROUNDING * max(1.0, abs(objective))


def memory_for(structure: CovarianceStructure, n_components: int, n_features: int) -> int:
    """Return the number of steps that are kept: 10, or fewer (at least 3) if their moments are large."""
    size = MomentSpace(structure, np.empty((n_components, n_features))).size
    return max(MIN_MEMORY, min(MAX_MEMORY, MAX_MEMORY_BYTES // (16 * size)))


def direction(
    gradient: Floats, steps: Sequence[Floats] | Floats, decreases: Sequence[Floats] | Floats
) -> tuple[Floats, float]:
    """Return the coefficients of the quasi-Newton step by L-BFGS, two loops (Nocedal and Wright, alg. 7.4).

    All vectors are standardised. The step is ``c_0 · gradient + Σ c_i · step_i + Σ c_{m+i} · decrease_i``;
    also returned is its product with the gradient.
    """
    n, m = 1 + 2 * len(steps), len(steps)
    vectors = np.array([gradient, *steps, *decreases])
    products = vectors @ vectors.T
    lengths = np.sqrt(np.diag(products))
    step = np.zeros(n)
    step[0] = 1.0
    used = []
    for i in range(m):
        curvature = products[1 + i, 1 + m + i]
        if curvature > MIN_CURVATURE * lengths[1 + i] * lengths[1 + m + i]:
            used.append((1 + i, 1 + m + i, curvature))
    back = []
    for s, y, curvature in reversed(used):
        alpha = products[s] @ step / curvature
        step[y] -= alpha
        back.append(alpha)
    for (s, y, curvature), alpha in zip(used, reversed(back), strict=True):
        step[s] += alpha - products[y] @ step / curvature
    return step, float(products[0] @ step)


def accelerated_step(
    state: QuasiNewtonState,
    maximiser: Maximiser,
    parameters: MixtureParameters,
    objective: float,
    statistics: SufficientStatistics | None,
    em_parameters: MixtureParameters | None,
) -> AcceleratedStep:
    """Return the next step after an E-step under ``parameters``.

    Parameters
    ----------
    state : QuasiNewtonState
    maximiser : Maximiser
    parameters : MixtureParameters
        Those that ``state.proposal`` describes.
    objective : float
        At these parameters, nats per row.
    statistics : SufficientStatistics or None
        Of all rows under these parameters; None if no mixture has such statistics.
    em_parameters : MixtureParameters or None
        The M-step of the statistics; None if it is singular.

    Returns
    -------
    AcceleratedStep
        If no step is left to try, the parameters are the last accepted ones (or the given ones), not
        accepted, and the gap is NaN.
    """
    space = MomentSpace(maximiser.structure, state.origins)
    scored = None
    if statistics is not None and em_parameters is not None:
        response = space.of(statistics)
        response /= response[: len(parameters.weights)].sum()
        moments = state.proposal.moments
        scored = EvaluatedPoint(parameters, objective, response if moments is None else moments, response)
    refused = scored is None or _refused(state, objective)
    if state.point is not None and scored is not None:
        state = replace(state, pairs=_pairs_with(state, scored, maximiser.memory))
    if refused and state.point is not None:
        return _shorter_step(space, state, maximiser, scored)
    if scored is None or em_parameters is None:
        return AcceleratedStep(state, parameters, False, math.nan)
    radius = state.radius
    proposal = state.proposal
    before = state.point if proposal.kind is Kind.EXTRAPOLATED else None
    if before is not None and objective - before.objective >= GOOD_GAIN * proposal.predicted:
        radius = max(radius, GROWTH * proposal.length)
    state = _with_origins(space, replace(state, point=scored, radius=radius), parameters.means)
    known = proposal.moments is not None
    return _next_step(
        MomentSpace(maximiser.structure, state.origins), state, maximiser, em_parameters, known=known
    )


def begin_cycle(state: QuasiNewtonState, maximiser: Maximiser, damping: float) -> AcceleratedStep:
    """Return the first step on weighted active rows, from the accepted point of all rows.

    At that point the objective of the weighted rows equals that of all rows in value and gradient, but for
    the proximal term. Its weight is ``damping``, relative to all rows: that of the complete data expected at
    the point (see `docs/passes.md`).
    """
    space, point = MomentSpace(maximiser.structure, state.origins), state.point
    assert point is not None
    whole = 1.0 + damping
    response = (point.response + damping * point.moments) / whole
    point = replace(point, objective=point.objective / whole, response=response)
    em_parameters = maximiser.parameters(space, response)
    assert em_parameters is not None
    pairs = tuple(Pair(pair.step, (pair.decrease + damping * pair.step) / whole) for pair in state.pairs)
    return _next_step(space, replace(state, point=point, pairs=pairs), maximiser, em_parameters, known=True)


def end_cycle(
    inner: QuasiNewtonState,
    outer: QuasiNewtonState,
    maximiser: Maximiser,
    reached: MixtureParameters,
    damping: float,
) -> AcceleratedStep:
    """Return the step of all rows to ``reached``, the parameters at the end of a cycle.

    If no gain is predicted, it is the next step from the point before the cycle. Pairs that were found in the
    cycle are kept: their curvature is that of all rows up to sampling error.
    """
    assert outer.point is not None
    at = MomentSpace(maximiser.structure, outer.origins)
    state = replace(
        outer,
        pairs=tuple(
            Pair(
                _moved_from(inner, at, pair.step),
                _moved_from(inner, at, (1.0 + damping) * pair.decrease - damping * pair.step),
            )
            for pair in inner.pairs
        ),
    )
    point, moments = outer.point, inner.proposal.moments
    assert moments is not None
    predicted = _decrement(at, point, reached)
    if (predicted > 0 or not point.known) and not _equal(reached, point.parameters):
        moments = _moved_from(inner, at, moments)
        length = float(np.linalg.norm(at.standardised(moments - point.moments, point.parameters)))
        state = replace(state, proposal=Proposal(moments, Kind.CYCLE, length, predicted))
        return AcceleratedStep(state, reached, True, predicted)
    em_parameters = maximiser.parameters(at, point.response)
    assert em_parameters is not None
    return _next_step(at, state, maximiser, em_parameters, known=True)


def _equal(a: MixtureParameters, b: MixtureParameters) -> bool:
    pairs = ((a.weights, b.weights), (a.means, b.means), (a.covariances, b.covariances))
    return all(np.array_equal(one, other) for one, other in pairs)


def _moved_from(inner: QuasiNewtonState, space: MomentSpace, moments: Floats) -> Floats:
    return MomentSpace(space.structure, inner.origins).moved(moments, space.origins)


def _refused(state: QuasiNewtonState, objective: float) -> bool:
    if state.point is None or state.proposal.kind not in REFUSABLE:
        return False
    before = state.point.objective
    return not objective >= before - rounding(before)


def _pairs_with(state: QuasiNewtonState, scored: EvaluatedPoint, memory: int) -> tuple[Pair, ...]:
    before = state.point
    assert before is not None
    if not before.known:
        return state.pairs
    pair = Pair(scored.moments - before.moments, before.gradient - scored.gradient)
    return (*state.pairs, pair)[-memory:] if memory else ()


def _shorter_step(
    space: MomentSpace, state: QuasiNewtonState, maximiser: Maximiser, scored: EvaluatedPoint | None
) -> AcceleratedStep:
    """Return a shorter step from the accepted point, or its EM step if that is about as long."""
    point, proposal = state.point, state.proposal
    assert point is not None
    em_parameters = maximiser.parameters(space, point.response)
    if em_parameters is None or proposal.kind is Kind.EM_STEP:
        # No mixture fits the statistics after the EM step: nothing is left to try here.
        return AcceleratedStep(
            replace(state, proposal=Proposal(point.moments)), point.parameters, False, math.nan
        )
    assert proposal.moments is not None
    step = proposal.moments - point.moments
    share = MAX_SHARE if scored is None else _best_share(space, point, scored, step)
    own = float(np.linalg.norm(space.standardised(point.gradient, point.parameters)))
    gain = _decrement(space, point, em_parameters)
    moments = point.moments + share * step
    produced = maximiser.extrapolated(space, moments) if share * proposal.length > own else None
    if produced is None:
        em_step = replace(state, proposal=Proposal(point.response, Kind.EM_STEP, own, gain), radius=own)
        return AcceleratedStep(em_step, em_parameters, False, gain)
    predicted = _decrement(space, point, produced)
    shorter = Proposal(moments, Kind.EXTRAPOLATED, share * proposal.length, predicted)
    return AcceleratedStep(
        replace(state, proposal=shorter, radius=shorter.length), produced, False, max(gain, predicted)
    )


def _decrement(space: MomentSpace, point: EvaluatedPoint, produced: MixtureParameters) -> float:
    """Return half of the product of the gradient with a step of the natural parameters."""
    after = space.expected_log_density(point.gradient, produced)
    return 0.5 * (after - space.expected_log_density(point.gradient, point.parameters))


def _best_share(space: MomentSpace, point: EvaluatedPoint, refused: EvaluatedPoint, step: Floats) -> float:
    """Return the share of a refused step at which the objective is largest.

    It is the maximum of the cubic through both objectives and both slopes (Nocedal and Wright 2006,
    eq. 3.59), between `MIN_SHARE` and `MAX_SHARE`.
    """
    first, last = _slope(space, point, step), _slope(space, refused, step)
    bend = 3.0 * (point.objective - refused.objective) + first + last
    square = bend**2 - first * last
    if not (first > 0 and square >= 0 and math.isfinite(square)):
        return MAX_SHARE
    root = math.sqrt(square)
    return min(max(1.0 - (root + bend - last) / (first - last + 2.0 * root), MIN_SHARE), MAX_SHARE)


def _slope(space: MomentSpace, point: EvaluatedPoint, step: Floats) -> float:
    """Return the first-order change of the objective at a point along a step."""
    there = MomentSpace(space.structure, point.parameters.means)

    def standard(moments: Floats) -> Floats:
        return there.standardised(space.moved(moments, there.origins), point.parameters)

    return float(standard(point.gradient) @ standard(step))


def _with_origins(space: MomentSpace, state: QuasiNewtonState, origins: Floats) -> QuasiNewtonState:
    """Return the same with all moments about other origins."""
    point = state.point
    assert point is not None
    known = (part for pair in state.pairs for part in (pair.step, pair.decrease))
    moments, response, *parts = space.moved(np.array([point.moments, point.response, *known]), origins)
    point = replace(point, moments=moments, response=response)
    pairs = tuple(Pair(*both) for both in zip(parts[::2], parts[1::2], strict=True))
    return replace(state, origins=origins, pairs=pairs, point=point)


def _next_step(
    space: MomentSpace,
    state: QuasiNewtonState,
    maximiser: Maximiser,
    em_parameters: MixtureParameters,
    *,
    known: bool,
) -> AcceleratedStep:
    """Return the step from the accepted point; it is EM's if the gradient there is not known."""
    point = state.point
    assert point is not None
    gradient = point.gradient
    theta = point.parameters

    standard = space.standardised(gradient, theta)
    own = float(np.linalg.norm(standard))
    gain = _decrement(space, point, em_parameters) if known else math.nan
    em_step = replace(state, proposal=Proposal(point.response, Kind.EM_STEP, own, gain))
    if not known or not state.pairs:
        return AcceleratedStep(em_step, em_parameters, True, gain)
    m = len(state.pairs)
    vectors = np.array([pair.step for pair in state.pairs] + [pair.decrease for pair in state.pairs])
    standards = space.standardised(vectors, theta)
    coefficients, slope = direction(standard, standards[:m], standards[m:])
    if not slope > 0:
        return AcceleratedStep(em_step, em_parameters, True, gain)
    step = np.tensordot(coefficients, np.array([gradient, *vectors]), axes=1)
    length = float(np.linalg.norm(space.standardised(step, theta)))
    share = min(1.0, max(state.radius, own) / length) if length > 0 else 1.0
    if share * length <= own * (1 + 1e-7):
        return AcceleratedStep(em_step, em_parameters, True, max(gain, 0.5 * slope))
    for _ in range(MAX_HALVINGS):
        moments = point.moments + share * step
        produced = maximiser.extrapolated(space, moments)
        if produced is not None:
            break
        share *= 0.5
    else:
        return AcceleratedStep(em_step, em_parameters, True, gain)
    predicted = _decrement(space, point, produced)
    proposal = Proposal(moments, Kind.EXTRAPOLATED, share * length, predicted)
    return AcceleratedStep(replace(state, proposal=proposal), produced, True, max(gain, predicted / share))
