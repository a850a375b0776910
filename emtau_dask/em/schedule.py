"""The steps of an accelerated run: on samples, on all rows, and in cycles of weighted passes.

Before a gap ends such a run it is measured, by extra passes (`em.gap`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from emtau_dask.em.acceleration import (
    REFUSABLE,
    AcceleratedStep,
    Kind,
    Maximiser,
    Trial,
    accelerated_step,
    begin_cycle,
    end_cycle,
    rounding,
)
from emtau_dask.em.gap import gap_margin_reset, gap_measured
from emtau_dask.em.history import IterationRecord, corrected_gap
from emtau_dask.em.iteration import Pass, Scored
from emtau_dask.em.moments import HeldMoments, MomentSpace
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import Acceleration, most_on_samples
from emtau_dask.em.state import Cycle, Progress, RunState
from emtau_dask.em.steps import EmSteps, Step, Verified, Writer
from emtau_dask.em.sums import FrozenRows
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters

LEVEL_GAP = 1e-3
"""A run leaves a sample when the estimated gap is below this part of p/2n, the cost of sampling error."""
MAX_LEVEL_ITERATIONS = 100
"""Maximum iterations on one sample."""
MIN_DAMPING, DAMPING_GROWTH = 0.02, 4.0
"""After a failed cycle, damping is multiplied by `DAMPING_GROWTH`, and is at least `MIN_DAMPING`."""
SLOW_GAIN = 0.5
"""A cycle also counts as failed if it gains more than this part of the gain of the cycle before it: then the
run is slow, and cycles do not help."""


@dataclass(frozen=True, eq=False)
class AcceleratedSteps(EmSteps):
    """Quasi-Newton steps between the E-step and the M-step.

    A run begins on samples, if the settings have some. If the policy gives active rows sampling weights, the
    passes between two full ones are a cycle: they maximise the bound of the weighted rows.
    """

    acceleration: Acceleration

    @property
    def maximiser(self) -> Maximiser:
        """The M-step of moments."""
        threads = self.problem.executor.threads
        return Maximiser(self.problem.structure, self.settings.reg_covar, threads, self.acceleration.memory)

    def begun(self, state: RunState) -> RunState:
        """Return the state; after half of `max_iter` the run leaves its samples."""
        progress, level = _progress(state), len(self.acceleration.samples.shares)
        if state.iteration < most_on_samples(self.settings.max_iter) or progress.level >= level:
            return state
        ascent = progress.ascent.with_new_objective()
        left = replace(progress, level=level, level_began=state.iteration, annealed_passes=0, ascent=ascent)
        return replace(state, progress=left)

    def step(self, state: RunState, this: Pass, scored: Scored) -> Step:
        """Return the step that follows a pass.

        Raises
        ------
        SingularComponentError
            A component collapsed in an EM step.
        """
        progress = _progress(state)
        if this.sample is not None:
            return self._after_sample(state, progress, scored)
        if progress.cycle is not None:
            return self._after_weighted_pass(state, progress, progress.cycle, scored)
        if scored.sums.scored == self.problem.n_present:
            return self._after_full_pass(state, progress, scored)
        assert scored.plain is not None
        ascent = replace(progress.ascent, trial=Trial()).with_new_objective()
        state = replace(state, parameters=scored.plain, progress=replace(progress, ascent=ascent))
        return Step(state, True, math.nan)

    def gap(self, before: RunState, record: IterationRecord) -> float:
        """Return the estimated gap of the step; that of a full pass is corrected by those before it."""
        if record.full_pass and record.accepted:
            return corrected_gap(before.records, record.gap, record.lower_bound)
        return record.gap

    def comparable(self, record: IterationRecord) -> bool:
        """Return whether the bound is of all rows, and of parameters that are kept."""
        return record.full_pass and record.accepted

    def cycle(self, state: RunState, gap: float) -> tuple[float, int]:
        """Return the gap with which a cycle began (NaN outside of cycles), and how many cycles failed.

        That gap is the smaller of its estimate and of the gain of the cycle so far plus the present ``gap``.
        """
        progress = _progress(state)
        cycle, now = progress.cycle, progress.ascent.point
        if cycle is None or now is None:
            return math.nan, progress.failed_cycles
        began = cycle.outer.point
        assert began is not None
        gained = now.objective - began.objective / (1.0 + progress.damping)
        if gained <= rounding(now.objective):
            return cycle.gap, progress.failed_cycles
        return float(np.fmin(cycle.gap, gained + gap)), progress.failed_cycles

    def verified(
        self, state: RunState, record: IterationRecord, scored: Scored, writer: Writer, *, ends: bool
    ) -> Verified:
        """Return the state and the record with the measured gap, if the estimated one would end the run."""
        if not (record.full_pass and record.accepted):
            return Verified(state, record, False)
        state = gap_margin_reset(state, self.settings, record.gap)
        if not ends:
            return Verified(state, record, False)
        began = time.perf_counter()
        found = gap_measured(self.problem, state, self.settings, self.maximiser, scored, record.gap, writer)
        record = replace(
            record,
            gap=found.gap,
            active_rows=record.active_rows + found.rows,
            bytes_read=record.bytes_read + found.bytes_read,
            seconds=record.seconds + time.perf_counter() - began,
        )
        return Verified(found.state, record, found.ends)

    def onwards(self, state: RunState, scored: Scored, gap: float) -> RunState:
        """Return the state with the parameters for the next pass, whose rows the policy has chosen.

        For the last pass they are the EM step from the last accepted point of all rows, which is never worse.
        """
        progress, max_iter = _progress(state), self.settings.max_iter
        if state.stop_reason is not None or state.iteration >= max_iter:
            return replace(self._without_extrapolation(state, progress), full_pass_next=True)
        full_pass_next = state.full_pass_next or state.iteration + 1 >= max_iter
        if full_pass_next:
            if progress.cycle is not None:
                state = self._cycle_ended(state, progress, progress.cycle)
            return replace(state, full_pass_next=True)
        if progress.cycle is not None:
            return state
        if self.settings.weighted:
            return self._cycle_begun(state, progress, scored, gap)
        if sum(state.remaining.values()) == self.problem.n_present:
            return state
        return self._without_extrapolation(state, progress)

    def _accelerated(
        self, state: RunState, progress: Progress, objective: float, scored: Scored
    ) -> AcceleratedStep:
        return accelerated_step(
            progress.ascent, self.maximiser, state.parameters, objective, scored.statistics, scored.plain
        )

    def _after_sample(self, state: RunState, progress: Progress, scored: Scored) -> Step:
        """Return the step after a pass over a sample; go to the next sample if little is left to gain."""
        if scored.weight > 0:
            progress = replace(progress, uncertainty=scored.sums.uncertainty / scored.weight)
        if progress.annealed_passes and scored.plain is not None:
            cooler = replace(
                progress, annealed_passes=progress.annealed_passes - 1, level_began=state.iteration + 1
            )
            return Step(replace(state, parameters=scored.plain, progress=cooler), True, math.nan)
        step = self._accelerated(state, progress, scored.bound, scored)
        progress = replace(progress, ascent=step.ascent)
        stuck = not step.accepted and math.isnan(step.gap)
        made = state.iteration + 1 - progress.level_began
        close = step.gap < LEVEL_GAP * sampling_gap(self.problem, max(scored.sums.scored, 1)) and made > 1
        if stuck or close or made >= MAX_LEVEL_ITERATIONS:
            progress = replace(
                progress,
                level=progress.level + 1,
                level_began=state.iteration + 1,
                annealed_passes=0,
                ascent=step.ascent.with_new_objective(),
            )
        return _step_to(state, progress, step)

    def _after_full_pass(self, state: RunState, progress: Progress, scored: Scored) -> Step:
        trial = progress.ascent.trial
        if scored.collapse is not None and trial.kind not in REFUSABLE:
            raise scored.collapse
        step = self._accelerated(state, progress, scored.bound, scored)
        progress = replace(progress, ascent=step.ascent, uncertainty=scored.sums.uncertainty / scored.weight)
        if trial.kind is Kind.CYCLE and not step.accepted:
            progress = _with_failed_cycle(progress)
        elif trial.kind is Kind.CYCLE and _gains_slowly(state.records, scored.bound):
            progress = replace(progress, failed_cycles=progress.failed_cycles + 1)
        return _step_to(state, progress, step)

    def _after_weighted_pass(self, state: RunState, progress: Progress, cycle: Cycle, scored: Scored) -> Step:
        step = self._accelerated(state, progress, scored.bound / (1.0 + progress.damping), scored)
        if scored.leaving is not None:
            change = _held_moments(scored, state.parameters)
            cycle = replace(cycle, held=cycle.held.plus(change, 1.0, self.problem.structure))
        return _step_to(state, replace(progress, ascent=step.ascent, cycle=cycle), step)

    def _cycle_begun(self, state: RunState, progress: Progress, scored: Scored, gap: float) -> RunState:
        """Return the state before the first weighted pass over the rows that a full pass left active."""
        outer, damping = progress.ascent, progress.damping
        point = outer.point
        assert point is not None
        structure = self.problem.structure
        held = _held_moments(scored, point.parameters)
        if damping > 0:
            space = MomentSpace(structure, outer.origins)
            expected = space.expected_log_density(point.moments, point.parameters)
            pull = HeldMoments(outer.origins, point.moments, -expected)
            held = held.plus(pull, damping * self.problem.total_weight, structure)
        step = begin_cycle(outer, self.maximiser, damping)
        progress = replace(progress, ascent=step.ascent, cycle=Cycle(outer, held, gap))
        return replace(state, parameters=step.parameters, progress=progress)

    def _cycle_ended(self, state: RunState, progress: Progress, cycle: Cycle) -> RunState:
        """Return the state before the full pass at the parameters that weighted passes reached."""
        step = end_cycle(progress.ascent, cycle.outer, self.maximiser, state.parameters, progress.damping)
        progress = replace(progress, ascent=step.ascent, cycle=None)
        if step.ascent.trial.kind is not Kind.CYCLE:
            progress = _with_failed_cycle(progress)
        return replace(state, parameters=step.parameters, progress=progress)

    def _without_extrapolation(self, state: RunState, progress: Progress) -> RunState:
        ascent, point = progress.ascent, progress.ascent.point
        if point is None or ascent.trial.kind is Kind.PLAIN:
            return state
        space = MomentSpace(self.problem.structure, ascent.origins)
        plain = self.maximiser.parameters(space, point.response)
        if plain is None:
            return state
        ascent = replace(ascent, trial=Trial(point.response, Kind.PLAIN))
        return replace(state, parameters=plain, progress=replace(progress, ascent=ascent))


def sampling_gap(problem: Problem, n_rows: float) -> float:
    """Return ``p/2n``, the cost of the sampling error of n rows in log-likelihood, nats per row."""
    p = free_parameters(problem.structure, problem.n_components, problem.n_features)
    return p / (2.0 * n_rows)


def _step_to(state: RunState, progress: Progress, step: AcceleratedStep) -> Step:
    return Step(replace(state, parameters=step.parameters, progress=progress), step.accepted, step.gap)


def _gains_slowly(records: Sequence[IterationRecord], bound: float) -> bool:
    """Return whether the bounds of full passes rise slowly: a gain is about as large as the one before."""
    kept = [record.lower_bound for record in records if record.full_pass and record.accepted]
    if len(kept) < 2:
        return False
    gain, gain_before = bound - kept[-1], kept[-1] - kept[-2]
    return gain > max(SLOW_GAIN * gain_before, rounding(bound))


def _with_failed_cycle(progress: Progress) -> Progress:
    damping = max(DAMPING_GROWTH * progress.damping, MIN_DAMPING)
    return replace(progress, damping=damping, failed_cycles=progress.failed_cycles + 1)


def _held_moments(scored: Scored, parameters: MixtureParameters) -> HeldMoments:
    space = MomentSpace(parameters.structure, parameters.means)

    def moments(part: FrozenRows | None) -> HeldMoments:
        if part is None:
            return HeldMoments(space.origins, np.zeros(space.size), 0.0)
        return HeldMoments(space.origins, space.of(part.statistics), part.entropy)

    return moments(scored.leaving).plus(moments(scored.staying), -1.0, space.structure)


def _progress(state: RunState) -> Progress:
    assert state.progress is not None
    return state.progress
