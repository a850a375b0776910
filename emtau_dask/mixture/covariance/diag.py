"""`diag`: each component has a variance of its own in each feature."""

from __future__ import annotations

from collections.abc import Iterator
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


def _factor(covariances: Floats, means: Floats, weights: Floats) -> Floats:
    check_variances(covariances, means, weights)
    return 1.0 / np.sqrt(covariances)


def _sum_scatter(scatter: Floats, k: int, tiles: Iterator[Floats]) -> None:
    scatter[k] = squares_by_feature(tiles)


def _add_outer(scatter: Floats, weights: Floats, vectors: Floats) -> None:
    scatter += (weights[:, :, np.newaxis] * vectors**2).sum(axis=0)


DIAG = CovarianceStructure(
    name="diag",
    shared=False,
    shape=lambda K, d: (K, d),
    n_parameters=lambda K, d: K * d,
    covariances=lambda scatter, weights, d, reg: scatter / weights[:, np.newaxis] + reg,
    factor=_factor,
    log_det=lambda factors, K, d: np.log(factors).sum(axis=1),
    precisions=np.square,
    from_precisions=lambda precisions: inverses(precisions, "diag"),
    variances=lambda covariances, K, d: covariances,
    split=split_by_feature,
    conditions=no_correlation,
    draw=lambda normals, covariances, k: normals * np.sqrt(covariances[k]),
    scikit_learn_name="diag",
    whitening=lambda differences, factors, k, scale: partial(
        np.multiply, differences, factors[k] * scale, out=differences
    ),
    sum_scatter=_sum_scatter,
    add_outer=_add_outer,
    distances=scaled_trace,
    standardised=lambda seconds, weights, factors, d: (
        np.sqrt(0.5) * (seconds * factors**2 - weights[:, np.newaxis])
    ),
    squares=OWN_SQUARES,
    coefficients=own_coefficients,
    scatter=own_scatters,
)
