"""A pass: the E-step on the rows of all its chunks, and the M-step and the lower bound of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from emtau_dask.em.compiling import noted
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import Acceleration, EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.sums import FrozenStatistics, PassSums, frozen_statistics, merge_passes
from emtau_dask.em.task import EStepItem, EStepTask, NestedSample, RowTracking
from emtau_dask.errors import CheckpointCorruptError, SingularComponentError
from emtau_dask.kernels.dispatch import Kernels, RowKernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.missing import PatternKernels
from emtau_dask.mixture.parameters import MixtureParameters, m_step, tempered
from emtau_dask.mixture.plan import KernelPlan, plan_incomplete, plan_kernel, plan_tiles
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.settings import MARGINALISE
from emtau_dask.storage.row_state import RowStateRef, RowStateWriter


class FrozenContribution(Protocol):
    """The contribution of the inactive rows: `FrozenStatistics`, or in weighted passes `FrozenMoments`."""

    def total(
        self, structure: CovarianceStructure, scored: SufficientStatistics | None
    ) -> SufficientStatistics | None:
        """Return the statistics of all rows; None if no mixture has such statistics."""
        ...

    def bound(self, structure: CovarianceStructure, parameters: MixtureParameters) -> float:
        """Return the contribution to the bound under parameters, nats."""
        ...


@dataclass(frozen=True, eq=False)
class Pass:
    """Which rows an iteration scores, and what the others contribute.

    ========  ==================================  ===========================================
    pass      scores                              the other rows
    ========  ==================================  ===========================================
    sample    the rows of a sample                do not count
    full      all rows, with new row state        there are none
    partial   active rows                         contribute their frozen statistics
    weighted  active rows with sampling weights   contribute frozen statistics, less what the
                                                  sampling weights add
    ========  ==================================  ===========================================

    Attributes
    ----------
    rows_by_chunk : mapping of int to float
        The number of rows that are scored, by chunk; the expected number for a sample.
    row_state : mapping of int to RowStateRef
        Row state that says which rows are active, by chunk; empty for full and sample passes.
    sample : NestedSample or None
        None unless the pass is over a sample.
    frozen : FrozenContribution or None
        Of the other rows; None if they do not count, or if there are none.
    """

    rows_by_chunk: Mapping[int, float]
    row_state: Mapping[int, RowStateRef]
    sample: NestedSample | None = None
    frozen: FrozenContribution | None = None

    @classmethod
    def full(cls, problem: Problem) -> Pass:
        """Return the pass over all rows."""
        counts = problem.rows.chunk_rows
        return cls({chunk: counts[chunk] for chunk in problem.chunks}, {})

    @classmethod
    def over_sample(cls, problem: Problem, sample: NestedSample) -> Pass:
        """Return the pass over the rows of a sample."""
        counts, share = problem.rows.chunk_rows, sample.samples.shares[sample.number]
        return cls({chunk: share * counts[chunk] for chunk in problem.chunks}, {}, sample)

    @classmethod
    def partial(cls, state: RunState, frozen: FrozenContribution | None) -> Pass:
        """Return the partial or weighted pass over the active rows of a state."""
        rows = {chunk: float(rows) for chunk, rows in state.n_active.items() if rows}
        return cls(rows, state.row_state, None, frozen)

    @property
    def rows_per_chunk(self) -> float:
        """Mean number of rows of a chunk that are scored."""
        return sum(self.rows_by_chunk.values()) / max(1, len(self.rows_by_chunk))


class PassResult(NamedTuple):
    """The result of a pass.

    Attributes
    ----------
    sums : PassSums
        Of the rows scored.
    scored : SufficientStatistics or None
        Of the rows scored; None if there were none.
    deactivated, reweighted : FrozenStatistics or None
        Of the rows of these names in `PassSums`.
    weight : float
        Total weight of all rows, or of the sample.
    statistics : SufficientStatistics or None
        Of all rows, or of the sample; None if no mixture has such statistics.
    em_parameters : MixtureParameters or None
        The M-step of ``statistics``; None if there is none, or if a component collapsed.
    collapse : SingularComponentError or None
        Names the component that collapsed.
    bound : float
        Neal and Hinton's free energy F(Θ, q), nats per row of ``weight``.
    repeated : bool
        Whether the rows were scored again because the first pass lost too many digits.
    """

    sums: PassSums
    scored: SufficientStatistics | None
    deactivated: FrozenStatistics | None
    reweighted: FrozenStatistics | None
    weight: float
    statistics: SufficientStatistics | None
    em_parameters: MixtureParameters | None
    collapse: SingularComponentError | None
    bound: float
    repeated: bool = False


def next_pass(problem: Problem, state: RunState, settings: EmSettings) -> Pass:
    """Return the pass of the next iteration."""
    sample = sample_of(state, settings)
    if sample is not None:
        return Pass.over_sample(problem, sample)
    if state.full_pass_next:
        return Pass.full(problem)
    cycle = None if state.progress is None else state.progress.cycle
    return Pass.partial(state, state.frozen if cycle is None else cycle.frozen)


def sample_of(state: RunState, settings: EmSettings) -> NestedSample | None:
    """Return the sample that a run scores next; None if it scores all rows or active rows."""
    if settings.acceleration is None or state.progress is None:
        return None
    samples, number = settings.acceleration.samples, state.progress.sample_index
    return NestedSample(samples, number) if number < len(samples.shares) else None


def run_pass(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    this_pass: Pass,
    writer: Callable[[], RowStateWriter | None],
) -> PassResult:
    """Score the rows of a pass under the parameters of a state, and return the M-step of all rows.

    Raises
    ------
    SingularComponentError
        A component collapsed, in a run without acceleration.
    CheckpointCorruptError
        Row state has no active row, though the checkpoint counts some.
    InvalidDataError
        A row holds NaN or infinity, or is beyond the range of float64.
    """
    annealed_passes = 0 if state.progress is None else state.progress.annealed_passes
    parameters = tempered(state.parameters, Acceleration.inverse_temperature(annealed_passes))
    plan = plan_of(problem, parameters, this_pass.rows_per_chunk)

    def run(plan: KernelPlan) -> PassResult:
        sums = _e_step(problem, state, plan, settings, this_pass, None if this_pass.sample else writer())
        return _result(problem, state, plan, settings, this_pass, sums)

    with nullcontext() if plan.cutoffs is None else noted(problem.context.observer):
        result = _with_enough_digits(run, plan)
    if result.collapse is not None and settings.acceleration is None:
        raise result.collapse
    return result


def plan_of(problem: Problem, parameters: MixtureParameters, rows_per_chunk: float) -> KernelPlan:
    """Return the plan by which the rows of a problem are scored."""
    if not problem.compiled:
        return plan_kernel(parameters)
    if problem.missing == MARGINALISE:
        return plan_incomplete(parameters)
    return plan_tiles(parameters, problem.rows.dtype, rows_per_chunk)


def kernels_of(problem: Problem, plan: KernelPlan) -> RowKernels:
    """Return the kernels that score the rows of a problem under a plan."""
    if problem.missing == MARGINALISE and not plan.incomplete:
        return PatternKernels(plan)
    return Kernels(plan, compiled=problem.compiled)


def _with_enough_digits(run: Callable[[KernelPlan], PassResult], plan: KernelPlan) -> PassResult:
    """Return the result of a pass by ``plan``; if that lost too many digits, of one in the centred form."""
    result = run(plan)
    if result.collapse is not None:
        kept = plan.exact
    else:
        kept = result.em_parameters is None or plan.kept_digits(result.em_parameters)
    if kept:
        return result
    again = run(plan.centred)
    bytes_read = result.sums.bytes_read + again.sums.bytes_read
    return again._replace(sums=again.sums._replace(bytes_read=bytes_read), repeated=True)


def _result(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    this_pass: Pass,
    sums: PassSums,
) -> PassResult:
    """Return the result of a pass from its sums, which were scored under ``plan``: M-step and bound."""
    structure = problem.structure
    scored = None if sums.rows is None else plan.statistics(sums.rows)
    log_likelihood = 0.0 if sums.rows is None else sums.rows.log_likelihood
    statistics, weight = scored, problem.total_weight
    if this_pass.sample is not None:
        weight = 0.0 if scored is None else float(scored.weights.sum())
    elif this_pass.frozen is not None:
        statistics = this_pass.frozen.total(structure, scored)
        log_likelihood += this_pass.frozen.bound(structure, state.parameters)
    elif scored is None:
        raise CheckpointCorruptError(
            "row state has no active row where the checkpoint says that there are some."
        )
    em_parameters, collapse = None, None
    if statistics is not None:
        try:
            em_parameters = m_step(statistics, structure, settings.reg_covar, problem.executor.threads)
        except SingularComponentError as error:
            collapse = error
    return PassResult(
        sums,
        scored,
        frozen_statistics(plan, sums.deactivated),
        frozen_statistics(plan, sums.reweighted),
        weight,
        None if em_parameters is None else statistics,
        em_parameters,
        collapse,
        log_likelihood / weight if weight else -math.inf,
    )


def _e_step(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    this_pass: Pass,
    writer: RowStateWriter | None,
) -> PassSums:
    """Return the sums over the rows of a pass, scored under ``plan`` by a task for each chunk."""
    tracking = None
    if writer is not None:
        tracking = RowTracking(settings.policy, writer, problem.context.cache)
        if settings.acceleration is not None and state.progress is not None:
            samples = settings.acceleration.samples
            tracking = replace(
                tracking,
                seed=samples.seed,
                uncertainty=state.progress.uncertainty,
                finished_samples=samples.names,
            )
    ranges, sizes, width = problem.chunk_ranges, problem.costs, problem.n_features
    iteration = state.iteration + 1
    sums = problem.map_reduce(
        EStepTask(problem.loader, kernels_of(problem, plan), iteration, tracking, this_pass.sample),
        partial(merge_passes, problem.structure),
        name="estep",
        stage=f"iteration {iteration}",
        items={
            chunk: EStepItem(ranges[chunk], this_pass.row_state.get(chunk))
            for chunk in this_pass.rows_by_chunk
        },
        costs={chunk: rows * width + sizes[chunk] / 16 for chunk, rows in this_pass.rows_by_chunk.items()},
    )
    return PassSums() if sums is None else sums
