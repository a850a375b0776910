"""`spherical`: each component has one variance, the same in all features."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure
from emtau_dask.mixture.covariance.squares import SUM_OF_SQUARES
from emtau_dask.mixture.covariance.variances import (
    inverses,
    magnitudes,
    no_correlation,
    scaled_trace,
    split_of_all,
    squared_lengths,
    squares_by_feature,
    summed_coefficients,
    summed_scatters,
)
from emtau_dask.mixture.numerics import Floats, check_variances


def _factor(covariances: Floats, means: Floats, weights: Floats) -> Floats:
    check_variances(covariances[:, np.newaxis], magnitudes(means), weights)
    return 1.0 / np.sqrt(covariances)


def _sum_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    scatter[k] = squares_by_feature(tiles).sum()


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights * squared_lengths(vectors)).sum(axis=0)


SPHERICAL = CovarianceStructure(
    name="spherical",
    shared=False,
    shape=lambda K, d: (K,),
    n_parameters=lambda K, d: K,
    covariances=lambda scatter, weights, d, reg: scatter / (weights * d) + reg,
    factor=_factor,
    log_det=lambda factors, K, d: d * np.log(factors),
    precisions=np.square,
    from_precisions=lambda precisions: inverses(precisions, "spherical"),
    variances=lambda covariances, K, d: np.broadcast_to(covariances[:, np.newaxis], (K, d)),
    split=split_of_all,
    conditions=no_correlation,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
    scikit_learn_name="spherical",
    whitening=lambda differences, factors, k, scale: partial(
        np.multiply, differences, factors[k] * scale, out=differences
    ),
    sum_scatter=_sum_scatter,
    add_outer=_add_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factors, d: (
        np.sqrt(0.5 / d) * (seconds * factors**2 - d * weights)[:, np.newaxis]
    ),
    squares=SUM_OF_SQUARES,
    coefficients=summed_coefficients,
    scatter=summed_scatters,
)
