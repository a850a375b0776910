"""The form by features of compiled tiles: products of coefficients and responsibilities with features."""

from __future__ import annotations

from typing import Any, NamedTuple

from emtau_dask.kernels.loop import add, loops_of
from emtau_dask.kernels.missing import squared_length
from emtau_dask.kernels.products import inlined, multiply, multiply_transposed, subtract_transposed
from emtau_dask.mixture.linalg import AnyArray, Floats, Ints


class FeatureConstants(NamedTuple):
    """Constants of all blocks under one Θ; arrays of numbers have the dtype of the products.

    Square s is the sum of ``y_i y_j`` over the pairs from ``first[s]`` to ``first[s + 1]``.
    """

    centre: AnyArray  # (1, d)
    transposed: AnyArray  # the transpose of the frame's transform, (d, d); (0, 0) for the identity
    first: Ints
    i: Ints
    j: Ints
    coefficients: AnyArray  # (K, F)
    least: float  # exponentials of smaller numbers count as 0
    ceiling: float  # log-densities minus scores, nats


class FeatureMoments(NamedTuple):
    """Moments of a block."""

    sums: Floats  # of the first F' features, (K, F')


class PooledMoments(NamedTuple):
    """Moments of a block if components share a covariance; squares are summed over all components."""

    sums: Floats  # of the first F' features, (K, F')
    squares: Floats  # over all components, (d, d)


class FeatureBuffers(NamedTuple):
    """Buffers of one thread for tiles of T rows; T values fill a multiple of three cache lines.

    In a tile of fewer rows, the other columns have the values of an earlier tile, and are multiplied by 0.
    So differences and features must be finite when a block begins.
    """

    differences: AnyArray  # (d, T); without a transform, the coordinates among the features
    features: AnyArray  # (F, T); the first is 1 throughout
    scores: AnyArray  # (K, T)
    sums: AnyArray  # (T,)
    peaks: AnyArray  # (T,)
    part: AnyArray  # sums of the first F' features, (K, F')
    weighted: AnyArray  # (d, T) if squares are summed over all components, else (0, T)
    square: AnyArray  # (d, d) in that case, else (0, 0)


@inlined
def fill(constants: Any, rows: Any, buffers: Any) -> None:
    """Write the features of a tile."""
    subtract_transposed(rows, constants.centre, buffers.differences)
    d, features = len(constants.centre[0]), buffers.features
    coordinates = features[1 : 1 + d]
    if constants.transposed.size > 0:
        multiply(constants.transposed, buffers.differences, coordinates)
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


@inlined
def _fill_incomplete(constants: Any, rows: Any, buffers: Any) -> None:
    """Write the features of a tile of rows with missing values; see `mixture.features`."""
    subtract_transposed(rows, constants.centre, buffers.differences)
    d, features = len(constants.centre[0]), buffers.features
    for f in range(1, 1 + d):
        values, squares, known = features[f], features[d + f], features[2 * d + f]
        for t in range(len(values)):
            known[t] = values[t] == values[t]
            values[t] = values[t] if values[t] == values[t] else 0.0
            squares[t] = values[t] * values[t]


@inlined
def score(constants: Any, buffers: Any) -> None:
    """Write the scores of a tile."""
    multiply(constants.coefficients, buffers.features, buffers.scores)


@inlined
def collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the sums of a tile's features to `FeatureMoments`."""
    multiply_transposed(buffers.scores, buffers.features, buffers.part)
    add(buffers.part, moments.sums)


@inlined
def _collect_pooled(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the sums of a tile's features, and the squares of its rows, to `PooledMoments`."""
    collect(constants, rows, weights, buffers, moments)
    m = len(rows)
    for f in range(len(moments.squares)):
        weighted, coordinate = buffers.weighted[f], buffers.features[1 + f]
        for t in range(m):
            weighted[t] = coordinate[t] * weights[t] if len(weights) > 0 else coordinate[t]
        for t in range(m, len(weighted)):
            weighted[t] = 0
    multiply_transposed(buffers.weighted, buffers.features[1:], buffers.square)
    add(buffers.square, moments.squares)


@inlined
def _finish(constants: Any, buffers: Any, moments: Any) -> None:
    """Do nothing: no moments are left in the buffers."""


loops = loops_of("features", fill=fill, score=score, collect=collect, finish=_finish)
incomplete_loops = loops_of(
    "incomplete",
    fill=_fill_incomplete,
    score=score,
    collect=collect,
    finish=_finish,
    squared_length=squared_length,
)
pooled_loops = loops_of("pooled", fill=fill, score=score, collect=_collect_pooled, finish=_finish)
