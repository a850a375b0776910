"""`full`: each component has a covariance matrix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure, Frame, Moments
from emtau_dask.mixture.covariance.matrices import (
    add_outer_products,
    checked_factor,
    correlated,
    correlation_conditions,
    log_diagonal,
    regularised,
    split_matrices,
    squared_factors,
    standardised_forms,
    whitened_trace,
)
from emtau_dask.mixture.covariance.squares import ALL_PAIRS, pairs_by_distance
from emtau_dask.mixture.numerics import (
    Floats,
    correlation_factors,
    covariance_of_factor,
    inverted_factors,
    perform,
    precision_factors,
    read_only_copy,
    squares,
    times_upper,
)

THREADED = 2**26
"""K d³ from which on threads share the covariances and their factors: these then take milliseconds."""


def _covariances(scatter: Floats, weights: Floats, d: int, reg_covar: float, threads: int) -> Floats:
    if len(weights) * d**3 < THREADED:
        return regularised(scatter / weights[:, np.newaxis, np.newaxis], reg_covar)
    covariances = np.empty_like(scatter)

    def write(k: int) -> None:
        np.divide(scatter[k], weights[k], out=covariances[k])
        regularised(covariances[k], reg_covar)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(len(weights))))
    return covariances


def _factor(covariances: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    """Return precision factors; threads share two halves of each, so that they end nearly at once."""
    K, d = means.shape
    if K * d**3 < THREADED:
        return precision_factors(covariances, means, weights)
    factors, scales = np.empty_like(covariances), np.empty(means.shape)

    def begin(k: int) -> None:
        one = slice(k, k + 1)
        found = correlation_factors(covariances[one], means[one], weights[one], first=k)
        factors[one], scales[one] = found

    def end(k: int) -> None:
        begun[k].result()
        inverted_factors(factors[k : k + 1], scales[k : k + 1])

    with ThreadPoolExecutor(threads) as pool:
        begun = [pool.submit(begin, k) for k in range(K)]
        list(pool.map(end, range(K)))
    return factors


def _from_precisions(precisions: Floats) -> tuple[Floats, Floats]:
    factors = np.stack([checked_factor(p, "full") for p in precisions])
    return np.stack([covariance_of_factor(f) for f in factors]), factors


def _add_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    """Add the products, writing the first in place: it is often the only one, and may be large to copy."""
    for roots in islice(tiles, 1):
        perform(squares(roots.T, scatter[k]))
    for roots in tiles:
        scatter[k] += np.dot(roots.T, roots)


def _transforms(weights: Floats, covariances: Floats, factors: Floats) -> Iterator[Floats | None]:
    """Yield the identity, then what whitens the pooled covariance ``Σ π_k Σ_k``, common to components."""
    yield None
    pooled = np.tensordot(weights, covariances, axes=1)
    nothing, one = np.zeros((1, len(pooled))), np.ones(1)
    yield read_only_copy(precision_factors(pooled[np.newaxis], nothing, one, first=-1)[0])


def _coefficients(log_scales: Floats, means: Floats, factors: Floats, frame: Frame) -> Floats:
    factors = frame.factors(factors)
    K, d = means.shape
    whitened = np.einsum("ki,kij->kj", means, factors)
    precisions = factors @ factors.swapaxes(-1, -2)
    i, j = pairs_by_distance(d)
    coefficients = np.empty((K, 1 + d + len(i)))
    coefficients[:, 0] = log_scales - 0.5 * (whitened**2).sum(axis=1)
    coefficients[:, 1 : 1 + d] = np.einsum("kij,kj->ki", factors, whitened)
    coefficients[:, 1 + d :] = np.where(i == j, -0.5, -1.0) * precisions[:, i, j]
    return coefficients


def _scatter(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
    (sums,) = moments
    K, d = means.shape
    scatter = np.empty((K, d, d))
    i, j = pairs_by_distance(d)
    scatter[:, i, j] = sums[:, 1 + d :]
    scatter[:, j, i] = sums[:, 1 + d :]
    scatter -= weights[:, np.newaxis, np.newaxis] * means[:, :, np.newaxis] * means[:, np.newaxis, :]
    return frame.forms_back(scatter)


FULL = CovarianceStructure(
    name="full",
    shared=False,
    own_factors=True,
    shape=lambda K, d: (K, d, d),
    n_parameters=lambda K, d: K * d * (d + 1) // 2,
    covariances=_covariances,
    factor=_factor,
    log_det=lambda factors, K, d: log_diagonal(factors),
    precisions=squared_factors,
    from_precisions=_from_precisions,
    variances=lambda covariances, K, d: np.einsum("kii->ki", covariances),
    split=split_matrices,
    conditions=correlation_conditions,
    draw=lambda normals, covariances, k: correlated(
        normals, covariances[k], f"the covariance of component {k}"
    ),
    scikit_learn_name="full",
    whiten=lambda differences, factors, k, out: times_upper(differences, factors[k], out),
    add_scatter=_add_scatter,
    add_outer=add_outer_products,
    distances=whitened_trace,
    standardised=lambda seconds, weights, factors, d: standardised_forms(seconds, weights, factors),
    squares=ALL_PAIRS,
    transforms=_transforms,
    coefficients=_coefficients,
    scatter=_scatter,
)
