"""How far components reach: which of them may count for a row that lies near one of them.

A component counts for no row for which its responsibility is at most 2⁻⁶⁴ of its weight. All such rows
together add less than 2⁻⁶⁴ to what it has, and less than 2⁻⁵⁶ to its covariance, beside it.

A row at distance r from component a, in a's standard deviations, is at least ``v - c r`` of k's from k, with
v the distance of a's mean from k, and c the standard deviation of a in the direction h of that distance. For
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
"""Responsibility that counts as none, relative to the component's weight."""
ROUNDING = 2.0**-19
"""Taken off bounds of squared distances, relative to them: more than rounding, to float32 too, adds."""
LEAST_NUMBERS, LEAST_FEATURES, LEAST_CHUNK_ROWS = 256, 8, 32
"""Fewest numbers of all means, K d, and fewest features for which components may be left out, and fewest rows
of a chunk for each component."""
MOST_REACHED, OF_A_FEATURE = 0.65, 1 / 40
"""Largest share of components that may count for a row, on average, for which that is done: in all, and for
each feature. To find out which do costs the more beside scoring them, the fewer features there are."""
BEYOND, ALONG = 1.0, 2.0
"""More than the root of the mean squared distance from a component at which rows of it are taken to be, and
how far along a direction, in its standard deviations."""
PROBED = 32
"""Components at which it is taken."""
AT_ONCE = 2**19
"""Numbers of a temporary array, about."""


@dataclass(frozen=True, eq=False)
class Reach:
    """Which components may count for a row.

    Attributes
    ----------
    centre : ndarray of shape (d,)
    discriminants : ndarray of float32, shape (K, d + 1)
        Coefficients of a row less the centre, and of 1: the largest sum is mostly that of the component of
        the row.
    distances : ndarray of float32, shape (K, K)
        Component k does not count for a row whose squared distance from component a, in a's standard
        deviations, is at most ``[a, k]``. That is negative where k always may count.
    margins : ndarray of float64, shape (K,)
        So many nats below the largest score of a row, a component does not count for it.
    """

    centre: Floats
    discriminants: AnyArray
    distances: AnyArray
    margins: Floats


def reach_of(parameters: MixtureParameters, centre: Floats) -> Reach:
    """Return how far the components of a mixture reach, which have factors of their own."""
    everything = np.arange(parameters.n_components)
    return _reach(parameters, centre, _apart(parameters, everything))


def reach_where_few(parameters: MixtureParameters, centre: Floats) -> Reach | None:
    """Return how far they reach, None where too many may count for a row, by the distances from some."""
    K, d = parameters.means.shape
    probed = np.unique(np.linspace(0, K - 1, PROBED).astype(np.intp))
    apart = _apart(parameters, probed)
    if _share_reached(parameters, probed, apart) > min(MOST_REACHED, OF_A_FEATURE * d):
        return None
    return _reach(parameters, centre, apart) if len(probed) == K else reach_of(parameters, centre)


def _reach(parameters: MixtureParameters, centre: Floats, apart: _Apart) -> Reach:
    pooled = np.tensordot(parameters.weights, parameters.covariances, axes=1)
    means = parameters.means - centre
    linear = np.linalg.solve(pooled, means.T).T
    constant = np.log(parameters.weights) - 0.5 * (linear * means).sum(axis=1)
    discriminants = np.ascontiguousarray(np.column_stack([linear, constant]), np.float32)
    return Reach(centre, discriminants, _distances(apart), _margins(parameters))


def may_leave_out(n_components: int, n_features: int, chunk_rows: float) -> bool:
    """Return whether leaving out components may pay: a fixed function of shapes."""
    enough = chunk_rows >= LEAST_CHUNK_ROWS * n_components
    return enough and n_components * n_features >= LEAST_NUMBERS and n_features >= LEAST_FEATURES


def _margins(parameters: MixtureParameters) -> Floats:
    return -math.log(UNSEEN) - np.log(parameters.weights)


class _Apart(NamedTuple):
    """How far components k are from some components a, (A, K) each."""

    distance: Floats  # v, of a's mean from k, in k's standard deviations
    spread: Floats  # c, a's standard deviation along it, in k's
    below: Floats  # s, twice the nats by which k may lie below a


def _apart(parameters: MixtureParameters, some: Ints) -> _Apart:
    """Return how far all components are from ``some``."""
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
    return _Apart(distance, spread, below)


def _distances(apart: _Apart) -> AnyArray:
    """Return rows of the distances of `Reach`: they solve ``(v - c r)² = r² + s`` for r."""
    distance, spread, below = apart
    left = distance**2 - below
    root = np.sqrt(np.maximum(0.0, left + below * spread**2))
    reached = (left / np.where(left > 0, distance * spread + root, 1.0)) ** 2
    return np.where(left > 0, (1.0 - ROUNDING) * reached, -1.0).astype(np.float32)


def _share_reached(parameters: MixtureParameters, some: Ints, apart: _Apart) -> float:
    """Return which share of the components may count for a row of some component, about.

    Those of which the plane through its row, across the direction of their distance, is not far enough.
    """
    farthest = math.sqrt(parameters.n_features) + BEYOND
    counts = apart.distance - ALONG * apart.spread < np.sqrt(farthest**2 + apart.below)
    weights = parameters.weights[some]
    return float(weights @ counts.mean(axis=1) / weights.sum())
