"""Cut-offs: which components may count for a row that is near one of them.

A component does not count for a row if its responsibility is at most 2⁻⁶⁴ of its weight. All such rows
together add less than 2⁻⁶⁴ to its weight, relative to it, and less than 2⁻⁵⁶ to its covariance.

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

UNSEEN = 2.0**-64
"""Maximum responsibility that counts as none, relative to the component's weight."""
ROUNDING = 2.0**-19
"""Relative reduction of bounds of squared distances: more than rounding adds, to float32 too."""
LEAST_NUMBERS, LEAST_FEATURES, LEAST_CHUNK_ROWS = 256, 8, 32
"""Minimum numbers of all means (K d), minimum features, and minimum rows of a chunk for each component, for
which components may be left out."""
MOST_REACHED, OF_A_FEATURE = 0.65, 1 / 40
"""Maximum mean share of components that may count for a row: in all, and for each feature. The fewer features
there are, the more it costs to find these components, compared with scoring all."""
BEYOND, ALONG = 1.0, 2.0
"""Where `_share_within` assumes a row of a component to be: its distance less √d, and its coordinate along
a direction, both in standard deviations."""
PROBED = 32
"""Maximum components for which `_share_within` assumes a row."""
AT_ONCE = 2**19
"""Approximate numbers of a temporary array."""


@dataclass(frozen=True, eq=False)
class Reach:
    """Which components may count for a row.

    Attributes
    ----------
    centre : ndarray of shape (d,)
    discriminants : ndarray of float32, shape (K, d + 1)
        Coefficients of a row less the centre, and of 1: mostly the row's component has the largest sum.
    distances : ndarray of float32, shape (K, K)
        Component k does not count for a row whose squared distance from component a, in a's standard
        deviations, is at most ``[a, k]``. Negative if k may always count.
    margins : ndarray of float64, shape (K,)
        A component does not count for a row if its score is this much below the row's largest, nats.
    """

    centre: Floats
    discriminants: AnyArray
    distances: AnyArray
    margins: Floats


def reach_of(parameters: MixtureParameters, centre: Floats) -> Reach:
    """Return the cut-offs of a mixture whose components have factors of their own."""
    everything = np.arange(parameters.n_components)
    return _cutoffs(parameters, centre, _separation(parameters, everything))


def reach_where_few(parameters: MixtureParameters, centre: Floats) -> Reach | None:
    """Return the cut-offs; None if too many components may count for a row, as probed at some of them."""
    K, d = parameters.means.shape
    probed = np.unique(np.linspace(0, K - 1, PROBED).astype(np.intp))
    separation = _separation(parameters, probed)
    if _share_within(parameters, probed, separation) > min(MOST_REACHED, OF_A_FEATURE * d):
        return None
    return _cutoffs(parameters, centre, separation) if len(probed) == K else reach_of(parameters, centre)


def _cutoffs(parameters: MixtureParameters, centre: Floats, separation: _Separation) -> Reach:
    pooled = np.tensordot(parameters.weights, parameters.covariances, axes=1)
    means = parameters.means - centre
    linear = np.linalg.solve(pooled, means.T).T
    constant = np.log(parameters.weights) - 0.5 * (linear * means).sum(axis=1)
    discriminants = np.ascontiguousarray(np.column_stack([linear, constant]), np.float32)
    return Reach(centre, discriminants, _distances(separation), _margins(parameters))


def may_leave_out(n_components: int, n_features: int, chunk_rows: float) -> bool:
    """Return whether leaving out components may save time: a fixed function of shapes."""
    enough = chunk_rows >= LEAST_CHUNK_ROWS * n_components
    return enough and n_components * n_features >= LEAST_NUMBERS and n_features >= LEAST_FEATURES


def _margins(parameters: MixtureParameters) -> Floats:
    return -math.log(UNSEEN) - np.log(parameters.weights)


class _Separation(NamedTuple):
    """Distances of components k from some components a, (A, K) each."""

    distance: Floats  # v, of a's mean from k, in k's standard deviations
    spread: Floats  # c, a's standard deviation along it, in k's
    below: Floats  # s, twice the nats by which k may lie below a


def _separation(parameters: MixtureParameters, some: Ints) -> _Separation:
    """Return the distances of all components from ``some``."""
    K, d = parameters.means.shape
    scales, margins, means = parameters.log_scales, _margins(parameters), parameters.means
    factors = np.ascontiguousarray(parameters.precisions_cholesky)
    inverses = factors[some]
    invert_upper(inverses)
    roots, turned = inverses.swapaxes(1, 2), factors.swapaxes(1, 2)
    distance, spread = np.empty((2, len(some), K))
    step = max(1, AT_ONCE // (K * d))
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
    """Return rows of the distances of `Reach`: they solve ``(v - c r)² = r² + s`` for r."""
    distance, spread, below = separation
    left = distance**2 - below
    root = np.sqrt(np.maximum(0.0, left + below * spread**2))
    reached = (left / np.where(left > 0, distance * spread + root, 1.0)) ** 2
    return np.where(left > 0, (1.0 - ROUNDING) * reached, -1.0).astype(np.float32)


def _share_within(parameters: MixtureParameters, some: Ints, separation: _Separation) -> float:
    """Return the approximate share of the components that may count for a row of some component.

    A component may count if the plane through the row, across the direction of its distance, is near enough.
    """
    farthest = math.sqrt(parameters.n_features) + BEYOND
    counts = separation.distance - ALONG * separation.spread < np.sqrt(farthest**2 + separation.below)
    weights = parameters.weights[some]
    return float(weights @ counts.mean(axis=1) / weights.sum())
