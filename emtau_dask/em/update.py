"""The update between two passes: the parameters that are scored next, and the estimated gap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from emtau_dask.em.history import IterationRecord, extrapolated_gap
from emtau_dask.em.iteration import Pass, PassResult
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.storage.row_state import RowStateWriter

Writer = Callable[[], RowStateWriter | None]
"""Called for each pass; writes its row state. None if the policy keeps none."""


class Step(NamedTuple):
    """The step that follows a pass.

    Attributes
    ----------
    state : RunState
        With the parameters that are scored next.
    accepted : bool
        Whether the parameters that were scored are kept.
    gap : float
        Estimated nats per row between them and a stationary point; NaN if there is no estimate.
    """

    state: RunState
    accepted: bool
    gap: float


class GapCheck(NamedTuple):
    """The state and the record of an iteration after its gap was checked, and whether that ends the run."""

    state: RunState
    record: IterationRecord
    ends: bool


@dataclass(frozen=True, eq=False)
class EmUpdate:
    """Plain EM: the parameters that are scored next are the M-step, and the bound never falls.

    `em.accelerated_update.AcceleratedUpdate` extrapolates instead.
    """

    problem: Problem
    settings: EmSettings

    def before_pass(self, state: RunState) -> RunState:
        """Return the state with which an iteration begins."""
        return state

    def step(self, state: RunState, this_pass: Pass, result: PassResult) -> Step:
        """Return the step that follows a pass. Raises `SingularComponentError` if there is none."""
        assert result.em_parameters is not None
        return Step(replace(state, parameters=result.em_parameters), True, math.nan)

    def estimated_gap(self, before: RunState, record: IterationRecord) -> float:
        """Return the estimated gap of an iteration; its record has the estimate of the step alone."""
        return extrapolated_gap((*before.records, record))

    def is_comparable(self, record: IterationRecord) -> bool:
        """Return whether the bound of an iteration may be compared with that of another."""
        return True

    def cycle_progress(self, state: RunState, gap: float) -> tuple[float, int]:
        """Return the gap at the start of the present cycle (NaN if there is none), and the failed cycles."""
        return math.nan, 0

    def check_gap(
        self, state: RunState, record: IterationRecord, result: PassResult, writer: Writer, *, ends: bool
    ) -> GapCheck:
        """Check the estimated gap, which may end the run by ``ends``; here it is accepted unchecked."""
        return GapCheck(state, record, ends)

    def before_scheduled_pass(self, state: RunState, result: PassResult, gap: float) -> RunState:
        """Return the state before the pass that the policy has scheduled; ``gap`` is the estimated one."""
        return state
