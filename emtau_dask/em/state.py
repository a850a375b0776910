"""The state of a fit between two passes, as frozen records; a fit is resumed from such a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from emtau_dask.em.acceleration import QuasiNewtonState
from emtau_dask.em.history import FitHistory, IterationRecord
from emtau_dask.em.moments import FrozenMoments
from emtau_dask.em.sums import FrozenStatistics
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.storage.row_state import RowStateRef

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
    """The weighted passes between two full ones.

    Attributes
    ----------
    outer : QuasiNewtonState
        Of the full pass before.
    frozen : FrozenMoments
    gap : float
        Estimated when the cycle began, nats per row.
    """

    outer: QuasiNewtonState
    frozen: FrozenMoments
    gap: float


@dataclass(frozen=True, eq=False)
class Progress:
    """The progress of an accelerated run.

    Attributes
    ----------
    quasi_newton : QuasiNewtonState
    sample_index : int
        Index of the sample that is scored now; the number of samples if all rows are.
    sample_began : int
        Iterations made before the first one on this sample; annealed passes count.
    cycle : Cycle or None
        None if the next pass is full or over a sample.
    damping : float
        See `em.acceleration.begin_cycle`.
    failed_cycles : int
        Cycles that lowered the bound of all rows, or gained hardly less than the cycle before.
    uncertainty : float
        See `Evidence`.
    annealed_passes : int
        Annealed passes that are left.
    chosen : bool
        Whether the run is the best of the compared starts, or the only one.
    gap_margin : float
        Factor by which an estimated gap must be below the tolerance before it is measured.
    gap_of_all_rows : bool
        Whether the next gap is measured over all rows; so it is after one over weighted rows did not end the
        run.
    """

    quasi_newton: QuasiNewtonState
    sample_index: int = 0
    sample_began: int = 0
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
        The bound with which that of the next iteration is compared.
    records : tuple of IterationRecord
    frozen : FrozenStatistics or None
        Of the inactive rows.
    since_full_pass : int
        Iterations since every row was last made active.
    full_pass_next : bool
        Whether the next iteration scores every row, with new row state.
    n_active : mapping of int to int
        Number of active rows, by chunk; chunks without any may be absent.
    row_state : mapping of int to RowStateRef
        Where the newest row state of each chunk is.
    stop_reason : {"tol", "no-active-rows", "max-iter"} or None
        None while the run goes on.
    progress : Progress or None
        None without acceleration.
    """

    parameters: MixtureParameters
    bound: float | None
    records: tuple[IterationRecord, ...] = ()
    frozen: FrozenStatistics | None = None
    since_full_pass: int = 0
    full_pass_next: bool = True
    n_active: Mapping[int, int] = field(default_factory=dict)
    row_state: Mapping[int, RowStateRef] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    progress: Progress | None = None

    @property
    def iteration(self) -> int:
        """Iterations made."""
        return len(self.records)

    @property
    def history(self) -> FitHistory:
        """The records, as users get them."""
        return FitHistory(self.records)

    @property
    def lower_bound(self) -> float:
        """See `FitHistory.last_kept`; nats per row, −inf without records."""
        last = self.history.last_kept
        return -np.inf if last is None else last.lower_bound


@dataclass(frozen=True, eq=False)
class FitState:
    """A fit of one or more runs.

    Attributes
    ----------
    run : int
        Number of the current run, from 0.
    start : KMeansProgress or None
        Of the current run's k-means start, until it ends.
    current : RunState or None
        The current run; None until its Θ₀ is known.
    best : RunState or None
        The run with the highest final bound of those that ended.
    left_out : tuple of str
        One message for each run that collapsed.
    finished : bool
        Whether all runs ended; ``current`` is then the best of them.
    notes : tuple of str
        Remarks for users on how the fit went.
    """

    run: int = 0
    start: KMeansProgress | None = None
    current: RunState | None = None
    best: RunState | None = None
    left_out: tuple[str, ...] = ()
    finished: bool = False
    notes: tuple[str, ...] = ()
