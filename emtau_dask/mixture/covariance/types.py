"""The four covariance structures, as records of the few operations in which they differ.

Everything else in the package is written once, against `CovarianceStructure`;
`STRUCTURES` is the only place where a covariance type is looked up.

Shapes: K components, d features, n rows of a block.

============ ===================== =======================
structure    covariances, scatter  precisions_cholesky
============ ===================== =======================
full         (K, d, d)             (K, d, d)
tied         (d, d)                (d, d)
diag         (K, d)                (K, d)
spherical    (K,)                  (K,)
============ ===================== =======================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.numerics import (
    EPS,
    Floats,
    check_variances,
    covariance_of_factor,
    factor_of_precision,
    perform,
    precision_factors,
    squares,
    symmetrised,
)

PANELS, NARROWEST_PANEL = 4, 48
THREADED = 2**26
"""K d³ from which on threads share the factorisations: they then take milliseconds."""
TILE = 2**16
"""Elements of a matrix that are worked on at a time."""


@dataclass(frozen=True)
class CovarianceStructure:
    """What one covariance type does differently.

    Attributes
    ----------
    name : str
        scikit-learn's name of the covariance type.
    shape : callable (K, d) -> tuple of int
        Shape of the covariances, of their scatter and of the precision factors.
    whiten : callable (differences (n, d), precisions_cholesky, k, out (n, d)) -> None
        Rows relative to μ_k, in units of component k's standard deviations.
    add_scatter : callable (scatter, k, tiles of roots (n, d)) -> None
        Add ``Σ_n roots_n roots_nᵀ`` to component k's part of ``scatter``, in
        place, which is zero before where it is k's alone; ``roots`` are rows
        about a centre, each times √weight, valid until the next tile is asked for.
    add_outer : callable (scatter, weights (m, K), vectors (m, K, d)) -> None
        Add ``Σ_i weights_ik · vectors_ik vectors_ikᵀ`` to ``scatter``, in place.
    covariances : callable (scatter, weights (K,), d, reg_covar) -> covariances
        Maximum-likelihood covariances plus ``reg_covar`` on the diagonal.
    factor : callable (covariances, means, weights, threads) -> precisions_cholesky
        By so many threads where that pays; raises `SingularComponentError`.
    log_det : callable (precisions_cholesky, K, d) -> (K,)
        ln |P_k|, half the log-determinant of the precision.
    distances : callable (scatter, precisions_cholesky) -> float
        ``Σ_k tr(Σ_k⁻¹ S_k)``.
    precisions : callable (precisions_cholesky) -> precisions
    from_precisions : callable (precisions) -> (covariances, precisions_cholesky)
        Raises `InvalidDataError` where they are not positive definite.
    n_parameters : callable (K, d) -> int
        Free parameters of the covariances.
    draw : callable (normals (n, d), covariances, k) -> (n, d)
        Standard-normal draws given component k's covariance.
    """

    name: str
    shape: Callable[[int, int], tuple[int, ...]]
    whiten: Callable[[Floats, Floats, int, Floats], None]
    add_scatter: Callable[[Floats, int, Iterator[Floats]], None]
    add_outer: Callable[[Floats, Floats, Floats], None]
    covariances: Callable[[Floats, Floats, int, float], Floats]
    factor: Callable[[Floats, Floats, Floats, int], Floats]
    log_det: Callable[[Floats, int, int], Floats]
    distances: Callable[[Floats, Floats], float]
    precisions: Callable[[Floats], Floats]
    from_precisions: Callable[[Floats], tuple[Floats, Floats]]
    n_parameters: Callable[[int, int], int]
    draw: Callable[[Floats, Floats, int], Floats]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel by name."""
        return structure_named, (self.name,)


def _add_outer_full(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    """Go by tiles that stay in the cache: products as large as ``scatter`` cost far more than adding them.

    Products below the rounding of the scatter, as corrections of means nearly
    always are, are left out.
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


def _add_outer_tied(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    d = len(scatter)
    _add_outer_full(scatter[np.newaxis], weights.reshape(-1, 1), vectors.reshape(-1, 1, d))


def _add_outer_diag(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights[:, :, np.newaxis] * vectors**2).sum(axis=0)


def _add_outer_spherical(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights * (vectors**2).sum(axis=2)).sum(axis=0)


def _with_reg(matrix: Floats, reg_covar: float) -> Floats:
    result = symmetrised(matrix)
    diagonal = np.einsum("...ii->...i", result)
    diagonal += reg_covar
    return result


def _log_diagonal(factors: Floats) -> Floats:
    logs: Floats = np.log(np.einsum("...ii->...i", factors)).sum(axis=-1)
    return logs


def _upper_times(normals: Floats, covariance: Floats, k: int) -> Floats:
    try:
        return normals @ np.linalg.cholesky(covariance).T
    except np.linalg.LinAlgError as error:
        what = "the shared covariance" if k < 0 else f"the covariance of component {k}"
        raise InvalidDataError(
            f"no rows can be drawn: {what} is not positive definite. Fit again with a larger reg_covar."
        ) from error


def _checked_factor(precision: Floats, name: str) -> Floats:
    tolerance = 1e-8 * float(np.abs(precision).max())
    positive = bool((np.diagonal(precision) > 0).all())
    factor = (
        factor_of_precision(precision)
        if positive and np.allclose(precision, precision.T, rtol=0.0, atol=tolerance)
        else None
    )
    if factor is None:
        raise InvalidDataError(
            f"'{name} precision' should be symmetric, positive-definite; precisions_init is not. "
            "Give the inverse of a covariance matrix."
        )
    return factor


def _full_from_precisions(precisions: Floats) -> tuple[Floats, Floats]:
    factors = np.stack([_checked_factor(p, "full") for p in precisions])
    return np.stack([covariance_of_factor(f) for f in factors]), factors


def _tied_from_precisions(precisions: Floats) -> tuple[Floats, Floats]:
    factor = _checked_factor(precisions, "tied")
    return covariance_of_factor(factor), factor


def _positive(precisions: Floats, name: str) -> tuple[Floats, Floats]:
    if not (precisions > 0).all():
        raise InvalidDataError(
            f"'{name} precision' should be positive; the smallest of precisions_init is "
            f"{precisions.min():.6g}. Give inverse variances above 0."
        )
    return 1.0 / precisions, np.sqrt(precisions)


def _times_upper(rows: Floats, upper: Floats, out: Floats) -> None:
    """Write ``rows @ upper`` by panels of columns, which leaves out most of the zeros."""
    d = len(upper)
    width = max(NARROWEST_PANEL, -(-d // PANELS))
    for begin in range(0, d, width):
        end = min(begin + width, d)
        np.matmul(rows[:, :end], upper[:end, begin:end], out=out[:, begin:end])


def _whiten_full(differences: Floats, factors: Floats, k: int, out: Floats) -> None:
    _times_upper(differences, factors[k], out)


def _whiten_tied(differences: Floats, factor: Floats, k: int, out: Floats) -> None:
    _times_upper(differences, factor, out)


def _whiten_scaled(differences: Floats, factors: Floats, k: int, out: Floats) -> None:
    np.multiply(differences, factors[k], out=out)


def _add_full(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    """Spare the first product, often the only one, a copy: it may be as large as all that it is made of."""
    for roots in islice(tiles, 1):
        perform(squares(roots.T, scatter[k]))
    for roots in tiles:
        scatter[k] += np.dot(roots.T, roots)


def _add_tied(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    square = np.empty_like(scatter)
    for roots in tiles:
        perform(squares(roots.T, square))
        scatter += square


def _add_diag(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    for roots in tiles:
        scatter[k] += np.einsum("ij,ij->j", roots, roots)


def _add_spherical(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    for roots in tiles:
        scatter[k] += np.einsum("ij,ij->j", roots, roots).sum()


def _factor_full(covariances: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    K, d = means.shape
    if K * d**3 < THREADED:
        return precision_factors(covariances, means, weights)
    factors = np.empty_like(covariances)

    def factorise(k: int) -> None:
        one = slice(k, k + 1)
        factors[one] = precision_factors(covariances[one], means[one], weights[one], first=k)

    with ThreadPoolExecutor(min(threads, K)) as pool:
        list(pool.map(factorise, range(K)))
    return factors


def _factor_tied(covariance: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    magnitudes = np.abs(means).max(axis=0)
    total = weights.sum(keepdims=True)
    (factor,) = precision_factors(covariance[np.newaxis], magnitudes[np.newaxis], total, first=-1)
    return cast("Floats", factor)


def _factor_diag(covariances: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    check_variances(covariances, means, weights)
    return 1.0 / np.sqrt(covariances)


def _factor_spherical(covariances: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    magnitudes = np.sqrt(np.mean(means**2, axis=1, keepdims=True))
    check_variances(covariances[:, np.newaxis], magnitudes, weights)
    return 1.0 / np.sqrt(covariances)


def _whitened_trace(scatter: Floats, factor: Floats) -> float:
    return float(np.vdot(factor, scatter @ factor))


FULL = CovarianceStructure(
    name="full",
    shape=lambda K, d: (K, d, d),
    whiten=_whiten_full,
    add_scatter=_add_full,
    add_outer=_add_outer_full,
    covariances=lambda scatter, weights, d, reg: _with_reg(scatter / weights[:, np.newaxis, np.newaxis], reg),
    factor=_factor_full,
    log_det=lambda factors, K, d: _log_diagonal(factors),
    distances=_whitened_trace,
    precisions=lambda factors: symmetrised(factors @ factors.swapaxes(-1, -2)),
    from_precisions=_full_from_precisions,
    n_parameters=lambda K, d: K * d * (d + 1) // 2,
    draw=lambda normals, covariances, k: _upper_times(normals, covariances[k], k),
)

TIED = CovarianceStructure(
    name="tied",
    shape=lambda K, d: (d, d),
    whiten=_whiten_tied,
    add_scatter=_add_tied,
    add_outer=_add_outer_tied,
    covariances=lambda scatter, weights, d, reg: _with_reg(scatter / weights.sum(), reg),
    factor=_factor_tied,
    log_det=lambda factor, K, d: np.repeat(_log_diagonal(factor), K),
    distances=_whitened_trace,
    precisions=lambda factor: symmetrised(factor @ factor.T),
    from_precisions=_tied_from_precisions,
    n_parameters=lambda K, d: d * (d + 1) // 2,
    draw=lambda normals, covariance, k: _upper_times(normals, covariance, -1),
)

DIAG = CovarianceStructure(
    name="diag",
    shape=lambda K, d: (K, d),
    whiten=_whiten_scaled,
    add_scatter=_add_diag,
    add_outer=_add_outer_diag,
    covariances=lambda scatter, weights, d, reg: scatter / weights[:, np.newaxis] + reg,
    factor=_factor_diag,
    log_det=lambda factors, K, d: np.log(factors).sum(axis=1),
    distances=lambda scatter, factors: float((scatter * factors**2).sum()),
    precisions=lambda factors: factors**2,
    from_precisions=lambda precisions: _positive(precisions, "diag"),
    n_parameters=lambda K, d: K * d,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
)

SPHERICAL = CovarianceStructure(
    name="spherical",
    shape=lambda K, d: (K,),
    whiten=_whiten_scaled,
    add_scatter=_add_spherical,
    add_outer=_add_outer_spherical,
    covariances=lambda scatter, weights, d, reg: scatter / (weights * d) + reg,
    factor=_factor_spherical,
    log_det=lambda factors, K, d: d * np.log(factors),
    distances=lambda scatter, factors: float((scatter * factors**2).sum()),
    precisions=lambda factors: factors**2,
    from_precisions=lambda precisions: _positive(precisions, "spherical"),
    n_parameters=lambda K, d: K,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
)

STRUCTURES: Mapping[str, CovarianceStructure] = MappingProxyType(
    {structure.name: structure for structure in (FULL, TIED, DIAG, SPHERICAL)}
)


def structure_named(covariance_type: str) -> CovarianceStructure:
    """Return the structure of a covariance type.

    Raises
    ------
    InvalidDataError
        There is no such type; names the ones there are.
    """
    try:
        return STRUCTURES[covariance_type]
    except (KeyError, TypeError):
        raise InvalidDataError(
            f"covariance_type is {covariance_type!r}; use one of {', '.join(map(repr, STRUCTURES))}."
        ) from None
