"""Squared distances of rows from components, one component at a time.

The differences to μ_k are whitened by the triangular precision factor, squared
and summed: no digit is lost however far the rows are from the origin, and
nothing is asked of the covariances.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from emtau_dask.mixture.arrays import Floats
from emtau_dask.mixture.parameters import MixtureParameters

__all__ = ["CentredWorkspace", "squared_distances"]


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
