"""What happens between a pass and the next one: the step that a run takes, and what it knows of its gap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from emtau_dask.em.history import IterationRecord, extrapolated_gap
from emtau_dask.em.iteration import Pass, Scored
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.storage.row_state import RowStateWriter

Writer = Callable[[], RowStateWriter | None]
"""Called for each pass; writes its row state. None where the policy keeps none."""


class Step(NamedTuple):
    """The step that follows a pass.

    Attributes
    ----------
    state : RunState
        With the parameters that are scored next.
    accepted : bool
        Whether the parameters that were scored are kept.
    gap : float
        Estimated nats per row between them and a stationary point; NaN where there is no estimate.
    """

    state: RunState
    accepted: bool
    gap: float


class Verified(NamedTuple):
    """The state and the record of an iteration whose gap was verified, and whether the gap ends the run."""

    state: RunState
    record: IterationRecord
    ends: bool


@dataclass(frozen=True, eq=False)
class EmSteps:
    """EM's own steps: the parameters scored next are the M-step, and the bound never falls.

    `em.schedule.AcceleratedSteps` goes further.
    """

    problem: Problem
    settings: EmSettings

    def begun(self, state: RunState) -> RunState:
        """Return the state with which an iteration begins."""
        return state

    def step(self, state: RunState, this: Pass, scored: Scored) -> Step:
        """Return the step that follows a pass. Raises `SingularComponentError` where none can."""
        assert scored.plain is not None
        return Step(replace(state, parameters=scored.plain), True, math.nan)

    def gap(self, before: RunState, record: IterationRecord) -> float:
        """Return the estimated gap of an iteration, of which the record has that of its step."""
        return extrapolated_gap((*before.records, record))

    def comparable(self, record: IterationRecord) -> bool:
        """Return whether the bound of an iteration may be compared with the one before."""
        return True

    def cycle(self, state: RunState, gap: float) -> tuple[float, int]:
        """Return the gap with which a cycle began (NaN outside of cycles), and how many cycles failed."""
        return math.nan, 0

    def verified(
        self, state: RunState, record: IterationRecord, scored: Scored, writer: Writer, *, ends: bool
    ) -> Verified:
        """Return what is found of a gap that ``ends`` a run, where it is not taken on trust."""
        return Verified(state, record, ends)

    def onwards(self, state: RunState, scored: Scored, gap: float) -> RunState:
        """Return the state before the pass that the policy has chosen; ``gap`` is the estimated one."""
        return state
