"""Cut-offs: which components may have responsibility for a row that is near one of them.

A responsibility of a component is negligible if it is at most 2⁻⁶⁴ of the component's weight; then the
component "does not count" for the row. All such rows together add less than 2⁻⁶⁴ to its weight, relative to
it, and less than 2⁻⁵⁶ to its covariance.

Consider a row at distance r from component a, in a's standard deviations. Its distance from k, in k's, is at
least ``v - c r``: v is the distance of a's mean from k, c the standard deviation of a in its direction h. For
``|P_kᵀ (x - μ_k)| >= h (x - μ_k) = v + h (x - μ_a)``, by Cauchy and Schwarz's inequality, twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from emtau_dask.mixture.linalg import AnyArray, Floats, Ints, invert_upper
from emtau_dask.mixture.parameters import MixtureParameters

NEGLIGIBLE_SHARE = 2.0**-64
"""Maximum negligible responsibility, relative to the component's weight."""
ROUNDING = 2.0**-19
"""Relative reduction of bounds on squared distances; it exceeds rounding errors, also those of float32."""
MIN_MEAN_VALUES, MIN_FEATURES, MIN_CHUNK_ROWS = 256, 8, 32
"""Minimum size of the means (K d), minimum features, and minimum rows of a chunk for each component, for
which components are skipped."""
MAX_SHARE, MAX_SHARE_PER_FEATURE = 0.65, 1 / 40
"""Maximum mean share of components that may count for a row, in total and for each feature. With few
features, finding these components costs much compared with scoring all."""
BEYOND, ALONG = 1.0, 2.0
"""The position that `_share_within` assumes for a row of a component: its distance minus √d, and its
coordinate along a direction, both in standard deviations."""
MAX_PROBED = 32
"""Maximum number of components for which `_share_within` assumes a row."""
ARRAY_VALUES = 2**19
"""Approximate size of a temporary array (values)."""


@dataclass(frozen=True, eq=False)
class Cutoffs:
    """Which components may count for a row.

    Attributes
    ----------
    centre : ndarray of shape (d,)
    discriminants : ndarray of float32, shape (K, d + 1)
        Coefficients of a row minus the centre, and of 1. The row's component mostly has the largest sum.
    distances : ndarray of float32, shape (K, K)
        Component k does not count for a row whose squared distance from component a, in a's standard
        deviations, is at most ``distances[a, k]``. Negative if k may always count.
    margins : ndarray of float64, shape (K,)
        A component does not count for a row if its score is this far below the row's largest (nats).
    """

    centre: Floats
    discriminants: AnyArray
    distances: AnyArray
    margins: Floats


def cutoffs_of(parameters: MixtureParameters, centre: Floats) -> Cutoffs:
    """Return the cut-offs of a mixture in which each component has its own factor."""
    components = np.arange(parameters.n_components)
    return _all_cutoffs(parameters, centre, _separation(parameters, components))


def cutoffs_if_few(parameters: MixtureParameters, centre: Floats) -> Cutoffs | None:
    """Return the cut-offs; None if too many components may count for a row, estimated at some components."""
    K, d = parameters.means.shape
    probes = np.unique(np.linspace(0, K - 1, MAX_PROBED).astype(np.intp))
    separation = _separation(parameters, probes)
    if _share_within(parameters, probes, separation) > min(MAX_SHARE, MAX_SHARE_PER_FEATURE * d):
        return None
    return (
        _all_cutoffs(parameters, centre, separation) if len(probes) == K else cutoffs_of(parameters, centre)
    )


def _all_cutoffs(parameters: MixtureParameters, centre: Floats, separation: _Separation) -> Cutoffs:
    pooled = np.tensordot(parameters.weights, parameters.covariances, axes=1)
    means = parameters.means - centre
    linear = np.linalg.solve(pooled, means.T).T
    constant = np.log(parameters.weights) - 0.5 * (linear * means).sum(axis=1)
    discriminants = np.ascontiguousarray(np.column_stack([linear, constant]), np.float32)
    return Cutoffs(centre, discriminants, _distances(separation), _margins(parameters))


def skipping_may_pay(n_components: int, n_features: int, chunk_rows: float) -> bool:
    """Return whether skipping components may save time: a fixed function of shapes."""
    enough = chunk_rows >= MIN_CHUNK_ROWS * n_components
    return enough and n_components * n_features >= MIN_MEAN_VALUES and n_features >= MIN_FEATURES


def _margins(parameters: MixtureParameters) -> Floats:
    return -math.log(NEGLIGIBLE_SHARE) - np.log(parameters.weights)


class _Separation(NamedTuple):
    """Distances of all components k from some components a, (A, K) each."""

    distance: Floats  # v, of a's mean from k, in k's standard deviations
    spread: Floats  # c, a's standard deviation in the direction of that distance, in k's
    below: Floats  # s, twice the maximum difference (nats) by which k may be below a


def _separation(parameters: MixtureParameters, some: Ints) -> _Separation:
    """Return the distances of all components from ``some``."""
    K, d = parameters.means.shape
    scales, margins, means = parameters.log_scales, _margins(parameters), parameters.means
    factors = np.ascontiguousarray(parameters.precisions_cholesky)
    inverses = factors[some]
    invert_upper(inverses)
    roots, turned = inverses.swapaxes(1, 2), factors.swapaxes(1, 2)
    distance, spread = np.empty((2, len(some), K))
    step = max(1, ARRAY_VALUES // (K * d))
    for begin in range(0, len(some), step):
        part = slice(begin, begin + step)
        whitened = (means[some[part]] - means[:, np.newaxis]) @ factors
        distance[part] = np.sqrt(np.einsum("kai,kai->ak", whitened, whitened))
        along = np.ascontiguousarray((whitened @ turned).swapaxes(0, 1)) @ roots[part]
        spread[part] = np.sqrt(np.einsum("aki,aki->ak", along, along))
    spread /= np.where(distance > 0, distance, 1.0)
    below = 2.0 * np.maximum(0.0, margins + scales - scales[some, np.newaxis])
    return _Separation(distance, spread, below)


def _distances(separation: _Separation) -> AnyArray:
    """Return rows of the distances of `Cutoffs`: the squares of r with ``(v - c r)² = r² + s``."""
    distance, spread, below = separation
    left = distance**2 - below
    root = np.sqrt(np.maximum(0.0, left + below * spread**2))
    radius = (left / np.where(left > 0, distance * spread + root, 1.0)) ** 2
    return np.where(left > 0, (1.0 - ROUNDING) * radius, -1.0).astype(np.float32)


def _share_within(parameters: MixtureParameters, some: Ints, separation: _Separation) -> float:
    """Return the approximate share of the components that may count for a row of some component.

    A component may count if the plane through the row, orthogonal to the direction of its distance, is near
    enough.
    """
    farthest = math.sqrt(parameters.n_features) + BEYOND
    counts = separation.distance - ALONG * separation.spread < np.sqrt(farthest**2 + separation.below)
    weights = parameters.weights[some]
    return float(weights @ counts.mean(axis=1) / weights.sum())
