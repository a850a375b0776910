"""The iteration loop: the only one, for every policy, covariance type, executor and storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from emtau_dask.em.history import IterationRecord
from emtau_dask.em.iteration import Pass, Scored, next_pass, score
from emtau_dask.em.problem import Problem
from emtau_dask.em.schedule import AcceleratedSteps
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.steps import EmSteps, Step, Writer
from emtau_dask.em.sums import merge_frozen
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
        Called for each pass; writes its row state. None where the policy keeps none.
    after : callable (RunState) -> None
        Called after each iteration.
    paused : callable (RunState) -> bool
        Whether to return before the next iteration.

    Returns
    -------
    RunState
        With a ``stop_reason``: ``"tol"``, ``"no-active-rows"`` or ``"max-iter"``; without one where paused.

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
    """Return the state after one more iteration; the old one stays as it was.

    Parameters and errors are those of `iterate`.
    """
    began = time.perf_counter()
    steps = _steps_of(problem, settings)
    before = steps.begun(state)
    # The E-step over the rows that this pass scores, the M-step of all rows, and the lower bound.
    this = next_pass(problem, before, settings)
    scored = score(problem, before, settings, this, writer)
    left = before if this.sample else _rows_left(problem, before, settings, scored)
    # The parameters that are scored next: the M-step, or what a longer step leads to.
    step = steps.step(left, this, scored)
    record = _record(problem, before, this, scored, step, began)
    record = replace(record, gap=steps.gap(before, record))
    state = step.state
    if this.sample is not None:
        problem.context.observer.iteration(record, state.parameters)
        return replace(state, records=(*before.records, record), full_pass_next=True)
    # The policy says what the next pass scores, and whether this one may end the run.
    change = _change(before, record)
    schedule = _schedule(problem, state, record, settings, steps, change)
    comparable, estimated = steps.comparable(record), record.gap
    ends = comparable and schedule.test_tol and estimated < settings.gap_tol
    state, record, ends = steps.verified(state, record, scored, writer, ends=ends)
    problem.context.observer.iteration(record, state.parameters)
    small = comparable and schedule.test_tol and change is not None and abs(change) < settings.tol
    none_left = schedule.next_pass is NextPass.STOP
    bound = None if record.full_pass else before.bound
    state = replace(
        state,
        records=(*before.records, record),
        bound=record.lower_bound if comparable else bound,
        full_pass_next=schedule.next_pass is NextPass.ALL,
        stop_reason="tol" if ends or small else "no-active-rows" if none_left else None,
    )
    return steps.onwards(state, scored, estimated)


def _steps_of(problem: Problem, settings: EmSettings) -> EmSteps:
    """Return how a run gets from a pass to the next parameters: by EM's own steps, or by longer ones."""
    if settings.acceleration is None:
        return EmSteps(problem, settings)
    return AcceleratedSteps(problem, settings, settings.acceleration)


def _rows_left(problem: Problem, state: RunState, settings: EmSettings, scored: Scored) -> RunState:
    """Return the state with the active rows that a pass left, and the statistics of the others."""
    chunks = scored.sums.chunks
    written = {outcome.chunk: outcome.state for outcome in chunks if outcome.state is not None}
    frozen = None if state.full_pass_next else state.frozen
    return replace(
        state,
        frozen=None if settings.weighted else merge_frozen(problem.structure, frozen, scored.leaving),
        since_full_pass=1 if state.full_pass_next else state.since_full_pass + 1,
        remaining={outcome.chunk: outcome.remaining for outcome in chunks},
        slots={**state.slots, **written},
    )


def _record(
    problem: Problem, before: RunState, this: Pass, scored: Scored, step: Step, began: float
) -> IterationRecord:
    sums, n_chunks = scored.sums, len(this.rows_by_chunk)
    return IterationRecord(
        iteration=before.iteration + 1,
        lower_bound=scored.bound,
        active_rows=sums.scored + sums.rescored,
        full_pass=sums.scored == problem.n_present and this.sample is None,
        chunks_processed=n_chunks,
        chunks_skipped=len(problem.chunks) - n_chunks,
        bytes_read=sums.bytes_read,
        seconds=time.perf_counter() - began,
        rows=problem.n_present,
        accepted=step.accepted,
        gap=step.gap,
        repeated=scored.repeated,
    )


def _change(before: RunState, record: IterationRecord) -> float | None:
    """Return the change of the bound; None where there is none to compare with."""
    return record.lower_bound - before.bound if before.bound is not None and record.accepted else None


def _schedule(
    problem: Problem,
    state: RunState,
    record: IterationRecord,
    settings: EmSettings,
    steps: EmSteps,
    change: float | None,
) -> Schedule:
    """Return what the policy says after a pass that was not over a sample."""
    remaining = sum(state.remaining.values())
    summary = PassSummary(
        record.iteration,
        record.full_pass,
        remaining,
        change,
        settings.tol,
        state.since_full_pass,
        record.accepted,
        record.gap,
        *steps.cycle(state, record.gap),
    )
    schedule = checked_schedule(settings.policy, summary)
    some_inactive = settings.weighted or remaining < problem.n_present
    if record.full_pass and not record.accepted and some_inactive:
        # What the rows that were left inactive contribute is of parameters that are not kept.
        return replace(schedule, next_pass=NextPass.ALL)
    return schedule
