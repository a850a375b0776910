"""The covariance types full and tied, and the table of all six types by name."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from scipy.linalg import rq

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.covariance import (
    ALL_PAIRS,
    SUM_OF_SQUARES,
    CovarianceStructure,
    Frame,
    Moments,
    Split,
    pairs_by_distance,
)
from emtau_dask.mixture.linalg import (
    EPS,
    Floats,
    Ints,
    add_squares,
    covariance_of_factor,
    factor_of_precision,
    precision_factors,
    read_only_copy,
    symmetrised,
    times_upper,
    upper_inverse,
)
from emtau_dask.mixture.variance_types import DIAG, SPHERICAL, TIED_DIAG, TIED_SPHERICAL, squared_lengths

MIN_TRIANGLE_FEATURES = 64
"""Minimum features for which a product by a triangle is faster than one by a matrix."""
TILE = 2**16
"""Maximum number of elements of a matrix that are processed at a time."""


def add_outer_products(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    """Add ``Σ_i weights_ik · vectors_ik vectors_ikᵀ`` to each of ``scatter`` (K, d, d), in place.

    Weights are (m, K), vectors (m, K, d). Products are formed in tiles that stay in the cache; forming
    products as large as ``scatter`` would cost far more than adding them. Products below the rounding of the
    scatter are skipped; those of corrections of means nearly always are.
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
    """Return the factor of one matrix of ``precisions_init``; raises `InvalidDataError` if it has none."""
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
    """Return standard-normal draws (n, d), transformed to have a covariance; ``whose`` names it in errors."""
    try:
        return normals @ np.linalg.cholesky(covariance).T
    except np.linalg.LinAlgError as error:
        raise InvalidDataError(
            f"no rows can be drawn: {whose} is not positive definite. Fit again with a larger reg_covar."
        ) from error


def whitened_rows(rows: Floats, factors: Floats) -> Floats:
    """Return ``row @ factor`` of each of ``rows`` (m, K, d), with factors (K, d, d) or (d, d).

    A row is multiplied as if it were alone: BLAS rounds the product of several rows otherwise.
    """
    whitened: Floats = np.matmul(rows[..., np.newaxis, :], factors)[..., 0, :]
    return whitened


def standardised_forms(seconds: Floats, weights: Floats, factors: Floats) -> Floats:
    """Return ``(Pᵀ M P − w I) / √2`` of matrices (m, k, d, d) and weights (m, k), shape (m, k, d²)."""
    forms = factors.swapaxes(-1, -2) @ seconds @ factors
    np.einsum("...ii->...i", forms)[...] -= weights[..., np.newaxis]
    forms *= np.sqrt(0.5)
    return forms.reshape(*weights.shape, -1)


def whitened_trace(scatter: Floats, factors: Floats) -> float:
    """Return ``Σ_k tr(P_kᵀ S_k P_k)`` of matrices (..., d, d)."""
    d = scatter.shape[-1]
    if d < MIN_TRIANGLE_FEATURES:
        return float(np.vdot(factors, scatter @ factors))
    total = 0.0
    for matrix, factor in zip(scatter.reshape(-1, d, d), factors.reshape(-1, d, d), strict=True):
        product = matrix.copy()
        times_upper(product, factor)
        total += float(np.vdot(factor, product))
    return total


def split_matrices(covariances: Floats, factors: Floats, given: Ints, rest: Ints) -> Split:
    """Return the split of matrices (m, d, d) with the precision factors ``factors`` (m, d, d).

    The factor of the reordered features is computed from ``factors`` by rotations of rows, which lose no
    digits and cannot fail. If ``R Rᵀ`` is the precision of (given, rest), the diagonal blocks of R are the
    factors of the given features and of the rest, and the block above them gives the coefficients.
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


def _by_threads(
    scatter: Floats, weights: Floats, means: Floats, reg_covar: float, threads: int
) -> tuple[Floats, Floats]:
    """Return covariances and their precisions' factors."""
    covariances, factors = np.empty_like(scatter), np.empty_like(scatter)

    def maximise(k: int) -> None:
        one = slice(k, k + 1)
        covariances[one] = regularised(scatter[one] / weights[k], reg_covar)
        factors[one] = precision_factors(covariances[one], means[one], weights[one], first=k)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(maximise, range(len(weights))))
    return covariances, factors


def _full_from_precisions(precisions: Floats) -> tuple[Floats, Floats]:
    factors = np.stack([checked_factor(p, "full") for p in precisions])
    return np.stack([covariance_of_factor(f) for f in factors]), factors


def _sum_full_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    beta = 0.0
    for roots in tiles:
        add_squares(roots, scatter[k], beta)
        beta = 1.0
    symmetrised(scatter[k])


def _transforms(weights: Floats, covariances: Floats, factors: Floats) -> Iterator[Floats | None]:
    """Yield the identity, then the transform that whitens the pooled covariance ``Σ π_k Σ_k``."""
    yield None
    pooled = np.tensordot(weights, covariances, axes=1)
    nothing, one = np.zeros((1, len(pooled))), np.ones(1)
    yield read_only_copy(precision_factors(pooled[np.newaxis], nothing, one, first=-1)[0])


def _full_coefficients(log_scales: Floats, means: Floats, factors: Floats, frame: Frame) -> Floats:
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


def _full_scatter(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
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
    from_precisions=_full_from_precisions,
    variances=lambda covariances, K, d: np.einsum("kii->ki", covariances),
    split=split_matrices,
    conditions=correlation_conditions,
    draw=lambda normals, covariances, k: correlated(
        normals, covariances[k], f"the covariance of component {k}"
    ),
    scikit_learn_name="full",
    whiten=lambda differences, factors, k: times_upper(differences, factors[k]),
    whitened=whitened_rows,
    sum_scatter=_sum_full_scatter,
    add_outer=add_outer_products,
    distances=whitened_trace,
    standardised=lambda seconds, weights, factors, d: standardised_forms(seconds, weights, factors),
    squares=ALL_PAIRS,
    transforms=_transforms,
    coefficients=_full_coefficients,
    scatter=_full_scatter,
)


def _factor(covariance: Floats, means: Floats, weights: Floats) -> Floats:
    magnitudes = np.abs(means).max(axis=0)
    total = weights.sum(keepdims=True)
    (factor,) = precision_factors(covariance[np.newaxis], magnitudes[np.newaxis], total, first=-1)
    return cast("Floats", factor)


def _tied_from_precisions(precision: Floats) -> tuple[Floats, Floats]:
    factor = checked_factor(precision, "tied")
    return covariance_of_factor(factor), factor


def _split(covariance: Floats, factor: Floats, given: Ints, rest: Ints) -> Split:
    split = split_matrices(covariance[np.newaxis], factor[np.newaxis], given, rest)
    return Split(
        split.given_covariances[0],
        split.given_factors[0],
        split.coefficients,
        split.rest_covariances[0],
        split.rest_factors[0],
    )


def _sum_tied_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    for roots in tiles:
        add_squares(roots, scatter)
    symmetrised(scatter)


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    d = len(scatter)
    add_outer_products(scatter[np.newaxis], weights.reshape(-1, 1), vectors.reshape(-1, 1, d))


def _tied_coefficients(log_scales: Floats, means: Floats, factor: Floats, frame: Frame) -> Floats:
    """Return the coefficients in the frame that the factor whitens."""
    constants = log_scales - 0.5 * squared_lengths(means)
    return np.hstack([constants[:, np.newaxis], means, np.full((len(means), 1), -0.5)])


def _tied_scatter(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
    scatter = moments[1] - (means * weights[:, np.newaxis]).T @ means
    return frame.forms_back(0.5 * (scatter + scatter.T))


TIED = CovarianceStructure(
    name="tied",
    shared=True,
    shape=lambda K, d: (d, d),
    n_parameters=lambda K, d: d * (d + 1) // 2,
    covariances=lambda scatter, weights, d, reg: regularised(scatter / weights.sum(), reg),
    factor=_factor,
    log_det=lambda factor, K, d: np.repeat(log_diagonal(factor), K),
    precisions=squared_factors,
    from_precisions=_tied_from_precisions,
    variances=lambda covariance, K, d: np.broadcast_to(np.diagonal(covariance), (K, d)),
    split=_split,
    conditions=lambda covariance: correlation_conditions(covariance[np.newaxis]),
    draw=lambda normals, covariance, k: correlated(normals, covariance, "the shared covariance"),
    scikit_learn_name="tied",
    whiten=lambda differences, factor, k: times_upper(differences, factor),
    whitened=whitened_rows,
    sum_scatter=_sum_tied_scatter,
    add_outer=_add_outer,
    distances=whitened_trace,
    standardised=lambda seconds, weights, factor, d: standardised_forms(
        seconds[:, np.newaxis], weights.sum(axis=1, keepdims=True), factor
    ),
    squares=SUM_OF_SQUARES,
    # In the coordinates that its own factor whitens, the covariance is the identity.
    transforms=lambda weights, covariance, factor: iter([factor]),
    coefficients=_tied_coefficients,
    moment_shapes=lambda K, F: ((K, F - 1), (F - 2, F - 2)),
    scatter=_tied_scatter,
)

_TYPES = (FULL, TIED, DIAG, SPHERICAL, TIED_DIAG, TIED_SPHERICAL)
STRUCTURES: Mapping[str, CovarianceStructure] = MappingProxyType({each.name: each for each in _TYPES})


def structure_named(covariance_type: str) -> CovarianceStructure:
    """Return the structure of a covariance type.

    Raises
    ------
    InvalidDataError
        There is no such type; the message lists the types.
    """
    try:
        return STRUCTURES[covariance_type]
    except (KeyError, TypeError):
        raise InvalidDataError(
            f"covariance_type is {covariance_type!r}; use one of {', '.join(map(repr, STRUCTURES))}."
        ) from None


def _by_name(structure: CovarianceStructure) -> tuple[Any, ...]:
    return structure_named, (structure.name,)


copyreg.pickle(CovarianceStructure, _by_name)
