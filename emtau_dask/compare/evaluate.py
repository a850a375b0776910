"""Judging a finished fit row by row, streamed: held responsibilities, errors, confusion with known labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em import SCAN_ROWS, ChunkLoader, EStepItem, Problem
from emtau_dask.execution import NO_SOURCE, Pass
from emtau_dask.init import NearestCentre
from emtau_dask.io.objects import ObjectStore, SlotState
from emtau_dask.io.sources import ChunkPlace, ChunkReader, Source
from emtau_dask.mixture.estep import BlockKernel, KernelPlan, plan_kernel
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.mixture.numerics import Floats, Ints
from emtau_dask.policies import SCORED_AT


class Held(Protocol):
    """The responsibilities that a finished fit holds for each row."""

    @property
    def n_components(self) -> int:
        """Number of components K."""
        ...

    def memory(self, state: SlotState | None, n_rows: int) -> NDArray[Any]:
        """Return what is remembered about the rows of a chunk, given its last row state."""
        ...

    def responsibilities(self, rows: Floats, memory: NDArray[Any]) -> Floats:
        """Return (n, K) for a block, given what is remembered about its rows."""
        ...


def _responsibilities(rows: Floats, plan: KernelPlan) -> tuple[Floats, Floats]:
    scored = BlockKernel(plan, max(1, len(rows))).score(rows)
    return scored.responsibilities.T, scored.log_likelihoods


@dataclass(frozen=True, eq=False)
class HeldByIteration:
    """Each row holds the responsibilities of the E-step that last scored it.

    Attributes
    ----------
    plans : tuple of KernelPlan
        For Θ_0, Θ_1, …, under which the E-steps of iterations 1, 2, … ran.
    objects : ObjectStore or None
        Where row state with the array ``scored_at`` is; None where every row was
        scored in the last iteration.
    """

    plans: tuple[KernelPlan, ...]
    objects: ObjectStore | None

    @property
    def n_components(self) -> int:
        """Number of components K."""
        return self.plans[0].parameters.n_components

    def memory(self, state: SlotState | None, n_rows: int) -> NDArray[Any]:
        """Return each row's last iteration."""
        if self.objects is None or state is None:
            return np.full(n_rows, len(self.plans))
        return state.read(self.objects, n_rows)[SCORED_AT]

    def responsibilities(self, rows: Floats, memory: NDArray[Any]) -> Floats:
        """Return the responsibilities under the parameters of each row's last E-step."""
        result = np.empty((len(rows), self.n_components))
        for iteration in np.unique(memory):
            members = memory == iteration
            result[members], _ = _responsibilities(rows[members], self.plans[int(iteration) - 1])
        return result


@dataclass(frozen=True, eq=False)
class HeldByCentre:
    """Each row belongs to its nearest k-means centre."""

    assignment: NearestCentre

    @property
    def n_components(self) -> int:
        """Number of centres K."""
        return int(self.assignment.shares.shape[1])

    def memory(self, state: SlotState | None, n_rows: int) -> NDArray[Any]:
        """Return the rows' positions, of which nothing needs to be remembered."""
        return np.arange(n_rows)

    def responsibilities(self, rows: Floats, memory: NDArray[Any]) -> Floats:
        """Return 1 for the nearest centre."""
        return self.assignment.responsibilities(rows)


@dataclass(frozen=True, eq=False)
class Verdict:
    """Sums over rows; all are additive over chunks.

    Attributes
    ----------
    rows : int
    squared_distance : float
        ``‖W − W_reference‖²_F`` of the held responsibilities.
    held, final : ndarray of int, shape (K, number of classes)
        Rows by component (largest held responsibility; largest final posterior)
        and known label.
    log_likelihood : float
        Under the final parameters, nats.
    """

    rows: int
    squared_distance: float
    held: Ints
    final: Ints
    log_likelihood: float

    def plus(self, other: Verdict) -> Verdict:
        """Return the sums over both parts."""
        return Verdict(
            self.rows + other.rows,
            self.squared_distance + other.squared_distance,
            self.held + other.held,
            self.final + other.final,
            self.log_likelihood + other.log_likelihood,
        )


@dataclass(frozen=True, eq=False)
class _JudgeTask:
    loader: ChunkLoader
    labels: ChunkReader | None
    classes: NDArray[Any]
    held: Held
    reference: Held
    final: KernelPlan | None

    def __call__(
        self,
        item: EStepItem,
        label_blocks: Sequence[NDArray[Any]],
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> Verdict:
        loaded = self.loader.load(item.place, row_blocks, weight_blocks)
        n_rows = len(loaded.rows)
        positions = loaded.positions()
        classes = np.zeros(n_rows, dtype=np.intp)
        if self.labels is not None:
            classes = np.searchsorted(self.classes, self.labels.load(item.place, label_blocks)[0])
        held_memory = self.held.memory(item.state, n_rows)
        reference_memory = self.reference.memory(None, n_rows)
        distances, likelihoods = [], []
        n_components = self.held.n_components
        held_table, final_table = np.zeros((2, n_components, len(self.classes)), dtype=np.intp)
        for where, rows in loaded.blocks(positions, SCAN_ROWS):
            at = positions[where]
            held = self.held.responsibilities(rows, held_memory[at])
            reference = self.reference.responsibilities(rows, reference_memory[at])
            final, log_likelihoods = (
                (held, np.zeros(len(rows))) if self.final is None else _responsibilities(rows, self.final)
            )
            distances.append(float(((held - reference) ** 2).sum()))
            likelihoods.append(float(log_likelihoods.sum()))
            np.add.at(held_table, (held.argmax(axis=1), classes[at]), 1)
            np.add.at(final_table, (final.argmax(axis=1), classes[at]), 1)
        return Verdict(len(positions), math.fsum(distances), held_table, final_table, math.fsum(likelihoods))


@dataclass(frozen=True)
class _LabelsTask:
    reader: ChunkReader

    def __call__(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.unique(self.reader.load(place, blocks)[0])


def distinct_labels(problem: Problem, labels: Source) -> NDArray[Any]:
    """Return the known labels that occur, ascending.

    Parameters
    ----------
    problem : Problem
    labels : Source
        (N,), in the problem's chunks.
    """
    work = Pass(
        _LabelsTask(labels.reader()),
        partial(reduce, np.union1d),
        [labels],
        problem.places,
        name="labels",
        stage="labels",
        costs=problem.costs,
    )
    found: NDArray[Any] | None = problem.executor.map_reduce(work, problem.context.observer)
    assert found is not None
    return found


def judge(
    problem: Problem,
    held: Held,
    states: Mapping[int, SlotState],
    reference: Held,
    final: MixtureParameters | None,
    labels: Source | None,
    classes: NDArray[Any],
    *,
    stage: str,
) -> Verdict:
    """Return the sums that a comparison needs, in one pass over the rows.

    Parameters
    ----------
    problem : Problem
    held : Held
        Of the fit that is judged.
    states : mapping of int to SlotState
        Its last row state, by chunk.
    reference : Held
        Of the fit that it is compared with (traditional EM), which has no row state.
    final : MixtureParameters or None
        Its last parameters; None for k-means, whose labels are the held ones.
    labels : Source or None
        Known labels (N,), in the problem's chunks.
    classes : ndarray
        Their distinct values, ascending; one dummy value where there are none.
    stage : str
    """
    reader = None if labels is None else labels.reader()
    plan = None if final is None else plan_kernel(final)
    verdict: Verdict | None = problem.map_reduce(
        _JudgeTask(problem.loader(), reader, classes, held, reference, plan),
        partial(reduce, Verdict.plus),
        name="judge",
        stage=stage,
        items={chunk: EStepItem(place, states.get(chunk)) for chunk, place in problem.places.items()},
        beside=labels or NO_SOURCE,
    )
    assert verdict is not None
    return verdict
