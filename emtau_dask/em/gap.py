"""How far below a maximum an objective is, by its curvature in all directions that matter.

The Newton decrement is half of ``gᵀ H⁻¹ g`` for the gradient g and H = I − J, where J is the Jacobian of EM's
map. Conjugate gradients (Hestenes and Stiefel 1952) solve with H, which is symmetric in the metric of the
complete data, and need only its products with vectors. Where H is not positive definite the point is near a
saddle, and nothing local says how far the objective will rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from emtau_dask.em.acceleration import Maximiser, Point
from emtau_dask.em.moments import MomentSpace
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters

SPREAD = 0.1
"""The gradients of the components are scaled by factors that differ by so much from 1. Where two components
coincide, their gradients are the same, and no product with H would show that they part."""
SETTLED = 0.25
"""The products end where what may be missing is this part of the decrement."""
HALVINGS = 20


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
