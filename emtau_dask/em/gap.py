"""How far below a maximum an objective is, by its curvature in all directions that matter.

The Newton decrement is half of ``gᵀ H⁻¹ g`` for the gradient g and H = I − J, where J is the Jacobian of EM's
map. Conjugate gradients (Hestenes and Stiefel 1952) solve with H, which is symmetric in the metric of the
complete data, and need only its products with vectors. Where H is not positive definite the point is near a
saddle, and nothing local says how far the objective will rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from emtau_dask.em.acceleration import Maximiser, Point, rounding
from emtau_dask.em.iteration import Pass, Scored, score
from emtau_dask.em.moments import MomentSpace
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.steps import Writer
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import DOUBLE
from emtau_dask.mixture.statistics import SufficientStatistics

SPREAD = 0.1
"""The gradients of the components are scaled by factors that differ by so much from 1. Where two components
coincide, their gradients are the same, and no product with H would show that they part."""
SETTLED = 0.25
"""The products end where what may be missing is this part of the decrement."""
HALVINGS = 20
LEAST_PRODUCTS, MOST_PRODUCTS = 8, 32
LEAST_FULL_PRODUCTS, MOST_FULL_PRODUCTS = 4, 16
"""Passes by which a gap is measured, over rows that stand for all and over all rows."""
LESS = 10.0
"""A gap that was found to be too large is measured again once the estimate is a tenth of what it was. Once an
estimate is ten times the tolerance, the next is measured as at first."""


class Decrement(NamedTuple):
    """An estimated gap, nats per row; NaN where H is not positive definite.

    Attributes
    ----------
    gap : float
        The geometric mean of what the products found and of ``most``.
    most : float
        What they found and what they may have missed.
    products : int
    """

    gap: float
    most: float
    products: int


def newton_decrement(
    space: MomentSpace, point: Point, jacobian: Callable[[Floats], Floats], least: int, most: int
) -> Decrement:
    """Return the Newton decrement at a point.

    What its products may have missed is half of ``|r|² / λ`` for the residual r and the smallest eigenvalue λ
    of H, for which the smallest Ritz value stands.

    Parameters
    ----------
    space : MomentSpace
        About the means of the point's parameters.
    point : Point
    jacobian : callable (ndarray) -> ndarray
        The product of J with moments.
    least, most : int
        Products of H, at least and at most.
    """

    def standard(moments: Floats) -> Floats:
        return space.standardised(moments, point.parameters)

    residual = _spread(space, point.gradient)
    step = residual
    square = _square(standard(residual))
    if square == 0:
        return Decrement(0.0, 0.0, 0)
    diagonal: list[float] = []
    beside: list[float] = []
    decrement = shift = 0.0
    for made in range(1, most + 1):
        product = step - jacobian(step)
        curvature = float(standard(step) @ standard(product))
        if not curvature > 0:
            return Decrement(math.nan, math.nan, made)
        length = square / curvature
        diagonal.append(1.0 / length + shift)
        smallest = float(np.linalg.eigvalsh(_tridiagonal(diagonal, beside))[0])
        if not smallest > 0:
            return Decrement(math.nan, math.nan, made)
        decrement += 0.5 * length * square
        residual = residual - length * product
        before, square = square, _square(standard(residual))
        missing = 0.5 * square / smallest
        if square == 0 or (made >= least and missing <= SETTLED * decrement):
            break
        ratio = square / before
        shift = ratio / length
        beside.append(math.sqrt(ratio) / length)
        step = residual + ratio * step
    most_left = decrement + missing
    return Decrement(math.sqrt(decrement * most_left), most_left, made)


def jacobian_of(
    space: MomentSpace,
    point: Point,
    maximiser: Maximiser,
    here: Floats,
    response: Callable[[MixtureParameters], Floats | None],
    width: float,
) -> Callable[[Floats], Floats]:
    """Return the products of J with moments other than 0, as differences over a step of length ``width``.

    ``response`` returns the moments of the rows under given parameters, None where there are none, and
    ``here`` are those at the point. Of both, the part may be left out that hardly depends on parameters.
    """

    def product(moments: Floats) -> Floats:
        size = math.sqrt(_square(space.standardised(moments, point.parameters)))
        step = width / size
        for _ in range(HALVINGS):
            parameters = maximiser.extrapolated(space, point.moments + step * moments)
            there = None if parameters is None else response(parameters)
            if there is not None:
                return (there - here) / step
            step *= 0.5
        return np.full_like(moments, np.nan)

    return product


class Measured(NamedTuple):
    """What is known of the gap after an accepted full pass.

    Attributes
    ----------
    state : RunState
    gap : float
        NaN near a saddle: nothing local says how far the bound will rise.
    ends : bool
        Whether the gap may end the run.
    rows, bytes_read : int
        What was scored and read to measure it.
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
    scored: Scored,
    gap: float,
    writer: Writer,
) -> Measured:
    """Measure the gap after an accepted full pass whose estimated ``gap`` would end the run.

    It is the Newton decrement, by passes over the rows that the pass left active where they stand for all.
    The run does not end where these show that it is near a saddle, or that the gap is not below the
    tolerance. Later passes measure again once the estimate is a tenth, over all rows: so few rows may show a
    saddle where there is none.
    """
    progress = state.progress
    assert progress is not None
    point, weight = progress.ascent.point, problem.total_weight
    every = settings.weighted or sum(state.remaining.values()) == problem.n_present
    if point is None or not point.known or not every:
        return Measured(state, gap, True)
    if gap <= rounding(point.objective):
        return Measured(state, gap if progress.gap_margin == 1.0 else math.nan, True)
    if gap * progress.gap_margin >= settings.gap_tol:
        return Measured(state, gap, False)
    space = MomentSpace(problem.structure, progress.ascent.origins)
    staying = scored.staying if settings.weighted and not progress.gap_of_all_rows else None
    few = staying is not None
    here = scored.own if staying is None else staying.statistics
    assert here is not None
    this = Pass.partial(state, None) if few else Pass.full(problem)
    rows = bytes_read = 0

    def response(parameters: MixtureParameters) -> Floats | None:
        nonlocal rows, bytes_read
        there = replace(state, parameters=parameters)
        again = score(problem, there, settings, this, writer if few else _no_writer)
        rows += again.sums.scored + again.sums.rescored
        bytes_read += again.sums.bytes_read
        return None if again.own is None else _mean(space, again.own, weight)

    dtype = DOUBLE if problem.missing else problem.rows.dtype
    width = float(np.cbrt(np.finfo(np.result_type(dtype, np.float32)).eps))
    products = jacobian_of(space, point, maximiser, _mean(space, here, weight), response, width)
    least, most = LEAST_FULL_PRODUCTS, MOST_FULL_PRODUCTS
    if few:
        least, most = LEAST_PRODUCTS, MOST_PRODUCTS
    found = newton_decrement(space, point, products, least, most)
    ends = found.most < settings.gap_tol
    if not ends:
        gap_margin = LESS * settings.gap_tol / gap
        state = replace(state, progress=replace(progress, gap_margin=gap_margin, gap_of_all_rows=True))
    return Measured(state, found.gap, ends, rows, bytes_read)


def gap_margin_reset(state: RunState, settings: EmSettings, gap: float) -> RunState:
    """Return the state in which a gap is measured as at first, if the estimated ``gap`` has grown."""
    progress = state.progress
    assert progress is not None
    if progress.gap_margin == 1.0 or not gap >= LESS * settings.gap_tol:
        return state
    return replace(state, progress=replace(progress, gap_margin=1.0))


def _no_writer() -> None:
    return None


def _mean(space: MomentSpace, statistics: SufficientStatistics, weight: float) -> Floats:
    return space.of(statistics) / weight


def _spread(space: MomentSpace, gradient: Floats) -> Floats:
    result = gradient.copy()
    weights, firsts, seconds = space.split(result)
    middle = (len(weights) - 1) / 2
    factors = 1.0 + SPREAD * (np.arange(len(weights)) - middle) / max(middle, 1.0)
    weights *= factors
    firsts *= factors[:, np.newaxis]
    if not space.structure.shared:
        seconds *= factors.reshape(-1, *[1] * (seconds.ndim - 1))
    return result


def _square(vector: Floats) -> float:
    return float(vector @ vector)


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Floats:
    return np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
