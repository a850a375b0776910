"""Nested random samples of the rows, the same under any chunking."""

from __future__ import annotations

from dataclasses import dataclass

from emtau_dask.io.sources import ChunkRange
from emtau_dask.mixture.numerics import Floats, Ints, hashed_uniforms

MEMBERSHIP, ACTIVITY = 1, 2
"""What the numbers of rows are drawn for; each is a stream of its own."""


@dataclass(frozen=True)
class Samples:
    """Samples that each hold those before: a row is in all whose share is above its number.

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

    def positions(self, chunk_range: ChunkRange, present: Ints) -> list[Ints]:
        """Return, for each sample, which of the positions ``present`` of a chunk are in it."""
        numbers = self.numbers(chunk_range, present)
        return [present[numbers < share] for share in self.shares]

    def below(self, chunk_range: ChunkRange, positions: Ints, share: float) -> Ints:
        """Return which of the positions are in a sample of a share of its own."""
        return positions[self.numbers(chunk_range, positions) < share]

    def numbers(self, chunk_range: ChunkRange, positions: Ints) -> Floats:
        """Return the number in [0, 1) of each of the positions of a chunk."""
        return hashed_uniforms((self.seed, MEMBERSHIP), chunk_range.start + positions)
