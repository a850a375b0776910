"""The update of an accelerated run: quasi-Newton steps on samples, on all rows, and in cycles.

A cycle is a sequence of weighted passes. Before a gap ends the run, extra passes measure it (`em.gap`).
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
    Proposal,
    accelerated_step,
    begin_cycle,
    end_cycle,
    rounding,
)
from emtau_dask.em.gap import gap_margin_reset, gap_measured
from emtau_dask.em.history import IterationRecord, corrected_gap
from emtau_dask.em.iteration import Pass, PassResult
from emtau_dask.em.moments import FrozenMoments, MomentSpace
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import Acceleration, max_sample_iterations
from emtau_dask.em.state import Cycle, Progress, RunState
from emtau_dask.em.sums import FrozenStatistics
from emtau_dask.em.update import EmUpdate, GapCheck, Step, Writer
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters

SAMPLE_GAP = 1e-3
"""A run goes on to the next sample if the estimated gap is below 1/1000 of the sampling error p/2n."""
MAX_SAMPLE_ITERATIONS = 100
"""Maximum iterations on one sample."""
MIN_DAMPING, DAMPING_GROWTH = 0.02, 4.0
"""After a failed cycle, damping is multiplied by `DAMPING_GROWTH`, and is at least `MIN_DAMPING`."""
SLOW_GAIN = 0.5
"""A cycle also counts as failed if it gains more than this part of the gain of the cycle before it: then the
run is slow, and cycles do not help."""


@dataclass(frozen=True, eq=False)
class AcceleratedUpdate(EmUpdate):
    """Quasi-Newton steps instead of M-steps.

    A run begins on samples if the settings have some. If active rows have sampling weights, the passes
    between two full ones are a cycle: they maximise the bound of the weighted rows.
    """

    acceleration: Acceleration

    @property
    def maximiser(self) -> Maximiser:
        """The M-step of moments."""
        threads = self.problem.executor.threads
        return Maximiser(self.problem.structure, self.settings.reg_covar, threads, self.acceleration.memory)

    def before_pass(self, state: RunState) -> RunState:
        """Return the state; after half of ``max_iter`` iterations, with all rows in place of a sample."""
        progress, n_samples = _progress(state), len(self.acceleration.samples.shares)
        late = state.iteration >= max_sample_iterations(self.settings.max_iter)
        if not late or progress.sample_index >= n_samples:
            return state
        return replace(state, progress=_on_sample(progress, n_samples, state.iteration))

    def step(self, state: RunState, this_pass: Pass, result: PassResult) -> Step:
        """Return the step that follows a pass.

        Raises
        ------
        SingularComponentError
            A component collapsed in an EM step.
        """
        progress = _progress(state)
        if this_pass.sample is not None:
            return self._after_sample(state, progress, result)
        if progress.cycle is not None:
            return self._after_weighted_pass(state, progress, progress.cycle, result)
        if result.sums.scored == self.problem.n_rows:
            return self._after_full_pass(state, progress, result)
        assert result.em_parameters is not None
        quasi_newton = replace(progress.quasi_newton, proposal=Proposal()).with_new_objective()
        state = replace(
            state, parameters=result.em_parameters, progress=replace(progress, quasi_newton=quasi_newton)
        )
        return Step(state, True, math.nan)

    def estimated_gap(self, before: RunState, record: IterationRecord) -> float:
        """Return the estimated gap of the step; that of a full pass is corrected by those before it."""
        if record.full_pass and record.accepted:
            return corrected_gap(before.records, record.gap, record.lower_bound)
        return record.gap

    def is_comparable(self, record: IterationRecord) -> bool:
        """Return whether the bound is of all rows, and of parameters that are kept."""
        return record.full_pass and record.accepted

    def cycle_progress(self, state: RunState, gap: float) -> tuple[float, int]:
        """Return the gap at the start of the present cycle (NaN if there is none), and the failed cycles.

        That gap is the smaller of its estimate and of the gain of the cycle so far plus the present ``gap``.
        """
        progress = _progress(state)
        cycle, now = progress.cycle, progress.quasi_newton.point
        if cycle is None or now is None:
            return math.nan, progress.failed_cycles
        began = cycle.outer.point
        assert began is not None
        gained = now.objective - began.objective / (1.0 + progress.damping)
        if gained <= rounding(now.objective):
            return cycle.gap, progress.failed_cycles
        return float(np.fmin(cycle.gap, gained + gap)), progress.failed_cycles

    def check_gap(
        self, state: RunState, record: IterationRecord, result: PassResult, writer: Writer, *, ends: bool
    ) -> GapCheck:
        """Measure the gap if the estimated one would end the run."""
        if not (record.full_pass and record.accepted):
            return GapCheck(state, record, False)
        state = gap_margin_reset(state, self.settings, record.gap)
        if not ends:
            return GapCheck(state, record, False)
        began = time.perf_counter()
        found = gap_measured(self.problem, state, self.settings, self.maximiser, result, record.gap, writer)
        record = replace(
            record,
            gap=found.gap,
            active_rows=record.active_rows + found.rows,
            bytes_read=record.bytes_read + found.bytes_read,
            seconds=record.seconds + time.perf_counter() - began,
        )
        return GapCheck(found.state, record, found.ends)

    def before_scheduled_pass(self, state: RunState, result: PassResult, gap: float) -> RunState:
        """Return the state with the parameters for the pass that the policy has scheduled.

        After the last pass they are the EM step from the last accepted point, which is never worse.
        """
        progress, max_iter = _progress(state), self.settings.max_iter
        if state.stop_reason is not None or state.iteration >= max_iter:
            return replace(self._without_extrapolation(state, progress), full_pass_next=True)
        full_pass_next = state.full_pass_next or state.iteration + 1 >= max_iter
        if full_pass_next:
            if progress.cycle is not None:
                state = self._end_cycle(state, progress, progress.cycle)
            return replace(state, full_pass_next=True)
        if progress.cycle is not None:
            return state
        if self.settings.has_sampling_weights:
            return self._begin_cycle(state, progress, result, gap)
        if sum(state.n_active.values()) == self.problem.n_rows:
            return state
        return self._without_extrapolation(state, progress)

    def _accelerated(
        self, state: RunState, progress: Progress, objective: float, result: PassResult
    ) -> AcceleratedStep:
        return accelerated_step(
            progress.quasi_newton,
            self.maximiser,
            state.parameters,
            objective,
            result.statistics,
            result.em_parameters,
        )

    def _after_sample(self, state: RunState, progress: Progress, result: PassResult) -> Step:
        """Return the step after a pass over a sample; it leads to the next sample if little can be gained."""
        if result.weight > 0:
            progress = replace(progress, uncertainty=result.sums.uncertainty / result.weight)
        if progress.annealed_passes and result.em_parameters is not None:
            cooler = replace(
                progress, annealed_passes=progress.annealed_passes - 1, sample_began=state.iteration + 1
            )
            return Step(replace(state, parameters=result.em_parameters, progress=cooler), True, math.nan)
        step = self._accelerated(state, progress, result.bound, result)
        progress = replace(progress, quasi_newton=step.quasi_newton)
        stuck = not step.accepted and math.isnan(step.gap)
        made = state.iteration + 1 - progress.sample_began
        close = step.gap < SAMPLE_GAP * sampling_gap(self.problem, max(result.sums.scored, 1)) and made > 1
        if stuck or close or made >= MAX_SAMPLE_ITERATIONS:
            progress = _on_sample(progress, progress.sample_index + 1, state.iteration + 1)
        return _step_to(state, progress, step)

    def _after_full_pass(self, state: RunState, progress: Progress, result: PassResult) -> Step:
        proposal = progress.quasi_newton.proposal
        if result.collapse is not None and proposal.kind not in REFUSABLE:
            raise result.collapse
        step = self._accelerated(state, progress, result.bound, result)
        progress = replace(
            progress, quasi_newton=step.quasi_newton, uncertainty=result.sums.uncertainty / result.weight
        )
        if proposal.kind is Kind.CYCLE and not step.accepted:
            progress = _with_failed_cycle(progress)
        elif proposal.kind is Kind.CYCLE and _gains_slowly(state.records, result.bound):
            progress = replace(progress, failed_cycles=progress.failed_cycles + 1)
        return _step_to(state, progress, step)

    def _after_weighted_pass(
        self, state: RunState, progress: Progress, cycle: Cycle, result: PassResult
    ) -> Step:
        step = self._accelerated(state, progress, result.bound / (1.0 + progress.damping), result)
        if result.deactivated is not None:
            change = _frozen_moments(result, state.parameters)
            cycle = replace(cycle, frozen=cycle.frozen.plus(change, 1.0, self.problem.structure))
        return _step_to(state, replace(progress, quasi_newton=step.quasi_newton, cycle=cycle), step)

    def _begin_cycle(self, state: RunState, progress: Progress, result: PassResult, gap: float) -> RunState:
        """Return the state before the first weighted pass over the active rows."""
        outer, damping = progress.quasi_newton, progress.damping
        point = outer.point
        assert point is not None
        structure = self.problem.structure
        frozen = _frozen_moments(result, point.parameters)
        if damping > 0:
            space = MomentSpace(structure, outer.origins)
            expected = space.expected_log_density(point.moments, point.parameters)
            pull = FrozenMoments(outer.origins, point.moments, -expected)
            frozen = frozen.plus(pull, damping * self.problem.total_weight, structure)
        step = begin_cycle(outer, self.maximiser, damping)
        progress = replace(progress, quasi_newton=step.quasi_newton, cycle=Cycle(outer, frozen, gap))
        return replace(state, parameters=step.parameters, progress=progress)

    def _end_cycle(self, state: RunState, progress: Progress, cycle: Cycle) -> RunState:
        """Return the state before the full pass under the parameters at the end of a cycle."""
        step = end_cycle(
            progress.quasi_newton, cycle.outer, self.maximiser, state.parameters, progress.damping
        )
        progress = replace(progress, quasi_newton=step.quasi_newton, cycle=None)
        if step.quasi_newton.proposal.kind is not Kind.CYCLE:
            progress = _with_failed_cycle(progress)
        return replace(state, parameters=step.parameters, progress=progress)

    def _without_extrapolation(self, state: RunState, progress: Progress) -> RunState:
        quasi_newton, point = progress.quasi_newton, progress.quasi_newton.point
        if point is None or quasi_newton.proposal.kind is Kind.EM_STEP:
            return state
        space = MomentSpace(self.problem.structure, quasi_newton.origins)
        em_parameters = self.maximiser.parameters(space, point.response)
        if em_parameters is None:
            return state
        quasi_newton = replace(quasi_newton, proposal=Proposal(point.response, Kind.EM_STEP))
        return replace(state, parameters=em_parameters, progress=replace(progress, quasi_newton=quasi_newton))


def sampling_gap(problem: Problem, n_rows: float) -> float:
    """Return ``p/2n``, the cost of the sampling error of n rows in log-likelihood, nats per row."""
    p = free_parameters(problem.structure, problem.n_components, problem.n_features)
    return p / (2.0 * n_rows)


def _on_sample(progress: Progress, index: int, iteration: int) -> Progress:
    """Return the progress at the beginning of another sample, or of all rows."""
    return replace(
        progress,
        sample_index=index,
        sample_began=iteration,
        annealed_passes=0,
        quasi_newton=progress.quasi_newton.with_new_objective(),
    )


def _step_to(state: RunState, progress: Progress, step: AcceleratedStep) -> Step:
    return Step(replace(state, parameters=step.parameters, progress=progress), step.accepted, step.gap)


def _gains_slowly(records: Sequence[IterationRecord], bound: float) -> bool:
    """Return whether the last gain between full passes is more than half of the gain before it."""
    kept = [record.lower_bound for record in records if record.full_pass and record.accepted]
    if len(kept) < 2:
        return False
    gain, gain_before = bound - kept[-1], kept[-1] - kept[-2]
    return gain > max(SLOW_GAIN * gain_before, rounding(bound))


def _with_failed_cycle(progress: Progress) -> Progress:
    damping = max(DAMPING_GROWTH * progress.damping, MIN_DAMPING)
    return replace(progress, damping=damping, failed_cycles=progress.failed_cycles + 1)


def _frozen_moments(result: PassResult, parameters: MixtureParameters) -> FrozenMoments:
    space = MomentSpace(parameters.structure, parameters.means)

    def moments(part: FrozenStatistics | None) -> FrozenMoments:
        if part is None:
            return FrozenMoments(space.origins, np.zeros(space.size), 0.0)
        return FrozenMoments(space.origins, space.of(part.statistics), part.entropy)

    return moments(result.deactivated).plus(moments(result.reweighted), -1.0, space.structure)


def _progress(state: RunState) -> Progress:
    assert state.progress is not None
    return state.progress
