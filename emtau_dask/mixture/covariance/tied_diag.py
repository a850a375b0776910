"""`tied_diag`: all components have the same variance in each feature; mclust's model EEI.

Its covariance is ``diag(Σ_k S_k) / Σ_k n_k`` (Celeux and Govaert 1995, "Gaussian parsimonious
clustering models", model [λB]).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from emtau_dask.mixture.covariance.base import CovarianceStructure
from emtau_dask.mixture.covariance.squares import OWN_SQUARES
from emtau_dask.mixture.covariance.variances import (
    inverses,
    no_correlation,
    own_coefficients,
    own_scatters,
    scaled_trace,
    split_by_feature,
    squares_by_feature,
)
from emtau_dask.mixture.numerics import Floats, check_variances


def _factor(variances: Floats, means: Floats, weights: Floats) -> Floats:
    magnitudes = np.abs(means).max(axis=0)
    check_variances(variances[np.newaxis], magnitudes[np.newaxis], weights.sum(keepdims=True), first=-1)
    return 1.0 / np.sqrt(variances)


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights[:, :, np.newaxis] * vectors**2).sum(axis=(0, 1))


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
    split=split_by_feature,
    conditions=no_correlation,
    draw=lambda normals, variances, k: normals * np.sqrt(variances),
    scikit_learn_name="tied",
    for_scikit_learn=lambda array, K: np.diag(array),
    whitening=lambda differences, factors, k, scale: partial(
        np.multiply, differences, factors * scale, out=differences
    ),
    sum_scatter=lambda scatter, k, tiles: np.add(scatter, squares_by_feature(tiles), out=scatter),
    add_outer=_add_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factors, d: (
        np.sqrt(0.5) * (seconds * factors**2 - weights.sum())[np.newaxis]
    ),
    squares=OWN_SQUARES,
    coefficients=own_coefficients,
    scatter=lambda *moments: own_scatters(*moments).sum(axis=0),
)
