"""The centred form of compiled tiles: rows less each component's mean, whitened, and scatters about means.

As `mixture.estep.centred`: no digit is lost however far the rows are from the origin or a component from the
others, and nothing is required of the covariances. Scatters are about a mean of the very rows that they are
summed over, so that nothing cancels however far a component moved or shrank during an iteration; they are
merged as those of blocks are (Chan, Golub and LeVeque 1983, eq. 2.1).

There are two ways to sum. With few features, all rows of a tile are summed for every component. With many,
the rows for which a component has responsibility are gathered until they fill a group.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from emtau_dask.mixture.compiled.loop import collect, fill, finish, implement, score
from emtau_dask.mixture.compiled.products import (
    add_upper_squares,
    loop,
    multiply_transposed,
    subtract_half_squares,
    subtract_transposed,
    sum_loop,
)
from emtau_dask.mixture.numerics import AnyArray, Floats, Ints


class CentredConstants(NamedTuple):
    """What is the same for all blocks under one Θ."""

    origin: Floats  # zeros, (1, d)
    means: Floats  # μ_k, (K, d)
    log_scales: Floats  # (K,), less the ceiling, nats
    factors: Floats  # P_kᵀ, 0 above their diagonals, (K, d, d)
    least: float  # the exponentials of smaller numbers are taken for 0
    ceiling: float  # log-densities less scores, nats
    negligible: float  # responsibility that groups leave out, relative to the component's sum so far


class CentredBuffers(NamedTuple):
    """Buffers of one thread for tiles of T rows; coordinates must be finite where a block begins.

    S is what `side_of` returns for d features. Where all rows of a tile are summed, W is T and there are no
    groups, (0, 0, 0).
    """

    coordinates: Floats  # [1, x], (1 + d, T)
    differences: Floats  # [1, x − m] of W rows at a time, (1 + d, W)
    densities: Floats  # of as many rows, (1, W)
    scores: Floats  # (K, T)
    sums: Floats  # (T,)
    peaks: Floats  # (T,)
    groups: Floats  # rows x, and at the end √w (x − m), (K, R, at least S); 0 after the first d columns
    weights: Floats  # w of the rows of the groups, (K, R)
    counts: Ints  # of the rows in each group, (K,)
    totals: Floats  # responsibilities summed over the block so far, (K,)
    part: Floats  # sums of the coordinates, (K, 1 + d)
    weighted: Floats  # w (x − m), (d, T)
    square: Floats  # Σ w (x − m) [1, x − m], (d, 1 + d)
    mean: Floats  # m, (d,)
    rest: Floats  # Σ w (x − m), (d,)


class CentredMoments(NamedTuple):
    """Of a block: weights and means of the components, and scatters about them on and above the diagonals."""

    sums: Floats  # (K, 1 + d)
    scatter: Floats  # (K, S, S)


@loop
def _subtract(coordinates: AnyArray, begin: Any, mean: Any, out: Any) -> None:
    """Write ``coordinates`` from column ``begin`` on less ``mean`` (d,) into ``out`` after its first row."""
    width = out.shape[1]
    for f in range(len(mean)):
        of_feature, difference, middle = coordinates[1 + f, begin : begin + width], out[1 + f], mean[f]
        for t in range(width):
            difference[t] = of_feature[t] - middle


@loop
def _merge(weight: Any, mean: Any, sums: Any, scatter: Any) -> None:
    """Merge rows of ``weight`` about ``mean`` (d,) into ``sums`` (1 + d,): a weight and a mean.

    What the distance between the means adds to the scatter is added to ``scatter`` (S, S), on and above its
    diagonal. ``mean`` is overwritten.
    """
    before = sums[0]
    sums[0] = before + weight
    share = weight / sums[0]
    for f in range(len(mean)):
        mean[f] -= sums[1 + f]
        sums[1 + f] += share * mean[f]
    if before > 0:
        for i in range(len(mean)):
            moved = before * share * mean[i]
            for j in range(i, len(mean)):
                scatter[i, j] += moved * mean[j]


@loop
def _finish_group(group: Any, weights: Any, buffers: Any, sums: Any, scatter: Any) -> None:
    """Merge the rows of a group with their weights (m,) into the moments of their component."""
    mean, rest = buffers.mean, buffers.rest
    total = 0.0
    for f in range(len(mean)):
        mean[f] = rest[f] = 0.0
    for r in range(len(weights)):
        row, weight = group[r], weights[r]
        total += weight
        for f in range(len(mean)):
            mean[f] += weight * row[f]
    for f in range(len(mean)):
        mean[f] /= total
    for r in range(len(weights)):
        row, root = group[r], math.sqrt(weights[r])
        for f in range(len(mean)):
            row[f] = (row[f] - mean[f]) * root
            rest[f] += row[f] * root
    add_upper_squares(group, len(weights), scatter)
    for i in range(len(mean)):
        moved = rest[i] / total
        for j in range(i, len(mean)):
            scatter[i, j] -= moved * rest[j]
    for f in range(len(mean)):
        mean[f] += rest[f] / total
    _merge(total, mean, sums, scatter)


@sum_loop
def _sum(values: Any) -> Any:
    total = 0.0
    for i in range(len(values)):
        total += values[i]
    return total


@loop
def _gather(constants: Any, rows: Any, buffers: Any, moments: Any) -> None:
    for k in range(len(constants.means)):
        responsibilities, group, weights = buffers.scores[k], buffers.groups[k], buffers.weights[k]
        buffers.totals[k] += _sum(responsibilities)
        least, count = constants.negligible * buffers.totals[k], buffers.counts[k]
        for t in range(len(rows)):
            if responsibilities[t] > least:
                row, into = rows[t], group[count]
                for f in range(len(row)):
                    into[f] = row[f]
                weights[count] = responsibilities[t]
                count += 1
                if count == len(weights):
                    _finish_group(group, weights, buffers, moments.sums[k], moments.scatter[k])
                    count = 0
        buffers.counts[k] = count


@loop
def _sum_tile(constants: Any, buffers: Any, moments: Any) -> None:
    differences, square, mean = buffers.differences, buffers.square, buffers.mean
    multiply_transposed(buffers.scores, buffers.coordinates, 0, buffers.part)
    for k in range(len(constants.means)):
        responsibilities, weight = buffers.scores[k], buffers.part[k, 0]
        if not weight > 0:
            continue
        for f in range(len(mean)):
            mean[f] = buffers.part[k, 1 + f] / weight
        for f in range(len(mean)):
            of_feature, middle = buffers.coordinates[1 + f], mean[f]
            difference, weighted = differences[1 + f], buffers.weighted[f]
            for t in range(len(responsibilities)):
                residual = of_feature[t] - middle
                difference[t] = residual
                weighted[t] = residual * responsibilities[t]
        multiply_transposed(buffers.weighted, differences, 0, square)
        scatter = moments.scatter[k]
        for i in range(len(mean)):
            moved = square[i, 0] / weight
            for j in range(i, len(mean)):
                scatter[i, j] += square[i, 1 + j] - moved * square[j, 0]
        for f in range(len(mean)):
            mean[f] += square[f, 0] / weight
        _merge(weight, mean, moments.sums[k], scatter)


def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    subtract_transposed(rows, constants.origin, 1, buffers.coordinates)


def _score(constants: Any, buffers: Any) -> None:
    differences, densities, scores = buffers.differences, buffers.densities, buffers.scores
    d, width = constants.means.shape[1], differences.shape[1]
    for k in range(len(constants.means)):
        for begin in range(0, scores.shape[1], width):
            _subtract(buffers.coordinates, begin, constants.means[k], differences)
            for t in range(width):
                densities[0, t] = constants.log_scales[k]
            subtract_half_squares(constants.factors[k], differences[1 : 1 + d], densities)
            for t in range(width):
                scores[k, begin + t] = densities[0, t]


def _collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    if len(buffers.groups) > 0:
        _gather(constants, rows, buffers, moments)
    else:
        _sum_tile(constants, buffers, moments)


def _finish(constants: Any, buffers: Any, moments: Any) -> None:
    for k in range(len(buffers.groups)):
        weights = buffers.weights[k, : buffers.counts[k]]
        if len(weights) > 0:
            _finish_group(buffers.groups[k], weights, buffers, moments.sums[k], moments.scatter[k])
        buffers.counts[k] = 0
        buffers.totals[k] = 0.0


@loop
def combine(block: Any, moments: Any) -> None:
    """Merge the moments of a block, which are overwritten, into those of the blocks before."""
    d = block.sums.shape[1] - 1
    for k in range(len(block.sums)):
        if block.sums[k, 0] > 0:
            scatter, added = moments.scatter[k], block.scatter[k]
            for i in range(d):
                for j in range(i, d):
                    scatter[i, j] += added[i, j]
            _merge(block.sums[k, 0], block.sums[k, 1:], moments.sums[k], scatter)


implement(fill, CentredConstants, _fill)
implement(score, CentredConstants, _score)
implement(collect, CentredConstants, _collect)
implement(finish, CentredConstants, _finish)
