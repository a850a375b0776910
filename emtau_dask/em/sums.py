"""What a pass over the rows sums up to: sums of its chunks, their merges, and what comes of them once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.parameters import MixtureParameters, expected_log_density
from emtau_dask.mixture.plan import KernelPlan
from emtau_dask.mixture.statistics import RowSums, SufficientStatistics, SumsMerger, merge
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


class ScoredRows(NamedTuple):
    """What some rows sum up to, and ``Σ s_n ln p(x_n)`` over them, nats."""

    sums: RowSums
    log_likelihood: float


class PassSums(NamedTuple):
    """What the chunks of a pass sum up to so far.

    Attributes
    ----------
    rows : ScoredRows or None
        All rows scored; None where there were none.
    leaving : ScoredRows or None
        Those of them that become inactive now.
    staying : ScoredRows or None
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

    rows: ScoredRows | None = None
    leaving: ScoredRows | None = None
    staying: ScoredRows | None = None
    scored: int = 0
    rescored: int = 0
    chunks: tuple[ChunkOutcome, ...] = ()
    bytes_read: int = 0
    uncertainty: float = 0.0


def merge_passes(structure: CovarianceStructure, parts: Iterable[PassSums]) -> PassSums:
    """Return what all parts of a pass sum up to; one is held at a time."""
    rows, leaving, staying = _RowsMerger(structure), _RowsMerger(structure), _RowsMerger(structure)
    scored = rescored = bytes_read = 0
    uncertainty = 0.0
    chunks: list[ChunkOutcome] = []
    for part in parts:
        rows.push(part.rows)
        leaving.push(part.leaving)
        staying.push(part.staying)
        scored += part.scored
        rescored += part.rescored
        chunks += part.chunks
        bytes_read += part.bytes_read
        uncertainty += part.uncertainty
    return PassSums(
        rows.total(),
        leaving.total(),
        staying.total(),
        scored,
        rescored,
        tuple(chunks),
        bytes_read,
        uncertainty,
    )


class _RowsMerger:
    def __init__(self, structure: CovarianceStructure) -> None:
        self._sums, self._log_likelihood = SumsMerger(structure), 0.0

    def push(self, part: ScoredRows | None) -> None:
        if part is not None:
            self._sums.push(part.sums)
            self._log_likelihood += part.log_likelihood

    def total(self) -> ScoredRows | None:
        sums = self._sums.total()
        return None if sums is None else ScoredRows(sums, self._log_likelihood)


@dataclass(frozen=True, eq=False)
class PassTotals:
    """The result of a pass; by default that of a pass over no rows. See `PassSums`.

    Attributes
    ----------
    statistics : SufficientStatistics or None
        Of the rows scored; None where there were none.
    log_likelihood : float
        ``Σ s_n ln p(x_n)`` over them, nats.
    leaving : FrozenRows or None
    staying : FrozenRows or None
    scored : int
    rescored : int
    chunks : tuple of ChunkOutcome
    bytes_read : int
    uncertainty : float
    """

    statistics: SufficientStatistics | None = None
    log_likelihood: float = 0.0
    leaving: FrozenRows | None = None
    staying: FrozenRows | None = None
    scored: int = 0
    rescored: int = 0
    chunks: tuple[ChunkOutcome, ...] = ()
    bytes_read: int = 0
    uncertainty: float = 0.0


def totals_of(plan: KernelPlan, found: PassSums) -> PassTotals:
    """Return the result of a pass, all of whose chunks were scored under ``plan``."""

    def frozen(part: ScoredRows | None) -> FrozenRows | None:
        if part is None:
            return None
        statistics = plan.statistics(part.sums)
        # ln p(x) = Σ_k r_k ln[π_k N_k(x)] - Σ_k r_k ln r_k, of which the statistics give the first part.
        entropy = part.log_likelihood - expected_log_density(statistics, plan.parameters)
        return FrozenRows(statistics, max(0.0, entropy))

    return PassTotals(
        None if found.rows is None else plan.statistics(found.rows.sums),
        0.0 if found.rows is None else found.rows.log_likelihood,
        frozen(found.leaving),
        frozen(found.staying),
        found.scored,
        found.rescored,
        found.chunks,
        found.bytes_read,
        found.uncertainty,
    )


def merge_frozen(
    structure: CovarianceStructure, a: FrozenRows | None, b: FrozenRows | None
) -> FrozenRows | None:
    """Return the contributions of both; None stands for no rows."""
    if a is None or b is None:
        return a or b
    return FrozenRows(merge(structure, a.statistics, b.statistics), a.entropy + b.entropy)
