"""`tied_spherical`: all components have one variance, the same in all features; mclust's model EII.

It is ``tr(Σ_k S_k) / (d Σ_k n_k)`` (Celeux and Govaert 1995, "Gaussian parsimonious clustering
models", model [λI]). NumPy computes scalars from arrays without axes, so results are made arrays again.
"""

from __future__ import annotations

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


def _factor(variance: Floats, means: Floats, weights: Floats) -> Floats:
    largest = magnitudes(means).max(axis=0, keepdims=True)
    check_variances(variance.reshape(1, 1), largest, weights.sum(keepdims=True), first=-1)
    return np.asarray(1.0 / np.sqrt(variance))


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights * squared_lengths(vectors)).sum()


TIED_SPHERICAL = CovarianceStructure(
    name="tied_spherical",
    shared=True,
    shape=lambda K, d: (),
    n_parameters=lambda K, d: 1,
    covariances=lambda scatter, weights, d, reg: np.asarray(scatter / (weights.sum() * d) + reg),
    factor=_factor,
    log_det=lambda factor, K, d: np.full(K, d * np.log(factor)),
    precisions=lambda factor: np.asarray(factor**2),
    from_precisions=lambda precision: inverses(precision, "tied_spherical"),
    variances=lambda variance, K, d: np.broadcast_to(variance, (K, d)),
    split=split_of_all,
    conditions=no_correlation,
    draw=lambda normals, variance, k: normals * np.sqrt(variance),
    scikit_learn_name="spherical",
    for_scikit_learn=lambda array, K: np.repeat(array, K),
    whitening=lambda differences, factor, k, scale: partial(
        np.multiply, differences, factor * scale, out=differences
    ),
    sum_scatter=lambda scatter, k, tiles: np.add(scatter, squares_by_feature(tiles).sum(), out=scatter),
    add_outer=_add_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factor, d: (
        np.sqrt(0.5 / d) * (seconds * factor**2 - d * weights.sum()).reshape(1, 1)
    ),
    squares=SUM_OF_SQUARES,
    coefficients=summed_coefficients,
    scatter=lambda *moments: np.asarray(summed_scatters(*moments).sum()),
)
