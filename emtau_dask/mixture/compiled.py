"""The features' form as compiled loops: a block of rows in one call, during which other threads may run.

A block goes tile by tile through all that is done to it, so that a tile's features stay in the
core's own cache, up to a thousand of them. Only `mixture.tiles` imports this module, where numba is
installed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from emtau_dask.mixture.arrays import AnyArray, Ints
from emtau_dask.mixture.compiled_products import loop, multiply, multiply_transposed

__all__ = ["Buffers", "Constants", "Results", "absorb"]

PRODUCTS = "3f0c84608306df32"
"""Of the contents of the module that products come from: what numba keeps of this one holds them too."""
LOG2_E = 1.0 / math.log(2.0)
LN_2_HIGH, LN_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 as a sum, of which a multiple of the first by an exponent is exact."""
LN_2_HIGH_SINGLE, LN_2_LOW_SINGLE = np.float32(0.693359375), np.float32(-2.12194440e-4)
TO_INTEGER, TO_INTEGER_SINGLE = 1.5 * 2.0**52 + 1023, np.float32(1.5 * 2.0**23 + 127)
"""What is added to a number to have it rounded to an integer, in the last bits of the sum, less
the bias of exponents."""
C2, C3, C4, C5, C6, C7, C8, C9, C10, C11, C12, C13 = (1.0 / math.factorial(i) for i in range(2, 14))
S1, S2, S3, S4, S5, S6, S7 = (np.float32(1.0 / math.factorial(i)) for i in range(1, 8))


class Constants(NamedTuple):
    """What is the same for all blocks under one Θ; F features, of the dtype of the products.

    Attributes
    ----------
    centre : ndarray of shape (d,)
    turned : ndarray of shape (d, d)
        Transpose of the frame's transform; (0, 0) for the identity.
    first, i, j : ndarray of intp
        Square s is the sum of ``y_i y_j`` over pairs ``first[s]`` to ``first[s + 1]``.
    coefficients : ndarray of shape (K, F)
    least : float
        Exponentials of anything below it are 0.
    """

    centre: AnyArray
    turned: AnyArray
    first: Ints
    i: Ints
    j: Ints
    coefficients: AnyArray
    least: float


class Buffers(NamedTuple):
    """Of one thread, for tiles of T rows; what is left of a longer tile is multiplied by 0.

    T numbers fill a multiple of three cache lines.

    Attributes
    ----------
    differences : ndarray of shape (d, T)
        The same as the features' coordinates where nothing is transformed. Finite where a block begins.
    features : ndarray of shape (F, T)
        The first is 1 throughout. Finite where a block begins.
    scores : ndarray of shape (K, T)
    part : ndarray of shape (K, F')
        Sums of the first F' of the F features.
    weighted : ndarray of shape (d, T), or (0, T)
        Where squares over all components are wanted.
    square : ndarray of shape (d, d) or (0, 0)
    """

    differences: AnyArray
    features: AnyArray
    scores: AnyArray
    part: AnyArray
    weighted: AnyArray
    square: AnyArray


class Results(NamedTuple):
    """What is written for a block of n rows.

    Attributes
    ----------
    sums : ndarray of shape (n,)
        Of exponentials over the components.
    peaks : ndarray of shape (n,)
        What was subtracted from scores before, nats.
    labels : ndarray of intp, shape (n,) or (0,)
        Most probable components, the first of equals.
    largest : ndarray of shape (n,) or (0,)
        Their responsibilities.
    moments : ndarray of shape (K, F'), float64
    squares : ndarray of shape (d, d) or (0, 0), float64
        ``Σ_n s_n y_n y_nᵀ``.
    """

    sums: AnyArray
    peaks: AnyArray
    labels: Ints
    largest: AnyArray
    moments: AnyArray
    squares: AnyArray


@intrinsic
def _power_of_two(context: Any, value: Any) -> Any:
    """Return 2 to the power that is in the last bits of ``value``, with the exponents' bias."""

    def built(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width, fraction = (64, 52) if value == types.float64 else (32, 23)
        integer = ir.IntType(width)
        bits = builder.bitcast(arguments[0], integer)
        power = builder.shl(bits, ir.Constant(integer, fraction))
        return builder.bitcast(power, ir.DoubleType() if width == 64 else ir.FloatType())

    return value(value), built


def exponential(value: Any) -> Any:
    """Return the exponential of a number whose exponential is a normal number; compiled code only."""
    raise NotImplementedError


def _exponential_double(value: Any) -> Any:
    shifted = value * LOG2_E + TO_INTEGER
    power = shifted - TO_INTEGER
    r = (value - power * LN_2_HIGH) - power * LN_2_LOW
    r2 = r * r
    r4 = r2 * r2
    low = r2 * (C2 + r * C3) + r4 * ((C4 + r * C5) + r2 * (C6 + r * C7))
    high = (C8 + r * C9) + r2 * (C10 + r * C11) + r4 * (C12 + r * C13)
    return _power_of_two(shifted) * (1.0 + (r + (low + (r4 * r4) * high)))


def _exponential_single(value: Any) -> Any:
    shifted = value * np.float32(LOG2_E) + TO_INTEGER_SINGLE
    power = shifted - TO_INTEGER_SINGLE
    r = (value - power * LN_2_HIGH_SINGLE) - power * LN_2_LOW_SINGLE
    r2 = r * r
    tail = (S2 + r * S3) + r2 * ((S4 + r * S5) + r2 * (S6 + r * S7))
    return _power_of_two(shifted) * (S1 + (r + r2 * tail))


@overload(exponential, jit_options={"fastmath": {"contract"}})
def _exponential_of(value: Any) -> Any:
    return _exponential_single if value == types.float32 else _exponential_double


@loop
def _fill(rows: Any, constants: Any, buffers: Any) -> None:
    """Write the features of at most T rows into the tile."""
    d = len(constants.centre)
    centre, differences, features = constants.centre, buffers.differences, buffers.features
    for f in range(d):
        difference, origin = differences[f], centre[f]
        for t in range(len(rows)):
            difference[t] = rows[t, f] - origin
    if constants.turned.size > 0:
        multiply(constants.turned, differences, 1, features)
    coordinates = features[1 : 1 + d]
    for s in range(len(constants.first) - 1):
        square = features[1 + d + s]
        begin = constants.first[s]
        a, b = coordinates[constants.i[begin]], coordinates[constants.j[begin]]
        for t in range(len(square)):
            square[t] = a[t] * b[t]
        for pair in range(begin + 1, constants.first[s + 1]):
            a, b = coordinates[constants.i[pair]], coordinates[constants.j[pair]]
            for t in range(len(square)):
                square[t] += a[t] * b[t]


@loop
def _exponentiate(scores: Any, sums: Any, least: Any) -> Any:
    """Replace the first m scores of each component by exponentials, and write their m sums.

    Return how many were taken for 0.
    """
    vanished = 0
    nothing = sums.dtype.type(0)
    for t in range(len(sums)):
        sums[t] = nothing
    for k in range(len(scores)):
        of_component = scores[k]
        for t in range(len(sums)):
            value = of_component[t]
            far = value < least
            found = exponential(least if far else value)
            found = nothing if far else found
            vanished += far
            of_component[t] = found
            sums[t] += found
    return vanished


@loop
def _subtract_peaks(scores: Any, peaks: Any) -> None:
    """Write the largest score of each of the first m rows, and subtract it from all of the row."""
    for t in range(len(peaks)):
        peaks[t] = scores[0, t]
    for k in range(1, len(scores)):
        of_component = scores[k]
        for t in range(len(peaks)):
            peaks[t] = of_component[t] if of_component[t] > peaks[t] else peaks[t]
    for k in range(len(scores)):
        of_component = scores[k]
        for t in range(len(peaks)):
            of_component[t] -= peaks[t]


@loop
def _most_probable(responsibilities: Any, labels: Any, largest: Any) -> None:
    for t in range(len(labels)):
        labels[t] = 0
        largest[t] = responsibilities[0, t]
    for k in range(1, len(responsibilities)):
        of_component = responsibilities[k]
        for t in range(len(labels)):
            larger = of_component[t] > largest[t]
            labels[t] = k if larger else labels[t]
            largest[t] = of_component[t] if larger else largest[t]


@loop
def _add(part: Any, moments: Any) -> None:
    for k in range(len(part)):
        into, of_component = moments[k], part[k]
        for f in range(len(of_component)):
            into[f] += of_component[f]


@loop
def _add_squares(weights: Any, m: Any, buffers: Any, squares: Any) -> None:
    """Add the weighted squares of the coordinates of the tile's first m rows."""
    d = len(squares)
    for f in range(d):
        weighted, coordinate = buffers.weighted[f], buffers.features[1 + f]
        for t in range(m):
            weighted[t] = coordinate[t] * weights[t] if len(weights) > 0 else coordinate[t]
        for t in range(m, len(weighted)):
            weighted[t] = 0
    multiply_transposed(buffers.weighted, buffers.features, 1, buffers.square)
    _add(buffers.square, squares)


@loop
def absorb(rows: Any, weights: Any, constants: Any, buffers: Any, results: Any) -> bool:
    """Score a block of rows and sum its moments.

    Parameters
    ----------
    rows : ndarray of shape (n, d)
    weights : ndarray of shape (n,), or (0,) where every row weighs 1
    constants : Constants
    buffers : Buffers
    results : Results

    Returns
    -------
    bool
        Whether `Results.peaks` were subtracted; they are valid only then.
    """
    features, scores = buffers.features, buffers.scores
    tile = scores.shape[1]
    relative = False
    results.moments[:] = 0.0
    results.squares[:] = 0.0
    for begin in range(0, len(rows), tile):
        end = min(begin + tile, len(rows))
        m = end - begin
        _fill(rows[begin:end], constants, buffers)
        multiply(constants.coefficients, features, 0, scores)
        sums = results.sums[begin:end]
        if not relative and _exponentiate(scores, sums, constants.least) > 0:
            relative = True
            results.peaks[:begin] = 0.0
            multiply(constants.coefficients, features, 0, scores)
        if relative:
            _subtract_peaks(scores, results.peaks[begin:end])
            _exponentiate(scores, sums, constants.least)
        for k in range(len(scores)):
            of_component = scores[k]
            for t in range(m):
                of_component[t] /= sums[t]
            for t in range(m, tile):
                of_component[t] = 0
        if len(results.labels) > 0:
            _most_probable(scores, results.labels[begin:end], results.largest[begin:end])
        if len(weights) > 0:
            for k in range(len(scores)):
                of_component = scores[k]
                for t in range(m):
                    of_component[t] *= weights[begin + t]
        multiply_transposed(scores, features, 0, buffers.part)
        _add(buffers.part, results.moments)
        if len(results.squares) > 0:
            _add_squares(weights[begin:end], m, buffers, results.squares)
    return relative
