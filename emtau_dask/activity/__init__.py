"""Activity policies: which rows the next E-step scores. Knows NumPy; nothing of mixtures or storage."""

from emtau_dask.activity.full import FullEM
from emtau_dask.activity.lazy import EMLazy
from emtau_dask.activity.named import ALGORITHMS, as_policy
from emtau_dask.activity.policy import (
    ActivityPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
)
from emtau_dask.activity.star import EMStar
from emtau_dask.activity.tau import EMTau
from emtau_dask.activity.traced import SCORED_AT, Traced

__all__ = [
    "ALGORITHMS",
    "SCORED_AT",
    "ActivityPolicy",
    "EMLazy",
    "EMStar",
    "EMTau",
    "Evidence",
    "FullEM",
    "NextPass",
    "PassSummary",
    "RowArray",
    "RowState",
    "Schedule",
    "Traced",
    "as_policy",
]
