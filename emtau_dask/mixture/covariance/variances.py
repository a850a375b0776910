"""What the covariance types without correlations have in common."""

from __future__ import annotations

import numpy as np

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.numerics import Floats


def inverses(precisions: Floats, name: str) -> tuple[Floats, Floats]:
    """Return the variances and precision factors of ``precisions_init``; raises `InvalidDataError`."""
    if not (precisions > 0).all():
        raise InvalidDataError(
            f"'{name} precision' should be positive; the smallest of precisions_init is "
            f"{precisions.min():.6g}. Give inverse variances above 0."
        )
    return 1.0 / precisions, np.sqrt(precisions)


def no_correlation(covariances: Floats) -> Floats:
    """Return the condition number of the correlation matrices, (1,)."""
    return np.ones(1)


def squared_lengths(vectors: Floats) -> Floats:
    """Return the sums of squares over the last axis."""
    lengths: Floats = (vectors**2).sum(axis=-1)
    return lengths


def scaled_trace(scatter: Floats, factors: Floats) -> float:
    """Return the sum of the scatters, each in units of its variance."""
    return float((scatter * factors**2).sum())


def magnitudes(means: Floats) -> Floats:
    """Return the root mean square of the coordinates of each of ``means`` (K, d), shape (K, 1)."""
    found: Floats = np.sqrt(np.mean(means**2, axis=1, keepdims=True))
    return found


def linear_in_squares(constants: Floats, means: Floats, precisions: Floats) -> Floats:
    """Return the coefficients (K, 1 + d + S) of means (K, d) and precisions (K, S), in the frame."""
    return np.hstack([constants[:, np.newaxis], precisions * means, -0.5 * precisions])
