"""A pass of a run: partial E-steps over chunks, and the statistics, M-step and bound that they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import Acceleration, EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.sums import FrozenRows, PassSums, frozen_rows, merge_passes
from emtau_dask.em.task import EStepItem, EStepTask, RowTracking, SampleLevel
from emtau_dask.errors import CheckpointCorruptError, SingularComponentError
from emtau_dask.kernels.dispatch import Kernels, RowKernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.missing import PatternKernels
from emtau_dask.mixture.parameters import MixtureParameters, m_step, tempered
from emtau_dask.mixture.plan import KernelPlan, plan_kernel, plan_tiles
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.settings import MARGINALISE
from emtau_dask.storage.row_state import RowStateWriter, SlotState


class Remembered(Protocol):
    """What rows contribute that a pass does not score: `FrozenRows`, or `HeldMoments` of weighted passes."""

    def total(
        self, structure: CovarianceStructure, scored: SufficientStatistics | None
    ) -> SufficientStatistics | None:
        """Return the statistics of all rows; None where they are no statistics of a mixture."""
        ...

    def bound(self, structure: CovarianceStructure, parameters: MixtureParameters) -> float:
        """Return the contribution to the bound under parameters, nats."""
        ...


@dataclass(frozen=True, eq=False)
class Pass:
    """Which rows an iteration scores, and what the others contribute.

    ========  ==================================  ========================================
    pass      scores                              the other rows
    ========  ==================================  ========================================
    sample    the rows of a sample                do not count
    full      all rows, with new row state        there are none
    partial   active rows                         contribute what they did when last scored
    weighted  active rows, each for several rows  are those that the active ones stand for
    ========  ==================================  ========================================

    Attributes
    ----------
    rows_by_chunk : mapping of int to float
        The rows that are scored, by chunk; of samples their expected number.
    slots : mapping of int to SlotState
        Row state that says which rows are active; empty where all are scored, or a sample.
    sample : SampleLevel or None
        Only of passes over a sample.
    remembered : Remembered or None
        Of the rows that are not scored; None where these do not count, or where there are none.
    """

    rows_by_chunk: Mapping[int, float]
    slots: Mapping[int, SlotState]
    sample: SampleLevel | None = None
    remembered: Remembered | None = None

    @classmethod
    def full(cls, problem: Problem) -> Pass:
        """Return the pass over all rows."""
        counts = problem.rows.chunk_rows
        return cls({chunk: counts[chunk] for chunk in problem.chunks}, {})

    @classmethod
    def over(cls, problem: Problem, sample: SampleLevel) -> Pass:
        """Return the pass over the rows of a sample."""
        counts, share = problem.rows.chunk_rows, sample.samples.shares[sample.level]
        return cls({chunk: share * counts[chunk] for chunk in problem.chunks}, {}, sample)

    @classmethod
    def partial(cls, state: RunState, remembered: Remembered | None) -> Pass:
        """Return the pass over the active rows of a state, for a partial or weighted one."""
        rows = {chunk: float(rows) for chunk, rows in state.remaining.items() if rows}
        return cls(rows, state.slots, None, remembered)

    @property
    def rows_per_chunk(self) -> float:
        """Rows of a chunk that are scored, on average."""
        return sum(self.rows_by_chunk.values()) / max(1, len(self.rows_by_chunk))


class Scored(NamedTuple):
    """A pass, and what follows from it for all rows that it stands for.

    Attributes
    ----------
    sums : PassSums
    own : SufficientStatistics or None
        Of the rows scored; None where there were none.
    leaving, staying : FrozenRows or None
        What those of `PassSums` contribute from now on.
    weight : float
        Of the rows that it stands for: those of the sample, or all.
    statistics : SufficientStatistics or None
        Of these rows; None where they are those of no mixture.
    plain : MixtureParameters or None
        Their M-step; None where there is none, and where a component collapsed.
    collapse : SingularComponentError or None
        Which component collapsed.
    bound : float
        Neal and Hinton's free energy F(Θ, q), nats per row of ``weight``.
    repeated : bool
        Whether the rows were scored again, since the first pass lost too many digits.
    """

    sums: PassSums
    own: SufficientStatistics | None
    leaving: FrozenRows | None
    staying: FrozenRows | None
    weight: float
    statistics: SufficientStatistics | None
    plain: MixtureParameters | None
    collapse: SingularComponentError | None
    bound: float
    repeated: bool = False


def next_pass(problem: Problem, state: RunState, settings: EmSettings) -> Pass:
    """Return what the next iteration of a run scores."""
    sample = sample_of(state, settings)
    if sample is not None:
        return Pass.over(problem, sample)
    if state.full_pass_next:
        return Pass.full(problem)
    cycle = None if state.progress is None else state.progress.cycle
    return Pass.partial(state, state.frozen if cycle is None else cycle.held)


def sample_of(state: RunState, settings: EmSettings) -> SampleLevel | None:
    """Return the sample that a run scores next; None where it scores all rows, or active ones."""
    if settings.acceleration is None or state.progress is None:
        return None
    samples, level = settings.acceleration.samples, state.progress.level
    return SampleLevel(samples, level) if level < len(samples.shares) else None


def score(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    this: Pass,
    writer: Callable[[], RowStateWriter | None],
) -> Scored:
    """Return what a pass finds under the parameters of a state.

    Raises
    ------
    SingularComponentError
        A component collapsed, in a run that does not extrapolate.
    CheckpointCorruptError
        Row state has no active row where there should be some.
    InvalidDataError
        A row holds NaN or infinity, or is beyond the range of float64.
    """
    annealed_passes = 0 if state.progress is None else state.progress.annealed_passes
    parameters = tempered(state.parameters, Acceleration.inverse_temperature(annealed_passes))
    if problem.compiled:  # Never with missing values.
        plan = plan_tiles(parameters, problem.rows.dtype, this.rows_per_chunk)
    else:
        plan = plan_kernel(parameters)

    def scored_by(plan: KernelPlan) -> Scored:
        sums = _e_step(problem, state, plan, settings, this, None if this.sample else writer())
        return _scored(problem, state, plan, settings, this, sums)

    scored = _with_enough_digits(scored_by, plan)
    if scored.collapse is not None and settings.acceleration is None:
        raise scored.collapse
    return scored


def _with_enough_digits(score: Callable[[KernelPlan], Scored], plan: KernelPlan) -> Scored:
    """Return a pass by ``plan``; where too many digits were lost, one that kept them."""
    scored = score(plan)
    if scored.collapse is not None:
        kept = plan.exact
    else:
        kept = scored.plain is None or plan.kept_digits(scored.plain)
    if kept:
        return scored
    again = score(plan.centred)
    bytes_read = scored.sums.bytes_read + again.sums.bytes_read
    return again._replace(sums=again.sums._replace(bytes_read=bytes_read), repeated=True)


def _scored(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    this: Pass,
    sums: PassSums,
) -> Scored:
    """Return what follows from the sums of a pass that was scored under ``plan``."""
    structure = problem.structure
    own = None if sums.rows is None else plan.statistics(sums.rows)
    log_likelihood = 0.0 if sums.rows is None else sums.rows.log_likelihood
    statistics, weight = own, problem.total_weight
    if this.sample is not None:
        weight = 0.0 if own is None else float(own.weights.sum())
    elif this.remembered is not None:
        statistics = this.remembered.total(structure, own)
        log_likelihood += this.remembered.bound(structure, state.parameters)
    elif own is None:
        raise CheckpointCorruptError(
            "row state has no active row where the checkpoint says that there are some."
        )
    plain, collapse = None, None
    if statistics is not None:
        try:
            plain = m_step(statistics, structure, settings.reg_covar, problem.executor.threads)
        except SingularComponentError as error:
            collapse = error
    return Scored(
        sums,
        own,
        frozen_rows(plan, sums.leaving),
        frozen_rows(plan, sums.staying),
        weight,
        None if plain is None else statistics,
        plain,
        collapse,
        log_likelihood / weight if weight else -math.inf,
    )


def _e_step(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    this: Pass,
    writer: RowStateWriter | None,
) -> PassSums:
    """Return what the chunks of a pass sum up to, scored under ``plan``."""
    tracking = None
    if writer is not None:
        tracking = RowTracking(settings.policy, writer, problem.context.cache)
        if settings.acceleration is not None and state.progress is not None:
            samples = settings.acceleration.samples
            tracking = replace(
                tracking, seed=samples.seed, uncertainty=state.progress.uncertainty, left=samples.names
            )
    ranges, sizes, width = problem.chunk_ranges, problem.costs, problem.n_features
    iteration = state.iteration + 1
    if problem.missing == MARGINALISE:
        kernels: RowKernels = PatternKernels(plan)
    else:
        kernels = Kernels(plan, compiled=problem.compiled)
    sums = problem.map_reduce(
        EStepTask(problem.loader, kernels, iteration, tracking, this.sample),
        partial(merge_passes, problem.structure),
        name="estep",
        stage=f"iteration {iteration}",
        items={chunk: EStepItem(ranges[chunk], this.slots.get(chunk)) for chunk in this.rows_by_chunk},
        costs={chunk: rows * width + sizes[chunk] / 16 for chunk, rows in this.rows_by_chunk.items()},
    )
    return PassSums() if sums is None else sums
