"""Sums over rows, as kernels make them and tasks merge them, before they are statistics of components.

Moments of features in a frame are plain sums: those of chunks add up, and what they say of means and scatters
is worked out once for all rows. That loses no more digits than doing it for each chunk, since the frame is
the same for all (`features.conditions`). What is summed about means of its own is statistics at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from emtau_dask.mixture.covariance import CovarianceStructure, Moments
from emtau_dask.mixture.model import Merger, PairwiseMerger, SufficientStatistics
from emtau_dask.mixture.numerics import Floats

ADDED_ROWS = 1024
"""Rows whose moments are added up block by block, where blocks are shorter."""


class RowSums(NamedTuple):
    """What is summed over some rows under one plan; either is None where nothing is summed so, but not both.

    Attributes
    ----------
    moments : ndarray of shape (m,) or None
        Of the components scored together, by features: their arrays, one after the other.
    statistics : SufficientStatistics or None
        Of all K components, zero where it is for the moments.
    """

    moments: Floats | None
    statistics: SufficientStatistics | None


class SumsMerger:
    """Merges the sums of parts of the rows, in the order in which they come."""

    def __init__(self, structure: CovarianceStructure) -> None:
        self._moments: list[Floats] = []
        self._merger = Merger(structure)

    def push(self, part: RowSums | None) -> None:
        """Add the next part; None stands for no rows."""
        if part is None:
            return
        if part.moments is not None:
            self._moments.append(part.moments)
        if part.statistics is not None:
            self._merger.push(part.statistics)

    def total(self) -> RowSums | None:
        """Return all parts merged, None where there were no rows. To be called once, after the last part."""
        moments, statistics = _sum(self._moments), self._merger.total()
        return None if moments is None and statistics is None else RowSums(moments, statistics)


def _sum(parts: list[Floats]) -> Floats | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def merge_sums(structure: CovarianceStructure, parts: Iterable[RowSums | None]) -> RowSums | None:
    """Return the sums of all rows of ``parts`` together; None stands for no rows."""
    merger = SumsMerger(structure)
    for part in parts:
        merger.push(part)
    return merger.total()


def size_of(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return how many numbers arrays of these shapes have."""
    return sum(map(math.prod, shapes))


def views_of(numbers: Floats, shapes: tuple[tuple[int, ...], ...]) -> Moments:
    """Return arrays of these shapes that lie one after the other in ``numbers``."""
    ends = list(accumulate(map(math.prod, shapes)))
    return tuple(
        numbers[begin:end].reshape(shape) for begin, end, shape in zip([0, *ends], ends, shapes, strict=False)
    )


class MomentSums:
    """Moments of a stream of blocks, in float64; those of each are to be written into ``block``, (m,).

    Blocks are added up in place until they have ``added_rows`` rows, as many as one product would sum anyway.
    These sums are merged pairwise.
    """

    def __init__(self, block: Floats, added_rows: int = ADDED_ROWS) -> None:
        self.block = block
        self._sum: Floats | None = None
        self._rows, self._added_rows = 0, added_rows
        self._merger: PairwiseMerger[Floats] = PairwiseMerger(operator.add)

    def push(self, n_rows: int) -> None:
        """Add the moments that were written into `block`, of a block of ``n_rows`` rows."""
        if self._sum is None:
            self._sum = self.block.copy()
        else:
            self._sum += self.block
        self._rows += n_rows
        if self._rows >= self._added_rows:
            self._flush()

    def _flush(self) -> None:
        if self._sum is not None:
            self._merger.push(self._sum)
            self._sum, self._rows = None, 0

    def total(self) -> Floats | None:
        """Return the moments of all blocks so far, (m,), None where there were none; then begin again."""
        self._flush()
        return self._merger.total()
