"""Cholesky factors of covariances, refused where float64 cannot tell them from singular.

A covariance that comes out of rounded data is never *exactly* singular, so
"the Cholesky factorisation went through" says little. Two limits decide here,
both free of units:

- a variance must exceed what the rounding of the rows themselves can produce,
  ``(8 ε |μ|)²``: below that the rows are identical as far as float64 can say;
- every pivot of the *correlation* matrix must exceed ``64 d ε``, the size of
  the rounding errors of the scatter that it was computed from.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack

from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.arrays import EPS, Floats, frozen

SPACING_FACTOR = 8.0
PIVOT_FACTOR = 64.0


def check_variances(variances: Floats, means: Floats, component: int, weight: float) -> None:
    """Refuse variances that the rounding of the rows alone can produce.

    Parameters
    ----------
    variances, means : ndarray of shape (n_features,)
        Variances of one component and the magnitude of the rows' coordinates.
    component : int
        Named in the error; -1 for a shared covariance.
    weight : float
        Named in the error.

    Raises
    ------
    SingularComponentError
    """
    floor = (SPACING_FACTOR * EPS * np.abs(means)) ** 2
    bad = ~(variances > floor)
    if bad.any():
        j = int(np.argmax(bad))
        raise SingularComponentError(
            component,
            weight,
            f"the variance of feature {j} is {variances[j]:.3g}, not above {floor[j]:.3g}, "
            "what float64 can resolve there",
        )


def precision_factor(covariance: Floats, means: Floats, component: int, weight: float) -> Floats:
    """Return the upper-triangular P with ``P Pᵀ = covariance⁻¹``.

    The factorisation runs on the correlation matrix, so that features of any
    scale are treated alike.

    Parameters
    ----------
    covariance : ndarray of shape (n_features, n_features)
    means : ndarray of shape (n_features,)
        Magnitude of the rows' coordinates, for the resolution limit.
    component : int
    weight : float
        Both named in the error.

    Returns
    -------
    ndarray of shape (n_features, n_features), float64

    Raises
    ------
    SingularComponentError
        The covariance is singular to working precision.
    """
    variances = np.diagonal(covariance)
    check_variances(variances, means, component, weight)
    scale = np.sqrt(variances)
    correlation = covariance / scale
    correlation /= scale[:, np.newaxis]
    lower, info = lapack.dpotrf(correlation.T, lower=1, clean=1, overwrite_a=1)
    limit = PIVOT_FACTOR * len(scale) * EPS
    pivots = np.diagonal(lower) ** 2
    if info != 0 or not (pivots > limit).all():
        j = int(info) - 1 if info > 0 else int(np.argmin(pivots))
        raise SingularComponentError(
            component,
            weight,
            f"feature {j} is a linear combination of the features before it to within {limit:.3g} "
            "of its variance, so the covariance is not positive definite",
        )
    inverse, _ = lapack.dtrtri(lower, lower=1, overwrite_c=1)
    factor: Floats = inverse.T
    factor /= scale[:, np.newaxis]
    return factor


def factor_of_precision(precision: Floats) -> Floats | None:
    """Return the upper-triangular P with ``P Pᵀ = precision``, or None where there is none.

    Cholesky of the row- and column-reversed matrix, reversed back: a lower
    factor of the reversed matrix is an upper factor of the matrix itself.
    """
    scale = np.sqrt(np.diagonal(precision))
    flipped = (precision / scale / scale[:, np.newaxis])[::-1, ::-1]
    lower, info = lapack.dpotrf(np.asfortranarray(flipped), lower=1, clean=1)
    if info != 0:
        return None
    return np.ascontiguousarray(lower[::-1, ::-1]) * scale[:, np.newaxis]


def covariance_of_factor(factor: Floats) -> Floats:
    """Return ``(P Pᵀ)⁻¹`` for an upper-triangular factor P, exactly symmetric."""
    inverse, _ = lapack.dtrtri(np.asfortranarray(factor), lower=0)
    return frozen(inverse.T @ inverse)
