"""The centred form of compiled tiles: rows less each component's mean, whitened, and scatters about means.

Like `mixture.estep` it loses no digits, however far the rows are from the origin or components from each
other, and works for all covariances. Scatters are about the mean of their own rows, or of other rows of at
least the same weight with which they are merged. So nothing cancels, however far a component moved or shrank
during an iteration. Scatters are merged as those of blocks are (Chan, Golub and LeVeque 1983, eq. 2.1).

There are two ways to sum: all rows of a tile are summed for a component, or, if the component has
responsibility for few rows, these are gathered until they fill a group.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from emtau_dask.kernels.loop import loops_of
from emtau_dask.kernels.products import (
    add_upper_squares,
    inlined,
    internal,
    loop,
    multiply_transposed,
    scatter,
    subtract_half_squares,
    subtract_transposed,
    sum_loop,
)
from emtau_dask.mixture.linalg import Floats, Ints


class CentredConstants(NamedTuple):
    """Constants of all blocks under one Θ."""

    origin: Floats  # zeros, (1, d)
    log_scales: Floats  # (K,), minus the ceiling, nats
    whitening: Floats  # P_kᵀ, 0 above their diagonals, and in the last row μ_k, (K, d + 1, d)
    least: float  # exponentials of smaller numbers count as 0
    ceiling: float  # log-densities minus scores, nats
    negligible: float  # maximum responsibility that groups skip, relative to the component's sum so far
    few: int  # maximum rows of a tile that are gathered


class AboutMean(NamedTuple):
    """Buffers for the moments of a tile about a mean m."""

    part: Floats  # Σ w x, (1, d)
    middle: Floats  # [m, 0], (1, d + 3)
    square: Floats  # Σ w (x − m) [x − m, 1] on and above the diagonal, (d + 3, d + 3)
    mean: Floats  # (d,)


class CentredBuffers(NamedTuple):
    """Buffers of one thread for tiles of T rows; coordinates must be finite when a block begins.

    S is the result of `side_of` for d features. If no rows are gathered there are no groups.
    """

    coordinates: Floats  # x, and three rows of padding, (d + 3, T)
    scores: Floats  # (K, T)
    sums: Floats  # (T,)
    peaks: Floats  # (T,)
    groups: Floats  # rows x, at the end √w (x − m), and one more, (K, R + 1, at least S); 0 after d columns
    weights: Floats  # w of the rows of the groups, (K, R)
    counts: Ints  # rows in each group, (K,)
    totals: Floats  # responsibilities summed over the block so far, (K,)
    least: Floats  # maximum negligible responsibility, (K,)
    n_significant: Ints  # rows of a tile for which a component has more than that, (K,)
    about: AboutMean
    mean: Floats  # m of a group, (d,)
    correction: Floats  # Σ w (x − m) / Σ w, (d,)


class CentredMoments(NamedTuple):
    """Moments of a block: weights, means, and scatters about these on and above the diagonals."""

    sums: Floats  # (K, 1 + d)
    scatter: Floats  # (K, S, S)


@internal
def _merge(weight: Any, mean: Any, sums: Any, scatter: Any) -> None:
    """Merge rows of ``weight`` about ``mean`` (d,) into ``sums`` (1 + d,): a weight and a mean.

    The contribution of the distance between the means is added to ``scatter`` (S, S), on and above its
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


@internal
def _subtract_mean(group: Any, weights: Any, mean: Any, correction: Any) -> Any:
    """Replace the rows of a group with their weights w (m,) by √w (x − m); return the sum of the weights.

    Their mean m is ``mean + correction``; both (d,) are written. ``correction`` is the rounding error of
    ``mean``.
    """
    total = 0.0
    for f in range(len(mean)):
        mean[f] = correction[f] = 0.0
    for r in range(len(weights)):
        row, weight = group[r], weights[r]
        total += weight
        for f in range(len(mean)):
            mean[f] += weight * row[f]
    for f in range(len(mean)):
        mean[f] /= total
    for r in range(len(weights)):
        row, weight = group[r], weights[r]
        for f in range(len(mean)):
            correction[f] += weight * (row[f] - mean[f])
    for f in range(len(mean)):
        correction[f] /= total
    for r in range(len(weights)):
        row, root = group[r], math.sqrt(weights[r])
        for f in range(len(mean)):
            row[f] = (row[f] - mean[f] - correction[f]) * root
    return total


@internal
def _finish_group(group: Any, weights: Any, buffers: Any, sums: Any, scatter: Any) -> None:
    """Merge the rows of a group with their weights (m,) into the moments of their component.

    The square of one more row after these is the contribution of the distance between the means.
    """
    mean, correction, m = buffers.mean, buffers.correction, len(weights)
    total = _subtract_mean(group, weights, mean, correction)
    before, between = sums[0], group[m]
    sums[0] = before + total
    share = total / sums[0]
    root = math.sqrt(before * share)
    for f in range(len(mean)):
        moved = mean[f] - sums[1 + f] + correction[f]
        sums[1 + f] += share * moved
        between[f] = root * moved
    add_upper_squares(group, m + 1, scatter)


@sum_loop
def sum_of(values: Any) -> Any:
    """Return the sum of (m,) values."""
    total = 0.0
    for i in range(len(values)):
        total += values[i]
    return total


@inlined
def gather(rows: Any, responsibilities: Any, k: Any, least: Any, buffers: Any, moments: Any) -> None:
    """Gather the rows (m, d) for which component k has ``responsibilities`` (m,) above ``least``."""
    group, weights, count = buffers.groups[k], buffers.weights[k], buffers.counts[k]
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


@internal
def sum_all(k: Any, scores: Any, coordinates: Any, about: AboutMean, sums: Any, summed: Any) -> None:
    """Add the moments of all rows of a tile for component k to its ``sums`` (1 + d,) and scatter (S, S).

    The scatter is formed about the mean of the earlier rows, if these weigh at least as much, and then
    corrected. The error is at most a rounding of the sum, which includes the distance between the means with
    at least half of the tile's weight.
    """
    middle, square, mean = about.middle, about.square, about.mean
    d, weight = len(mean), sum_of(scores[k])
    if not weight > 0:
        return
    if sums[0] >= weight:
        for f in range(d):
            middle[0, f] = sums[1 + f]
    else:
        multiply_transposed(scores[k : k + 1], coordinates, about.part)
        for f in range(d):
            middle[0, f] = about.part[0, f] / weight
    scatter(scores, k, coordinates, middle, d, square)
    for i in range(d):
        moved = square[i, d] / weight
        mean[i] = middle[0, i] + moved
        for j in range(i, d):
            summed[i, j] += square[i, j] - moved * square[j, d]
    _merge(weight, mean, sums, summed)


@inlined
def _count_significant(constants: Any, buffers: Any) -> None:
    """Write each component's limit of negligible responsibilities, and its number of rows above it."""
    for k in range(len(buffers.scores)):
        responsibilities, count = buffers.scores[k], 0
        buffers.totals[k] += sum_of(responsibilities)
        least = constants.negligible * buffers.totals[k]
        for t in range(len(responsibilities)):
            count += responsibilities[t] > least
        buffers.n_significant[k] = count
        buffers.least[k] = least


@inlined
def fill(constants: Any, rows: Any, buffers: Any) -> None:
    """Write the coordinates of a tile."""
    subtract_transposed(rows, constants.origin, buffers.coordinates)


@inlined
def score_component(k: Any, constants: Any, coordinates: Any, place: Any, scores: Any) -> None:
    """Write the scores of component k for a tile's coordinates (d, T) to a place among the scores."""
    of_component, log_scale = scores[place], constants.log_scales[k]
    for t in range(len(of_component)):
        of_component[t] = log_scale
    subtract_half_squares(constants.whitening[k], coordinates, place, scores)


@inlined
def score(constants: Any, buffers: Any) -> None:
    """Write the scores of a tile."""
    coordinates = buffers.coordinates[: len(buffers.mean)]
    for k in range(len(buffers.scores)):
        score_component(k, constants, coordinates, k, buffers.scores)


@inlined
def collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of a tile about means for each component, or gather the rows of the component."""
    gathers = len(buffers.groups) > 0
    if gathers:
        _count_significant(constants, buffers)
    for k in range(len(buffers.scores)):
        if gathers and buffers.n_significant[k] <= constants.few:
            gather(rows, buffers.scores[k], k, buffers.least[k], buffers, moments)
        else:
            sum_all(
                k, buffers.scores, buffers.coordinates, buffers.about, moments.sums[k], moments.scatter[k]
            )


@inlined
def finish(constants: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of the remaining rows of the groups."""
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


loops = loops_of("centred", fill=fill, score=score, collect=collect, finish=finish)
