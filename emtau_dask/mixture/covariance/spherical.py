"""`spherical`: each component has one variance, the same in all features."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure, Frame, Moments
from emtau_dask.mixture.covariance.squares import SUM_OF_SQUARES
from emtau_dask.mixture.covariance.variances import (
    inverses,
    linear_in_squares,
    magnitudes,
    no_correlation,
    scaled_trace,
    squared_lengths,
)
from emtau_dask.mixture.numerics import Floats, check_variances


def _factor(covariances: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    check_variances(covariances[:, np.newaxis], magnitudes(means), weights)
    return 1.0 / np.sqrt(covariances)


def _add_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    for roots in tiles:
        scatter[k] += np.einsum("ij,ij->j", roots, roots).sum()


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights * squared_lengths(vectors)).sum(axis=0)


def _coefficients(log_scales: Floats, means: Floats, factors: Floats, frame: Frame) -> Floats:
    precisions = factors**2
    constants = log_scales - 0.5 * precisions * squared_lengths(means)
    return linear_in_squares(constants, means, precisions[:, np.newaxis])


def _scatter(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
    (sums,) = moments
    return sums[:, -1] - weights * squared_lengths(means)


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
    conditions=no_correlation,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
    scikit_learn_name="spherical",
    whiten=lambda differences, factors, k, out: np.multiply(differences, factors[k], out=out),
    add_scatter=_add_scatter,
    add_outer=_add_outer,
    distances=scaled_trace,
    squares=SUM_OF_SQUARES,
    coefficients=_coefficients,
    scatter=_scatter,
)
