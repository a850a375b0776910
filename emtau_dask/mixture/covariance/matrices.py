"""What the covariance types of matrices have in common."""

from __future__ import annotations

import numpy as np
from scipy.linalg import rq

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.covariance.base import Split
from emtau_dask.mixture.numerics import (
    EPS,
    Floats,
    Ints,
    factor_of_precision,
    symmetrised,
    times_upper,
    upper_inverse,
)

LEAST_BY_TRIANGLES = 64
"""Features from which on a product by a triangle is faster than one by a matrix."""
TILE = 2**16
"""Elements of a matrix that are worked on at a time."""


def add_outer_products(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    """Add ``Σ_i weights_ik · vectors_ik vectors_ikᵀ`` to each of ``scatter`` (K, d, d), in place.

    Weights are (m, K), vectors (m, K, d). The work goes by tiles that stay in the cache, because forming
    products as large as ``scatter`` costs far more than adding them. Products below the rounding of the
    scatter are left out; corrections of means nearly always are.
    """
    _, K, d = vectors.shape
    together, rows = max(1, TILE // d**2), max(1, TILE // d)
    resolved = 0.25 * EPS * np.einsum("kii->ki", scatter)
    weighted = weights[:, :, np.newaxis] * vectors
    matters = (np.abs(weighted * vectors) > resolved).any(axis=(0, 2))
    left, right = weighted.transpose(1, 2, 0), vectors.transpose(1, 0, 2)
    for first in range(0, K, together):
        some = slice(first, first + together)
        if not matters[some].any():
            continue
        for begin in range(0, d, rows):
            tile = slice(begin, begin + rows)
            scatter[some, tile] += left[some, tile] @ right[some]


def regularised(matrices: Floats, reg_covar: float) -> Floats:
    """Return ``matrices`` (..., d, d) themselves, made symmetric, with ``reg_covar`` on the diagonal."""
    np.einsum("...ii->...i", symmetrised(matrices))[...] += reg_covar
    return matrices


def log_diagonal(factors: Floats) -> Floats:
    """Return the log-determinants of triangular ``factors`` (..., d, d)."""
    logs: Floats = np.log(np.einsum("...ii->...i", factors)).sum(axis=-1)
    return logs


def squared_factors(factors: Floats) -> Floats:
    """Return ``P Pᵀ`` of each of ``factors`` (..., d, d), exactly symmetric."""
    return symmetrised(factors @ factors.swapaxes(-1, -2))


def checked_factor(precision: Floats, name: str) -> Floats:
    """Return the factor of one matrix of ``precisions_init``; raises `InvalidDataError` where it has none."""
    tolerance = 1e-8 * float(np.abs(precision).max())
    symmetric = np.allclose(precision, precision.T, rtol=0.0, atol=tolerance)
    positive = symmetric and bool((np.diagonal(precision) > 0).all())
    factor = factor_of_precision(precision) if positive else None
    if factor is None:
        raise InvalidDataError(
            f"'{name} precision' should be symmetric, positive-definite; precisions_init is not. "
            "Give the inverse of a covariance matrix."
        )
    return factor


def correlation_conditions(covariances: Floats) -> Floats:
    """Return the condition numbers of the correlation matrices of ``covariances`` (m, d, d), shape (m,)."""
    scale = np.sqrt(np.einsum("kii->ki", covariances))
    spectra = np.linalg.eigvalsh(covariances / scale[:, :, np.newaxis] / scale[:, np.newaxis, :])
    kappa: Floats = spectra[:, -1] / np.maximum(spectra[:, 0], np.finfo(np.float64).tiny)
    return kappa


def correlated(normals: Floats, covariance: Floats, whose: str) -> Floats:
    """Return standard-normal draws (n, d), transformed to have a covariance; the error says whose it is."""
    try:
        return normals @ np.linalg.cholesky(covariance).T
    except np.linalg.LinAlgError as error:
        raise InvalidDataError(
            f"no rows can be drawn: {whose} is not positive definite. Fit again with a larger reg_covar."
        ) from error


def standardised_forms(seconds: Floats, weights: Floats, factors: Floats) -> Floats:
    """Return ``(P_kᵀ M_k P_k − w_k I) / √2`` of matrices (m, d, d) and weights (m,), shape (m, d²)."""
    forms = factors.swapaxes(-1, -2) @ seconds @ factors
    np.einsum("kii->ki", forms)[...] -= weights[:, np.newaxis]
    forms *= np.sqrt(0.5)
    return forms.reshape(len(forms), -1)


def whitened_trace(scatter: Floats, factors: Floats) -> float:
    """Return ``Σ_k tr(P_kᵀ S_k P_k)`` of matrices (..., d, d)."""
    d = scatter.shape[-1]
    if d < LEAST_BY_TRIANGLES:
        return float(np.vdot(factors, scatter @ factors))
    total = 0.0
    for matrix, factor in zip(scatter.reshape(-1, d, d), factors.reshape(-1, d, d), strict=True):
        product = matrix.copy()
        times_upper(product, factor)
        total += float(np.vdot(factor, product))
    return total


def split_matrices(covariances: Floats, factors: Floats, given: Ints, rest: Ints) -> Split:
    """Return the split of matrices (m, d, d) with the precision factors ``factors`` (m, d, d).

    The factor of the reordered features comes from the factor at hand by rotations of its rows, which lose no
    digits and cannot fail. With ``R Rᵀ`` the precision of (given, rest), the blocks of R on the diagonal are
    the factors of the given features alone and of the rest; what is above them holds the coefficients.
    """
    g = len(given)
    order = np.concatenate([given, rest])
    upper = np.stack([_rotated_upper(factor[order]) for factor in factors])
    inverses = np.stack([upper_inverse(each) for each in upper[:, g:, g:]])
    return Split(
        covariances[:, given[:, np.newaxis], given],
        upper[:, :g, :g],
        -(upper[:, :g, g:] @ inverses).swapaxes(1, 2),
        symmetrised(inverses.swapaxes(1, 2) @ inverses),
        upper[:, g:, g:],
    )


def _rotated_upper(rows: Floats) -> Floats:
    """Return the upper-triangular R of positive diagonal with ``R Rᵀ = rows rowsᵀ``, of a square matrix."""
    upper, _ = rq(rows, check_finite=False)
    return np.asarray(upper * np.where(np.diagonal(upper) < 0, -1.0, 1.0), dtype=np.float64)
