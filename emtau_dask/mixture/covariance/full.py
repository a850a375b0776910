"""`full`: each component has a covariance matrix of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure, Frame, Moments, Solving
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
    Triangles,
    add_squares,
    cholesky_factors,
    covariance_factors,
    covariance_of_factor,
    factorise_upper,
    invert_upper,
    mirror_squares,
    precision_factors,
    read_only_copy,
    strips_of,
    symmetrised,
    upper_inverse,
    upper_product,
    upper_solution,
    write_mirrored,
)

LEAST_SOLVED = 384
"""Features from which on passes whiten rows by solving, and distances are broken off: as
`benchmarks/kernels.py` finds."""


def _in_two_parts(
    begin: Callable[[int], None], end: Callable[[int], None], n_components: int, threads: int
) -> None:
    """Call both for each component; threads share them, so that they finish nearly at once."""

    def end_after(k: int) -> None:
        begun[k].result()
        end(k)

    with ThreadPoolExecutor(threads) as pool:
        begun = [pool.submit(begin, k) for k in range(n_components)]
        list(pool.map(end_after, range(n_components)))


def _by_threads(
    scatter: Floats, weights: Floats, means: Floats, reg_covar: float, threads: int
) -> tuple[Floats, Floats]:
    """Return covariances and their precisions' factors."""
    covariances, factors = np.empty_like(scatter), np.empty_like(scatter)

    def begin(k: int) -> None:
        one = slice(k, k + 1)
        np.divide(scatter[k], weights[k], out=covariances[k])
        regularised(covariances[k], reg_covar)
        cholesky_factors(covariances[one], means[one], weights[one], factors[one], first=k)

    def end(k: int) -> None:
        invert_upper(factors[k : k + 1])

    _in_two_parts(begin, end, len(weights), threads)
    return covariances, factors


def _maximise(
    scatter: Triangles, weights: Floats, means: Floats, reg_covar: float, threads: int
) -> tuple[Floats, Floats]:
    """Return covariances and their factors: of each strip, all is done while it is in the cache."""
    K, d = means.shape
    covariances, factors = np.empty((K, d, d)), np.empty((K, d, d))

    def begin(k: int) -> None:
        for rows in strips_of(d):
            strip, square = factors[k, rows, rows.start :], factors[k, rows, rows]
            scatter.write_strip(k, rows, strip)
            strip /= weights[k]
            np.einsum("ii->i", square)[...] += reg_covar
            write_mirrored(strip, rows, covariances[k])
            np.copyto(square, 0.0, where=np.tri(len(square), k=-1, dtype=np.bool_))
            factors[k, rows, : rows.start] = 0.0

    def end(k: int) -> None:
        one = slice(k, k + 1)
        factorise_upper(factors[one], means[one], weights[one], first=k)

    _in_two_parts(begin, end, K, threads)
    return covariances, factors


def _inverses(factors: Floats) -> Floats:
    return np.stack([upper_inverse(factor) for factor in factors])


def _from_precisions(precisions: Floats) -> tuple[Floats, Floats]:
    factors = np.stack([checked_factor(p, "full") for p in precisions])
    return np.stack([covariance_of_factor(f) for f in factors]), factors


def _sum_upper(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    kept = 0.0
    for roots in tiles:
        add_squares(roots, scatter[k], kept)
        kept = 1.0
    mirror_squares(scatter[k])


def _sum_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    _sum_upper(scatter, k, tiles)
    symmetrised(scatter[k])


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
    covariances=lambda scatter, weights, d, reg: regularised(
        scatter / weights[:, np.newaxis, np.newaxis], reg
    ),
    factor=precision_factors,
    by_threads=_by_threads,
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
    whitening=lambda differences, factors, k, scale: upper_product(differences, factors[k], scale),
    solving=Solving(
        least_features=LEAST_SOLVED,
        factor=covariance_factors,
        inverse=_inverses,
        whitening=lambda differences, factors, k, scale: upper_solution(differences, factors[k], scale),
        maximise=_maximise,
        sum_scatter=_sum_upper,
    ),
    sum_scatter=_sum_scatter,
    add_outer=add_outer_products,
    distances=whitened_trace,
    standardised=lambda seconds, weights, factors, d: standardised_forms(seconds, weights, factors),
    squares=ALL_PAIRS,
    transforms=_transforms,
    coefficients=_coefficients,
    scatter=_scatter,
)
