"""EM-Lazy: between full passes, rows whose largest responsibility is above a threshold are inactive."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.constraints import FRACTION, integer
from emtau_dask.policies.policy import BuiltInPolicy, Evidence, NextPass, PassSummary, RowState, Schedule


class EMLazy(BuiltInPolicy):
    """EM-Lazy (the paper's Procedure 3; Thiesson, Meek and Heckerman 2001).

    Parameters
    ----------
    threshold : float in (0, 1], default=0.99
        Between full iterations, the rows whose largest responsibility was at
        most this at their last scoring are active. (The paper's formula for the
        active set, ``P_n > T``, contradicts its text; this policy follows the text.)
    full_every : int, default=5
        Iterations 1, 1 + full_every, 1 + 2·full_every, … score every row.

    Notes
    -----
    tol is tested after full iterations only. An iteration with no active row
    still counts.
    """

    constraints: ClassVar = {"threshold": FRACTION, "full_every": integer(1)}

    def __init__(self, threshold: float = 0.99, full_every: int = 5) -> None:
        self.threshold = threshold
        self.full_every = full_every

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Deactivate rows above the threshold, unless the next iteration is full anyway."""
        if evidence.iteration % self.full_every == 0:
            return state, np.ones(len(evidence.labels), dtype=np.bool_)
        return state, evidence.responsibilities <= self.threshold

    def schedule(self, summary: PassSummary) -> Schedule:
        """Follow the fixed schedule of full iterations."""
        full_next = summary.iteration % self.full_every == 0
        full_now = (summary.iteration - 1) % self.full_every == 0
        return Schedule(NextPass.ALL if full_next else NextPass.ACTIVE, test_tol=full_now)
