"""Activity policies: which rows the next E-step scores. Knows NumPy; nothing of mixtures or storage."""

from emtau_dask.policies.base import (
    ActivityPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
    WeightedPolicy,
)
from emtau_dask.policies.description import describe_policy, matching_policy
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.lazy import EMLazy
from emtau_dask.policies.registry import ALGORITHMS, as_policy
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.policies.star import EMStar
from emtau_dask.policies.tau import EMTau
from emtau_dask.policies.traced import SCORED_AT, Traced
from emtau_dask.policies.validation import (
    ACTIVE,
    checked_row_arrays,
    checked_schedule,
    checked_update,
    checked_weights,
)

__all__ = [
    "ACTIVE",
    "ALGORITHMS",
    "SCORED_AT",
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
    "Traced",
    "WeightedPolicy",
    "as_policy",
    "checked_row_arrays",
    "checked_schedule",
    "checked_update",
    "checked_weights",
    "describe_policy",
    "matching_policy",
]
