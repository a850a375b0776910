"""The iteration loop: the only one, for every policy, covariance type, executor and storage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from emtau_dask.em.acceleration import Kind, Maximiser, Trial
from emtau_dask.em.history import IterationRecord, corrected_gap, extrapolated_gap
from emtau_dask.em.iteration import Scored, sample_of, score
from emtau_dask.em.moments import MomentSpace
from emtau_dask.em.problem import Problem
from emtau_dask.em.schedule import (
    after_full_pass,
    after_partial_pass,
    after_sample,
    cycle_begun,
    cycle_ended,
    doubt_taken_back,
    gap_measured,
    gap_when_begun,
    maximiser_of,
    samples_left,
)
from emtau_dask.em.settings import Climbing, EmSettings, most_on_samples
from emtau_dask.em.state import RunState, StopReason
from emtau_dask.em.sums import PassTotals, merge_frozen
from emtau_dask.em.task import SampleLevel
from emtau_dask.policies.policy import NextPass, PassSummary, Schedule, checked_schedule
from emtau_dask.storage.row_state import RowStateWriter


def iterate(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    writer: Callable[[], RowStateWriter | None],
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


def advance(
    problem: Problem, state: RunState, settings: EmSettings, writer: Callable[[], RowStateWriter | None]
) -> RunState:
    """Return the state after one more iteration; the old one stays as it was.

    Parameters and errors are those of `iterate`.
    """
    began = time.perf_counter()
    if settings.climbing is not None and state.iteration >= most_on_samples(settings.max_iter):
        state = samples_left(state, settings.climbing)
    sample = sample_of(state, settings)
    chunks = problem.chunks
    if not state.afresh:
        chunks = [chunk for chunk, rows in state.remaining.items() if rows]
    scored = score(problem, state, settings, chunks, sample, writer)
    totals = scored.totals
    full_pass = totals.scored == problem.n_present and sample is None
    following = state if sample is not None else _following(problem, state, settings, totals)
    if settings.climbing is None:
        found = _Found(_plainly(following, scored), True, math.nan)
    else:
        found = _climbed(problem, following, settings, settings.climbing, scored, sample, full_pass=full_pass)
    gap = found.gap
    if full_pass and found.accepted:
        gap = corrected_gap(state.records, gap, scored.bound)
    record = IterationRecord(
        iteration=state.iteration + 1,
        lower_bound=scored.bound,
        active_rows=totals.scored + totals.rescored,
        full_pass=full_pass,
        chunks_processed=len(chunks),
        chunks_skipped=len(problem.chunks) - len(chunks),
        bytes_read=totals.bytes_read,
        seconds=time.perf_counter() - began,
        rows=problem.n_present,
        accepted=found.accepted,
        gap=gap,
        repeated=scored.repeated,
    )
    if settings.climbing is None:
        record = replace(record, gap=extrapolated_gap((*state.records, record)))
    plan = _Plan(None, False, False, gap)
    if sample is None:
        plan = _planned(problem, replace(found.state, records=(*state.records, record)), state, settings)
    reached = found.state
    if settings.climbing is not None and full_pass and found.accepted:
        reached = doubt_taken_back(reached, settings, gap)
        if plan.ends:
            measured = _measured(problem, reached, settings, settings.climbing, totals, record, writer)
            reached, record, plan = measured.state, measured.record, plan._replace(ends=measured.ends)
    problem.context.observer.iteration(record, reached.parameters)
    reached = replace(reached, records=(*state.records, record))
    return _scheduled(problem, reached, state, settings, scored, plan)


class _Found(NamedTuple):
    """The state after a step, whether what was scored is kept, and the gap."""

    state: RunState
    accepted: bool
    gap: float


class _Measured(NamedTuple):
    """The state and the record after the gap was measured, and whether it ends the run."""

    state: RunState
    record: IterationRecord
    ends: bool


def _measured(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    climbing: Climbing,
    totals: PassTotals,
    record: IterationRecord,
    writer: Callable[[], RowStateWriter | None],
) -> _Measured:
    """Measure the gap that would end the run; the record has the measured one, and the work of measuring."""
    began = time.perf_counter()
    maximiser = maximiser_of(problem, climbing, settings.reg_covar)
    found = gap_measured(problem, state, settings, maximiser, totals, record.gap, writer)
    record = replace(
        record,
        gap=found.gap,
        active_rows=record.active_rows + found.rows,
        bytes_read=record.bytes_read + found.bytes_read,
        seconds=record.seconds + time.perf_counter() - began,
    )
    return _Measured(found.state, record, found.ends)


def _plainly(state: RunState, scored: Scored) -> RunState:
    assert scored.plain is not None
    return replace(state, parameters=scored.plain)


def _climbed(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    climbing: Climbing,
    scored: Scored,
    sample: SampleLevel | None,
    *,
    full_pass: bool,
) -> _Found:
    """Return the state after the step that a pass leads to."""
    maximiser = maximiser_of(problem, climbing, settings.reg_covar)
    if sample is not None:
        return _Found(*after_sample(problem, state, climbing, maximiser, scored))
    assert state.progress is not None
    if state.progress.cycle is not None:
        return _Found(*after_partial_pass(problem, state, maximiser, scored))
    if full_pass:
        return _Found(*after_full_pass(problem, state, maximiser, scored))
    ascent = replace(state.progress.ascent, trial=Trial()).elsewhere()
    progress = replace(state.progress, ascent=ascent)
    return _Found(replace(_plainly(state, scored), progress=progress), True, math.nan)


class _Plan(NamedTuple):
    """What the policy says after a pass that was not over a sample.

    ``exact`` says whether the bound is that of all rows, ``ends`` whether the gap ends the run.
    """

    schedule: Schedule | None
    exact: bool
    ends: bool
    estimated_gap: float


def _planned(problem: Problem, state: RunState, before: RunState, settings: EmSettings) -> _Plan:
    record, progress = state.records[-1], state.progress
    summary = PassSummary(
        record.iteration,
        record.full_pass,
        sum(state.remaining.values()),
        _change(state, before),
        settings.tol,
        state.since_reset,
        record.accepted,
        record.gap,
        math.nan if progress is None else gap_when_begun(progress, record.gap),
        0 if progress is None else progress.failures,
    )
    schedule = checked_schedule(settings.policy, summary)
    some_hold = settings.weighted or summary.remaining < problem.n_present
    if record.full_pass and not record.accepted and some_hold:
        # What the rows that were left inactive contribute is of parameters that are not kept.
        schedule = replace(schedule, next_pass=NextPass.ALL)
    exact = progress is None or (record.full_pass and record.accepted)
    ends = exact and schedule.test_tol and record.gap < settings.gap_tol
    return _Plan(schedule, exact, ends, record.gap)


def _change(state: RunState, before: RunState) -> float | None:
    record = state.records[-1]
    return record.lower_bound - before.bound if before.bound is not None and record.accepted else None


def _scheduled(
    problem: Problem,
    state: RunState,
    before: RunState,
    settings: EmSettings,
    scored: Scored,
    plan: _Plan,
) -> RunState:
    """Return the state with what the next iteration scores, or why there is none."""
    record, progress, schedule = state.records[-1], state.progress, plan.schedule
    if schedule is None:
        return replace(state, afresh=True)
    stop_reason = _stop_reason(schedule, _change(state, before) if plan.exact else None, settings.tol)
    held = None if progress is None or record.full_pass else before.bound
    state = replace(
        state,
        bound=record.lower_bound if plan.exact else held,
        afresh=schedule.next_pass is NextPass.ALL,
        stop_reason="tol" if plan.ends else stop_reason,
    )
    if settings.climbing is None or progress is None:
        return state
    return _moved_on(problem, state, settings, settings.climbing, scored, plan.estimated_gap)


def _moved_on(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    climbing: Climbing,
    scored: Scored,
    gap: float,
) -> RunState:
    """Return the state at the parameters that are scored next, by the objective of the rows that are.

    A cycle of passes over rows that stand for all begins with the estimated ``gap``.
    """
    progress, record = state.progress, state.records[-1]
    assert progress is not None
    maximiser = maximiser_of(problem, climbing, settings.reg_covar)
    last = record.iteration >= settings.max_iter
    if state.stop_reason is not None or last:
        return _settled(state, maximiser)
    ends = state.afresh or record.iteration + 1 >= settings.max_iter
    if progress.cycle is not None:
        return replace(cycle_ended(state, maximiser), afresh=True) if ends else state
    if ends:
        return replace(state, afresh=True)
    if settings.weighted:
        return cycle_begun(problem, state, maximiser, scored.totals, gap)
    if sum(state.remaining.values()) == problem.n_present:
        return state
    return _without_extrapolation(state, maximiser)


def _settled(state: RunState, maximiser: Maximiser) -> RunState:
    """Return the state at EM's own step from the last accepted point of all rows: it is never worse."""
    return replace(_without_extrapolation(state, maximiser), afresh=True)


def _without_extrapolation(state: RunState, maximiser: Maximiser) -> RunState:
    progress = state.progress
    assert progress is not None
    ascent, point = progress.ascent, progress.ascent.point
    if point is None or ascent.trial.kind is Kind.PLAIN:
        return state
    plain = maximiser.parameters(MomentSpace(maximiser.structure, ascent.origins), point.response)
    if plain is None:
        return state
    ascent = replace(ascent, trial=Trial(point.response, Kind.PLAIN))
    return replace(state, parameters=plain, progress=replace(progress, ascent=ascent))


def _following(problem: Problem, state: RunState, settings: EmSettings, totals: PassTotals) -> RunState:
    """Return the state with the active rows that a pass left, and the statistics of the others."""
    written = {outcome.chunk: outcome.state for outcome in totals.chunks if outcome.state is not None}
    frozen = None if state.afresh else state.frozen
    return replace(
        state,
        frozen=None if settings.weighted else merge_frozen(problem.structure, frozen, totals.leaving),
        since_reset=1 if state.afresh else state.since_reset + 1,
        remaining={outcome.chunk: outcome.remaining for outcome in totals.chunks},
        slots={**state.slots, **written},
    )


def _stop_reason(schedule: Schedule, change: float | None, tol: float) -> StopReason | None:
    if schedule.test_tol and change is not None and abs(change) < tol:
        return "tol"
    return "no-active-rows" if schedule.next_pass is NextPass.STOP else None
