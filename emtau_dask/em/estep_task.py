"""The task of an EM iteration: a partial E-step over one chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.compiling import check_compiler
from emtau_dask.execution import ReadingTask
from emtau_dask.io.cache import RowCache
from emtau_dask.io.objects import SHARING_ROWS, RowStateWriter, SlotState
from emtau_dask.io.sources import ChunkRange
from emtau_dask.mixture.compiled import RowKernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.estep import MostProbable
from emtau_dask.mixture.model import Merger, SufficientStatistics, expected_log_density, merge, remainder
from emtau_dask.mixture.numerics import EPS, Bools, Floats, Ints, hashed_uniforms
from emtau_dask.policies import (
    ACTIVE,
    ActivityPolicy,
    Evidence,
    WeightedPolicy,
    checked_update,
    checked_weights,
)
from emtau_dask.rows import ACTIVITY, ChunkLoader, LoadedChunk, Samples

FEW = 3
"""Rows that stay active are few where there are so many times as many in all: then they are scored again, and
not those that become inactive."""


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


class ChunkOutcome(NamedTuple):
    """A chunk after a partial E-step: how many rows remain active, and where its row state is, if any.

    Until the task ends, ``unwritten`` is row state that is not stored yet; after that it is None.
    """

    chunk: int
    remaining: int
    state: SlotState | None
    contents: bytes
    unwritten: Mapping[str, NDArray[Any]] | None = None


@dataclass(frozen=True, eq=False)
class PassTotals:
    """The merged result of a pass; by default that of a pass over no rows.

    Attributes
    ----------
    statistics : SufficientStatistics or None
        Of the rows scored; None where there were none.
    log_likelihood : float
        ``Σ s_n ln p(x_n)`` over them, nats.
    leaving : FrozenRows or None
        Those of them that become inactive now.
    scored : int
        Rows scored.
    chunks : tuple of ChunkOutcome
    bytes_read : int
    staying : FrozenRows or None
        Where active rows stand for others: the part of ``leaving`` that they stand for from now on.
    rescored : int
        Rows that were scored again for that.
    unsure : float
        ``Σ s_n (1 − max_k w_nk)`` over the rows scored, where it is measured.
    """

    statistics: SufficientStatistics | None = None
    log_likelihood: float = 0.0
    leaving: FrozenRows | None = None
    scored: int = 0
    chunks: tuple[ChunkOutcome, ...] = ()
    bytes_read: int = 0
    staying: FrozenRows | None = None
    rescored: int = 0
    unsure: float = 0.0


def merge_frozen(
    structure: CovarianceStructure, a: FrozenRows | None, b: FrozenRows | None
) -> FrozenRows | None:
    """Return the contributions of both; None stands for no rows."""
    if a is None or b is None:
        return a or b
    return FrozenRows(merge(structure, a.statistics, b.statistics), a.entropy + b.entropy)


def merge_totals(structure: CovarianceStructure, parts: Iterable[PassTotals]) -> PassTotals:
    """Return the totals of all parts of a pass, of which it holds one at a time."""
    scored, leaving, staying = Merger(structure), Merger(structure), Merger(structure)
    rows = bytes_read = rescored = 0
    log_likelihood = entropy = staying_entropy = unsure = 0.0
    chunks: list[ChunkOutcome] = []
    for part in parts:
        if part.statistics is not None:
            scored.push(part.statistics)
        if part.leaving is not None:
            leaving.push(part.leaving.statistics)
            entropy += part.leaving.entropy
        if part.staying is not None:
            staying.push(part.staying.statistics)
            staying_entropy += part.staying.entropy
        log_likelihood += part.log_likelihood
        rows += part.scored
        bytes_read += part.bytes_read
        chunks += part.chunks
        rescored += part.rescored
        unsure += part.unsure
    frozen, weighted = leaving.total(), staying.total()
    return PassTotals(
        scored.total(),
        log_likelihood,
        None if frozen is None else FrozenRows(frozen, entropy),
        rows,
        tuple(chunks),
        bytes_read,
        None if weighted is None else FrozenRows(weighted, staying_entropy),
        rescored,
        unsure,
    )


@dataclass(frozen=True, eq=False)
class RowTracking:
    """A policy and where its row state is stored; for inactive rows all arrays but ``kept`` are set to 0.

    ``seed`` is that of the numbers that are drawn for rows, and ``unsure`` what `Evidence` has of the data.
    ``left`` are the names of the samples that the run has left, under which rows are cached.
    """

    policy: ActivityPolicy
    writer: RowStateWriter
    kept: frozenset[str]
    cache: RowCache | None
    seed: int = 0
    unsure: float = math.nan
    left: tuple[str, ...] = ()

    @cached_property
    def weighted(self) -> WeightedPolicy | None:
        """The policy, where active rows stand for others; asked once, since a protocol is slow to check."""
        return self.policy if isinstance(self.policy, WeightedPolicy) else None

    def row_weights(self, state: Mapping[str, NDArray[Any]], n_rows: int) -> Floats | None:
        """Return how many rows each of ``n_rows`` active ones stands for; None where all stand for one."""
        return None if self.weighted is None else checked_weights(self.weighted, state, n_rows)

    def draws(self, iteration: int, chunk_range: ChunkRange, positions: Ints) -> Floats | None:
        """Return the uniform numbers of a chunk's rows in an iteration, for a policy that weights them."""
        if self.weighted is None:
            return None
        return hashed_uniforms((self.seed, ACTIVITY, iteration), chunk_range.start + positions)

    def fresh(self, n_rows: int, positions: Ints) -> Mapping[str, NDArray[Any]]:
        """Return new state for a chunk: the rows at ``positions`` are active, all else is 0."""
        state: dict[str, NDArray[Any]] = {
            name: np.zeros(n_rows, dtype) for name, dtype in self.writer.fields.by_name.items()
        }
        state[ACTIVE][positions] = True
        return state

    def last(self, chunk_range: ChunkRange, slot: SlotState) -> Mapping[str, NDArray[Any]]:
        """Return the arrays at ``slot``, by name; `CheckpointCorruptError` where they cannot be read."""
        found = None if self.cache is None else self.cache.find_state(chunk_range.chunk, slot.place)
        if found is None:
            stored = self.writer.read(slot, chunk_range.n_rows)
            dtypes = self.writer.fields.by_name
            found = {name: stored[name].astype(dtype, copy=False) for name, dtype in dtypes.items()}
            if self.cache is not None:
                self.cache.keep_state(chunk_range.chunk, slot.place, found)
        return found

    def changed(
        self,
        state: Mapping[str, NDArray[Any]],
        after: Mapping[str, NDArray[Any]],
        positions: Ints,
        stays: Bools,
    ) -> Mapping[str, NDArray[Any]]:
        """Return a chunk's ``state`` with ``after`` at ``positions``; ``stays`` says which stay active."""
        n_rows = len(state[ACTIVE])
        if len(positions) == n_rows and stays.all():
            whole = {name: np.array(values, state[name].dtype) for name, values in after.items()}
            return {ACTIVE: stays.copy(), **whole}
        changed: dict[str, NDArray[Any]] = {ACTIVE: np.zeros(n_rows, np.bool_)}
        changed[ACTIVE][positions] = stays
        for name, values in after.items():
            kept = name in self.kept
            changed[name] = state[name].copy() if kept else np.zeros(n_rows, state[name].dtype)
            changed[name][positions] = values if kept else np.where(stays, values, 0)
        return changed

    def take_room(self, outcome: ChunkOutcome) -> None:
        """Give unwritten row state its room in the cache before rows; `written` says where it is stored."""
        if self.cache is not None and outcome.unwritten is not None and outcome.remaining:
            self.cache.keep_state(outcome.chunk, None, outcome.unwritten)

    def written(self, outcomes: Iterable[ChunkOutcome]) -> Iterator[ChunkOutcome]:
        """Write the unwritten row state of chunks; yield their outcomes with its places."""
        outcomes = list(outcomes)
        unwritten = {
            outcome.chunk: outcome.unwritten for outcome in outcomes if outcome.unwritten is not None
        }
        slots = self.writer.write(unwritten) if unwritten else {}
        for outcome in outcomes:
            slot = slots.get(outcome.chunk)
            if slot is None:
                yield outcome
                continue
            if self.cache is not None:
                if outcome.remaining:
                    self.cache.keep_state(outcome.chunk, slot.place, unwritten[outcome.chunk])
                else:
                    self.cache.drop_state(outcome.chunk)
            yield outcome._replace(state=slot, unwritten=None)


class SampleLevel(NamedTuple):
    """One of nested samples."""

    samples: Samples
    level: int


def _times(weights: Floats | None, factors: Floats | None) -> Floats | None:
    if weights is None or factors is None:
        return factors if weights is None else weights
    return weights * factors


def _unsure(evidence: Evidence, weights: Floats | None) -> float:
    unsure = 1.0 - evidence.responsibilities
    return float(unsure.sum() if weights is None else weights @ unsure)


class EStepItem(NamedTuple):
    """The chunk of a task, and its row state: None where every row is active and none is stored yet."""

    chunk_range: ChunkRange
    state: SlotState | None


@dataclass(frozen=True, eq=False)
class FoundRows:
    """At least the active rows of a chunk, their positions, and the row state, None where none is kept."""

    loaded: LoadedChunk
    positions: Ints
    state: Mapping[str, NDArray[Any]] | None


@dataclass(frozen=True, eq=False)
class EStepTask(ReadingTask[FoundRows, PassTotals]):
    """A partial E-step over one chunk: ``task(item, *blocks) -> PassTotals``.

    Attributes
    ----------
    loader : ChunkLoader
    kernels : RowKernels
        What scores rows, under Θ of the iteration before.
    iteration : int
    tracking : RowTracking or None
        None where every row is always active.
    sample : SampleLevel or None
        Which rows alone are scored, and how unsure they are is measured.
    """

    loader: ChunkLoader
    kernels: RowKernels
    iteration: int
    tracking: RowTracking | None
    sample: SampleLevel | None = None

    def read(self, item: EStepItem, *blocks: Sequence[NDArray[Any]]) -> FoundRows:
        """Return the chunk's active rows, from the cache where they are there, and its row state."""
        if self.tracking is not None and item.state is not None:
            state = self.tracking.last(item.chunk_range, item.state)
            positions = np.flatnonzero(state[ACTIVE])
            return FoundRows(self.loader.load_active(item.chunk_range, positions, *blocks), positions, state)
        if self.sample is not None:
            samples, level = self.sample
            loaded, positions = self.loader.load_sample(item.chunk_range, samples, level, *blocks)
            return FoundRows(loaded, positions, None)
        loaded = self.loader.load(item.chunk_range, *blocks)
        positions = loaded.positions()
        if self.tracking is None:
            return FoundRows(loaded, positions, None)
        self.loader.leave_samples(item.chunk_range.chunk, self.tracking.left)
        return FoundRows(loaded, positions, self.tracking.fresh(item.chunk_range.n_rows, positions))

    def compute(self, item: EStepItem, found: FoundRows) -> PassTotals:
        """Score the chunk's active rows; called again, it does the same.

        Row state that changes is written by `finish`, or here, where the chunk shares no object with others.
        """
        loaded, positions, state = found.loaded, found.positions, found.state
        n = len(positions)
        if self.tracking is None or state is None:
            evidence = None if self.sample is None else self._evidence(n, None, math.nan)
            statistics, log_likelihood = self._score(loaded, positions, evidence, None)
            outcome = ChunkOutcome(loaded.chunk, n, None, loaded.contents)
            unsure = 0.0 if evidence is None else _unsure(evidence, loaded.weights_at(positions))
            return PassTotals(
                statistics, log_likelihood, None, n, (outcome,), loaded.bytes_read, unsure=unsure
            )
        tracking = self.tracking
        draws = tracking.draws(self.iteration, item.chunk_range, positions)
        evidence = self._evidence(n, draws, tracking.unsure)
        before = {name: values[positions] for name, values in state.items() if name != ACTIVE}
        factors = None if item.state is None else tracking.row_weights(before, n)
        statistics, log_likelihood = self._score(loaded, positions, evidence, factors)
        after, stays = checked_update(tracking.policy, before, evidence)
        outcome = ChunkOutcome(loaded.chunk, int(np.count_nonzero(stays)), item.state, loaded.contents)
        unchanged = outcome.remaining == n and all(
            np.array_equal(before[name], after[name]) for name in before
        )
        if item.state is None or not unchanged:
            outcome = outcome._replace(unwritten=tracking.changed(state, after, positions, stays))
        if item.chunk_range.n_rows > SHARING_ROWS:
            (outcome,) = tracking.written((outcome,))
        tracking.take_room(outcome)
        self.loader.keep_active(loaded, positions[stays])
        bytes_read = loaded.bytes_read
        if tracking.weighted is None:
            leaving = self._leaving(loaded, positions, stays, statistics, log_likelihood)
            return PassTotals(statistics, log_likelihood, leaving, n, (outcome,), bytes_read)
        kept = checked_weights(
            tracking.weighted, {name: values[stays] for name, values in after.items()}, outcome.remaining
        )
        unsure = _unsure(evidence, _times(loaded.weights_at(positions), factors))
        totals = PassTotals(statistics, log_likelihood, None, n, (outcome,), bytes_read, unsure=unsure)
        if statistics is None or (stays.all() and factors is not None and np.array_equal(kept, factors)):
            return totals
        return replace(
            totals,
            leaving=self._with_entropy(statistics, log_likelihood),
            staying=self._frozen(loaded, positions[stays], kept),
            rescored=len(kept),
        )

    def finish(self, result: PassTotals) -> PassTotals:
        """Write the row state that changes in the chunks of a task; called again, it does the same."""
        if self.tracking is None:
            return result
        return replace(result, chunks=tuple(self.tracking.written(result.chunks)))

    def _evidence(self, n_rows: int, draws: Floats | None, unsure: float) -> Evidence:
        labels = np.empty(n_rows, np.min_scalar_type(self.kernels.plan.parameters.n_components - 1))
        return Evidence(self.iteration, labels, np.empty(n_rows), np.empty(n_rows), draws, unsure)

    def _leaving(
        self,
        loaded: LoadedChunk,
        positions: Ints,
        stays: Bools,
        whole: SufficientStatistics | None,
        of_all: float,
    ) -> FrozenRows | None:
        """Return what rows contribute that do not stay: where few do, the rest of the chunk's totals.

        These are the statistics of the ``whole`` chunk and the log-likelihood ``of_all`` its active rows.
        """
        staying = positions[stays]
        if not len(staying) and whole is not None:
            return self._with_entropy(whole, of_all)
        if FEW * len(staying) < len(positions) and whole is not None:
            part, log_likelihood = self._score(loaded, staying, None, None)
            assert part is not None
            parameters = self.kernels.plan.parameters
            negligible = EPS * whole.weights.sum() * parameters.weights
            rest = remainder(parameters.structure, whole, part, negligible)
            if rest is not None:
                return self._with_entropy(rest, of_all - log_likelihood)
        return self._frozen(loaded, positions[~stays], None)

    def _frozen(self, loaded: LoadedChunk, positions: Ints, factors: Floats | None) -> FrozenRows | None:
        if not len(positions):
            return None
        statistics, log_likelihood = self._score(loaded, positions, None, factors)
        assert statistics is not None
        return self._with_entropy(statistics, log_likelihood)

    def _with_entropy(self, statistics: SufficientStatistics, log_likelihood: float) -> FrozenRows:
        # ln p(x) = Σ_k r_k ln[π_k N_k(x)] - Σ_k r_k ln r_k, of which the statistics give the first part.
        entropy = log_likelihood - expected_log_density(statistics, self.kernels.plan.parameters)
        return FrozenRows(statistics, max(0.0, entropy))

    def _score(
        self, loaded: LoadedChunk, positions: Ints, evidence: Evidence | None, factors: Floats | None
    ) -> tuple[SufficientStatistics | None, float]:
        """Return the statistics and the log-likelihood of rows, and write the evidence of each.

        Each row stands for as many as ``factors`` says, None for one.
        """
        weights, totals, seen = _times(loaded.weights_at(positions), factors), [], None
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
