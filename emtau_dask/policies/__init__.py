"""Activity policies: which rows the next E-step scores. In NumPy, without mixtures or storage."""

from emtau_dask.policies.full import FullEM
from emtau_dask.policies.lazy import EMLazy
from emtau_dask.policies.policy import (
    ActivityPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
    WeightedPolicy,
)
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.policies.star import EMStar
from emtau_dask.policies.tau import EMTau

__all__ = [
    "ActivityPolicy",
    "EMLazy",
    "EMSampled",
    "EMStar",
    "EMTau",
    "Evidence",
    "FullEM",
    "NextPass",
    "PassSummary",
    "RowArray",
    "RowState",
    "Schedule",
    "WeightedPolicy",
]
