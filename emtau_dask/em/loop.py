"""The iteration loop of EM with partial E-steps, for every policy, covariance type and executor.

It is the paper's Algorithm 2, and `advance` is one iteration i of it:

=======================================  ================================================================
Algorithm 2                              here
=======================================  ================================================================
the active rows A[i]                     `next_pass` returns a `Pass`, which says what is scored
w[i] of A[i]: E-step under Θ[i−1]        `run_pass`, by a task for each chunk
w[i] of the other rows: w[i−1]           their statistics are frozen; `run_pass` adds them
Θ[i]: M-step of w[i]                     `run_pass`, then `EmUpdate.step`, which may extrapolate
convergence                              the bound changes by less than ``tol``, or the gap is small
A[i+1]: f of the history                 the policy: for each row in `run_pass`, for the pass in `_schedule`
=======================================  ================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from emtau_dask.em.accelerated_update import AcceleratedUpdate
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.iteration import Pass, PassResult, next_pass, run_pass
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.sums import merge_frozen
from emtau_dask.em.update import EmUpdate, Step, Writer
from emtau_dask.policies.policy import NextPass, PassSummary, Schedule, checked_schedule


def iterate(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    writer: Writer,
    after: Callable[[RunState], None],
    paused: Callable[[RunState], bool] = lambda state: False,
) -> RunState:
    """Run EM with partial E-steps (the paper's Algorithm 2) from ``state`` until it stops.

    Parameters
    ----------
    problem : Problem
    state : RunState
        Of a new run, or of one that is resumed.
    settings : EmSettings
    writer : callable () -> RowStateWriter or None
        Called for each pass; writes its row state. None if the policy keeps none.
    after : callable (RunState) -> None
        Called after each iteration.
    paused : callable (RunState) -> bool
        Whether to return before the next iteration.

    Returns
    -------
    RunState
        With a ``stop_reason``: ``"tol"``, ``"no-active-rows"`` or ``"max-iter"``; without one if paused.

    Raises
    ------
    SingularComponentError
        A component collapsed.
    InvalidDataError
        A row holds NaN or infinity, or is beyond the range of float64.
    """
    while state.stop_reason is None and not paused(state):
        if state.iteration >= settings.max_iter:
            return replace(state, stop_reason="max-iter")
        state = advance(problem, state, settings, writer)
        after(state)
    return state


def advance(problem: Problem, state: RunState, settings: EmSettings, writer: Writer) -> RunState:
    """Return the state after one more iteration; the old state is unchanged.

    Parameters and errors are those of `iterate`.
    """
    began = time.perf_counter()
    update = _update(problem, settings)
    before = update.before_pass(state)
    # E-step on the rows of this pass, frozen statistics of the others, M-step, lower bound.
    this_pass = next_pass(problem, before, settings)
    result = run_pass(problem, before, settings, this_pass, writer)
    # The policy has decided for each row whether it stays active.
    after_pass = before if this_pass.sample else _with_active_rows(problem, before, settings, result)
    # The parameters of the next pass: the M-step, or an extrapolation of it.
    step = update.step(after_pass, this_pass, result)
    record = _record(problem, before, this_pass, result, step, began)
    record = replace(record, gap=update.estimated_gap(before, record))
    state = step.state
    if this_pass.sample is not None:
        problem.context.observer.iteration(record, state.parameters)
        return replace(state, records=(*before.records, record), full_pass_next=True)
    # The policy says what the next pass scores, and whether the run may end after this one.
    change = _change(before, record)
    schedule = _schedule(problem, state, record, settings, update, change)
    comparable, gap = update.is_comparable(record), record.gap
    may_end = comparable and schedule.test_tol
    # Convergence: a small gap, which an accelerated run first measures, or a small change of the bound.
    ends = may_end and gap < settings.gap_tol
    state, record, gap_is_small = update.check_gap(state, record, result, writer, ends=ends)
    problem.context.observer.iteration(record, state.parameters)
    change_is_small = may_end and change is not None and abs(change) < settings.tol
    none_active = schedule.next_pass is NextPass.STOP
    bound = None if record.full_pass else before.bound
    state = replace(
        state,
        records=(*before.records, record),
        bound=record.lower_bound if comparable else bound,
        full_pass_next=schedule.next_pass is NextPass.ALL,
        stop_reason="tol" if gap_is_small or change_is_small else "no-active-rows" if none_active else None,
    )
    return update.before_scheduled_pass(state, result, gap)


def _update(problem: Problem, settings: EmSettings) -> EmUpdate:
    """Return how a run finds the parameters of the next pass: by the M-step alone, or by extrapolation."""
    if settings.acceleration is None:
        return EmUpdate(problem, settings)
    return AcceleratedUpdate(problem, settings, settings.acceleration)


def _with_active_rows(
    problem: Problem, state: RunState, settings: EmSettings, result: PassResult
) -> RunState:
    """Return the state with the rows that are active after a pass, and the statistics of the others."""
    chunks = result.sums.chunks
    written = {outcome.chunk: outcome.state for outcome in chunks if outcome.state is not None}
    frozen = None if state.full_pass_next else state.frozen
    return replace(
        state,
        frozen=None
        if settings.has_sampling_weights
        else merge_frozen(problem.structure, frozen, result.deactivated),
        since_full_pass=1 if state.full_pass_next else state.since_full_pass + 1,
        n_active={outcome.chunk: outcome.n_active for outcome in chunks},
        row_state={**state.row_state, **written},
    )


def _record(
    problem: Problem, before: RunState, this_pass: Pass, result: PassResult, step: Step, began: float
) -> IterationRecord:
    sums, n_chunks = result.sums, len(this_pass.rows_by_chunk)
    return IterationRecord(
        iteration=before.iteration + 1,
        lower_bound=result.bound,
        active_rows=sums.scored + sums.rescored,
        full_pass=sums.scored == problem.n_rows and this_pass.sample is None,
        chunks_processed=n_chunks,
        chunks_skipped=len(problem.chunks) - n_chunks,
        bytes_read=sums.bytes_read,
        seconds=time.perf_counter() - began,
        rows=problem.n_rows,
        accepted=step.accepted,
        gap=step.gap,
        repeated=result.repeated,
    )


def _change(before: RunState, record: IterationRecord) -> float | None:
    """Return the change of the bound; None if there is none to compare with."""
    return record.lower_bound - before.bound if before.bound is not None and record.accepted else None


def _schedule(
    problem: Problem,
    state: RunState,
    record: IterationRecord,
    settings: EmSettings,
    update: EmUpdate,
    change: float | None,
) -> Schedule:
    """Return the policy's decision after a pass over all rows or over active ones."""
    n_active = sum(state.n_active.values())
    summary = PassSummary(
        record.iteration,
        record.full_pass,
        n_active,
        change,
        settings.tol,
        state.since_full_pass,
        record.accepted,
        record.gap,
        *update.cycle_progress(state, record.gap),
    )
    schedule = checked_schedule(settings.policy, summary)
    some_inactive = settings.has_sampling_weights or n_active < problem.n_rows
    if record.full_pass and not record.accepted and some_inactive:
        # The frozen statistics were computed under parameters that are refused.
        return replace(schedule, next_pass=NextPass.ALL)
    return schedule
