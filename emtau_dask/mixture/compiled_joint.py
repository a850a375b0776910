"""The joint form of compiled tiles: rows whitened by each component, and scatters about its old mean.

As `mixture.joint`, but that nothing is kept of the whitened rows but the squares of their lengths, and
that scatters are summed on and above their diagonals alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from emtau_dask.mixture.arrays import AnyArray, Ints
from emtau_dask.mixture.compiled import add, collect, fill, implement, score
from emtau_dask.mixture.compiled_products import (
    VECTOR_BYTES,
    loop,
    multiply_transposed,
    subtract_half_squares,
    subtract_transposed,
    upper_squares,
)

__all__ = ["JointBuffers", "JointConstants", "conclude"]


class JointConstants(NamedTuple):
    """What is the same for all blocks under one Θ.

    Attributes
    ----------
    centre : ndarray of shape (d,)
        c.
    means : ndarray of shape (K, d)
        ``μ_k − c``.
    log_scales : ndarray of shape (K,), nats
    whitening : ndarray of shape (K, d, 1 + d)
        ``[−P_kᵀ (μ_k − c), P_kᵀ]``, 0 above the diagonal of the second.
    least : float
        Exponentials of anything below it are 0.
    ceiling : float, nats
        What log-densities are above scores by.
    negligible : float
        Responsibilities that scatters leave out, as a part of the mean one for the component in the tile.
    """

    centre: AnyArray
    means: AnyArray
    log_scales: AnyArray
    whitening: AnyArray
    least: float
    ceiling: float
    negligible: float


class JointBuffers(NamedTuple):
    """Of one thread, for tiles of T rows; what is left of a longer tile is multiplied by 0.

    T numbers fill a multiple of three cache lines.

    Attributes
    ----------
    coordinates : ndarray of shape (1 + d, T)
        ``[1, x − c]``. Finite where a block begins.
    scores : ndarray of shape (K, T)
    sums, peaks : ndarray of shape (T,)
    part : ndarray of shape (K, 1 + d)
        Sums of the coordinates.
    present : ndarray of intp, shape (T,)
        Rows that a component is responsible for.
    residuals : ndarray of shape (d, T)
        ``√w (x − μ_k)`` of those.
    square : ndarray of shape (d, d)
        Of the residuals; written on and above its diagonal.
    """

    coordinates: AnyArray
    scores: AnyArray
    sums: AnyArray
    peaks: AnyArray
    part: AnyArray
    present: Ints
    residuals: AnyArray
    square: AnyArray


def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    subtract_transposed(rows, constants.centre.reshape(1, -1), 1, buffers.coordinates)


def _score(constants: Any, buffers: Any) -> None:
    for k in range(len(constants.means)):
        of_component = buffers.scores[k : k + 1]
        of_component[:] = constants.log_scales[k]
        subtract_half_squares(constants.whitening[k], buffers.coordinates, of_component)


def _collect(constants: Any, weights: Any, m: Any, buffers: Any, results: Any) -> None:
    coordinates, present, residuals = buffers.coordinates, buffers.present, buffers.residuals
    lanes = VECTOR_BYTES // residuals.itemsize
    multiply_transposed(buffers.scores, coordinates, 0, buffers.part)
    add(buffers.part, results.moments)
    for k in range(len(constants.means)):
        responsibilities, means = buffers.scores[k], constants.means[k]
        least, count = constants.negligible * buffers.part[k, 0] / m, 0
        for t in range(m):
            present[count] = t
            count += responsibilities[t] > least
        depth = -(-count // lanes) * lanes
        if 2 * count > m:
            depth = -(-m // lanes) * lanes
            roots = responsibilities
            for t in range(depth):
                roots[t] = math.sqrt(responsibilities[t])
            for f in range(len(means)):
                residual, coordinate, mean = residuals[f], coordinates[1 + f], means[f]
                for t in range(depth):
                    residual[t] = (coordinate[t] - mean) * roots[t]
        else:
            for c in range(count):
                responsibilities[c] = math.sqrt(responsibilities[present[c]])
            for f in range(len(means)):
                residual, coordinate, mean = residuals[f], coordinates[1 + f], means[f]
                for c in range(count):
                    residual[c] = (coordinate[present[c]] - mean) * responsibilities[c]
                for c in range(count, depth):
                    residual[c] = 0
        if depth > 0:
            upper_squares(residuals, depth, buffers.square)
            for i in range(len(means)):
                into, square = results.squares[k, i], buffers.square[i]
                for j in range(i, len(means)):
                    into[j] += square[j]


@loop
def conclude(constants: Any, sums: Any, upper: Any, weights: Any, means: Any, scatter: Any) -> None:
    """Write the statistics of rows, as `mixture.joint.statistics_of_joint` finds them.

    Parameters
    ----------
    constants : JointConstants
    sums : ndarray of shape (K, 1 + d)
    upper : ndarray of shape (K, d, d)
        Scatters about the constants' means, on and above their diagonals.
    weights : ndarray of shape (K,)
    means : ndarray of shape (K, d)
    scatter : ndarray of shape (K, d, d)
        These three are written.
    """
    centre = constants.centre
    for k in range(len(weights)):
        weight, shift = sums[k, 0], means[k]
        weights[k] = weight
        for f in range(len(shift)):
            shift[f] = (sums[k, 1 + f] / weight if weight > 0 else 0.0) - constants.means[k, f]
        for i in range(len(shift)):
            moved = weight * shift[i]
            for j in range(i, len(shift)):
                value = upper[k, i, j] - moved * shift[j]
                scatter[k, i, j] = value
                scatter[k, j, i] = value
        for f in range(len(shift)):
            shift[f] = centre[f] + (shift[f] + constants.means[k, f]) if weight > 0 else 0.0


implement(fill, JointConstants, _fill)
implement(score, JointConstants, _score)
implement(collect, JointConstants, _collect)
