"""`tied`: all components have one covariance matrix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure, Frame, Moments, Split
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
from emtau_dask.mixture.covariance.squares import SUM_OF_SQUARES
from emtau_dask.mixture.covariance.variances import squared_lengths
from emtau_dask.mixture.numerics import (
    Floats,
    Ints,
    Step,
    add_squares,
    covariance_of_factor,
    precision_factors,
    squares,
    summed_product,
    symmetrised,
    upper_product,
)


def _factor(covariance: Floats, means: Floats, weights: Floats) -> Floats:
    magnitudes = np.abs(means).max(axis=0)
    total = weights.sum(keepdims=True)
    (factor,) = precision_factors(covariance[np.newaxis], magnitudes[np.newaxis], total, first=-1)
    return cast("Floats", factor)


def _from_precisions(precision: Floats) -> tuple[Floats, Floats]:
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


def _sum_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    for roots in tiles:
        add_squares(roots, scatter)
    symmetrised(scatter)


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    d = len(scatter)
    add_outer_products(scatter[np.newaxis], weights.reshape(-1, 1), vectors.reshape(-1, 1, d))


def _coefficients(log_scales: Floats, means: Floats, factor: Floats, frame: Frame) -> Floats:
    """Return the coefficients in the frame that the factor whitens."""
    constants = log_scales - 0.5 * squared_lengths(means)
    return np.hstack([constants[:, np.newaxis], means, np.full((len(means), 1), -0.5)])


def _moments(features: Floats, responsibilities: Floats, out: Moments) -> Iterator[Step]:
    coordinates = features[1:-1]
    roots, weighted = np.empty_like(features[0]), np.empty_like(coordinates)
    yield partial(np.add.reduce, responsibilities, 0, None, roots)
    yield partial(np.sqrt, roots, roots)
    yield partial(np.multiply, coordinates, roots, weighted)
    yield from summed_product(responsibilities, features[:-1], out[0])
    yield from squares(weighted, out[1])


def _scatter(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
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
    from_precisions=_from_precisions,
    variances=lambda covariance, K, d: np.broadcast_to(np.diagonal(covariance), (K, d)),
    split=_split,
    conditions=lambda covariance: correlation_conditions(covariance[np.newaxis]),
    draw=lambda normals, covariance, k: correlated(normals, covariance, "the shared covariance"),
    scikit_learn_name="tied",
    whitening=lambda differences, factor, k, scale: upper_product(differences, factor, scale),
    sum_scatter=_sum_scatter,
    add_outer=_add_outer,
    distances=whitened_trace,
    standardised=lambda seconds, weights, factor, d: standardised_forms(
        seconds[np.newaxis], weights.sum(keepdims=True), factor[np.newaxis]
    ),
    squares=SUM_OF_SQUARES,
    # In the coordinates that its own factor whitens, the covariance is the identity.
    transforms=lambda weights, covariance, factor: iter([factor]),
    coefficients=_coefficients,
    moment_shapes=lambda K, F: ((K, F - 1), (F - 2, F - 2)),
    moments=_moments,
    scatter=_scatter,
)
