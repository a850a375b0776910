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
LAPACK_FEATURES = 96
"""Features up to which LAPACK inverts a factor in one go."""


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
    limit = PIVOT_FACTOR * len(scale) * EPS
    factor, dependent = _upper_cholesky(correlation, limit)
    if dependent is not None:
        raise SingularComponentError(
            component,
            weight,
            f"feature {dependent} is a linear combination of the features before it to within {limit:.3g} "
            "of its variance, so the covariance is not positive definite",
        )
    _invert_upper(factor)
    factor /= scale[:, np.newaxis]
    return factor


def _upper_cholesky(correlation: Floats, limit: float) -> tuple[Floats, int | None]:
    """Return the upper Cholesky factor, and the feature whose pivot is at most ``limit``, None for no such.

    By NumPy: SciPy's LAPACK lets no other thread run, but says which pivot failed.
    """
    try:
        upper = np.linalg.cholesky(correlation, upper=True).astype(np.float64, copy=False)
    except np.linalg.LinAlgError:
        upper, failed = lapack.dpotrf(correlation, lower=0)
        return upper, int(failed) - 1 if failed else int(np.argmin(np.diagonal(upper)))
    pivots = np.diagonal(upper) ** 2
    return upper, None if (pivots > limit).all() else int(np.argmin(pivots))


def _invert_upper(upper: Floats) -> None:
    """Invert an upper-triangular matrix in place: by halves, whose products let other threads run."""
    if len(upper) <= LAPACK_FEATURES:
        upper[...] = lapack.dtrtri(upper, lower=0)[0]
        return
    half = len(upper) // 2
    first, corner, last = upper[:half, :half], upper[:half, half:], upper[half:, half:]
    _invert_upper(first)
    _invert_upper(last)
    np.matmul(first, corner @ last, out=corner)
    np.negative(corner, out=corner)


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
