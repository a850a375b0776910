"""`tied_diag`: all components have the same variance in each feature; mclust's model EEI.

Its covariance is ``diag(Σ_k S_k) / Σ_k n_k`` (Celeux and Govaert 1995, "Gaussian parsimonious
clustering models", model [λB]).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure, Frame, Moments
from emtau_dask.mixture.covariance.squares import OWN_SQUARES
from emtau_dask.mixture.covariance.variances import (
    inverses,
    linear_in_squares,
    no_correlation,
    scaled_trace,
)
from emtau_dask.mixture.numerics import Floats, check_variances


def _factor(variances: Floats, means: Floats, weights: Floats, threads: int) -> Floats:
    magnitudes = np.abs(means).max(axis=0)
    check_variances(variances[np.newaxis], magnitudes[np.newaxis], weights.sum(keepdims=True), first=-1)
    return 1.0 / np.sqrt(variances)


def _add_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    for roots in tiles:
        scatter += np.einsum("ij,ij->j", roots, roots)


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights[:, :, np.newaxis] * vectors**2).sum(axis=(0, 1))


def _coefficients(log_scales: Floats, means: Floats, factors: Floats, frame: Frame) -> Floats:
    precisions = np.broadcast_to(factors**2, means.shape)
    constants = log_scales - 0.5 * (precisions * means**2).sum(axis=1)
    return linear_in_squares(constants, means, precisions)


def _scatter(moments: Moments, weights: Floats, means: Floats, frame: Frame) -> Floats:
    (sums,) = moments
    scatter: Floats = (sums[:, 1 + means.shape[1] :] - weights[:, np.newaxis] * means**2).sum(axis=0)
    return scatter


TIED_DIAG = CovarianceStructure(
    name="tied_diag",
    shared=True,
    shape=lambda K, d: (d,),
    n_parameters=lambda K, d: d,
    covariances=lambda scatter, weights, d, reg: scatter / weights.sum() + reg,
    factor=_factor,
    log_det=lambda factors, K, d: np.repeat(np.log(factors).sum(), K),
    precisions=np.square,
    from_precisions=lambda precisions: inverses(precisions, "tied_diag"),
    variances=lambda variances, K, d: np.broadcast_to(variances, (K, d)),
    conditions=no_correlation,
    draw=lambda normals, variances, k: normals * np.sqrt(variances),
    scikit_learn_name="tied",
    for_scikit_learn=lambda array, K: np.diag(array),
    whiten=lambda differences, factors, k, out: np.multiply(differences, factors, out=out),
    add_scatter=_add_scatter,
    add_outer=_add_outer,
    distances=scaled_trace,
    squares=OWN_SQUARES,
    coefficients=_coefficients,
    scatter=_scatter,
)
