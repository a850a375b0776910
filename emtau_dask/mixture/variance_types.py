"""The covariance types without correlations: diag, spherical, tied_diag, tied_spherical.

The covariance of tied_diag is ``diag(Σ_k S_k) / Σ_k n_k`` (Celeux and Govaert 1995, "Gaussian parsimonious
clustering models", model [λB]).

That of tied_spherical is ``tr(Σ_k S_k) / (d Σ_k n_k)`` (Celeux and Govaert 1995, "Gaussian parsimonious
clustering models", model [λI]). NumPy returns scalars for arrays without axes, so results are converted to
arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.covariance import (
    OWN_SQUARES,
    SUM_OF_SQUARES,
    CovarianceStructure,
    Frame,
    Moments,
    Split,
)
from emtau_dask.mixture.linalg import Floats, Ints, check_variances


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


def _diag_factor(covariances: Floats, means: Floats, weights: Floats) -> Floats:
    check_variances(covariances, means, weights)
    return 1.0 / np.sqrt(covariances)


def _sum_diag_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    scatter[k] = squares_by_feature(tiles)


def _add_diag_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights[:, :, np.newaxis] * vectors**2).sum(axis=0)


DIAG = CovarianceStructure(
    name="diag",
    shared=False,
    independent=True,
    shape=lambda K, d: (K, d),
    n_parameters=lambda K, d: K * d,
    covariances=lambda scatter, weights, d, reg: scatter / weights[:, np.newaxis] + reg,
    factor=_diag_factor,
    log_det=lambda factors, K, d: np.log(factors).sum(axis=1),
    precisions=np.square,
    from_precisions=lambda precisions: inverses(precisions, "diag"),
    variances=lambda covariances, K, d: covariances,
    split=split_by_feature,
    conditions=no_correlation,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
    scikit_learn_name="diag",
    whiten=lambda differences, factors, k: np.multiply(differences, factors[k], out=differences),
    whitened=np.multiply,
    sum_scatter=_sum_diag_scatter,
    add_outer=_add_diag_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factors, d: (
        np.sqrt(0.5) * (seconds * factors**2 - weights[..., np.newaxis])
    ),
    squares=OWN_SQUARES,
    coefficients=own_coefficients,
    scatter=own_scatters,
)


def _spherical_factor(covariances: Floats, means: Floats, weights: Floats) -> Floats:
    check_variances(covariances[:, np.newaxis], magnitudes(means), weights)
    return 1.0 / np.sqrt(covariances)


def _sum_spherical_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    scatter[k] = squares_by_feature(tiles).sum()


def _add_spherical_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights * squared_lengths(vectors)).sum(axis=0)


SPHERICAL = CovarianceStructure(
    name="spherical",
    shared=False,
    independent=True,
    shape=lambda K, d: (K,),
    n_parameters=lambda K, d: K,
    covariances=lambda scatter, weights, d, reg: scatter / (weights * d) + reg,
    factor=_spherical_factor,
    log_det=lambda factors, K, d: d * np.log(factors),
    precisions=np.square,
    from_precisions=lambda precisions: inverses(precisions, "spherical"),
    variances=lambda covariances, K, d: np.broadcast_to(covariances[:, np.newaxis], (K, d)),
    split=split_of_all,
    conditions=no_correlation,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
    scikit_learn_name="spherical",
    whiten=lambda differences, factors, k: np.multiply(differences, factors[k], out=differences),
    whitened=lambda vectors, factors: vectors * factors[:, np.newaxis],
    sum_scatter=_sum_spherical_scatter,
    add_outer=_add_spherical_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factors, d: (
        np.sqrt(0.5 / d) * (seconds * factors**2 - d * weights)[..., np.newaxis]
    ),
    squares=SUM_OF_SQUARES,
    coefficients=summed_coefficients,
    scatter=summed_scatters,
)


def _tied_diag_factor(variances: Floats, means: Floats, weights: Floats) -> Floats:
    magnitudes = np.abs(means).max(axis=0)
    check_variances(variances[np.newaxis], magnitudes[np.newaxis], weights.sum(keepdims=True), first=-1)
    return 1.0 / np.sqrt(variances)


def _add_tied_diag_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights[:, :, np.newaxis] * vectors**2).sum(axis=(0, 1))


TIED_DIAG = CovarianceStructure(
    name="tied_diag",
    shared=True,
    independent=True,
    shape=lambda K, d: (d,),
    n_parameters=lambda K, d: d,
    covariances=lambda scatter, weights, d, reg: scatter / weights.sum() + reg,
    factor=_tied_diag_factor,
    log_det=lambda factors, K, d: np.repeat(np.log(factors).sum(), K),
    precisions=np.square,
    from_precisions=lambda precisions: inverses(precisions, "tied_diag"),
    variances=lambda variances, K, d: np.broadcast_to(variances, (K, d)),
    split=split_by_feature,
    conditions=no_correlation,
    draw=lambda normals, variances, k: normals * np.sqrt(variances),
    scikit_learn_name="tied",
    for_scikit_learn=lambda array, K: np.diag(array),
    whiten=lambda differences, factors, k: np.multiply(differences, factors, out=differences),
    whitened=np.multiply,
    sum_scatter=lambda scatter, k, tiles: np.add(scatter, squares_by_feature(tiles), out=scatter),
    add_outer=_add_tied_diag_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factors, d: (
        np.sqrt(0.5) * (seconds * factors**2 - weights.sum(axis=1, keepdims=True))[:, np.newaxis]
    ),
    squares=OWN_SQUARES,
    coefficients=own_coefficients,
    scatter=lambda *moments: own_scatters(*moments).sum(axis=0),
)


def _tied_spherical_factor(variance: Floats, means: Floats, weights: Floats) -> Floats:
    largest = magnitudes(means).max(axis=0, keepdims=True)
    check_variances(variance.reshape(1, 1), largest, weights.sum(keepdims=True), first=-1)
    return np.asarray(1.0 / np.sqrt(variance))


def _add_tied_spherical_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights * squared_lengths(vectors)).sum()


TIED_SPHERICAL = CovarianceStructure(
    name="tied_spherical",
    shared=True,
    independent=True,
    shape=lambda K, d: (),
    n_parameters=lambda K, d: 1,
    covariances=lambda scatter, weights, d, reg: np.asarray(scatter / (weights.sum() * d) + reg),
    factor=_tied_spherical_factor,
    log_det=lambda factor, K, d: np.full(K, d * np.log(factor)),
    precisions=lambda factor: np.asarray(factor**2),
    from_precisions=lambda precision: inverses(precision, "tied_spherical"),
    variances=lambda variance, K, d: np.broadcast_to(variance, (K, d)),
    split=split_of_all,
    conditions=no_correlation,
    draw=lambda normals, variance, k: normals * np.sqrt(variance),
    scikit_learn_name="spherical",
    for_scikit_learn=lambda array, K: np.repeat(array, K),
    whiten=lambda differences, factor, k: np.multiply(differences, factor, out=differences),
    whitened=np.multiply,
    sum_scatter=lambda scatter, k, tiles: np.add(scatter, squares_by_feature(tiles).sum(), out=scatter),
    add_outer=_add_tied_spherical_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factor, d: (
        np.sqrt(0.5 / d) * (seconds * factor**2 - d * weights.sum(axis=1)).reshape(-1, 1, 1)
    ),
    squares=SUM_OF_SQUARES,
    coefficients=summed_coefficients,
    scatter=lambda *moments: np.asarray(summed_scatters(*moments).sum()),
)
