"""The centred form of compiled tiles for rows with missing values: each component completes them by itself.

The expected values of what a row lacks minimise its distance from the component, so the completed row has the
distance that its own values have (Ghahramani and Jordan 1994, "Supervised learning from incomplete data via
an EM approach", section 3). With Λ the precision, m the missing features, and the row's missing values at the
centre of the mixture, the expected values are the centre less ``Λ_mm⁻¹ g_m``, where g is the gradient
``Λ (x − μ)``. Rows are completed one by one, for all components at once: a vector has a number for each. No
pattern of missing values has to occur twice.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

from emtau_dask.kernels.centred import CentredBuffers, CentredConstants, score_component, sum_all
from emtau_dask.kernels.loop import flattened, logarithm, loops_of, sort_places
from emtau_dask.kernels.products import inlined, subtract_transposed, sum_loop
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
from emtau_dask.mixture.linalg import Floats

KEPT = 32
"""Mean number of inverses' entries that are kept for each row of a tile; others are computed twice."""
LOG_2PI = 1.8378770664093453


class LaneConstants(NamedTuple):
    """Constants with a number for each component, padded to P in whole vectors."""

    precisions: Floats  # Λ by feature i and feature j, (d, d, P)
    slopes: Floats  # −Λ (μ − centre), (d, P)
    minus_one: Floats  # (1, P)


class LaneBuffers(NamedTuple):
    """Buffers with a number for each component, for T rows of a tile."""

    filled: Floats  # the rows less the centre, 0 for missing values, (T, d)
    gradients: Floats  # of a row, (d, P)
    expected: Floats  # expected values less the centre, for each missing value, (T d, P)
    pivots: Floats  # of Λ_mm, for each missing value, (T d, P)
    inverses: Floats  # −Λ_mm⁻¹ of incomplete rows, one after the other, and of one more row, (32 T + d², P)


# What the centred form has, and
#   centre       of the mixture, repeated for each row of a tile, (T d,)
#   no_means     zeros, (1, P)
#   no_scores    zeros, (1, T)
#   lanes        `LaneConstants`
MissingConstants: Any = namedtuple(  # type: ignore[misc]
    "MissingConstants", (*CentredConstants._fields, "centre", "no_means", "no_scores", "lanes")
)
# What the centred form has, and
#   lacking      number of values that each row lacks, (T,)
#   order        the rows by these numbers, (T,)
#   ends         end of the rows of each number, (d + 2,)
#   m            number of missing values, (1,)
#   features     their features, (T d + 1,)
#   rows         their rows, (T d + 1,)
#   wheres       their places among the coordinates, (T d + 1,)
#   centres      the centre's value of its feature, (T d,)
#   completed    the expected values by component, (P, T d)
#   logs         their shares of ½ ln |2π Λ_mm⁻¹| by component, (P, T d)
#   responsibilities  by row, (T, P)
#   covariances  conditional covariances, weighted and summed over the block, (d², P)
#   lanes        `LaneBuffers`
MissingBuffers: Any = namedtuple(  # type: ignore[misc]
    "MissingBuffers",
    (
        *CentredBuffers._fields,
        *("lacking", "order", "ends", "m", "features", "rows", "wheres", "centres"),
        *("completed", "logs", "responsibilities", "covariances", "lanes"),
    ),
)


@sum_loop
def squared_length(values: Any) -> Any:
    """Return the sum of the squares of those of (m,) values that are not missing."""
    total = 0.0
    for i in range(len(values)):
        value = values[i]
        total += value * value if value == value else 0.0
    return total


@inlined
def _find(rows: Any, buffers: Any) -> Any:
    """Write which values of the rows (m, d) are missing, row by row; return their number.

    Rows that lack equally many come together, so that the processor can foresee how often a loop runs.
    """
    counts, coordinates, order, features = (
        buffers.lacking[: len(rows)],
        buffers.coordinates,
        buffers.order,
        buffers.features,
    )
    d, tile = rows.shape[1], coordinates.shape[1]
    for t in range(len(counts)):
        counts[t] = 0
    for f in range(d):
        of_feature = coordinates[f]
        for t in range(len(counts)):
            counts[t] += of_feature[t] != of_feature[t]
    sort_places(counts, buffers.ends, order)
    used = 0
    for n in range(buffers.ends[0], len(rows)):
        t = order[n]
        row = rows[t]
        for f in range(d):
            features[used] = f
            buffers.rows[used] = t
            buffers.wheres[used] = f * tile + t
            used += row[f] != row[f]
    return used


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
def _expect(t: Any, of: Any, place: Any, begin: Any, constants: LaneConstants, buffers: LaneBuffers) -> None:
    """Write the expected values of the missing features ``of`` (r,) of a row, and their pivots.

    They are written from ``begin`` on, and the inverse to a ``place`` among the inverses.
    """
    gradients, inverses, r, d = buffers.gradients, buffers.inverses, len(of), buffers.filled.shape[1]
    _invert(of, place, begin, constants, buffers)
    for column in range(0, gradients.shape[1], LANES):
        for i in range(r):
            multiply_row(buffers.filled, constants.precisions[of[i]], gradients, t, column, i, d)
            add_lanes(gradients, constants.slopes, gradients, i, column, i, of[i])
        for i in range(r):
            multiply_lanes(inverses, gradients, buffers.expected, place + i * r, column, begin + i, 0)
            for j in range(1, r):
                add_product(inverses, gradients, buffers.expected, place + i * r + j, column, begin + i, j)


@inlined
def _place_of(kept: Any, r: Any, buffers: Any) -> Any:
    """Return the place for the inverse of a row with r missing values: ``kept``, or the last one."""
    last = len(buffers.lanes.inverses) - len(buffers.covariances)
    return kept if kept + r * r <= last else last


@inlined
def fill(constants: Any, rows: Any, buffers: Any) -> None:
    """Write the coordinates of a tile, and what is expected of the missing ones."""
    subtract_transposed(rows, constants.origin, buffers.coordinates)
    buffers.m[0] = m = _find(rows, buffers)
    values, filled, centre = flattened(rows), flattened(buffers.lanes.filled), constants.centre
    for i in range(len(values)):
        filled[i] = values[i] - centre[i] if values[i] == values[i] else 0.0
    begin = kept = 0
    for n in range(buffers.ends[0], len(rows)):
        t = buffers.order[n]
        r = buffers.lacking[t]
        place = _place_of(kept, r, buffers)
        _expect(t, buffers.features[begin : begin + r], place, begin, constants.lanes, buffers.lanes)
        kept += r * r if place == kept else 0
        begin += r
    pivots = buffers.lanes.pivots[:m]
    logs = flattened(pivots)
    for i in range(len(logs)):
        logs[i] = 0.5 * (LOG_2PI - logarithm(logs[i]))
    subtract_transposed(pivots, constants.no_means, buffers.logs)
    subtract_transposed(buffers.lanes.expected[:m], constants.no_means, buffers.completed)
    for c in range(m):
        buffers.centres[c] = centre[buffers.features[c]]


@inlined
def _write_completed(k: Any, buffers: Any) -> None:
    """Write the expected values of component k into the tile."""
    coordinates, completed = flattened(buffers.coordinates), buffers.completed[k]
    for c in range(buffers.m[0]):
        coordinates[buffers.wheres[c]] = buffers.centres[c] + completed[c]


@inlined
def score(constants: Any, buffers: Any) -> None:
    """Write the scores of a tile."""
    coordinates = buffers.coordinates[: len(buffers.mean)]
    for k in range(len(buffers.scores)):
        _write_completed(k, buffers)
        score_component(k, constants, coordinates, k, buffers.scores)
        of_component, logs = buffers.scores[k], buffers.logs[k]
        for c in range(buffers.m[0]):
            of_component[buffers.rows[c]] += logs[c]


@inlined
def _add_covariances(n_rows: Any, constants: Any, buffers: Any) -> None:
    """Add the conditional covariances of the missing values, times the responsibilities of their rows."""
    d, responsibilities, covariances = len(buffers.mean), buffers.responsibilities, buffers.covariances
    subtract_transposed(buffers.scores, constants.no_scores, responsibilities)
    begin = kept = 0
    for n in range(buffers.ends[0], n_rows):
        t = buffers.order[n]
        r = buffers.lacking[t]
        of, place = buffers.features[begin : begin + r], _place_of(kept, r, buffers)
        if place != kept:
            _invert(of, place, begin, constants.lanes, buffers.lanes)
        for column in range(0, covariances.shape[1], LANES):
            for i in range(r):
                for j in range(i, r):
                    entry, into = place + i * r + j, of[i] * d + of[j]
                    subtract_product(
                        buffers.lanes.inverses, responsibilities, covariances, entry, column, into, t
                    )
        kept += r * r if place == kept else 0
        begin += r


@inlined
def collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of a tile about means for each component."""
    for k in range(len(buffers.scores)):
        _write_completed(k, buffers)
        sum_all(k, buffers, moments)
    _add_covariances(len(rows), constants, buffers)


@inlined
def finish(constants: Any, buffers: Any, moments: Any) -> None:
    """Add the conditional covariances of a block to its scatter."""
    d, covariances = len(buffers.mean), buffers.covariances
    for i in range(d):
        for j in range(i, d):
            of_features = covariances[i * d + j]
            for k in range(len(moments.scatter)):
                moments.scatter[k, i, j] += of_features[k]
                of_features[k] = 0.0


loops = loops_of(
    "missing", fill=fill, score=score, collect=collect, finish=finish, squared_length=squared_length
)
