"""The iteration loop: the only one, for every policy, covariance type, scheduler and storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from emtau_dask.cluster import local_threads
from emtau_dask.em.estep_task import (
    EStepItem,
    EStepTask,
    HeldRows,
    PassTotals,
    RowTracking,
    merge_held,
    merge_totals,
)
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.observer import FitObserver
from emtau_dask.em.problem import Problem
from emtau_dask.em.state import RunState
from emtau_dask.errors import CheckpointCorruptError, SingularComponentError
from emtau_dask.execution import run_pass
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
from emtau_dask.policies import ActivityPolicy, NextPass, PassSummary, checked_row_arrays, checked_schedule


@dataclass(frozen=True)
class EmSettings:
    """How long a run goes on.

    Attributes
    ----------
    tol : float
        Nats per row; 0 never stops by it.
    max_iter : int
    reg_covar : float
    """

    tol: float
    max_iter: int
    reg_covar: float


def iterate(
    problem: Problem,
    state: RunState,
    policy: ActivityPolicy,
    settings: EmSettings,
    writer: Callable[[], RowStateWriter | None],
    after: Callable[[RunState], None],
    observer: FitObserver,
) -> RunState:
    """Run EM with partial E-steps (the paper's Algorithm 2) from ``state`` until it stops.

    Parameters
    ----------
    problem : Problem
    state : RunState
        Of a run that begins, or one that goes on.
    policy : ActivityPolicy
    settings : EmSettings
    writer : callable () -> RowStateWriter or None
        Called for each pass; gives where its tasks leave row state, None where
        the policy keeps none.
    after : callable (RunState) -> None
        Called after each iteration.
    observer : FitObserver

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
        state = advance(problem, state, policy, settings, writer, observer)
        after(state)
    return state


def advance(
    problem: Problem,
    state: RunState,
    policy: ActivityPolicy,
    settings: EmSettings,
    writer: Callable[[], RowStateWriter | None],
    observer: FitObserver,
) -> RunState:
    """Return the state after one more iteration; the old one stays as it was.

    Parameters and errors are those of `iterate`.
    """
    began = time.perf_counter()
    iteration = state.iteration + 1
    held = None if state.afresh else state.held
    since_reset = 1 if state.afresh else state.since_reset + 1
    chunks = problem.chunks if state.afresh else [chunk for chunk, rows in state.remaining.items() if rows]

    def score(plan: KernelPlan) -> PassTotals | None:
        return _e_step(problem, state, plan, policy, settings, iteration, chunks, writer(), observer)

    def maximise(totals: PassTotals | None) -> MixtureParameters:
        statistics = _all_rows(problem, totals, held)
        return m_step(statistics, problem.structure, settings.reg_covar, local_threads())

    totals, parameters = _with_enough_digits(
        score, maximise, plan_kernel(state.parameters, problem.rows.dtype)
    )
    bound = _lower_bound(problem, state.parameters, totals, held)
    remaining: dict[int, int] = {}
    slots = dict(state.slots)
    if totals is not None:
        held = merge_held(problem.structure, held, totals.leaving)
        remaining = {outcome.chunk: outcome.remaining for outcome in totals.chunks}
        slots |= {outcome.chunk: outcome.state for outcome in totals.chunks if outcome.state is not None}
        if problem.contents is not None:
            problem.contents.found(
                {outcome.chunk: outcome.contents for outcome in totals.chunks if outcome.contents}
            )
    scored = totals.scored if totals is not None else 0
    record = IterationRecord(
        iteration=iteration,
        lower_bound=bound,
        active_rows=scored,
        full_pass=scored == problem.n_present,
        chunks_processed=len(chunks),
        chunks_skipped=len(problem.chunks) - len(chunks),
        bytes_read=totals.bytes_read if totals is not None else 0,
        seconds=time.perf_counter() - began,
        rows=problem.n_present,
    )
    observer.iteration(record, parameters)
    change = None if state.bound is None else bound - state.bound
    left = sum(remaining.values())
    schedule = checked_schedule(
        policy, PassSummary(iteration, record.full_pass, left, change, settings.tol, since_reset)
    )
    stop_reason = None
    if schedule.test_tol and change is not None and abs(change) < settings.tol:
        stop_reason = "tol"
    elif schedule.next_pass is NextPass.STOP:
        stop_reason = "no-active-rows"
    return RunState(
        parameters,
        bound,
        (*state.records, record),
        held,
        since_reset,
        schedule.next_pass is NextPass.ALL,
        remaining,
        slots,
        stop_reason,
    )


def _with_enough_digits(
    score: Callable[[KernelPlan], PassTotals | None],
    maximise: Callable[[PassTotals | None], MixtureParameters],
    plan: KernelPlan,
) -> tuple[PassTotals | None, MixtureParameters]:
    """Return the totals of a pass by ``plan``, or of a second, centred one where it lost too much; and Θ."""
    totals = score(plan)
    try:
        parameters = maximise(totals)
        if plan.admits(parameters):
            return totals, parameters
    except SingularComponentError:
        if not plan.together.any():
            raise
    again = score(plan.centred)
    if totals is not None and again is not None:
        again = replace(again, bytes_read=totals.bytes_read + again.bytes_read)
    return again, maximise(again)


def _e_step(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    policy: ActivityPolicy,
    settings: EmSettings,
    iteration: int,
    chunks: list[int],
    writer: RowStateWriter | None,
    observer: FitObserver,
) -> PassTotals | None:
    tracking = None
    if writer is not None:
        arrays = checked_row_arrays(policy, problem.n_components, settings.max_iter) or ()
        kept = frozenset(array.name for array in arrays if array.keep)
        tracking = RowTracking(policy, writer, kept, problem.cache)
    places, sizes, width = problem.places, problem.costs, problem.n_features
    slots = {} if state.afresh else state.slots
    active = sizes if state.afresh else {chunk: float(state.remaining[chunk] * width) for chunk in chunks}
    return run_pass(
        EStepTask(problem.loader(noting=True), Kernels(plan, compiled=problem.compiled), iteration, tracking),
        partial(merge_totals, problem.structure),
        problem.sources,
        {chunk: EStepItem(places[chunk], slots.get(chunk)) for chunk in chunks},
        name="estep",
        stage=f"iteration {iteration}",
        observer=observer,
        costs={chunk: active[chunk] + sizes[chunk] / 16 for chunk in chunks},
        ahead=problem.ahead,
    )


def _all_rows(problem: Problem, totals: PassTotals | None, held: HeldRows | None) -> SufficientStatistics:
    parts = [part.statistics for part in (held, totals) if part is not None and part.statistics is not None]
    if not parts:
        raise CheckpointCorruptError(
            "row state has no active row where the checkpoint says that there are some."
        )
    statistics = parts[0]
    for part in parts[1:]:
        statistics = merge(problem.structure, statistics, part)
    return statistics


def _lower_bound(
    problem: Problem, parameters: MixtureParameters, totals: PassTotals | None, held: HeldRows | None
) -> float:
    """Return Neal and Hinton's free energy F(Θ, q), nats per (weighted) row."""
    total = 0.0 if totals is None else totals.log_likelihood
    if held is not None:
        total += expected_log_density(held.statistics, parameters) + held.entropy
    return total / problem.total_weight
