"""Which squares of the coordinates are features of a row.

The log-density of a Gaussian is linear in them, the coordinates, and the constant 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from emtau_dask.mixture.numerics import Floats, Ints, Step

MOST_DISTANCES = 16
"""Coordinates up to which products of each distance are a call of their own."""


@dataclass(frozen=True)
class Squares:
    """Features that are products of two coordinates, or sums of such products."""

    # (d) -> S, the number of squares.
    count: Callable[[int], int]
    # (d) -> first, i, j: square s is the sum of ``y_i y_j`` over the pairs from ``first[s]`` to
    # ``first[s + 1]``.
    pairs: Callable[[int], tuple[Ints, Ints, Ints]]
    # (coordinates (d, n), squares (S, n)) -> the steps that write the squares.
    fill: Callable[[Floats, Floats], Iterator[Step]]


def pairs_by_distance(d: int) -> tuple[Ints, Ints]:
    """Return i and j of the products of coordinates: every unordered pair once, by distance j − i mod d."""
    distance, i = np.divmod(np.arange(d * (d + 1) // 2), d)
    return i, (i + distance) % d


def _fill_all(coordinates: Floats, squares: Floats) -> Iterator[Step]:
    """Yield what writes the products by distance; for even d the last distance has half as many.

    There is a call for each distance. Where these would be many and short, so that threads wait for
    each other's lock, one call writes all.
    """
    d, n = coordinates.shape
    distances, rest = divmod(len(squares), d)
    if d <= MOST_DISTANCES:
        yield partial(np.multiply, coordinates, coordinates, squares[:d])
        for distance in range(1, distances):
            out = squares[distance * d : (distance + 1) * d]
            yield partial(np.multiply, coordinates[distance:], coordinates[:-distance], out[:-distance])
            yield partial(np.multiply, coordinates[:distance], coordinates[-distance:], out[-distance:])
        if rest:
            yield partial(np.multiply, coordinates[rest:], coordinates[:rest], squares[-rest:])
        return
    turned = np.empty((d + d // 2, n), dtype=coordinates.dtype)
    yield partial(np.copyto, turned[:d], coordinates)
    yield partial(np.copyto, turned[d:], coordinates[: d // 2])
    step, one = turned.strides
    others: Floats = np.ndarray((distances, d, n), turned.dtype, turned, strides=(step, step, one))
    yield partial(np.multiply, others, coordinates, squares[: distances * d].reshape(distances, d, n))
    if rest:
        yield partial(np.multiply, turned[distances : distances + rest], coordinates[:rest], squares[-rest:])


ALL_PAIRS = Squares(
    count=lambda d: d * (d + 1) // 2,
    pairs=lambda d: (np.arange(d * (d + 1) // 2 + 1), *pairs_by_distance(d)),
    fill=_fill_all,
)
OWN_SQUARES = Squares(
    count=lambda d: d,
    pairs=lambda d: (np.arange(d + 1), np.arange(d), np.arange(d)),
    fill=lambda y, squares: iter([partial(np.multiply, y, y, squares)]),
)
SUM_OF_SQUARES = Squares(
    count=lambda d: 1,
    pairs=lambda d: (np.array([0, d]), np.arange(d), np.arange(d)),
    fill=lambda y, squares: iter([partial(np.einsum, "ij,ij->j", y, y, out=squares[0])]),
)
