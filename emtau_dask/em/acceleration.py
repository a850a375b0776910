"""Quasi-Newton steps between the E-step and the M-step, and when they are refused.

The fixed-point map of EM is a gradient step of length 1 in the metric of the complete data's Fisher
information. Limited-memory BFGS (Liu and Nocedal 1989) in that metric begins from it, and learns from the
last steps in which directions EM is slow. (Jamshidian and Jennrich 1997, method QN2, is the same idea in
the parameters' own coordinates.) An extrapolation is made of moments, so that the M-step stays the only way
to parameters. A step is accepted where the objective does not fall; one of the M-step alone always is.
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

FALL = 1e-13
"""Largest difference between objectives that is taken for rounding, relative to them."""
LEAST_CURVATURE = 1e-8
"""Smallest cosine of a step and the change of the gradient along it that is learnt from."""
TRUSTED, LEAST, SHRINK, GROW = 0.25, 0.01, 0.5, 2.0
"""The radius grows where a gain is at least this part of the predicted one. Refused steps shrink so far."""
HALVINGS = 6
MEMORY, LEAST_MEMORY, MEMORY_BYTES = 10, 3, 2**26


class Kind(Enum):
    """How the parameters that are scored next were found."""

    GIVEN = "given"
    PLAIN = "plain"
    EXTRAPOLATED = "extrapolated"
    CYCLE = "cycle"


REFUSABLE = (Kind.EXTRAPOLATED, Kind.CYCLE)


@dataclass(frozen=True, eq=False)
class Pair:
    """A step of the moments, and by how much the gradient decreased along it."""

    step: Floats
    decrease: Floats


@dataclass(frozen=True, eq=False)
class Point:
    """An accepted point of an objective: Θ is the M-step of ``moments``, and EM maps them to ``response``.

    Both moments are those of one row, and ``objective`` is in nats per row.
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
        """Whether the moments are; where they are not, the response is in their place."""
        return bool(self.gradient.any())


@dataclass(frozen=True, eq=False)
class Trial:
    """Parameters to be scored next.

    Attributes
    ----------
    moments : ndarray or None
        Whose M-step they are; None where that is not known.
    kind : Kind
    length : float
        Of the step that led there, in the metric.
    predicted : float
        Gain that the step should bring, nats per row.
    """

    moments: Floats | None = None
    kind: Kind = Kind.GIVEN
    length: float = 0.0
    predicted: float = 0.0


@dataclass(frozen=True, eq=False)
class Ascent:
    """What quasi-Newton steps remember between two passes.

    Attributes
    ----------
    origins : ndarray of shape (K, d)
        Of all moments here.
    pairs : tuple of Pair
        The oldest first.
    point : Point or None
        The last accepted point of the objective that is climbed now.
    trial : Trial
    radius : float
        Longest step, in the metric, unless EM's own is longer.
    """

    origins: Floats
    pairs: tuple[Pair, ...] = ()
    point: Point | None = None
    trial: Trial = Trial()
    radius: float = math.inf

    def elsewhere(self) -> Ascent:
        """Return what is remembered where another objective is climbed from the same parameters."""
        return replace(self, point=None, trial=replace(self.trial, kind=Kind.GIVEN), radius=math.inf)


@dataclass(frozen=True, eq=False)
class Climb:
    """One step: the new state, the parameters to be scored next, and what was found.

    Attributes
    ----------
    ascent : Ascent
    parameters : MixtureParameters
    accepted : bool
        Whether the parameters that were scored are kept.
    gap : float
        Estimated nats per row between the accepted point and the objective's stationary point: half of the
        product of gradient and quasi-Newton step (the Newton decrement), at least that of EM's own step.
        NaN where there is no estimate.
    """

    ascent: Ascent
    parameters: MixtureParameters
    accepted: bool
    gap: float


@dataclass(frozen=True, eq=False)
class Maximiser:
    """The M-step of moments, with a memory of so many steps; 0 makes plain EM of it."""

    structure: CovarianceStructure
    reg_covar: float
    threads: int
    memory: int

    def parameters(self, space: MomentSpace, moments: Floats) -> MixtureParameters | None:
        """Return the M-step of moments; None where it is singular."""
        statistics = space.statistics(moments)
        if statistics is None:
            return None
        try:
            return m_step(statistics, self.structure, self.reg_covar, self.threads)
        except SingularComponentError:
            return None

    def extrapolated(self, space: MomentSpace, moments: Floats) -> MixtureParameters | None:
        """Return the M-step of moments; None where it is singular without ``reg_covar``."""
        if self.reg_covar and replace(self, reg_covar=0.0).parameters(space, moments) is None:
            return None
        return self.parameters(space, moments)


def rounding(objective: float) -> float:
    """Return the largest difference between objectives that is taken for rounding, nats per row."""
    return FALL * max(1.0, abs(objective))


def memory_for(structure: CovarianceStructure, n_components: int, n_features: int) -> int:
    """Return how many steps are remembered: 10, or fewer where their moments are large."""
    size = MomentSpace(structure, np.empty((n_components, n_features))).size
    return max(LEAST_MEMORY, min(MEMORY, MEMORY_BYTES // (16 * size)))


def direction(gradient: Floats, steps: Sequence[Floats], decreases: Sequence[Floats]) -> tuple[Floats, float]:
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
        if curvature > LEAST_CURVATURE * lengths[1 + i] * lengths[1 + m + i]:
            used.append((1 + i, 1 + m + i, curvature))
    back = []
    for s, y, curvature in reversed(used):
        alpha = products[s] @ step / curvature
        step[y] -= alpha
        back.append(alpha)
    for (s, y, curvature), alpha in zip(used, reversed(back), strict=True):
        step[s] += alpha - products[y] @ step / curvature
    return step, float(products[0] @ step)


def climb(
    ascent: Ascent,
    maximiser: Maximiser,
    parameters: MixtureParameters,
    objective: float,
    statistics: SufficientStatistics | None,
    plain: MixtureParameters | None,
) -> Climb:
    """Return the next step after an E-step under ``parameters``.

    Parameters
    ----------
    ascent : Ascent
    maximiser : Maximiser
    parameters : MixtureParameters
        Of ``ascent.trial``.
    objective : float
        At these parameters, nats per row.
    statistics : SufficientStatistics or None
        Of all rows under them; None where they are no statistics of a mixture.
    plain : MixtureParameters or None
        Their M-step; None where it is singular.

    Returns
    -------
    Climb
        Where nothing is left to try, the parameters are the last accepted ones (or the given ones), not
        accepted, and the gap is NaN.
    """
    space = MomentSpace(maximiser.structure, ascent.origins)
    scored = None
    if statistics is not None and plain is not None:
        response = space.of(statistics)
        response /= response[: len(parameters.weights)].sum()
        moments = ascent.trial.moments
        scored = Point(parameters, objective, response if moments is None else moments, response)
    refused = scored is None or _falls(ascent, objective)
    if ascent.point is not None and scored is not None:
        ascent = replace(ascent, pairs=_learnt(ascent, scored, maximiser.memory))
    if refused and ascent.point is not None:
        return _back(space, ascent, maximiser, scored)
    if scored is None or plain is None:
        return Climb(ascent, parameters, False, math.nan)
    radius = ascent.radius
    trial = ascent.trial
    before = ascent.point if trial.kind is Kind.EXTRAPOLATED else None
    if before is not None and objective - before.objective >= TRUSTED * trial.predicted:
        radius = max(radius, GROW * trial.length)
    ascent = _about(space, replace(ascent, point=scored, radius=radius), parameters.means)
    known = trial.moments is not None
    return _stepped(MomentSpace(maximiser.structure, ascent.origins), ascent, maximiser, plain, known=known)


def begin_cycle(ascent: Ascent, maximiser: Maximiser, damping: float) -> Climb:
    """Return the first step on a part of the rows that stands for all, from the accepted point of all rows.

    There the objective of the part has the value and the gradient of all rows', less what ``damping`` adds:
    it is the weight, in units of all rows, of the complete data expected at the accepted point (a proximal
    term; see `docs/passes.md`).
    """
    space, point = MomentSpace(maximiser.structure, ascent.origins), ascent.point
    assert point is not None
    whole = 1.0 + damping
    response = (point.response + damping * point.moments) / whole
    point = replace(point, objective=point.objective / whole, response=response)
    plain = maximiser.parameters(space, response)
    assert plain is not None
    pairs = tuple(Pair(pair.step, (pair.decrease + damping * pair.step) / whole) for pair in ascent.pairs)
    return _stepped(space, replace(ascent, point=point, pairs=pairs), maximiser, plain, known=True)


def end_cycle(
    inner: Ascent, outer: Ascent, maximiser: Maximiser, reached: MixtureParameters, damping: float
) -> Climb:
    """Return the step of all rows to where a cycle led; their own next step where it should bring nothing.

    The steps that were learnt from in the cycle are kept: their curvature is that of all rows but for the
    error of sampling.
    """
    assert outer.point is not None
    at = MomentSpace(maximiser.structure, outer.origins)
    back = replace(
        outer,
        pairs=tuple(
            Pair(
                _from(inner, at, pair.step),
                _from(inner, at, (1.0 + damping) * pair.decrease - damping * pair.step),
            )
            for pair in inner.pairs
        ),
    )
    point, moments = outer.point, inner.trial.moments
    assert moments is not None
    predicted = _decrement(at, point, reached)
    if (predicted > 0 or not point.known) and not _same(reached, point.parameters):
        moments = _from(inner, at, moments)
        length = float(np.linalg.norm(at.standardised(moments - point.moments, point.parameters)))
        ascent = replace(back, trial=Trial(moments, Kind.CYCLE, length, predicted))
        return Climb(ascent, reached, True, predicted)
    plain = maximiser.parameters(at, point.response)
    assert plain is not None
    return _stepped(at, back, maximiser, plain, known=True)


def _same(a: MixtureParameters, b: MixtureParameters) -> bool:
    pairs = ((a.weights, b.weights), (a.means, b.means), (a.covariances, b.covariances))
    return all(np.array_equal(one, other) for one, other in pairs)


def _from(inner: Ascent, space: MomentSpace, moments: Floats) -> Floats:
    return MomentSpace(space.structure, inner.origins).moved(moments, space.origins)


def _falls(ascent: Ascent, objective: float) -> bool:
    if ascent.point is None or ascent.trial.kind not in REFUSABLE:
        return False
    before = ascent.point.objective
    return not objective >= before - rounding(before)


def _learnt(ascent: Ascent, scored: Point, memory: int) -> tuple[Pair, ...]:
    before = ascent.point
    assert before is not None
    if not before.known:
        return ascent.pairs
    pair = Pair(scored.moments - before.moments, before.gradient - scored.gradient)
    return (*ascent.pairs, pair)[-memory:] if memory else ()


def _back(space: MomentSpace, ascent: Ascent, maximiser: Maximiser, scored: Point | None) -> Climb:
    """Return a shorter step from the accepted point, as far as the objective rises, or its plain one."""
    point, trial = ascent.point, ascent.trial
    assert point is not None
    plain = maximiser.parameters(space, point.response)
    if plain is None or trial.kind is Kind.PLAIN:
        # EM's own step led to rows that determine no mixture: nothing is left to try here.
        return Climb(replace(ascent, trial=Trial(point.moments)), point.parameters, False, math.nan)
    assert trial.moments is not None
    step = trial.moments - point.moments
    share = SHRINK if scored is None else _summit(space, point, scored, step)
    own = float(np.linalg.norm(space.standardised(point.gradient, point.parameters)))
    gain = _decrement(space, point, plain)
    moments = point.moments + share * step
    produced = maximiser.extrapolated(space, moments) if share * trial.length > own else None
    if produced is None:
        plainly = replace(ascent, trial=Trial(point.response, Kind.PLAIN, own, gain), radius=own)
        return Climb(plainly, plain, False, gain)
    predicted = _decrement(space, point, produced)
    shorter = Trial(moments, Kind.EXTRAPOLATED, share * trial.length, predicted)
    return Climb(replace(ascent, trial=shorter, radius=shorter.length), produced, False, max(gain, predicted))


def _decrement(space: MomentSpace, point: Point, produced: MixtureParameters) -> float:
    """Return half of the product of the gradient with a step of the natural parameters."""
    after = space.expected_log_density(point.gradient, produced)
    return 0.5 * (after - space.expected_log_density(point.gradient, point.parameters))


def _summit(space: MomentSpace, point: Point, refused: Point, step: Floats) -> float:
    """Return where along a refused step the objective is largest, as a share of the step.

    By the cubic through both objectives and both slopes (Nocedal and Wright 2006, eq. 3.59), between `LEAST`
    and `SHRINK`.
    """
    first, last = _slope(space, point, step), _slope(space, refused, step)
    bend = 3.0 * (point.objective - refused.objective) + first + last
    square = bend**2 - first * last
    if not (first > 0 and square >= 0 and math.isfinite(square)):
        return SHRINK
    root = math.sqrt(square)
    return min(max(1.0 - (root + bend - last) / (first - last + 2.0 * root), LEAST), SHRINK)


def _slope(space: MomentSpace, point: Point, step: Floats) -> float:
    """Return by how much the objective rises at a point for each such step, by first order."""
    there = MomentSpace(space.structure, point.parameters.means)

    def standard(moments: Floats) -> Floats:
        return there.standardised(space.moved(moments, there.origins), point.parameters)

    return float(standard(point.gradient) @ standard(step))


def _about(space: MomentSpace, ascent: Ascent, origins: Floats) -> Ascent:
    """Return the state with all moments about other origins."""

    def moved(moments: Floats) -> Floats:
        return space.moved(moments, origins)

    point = ascent.point
    assert point is not None
    pairs = tuple(Pair(moved(pair.step), moved(pair.decrease)) for pair in ascent.pairs)
    point = replace(point, moments=moved(point.moments), response=moved(point.response))
    return replace(ascent, origins=origins, pairs=pairs, point=point)


def _stepped(
    space: MomentSpace, ascent: Ascent, maximiser: Maximiser, plain: MixtureParameters, *, known: bool
) -> Climb:
    """Return the step from the accepted point; the gradient is unknown where its moments are not known."""
    point = ascent.point
    assert point is not None
    gradient = point.gradient
    theta = point.parameters

    standard = space.standardised(gradient, theta)
    own = float(np.linalg.norm(standard))
    gain = _decrement(space, point, plain) if known else math.nan
    plainly = replace(ascent, trial=Trial(point.response, Kind.PLAIN, own, gain))
    if not known or not ascent.pairs:
        return Climb(plainly, plain, True, gain)
    steps = [pair.step for pair in ascent.pairs]
    decreases = [pair.decrease for pair in ascent.pairs]
    coefficients, slope = direction(
        standard,
        [space.standardised(step, theta) for step in steps],
        [space.standardised(decrease, theta) for decrease in decreases],
    )
    if not slope > 0:
        return Climb(plainly, plain, True, gain)
    step = np.tensordot(coefficients, np.array([gradient, *steps, *decreases]), axes=1)
    length = float(np.linalg.norm(space.standardised(step, theta)))
    share = min(1.0, max(ascent.radius, own) / length) if length > 0 else 1.0
    if share * length <= own * (1 + 1e-7):
        return Climb(plainly, plain, True, max(gain, 0.5 * slope))
    for _ in range(HALVINGS):
        moments = point.moments + share * step
        produced = maximiser.extrapolated(space, moments)
        if produced is not None:
            break
        share *= 0.5
    else:
        return Climb(plainly, plain, True, gain)
    predicted = _decrement(space, point, produced)
    trial = Trial(moments, Kind.EXTRAPOLATED, share * length, predicted)
    return Climb(replace(ascent, trial=trial), produced, True, max(gain, predicted / share))
