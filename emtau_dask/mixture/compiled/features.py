"""The features' form of compiled tiles: products of coefficients and responsibilities with features."""

from __future__ import annotations

from typing import Any, NamedTuple

from emtau_dask.mixture.compiled.loop import add, collect, fill, implement, score
from emtau_dask.mixture.compiled.products import multiply, multiply_transposed, subtract_transposed
from emtau_dask.mixture.numerics import AnyArray, Ints


class FeatureConstants(NamedTuple):
    """What is the same for all blocks under one Θ; F features, of the dtype of the products.

    Attributes
    ----------
    centre : ndarray of shape (d,)
    turned : ndarray of shape (d, d)
        Transpose of the frame's transform; (0, 0) for the identity.
    first, i, j : ndarray of intp
        Square s is the sum of ``y_i y_j`` over pairs ``first[s]`` to ``first[s + 1]``.
    coefficients : ndarray of shape (K, F)
    least : float
        Exponentials of anything below it are 0.
    ceiling : float, nats
        What log-densities are above scores by.
    """

    centre: AnyArray
    turned: AnyArray
    first: Ints
    i: Ints
    j: Ints
    coefficients: AnyArray
    least: float
    ceiling: float


class FeatureBuffers(NamedTuple):
    """Of one thread, for tiles of T rows; what is left of a longer tile is multiplied by 0.

    T numbers fill a multiple of three cache lines.

    Attributes
    ----------
    differences : ndarray of shape (d, T)
        The same as the features' coordinates where nothing is transformed. Finite where a block begins.
    features : ndarray of shape (F, T)
        The first is 1 throughout. Finite where a block begins.
    scores : ndarray of shape (K, T)
    sums, peaks : ndarray of shape (T,)
    part : ndarray of shape (K, F')
        Sums of the first F' of the F features.
    weighted : ndarray of shape (d, T), or (0, T)
        Where squares over all components are wanted.
    square : ndarray of shape (d, d) or (0, 0)
    """

    differences: AnyArray
    features: AnyArray
    scores: AnyArray
    sums: AnyArray
    peaks: AnyArray
    part: AnyArray
    weighted: AnyArray
    square: AnyArray


def _fill(constants: Any, rows: Any, buffers: Any) -> None:
    d, features = rows.shape[1], buffers.features
    subtract_transposed(rows, constants.centre.reshape(1, d), 0, buffers.differences)
    if constants.turned.size > 0:
        multiply(constants.turned, buffers.differences, 1, features)
    coordinates = features[1 : 1 + d]
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
    multiply(constants.coefficients, buffers.features, 0, buffers.scores)


def _collect(constants: Any, rows: Any, weights: Any, buffers: Any, results: Any) -> None:
    multiply_transposed(buffers.scores, buffers.features, 0, buffers.part)
    add(buffers.part, results.moments)
    m = len(rows)
    for f in range(len(results.squares)):
        weighted, coordinate = buffers.weighted[f], buffers.features[1 + f]
        for t in range(m):
            weighted[t] = coordinate[t] * weights[t] if len(weights) > 0 else coordinate[t]
        for t in range(m, len(weighted)):
            weighted[t] = 0
    if len(results.squares) > 0:
        multiply_transposed(buffers.weighted, buffers.features, 1, buffers.square)
        add(buffers.square, results.squares)


implement(fill, FeatureConstants, _fill)
implement(score, FeatureConstants, _score)
implement(collect, FeatureConstants, _collect)
