"""A whole fit from its settings, sources and state."""

from emtau_dask.fit.caching import cache_limit, kept_between_passes
from emtau_dask.fit.fit import FitPlan, Journal, TemporaryJournal, row_fields, run_fit, temporary_journal
from emtau_dask.fit.memory_estimate import FitDemand, FitOutline, demand, largest_chunk
from emtau_dask.fit.settings import CONSTRAINTS, check_settings

__all__ = [
    "CONSTRAINTS",
    "FitDemand",
    "FitOutline",
    "FitPlan",
    "Journal",
    "TemporaryJournal",
    "cache_limit",
    "check_settings",
    "demand",
    "kept_between_passes",
    "largest_chunk",
    "row_fields",
    "run_fit",
    "temporary_journal",
]
