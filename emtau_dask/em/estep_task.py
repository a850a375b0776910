"""The task of an EM iteration: a partial E-step over one chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.chunk import ChunkLoader, LoadedChunk
from emtau_dask.em.compiling import check_compiler
from emtau_dask.execution import ReadingTask
from emtau_dask.io.cache import RowCache
from emtau_dask.io.objects import RowStateWriter, SlotState
from emtau_dask.io.sources import ChunkRange
from emtau_dask.mixture.compiled import Kernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.estep import MostProbable
from emtau_dask.mixture.model import Merger, SufficientStatistics, expected_log_density, merge
from emtau_dask.mixture.numerics import Bools, Ints
from emtau_dask.policies import ACTIVE, ActivityPolicy, Evidence, checked_update


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


@dataclass(frozen=True)
class ChunkOutcome:
    """What a partial E-step leaves of one chunk.

    Attributes
    ----------
    chunk : int
    remaining : int
        Rows left active.
    state : SlotState or None
        Where its row state was written; None for policies that keep none.
    contents : bytes
        What it holds, see `LoadedChunk`.
    """

    chunk: int
    remaining: int
    state: SlotState | None
    contents: bytes


@dataclass(frozen=True, eq=False)
class PassTotals:
    """The merged result of a pass.

    Attributes
    ----------
    statistics : SufficientStatistics or None
        Of the rows scored; None where a chunk had none.
    log_likelihood : float
        ``Σ s_n ln p(x_n)`` over them, nats.
    leaving : FrozenRows or None
        Those of them that go inactive now.
    scored : int
        Rows scored.
    chunks : tuple of ChunkOutcome
    bytes_read : int
    """

    statistics: SufficientStatistics | None
    log_likelihood: float
    leaving: FrozenRows | None
    scored: int
    chunks: tuple[ChunkOutcome, ...]
    bytes_read: int


def merge_frozen(
    structure: CovarianceStructure, a: FrozenRows | None, b: FrozenRows | None
) -> FrozenRows | None:
    """Return the contributions of both; None stands for no rows."""
    if a is None or b is None:
        return a or b
    return FrozenRows(merge(structure, a.statistics, b.statistics), a.entropy + b.entropy)


def merge_totals(structure: CovarianceStructure, parts: Iterable[PassTotals]) -> PassTotals:
    """Return the totals of all parts of a pass, of which it holds one at a time."""
    scored, leaving = Merger(structure), Merger(structure)
    rows = bytes_read = 0
    log_likelihood = entropy = 0.0
    chunks: list[ChunkOutcome] = []
    for part in parts:
        if part.statistics is not None:
            scored.push(part.statistics)
        if part.leaving is not None:
            leaving.push(part.leaving.statistics)
            entropy += part.leaving.entropy
        log_likelihood += part.log_likelihood
        rows += part.scored
        bytes_read += part.bytes_read
        chunks += part.chunks
    frozen = leaving.total()
    return PassTotals(
        scored.total(),
        log_likelihood,
        None if frozen is None else FrozenRows(frozen, entropy),
        rows,
        tuple(chunks),
        bytes_read,
    )


@dataclass(frozen=True, eq=False)
class RowTracking:
    """Who decides about rows, and where tasks leave row state, for policies that keep any.

    Attributes
    ----------
    policy : ActivityPolicy
    writer : RowStateWriter
    kept : frozenset of str
        Arrays whose values inactive rows keep; others are stored as zero there.
    cache : RowCache or None
        Where the state of chunks with active rows is kept beside.
    """

    policy: ActivityPolicy
    writer: RowStateWriter
    kept: frozenset[str]
    cache: RowCache | None

    def fresh(self, n_rows: int, positions: Ints) -> Mapping[str, NDArray[Any]]:
        """Return the state of a chunk's rows of which those at ``positions`` are active, all else 0."""
        state: dict[str, NDArray[Any]] = {
            name: np.zeros(n_rows, dtype) for name, dtype in self.writer.fields.by_name.items()
        }
        state[ACTIVE][positions] = True
        return state

    def last(self, chunk_range: ChunkRange, slot: SlotState) -> Mapping[str, NDArray[Any]]:
        """Return the state that ``slot`` says, by name.

        Raises
        ------
        CheckpointCorruptError
            It cannot be read.
        """
        found = None if self.cache is None else self.cache.find_state(chunk_range.chunk, slot.sha256)
        if found is None:
            stored = self.writer.read(slot, chunk_range.n_rows)
            dtypes = self.writer.fields.by_name
            found = {name: stored[name].astype(dtype, copy=False) for name, dtype in dtypes.items()}
            if self.cache is not None:
                self.cache.keep_state(chunk_range.chunk, slot.sha256, found)
        return found

    def leave(self, chunk: int, state: Mapping[str, NDArray[Any]]) -> SlotState:
        """Write the state of a chunk's rows, which is not to be changed any more."""
        slot = self.writer.write(chunk, state)
        if self.cache is not None:
            if state[ACTIVE].any():
                self.cache.keep_state(chunk, slot.sha256, state)
            else:
                self.cache.drop_state(chunk)
        return slot


@dataclass(frozen=True)
class EStepItem:
    """What the task of a chunk is told.

    Attributes
    ----------
    chunk_range : ChunkRange
    state : SlotState or None
        Its row state; None where it starts afresh, every row active.
    """

    chunk_range: ChunkRange
    state: SlotState | None


@dataclass(frozen=True, eq=False)
class FoundRows:
    """What is read of a chunk for its E-step.

    Attributes
    ----------
    loaded : LoadedChunk
        The chunk, or some of its rows, among them the active ones.
    positions : ndarray of intp
        Of the active rows.
    state : mapping of str to ndarray or None
        Row arrays as they were; None for policies that keep none.
    """

    loaded: LoadedChunk
    positions: Ints
    state: Mapping[str, NDArray[Any]] | None


def _same(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> bool:
    return all(np.array_equal(values, after[name]) for name, values in before.items())


@dataclass(frozen=True, eq=False)
class EStepTask(ReadingTask[FoundRows, PassTotals]):
    """A partial E-step over one chunk: ``task(item, *blocks) -> PassTotals``.

    Attributes
    ----------
    loader : ChunkLoader
    kernels : Kernels
        What scores rows, under Θ of the iteration before.
    iteration : int
    tracking : RowTracking or None
        None where every row is always active.
    """

    loader: ChunkLoader
    kernels: Kernels
    iteration: int
    tracking: RowTracking | None

    def read(self, item: EStepItem, *blocks: Sequence[NDArray[Any]]) -> FoundRows:
        """Return the chunk's active rows, from the cache where they are there, and its row state."""
        if self.tracking is not None and item.state is not None:
            state = self.tracking.last(item.chunk_range, item.state)
            positions = np.flatnonzero(state[ACTIVE])
            return FoundRows(self.loader.load_active(item.chunk_range, positions, *blocks), positions, state)
        loaded = self.loader.load(item.chunk_range, *blocks)
        positions = loaded.positions()
        if self.tracking is None:
            return FoundRows(loaded, positions, None)
        return FoundRows(loaded, positions, self.tracking.fresh(item.chunk_range.n_rows, positions))

    def compute(self, item: EStepItem, found: FoundRows) -> PassTotals:
        """Score the chunk's active rows, and write row state where it changes; again, it does the same."""
        loaded, positions, state = found.loaded, found.positions, found.state
        if self.tracking is None or state is None:
            statistics, log_likelihood = self._score(loaded, positions, None)
            n = len(positions)
            outcome = ChunkOutcome(loaded.chunk, n, None, loaded.contents)
            return PassTotals(statistics, log_likelihood, None, n, (outcome,), loaded.bytes_read)
        statistics, log_likelihood, evidence = self._evidence(loaded, positions)
        before = {name: values[positions] for name, values in state.items() if name != ACTIVE}
        after, stays = checked_update(self.tracking.policy, before, evidence)
        if item.state is not None and stays.all() and _same(before, after):
            written = item.state
        else:
            written = self._write(self.tracking, loaded.chunk, state, after, positions, stays)
        self.loader.keep_active(loaded, positions[stays])
        return PassTotals(
            statistics,
            log_likelihood,
            self._frozen(loaded, positions[~stays]),
            len(positions),
            (ChunkOutcome(loaded.chunk, int(np.count_nonzero(stays)), written, loaded.contents),),
            loaded.bytes_read,
        )

    def _write(
        self,
        tracking: RowTracking,
        chunk: int,
        state: Mapping[str, NDArray[Any]],
        after: Mapping[str, NDArray[Any]],
        positions: Ints,
        stays: Bools,
    ) -> SlotState:
        active = np.zeros_like(state[ACTIVE])
        active[positions] = stays
        written = {ACTIVE: active}
        for name, values in after.items():
            kept = name in tracking.kept
            written[name] = state[name].copy() if kept else np.zeros_like(state[name])
            written[name][positions] = values if kept else np.where(stays, values, 0)
        return tracking.leave(chunk, written)

    def _frozen(self, loaded: LoadedChunk, positions: Ints) -> FrozenRows | None:
        if not len(positions):
            return None
        statistics, log_likelihood = self._score(loaded, positions, None)
        assert statistics is not None
        # ln p(x) = Σ_k r_k ln[π_k N_k(x)] - Σ_k r_k ln r_k, of which the statistics give the first part.
        entropy = log_likelihood - expected_log_density(statistics, self.kernels.plan.parameters)
        return FrozenRows(statistics, max(0.0, entropy))

    def _evidence(
        self, loaded: LoadedChunk, positions: Ints
    ) -> tuple[SufficientStatistics | None, float, Evidence]:
        n = len(positions)
        label_type = np.min_scalar_type(self.kernels.plan.parameters.n_components - 1)
        evidence = Evidence(self.iteration, np.empty(n, dtype=label_type), np.empty(n), np.empty(n))
        return *self._score(loaded, positions, evidence), evidence

    def _score(
        self, loaded: LoadedChunk, positions: Ints, evidence: Evidence | None
    ) -> tuple[SufficientStatistics | None, float]:
        """Return the statistics and the log-likelihood of rows, and write the evidence of each."""
        weights, totals, seen = loaded.weights_at(positions), [], None
        if self.kernels.by_tiles:
            check_compiler()
        kernel = self.kernels.made(len(positions))
        for where, rows in loaded.unchecked_blocks(positions, kernel.n_rows, self.kernels.plan.dtype):
            if evidence is not None:
                seen = MostProbable(evidence.labels[where], evidence.responsibilities[where])
            row_weights = None if weights is None else weights[where]
            accumulated = kernel.accumulate(rows, row_weights, seen)
            loaded.check_values(positions[where], rows, accumulated.squared)
            loaded.check_reach(positions[where], accumulated)
            if evidence is not None:
                evidence.log_likelihoods[where] = accumulated.log_likelihoods
            totals.append(
                accumulated.total if row_weights is None else float(row_weights @ accumulated.log_likelihoods)
            )
        return self.kernels.finished(kernel), math.fsum(totals)
