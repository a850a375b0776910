"""What rows that are not scored contribute, where the rows that are scored stand for some of it."""

from __future__ import annotations

from dataclasses import dataclass

from emtau_dask.ascent.moments import MomentSpace
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.model import MixtureParameters, SufficientStatistics
from emtau_dask.mixture.numerics import Floats


@dataclass(frozen=True, eq=False)
class HeldMoments:
    """Signed contributions to every later M-step and bound.

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

    def plus(self, other: HeldMoments, share: float, structure: CovarianceStructure) -> HeldMoments:
        """Return this with ``share`` times the other's."""
        moved = MomentSpace(structure, other.origins).moved(other.moments, self.origins)
        return HeldMoments(self.origins, self.moments + share * moved, self.entropy + share * other.entropy)

    def total(
        self, structure: CovarianceStructure, scored: SufficientStatistics | None
    ) -> SufficientStatistics | None:
        """Return the statistics of all rows; None where they are no statistics of a mixture."""
        space = MomentSpace(structure, self.origins)
        moments = self.moments if scored is None else self.moments + space.of(scored)
        return space.statistics(moments)

    def bound(self, structure: CovarianceStructure, parameters: MixtureParameters) -> float:
        """Return the contribution to the bound under parameters, nats."""
        space = MomentSpace(structure, self.origins)
        return space.expected_log_density(self.moments, parameters) + self.entropy
