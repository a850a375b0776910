"""Sums of moments over blocks of rows."""

from __future__ import annotations

import numpy as np

from emtau_dask.mixture.covariance import Moments
from emtau_dask.mixture.model import PairwiseMerger

ADDED_ROWS = 1024
"""Rows of short blocks whose moments are added up one after another."""


def _added(a: Moments, b: Moments) -> Moments:
    return tuple(x + y for x, y in zip(a, b, strict=True))


class MomentSums:
    """Moments of a stream of blocks, in float64.

    Blocks are added up in place until they have as many rows as one product
    would sum anyway, and those sums pairwise.

    Parameters
    ----------
    shapes : tuple of tuple of int
    added_rows : int
        Rows that are added up in place.

    Attributes
    ----------
    block : Moments
        Where to write those of the next block.
    """

    def __init__(self, shapes: tuple[tuple[int, ...], ...], added_rows: int = ADDED_ROWS) -> None:
        self.block: Moments = tuple(np.empty(shape) for shape in shapes)
        self._sums: Moments | None = None
        self._rows, self._added_rows = 0, added_rows
        self._merger: PairwiseMerger[Moments] = PairwiseMerger(_added)

    def push(self, n_rows: int) -> None:
        """Add the moments that were written into `block`, of a block of ``n_rows`` rows."""
        if self._sums is None:
            self._sums = tuple(part.copy() for part in self.block)
        else:
            for total, part in zip(self._sums, self.block, strict=True):
                total += part
        self._rows += n_rows
        if self._rows >= self._added_rows:
            self._flush()

    def _flush(self) -> None:
        if self._sums is not None:
            self._merger.push(self._sums)
            self._sums, self._rows = None, 0

    def total(self) -> Moments | None:
        """Return the moments of all blocks so far, None where there were none."""
        self._flush()
        return self._merger.total()
