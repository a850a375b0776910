"""Squared distances of rows from components, one component at a time, and their statistics.

The differences to μ_k are whitened by the triangular precision factor, squared
and summed: no digit is lost however far the rows are from the origin, and
nothing is asked of the covariances.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from emtau_dask.mixture.arrays import Floats
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import PairwiseMerger, SufficientStatistics, block_statistics, merge

__all__ = ["CentredStatistics", "CentredWorkspace", "squared_distances", "stretch_rows"]

STRETCH_BYTES, MAX_STRETCH_ROWS = 2**23, 8192


def stretch_rows(n_components: int, n_features: int, block_rows: int) -> int:
    """Return how many rows `CentredStatistics` gathers: a fixed function of its arguments."""
    rows = STRETCH_BYTES // (8 * (n_features + n_components))
    return max(block_rows, min(MAX_STRETCH_ROWS, rows))


class CentredStatistics:
    """Statistics of a stream of blocks, centred on the means of long stretches of it.

    Statistics of a block cost a merge of K matrices (d, d) beside the block's
    own products: for short blocks of many features, far more than those.

    Parameters
    ----------
    structure : CovarianceStructure
    n_components, n_features : int
    block_rows : int
        Rows of the largest block.
    """

    def __init__(
        self, structure: CovarianceStructure, n_components: int, n_features: int, block_rows: int
    ) -> None:
        n_rows = stretch_rows(n_components, n_features, block_rows)
        self._structure = structure
        self._rows: Floats = np.empty((n_rows, n_features))
        self._responsibilities: Floats = np.empty((n_components, n_rows))
        self._gathered = 0
        self._merger = PairwiseMerger(partial(merge, structure))

    def push(self, rows: Floats, responsibilities: Floats) -> None:
        """Add a block of rows (n, d) with their responsibilities (K, n)."""
        if self._gathered + len(rows) > len(self._rows):
            self._flush()
        block = slice(self._gathered, self._gathered + len(rows))
        self._rows[block] = rows
        self._responsibilities[:, block] = responsibilities
        self._gathered = block.stop

    def _flush(self) -> None:
        if self._gathered:
            rows, responsibilities = self._rows[: self._gathered], self._responsibilities[:, : self._gathered]
            self._merger.push(block_statistics(self._structure, rows, responsibilities))
            self._gathered = 0

    def total(self) -> SufficientStatistics | None:
        """Return the statistics of all blocks so far, None where there were none."""
        self._flush()
        return self._merger.total()


class CentredWorkspace:
    """Buffers for blocks of up to ``n_rows`` rows, reused from block to block."""

    def __init__(self, n_rows: int, n_features: int) -> None:
        self.differences: Floats = np.empty((n_rows, n_features))
        self.whitened: Floats = np.empty((n_rows, n_features))


def squared_distances(
    rows: Floats,
    parameters: MixtureParameters,
    components: Iterable[int],
    workspace: CentredWorkspace,
    out: Floats,
) -> None:
    """Write ``(x_n − μ_k)ᵀ Σ_k⁻¹ (x_n − μ_k)`` into ``out`` (K, n), for some components k.

    Parameters
    ----------
    rows : ndarray of shape (n, d), float64
    parameters : MixtureParameters
    components : iterable of int
    workspace : CentredWorkspace
        For at least n rows.
    out : ndarray of shape (K, n)
    """
    n = len(rows)
    differences, whitened = workspace.differences[:n], workspace.whitened[:n]
    whiten = parameters.structure.whiten
    for k in components:
        np.subtract(rows, parameters.means[k], out=differences)
        whiten(differences, parameters.precisions_cholesky, k, whitened)
        np.einsum("ij,ij->i", whitened, whitened, out=out[k])
