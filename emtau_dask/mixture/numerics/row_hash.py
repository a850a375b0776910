"""Uniform numbers that depend on keys and on row numbers alone, cheap enough for every row of a pass."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.mixture.numerics.arrays import Floats, Ints

BLOCK = 2**13
"""Rows whose numbers are mixed together: what fits in a cache."""
GOLDEN, FIRST, SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def _mixed(values: NDArray[Any]) -> NDArray[Any]:
    """Mix 64-bit integers in place: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    values ^= values >> np.uint64(30)
    values *= FIRST
    values ^= values >> np.uint64(27)
    values *= SECOND
    values ^= values >> np.uint64(31)
    return values


def hashed_uniforms(keys: tuple[int, ...], rows: Ints) -> Floats:
    """Return a number in [0, 1) for each of ``rows`` (n,), a function of the keys and the row's number."""

    def folded(state: NDArray[Any], key: int) -> NDArray[Any]:
        return _mixed((state ^ np.uint64(key % 2**64)) + GOLDEN)

    salt = reduce(folded, keys, np.zeros(1, dtype=np.uint64))
    result = np.empty(len(rows))
    for begin in range(0, len(rows), BLOCK):
        some = rows[begin : begin + BLOCK].astype(np.uint64)
        some *= GOLDEN
        some ^= salt
        np.multiply(_mixed(some) >> np.uint64(11), 2.0**-53, out=result[begin : begin + BLOCK])
    return result
