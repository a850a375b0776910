"""The joint form of compiled tiles: rows whitened by each component, and scatters about its old mean.

As `mixture.estep.joint`, but that nothing is kept of the whitened rows but the squares of their lengths, and
that scatters are summed on and above their diagonals alone, some rows at a time that a component is
responsible for.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from emtau_dask.mixture.compiled.loop import add, collect, fill, implement, score
from emtau_dask.mixture.compiled.products import (
    add_upper_squares,
    loop,
    multiply_transposed,
    subtract_half_squares,
    subtract_transposed,
)
from emtau_dask.mixture.numerics import AnyArray


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

    T numbers fill a multiple of three cache lines. S is what `side_of` says of d features, and the results'
    squares are of shape (K, S, S).

    Attributes
    ----------
    coordinates : ndarray of shape (1 + d, T)
        ``[1, x − c]``. Finite where a block begins.
    scores : ndarray of shape (K, T)
    sums, peaks : ndarray of shape (T,)
    part : ndarray of shape (K, 1 + d)
        Sums of the coordinates.
    residuals : ndarray of shape (R, at least S)
        ``√w (x − μ_k)`` of some rows that a component is responsible for; 0 in the columns after the first d.
    """

    coordinates: AnyArray
    scores: AnyArray
    sums: AnyArray
    peaks: AnyArray
    part: AnyArray
    residuals: AnyArray


def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    subtract_transposed(rows, constants.centre.reshape(1, -1), 1, buffers.coordinates)


def _score(constants: Any, buffers: Any) -> None:
    for k in range(len(constants.means)):
        of_component = buffers.scores[k : k + 1]
        of_component[:] = constants.log_scales[k]
        subtract_half_squares(constants.whitening[k], buffers.coordinates, of_component)


def _collect(constants: Any, rows: Any, weights: Any, buffers: Any, results: Any) -> None:
    centre, residuals, (m, d) = constants.centre, buffers.residuals, rows.shape
    multiply_transposed(buffers.scores, buffers.coordinates, 0, buffers.part)
    add(buffers.part, results.moments)
    for k in range(len(constants.means)):
        responsibilities, means = buffers.scores[k], constants.means[k]
        least, count = constants.negligible * buffers.part[k, 0] / m, 0
        for t in range(m):
            if responsibilities[t] > least:
                root, row, residual = math.sqrt(responsibilities[t]), rows[t], residuals[count]
                for f in range(d):
                    residual[f] = ((row[f] - centre[f]) - means[f]) * root
                count += 1
                if count == len(residuals):
                    add_upper_squares(residuals, count, results.squares[k])
                    count = 0
        if count > 0:
            add_upper_squares(residuals, count, results.squares[k])


@loop
def conclude(constants: Any, sums: Any, upper: Any, weights: Any, means: Any, scatter: Any) -> None:
    """Write the statistics of rows, as `mixture.estep.joint.statistics_of_joint` finds them.

    Parameters
    ----------
    constants : JointConstants
    sums : ndarray of shape (K, 1 + d)
    upper : ndarray of shape (K, S, S)
        Scatters about the constants' means, on and above the diagonals of their first d rows and columns.
    weights : ndarray of shape (K,)
    means : ndarray of shape (K, d)
    scatter : ndarray of shape (K, d, d)
        These three are written.
    """
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
            means[k, f] = constants.centre[f] + sums[k, 1 + f] / weight if weight > 0 else 0.0


implement(fill, JointConstants, _fill)
implement(score, JointConstants, _score)
implement(collect, JointConstants, _collect)
