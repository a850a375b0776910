"""Sums of moments over blocks of rows."""

from __future__ import annotations

import numpy as np

from emtau_dask.mixture.covariance import Moments
from emtau_dask.mixture.model import PairwiseMerger

ADDED_ROWS = 1024
"""Rows whose moments are added up block by block, where blocks are shorter."""


class MomentSums:
    """Moments of a stream of blocks, in float64; those of each are to be written into ``block``.

    Blocks are added up in place until they have ``added_rows`` rows, as many as one product would sum anyway.
    These sums are merged pairwise.
    """

    def __init__(self, block: Moments, added_rows: int = ADDED_ROWS) -> None:
        self.block = block
        self._sums: Moments | None = None
        self._rows, self._added_rows = 0, added_rows
        self._merger: PairwiseMerger[Moments] = PairwiseMerger(lambda a, b: tuple(map(np.add, a, b)))

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
