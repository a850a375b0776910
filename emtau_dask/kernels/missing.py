"""The centred form of compiled tiles for rows with missing values: each component completes them by itself.

The expected values of what a row lacks minimise its distance from the component, so the completed row has the
distance that its own values have (Ghahramani and Jordan 1994, "Supervised learning from incomplete data via
an EM approach", section 3). With Λ the precision, m the missing features, and the row's missing values at the
centre, these expected values are the centre less ``Λ_mm⁻¹ g_m``, where g is the gradient ``Λ (x − μ)``. Rows
are scored and summed as they come: no pattern has to occur twice.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from emtau_dask.kernels import centred
from emtau_dask.kernels.centred import CentredBuffers, CentredConstants, score_component, sum_all
from emtau_dask.kernels.loop import logarithm, loops_of
from emtau_dask.kernels.products import inlined, loop, subtract_transposed, sum_loop
from emtau_dask.kernels.vectors import LANES, multiply_row

MAX_KEPT = 8
"""Maximum missing values of a row whose conditional covariances are kept until the row is summed."""
LOG_2PI = 1.8378770664093453

# What the centred form has, and
#   centre       of the mixture, (d,)
#   precisions   Λ by feature i, feature j and component, which are padded to whole vectors, (d, d, ≥ K)
#   slopes       Λ (μ − centre), (d, ≥ K)
#   inverted     Λ by component, (K, d, d)
MissingConstants: Any = namedtuple(  # type: ignore[misc]
    "MissingConstants", (*CentredConstants._fields, "centre", "precisions", "slopes", "inverted")
)
# What the centred form has, and for the m missing values, n incomplete rows and T rows of a tile
#   features     feature of each missing value, (T d + 1,)
#   places       row of each missing value, (T d,)
#   incomplete   the incomplete rows, (T + 1,)
#   ends         end of the missing values of each incomplete row, (T + 1,)
#   completed    expected values, (K, T d)
#   scales       ½ ln |2π Λ_mm⁻¹| of each incomplete row, (K, T)
#   kept         Λ_mm⁻¹ of each incomplete row of few missing values, one after the other, (K, T S)
#   filled       a row less the centre, 0 for missing values, (1, d)
#   gradients    (d, ≥ K)
#   inverse      Λ_mm⁻¹ of a row, (d, d)
#   n_incomplete n, (1,)
MissingBuffers: Any = namedtuple(  # type: ignore[misc]
    "MissingBuffers",
    (
        *CentredBuffers._fields,
        *("features", "places", "incomplete", "ends", "completed", "scales", "kept"),
        *("filled", "gradients", "inverse", "n_incomplete"),
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
def _find(rows: Any, buffers: Any) -> None:
    """Write which values of the rows (m, d) are missing."""
    features, ends, used, n = buffers.features, buffers.ends, 0, 0
    for t in range(len(rows)):
        row, begin = rows[t], used
        for f in range(len(row)):
            features[used] = f
            used += row[f] != row[f]
        for c in range(begin, used):
            buffers.places[c] = t
        buffers.incomplete[n] = t
        n += used > begin
        ends[n] = used
    buffers.n_incomplete[0] = n


@loop
def _invert(matrix: Any, of: Any, out: Any) -> Any:
    """Write the inverse of ``matrix[of, of]``, of r features, into ``out[:r, :r]``; return its log-determinant.

    It is computed by r pivots on the diagonal, which need no order for a positive-definite matrix.
    """
    r, logs = len(of), 0.0
    for i in range(r):
        row, into = matrix[of[i]], out[i]
        for j in range(r):
            into[j] = row[of[j]]
    for p in range(r):
        of_pivot = out[p]
        logs -= logarithm(of_pivot[p])
        inverse = 1.0 / of_pivot[p]
        of_pivot[p] = 1.0
        for j in range(r):
            of_pivot[j] *= inverse
        for i in range(r):
            if i != p:
                into = out[i]
                factor = into[p]
                into[p] = 0.0
                for j in range(r):
                    into[j] -= factor * of_pivot[j]
    return logs


@loop
def _complete(row: Any, of: Any, n: Any, begin: Any, kept: Any, constants: Any, buffers: Any) -> None:
    """Write the expected values of the missing features ``of`` (r,) of a row, and their scales.

    It is the n-th incomplete row of the tile. Its values begin at ``begin``, and what is kept at ``kept``.
    """
    filled, centre, gradients, inverse = buffers.filled[0], constants.centre, buffers.gradients, buffers.inverse
    d, r = len(row), len(of)
    for f in range(d):
        filled[f] = row[f] - centre[f] if row[f] == row[f] else 0.0
    for c in range(r):
        of_feature = constants.precisions[of[c]]
        for column in range(0, gradients.shape[1], LANES):
            multiply_row(buffers.filled, of_feature, gradients, 0, column, c, d)
        gradient, slope = gradients[c], constants.slopes[of[c]]
        for k in range(len(gradient)):
            gradient[k] -= slope[k]
    for k in range(len(buffers.scores)):
        logs = _invert(constants.inverted[k], of, inverse)
        buffers.scales[k, n] = 0.5 * (logs + r * LOG_2PI)
        for i in range(r):
            expected = centre[of[i]]
            for j in range(r):
                expected -= inverse[i, j] * gradients[j, k]
            buffers.completed[k, begin + i] = expected
        if r <= MAX_KEPT:
            place = kept
            for i in range(r):
                for j in range(i, r):
                    buffers.kept[k, place] = inverse[i, j]
                    place += 1


@inlined
def fill(constants: Any, rows: Any, buffers: Any) -> None:
    """Write the coordinates of a tile, and the expected values of the missing ones."""
    subtract_transposed(rows, constants.origin, buffers.coordinates)
    _find(rows, buffers)
    begin = kept = 0
    for n in range(buffers.n_incomplete[0]):
        end = buffers.ends[n + 1]
        of, r = buffers.features[begin:end], end - begin
        _complete(rows[buffers.incomplete[n]], of, n, begin, kept, constants, buffers)
        kept += r * (r + 1) // 2 if r <= MAX_KEPT else 0
        begin = end


@inlined
def _write_completed(k: Any, buffers: Any) -> None:
    """Write the expected values of component k into the tile."""
    completed = buffers.completed[k]
    for c in range(buffers.ends[buffers.n_incomplete[0]]):
        buffers.coordinates[buffers.features[c], buffers.places[c]] = completed[c]


@inlined
def score(constants: Any, buffers: Any) -> None:
    """Write the scores of a tile."""
    coordinates = buffers.coordinates[: len(buffers.mean)]
    for k in range(len(buffers.scores)):
        _write_completed(k, buffers)
        score_component(k, constants, coordinates, k, buffers.scores)
        of_component, scales = buffers.scores[k], buffers.scales[k]
        for n in range(buffers.n_incomplete[0]):
            of_component[buffers.incomplete[n]] += scales[n]


@inlined
def _add_covariances(k: Any, constants: Any, buffers: Any, scatter: Any) -> None:
    """Add the conditional covariances of the missing values, times responsibilities of component k."""
    responsibilities, of_component = buffers.scores[k], buffers.kept[k]
    begin = kept = 0
    for n in range(buffers.n_incomplete[0]):
        end = buffers.ends[n + 1]
        of, r, weight = buffers.features[begin:end], end - begin, responsibilities[buffers.incomplete[n]]
        if r > MAX_KEPT:
            _invert(constants.inverted[k], of, buffers.inverse)
            for i in range(r):
                for j in range(i, r):
                    scatter[of[i], of[j]] += weight * buffers.inverse[i, j]
        else:
            for i in range(r):
                into = scatter[of[i]]
                for j in range(i, r):
                    into[of[j]] += weight * of_component[kept]
                    kept += 1
        begin = end


@inlined
def collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of a tile about means for each component."""
    for k in range(len(buffers.scores)):
        _write_completed(k, buffers)
        sum_all(k, buffers, moments)
        _add_covariances(k, constants, buffers, moments.scatter[k])


loops = loops_of(
    "missing", fill=fill, score=score, collect=collect, finish=centred.finish, squared_length=squared_length
)
