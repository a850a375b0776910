"""The state of a fit between two passes, as frozen records; a fit is resumed from such a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from emtau_dask.em.acceleration import Ascent
from emtau_dask.em.history import FitHistory, IterationRecord
from emtau_dask.em.moments import HeldMoments
from emtau_dask.em.sums import FrozenRows
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.storage.row_state import SlotState

StopReason = Literal["tol", "no-active-rows", "max-iter"]


@dataclass(frozen=True, eq=False)
class KMeansProgress:
    """K-means between two passes.

    Attributes
    ----------
    centres : ndarray of shape (K, d)
    tolerance : float
        Squared movement of the centres at which it stops.
    n_iter : int
        Passes made.
    """

    centres: Floats
    tolerance: float
    n_iter: int


@dataclass(frozen=True, eq=False)
class Cycle:
    """Partial passes over rows that stand for all, between two passes over all rows.

    Attributes
    ----------
    outer : Ascent
        Of the pass over all rows before.
    held : HeldMoments
    gap : float
        Estimated when the cycle began, nats per row.
    """

    outer: Ascent
    held: HeldMoments
    gap: float


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a run is that may extrapolate, and begin on samples.

    Attributes
    ----------
    ascent : Ascent
    level : int
        The sample that is scored now; from their number on, all rows are.
    level_began : int
        Iterations made before this level, annealed passes included.
    cycle : Cycle or None
        None where all rows are scored next, or a sample.
    damping : float
        See `em.acceleration.begin_cycle`.
    failed_cycles : int
        Cycles that led to a lower bound of all rows, or gained hardly less than the one before.
    uncertainty : float
        See `Evidence`.
    annealed_passes : int
        Annealed passes to come.
    chosen : bool
        Whether the run is no longer one of several starts that are compared on the first sample.
    gap_margin : float
        By how much an estimated gap must be below the tolerance before it is measured.
    gap_of_all_rows : bool
        Whether the next gap is measured over all rows, since rows that stand for all did not end the run.
    """

    ascent: Ascent
    level: int = 0
    level_began: int = 0
    cycle: Cycle | None = None
    damping: float = 0.0
    failed_cycles: int = 0
    uncertainty: float = math.nan
    annealed_passes: int = 0
    chosen: bool = True
    gap_margin: float = 1.0
    gap_of_all_rows: bool = False


@dataclass(frozen=True, eq=False)
class RunState:
    """One run of EM between two iterations.

    Attributes
    ----------
    parameters : MixtureParameters
        Of the last M-step, or Θ₀.
    bound : float or None
        What the next iteration's bound is compared with.
    records : tuple of IterationRecord
    frozen : FrozenRows or None
        Of the inactive rows.
    since_full_pass : int
        Iterations since every row was last made active.
    full_pass_next : bool
        Whether the next iteration scores every row, with new row state.
    remaining : mapping of int to int
        Rows left active, by chunk; chunks without any may be absent.
    slots : mapping of int to SlotState
        Where the last row state of each chunk is.
    stop_reason : {"tol", "no-active-rows", "max-iter"} or None
        None while it goes on.
    progress : Progress or None
        None where every step is EM's own, and every sample all rows.
    """

    parameters: MixtureParameters
    bound: float | None
    records: tuple[IterationRecord, ...] = ()
    frozen: FrozenRows | None = None
    since_full_pass: int = 0
    full_pass_next: bool = True
    remaining: Mapping[int, int] = field(default_factory=dict)
    slots: Mapping[int, SlotState] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    progress: Progress | None = None

    @property
    def iteration(self) -> int:
        """Iterations made."""
        return len(self.records)

    @property
    def history(self) -> FitHistory:
        """The records as users see them."""
        return FitHistory(self.records)

    @property
    def lower_bound(self) -> float:
        """See `FitHistory.last_kept`; nats per row, −inf where there is no record."""
        last = self.history.last_kept
        return -np.inf if last is None else last.lower_bound


@dataclass(frozen=True, eq=False)
class FitState:
    """A fit of one or more runs.

    Attributes
    ----------
    run : int
        The run under way, from 0.
    start : KMeansProgress or None
        Of a k-means start under way.
    current : RunState or None
        None until its Θ₀ is known.
    best : RunState or None
        Of the runs that ended, the one with the best final bound.
    left_out : tuple of str
        Why runs collapsed.
    finished : bool
        Whether all runs ended; ``current`` is then the best of them.
    notes : tuple of str
        What users should know of how the fit went.
    """

    run: int = 0
    start: KMeansProgress | None = None
    current: RunState | None = None
    best: RunState | None = None
    left_out: tuple[str, ...] = ()
    finished: bool = False
    notes: tuple[str, ...] = ()
