"""Cholesky factors of covariances, refused where float64 cannot tell them from singular.

A covariance that was computed from rounded data is hardly ever *exactly* singular, so the success of a
Cholesky factorisation says little. Two limits decide here, both independent of units:

- a variance must exceed ``(8 ε |μ|)²``, which the rounding of the rows themselves can produce: below it, the
  rows are identical in float64;
- every pivot of the *correlation* matrix must exceed ``64 d ε``, the size of the rounding errors of the
  scatter that it was computed from.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import lapack

from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.numerics.arrays import EPS, SIDE, Floats, read_only_copy
from emtau_dask.mixture.numerics.blas import factorise, invert_small, times_upper, upper_times

SPACING_FACTOR = 8.0
PIVOT_FACTOR = 64.0
INVERTED_AT_ONCE = 64
"""Most features for which LAPACK inverts a factor in one call; products of halves are faster beyond."""


def check_variances(variances: Floats, means: Floats, weights: Floats, first: int = 0) -> None:
    """Refuse variances (K, m) that the rounding of the rows alone can produce.

    Means (K, m) are the magnitudes of the rows' coordinates. `SingularComponentError` is raised for the first
    such component, with its number, counted from ``first`` (-1 for a shared covariance), and its weight, of
    ``weights`` (K,).
    """
    floors = (SPACING_FACTOR * EPS * np.abs(means)) ** 2
    bad = ~(variances > floors)
    if bad.any():
        k, j = np.argwhere(bad)[0]
        raise SingularComponentError(
            first + int(k),
            float(weights[k]),
            f"the variance of feature {j} is {variances[k, j]:.3g}, not above {floors[k, j]:.3g}, "
            "what float64 can resolve there",
        )


def covariance_factors(covariances: Floats, precision_factors: Floats) -> Floats:
    """Return the upper-triangular U with ``Uᵀ U = covariance`` of each (K, d, d), whose inverse is known.

    Where a covariance is singular to working precision, U is the inverse of its precision factor.
    """
    factors = np.empty(covariances.shape)
    _copy_upper(covariances, factors)
    for k in np.flatnonzero(factorise(factors)):
        factors[k] = upper_inverse(precision_factors[k])
    return factors


def precision_factors(covariances: Floats, means: Floats, weights: Floats, first: int = 0) -> Floats:
    """Return for each of ``covariances`` (K, d, d) the upper-triangular P with ``P Pᵀ = covariance⁻¹``.

    Arguments and errors are those of `cholesky_factors`.
    """
    factors = np.empty(covariances.shape)
    cholesky_factors(covariances, means, weights, factors, first)
    invert_upper(factors)
    return factors


def cholesky_factors(
    covariances: Floats, means: Floats, weights: Floats, out: Floats, first: int = 0
) -> None:
    """Write the upper-triangular U with ``Uᵀ U = covariance`` into ``out`` (K, d, d).

    The other arguments are those of `check_variances`. `SingularComponentError` is raised where a covariance
    is singular to working precision.
    """
    _copy_upper(covariances, out)
    factorise_upper(out, means, weights, first)


def factorise_upper(matrices: Floats, means: Floats, weights: Floats, first: int = 0) -> None:
    """Turn the upper triangles of covariances (K, d, d) into their Cholesky factors, in place.

    Errors are those of `cholesky_factors`. A pivot of the correlation matrix is that of the covariance over
    the feature's variance, and rounding does not depend on the scale of features.
    """
    variances = np.einsum("kii->ki", matrices).copy()
    check_variances(variances, means, weights, first)
    failed = factorise(matrices)
    pivots = np.einsum("kii->ki", matrices) ** 2 / variances
    for some, number in zip(pivots, failed, strict=True):
        if number:
            some[number - 1 :] = np.inf
            some[number - 1] = 0.0
    limit = PIVOT_FACTOR * variances.shape[1] * EPS
    singular = ~(pivots > limit).all(axis=1)
    if singular.any():
        k = int(np.argmax(singular))
        raise SingularComponentError(
            first + k,
            float(weights[k]),
            f"feature {np.argmin(pivots[k])} is a linear combination of the features before it to within "
            f"{limit:.3g} of its variance, so the covariance is not positive definite",
        )


def _copy_upper(matrices: Floats, out: Floats) -> None:
    """Copy the upper triangles of matrices (K, d, d), and write zeros below."""
    for begin in range(0, matrices.shape[-1], SIDE):
        rows, columns = slice(begin, begin + SIDE), slice(begin, None)
        out[:, rows, :begin] = 0.0
        out[:, rows, columns] = matrices[:, rows, columns]
        tile = out[:, rows, rows]
        tile *= np.tri(tile.shape[-1]).T


def invert_upper(upper: Floats) -> None:
    """Invert upper-triangular matrices (K, d, d) in place, by halves."""
    d = upper.shape[-1]
    if d <= INVERTED_AT_ONCE:
        invert_small(upper)
        return
    half = d // 2
    first, corner, last = upper[:, :half, :half], upper[:, :half, half:], upper[:, half:, half:]
    invert_upper(first)
    invert_upper(last)
    for k in range(len(upper)):
        times_upper(corner[k], last[k])
        upper_times(first[k], corner[k], scale=-1.0)


def upper_inverse(upper: Floats) -> Floats:
    """Return the inverse of an upper-triangular matrix."""
    inverse: Floats = np.triu(upper)
    invert_upper(inverse[np.newaxis])
    return inverse


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
    inverse = upper_inverse(factor)
    return read_only_copy(inverse.T @ inverse)
