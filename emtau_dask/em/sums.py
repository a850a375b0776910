"""What a pass over the rows sums up to, chunk by chunk and merged, and what inactive rows contribute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.parameters import MixtureParameters, expected_log_density
from emtau_dask.mixture.plan import KernelPlan
from emtau_dask.mixture.statistics import Merger, RowSums, SufficientStatistics, merge
from emtau_dask.storage.row_state import SlotState


@dataclass(frozen=True, eq=False)
class FrozenRows:
    """What inactive rows contribute to every later M-step and bound.

    Attributes
    ----------
    statistics : SufficientStatistics
        Under the responsibilities that they keep.
    entropy : float
        ``−Σ s_n w_nk ln w_nk``, nats.
    """

    statistics: SufficientStatistics
    entropy: float

    def total(
        self, structure: CovarianceStructure, scored: SufficientStatistics | None
    ) -> SufficientStatistics:
        """Return the statistics of these rows and of those that are scored; None stands for no rows."""
        return self.statistics if scored is None else merge(structure, self.statistics, scored)

    def bound(self, structure: CovarianceStructure, parameters: MixtureParameters) -> float:
        """Return the contribution to the bound under parameters, nats."""
        return expected_log_density(self.statistics, parameters) + self.entropy


class ChunkOutcome(NamedTuple):
    """A chunk after a partial E-step: how many rows remain active, and where its row state is, if any.

    Until the task ends, ``unwritten`` is row state that is not stored yet; after that it is None.
    """

    chunk: int
    remaining: int
    state: SlotState | None
    unwritten: Mapping[str, NDArray[Any]] | None = None


class PassSums(NamedTuple):
    """What the chunks of a pass sum up to so far.

    Attributes
    ----------
    rows : RowSums or None
        All rows scored; None where there were none.
    leaving : RowSums or None
        Those of them that become inactive now.
    staying : RowSums or None
        Where active rows stand for others: the part of ``leaving`` that they stand for from now on.
    scored : int
        Rows scored.
    rescored : int
        Rows that were scored again for ``staying``.
    chunks : tuple of ChunkOutcome
    bytes_read : int
    uncertainty : float
        ``Σ s_n (1 − max_k w_nk)`` over the rows scored, where it is measured.
    """

    rows: RowSums | None = None
    leaving: RowSums | None = None
    staying: RowSums | None = None
    scored: int = 0
    rescored: int = 0
    chunks: tuple[ChunkOutcome, ...] = ()
    bytes_read: int = 0
    uncertainty: float = 0.0


def merge_passes(structure: CovarianceStructure, parts: Iterable[PassSums]) -> PassSums:
    """Return what all parts of a pass sum up to; one is held at a time."""
    rows, leaving, staying = Merger(structure), Merger(structure), Merger(structure)
    scored = rescored = bytes_read = 0
    uncertainty = 0.0
    chunks: list[ChunkOutcome] = []
    for part in parts:
        if part.rows is not None:
            rows.push(part.rows)
        if part.leaving is not None:
            leaving.push(part.leaving)
        if part.staying is not None:
            staying.push(part.staying)
        scored += part.scored
        rescored += part.rescored
        chunks += part.chunks
        bytes_read += part.bytes_read
        uncertainty += part.uncertainty
    sums = rows.total(), leaving.total(), staying.total()
    return PassSums(*sums, scored, rescored, tuple(chunks), bytes_read, uncertainty)


def frozen_rows(plan: KernelPlan, part: RowSums | None) -> FrozenRows | None:
    """Return what rows contribute that are not scored again, and were scored under ``plan`` last."""
    if part is None:
        return None
    statistics = plan.statistics(part)
    # ln p(x) = Σ_k r_k ln[π_k N_k(x)] - Σ_k r_k ln r_k, of which the statistics give the first part.
    entropy = part.log_likelihood - expected_log_density(statistics, plan.parameters)
    return FrozenRows(statistics, max(0.0, entropy))


def merge_frozen(
    structure: CovarianceStructure, a: FrozenRows | None, b: FrozenRows | None
) -> FrozenRows | None:
    """Return the contributions of both; None stands for no rows."""
    if a is None or b is None:
        return a or b
    return FrozenRows(merge(structure, a.statistics, b.statistics), a.entropy + b.entropy)
