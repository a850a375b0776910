"""The features' form of compiled tiles: products of coefficients and responsibilities with features."""

from __future__ import annotations

from typing import Any, NamedTuple

from emtau_dask.mixture.compiled.loop import add, collect, fill, finish, implement, score
from emtau_dask.mixture.compiled.products import multiply, multiply_transposed, subtract_transposed
from emtau_dask.mixture.numerics import AnyArray, Floats, Ints


class FeatureConstants(NamedTuple):
    """What is the same for all blocks under one Θ; arrays of numbers have the dtype of the products.

    Square s is the sum of ``y_i y_j`` over the pairs from ``first[s]`` to ``first[s + 1]``.
    """

    centre: AnyArray  # (d,)
    turned: AnyArray  # the transpose of the frame's transform, (d, d); (0, 0) for the identity
    first: Ints
    i: Ints
    j: Ints
    coefficients: AnyArray  # (K, F)
    least: float  # the exponentials of smaller numbers are taken for 0
    ceiling: float  # log-densities less scores, nats


class FeatureMoments(NamedTuple):
    """Of a block."""

    sums: Floats  # of the first F' features, (K, F')


class PooledMoments(NamedTuple):
    """Of a block, where components share a covariance whose squares are summed over all of them."""

    sums: Floats  # of the first F' features, (K, F')
    squares: Floats  # over all components, (d, d)


class FeatureBuffers(NamedTuple):
    """Buffers of one thread for tiles of T rows; T numbers fill a multiple of three cache lines.

    In a tile of fewer rows, the other columns keep what an earlier tile left, and are multiplied by 0.
    Differences and features must therefore be finite where a block begins.
    """

    differences: AnyArray  # (d, T); without a transform, the coordinates among the features
    features: AnyArray  # (F, T); the first is 1 throughout
    scores: AnyArray  # (K, T)
    sums: AnyArray  # (T,)
    peaks: AnyArray  # (T,)
    part: AnyArray  # sums of the first F' features, (K, F')
    weighted: AnyArray  # (d, T) where squares over all components are wanted, else (0, T)
    square: AnyArray  # (d, d) there, else (0, 0)


def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    d, features = rows.shape[1], buffers.features
    coordinates = features[1 : 1 + d]
    subtract_transposed(rows, constants.centre.reshape(1, d), buffers.differences)
    if constants.turned.size > 0:
        multiply(constants.turned, buffers.differences, coordinates)
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


def _score(constants: Any, buffers: Any) -> None:
    multiply(constants.coefficients, buffers.features, buffers.scores)


def _collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    multiply_transposed(buffers.scores, buffers.features, buffers.part)
    add(buffers.part, moments.sums)
    add_squares(moments, rows, weights, buffers)


def add_squares(moments: Any, rows: Any, weights: Any, buffers: Any) -> None:
    """Add the squares of the tile's rows, with ``weights`` (m,) or (0,), where the moments have them."""
    raise NotImplementedError


def _add_nothing(moments: Any, rows: Any, weights: Any, buffers: Any) -> None:
    pass


def _add_squares(moments: Any, rows: Any, weights: Any, buffers: Any) -> None:
    m = len(rows)
    for f in range(len(moments.squares)):
        weighted, coordinate = buffers.weighted[f], buffers.features[1 + f]
        for t in range(m):
            weighted[t] = coordinate[t] * weights[t] if len(weights) > 0 else coordinate[t]
        for t in range(m, len(weighted)):
            weighted[t] = 0
    multiply_transposed(buffers.weighted, buffers.features[1:], buffers.square)
    add(buffers.square, moments.squares)


def _finish(constants: Any, buffers: Any, moments: Any) -> None:
    pass


implement(add_squares, FeatureMoments, _add_nothing)
implement(add_squares, PooledMoments, _add_squares)
implement(finish, FeatureConstants, _finish)
implement(fill, FeatureConstants, _fill)
implement(score, FeatureConstants, _score)
implement(collect, FeatureConstants, _collect)
