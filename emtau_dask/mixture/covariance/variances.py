"""What the covariance types without correlations have in common."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.covariance.base import Frame, Moments, Split
from emtau_dask.mixture.numerics import Floats, Ints


def inverses(precisions: Floats, name: str) -> tuple[Floats, Floats]:
    """Return the variances and precision factors of ``precisions_init``; raises `InvalidDataError`."""
    if not (precisions > 0).all():
        raise InvalidDataError(
            f"'{name} precision' should be positive; the smallest of precisions_init is "
            f"{precisions.min():.6g}. Give inverse variances above 0."
        )
    return 1.0 / precisions, np.sqrt(precisions)


def no_correlation(covariances: Floats) -> Floats:
    """Return the condition number, 1, of all correlation matrices, (1,)."""
    return np.ones(1)


def split_by_feature(variances: Floats, factors: Floats, given: Ints, rest: Ints) -> Split:
    """Return the split of variances of each feature, (K, d) or (d,)."""
    return Split(variances[..., given], factors[..., given], None, variances[..., rest], factors[..., rest])


def split_of_all(variances: Floats, factors: Floats, given: Ints, rest: Ints) -> Split:
    """Return the split of variances that all features share, (K,) or ()."""
    return Split(variances, factors, None, variances, factors)


def squared_lengths(vectors: Floats) -> Floats:
    """Return the sums of squares over the last axis."""
    lengths: Floats = (vectors**2).sum(axis=-1)
    return lengths


def squares_by_feature(tiles: Iterable[Floats]) -> Floats:
    """Return the sum of the squares of all rows of tiles (n, d) in each feature, (d,)."""
    squares: Floats = np.sum([np.einsum("ij,ij->j", roots, roots) for roots in tiles], axis=0)
    return squares


def scaled_trace(scatter: Floats, factors: Floats) -> float:
    """Return the sum of the scatters, each in units of its variance."""
    return float((scatter * factors**2).sum())


def magnitudes(means: Floats) -> Floats:
    """Return the root mean square of the coordinates of each of ``means`` (K, d), shape (K, 1)."""
    found: Floats = np.sqrt(np.mean(means**2, axis=1, keepdims=True))
    return found


def own_coefficients(log_scales: Floats, means: Floats, factors: Floats, frame: Frame) -> Floats:
    """Return coefficients of own squares for precision factors (K, d) or (d,)."""
    precisions = np.broadcast_to(factors**2, means.shape)
    constants = log_scales - 0.5 * (precisions * means**2).sum(axis=1)
    return np.hstack([constants[:, np.newaxis], precisions * means, -0.5 * precisions])


def summed_coefficients(log_scales: Floats, means: Floats, factors: Floats, frame: Frame) -> Floats:
    """Return coefficients of the sum of squares for precision factors (K,) or ()."""
    precisions = np.broadcast_to(factors**2, len(means))
    constants = log_scales - 0.5 * precisions * squared_lengths(means)
    return np.column_stack([constants, precisions[:, np.newaxis] * means, -0.5 * precisions])


def own_scatters(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
    """Return the scatter of each component in each feature, (K, d), from sums of own squares."""
    return moments[0][:, 1 + means.shape[1] :] - weights[:, np.newaxis] * means**2


def summed_scatters(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
    """Return the scatter of each component, (K,), from sums of the sum of squares."""
    return moments[0][:, -1] - weights * squared_lengths(means)
