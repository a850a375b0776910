"""Signed moments: statistics that may be subtracted and extrapolated.

They are sums over rows of ``w_nk · (1, x − a_k, (x − a_k)(x − a_k)ᵀ)`` about an origin ``a_k`` for each
component, so that weights and scatters may be negative. Near the means they keep the digits that moments
about one common origin lose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.linalg import Floats, read_only
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics

EMPTY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class MomentSpace:
    """The moments about one origin for each component, as flat vectors.

    `moved` and `standardised` also take several vectors, (m, size); each result is that of the vector alone.

    Attributes
    ----------
    structure : CovarianceStructure
    origins : ndarray of shape (K, d)
    """

    structure: CovarianceStructure
    origins: Floats

    @property
    def size(self) -> int:
        """Values of a vector of moments: K + K d + those of the covariances."""
        K, d = self.origins.shape
        return int(K + K * d + math.prod(self.structure.shape(K, d)))

    def split(self, moments: Floats) -> tuple[Floats, Floats, Floats]:
        """Return views of the weights (K,), first moments (K, d) and second moments of a vector."""
        (K, d), several = self.origins.shape, moments.shape[:-1]
        return (
            moments[..., :K],
            moments[..., K : K + K * d].reshape(*several, K, d),
            moments[..., K + K * d :].reshape((*several, *self.structure.shape(K, d))),
        )

    def of(self, statistics: SufficientStatistics) -> Floats:
        """Return the moments of statistics."""
        moments = np.empty(self.size)
        weights, firsts, seconds = self.split(moments)
        shifts = statistics.means - self.origins
        weights[...] = statistics.weights
        firsts[...] = statistics.weights[:, np.newaxis] * shifts
        seconds[...] = statistics.scatter
        self._add_outer(seconds, statistics.weights, shifts)
        return moments

    def statistics(self, moments: Floats) -> SufficientStatistics | None:
        """Return moments as statistics; None if a component has no positive weight."""
        weights, firsts, seconds = self.split(moments)
        if not (weights > weights.sum() * EMPTY).all():
            return None
        shifts = firsts / weights[:, np.newaxis]
        scatter = seconds.copy()
        self._add_outer(scatter, -weights, shifts)
        return SufficientStatistics(
            read_only(weights.copy()), read_only(self.origins + shifts), read_only(scatter)
        )

    def moved(self, moments: Floats, origins: Floats) -> Floats:
        """Return the moments about other origins."""
        result = moments.copy()
        if origins is self.origins:
            return result
        weights, firsts, seconds = self.split(result)
        shifts = origins - self.origins
        self._add_products(seconds, firsts, -shifts)
        self._add_outer(seconds, weights, shifts)
        firsts -= weights[..., np.newaxis] * shifts
        return result

    def expected_log_density(self, moments: Floats, parameters: MixtureParameters) -> float:
        """Return ``Σ_nk w_nk ln[π_k N(x_n | μ_k, Σ_k)]``, in nats; as a function of `mixture.parameters`."""
        about = self.moved(moments, parameters.means)
        weights, _, seconds = self.split(about)
        distance = self.structure.distances(seconds, parameters.precisions_cholesky)
        return float(weights @ parameters.log_scales) - 0.5 * distance

    def standardised(self, moments: Floats, parameters: MixtureParameters) -> Floats:
        """Return a vector whose products are those of the complete data's Fisher information under Θ.

        For the expectation parameters of an exponential family that information is the inverse of the
        covariance of its statistics. The origins must be the means of ``parameters``. In these units an EM
        step is a gradient step of length 1, and the Jacobian of EM is symmetric (Dempster, Laird and Rubin
        1977, eq. 3.15; Xu and Jordan 1996).
        """
        weights, firsts, seconds = self.split(moments.reshape(-1, moments.shape[-1]))
        structure, factors = self.structure, parameters.precisions_cholesky
        roots = np.sqrt(parameters.weights)[:, np.newaxis]
        squares = structure.standardised(seconds, weights, factors, self.origins.shape[1])
        if not structure.shared:
            squares = squares / roots
        parts = (weights / roots[:, 0], structure.whitened(firsts, factors) / roots, squares)
        return np.concatenate([part.reshape(*moments.shape[:-1], -1) for part in parts], axis=-1)

    def _add_outer(self, seconds: Floats, weights: Floats, vectors: Floats) -> None:
        vectors = np.broadcast_to(vectors, (*weights.shape, vectors.shape[-1]))
        self._add_sums(seconds, weights[np.newaxis], vectors[np.newaxis])

    def _add_products(self, seconds: Floats, left: Floats, right: Floats) -> None:
        """Add ``left_k right_kᵀ + right_k left_kᵀ``, as squares of sums and differences of one length."""
        sizes = np.linalg.norm(left, axis=-1), np.linalg.norm(right, axis=-1)
        both = (sizes[0] > 0) & (sizes[1] > 0)
        balance = np.sqrt(np.divide(sizes[1], sizes[0], out=np.ones_like(sizes[0]), where=both))
        a, b = left * balance[..., np.newaxis], right / balance[..., np.newaxis]
        half = np.where(both, 0.5, 0.0)
        self._add_sums(seconds, np.array([half, -half]), np.array([a + b, a - b]))

    def _add_sums(self, seconds: Floats, weights: Floats, vectors: Floats) -> None:
        """Add ``Σ_i weights_i · vectors_i vectors_iᵀ`` of each component; i is the first axis."""
        (K, d), several = self.origins.shape, weights.shape[1:-1]
        if (
            not self.structure.shared
        ):  # The components of several vectors of moments are as so many components.
            flat = seconds.reshape(-1, *self.structure.shape(K, d)[1:])
            self.structure.add_outer(
                flat, weights.reshape(len(weights), -1), vectors.reshape(len(weights), -1, d)
            )
            seconds[...] = flat.reshape(seconds.shape)
            return
        for one in np.ndindex(several):
            here = (slice(None), *one)
            self.structure.add_outer(seconds[(*one, ...)], weights[here], vectors[here])


@dataclass(frozen=True, eq=False)
class FrozenMoments:
    """The contribution of inactive rows to every later M-step and bound, less that of sampling weights.

    Attributes
    ----------
    origins : ndarray of shape (K, d)
    moments : ndarray
        Sums over rows, as `MomentSpace` has them; weights and scatters may be negative.
    entropy : float
        nats; it may be negative.
    """

    origins: Floats
    moments: Floats
    entropy: float

    def plus(self, other: FrozenMoments, share: float, structure: CovarianceStructure) -> FrozenMoments:
        """Return this with ``share`` times the other's."""
        moved = MomentSpace(structure, other.origins).moved(other.moments, self.origins)
        return FrozenMoments(self.origins, self.moments + share * moved, self.entropy + share * other.entropy)

    def total(
        self, structure: CovarianceStructure, scored: SufficientStatistics | None
    ) -> SufficientStatistics | None:
        """Return the statistics of all rows; None if no mixture has such statistics."""
        space = MomentSpace(structure, self.origins)
        moments = self.moments if scored is None else self.moments + space.of(scored)
        return space.statistics(moments)

    def bound(self, structure: CovarianceStructure, parameters: MixtureParameters) -> float:
        """Return the contribution to the bound under parameters, nats."""
        space = MomentSpace(structure, self.origins)
        return space.expected_log_density(self.moments, parameters) + self.entropy
