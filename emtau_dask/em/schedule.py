"""What follows a pass in a run that extrapolates: on a sample, on all rows, on rows that stand for all.

A gap that would end such a run is measured, by passes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from emtau_dask.em.acceleration import REFUSABLE, Kind, Maximiser, begin_cycle, climb, end_cycle, rounding
from emtau_dask.em.gap import jacobian_of, newton_decrement
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.iteration import Scored, score
from emtau_dask.em.moments import HeldMoments, MomentSpace
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import Climbing, EmSettings
from emtau_dask.em.state import Cycle, Progress, RunState
from emtau_dask.em.sums import FrozenRows, PassTotals
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.mixture.plan import DOUBLE
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.storage.row_state import RowStateWriter

LEVEL_GAP = 1e-3
"""A sample is left once the estimated gap is this part of p/2n, what its sampling error costs."""
LEVEL_ITERATIONS = 100
"""A sample is left after so many iterations at the latest."""
LEAST_DAMPING, MORE = 0.02, 4.0
"""What follows a cycle that failed: damping of at least this, or four times as much."""
CRAWLING = 0.5
"""A cycle fails too if it gains more than this part of what the one before it gained."""
LEAST_PRODUCTS, MOST_PRODUCTS = 8, 32
LEAST_FULL_PRODUCTS, MOST_FULL_PRODUCTS = 4, 16
"""Passes by which a gap is measured, over rows that stand for all and over all rows."""
LESS = 10.0
"""A gap that was found to be too large is measured again once the estimate is a tenth of what it was. Once an
estimate is ten times the tolerance, the next is measured as at first."""


def sampling_gap(problem: Problem, n_rows: float) -> float:
    """Return ``p/2n``: what the sampling error of n rows costs in likelihood, nats per row."""
    p = free_parameters(problem.structure, problem.n_components, problem.n_features)
    return p / (2.0 * n_rows)


def maximiser_of(problem: Problem, climbing: Climbing, reg_covar: float) -> Maximiser:
    """Return the M-step of a run."""
    return Maximiser(problem.structure, reg_covar, problem.executor.threads, climbing.memory)


def after_sample(
    problem: Problem, state: RunState, climbing: Climbing, maximiser: Maximiser, scored: Scored
) -> tuple[RunState, bool, float]:
    """Return the state after a pass over a sample, whether its parameters are kept, and the gap.

    Where the sample determines no mixture, or has little left to gain, the next one follows.
    """
    progress = _progress(state)
    totals = scored.totals
    if scored.weight > 0:
        progress = replace(progress, unsure=totals.unsure / scored.weight)
    if progress.heat and scored.plain is not None:
        cooler = replace(progress, heat=progress.heat - 1, level_began=state.iteration + 1)
        return replace(state, parameters=scored.plain, progress=cooler), True, math.nan
    step = climb(progress.ascent, maximiser, state.parameters, scored.bound, scored.statistics, scored.plain)
    progress = replace(progress, ascent=step.ascent)
    stuck = not step.accepted and math.isnan(step.gap)
    made = state.iteration + 1 - progress.level_began
    close = step.gap < LEVEL_GAP * sampling_gap(problem, max(totals.scored, 1)) and made > 1
    if stuck or close or made >= LEVEL_ITERATIONS:
        progress = replace(
            progress,
            level=progress.level + 1,
            level_began=state.iteration + 1,
            heat=0,
            ascent=step.ascent.elsewhere(),
        )
    return replace(state, parameters=step.parameters, progress=progress), step.accepted, step.gap


def after_full_pass(
    problem: Problem, state: RunState, maximiser: Maximiser, scored: Scored
) -> tuple[RunState, bool, float]:
    """Return the state after a pass over all rows, whether its parameters are kept, and the gap.

    Raises
    ------
    SingularComponentError
        EM's own step led to a component that collapsed.
    """
    progress = _progress(state)
    trial = progress.ascent.trial
    if scored.collapse is not None and trial.kind not in REFUSABLE:
        raise scored.collapse
    step = climb(progress.ascent, maximiser, state.parameters, scored.bound, scored.statistics, scored.plain)
    progress = replace(progress, ascent=step.ascent, unsure=scored.totals.unsure / scored.weight)
    if trial.kind is Kind.CYCLE and not step.accepted:
        progress = _failed(progress)
    elif trial.kind is Kind.CYCLE and _crawls(state.records, scored.bound):
        progress = replace(progress, failures=progress.failures + 1)
    return replace(state, parameters=step.parameters, progress=progress), step.accepted, step.gap


def cycle_begun(
    problem: Problem, state: RunState, maximiser: Maximiser, totals: PassTotals, gap: float
) -> RunState:
    """Return the state before the first partial pass over the rows that a full pass left active."""
    progress = _progress(state)
    outer, damping = progress.ascent, progress.damping
    point = outer.point
    assert point is not None
    structure = problem.structure
    held = _signed(totals, point.parameters)
    if damping > 0:
        space = MomentSpace(structure, outer.origins)
        expected = space.expected_log_density(point.moments, point.parameters)
        pull = HeldMoments(outer.origins, point.moments, -expected)
        held = held.plus(pull, damping * problem.total_weight, structure)
    step = begin_cycle(outer, maximiser, damping)
    progress = replace(progress, ascent=step.ascent, cycle=Cycle(outer, held, gap))
    return replace(state, parameters=step.parameters, progress=progress)


def after_partial_pass(
    problem: Problem, state: RunState, maximiser: Maximiser, scored: Scored
) -> tuple[RunState, bool, float]:
    """Return the state after a pass over rows that stand for all; see `after_full_pass`."""
    progress = _progress(state)
    cycle = progress.cycle
    assert cycle is not None
    objective = scored.bound / (1.0 + progress.damping)
    step = climb(progress.ascent, maximiser, state.parameters, objective, scored.statistics, scored.plain)
    if scored.totals.leaving is not None:
        change = _signed(scored.totals, state.parameters)
        cycle = replace(cycle, held=cycle.held.plus(change, 1.0, problem.structure))
    progress = replace(progress, ascent=step.ascent, cycle=cycle)
    return replace(state, parameters=step.parameters, progress=progress), step.accepted, step.gap


class Measured(NamedTuple):
    """What is known of the gap after an accepted full pass.

    Attributes
    ----------
    state : RunState
    gap : float
        NaN near a saddle: nothing local says how far the bound will rise.
    ends : bool
        Whether the gap may end the run.
    rows, bytes_read : int
        What was scored and read to measure it.
    """

    state: RunState
    gap: float
    ends: bool
    rows: int = 0
    bytes_read: int = 0


def gap_measured(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    maximiser: Maximiser,
    totals: PassTotals,
    gap: float,
    writer: Callable[[], RowStateWriter | None],
) -> Measured:
    """Measure the gap after an accepted full pass whose estimated ``gap`` would end the run.

    It is the Newton decrement, by passes over the rows that the pass left active where they stand for all.
    The run does not end where these show that it is near a saddle, or that the gap is not below the
    tolerance. Later passes measure again once the estimate is a tenth, over all rows: so few rows may show a
    saddle where there is none.
    """
    progress = _progress(state)
    point, weight = progress.ascent.point, problem.total_weight
    remaining = {chunk: rows for chunk, rows in state.remaining.items() if rows}
    every = settings.weighted or sum(remaining.values()) == problem.n_present
    if point is None or not point.known or not every:
        return Measured(state, gap, True)
    if gap <= rounding(point.objective):
        return Measured(state, gap if progress.doubt == 1.0 else math.nan, True)
    if gap * progress.doubt >= settings.gap_tol:
        return Measured(state, gap, False)
    space = MomentSpace(problem.structure, progress.ascent.origins)
    staying = totals.staying if settings.weighted and not progress.measure_all else None
    few = staying is not None
    here = totals.statistics if staying is None else staying.statistics
    assert here is not None
    chunks = list(remaining) if few else problem.chunks
    rows = bytes_read = 0

    def response(parameters: MixtureParameters) -> Floats | None:
        nonlocal rows, bytes_read
        there = replace(state, parameters=parameters, afresh=not few)
        again = score(problem, there, settings, chunks, None, writer if few else _no_writer).totals
        rows, bytes_read = rows + again.scored + again.rescored, bytes_read + again.bytes_read
        return None if again.statistics is None else _mean(space, again.statistics, weight)

    dtype = DOUBLE if problem.missing else problem.rows.dtype
    width = float(np.cbrt(np.finfo(np.result_type(dtype, np.float32)).eps))
    products = jacobian_of(space, point, maximiser, _mean(space, here, weight), response, width)
    least, most = LEAST_FULL_PRODUCTS, MOST_FULL_PRODUCTS
    if few:
        least, most = LEAST_PRODUCTS, MOST_PRODUCTS
    found = newton_decrement(space, point, products, least, most)
    ends = found.most < settings.gap_tol
    if not ends:
        doubt = LESS * settings.gap_tol / gap
        state = replace(state, progress=replace(progress, doubt=doubt, measure_all=True))
    return Measured(state, found.gap, ends, rows, bytes_read)


def doubt_taken_back(state: RunState, settings: EmSettings, gap: float) -> RunState:
    """Return the state in which a gap is measured as at first, if the estimated ``gap`` has grown."""
    progress = _progress(state)
    if progress.doubt == 1.0 or not gap >= LESS * settings.gap_tol:
        return state
    return replace(state, progress=replace(progress, doubt=1.0))


def gap_when_begun(progress: Progress, gap: float) -> float:
    """Return the estimated gap with which a cycle began, nats per row; NaN outside of cycles.

    It is what was estimated then, or, where that is less or unknown, what the cycle gained and the ``gap``
    that is left.
    """
    cycle, now = progress.cycle, progress.ascent.point
    if cycle is None or now is None:
        return math.nan
    began = cycle.outer.point
    assert began is not None
    gained = now.objective - began.objective / (1.0 + progress.damping)
    if gained <= rounding(now.objective):
        return cycle.gap
    return float(np.fmin(cycle.gap, gained + gap))


def cycle_ended(state: RunState, maximiser: Maximiser) -> RunState:
    """Return the state before all rows are scored at the parameters that partial passes led to."""
    progress = _progress(state)
    cycle = progress.cycle
    assert cycle is not None
    step = end_cycle(progress.ascent, cycle.outer, maximiser, state.parameters, progress.damping)
    progress = replace(progress, ascent=step.ascent, cycle=None)
    if step.ascent.trial.kind is not Kind.CYCLE:
        progress = _failed(progress)
    return replace(state, parameters=step.parameters, progress=progress)


def _crawls(records: Sequence[IterationRecord], bound: float) -> bool:
    """Return whether the bounds of full passes rise slowly, but steadily: by steps that hardly fall."""
    kept = [record.lower_bound for record in records if record.full_pass and record.accepted]
    if len(kept) < 2:
        return False
    gain, gain_before = bound - kept[-1], kept[-1] - kept[-2]
    return gain > max(CRAWLING * gain_before, rounding(bound))


def _failed(progress: Progress) -> Progress:
    damping = max(MORE * progress.damping, LEAST_DAMPING)
    return replace(progress, damping=damping, failures=progress.failures + 1)


def samples_left(state: RunState, climbing: Climbing) -> RunState:
    """Return the state in which all rows are scored next, whatever was to be scored."""
    progress = _progress(state)
    level = len(climbing.samples.shares)
    if progress.level >= level:
        return state
    ascent = progress.ascent.elsewhere()
    left = replace(progress, level=level, level_began=state.iteration, heat=0, ascent=ascent)
    return replace(state, progress=left)


def _signed(totals: PassTotals, parameters: MixtureParameters) -> HeldMoments:
    space = MomentSpace(parameters.structure, parameters.means)

    def moments(part: FrozenRows | None) -> HeldMoments:
        if part is None:
            return HeldMoments(space.origins, np.zeros(space.size), 0.0)
        return HeldMoments(space.origins, space.of(part.statistics), part.entropy)

    return moments(totals.leaving).plus(moments(totals.staying), -1.0, space.structure)


def _no_writer() -> None:
    return None


def _mean(space: MomentSpace, statistics: SufficientStatistics, weight: float) -> Floats:
    return space.of(statistics) / weight


def _progress(state: RunState) -> Progress:
    assert state.progress is not None
    return state.progress
