"""The task of a pass: the E-step on the active rows of one chunk."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.cache import CachedName, RowCache
from emtau_dask.data.chunk import ChunkDigest, ChunkLoader, LoadedChunk
from emtau_dask.data.row_random import ACTIVITY, Samples, hashed_uniforms
from emtau_dask.data.source import ChunkRange
from emtau_dask.em.compiling import check_compiler
from emtau_dask.em.sums import ChunkOutcome, PassSums
from emtau_dask.em.verification import DigestingTask
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
from emtau_dask.storage.row_state import SHARING_ROWS, RowStateRef, RowStateWriter

FEW = 3
"""If fewer than 1/3 of the rows stay active, these are scored again and subtracted from the sums of all;
otherwise the rows that become inactive are scored again."""


@dataclass(frozen=True, eq=False)
class RowTracking:
    """A policy, and where its row state is stored and cached.

    ``seed`` is that of the rows' random numbers, and ``uncertainty`` that of `Evidence`.
    ``finished_samples`` are the names of the samples whose cached rows are not needed any more.
    """

    policy: ActivityPolicy
    writer: RowStateWriter
    cache: RowCache | None
    seed: int = 0
    uncertainty: float = math.nan
    finished_samples: tuple[str, ...] = ()

    @cached_property
    def weighted(self) -> WeightedPolicy | None:
        """The policy, if its active rows have sampling weights; cached, since protocols are slow to check."""
        return self.policy if isinstance(self.policy, WeightedPolicy) else None

    def row_weights(self, state: Mapping[str, NDArray[Any]], n_rows: int) -> Floats | None:
        """Return the sampling weights of ``n_rows`` active rows; None if the policy gives none."""
        return None if self.weighted is None else checked_weights(self.weighted, state, n_rows)

    def draws(self, iteration: int, chunk_range: ChunkRange, positions: Ints) -> Floats | None:
        """Return uniform random numbers of rows for `Evidence`; None without sampling weights."""
        if self.weighted is None:
            return None
        return hashed_uniforms((self.seed, ACTIVITY, iteration), chunk_range.start + positions)

    def new_state(self, n_rows: int, positions: Ints) -> Mapping[str, NDArray[Any]]:
        """Return the first state of a chunk: the rows at ``positions`` are active, all else is 0."""
        state: dict[str, NDArray[Any]] = {
            name: np.zeros(n_rows, dtype) for name, dtype in self.writer.fields.by_name.items()
        }
        state[ACTIVE][positions] = True
        return state

    def read(self, chunk_range: ChunkRange, stored: RowStateRef) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of a chunk, by name; raises `CheckpointCorruptError` if they cannot be read."""
        found = None if self.cache is None else self.cache.find_state(chunk_range.chunk, stored.place)
        if found is None:
            values = self.writer.read(stored, chunk_range.n_rows)
            dtypes = self.writer.fields.by_name
            found = {name: values[name].astype(dtype, copy=False) for name, dtype in dtypes.items()}
            if self.cache is not None:
                self.cache.keep_state(chunk_range.chunk, found, stored.place)
        return found

    def updated(
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
        updated: dict[str, NDArray[Any]] = {ACTIVE: np.zeros(n_rows, np.bool_)}
        updated[ACTIVE][positions] = stays
        for name, values in after.items():
            kept = name in self.writer.fields.kept
            updated[name] = state[name].copy() if kept else np.zeros(n_rows, state[name].dtype)
            updated[name][positions] = values if kept else np.where(stays, values, 0)
        return updated

    def cache_state(self, outcome: ChunkOutcome) -> None:
        """Cache unwritten row state before rows take the room; `write` adds its place later."""
        if self.cache is not None and outcome.unwritten is not None and outcome.n_active:
            self.cache.keep_state(outcome.chunk, outcome.unwritten)

    def write(self, outcomes: tuple[ChunkOutcome, ...]) -> tuple[ChunkOutcome, ...]:
        """Write the unwritten row state of chunks; return their outcomes with the places of it."""
        unwritten = {
            outcome.chunk: outcome.unwritten for outcome in outcomes if outcome.unwritten is not None
        }
        if not unwritten:
            return outcomes
        stored = self.writer.write(unwritten)
        if self.cache is not None:
            self.cache.record_stored_states(
                {
                    outcome.chunk: stored[outcome.chunk].place if outcome.n_active else None
                    for outcome in outcomes
                    if outcome.unwritten is not None
                }
            )
        return tuple(
            [ChunkOutcome(chunk, n_active, stored.get(chunk, old)) for chunk, n_active, old, _ in outcomes]
        )


class NestedSample(NamedTuple):
    """One of nested samples."""

    samples: Samples
    number: int


def _uncertainty(evidence: Evidence, weights: Floats | None) -> float:
    uncertainty = 1.0 - evidence.responsibilities
    return float(uncertainty.sum() if weights is None else weights @ uncertainty)


def _differ(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> bool:
    return any(values.tobytes() != after[name].tobytes() for name, values in before.items())


class EStepItem(NamedTuple):
    """The chunk of a task, and its row state: None if every row is active and none is stored yet."""

    chunk_range: ChunkRange
    state: RowStateRef | None


@dataclass(frozen=True, eq=False)
class FoundRows:
    """At least the active rows of a chunk, their positions, and the row state; None if none is kept."""

    loaded: LoadedChunk
    positions: Ints
    state: Mapping[str, NDArray[Any]] | None


@dataclass(frozen=True, eq=False)
class EStepTask(DigestingTask[FoundRows, PassSums]):
    """The E-step on the active rows of one chunk; its result is `PassSums`.

    Attributes
    ----------
    loader : ChunkLoader
    kernels : RowKernels
        Score rows under Θ of the iteration before.
    iteration : int
    tracking : RowTracking or None
        None if every row is always active.
    sample : NestedSample or None
        If given, only its rows are scored, and their uncertainty is measured.
    """

    loader: ChunkLoader
    kernels: RowKernels
    iteration: int
    tracking: RowTracking | None
    sample: NestedSample | None = None

    @property
    def cached_as(self) -> CachedName | None:
        """Where the rows of a sample, or active rows, are cached."""
        if self.sample is not None:
            return self.loader.sample_cached_as(*self.sample)
        if self.tracking is None or self.loader.cache is None:
            return None
        return self.loader.cache.named()

    def is_cached(self, item: EStepItem, state: Hashable) -> bool:
        """Return whether the rows of a sample are cached, or active rows with their newest row state."""
        return self.sample is not None or (item.state is not None and item.state.place == state)

    def read(self, item: EStepItem, *blocks: Sequence[NDArray[Any]]) -> FoundRows:
        """Return the chunk's active rows, from the cache if they are there, and its row state."""
        if self.tracking is not None and item.state is not None:
            state = self.tracking.read(item.chunk_range, item.state)
            positions = np.flatnonzero(state[ACTIVE])
            return FoundRows(self.loader.load_active(item.chunk_range, positions, *blocks), positions, state)
        if self.sample is not None:
            loaded, positions = self.loader.load_sample(item.chunk_range, *self.sample, *blocks)
            return FoundRows(loaded, positions, None)
        loaded = self.loader.load(item.chunk_range, *blocks)
        positions = loaded.positions()
        if self.tracking is None:
            return FoundRows(loaded, positions, None)
        self.loader.drop_samples(item.chunk_range.chunk, self.tracking.finished_samples)
        return FoundRows(loaded, positions, self.tracking.new_state(item.chunk_range.n_rows, positions))

    def compute(self, item: EStepItem, found: FoundRows) -> PassSums:
        """Score the chunk's active rows; called again, it does the same.

        Row state that changes is written by `finish`, or here if the chunk shares no object with others.
        """
        if self.tracking is not None and found.state is not None:
            return self._score_and_update(item, found, found.state, self.tracking)
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

    def _score_and_update(
        self, item: EStepItem, found: FoundRows, state: Mapping[str, NDArray[Any]], tracking: RowTracking
    ) -> PassSums:
        """Return the sums over the active rows, after the policy has decided which of them stay active."""
        loaded, positions = found.loaded, found.positions
        n = len(positions)
        draws = tracking.draws(self.iteration, item.chunk_range, positions)
        evidence = self._evidence(n, draws, tracking.uncertainty)
        before = {name: values[positions] for name, values in state.items() if name != ACTIVE}
        sampling_weights = None if item.state is None else tracking.row_weights(before, n)
        rows = self._score(loaded, positions, evidence, sampling_weights)
        after, stays = checked_update(tracking.policy, before, evidence)
        n_active, unwritten = int(np.count_nonzero(stays)), None
        if item.state is None or n_active < n or _differ(before, after):
            unwritten = tracking.updated(state, after, positions, stays)
        outcome = ChunkOutcome(loaded.chunk, n_active, item.state, unwritten)
        tracking.cache_state(outcome)
        if item.chunk_range.n_rows > SHARING_ROWS:
            (outcome,) = tracking.write((outcome,))
        active = positions[stays]
        self.loader.keep_active(loaded, active)
        chunks, bytes_read = (outcome,), loaded.bytes_read
        if tracking.weighted is None:
            deactivated = self._deactivated(loaded, positions, active, stays, rows)
            return PassSums(rows, deactivated, scored=n, chunks=chunks, bytes_read=bytes_read)
        new_weights = checked_weights(
            tracking.weighted, {name: values[stays] for name, values in after.items()}, n_active
        )
        uncertainty = _uncertainty(evidence, loaded.weights_at(positions, sampling_weights))
        same = sampling_weights is not None and np.array_equal(new_weights, sampling_weights)
        if rows is None or same:
            return PassSums(rows, scored=n, chunks=chunks, bytes_read=bytes_read, uncertainty=uncertainty)
        return PassSums(
            rows,
            deactivated=rows,
            reweighted=self._score(loaded, active, None, new_weights),
            scored=n,
            rescored=n_active,
            chunks=chunks,
            bytes_read=bytes_read,
            uncertainty=uncertainty,
        )

    def finish(self, result: PassSums) -> PassSums:
        """Write the row state that changes in the chunks of a task; called again, it does the same."""
        if self.tracking is None:
            return result
        return result._replace(chunks=self.tracking.write(result.chunks))

    def digests(self, item: EStepItem, found: FoundRows) -> tuple[ChunkDigest, ...]:
        """Return the digests of the chunk, if it was read whole."""
        return found.loaded.digests()

    def _evidence(self, n_rows: int, draws: Floats | None, uncertainty: float) -> Evidence:
        labels = np.empty(n_rows, self._label_dtype)
        return Evidence(self.iteration, labels, np.empty(n_rows), np.empty(n_rows), draws, uncertainty)

    @cached_property
    def _label_dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.kernels.plan.parameters.n_components - 1)

    def _deactivated(
        self,
        loaded: LoadedChunk,
        positions: Ints,
        active: Ints,
        stays: Bools,
        whole: RowSums | None,
    ) -> RowSums | None:
        """Return the sums of the rows at ``positions`` that become inactive; ``whole`` are those of all."""
        if len(active) == len(positions):
            return None
        if not len(active):
            return whole
        if FEW * len(active) < len(positions) and whole is not None:
            part = self._score(loaded, active, None, None)
            assert part is not None
            rest = self._rest(whole, part)
            if rest is not None:
                return rest
        return self._score(loaded, positions[~stays], None, None)

    def _rest(self, whole: RowSums, part: RowSums) -> RowSums | None:
        """Return the sums of the rows of ``whole`` that are not in ``part``; None if digits would be lost."""
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
        """Return the sums of rows, None if there are none; write the evidence of each.

        The weights of rows are multiplied by ``factors``, their sampling weights.
        """
        weights, totals, seen = loaded.weights_at(positions, factors), [], None
        if self.kernels.by_tiles:
            check_compiler()
        kernel = self.kernels.acquire(len(positions))
        for where, rows in loaded.unchecked_blocks(positions, kernel.n_rows, self.kernels.plan.dtype):
            if evidence is not None:
                seen = MostProbable(evidence.labels[where], evidence.responsibilities[where])
            row_weights = None if weights is None else weights[where]
            accumulated = kernel.accumulate(rows, row_weights, seen)
            loaded.check_values(positions[where], rows, accumulated.squared)
            loaded.check_log_likelihoods(positions[where], accumulated)
            if evidence is not None:
                evidence.log_likelihoods[where] = accumulated.log_likelihoods
            totals.append(
                accumulated.total if row_weights is None else float(row_weights @ accumulated.log_likelihoods)
            )
        sums = self.kernels.release(kernel)
        return None if sums is None else sums._replace(log_likelihood=math.fsum(totals))
