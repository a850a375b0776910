"""Traditional EM: every row, always."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from emtau_dask.policies.policy import (
    BuiltInPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
)


class FullEM(BuiltInPolicy):
    """Traditional EM (the paper's Algorithm 1): every row is scored in every iteration.

    Keeps no row state.
    """

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return None: no row state is kept."""
        return None

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Leave every row active."""
        return state, np.ones(len(evidence.labels), dtype=np.bool_)

    def schedule(self, summary: PassSummary) -> Schedule:
        """Score every row again; tol is tested after every iteration."""
        return Schedule(NextPass.ALL, test_tol=True)
