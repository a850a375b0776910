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
from emtau_dask.mixture.numerics.arrays import EPS, Floats, read_only_copy
from emtau_dask.mixture.numerics.products import times_upper, upper_times

SPACING_FACTOR = 8.0
PIVOT_FACTOR = 64.0
LAPACK_FEATURES = 96
"""Most features for which LAPACK inverts a factor in one call."""


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


def precision_factors(covariances: Floats, means: Floats, weights: Floats, first: int = 0) -> Floats:
    """Return for each of ``covariances`` (K, d, d) the upper-triangular P with ``P Pᵀ = covariance⁻¹``.

    Arguments and errors are those of `correlation_factors`.
    """
    return inverted_factors(*correlation_factors(covariances, means, weights, first))


def correlation_factors(
    covariances: Floats, means: Floats, weights: Floats, first: int = 0
) -> tuple[Floats, Floats]:
    """Return the upper Cholesky factors of the correlation matrices (K, d, d), and the scales (K, d).

    Correlations are factorised so that the scale of a feature does not matter. The other arguments are those
    of `check_variances`. `SingularComponentError` is raised where a covariance is singular to working
    precision.
    """
    variances = np.einsum("kii->ki", covariances)
    check_variances(variances, means, weights, first)
    scales = np.sqrt(variances)
    correlations = covariances / scales[:, np.newaxis, :]
    correlations /= scales[:, :, np.newaxis]
    limit = PIVOT_FACTOR * scales.shape[1] * EPS
    factors, dependent = _upper_cholesky(correlations, limit)
    if dependent is not None:
        k, feature = dependent
        raise SingularComponentError(
            first + k,
            float(weights[k]),
            f"feature {feature} is a linear combination of the features before it to within {limit:.3g} "
            "of its variance, so the covariance is not positive definite",
        )
    return factors, scales


def inverted_factors(factors: Floats, scales: Floats) -> Floats:
    """Turn `correlation_factors` into the P of their covariances, in place, and return them."""
    for factor in factors:
        _invert_upper(factor)
    factors /= scales[:, :, np.newaxis]
    return factors


def _upper_cholesky(correlations: Floats, limit: float) -> tuple[Floats, tuple[int, int] | None]:
    """Return the upper Cholesky factors, and the first singular component with the place of its least pivot.

    Singular is one whose least pivot is at most ``limit``; where there is none, return None. NumPy
    factorises, since SciPy's LAPACK lets no other thread run; SciPy's is asked only which pivot failed. NumPy
    copies a matrix by its columns, which lie side by side in the transpose.
    """
    try:
        transposes = correlations.swapaxes(-1, -2)
        factors = np.linalg.cholesky(transposes, upper=True).astype(np.float64, copy=False)
    except np.linalg.LinAlgError:
        factors = correlations
        pivots = np.stack([_pivots_until_failure(correlation) for correlation in correlations])
        limit = max(limit, pivots.min())  # where the two LAPACKs do not agree
    else:
        pivots = np.einsum("kii->ki", factors) ** 2
    singular = ~(pivots > limit).all(axis=1)
    if not singular.any():
        return factors, None
    k = int(np.argmax(singular))
    return factors, (k, int(np.argmin(pivots[k])))


def _pivots_until_failure(correlation: Floats) -> Floats:
    """Return a matrix's pivots: 0 for the first that is not positive, and infinity for those after it."""
    factor, failed = lapack.dpotrf(correlation, lower=0)
    pivots = np.diagonal(factor) ** 2
    if failed:
        pivots[failed - 1 :] = np.inf
        pivots[failed - 1] = 0.0
    return pivots


def _invert_upper(upper: Floats) -> None:
    """Invert an upper-triangular matrix in place, by halves: their products let other threads run."""
    if len(upper) <= LAPACK_FEATURES:
        upper[...] = lapack.dtrtri(upper, lower=0)[0]
        return
    half = len(upper) // 2
    first, corner, last = upper[:half, :half], upper[:half, half:], upper[half:, half:]
    _invert_upper(first)
    _invert_upper(last)
    right = np.empty(corner.shape)
    times_upper(corner, last, right)
    upper_times(first, right, corner)
    np.negative(corner, out=corner)


def upper_inverse(upper: Floats) -> Floats:
    """Return the inverse of an upper-triangular matrix."""
    inverse: Floats = lapack.dtrtri(np.asfortranarray(upper), lower=0)[0]
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
