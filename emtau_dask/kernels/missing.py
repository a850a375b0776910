"""The centred form of compiled tiles for rows with missing values: each component completes them by itself.

The expected values of what a row lacks minimise its distance from the component, so the completed row has the
distance that its own values have (Ghahramani and Jordan 1994, "Supervised learning from incomplete data via
an EM approach", section 3). With Λ the precision, m the missing features, and the row's missing values at the
centre of the mixture, the expected values are the centre less ``Λ_mm⁻¹ g_m``, where g is the gradient
``Λ (x − μ)``. Rows are completed one by one, for all components at once: a vector has a number for each. No
pattern of missing values has to occur twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from emtau_dask.kernels.centred import AboutMean, score_component, sum_all
from emtau_dask.kernels.loop import flattened, logarithm, loops_of, sort_places
from emtau_dask.kernels.products import inlined, internal, subtract_transposed, sum_loop
from emtau_dask.kernels.vectors import (
    LANES,
    add_lanes,
    add_product,
    copy_lanes,
    divide_lanes,
    multiply_lanes,
    multiply_row,
    subtract_product,
)
from emtau_dask.mixture.linalg import Floats, Ints

KEPT = 32
"""Mean number of inverses' entries that are kept for each row of a tile; others are computed twice."""
LOG_2PI = 1.8378770664093453


class LaneConstants(NamedTuple):
    """Constants with a number for each component, padded to P in whole vectors."""

    precisions: Floats  # Λ by feature i and feature j, (d, d, P)
    slopes: Floats  # −Λ (μ − centre), (d, P)
    minus_one: Floats  # (1, P)
    nothing: Floats  # zeros, (1, P)


class LaneBuffers(NamedTuple):
    """Buffers with a number for each component, for T rows of a tile."""

    filled: Floats  # the rows less the centre, 0 for missing values, (T, d)
    gradients: Floats  # of a row, (d, P)
    expected: Floats  # expected values less the centre, for each missing value, (T d, P)
    pivots: Floats  # of Λ_mm, for each missing value, (T d, P)
    inverses: Floats  # −Λ_mm⁻¹ of incomplete rows, one after the other, and of one more row, (32 T + d², P)


class Places(NamedTuple):
    """Where the T rows of a tile lack values, and what is expected of these by component."""

    lacking: Ints  # number of values that each row lacks, (T,)
    order: Ints  # the rows by these numbers, (T,)
    ends: Ints  # end of the rows of each number, (d + 2,)
    m: Ints  # number of missing values, (1,)
    features: Ints  # their features, (T d + 1,)
    rows: Ints  # their rows, (T d + 1,)
    wheres: Ints  # their places among the coordinates, (T d + 1,)
    centres: Floats  # the centre's value of their feature, (T d,)
    completed: Floats  # expected values less these, (P, T d)
    logs: Floats  # their shares of ½ ln |2π Λ_mm⁻¹|, (P, T d)


class MissingConstants(NamedTuple):
    """Constants of all blocks under one Θ."""

    origin: Floats  # zeros, (1, d)
    log_scales: Floats  # (K,), minus the ceiling, nats
    whitening: Floats  # that of the centred form, (K, d + 1, d)
    least: float  # exponentials of smaller numbers count as 0
    ceiling: float  # log-densities minus scores, nats
    centre: Floats  # of the mixture, repeated for each row of a tile, (T d,)
    no_scores: Floats  # zeros, (1, T)
    lanes: LaneConstants


class MissingBuffers(NamedTuple):
    """Buffers of one thread for tiles of T rows; coordinates must be finite when a block begins.

    Nested records are passed to functions on their own: numba's time grows with the arrays of a record.
    """

    coordinates: Floats  # x, and three rows of padding, (d + 3, T)
    scores: Floats  # (K, T)
    sums: Floats  # (T,)
    peaks: Floats  # (T,)
    about: AboutMean
    places: Places
    responsibilities: Floats  # by row, (T, P)
    covariances: Floats  # conditional covariances, weighted and summed over the block, (d², P)
    lanes: LaneBuffers


@sum_loop
def squared_length(values: Any) -> Any:
    """Return the sum of the squares of those of (m,) values that are not missing."""
    total = 0.0
    for i in range(len(values)):
        value = values[i]
        total += value * value if value == value else 0.0
    return total


@inlined
def _find(rows: Any, coordinates: Any, places: Places) -> None:
    """Write which values of the rows (m, d) are missing, row by row, and their number.

    Rows that lack equally many come together, so that the processor can foresee how often a loop runs.
    """
    counts, order, features = places.lacking[: len(rows)], places.order, places.features
    d, tile = rows.shape[1], coordinates.shape[1]
    for t in range(len(counts)):
        counts[t] = 0
    for f in range(d):
        of_feature = coordinates[f]
        for t in range(len(counts)):
            counts[t] += of_feature[t] != of_feature[t]
    sort_places(counts, places.ends, order)
    used = 0
    for n in range(places.ends[0], len(rows)):
        t = order[n]
        row = rows[t]
        for f in range(d):
            features[used] = f
            places.rows[used] = t
            places.wheres[used] = f * tile + t
            used += row[f] != row[f]
    places.m[0] = used


@inlined
def _sweep(place: Any, p: Any, r: Any, column: Any, begin: Any, constants: Any, buffers: Any) -> None:
    """Sweep the p-th of r rows of the matrix at a place among the inverses; write the pivot."""
    inverses, pivots, row = buffers.inverses, buffers.pivots, place + p * r
    copy_lanes(inverses, inverses, pivots, row + p, column, begin + p, 0)
    divide_lanes(constants.minus_one, pivots, inverses, 0, column, row + p, begin + p)
    for j in range(r):
        if j != p:
            divide_lanes(inverses, pivots, inverses, row + j, column, row + j, begin + p)
    for i in range(r):
        other = place + i * r
        if i != p:
            for j in range(r):
                if j != p:
                    subtract_product(inverses, inverses, inverses, other + p, column, other + j, row + j)
            copy_lanes(inverses, inverses, inverses, row + i, column, other + p, 0)


@inlined
def _invert(of: Any, place: Any, begin: Any, constants: LaneConstants, buffers: LaneBuffers) -> None:
    """Write ``−Λ_mm⁻¹`` for the missing features ``of`` (r,) to a place among the inverses, and the pivots.

    The pivots are written from ``begin`` on. Rows are swept one after the other (Beaton 1964, "The use of
    special matrix operators in statistical calculus"); a positive-definite matrix needs no other order.
    """
    inverses, r = buffers.inverses, len(of)
    for column in range(0, inverses.shape[1], LANES):
        for i in range(r):
            of_feature = constants.precisions[of[i]]
            for j in range(r):
                copy_lanes(of_feature, of_feature, inverses, of[j], column, place + i * r + j, 0)
        for p in range(r):
            _sweep(place, p, r, column, begin, constants, buffers)


@inlined
def _place_of(kept: Any, r: Any, buffers: LaneBuffers) -> Any:
    """Return the place for the inverse of a row with r missing values: ``kept``, or the last one."""
    last = len(buffers.inverses) - buffers.filled.shape[1] ** 2
    return kept if kept + r * r <= last else last


@internal
def _expect(
    rows: Any, centre: Any, coordinates: Any, places: Places, constants: LaneConstants, buffers: LaneBuffers
) -> None:
    """Find the missing values of the rows (m, d) of a tile, and write what is expected of them."""
    _find(rows, coordinates, places)
    m = places.m[0]
    values, filled = flattened(rows), flattened(buffers.filled)
    for i in range(len(values)):
        filled[i] = values[i] - centre[i] if values[i] == values[i] else 0.0
    gradients, inverses, expected, d = buffers.gradients, buffers.inverses, buffers.expected, rows.shape[1]
    begin = kept = 0
    for n in range(places.ends[0], len(rows)):
        t = places.order[n]
        r = places.lacking[t]
        of, place = places.features[begin : begin + r], _place_of(kept, r, buffers)
        _invert(of, place, begin, constants, buffers)
        for column in range(0, gradients.shape[1], LANES):
            for i in range(r):
                multiply_row(buffers.filled, constants.precisions[of[i]], gradients, t, column, i, d)
                add_lanes(gradients, constants.slopes, gradients, i, column, i, of[i])
            for i in range(r):
                multiply_lanes(inverses, gradients, expected, place + i * r, column, begin + i, 0)
                for j in range(1, r):
                    add_product(inverses, gradients, expected, place + i * r + j, column, begin + i, j)
        kept += r * r if place == kept else 0
        begin += r
    pivots = buffers.pivots[:m]
    logs = flattened(pivots)
    for i in range(len(logs)):
        logs[i] = 0.5 * (LOG_2PI - logarithm(logs[i]))
    subtract_transposed(pivots, constants.nothing, places.logs)
    subtract_transposed(expected[:m], constants.nothing, places.completed)
    for c in range(m):
        places.centres[c] = centre[places.features[c]]


@inlined
def fill(constants: Any, rows: Any, buffers: Any) -> None:
    """Write the coordinates of a tile, and what is expected of the missing ones."""
    subtract_transposed(rows, constants.origin, buffers.coordinates)
    _expect(rows, constants.centre, buffers.coordinates, buffers.places, constants.lanes, buffers.lanes)


@inlined
def _complete(k: Any, coordinates: Any, places: Places) -> None:
    """Write the expected values of component k into the tile."""
    values, wheres, centres, completed = (
        flattened(coordinates),
        places.wheres,
        places.centres,
        places.completed[k],
    )
    for c in range(places.m[0]):
        values[wheres[c]] = centres[c] + completed[c]


@inlined
def score(constants: Any, buffers: Any) -> None:
    """Write the scores of a tile."""
    coordinates, scores, places, d = (
        buffers.coordinates,
        buffers.scores,
        buffers.places,
        constants.origin.shape[1],
    )
    for k in range(len(scores)):
        _complete(k, coordinates, places)
        score_component(k, constants, coordinates[:d], k, scores)
        of_component, logs, rows = scores[k], places.logs[k], places.rows
        for c in range(places.m[0]):
            of_component[rows[c]] += logs[c]


@internal
def _add_covariances(
    m: Any, places: Places, responsibilities: Any, constants: LaneConstants, buffers: LaneBuffers, out: Any
) -> None:
    """Add to ``out`` the conditional covariances of the missing values of m rows, times responsibilities."""
    d, begin, kept = buffers.filled.shape[1], 0, 0
    for n in range(places.ends[0], m):
        t = places.order[n]
        r = places.lacking[t]
        of, place = places.features[begin : begin + r], _place_of(kept, r, buffers)
        if place != kept:
            _invert(of, place, begin, constants, buffers)
        for column in range(0, out.shape[1], LANES):
            for i in range(r):
                for j in range(i, r):
                    entry, into = place + i * r + j, of[i] * d + of[j]
                    subtract_product(buffers.inverses, responsibilities, out, entry, column, into, t)
        kept += r * r if place == kept else 0
        begin += r


@inlined
def collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of a tile about means for each component."""
    coordinates, scores, places, about = buffers.coordinates, buffers.scores, buffers.places, buffers.about
    for k in range(len(scores)):
        _complete(k, coordinates, places)
        sum_all(k, scores, coordinates, about, moments.sums[k], moments.scatter[k])
    responsibilities, lanes, covariances = buffers.responsibilities, buffers.lanes, buffers.covariances
    subtract_transposed(scores, constants.no_scores, responsibilities)
    _add_covariances(len(rows), places, responsibilities, constants.lanes, lanes, covariances)


@inlined
def finish(constants: Any, buffers: Any, moments: Any) -> None:
    """Add the conditional covariances of a block to its scatter."""
    d, covariances, scatter = constants.origin.shape[1], buffers.covariances, moments.scatter
    for i in range(d):
        for j in range(i, d):
            of_features = covariances[i * d + j]
            for k in range(len(scatter)):
                scatter[k, i, j] += of_features[k]
                of_features[k] = 0.0


loops = loops_of(
    "missing", fill=fill, score=score, collect=collect, finish=finish, squared_length=squared_length
)
