"""A policy that also remembers when each row was last scored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emtau_dask.policies.base import ActivityPolicy, Evidence, PassSummary, RowArray, RowState, Schedule

SCORED_AT = "scored_at"


@dataclass(frozen=True)
class Traced:
    """A policy that keeps row state, with the row array ``scored_at`` beside its own.

    From that array and the history of the parameters, the held responsibilities of inactive rows
    can be computed again; the paper's comparisons evaluate those.
    """

    policy: ActivityPolicy

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return the policy's arrays and ``scored_at``, which inactive rows keep."""
        own = self.policy.row_arrays(n_components, max_iter) or ()
        return (*own, RowArray(SCORED_AT, max_iter, keep=True))

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Update the policy's state; note the iteration."""
        own = {name: values for name, values in state.items() if name != SCORED_AT}
        after, stays = self.policy.update(own, evidence)
        return {**after, SCORED_AT: np.full_like(state[SCORED_AT], evidence.iteration)}, stays

    def schedule(self, summary: PassSummary) -> Schedule:
        """Return the policy's schedule."""
        return self.policy.schedule(summary)
