"""Random numbers by row number, and nested samples of rows: the same under any chunking.

They are drawn from the counter-based generator Philox (Salmon et al. 2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.source import ChunkRange
from emtau_dask.mixture.linalg import Floats, Ints

BLOCK = 2**13
"""Number of rows that are hashed at a time, so that they stay in the processor's cache."""
GOLDEN, FIRST, SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
MEMBERSHIP, ACTIVITY = 1, 2
"""Purposes of hashed numbers; each has an independent stream."""
RESPONSIBILITY, PRIORITY = 1, 2
"""Purposes of Philox numbers; each has an independent stream."""
_DRAWS_PER_COUNT = 4


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


@dataclass(frozen=True)
class Samples:
    """Nested samples: a row with the number u in [0, 1) is in every sample whose share is above u.

    Attributes
    ----------
    seed : int
    shares : tuple of float
        Expected shares of the rows, ascending.
    """

    seed: int
    shares: tuple[float, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the rows of the samples are cached."""
        return tuple(f"sample {level}" for level in range(len(self.shares)))

    def positions(self, chunk_range: ChunkRange, positions: Ints) -> list[Ints]:
        """Return, for each sample, which of the ``positions`` of a chunk are in it."""
        numbers = self.numbers(chunk_range, positions)
        return [positions[numbers < share] for share in self.shares]

    def within_share(self, chunk_range: ChunkRange, positions: Ints, share: float) -> Ints:
        """Return which of the positions are in a sample with the given share of all rows."""
        return positions[self.numbers(chunk_range, positions) < share]

    def numbers(self, chunk_range: ChunkRange, positions: Ints) -> Floats:
        """Return the number in [0, 1) of each of the positions of a chunk."""
        return hashed_uniforms((self.seed, MEMBERSHIP), chunk_range.start + positions)


def row_uniforms(seed: int, purpose: int, start: int, stop: int, width: int) -> NDArray[np.float64]:
    """Return the uniform numbers of rows ``start`` to ``stop``.

    Parameters
    ----------
    seed : int
        Non-negative, within_share 2**64.
    purpose : int
        `RESPONSIBILITY` or `PRIORITY`.
    start, stop : int
    width : int
        Number of values for each row.

    Returns
    -------
    ndarray of shape (stop - start, width), float64 in [0, 1)
    """
    counts = -(-width // _DRAWS_PER_COUNT)
    generator = np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64))
    generator.advance(start * counts)
    values = np.random.Generator(generator).random((stop - start, counts * _DRAWS_PER_COUNT))
    return np.ascontiguousarray(values[:, :width])
