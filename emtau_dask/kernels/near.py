"""Tiles of rows near one component; components that do not count for these rows are skipped.

The rows of a block are ordered by a guess of their component; any guess gives the same results. For a tile of
rows with one guess, components are skipped in three steps, each of which costs more and skips more: by the
distance of the farthest row (`mixture.cutoff`); by one coordinate of each row, in the direction from the
component; and by the scores of the others, in the centred form. Results are in the order of the rows in the
block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from emtau_dask.kernels.centred import CentredBuffers, CentredConstants, finish, gather, score_component
from emtau_dask.kernels.loop import (
    BlockLoops,
    divide,
    exponentiate,
    flattened,
    most_probable,
    sort_places,
    squared_length,
    sum_of_logarithms,
    zero_if_finite,
)
from emtau_dask.kernels.products import inlined, loop, multiply, subtract_transposed
from emtau_dask.kernels.vectors import LANES, in_full_vectors
from emtau_dask.mixture.cutoff import ROUNDING
from emtau_dask.mixture.linalg import AnyArray, Floats, Ints

HALF = 0.5 * (1.0 - ROUNDING)


class NearConstants(NamedTuple):
    """Constants of all blocks under one Θ."""

    centred: CentredConstants
    centre: Floats  # of the discriminants, (d,)
    nothing: AnyArray  # zeros of float32, (1, d)
    discriminants: AnyArray  # coefficients of x minus the centre, and of 1, in float32, (K, d + 1)
    factors: Floats  # P_k, (K, d, d)
    cutoffs: AnyArray  # the distances of `mixture.cutoff`, (K, K)
    margins: Floats  # distance of negligible scores from a row's largest score, nats, (K,)
    least: Floats  # the exponentials of minus these, (K,)


class NearBuffers(NamedTuple):
    """Buffers of one thread for blocks of n rows, of which G at a time are ordered and T are scored."""

    centred: CentredBuffers  # for tiles of T rows
    narrow: AnyArray  # rows minus the centre in float32, (G, d)
    coordinates: AnyArray  # the same transposed, and 1, (d + 1, G)
    discriminants: AnyArray  # (K, G)
    largest: AnyArray  # (G,)
    guesses: AnyArray  # of int32, (n,)
    order: Ints  # the rows by component, (n,)
    ends: Ints  # end of each component in the order, (K + 1,)
    rows: Floats  # the rows of a tile, (T, d)
    differences: Floats  # from the mean of the component of the tile, and 1, (d + 1, T)
    own: Floats  # scores of this component, infinite in columns without a row, (T,)
    directions: Floats  # coefficients of the differences, and of 1, (K, d + 1)
    along: Floats  # coordinates in these directions, at most the distance from a component, (K, T)
    whitened: Floats  # (d,)
    of_directions: Ints  # the component of each direction, (K,)
    has_direction: Ints  # whether a component has a direction, (K,)
    may_count: Ints  # whether a component may count for a row of the tile, (K,)
    near: Ints  # such components, in order, (K,)
    labels: Ints  # positions among these, (T,)
    values: Floats  # log-likelihoods, then responsibilities of labels, (T,)


@inlined
def _guess(rows: Any, constants: Any, buffers: Any) -> None:
    """Write for each row of a block the component of its largest discriminant."""
    narrow, centre = buffers.narrow, constants.centre
    for begin in range(0, len(rows), len(narrow)):
        end = min(begin + len(narrow), len(rows))
        for t in range(begin, end):
            row, into = rows[t], narrow[t - begin]
            for f in range(len(row)):
                into[f] = row[f] - centre[f]
        subtract_transposed(narrow[: end - begin], constants.nothing, buffers.coordinates)
        multiply(constants.discriminants, buffers.coordinates, buffers.discriminants)
        most_probable(buffers.discriminants, buffers.guesses[begin:end], buffers.largest[: end - begin])


@inlined
def _fill(rows: Any, places: Any, constants: Any, buffers: Any) -> None:
    """Write the rows of the block that are ``places`` (m,) into the tile."""
    for t in range(len(places)):
        row, into = rows[places[t]], buffers.rows[t]
        for f in range(len(row)):
            into[f] = row[f]
    subtract_transposed(buffers.rows[: len(places)], constants.centred.origin, buffers.centred.coordinates)


@loop
def _score(k: Any, place: Any, constants: Any, buffers: Any) -> None:
    """Write the scores of component k for the tile to a place among the scores."""
    centred = buffers.centred
    score_component(k, constants.centred, centred.coordinates, place, centred.scores)


@loop
def _direct(a: Any, k: Any, into: Any, constants: Any, buffers: Any) -> None:
    """Write the coefficients of the distance from component k along the direction of a's mean, (d + 1,)."""
    whitened, factor, whitening = buffers.whitened, constants.factors[k], constants.centred.whitening[k]
    d = len(whitened)
    mean, origin = constants.centred.whitening[a, d], whitening[d]
    for f in range(d):
        whitened[f] = into[f] = 0.0
    for i in range(d):
        row, difference = factor[i], mean[i] - origin[i]
        for f in range(i // LANES * LANES, d):
            whitened[f] += difference * row[f]
    length = math.sqrt(squared_length(whitened))
    over = 1.0 / length if length > 0 else 0.0
    for i in range(d):
        row, share = whitening[i], whitened[i] * over
        for f in range(min(d, i // LANES * LANES + LANES)):
            into[f] += share * row[f]
    into[d] = length


@inlined
def _find_directions(a: Any, used: Any, constants: Any, buffers: Any) -> Any:
    """Add directions from the components within the cut-off of a tile's farthest row; return their number."""
    cutoffs, own, has_direction = constants.cutoffs[a], buffers.own, buffers.has_direction
    lowest = own[0]
    for t in range(1, len(own)):
        lowest = min(lowest, own[t])
    farthest = 2.0 * (constants.centred.log_scales[a] - lowest)
    for k in range(len(cutoffs)):
        if cutoffs[k] < farthest and not has_direction[k]:
            has_direction[k] = 1
            buffers.of_directions[used] = k
            _direct(a, k, buffers.directions[used], constants, buffers)
            used += 1
    return used


@inlined
def _find_candidates(a: Any, used: Any, constants: Any, buffers: Any) -> Any:
    """Write the components that may count for a row of the tile by its coordinates along directions.

    Component a is one of them. Return their number.
    """
    own, may_count, log_scales = buffers.own, buffers.may_count, constants.centred.log_scales
    for k in range(len(may_count)):
        may_count[k] = k == a
    multiply(buffers.directions[:used], buffers.differences, buffers.along[:used])
    for j in range(used):
        k, along, counting = buffers.of_directions[j], buffers.along[j], 0
        most = log_scales[k] + constants.margins[k]
        for t in range(len(own)):
            ahead = max(along[t], 0.0)
            counting += most - HALF * ahead * ahead > own[t]
        may_count[k] |= counting > 0
    count = 0
    for k in range(len(may_count)):
        buffers.near[count] = k
        count += may_count[k]
    return count


@inlined
def _skip_negligible(a: Any, count: Any, peaks: Any, constants: Any, buffers: Any) -> Any:
    """Write the largest score of each of the tile's rows, and subtract it from the scores of each.

    Components with only negligible responsibilities are removed; return the number of the others.
    """
    scores, near, left = buffers.centred.scores, buffers.near, 0
    for t in range(len(peaks)):
        peaks[t] = scores[0, t]
    for j in range(1, count):
        of_component = scores[j]
        for t in range(len(peaks)):
            peaks[t] = of_component[t] if of_component[t] > peaks[t] else peaks[t]
    for j in range(count):
        of_component, into, k, counting = scores[j], scores[left], near[j], 0
        least = -constants.margins[k]
        for t in range(len(peaks)):
            score = of_component[t] - peaks[t]
            into[t] = score
            counting += score > least
        near[left] = k
        left += (counting > 0) | (k == a)
    return left


@inlined
def _write(places: Any, count: Any, buffers: Any, results: Any) -> None:
    """Write the results of the rows of the tile, which are ``places`` (m,) in the block."""
    values, labels = buffers.values[: len(places)], buffers.labels[: len(places)]
    for t in range(len(places)):
        results.log_likelihoods[places[t]] = values[t]
    if len(results.labels) > 0:
        most_probable(buffers.centred.scores[:count], labels, values)
        for t in range(len(places)):
            results.labels[places[t]] = buffers.near[labels[t]]
            results.largest[places[t]] = values[t]


@inlined
def _collect(places: Any, weights: Any, count: Any, constants: Any, buffers: Any, moments: Any) -> None:
    """Gather the rows of the tile for the components that count for them."""
    m = len(places)
    for j in range(count):
        k, of_component = buffers.near[j], buffers.centred.scores[j]
        least = constants.least[k]
        for t in range(m):
            of_component[t] = of_component[t] if of_component[t] > least else 0.0
        if len(weights) > 0:
            for t in range(m):
                of_component[t] *= weights[places[t]]
        gather(buffers.rows[:m], of_component, k, 0.0, buffers.centred, moments)


@loop
def _accumulate_tile(
    rows: Any, weights: Any, a: Any, places: Any, used: Any, constants: Any, buffers: Any, results: Any
) -> Any:
    """Score and sum the rows of a tile whose guess is component a.

    Return the number of directions, of which ``used`` existed before, and the sum of the
    log-likelihoods.
    """
    in_full_vectors()
    m, d, scores = len(places), rows.shape[1], buffers.centred.scores
    _fill(rows, places, constants, buffers)
    subtract_transposed(buffers.rows[:m], constants.centred.whitening[a, d:], buffers.differences)
    _score(a, 0, constants, buffers)
    for t in range(len(buffers.own)):
        buffers.own[t] = scores[0, t] if t < m else math.inf
    used = _find_directions(a, used, constants, buffers)
    count = _find_candidates(a, used, constants, buffers)
    for j in range(count):
        if buffers.near[j] == a:
            for t in range(len(buffers.own)):
                scores[j, t] = buffers.own[t]
        else:
            _score(buffers.near[j], j, constants, buffers)
    sums, peaks = buffers.centred.sums[:m], buffers.centred.peaks[:m]
    count = _skip_negligible(a, count, peaks, constants, buffers)
    exponentiate(scores[:count], sums, constants.centred.least, results.numbers[:0])
    total = sum_of_logarithms(sums, peaks, constants.centred.ceiling, buffers.values[:m])
    divide(scores[:count], sums, peaks)
    _write(places, count, buffers, results)
    _collect(places, weights, count, constants, buffers, results.moments)
    return used, total


@loop
def accumulate(rows: Any, weights: Any, constants: Any, buffers: Any, results: Any) -> Any:
    """Score a block of rows and sum its moments; arguments and results are those of `loop._accumulate`."""
    n, tile = len(rows), len(buffers.rows)
    for i in range(len(results.numbers)):
        results.numbers[i] = 0.0
    _guess(rows, constants, buffers)
    order = buffers.order[:n]
    sort_places(buffers.guesses[:n], buffers.ends, order)
    total, begin = 0.0, 0
    for a in range(len(constants.cutoffs)):
        members = order[begin : buffers.ends[a]]
        begin, used = buffers.ends[a], 0
        if len(members) > 0:
            for k in range(len(buffers.has_direction)):
                buffers.has_direction[k] = 0
        for first in range(0, len(members), tile):
            places = members[first : min(first + tile, len(members))]
            used, part = _accumulate_tile(rows, weights, a, places, used, constants, buffers, results)
            total += part
    finish(constants.centred, buffers.centred, results.moments)
    return squared_length(flattened(rows)), total + zero_if_finite(results.numbers)


loops = BlockLoops(accumulate, None)
