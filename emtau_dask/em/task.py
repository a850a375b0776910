"""The task of an EM iteration: a partial E-step over one chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.cache import RowCache
from emtau_dask.data.chunk import ChunkContents, ChunkLoader, LoadedChunk
from emtau_dask.data.row_random import ACTIVITY, Samples, hashed_uniforms
from emtau_dask.data.source import ChunkRange
from emtau_dask.em.compiling import check_compiler
from emtau_dask.em.contents import NotingTask
from emtau_dask.em.sums import ChunkOutcome, PassSums
from emtau_dask.kernels.dispatch import RowKernels
from emtau_dask.mixture.estep import MostProbable
from emtau_dask.mixture.linalg import EPS, Bools, Floats, Ints
from emtau_dask.mixture.statistics import RowSums, remainder
from emtau_dask.policies.policy import (
    ACTIVE,
    ActivityPolicy,
    Evidence,
    WeightedPolicy,
    checked_update,
    checked_weights,
)
from emtau_dask.storage.row_state import SHARING_ROWS, RowStateWriter, SlotState

FEW = 3
"""Rows that stay active are few where there are so many times as many in all: then they are scored again, and
not those that become inactive."""


@dataclass(frozen=True, eq=False)
class RowTracking:
    """A policy and where its row state is stored.

    ``seed`` is that of the numbers that are drawn for rows, and ``uncertainty`` that of `Evidence`.
    ``left`` are the names of the samples that the run has left, under which rows are cached.
    """

    policy: ActivityPolicy
    writer: RowStateWriter
    cache: RowCache | None
    seed: int = 0
    uncertainty: float = math.nan
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
                self.cache.keep_state(chunk_range.chunk, found, slot.place)
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
        if len(positions) == np.count_nonzero(stays) == n_rows:
            return {ACTIVE: stays.copy(), **{name: values.copy() for name, values in after.items()}}
        changed: dict[str, NDArray[Any]] = {ACTIVE: np.zeros(n_rows, np.bool_)}
        changed[ACTIVE][positions] = stays
        for name, values in after.items():
            kept = name in self.writer.fields.kept
            changed[name] = state[name].copy() if kept else np.zeros(n_rows, state[name].dtype)
            changed[name][positions] = values if kept else np.where(stays, values, 0)
        return changed

    def take_room(self, outcome: ChunkOutcome) -> None:
        """Cache unwritten row state, which has its room before rows; `written` says where it is stored."""
        if self.cache is not None and outcome.unwritten is not None and outcome.remaining:
            self.cache.keep_state(outcome.chunk, outcome.unwritten)

    def written(self, outcomes: tuple[ChunkOutcome, ...]) -> tuple[ChunkOutcome, ...]:
        """Write the unwritten row state of chunks; return their outcomes with its places."""
        unwritten = {
            outcome.chunk: outcome.unwritten for outcome in outcomes if outcome.unwritten is not None
        }
        if not unwritten:
            return outcomes
        slots = self.writer.write(unwritten)
        if self.cache is not None:
            self.cache.place_states(
                {
                    outcome.chunk: slots[outcome.chunk].place if outcome.remaining else None
                    for outcome in outcomes
                    if outcome.unwritten is not None
                }
            )
        return tuple(
            [ChunkOutcome(chunk, left, slots.get(chunk, state)) for chunk, left, state, _ in outcomes]
        )


class SampleLevel(NamedTuple):
    """One of nested samples."""

    samples: Samples
    level: int


def _uncertainty(evidence: Evidence, weights: Floats | None) -> float:
    uncertainty = 1.0 - evidence.responsibilities
    return float(uncertainty.sum() if weights is None else weights @ uncertainty)


def _differ(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> bool:
    return any(values.tobytes() != after[name].tobytes() for name, values in before.items())


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
class EStepTask(NotingTask[FoundRows, PassSums]):
    """A partial E-step over one chunk, whose result is `PassSums`.

    Attributes
    ----------
    loader : ChunkLoader
    kernels : RowKernels
        What scores rows, under Θ of the iteration before.
    iteration : int
    tracking : RowTracking or None
        None where every row is always active.
    sample : SampleLevel or None
        Which rows alone are scored, and how uncertain they are is measured.
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

    def compute(self, item: EStepItem, found: FoundRows) -> PassSums:
        """Score the chunk's active rows; called again, it does the same.

        Row state that changes is written by `finish`, or here, where the chunk shares no object with others.
        """
        if self.tracking is not None and found.state is not None:
            return self._tracked(item, found, found.state, self.tracking)
        loaded, positions = found.loaded, found.positions
        n, uncertainty = len(positions), 0.0
        evidence = None if self.sample is None else self._evidence(n, None, math.nan)
        rows = self._score(loaded, positions, evidence, None)
        if evidence is not None:
            uncertainty = _uncertainty(evidence, loaded.weights_at(positions))
        outcome = ChunkOutcome(loaded.chunk, n, None)
        return PassSums(
            rows, scored=n, chunks=(outcome,), bytes_read=loaded.bytes_read, uncertainty=uncertainty
        )

    def _tracked(
        self, item: EStepItem, found: FoundRows, state: Mapping[str, NDArray[Any]], tracking: RowTracking
    ) -> PassSums:
        """Return the sums over active rows, of which the policy says which stay active."""
        loaded, positions = found.loaded, found.positions
        n = len(positions)
        draws = tracking.draws(self.iteration, item.chunk_range, positions)
        evidence = self._evidence(n, draws, tracking.uncertainty)
        before = {name: values[positions] for name, values in state.items() if name != ACTIVE}
        factors = None if item.state is None else tracking.row_weights(before, n)
        rows = self._score(loaded, positions, evidence, factors)
        after, stays = checked_update(tracking.policy, before, evidence)
        remaining, unwritten = int(np.count_nonzero(stays)), None
        if item.state is None or remaining < n or _differ(before, after):
            unwritten = tracking.changed(state, after, positions, stays)
        outcome = ChunkOutcome(loaded.chunk, remaining, item.state, unwritten)
        tracking.take_room(outcome)
        if item.chunk_range.n_rows > SHARING_ROWS:
            (outcome,) = tracking.written((outcome,))
        active = positions[stays]
        self.loader.keep_active(loaded, active)
        chunks, bytes_read = (outcome,), loaded.bytes_read
        if tracking.weighted is None:
            leaving = self._leaving(loaded, positions, active, stays, rows)
            return PassSums(rows, leaving, scored=n, chunks=chunks, bytes_read=bytes_read)
        kept = checked_weights(
            tracking.weighted, {name: values[stays] for name, values in after.items()}, remaining
        )
        uncertainty = _uncertainty(evidence, loaded.weights_at(positions, factors))
        if rows is None or (remaining == n and factors is not None and np.array_equal(kept, factors)):
            return PassSums(rows, scored=n, chunks=chunks, bytes_read=bytes_read, uncertainty=uncertainty)
        staying = self._score(loaded, active, None, kept)
        return PassSums(
            rows,
            leaving=rows,
            staying=staying,
            scored=n,
            rescored=remaining,
            chunks=chunks,
            bytes_read=bytes_read,
            uncertainty=uncertainty,
        )

    def finish(self, result: PassSums) -> PassSums:
        """Write the row state that changes in the chunks of a task; called again, it does the same."""
        if self.tracking is None:
            return result
        return result._replace(chunks=self.tracking.written(result.chunks))

    def contents(self, item: EStepItem, found: FoundRows) -> tuple[ChunkContents, ...]:
        """Return what the chunk holds, where it was read whole."""
        return found.loaded.contents()

    def _evidence(self, n_rows: int, draws: Floats | None, uncertainty: float) -> Evidence:
        labels = np.empty(n_rows, self._label_dtype)
        return Evidence(self.iteration, labels, np.empty(n_rows), np.empty(n_rows), draws, uncertainty)

    @cached_property
    def _label_dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.kernels.plan.parameters.n_components - 1)

    def _leaving(
        self,
        loaded: LoadedChunk,
        positions: Ints,
        staying: Ints,
        stays: Bools,
        whole: RowSums | None,
    ) -> RowSums | None:
        """Return what rows contribute that do not stay: where few do, the rest of the ``whole`` chunk's."""
        if len(staying) == len(positions):
            return None
        if not len(staying):
            return whole
        if FEW * len(staying) < len(positions) and whole is not None:
            part = self._score(loaded, staying, None, None)
            assert part is not None
            rest = self._rest(whole, part)
            if rest is not None:
                return rest
        return self._score(loaded, positions[~stays], None, None)

    def _rest(self, whole: RowSums, part: RowSums) -> RowSums | None:
        """Return the rows of ``whole`` that are not among those of ``part``; None if digits would be lost."""
        plan = self.kernels.plan
        all_of, some = plan.statistics(whole), plan.statistics(part)
        negligible = EPS * all_of.weights.sum() * plan.parameters.weights
        rest = remainder(plan.parameters.structure, all_of, some, negligible)
        if rest is None:
            return None
        return RowSums(None, rest, whole.log_likelihood - part.log_likelihood)

    def _score(
        self, loaded: LoadedChunk, positions: Ints, evidence: Evidence | None, factors: Floats | None
    ) -> RowSums | None:
        """Return what rows sum up to, None where there are none, and write the evidence of each.

        Each row stands for as many as ``factors`` says, None for one.
        """
        weights, totals, seen = loaded.weights_at(positions, factors), [], None
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
        sums = self.kernels.finished(kernel)
        return None if sums is None else sums._replace(log_likelihood=math.fsum(totals))
