"""The E-step over one block of rows.

Centred form, per component: differences to μ_k, whitened by the triangular
precision factor, squared and summed. Responsibilities exist for the rows of one
block only, in a workspace that is allocated once per task.
"""

from __future__ import annotations

import numpy as np

from emtau_dask.mixture.arrays import Floats
from emtau_dask.mixture.parameters import MixtureParameters

__all__ = ["EStepWorkspace", "block_rows", "e_step"]

BLOCK_ELEMENTS = 2**17
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 64, 8192


def block_rows(n_components: int, n_features: int) -> int:
    """Return how many rows make a block: a fixed function of K and d.

    The block's rows, differences, whitened differences, log-densities and
    responsibilities together take about 1 MiB, the L2 cache of a core.
    """
    rows = BLOCK_ELEMENTS // (3 * n_features + 2 * n_components)
    return max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, rows // 64 * 64))


class EStepWorkspace:
    """Buffers for blocks of up to ``rows`` rows, reused from block to block."""

    def __init__(self, rows: int, n_components: int, n_features: int) -> None:
        self.rows: Floats = np.empty((rows, n_features))
        self.differences: Floats = np.empty((rows, n_features))
        self.whitened: Floats = np.empty((rows, n_features))
        self.log_densities: Floats = np.empty((rows, n_components))


def e_step(
    rows: Floats, parameters: MixtureParameters, log_scales: Floats, workspace: EStepWorkspace
) -> tuple[Floats, Floats]:
    """Return responsibilities and log-likelihoods of a block of rows.

    Parameters
    ----------
    rows : ndarray of shape (n, d), float64, C-ordered
    parameters : MixtureParameters
    log_scales : ndarray of shape (K,)
        ``parameters.log_scales``, computed once per task.
    workspace : EStepWorkspace
        For at least n rows.

    Returns
    -------
    responsibilities : ndarray of shape (n, K)
        A view of the workspace, valid until the next call. Paper, section 2,
        equation for ``w_k(x_n, Θ)``.
    log_likelihoods : ndarray of shape (n,), nats
        ``ln p(x_n | Θ)``; not finite where a row is beyond the range of float64.
    """
    n = len(rows)
    differences = workspace.differences[:n]
    whitened = workspace.whitened[:n]
    log_densities = workspace.log_densities[:n]
    whiten = parameters.structure.whiten
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(parameters.n_components):
            np.subtract(rows, parameters.means[k], out=differences)
            whiten(differences, parameters.precisions_cholesky, k, whitened)
            np.einsum("ij,ij->i", whitened, whitened, out=log_densities[:, k])
        log_densities *= -0.5
        log_densities += log_scales
        peaks = log_densities.max(axis=1)
        log_densities -= peaks[:, np.newaxis]
        np.exp(log_densities, out=log_densities)
        sums = log_densities.sum(axis=1)
        log_densities /= sums[:, np.newaxis]
    return log_densities, peaks + np.log(sums)
