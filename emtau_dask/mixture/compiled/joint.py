"""The joint form of compiled tiles: rows whitened by each component, and scatters about its old mean.

As `mixture.estep.joint`, with two differences. Of the whitened rows only their squared lengths are kept. And
scatters are summed only on and above their diagonals, over a few rows at a time for which the component has
responsibility.
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
    """What is the same for all blocks under one Θ."""

    centre: AnyArray  # c, (d,)
    means: AnyArray  # μ_k − c, (K, d)
    log_scales: AnyArray  # (K,), nats
    whitening: AnyArray  # [−P_kᵀ (μ_k − c), P_kᵀ], (K, d, 1 + d); P_kᵀ is 0 above its diagonal
    least: float  # the exponentials of smaller numbers are taken for 0
    ceiling: float  # log-densities less scores, nats
    negligible: float  # responsibility that scatters leave out, relative to the component's mean in the tile


class JointBuffers(NamedTuple):
    """Buffers of one thread for tiles of T rows, as `FeatureBuffers`; coordinates must be finite.

    S is what `side_of` returns for d features; the squares of the results are of shape (K, S, S).
    """

    coordinates: AnyArray  # [1, x − c], (1 + d, T)
    scores: AnyArray  # (K, T)
    sums: AnyArray  # (T,)
    peaks: AnyArray  # (T,)
    part: AnyArray  # sums of the coordinates, (K, 1 + d)
    residuals: AnyArray  # √w (x − μ_k) of R rows, (R, at least S); 0 after the first d columns


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
    """Write weights (K,), means (K, d) and scatter (K, d, d); see `mixture.estep.joint.statistics_of_joint`.

    ``sums`` are those of the coordinates, (K, 1 + d); ``upper`` (K, S, S) are the scatters about the means of
    the constants, on and above the diagonals of their first d rows and columns.
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
