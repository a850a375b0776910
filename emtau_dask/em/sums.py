"""The sums of a pass, of one chunk or merged, and the frozen statistics of inactive rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.parameters import MixtureParameters, expected_log_density
from emtau_dask.mixture.plan import KernelPlan
from emtau_dask.mixture.statistics import Merger, RowSums, SufficientStatistics, merge
from emtau_dask.storage.row_state import RowStateRef


@dataclass(frozen=True, eq=False)
class FrozenStatistics:
    """The contribution of inactive rows to every later M-step and bound.

    Attributes
    ----------
    statistics : SufficientStatistics
        Under the responsibilities of their last E-step.
    entropy : float
        ``−Σ s_n w_nk ln w_nk``, nats, plus the entropies of missing values, which may be negative.
    """

    statistics: SufficientStatistics
    entropy: float

    def total(
        self, structure: CovarianceStructure, scored: SufficientStatistics | None
    ) -> SufficientStatistics:
        """Return the statistics of these rows and of those that are scored; None means no rows."""
        return self.statistics if scored is None else merge(structure, self.statistics, scored)

    def bound(self, structure: CovarianceStructure, parameters: MixtureParameters) -> float:
        """Return the contribution to the bound under parameters, nats."""
        return expected_log_density(self.statistics, parameters) + self.entropy


class ChunkOutcome(NamedTuple):
    """A chunk after an E-step: the number of its active rows, and the place of its row state, if any.

    Until the task ends, ``unwritten`` is row state that is not stored yet; after that it is None.
    """

    chunk: int
    n_active: int
    state: RowStateRef | None
    unwritten: Mapping[str, NDArray[Any]] | None = None


class PassSums(NamedTuple):
    """The sums over some chunks of a pass.

    Attributes
    ----------
    rows : RowSums or None
        Of the rows scored; None if there were none.
    deactivated : RowSums or None
        Of those that become inactive. They are added to the frozen statistics. If active rows have sampling
        weights and these change, all rows scored are added.
    reweighted : RowSums or None
        Of the active rows under their new sampling weights. They are subtracted from the frozen statistics.
    scored : int
        Number of rows scored.
    rescored : int
        Number of rows that were scored again for ``reweighted``.
    chunks : tuple of ChunkOutcome
    bytes_read : int
    uncertainty : float
        ``Σ s_n (1 − max_k w_nk)`` over the rows scored, if it is measured; else 0.
    """

    rows: RowSums | None = None
    deactivated: RowSums | None = None
    reweighted: RowSums | None = None
    scored: int = 0
    rescored: int = 0
    chunks: tuple[ChunkOutcome, ...] = ()
    bytes_read: int = 0
    uncertainty: float = 0.0


def merge_passes(structure: CovarianceStructure, parts: Iterable[PassSums]) -> PassSums:
    """Return the sums over all parts of a pass; only one part is in memory at a time."""
    rows, deactivated, reweighted = Merger(structure), Merger(structure), Merger(structure)
    scored = rescored = bytes_read = 0
    uncertainty = 0.0
    chunks: list[ChunkOutcome] = []
    for part in parts:
        if part.rows is not None:
            rows.push(part.rows)
        if part.deactivated is not None:
            deactivated.push(part.deactivated)
        if part.reweighted is not None:
            reweighted.push(part.reweighted)
        scored += part.scored
        rescored += part.rescored
        chunks += part.chunks
        bytes_read += part.bytes_read
        uncertainty += part.uncertainty
    sums = rows.total(), deactivated.total(), reweighted.total()
    return PassSums(*sums, scored, rescored, tuple(chunks), bytes_read, uncertainty)


def frozen_statistics(plan: KernelPlan, part: RowSums | None) -> FrozenStatistics | None:
    """Return the contribution of rows that become inactive after they were scored under ``plan``."""
    if part is None:
        return None
    statistics = plan.statistics(part)
    # ln p(x) = Σ_k r_k ln[π_k N_k(x)] - Σ_k r_k ln r_k, of which the statistics give the first part.
    entropy = part.log_likelihood - expected_log_density(statistics, plan.parameters)
    return FrozenStatistics(statistics, entropy)


def merge_frozen(
    structure: CovarianceStructure, a: FrozenStatistics | None, b: FrozenStatistics | None
) -> FrozenStatistics | None:
    """Return the contributions of both; None means no rows."""
    if a is None or b is None:
        return a or b
    return FrozenStatistics(merge(structure, a.statistics, b.statistics), a.entropy + b.entropy)
