"""EM-Tau: a row becomes inactive once it has stayed in one component for τ iterations."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.constraints import NONE, choice, either, integer
from emtau_dask.policies.policy import (
    BuiltInPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
)


class EMTau(BuiltInPolicy):
    """EM-Tau (the paper's Procedure 1), with the revisits that its section 5 proposes.

    Parameters
    ----------
    tau : int, default=20
        A row becomes inactive once its most probable component has been the same
        in ``tau`` consecutive iterations. Above ``max_iter`` the results are
        identical to those of traditional EM.
    revisit : {"on-empty", None} or int, default="on-empty"
        When all rows become active again, with their counters at zero.
        ``"on-empty"``: when no row is active, or when a partial pass moves the
        lower bound by less than tol (tol > 0). An integer m: also when m
        iterations have passed since the last revisit or the start. ``None``:
        never, the paper's procedure.

    Notes
    -----
    With revisits, tol is tested on full passes only, so ``converged_``
    means a stationary point of the full-data log-likelihood. With
    ``revisit=None`` it does not: the parameters may stop changing because
    rows are inactive.
    """

    constraints: ClassVar = {"tau": integer(1), "revisit": either(choice("on-empty"), NONE, integer(1))}

    def __init__(self, tau: int = 20, revisit: str | int | None = "on-empty") -> None:
        self.tau = tau
        self.revisit = revisit

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return the arrays for a row's last component and its count of iterations there.

        Raises
        ------
        ConfigError
            ``tau`` or ``revisit`` is impossible.
        """
        super().row_arrays(n_components, max_iter)
        longest = min(self.tau, max(max_iter, 1))
        return RowArray("label", n_components - 1), RowArray("count", longest)

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Count consecutive iterations in one component; stay active below ``tau``."""
        count = state["count"]
        labels = evidence.labels.astype(state["label"].dtype, copy=False)
        counts = count * (labels == state["label"])  # If it is 0, the label has no meaning.
        counts += count.dtype.type(1)
        return {"label": labels, "count": counts}, counts < self.tau

    def schedule(self, summary: PassSummary) -> Schedule:
        """Revisit as configured; without revisits, stop on an empty active set."""
        if self.revisit is None:
            empty = summary.remaining == 0
            return Schedule(NextPass.STOP if empty else NextPass.ACTIVE, test_tol=True)
        stalled = (
            not summary.full_pass
            and summary.tol > 0
            and summary.change is not None
            and abs(summary.change) < summary.tol
        )
        overdue = not isinstance(self.revisit, str) and summary.since_reset >= self.revisit
        again = summary.remaining == 0 or stalled or overdue
        return Schedule(NextPass.ALL if again else NextPass.ACTIVE, test_tol=summary.full_pass)
