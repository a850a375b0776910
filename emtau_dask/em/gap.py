"""The gap: how far the objective is below its maximum, measured by the Newton decrement.

The Newton decrement is half of ``gᵀ H⁻¹ g`` for the gradient g and H = I − J, where J is the Jacobian of the
EM map. H is symmetric in the metric of the complete data, so conjugate gradients (Hestenes and Stiefel 1952)
solve with it and need only its products with vectors. If H is not positive definite, the point is near a
saddle, and its neighbourhood does not tell how far the objective will rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from emtau_dask.em.acceleration import EvaluatedPoint, Maximiser, rounding
from emtau_dask.em.iteration import Pass, PassResult, run_pass
from emtau_dask.em.moments import MomentSpace
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.update import Writer
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import DOUBLE
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.settings import MARGINALISE

GRADIENT_SPREAD = 0.1
"""Each component's gradient is scaled by a factor within 0.1 of 1. Without that, two equal components have
equal gradients, and no product with H would show that they can part."""
MAX_MISSING = 0.25
"""Maximum missing part of the decrement at which the products end."""
MAX_HALVINGS = 20
"""Maximum halvings of a finite difference whose M-step is singular."""
MIN_PRODUCTS, MAX_PRODUCTS = 8, 32
MIN_FULL_PRODUCTS, MAX_FULL_PRODUCTS = 4, 16
"""Minimum and maximum products, of a pass each, by which a gap is measured: over weighted active rows, and
over all rows."""
REMEASURE = 10.0
"""A gap that was too large is measured again when its estimate is 10 times smaller. When an estimate is 10
times the tolerance, that condition is dropped."""


class Decrement(NamedTuple):
    """A measured gap, nats per row; NaN if H is not positive definite.

    Attributes
    ----------
    gap : float
        The geometric mean of what the products found and of ``most``.
    most : float
        The sum of what the products found and of what they may have missed.
    products : int
        Products that were made.
    """

    gap: float
    most: float
    products: int


def newton_decrement(
    space: MomentSpace, point: EvaluatedPoint, jacobian: Callable[[Floats], Floats], least: int, most: int
) -> Decrement:
    """Return the Newton decrement at a point.

    The products may have missed half of ``|r|² / λ`` for the residual r and the smallest eigenvalue λ of H,
    which the smallest Ritz value approximates.

    Parameters
    ----------
    space : MomentSpace
        About the means of the point's parameters.
    point : EvaluatedPoint
    jacobian : callable (ndarray) -> ndarray
        The product of J with moments.
    least, most : int
        Minimum and maximum number of products.
    """

    def standard(moments: Floats) -> Floats:
        return space.standardised(moments, point.parameters)

    residual = _spread_gradients(space, point.gradient)
    step = residual
    square = _square(standard(residual))
    if square == 0:
        return Decrement(0.0, 0.0, 0)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    decrement = shift = 0.0
    for made in range(1, most + 1):
        product = step - jacobian(step)
        curvature = float(standard(step) @ standard(product))
        if not curvature > 0:
            return Decrement(math.nan, math.nan, made)
        length = square / curvature
        diagonal.append(1.0 / length + shift)
        smallest = float(np.linalg.eigvalsh(_tridiagonal(diagonal, off_diagonal))[0])
        if not smallest > 0:
            return Decrement(math.nan, math.nan, made)
        decrement += 0.5 * length * square
        residual = residual - length * product
        before, square = square, _square(standard(residual))
        missing = 0.5 * square / smallest
        if square == 0 or (made >= least and missing <= MAX_MISSING * decrement):
            break
        ratio = square / before
        shift = ratio / length
        off_diagonal.append(math.sqrt(ratio) / length)
        step = residual + ratio * step
    most_left = decrement + missing
    return Decrement(math.sqrt(decrement * most_left), most_left, made)


def jacobian_of(
    space: MomentSpace,
    point: EvaluatedPoint,
    maximiser: Maximiser,
    here: Floats,
    response: Callable[[MixtureParameters], Floats | None],
    width: float,
) -> Callable[[Floats], Floats]:
    """Return the product of J with nonzero moments: a finite difference over a step of length ``width``.

    ``response`` returns the moments of the rows under given parameters, or None if there are none. ``here``
    are those at the point. Terms that hardly depend on the parameters may be omitted from both.
    """

    def product(moments: Floats) -> Floats:
        size = math.sqrt(_square(space.standardised(moments, point.parameters)))
        step = width / size
        for _ in range(MAX_HALVINGS):
            parameters = maximiser.extrapolated(space, point.moments + step * moments)
            there = None if parameters is None else response(parameters)
            if there is not None:
                return (there - here) / step
            step *= 0.5
        return np.full_like(moments, np.nan)

    return product


class Measured(NamedTuple):
    """The gap after an accepted full pass.

    Attributes
    ----------
    state : RunState
    gap : float
        Nats per row; NaN near a saddle.
    ends : bool
        Whether the gap may end the run.
    rows, bytes_read : int
        Rows scored and bytes read to measure it.
    """

    state: RunState
    gap: float
    ends: bool
    rows: int = 0
    bytes_read: int = 0


def gap_measured(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    maximiser: Maximiser,
    result: PassResult,
    gap: float,
    writer: Writer,
) -> Measured:
    """Measure the gap after an accepted full pass whose estimated ``gap`` would end the run.

    The gap is the Newton decrement. Its passes score the active rows if these have sampling weights, and all
    rows otherwise. The run does not end near a saddle, or if the measured gap is not below the tolerance.
    Then the gap is measured again after a later pass, over all rows: a sample may show a saddle that the data
    do not have.
    """
    progress = state.progress
    assert progress is not None
    point, weight = progress.quasi_newton.point, problem.total_weight
    all_count = settings.has_sampling_weights or sum(state.n_active.values()) == problem.n_rows
    if point is None or not point.known or not all_count:
        return Measured(state, gap, True)
    if gap <= rounding(point.objective):
        return Measured(state, gap if progress.gap_margin == 1.0 else math.nan, True)
    if gap * progress.gap_margin >= settings.gap_tol:
        return Measured(state, gap, False)
    space = MomentSpace(problem.structure, progress.quasi_newton.origins)
    weighted = result.reweighted if settings.has_sampling_weights and not progress.gap_of_all_rows else None
    here = result.scored if weighted is None else weighted.statistics
    assert here is not None
    this_pass = Pass.full(problem) if weighted is None else Pass.partial(state, None)
    rows = bytes_read = 0

    def response(parameters: MixtureParameters) -> Floats | None:
        nonlocal rows, bytes_read
        there = replace(state, parameters=parameters)
        again = run_pass(problem, there, settings, this_pass, _no_writer if weighted is None else writer)
        rows += again.sums.scored + again.sums.rescored
        bytes_read += again.sums.bytes_read
        return None if again.scored is None else _mean(space, again.scored, weight)

    dtype = DOUBLE if problem.missing == MARGINALISE else problem.rows.dtype
    width = float(np.cbrt(np.finfo(np.result_type(dtype, np.float32)).eps))
    products = jacobian_of(space, point, maximiser, _mean(space, here, weight), response, width)
    least, most = MIN_FULL_PRODUCTS, MAX_FULL_PRODUCTS
    if weighted is not None:
        least, most = MIN_PRODUCTS, MAX_PRODUCTS
    found = newton_decrement(space, point, products, least, most)
    ends = found.most < settings.gap_tol
    if not ends:
        gap_margin = REMEASURE * settings.gap_tol / gap
        state = replace(state, progress=replace(progress, gap_margin=gap_margin, gap_of_all_rows=True))
    return Measured(state, found.gap, ends, rows, bytes_read)


def gap_margin_reset(state: RunState, settings: EmSettings, gap: float) -> RunState:
    """Return the state without a margin for the next measurement, if the estimated ``gap`` has grown."""
    progress = state.progress
    assert progress is not None
    if progress.gap_margin == 1.0 or not gap >= REMEASURE * settings.gap_tol:
        return state
    return replace(state, progress=replace(progress, gap_margin=1.0))


def _no_writer() -> None:
    return None


def _mean(space: MomentSpace, statistics: SufficientStatistics, weight: float) -> Floats:
    return space.of(statistics) / weight


def _spread_gradients(space: MomentSpace, gradient: Floats) -> Floats:
    result = gradient.copy()
    weights, firsts, seconds = space.split(result)
    middle = (len(weights) - 1) / 2
    factors = 1.0 + GRADIENT_SPREAD * (np.arange(len(weights)) - middle) / max(middle, 1.0)
    weights *= factors
    firsts *= factors[:, np.newaxis]
    if not space.structure.shared:
        seconds *= factors.reshape(-1, *[1] * (seconds.ndim - 1))
    return result


def _square(vector: Floats) -> float:
    return float(vector @ vector)


def _tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> Floats:
    return np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
