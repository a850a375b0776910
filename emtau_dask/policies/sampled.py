"""Sampled partial E-steps: between full passes a weighted sample of the rows is scored."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.constraints import FRACTION, integer
from emtau_dask.policies.policy import (
    BuiltInPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
)

LEVELS = 256
"""A row's probability is rounded up to a multiple of 1/256, so sampling weights are at most 256."""
MIN_UNCERTAINTY = 0.01
"""Added to each row's uncertainty (1 less its largest responsibility), so that certain rows are drawn too."""
REMAINING_GAP = 0.03
"""A cycle of partial passes ends when less than 3% of its first gap is left."""
MAX_FAILURES = 4
"""Maximum failed cycles; after that, all passes are full."""


class EMSampled(BuiltInPolicy):
    """EM with sampled partial E-steps.

    After a full pass, a row stays active with a probability that grows with its uncertainty (1 less its
    largest responsibility). The inverse of the probability is its sampling weight. The statistics of the
    other rows are frozen, less what the sampling weights add. This is a control variate: partial and full
    passes agree at the parameters where the cycle began (Chen, Zhu, Teh and Zhang 2018, "Stochastic
    expectation maximization with variance reduction"; Johnson and Zhang 2013).

    Parameters
    ----------
    share : float in (0, 1], default=0.0625
        Approximate share of the rows that stay active.
    most : int, default=40
        Maximum partial passes between full passes. A full pass follows as soon as less than 3% of
        what the fit could still gain is left.

    Notes
    -----
    The bound of a partial pass is an estimate, and tol is tested after full passes only. A cycle fails if the
    full pass after it refuses its parameters, or gains hardly less than the one before. After four failures
    the fit makes full passes only.
    """

    constraints: ClassVar = {"share": FRACTION, "most": integer(1)}

    def __init__(self, share: float = 0.0625, most: int = 40) -> None:
        self.share = share
        self.most = most

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return the array of the rows' probabilities, in 256ths; raises `ConfigError` for bad parameters."""
        super().row_arrays(n_components, max_iter)
        return (RowArray("probability", LEVELS),)

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Draw the active rows after a full pass; leave them active after a partial one."""
        before = state["probability"]
        if before.any() or evidence.draws is None:
            return state, np.ones(len(before), dtype=np.bool_)
        uncertainty = 1.0 - evidence.responsibilities
        mean = evidence.uncertainty if np.isfinite(evidence.uncertainty) else 0.5
        wanted = self.share * (uncertainty + MIN_UNCERTAINTY) / (mean + MIN_UNCERTAINTY)
        levels = np.clip(np.ceil(LEVELS * wanted), 1, LEVELS)
        return {"probability": levels.astype(before.dtype)}, evidence.draws < levels / LEVELS

    def row_weights(self, state: RowState) -> NDArray[np.float64]:
        """Return the inverse of each row's probability."""
        return LEVELS / np.maximum(state["probability"], 1).astype(np.float64)

    def schedule(self, summary: PassSummary) -> Schedule:
        """Score the drawn rows until little of the gap is left, then all rows."""
        if summary.full_pass:
            partial = summary.accepted and summary.remaining > 0 and summary.failures < MAX_FAILURES
            return Schedule(NextPass.ACTIVE if partial else NextPass.ALL, test_tol=True)
        stuck = np.isnan(summary.gap) and not summary.accepted
        ended = summary.since_reset > self.most or stuck or summary.gap < REMAINING_GAP * summary.gap_at_reset
        return Schedule(NextPass.ALL if ended else NextPass.ACTIVE, test_tol=False)
