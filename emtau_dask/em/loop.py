"""The iteration loop: the only one, for every policy, covariance type, executor and storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from emtau_dask.em.estep_task import (
    EStepItem,
    EStepTask,
    FrozenRows,
    PassTotals,
    RowTracking,
    merge_frozen,
    merge_totals,
)
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.problem import Problem
from emtau_dask.em.state import RunState
from emtau_dask.errors import CheckpointCorruptError, SingularComponentError
from emtau_dask.io.objects import RowStateWriter
from emtau_dask.mixture.compiled import Kernels
from emtau_dask.mixture.estep import KernelPlan, plan_kernel
from emtau_dask.mixture.model import (
    MixtureParameters,
    SufficientStatistics,
    expected_log_density,
    m_step,
    merge,
)
from emtau_dask.policies import (
    ActivityPolicy,
    NextPass,
    PassSummary,
    Schedule,
    checked_row_arrays,
    checked_schedule,
)


@dataclass(frozen=True)
class EmSettings:
    """How EM proceeds, and when it ends.

    Attributes
    ----------
    policy : ActivityPolicy
    tol : float
        Nats per row; 0 never stops by it.
    max_iter : int
    reg_covar : float
    """

    policy: ActivityPolicy
    tol: float
    max_iter: int
    reg_covar: float


def iterate(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    writer: Callable[[], RowStateWriter | None],
    after: Callable[[RunState], None],
) -> RunState:
    """Run EM with partial E-steps (the paper's Algorithm 2) from ``state`` until it stops.

    Parameters
    ----------
    problem : Problem
    state : RunState
        Of a new run, or of one that is resumed.
    settings : EmSettings
    writer : callable () -> RowStateWriter or None
        Called for each pass; writes its row state. None where the policy keeps none.
    after : callable (RunState) -> None
        Called after each iteration.

    Returns
    -------
    RunState
        With a ``stop_reason``: ``"tol"``, ``"no-active-rows"`` or ``"max-iter"``.

    Raises
    ------
    SingularComponentError
        A component collapsed.
    InvalidDataError
        A row holds NaN or infinity, or is beyond the range of float64.
    """
    while state.stop_reason is None:
        if state.iteration >= settings.max_iter:
            return replace(state, stop_reason="max-iter")
        state = advance(problem, state, settings, writer)
        after(state)
    return state


def advance(
    problem: Problem, state: RunState, settings: EmSettings, writer: Callable[[], RowStateWriter | None]
) -> RunState:
    """Return the state after one more iteration; the old one stays as it was.

    Parameters and errors are those of `iterate`.
    """
    began = time.perf_counter()
    frozen = None if state.afresh else state.frozen
    chunks = problem.chunks if state.afresh else [chunk for chunk, rows in state.remaining.items() if rows]

    def score(plan: KernelPlan) -> PassTotals:
        return _e_step(problem, state, plan, settings, chunks, writer())

    def maximise(totals: PassTotals) -> MixtureParameters:
        statistics = _all_rows(problem, totals, frozen)
        return m_step(statistics, problem.structure, settings.reg_covar, problem.executor.threads)

    totals, parameters = _with_enough_digits(
        score, maximise, plan_kernel(state.parameters, problem.rows.dtype)
    )
    bound = _lower_bound(problem, state.parameters, totals, frozen)
    record = IterationRecord(
        iteration=state.iteration + 1,
        lower_bound=bound,
        active_rows=totals.scored,
        full_pass=totals.scored == problem.n_present,
        chunks_processed=len(chunks),
        chunks_skipped=len(problem.chunks) - len(chunks),
        bytes_read=totals.bytes_read,
        seconds=time.perf_counter() - began,
        rows=problem.n_present,
    )
    problem.context.observer.iteration(record, parameters)
    following = _following(problem, state, totals, frozen)
    change = None if state.bound is None else bound - state.bound
    summary = PassSummary(
        record.iteration,
        record.full_pass,
        sum(following.remaining.values()),
        change,
        settings.tol,
        following.since_reset,
    )
    schedule = checked_schedule(settings.policy, summary)
    return replace(
        following,
        parameters=parameters,
        bound=bound,
        records=(*state.records, record),
        afresh=schedule.next_pass is NextPass.ALL,
        stop_reason=_stop_reason(schedule, change, settings.tol),
    )


def _following(problem: Problem, state: RunState, totals: PassTotals, frozen: FrozenRows | None) -> RunState:
    """Return the state with the active rows that a pass left, and the statistics of the others."""
    if problem.contents is not None:
        problem.contents.found(
            {outcome.chunk: outcome.contents for outcome in totals.chunks if outcome.contents}
        )
    written = {outcome.chunk: outcome.state for outcome in totals.chunks if outcome.state is not None}
    return replace(
        state,
        frozen=merge_frozen(problem.structure, frozen, totals.leaving),
        since_reset=1 if state.afresh else state.since_reset + 1,
        remaining={outcome.chunk: outcome.remaining for outcome in totals.chunks},
        slots={**state.slots, **written},
    )


def _stop_reason(schedule: Schedule, change: float | None, tol: float) -> str | None:
    if schedule.test_tol and change is not None and abs(change) < tol:
        return "tol"
    return "no-active-rows" if schedule.next_pass is NextPass.STOP else None


def _with_enough_digits(
    score: Callable[[KernelPlan], PassTotals],
    maximise: Callable[[PassTotals], MixtureParameters],
    plan: KernelPlan,
) -> tuple[PassTotals, MixtureParameters]:
    """Return the totals of a pass by ``plan``, and Θ; where too many digits were lost, of a centred pass."""
    totals = score(plan)
    try:
        parameters = maximise(totals)
        if plan.admits(parameters):
            return totals, parameters
    except SingularComponentError:
        if not plan.together.any():
            raise
    again = score(plan.centred)
    again = replace(again, bytes_read=totals.bytes_read + again.bytes_read)
    return again, maximise(again)


def _e_step(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    chunks: Sequence[int],
    writer: RowStateWriter | None,
) -> PassTotals:
    tracking = None
    if writer is not None:
        arrays = checked_row_arrays(settings.policy, problem.n_components, settings.max_iter) or ()
        kept = frozenset(array.name for array in arrays if array.keep)
        tracking = RowTracking(settings.policy, writer, kept, problem.context.cache)
    ranges, sizes, width = problem.chunk_ranges, problem.costs, problem.n_features
    slots = {} if state.afresh else state.slots
    active = sizes if state.afresh else {chunk: float(state.remaining[chunk] * width) for chunk in chunks}
    iteration = state.iteration + 1
    totals = problem.map_reduce(
        EStepTask(problem.loader(noting=True), Kernels(plan, compiled=problem.compiled), iteration, tracking),
        partial(merge_totals, problem.structure),
        name="estep",
        stage=f"iteration {iteration}",
        items={chunk: EStepItem(ranges[chunk], slots.get(chunk)) for chunk in chunks},
        costs={chunk: active[chunk] + sizes[chunk] / 16 for chunk in chunks},
    )
    return totals or PassTotals()


def _all_rows(problem: Problem, totals: PassTotals, frozen: FrozenRows | None) -> SufficientStatistics:
    parts = [part.statistics for part in (frozen, totals) if part is not None and part.statistics is not None]
    if not parts:
        raise CheckpointCorruptError(
            "row state has no active row where the checkpoint says that there are some."
        )
    return reduce(partial(merge, problem.structure), parts)


def _lower_bound(
    problem: Problem, parameters: MixtureParameters, totals: PassTotals, frozen: FrozenRows | None
) -> float:
    """Return Neal and Hinton's free energy F(Θ, q), nats per (weighted) row."""
    total = totals.log_likelihood
    if frozen is not None:
        total += expected_log_density(frozen.statistics, parameters) + frozen.entropy
    return total / problem.total_weight
