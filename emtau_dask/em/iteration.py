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
from emtau_dask.em.sums import PassTotals, merge_passes, totals_of
from emtau_dask.em.task import EStepItem, EStepTask, RowTracking, SampleLevel
from emtau_dask.errors import CheckpointCorruptError, SingularComponentError
from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.missing import PatternKernels
from emtau_dask.mixture.parameters import MixtureParameters, m_step, tempered
from emtau_dask.mixture.plan import KernelPlan, plan_kernel, plan_tiles
from emtau_dask.mixture.statistics import SufficientStatistics
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
    """A pass: its totals, and what follows from them for all rows that it stands for.

    Attributes
    ----------
    totals : PassTotals
    weight : float
        Of the rows that it stands for: those of the sample, or all.
    statistics : SufficientStatistics or None
        None where they are those of no mixture.
    plain : MixtureParameters or None
        Their M-step; None where there is none, and where a component collapsed.
    bound : float
        Neal and Hinton's free energy F(Θ, q), nats per row of ``weight``.
    collapse : SingularComponentError or None
        Which component collapsed.
    repeated : bool
        Whether the rows were scored again, since the first pass lost too many digits.
    """

    totals: PassTotals
    weight: float
    statistics: SufficientStatistics | None
    plain: MixtureParameters | None
    bound: float
    collapse: SingularComponentError | None
    repeated: bool


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
    structure, threads = problem.structure, problem.executor.threads

    def totals_by(plan: KernelPlan) -> PassTotals:
        return _e_step(problem, state, plan, settings, this, None if this.sample else writer())

    def statistics(totals: PassTotals) -> SufficientStatistics | None:
        if this.remembered is not None:
            return this.remembered.total(structure, totals.statistics)
        if totals.statistics is None and this.sample is None:
            raise CheckpointCorruptError(
                "row state has no active row where the checkpoint says that there are some."
            )
        return totals.statistics

    def maximise(totals: PassTotals) -> MixtureParameters | None:
        found = statistics(totals)
        return None if found is None else m_step(found, structure, settings.reg_covar, threads)

    annealed_passes = 0 if state.progress is None else state.progress.annealed_passes
    parameters = tempered(state.parameters, Acceleration.inverse_temperature(annealed_passes))
    if problem.compiled:  # Never with missing values.
        plan = plan_tiles(parameters, problem.rows.dtype, this.rows_per_chunk)
    else:
        plan = plan_kernel(parameters)
    totals, plain, collapse, repeated = _with_enough_digits(totals_by, maximise, plan)
    if collapse is not None and settings.acceleration is None:
        raise collapse
    weight, log_likelihood = problem.total_weight, totals.log_likelihood
    if this.sample is not None:
        weight = 0.0 if totals.statistics is None else float(totals.statistics.weights.sum())
    if this.remembered is not None:
        log_likelihood += this.remembered.bound(structure, state.parameters)
    bound = log_likelihood / weight if weight else -math.inf
    found = None if plain is None else statistics(totals)
    return Scored(totals, weight, found, plain, bound, collapse, repeated)


def _with_enough_digits(
    score: Callable[[KernelPlan], PassTotals],
    maximise: Callable[[PassTotals], MixtureParameters | None],
    plan: KernelPlan,
) -> tuple[PassTotals, MixtureParameters | None, SingularComponentError | None, bool]:
    """Return the totals of a pass by ``plan``, and Θ; where too many digits were lost, of one that kept them.

    In place of Θ there may be the collapse of a component, or neither where ``maximise`` finds no mixture.
    The last of what is returned says whether there was another pass.
    """
    bytes_read, repeated = 0, False
    while True:
        totals = score(plan)
        bytes_read += totals.bytes_read
        parameters, collapse = None, None
        try:
            parameters = maximise(totals)
            kept = parameters is None or plan.kept_digits(parameters)
        except SingularComponentError as error:
            collapse, kept = error, plan.exact
        if kept:
            return replace(totals, bytes_read=bytes_read), parameters, collapse, repeated
        plan, repeated = plan.centred, True


def _e_step(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    this: Pass,
    writer: RowStateWriter | None,
) -> PassTotals:
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
    kernels = PatternKernels(plan) if problem.missing else Kernels(plan, compiled=problem.compiled)
    found = problem.map_reduce(
        EStepTask(problem.loader, kernels, iteration, tracking, this.sample),
        partial(merge_passes, problem.structure),
        name="estep",
        stage=f"iteration {iteration}",
        items={chunk: EStepItem(ranges[chunk], this.slots.get(chunk)) for chunk in this.rows_by_chunk},
        costs={chunk: rows * width + sizes[chunk] / 16 for chunk, rows in this.rows_by_chunk.items()},
    )
    return PassTotals() if found is None else totals_of(plan, found)
