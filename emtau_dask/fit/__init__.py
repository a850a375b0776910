"""A whole fit from its settings, sources and state."""

from emtau_dask.fit.cache_size import LEAST_BYTES, automatic_cache, cache_bytes
from emtau_dask.fit.context import open_context
from emtau_dask.fit.fitting import FitSettings, FitSources, fit
from emtau_dask.fit.journal import Journal, TemporaryJournal, row_fields, temporary_journal
from emtau_dask.fit.memory_estimate import FitDemand, FitOutline, demand, largest_chunk
from emtau_dask.fit.resolving import NAMED_TOL, automatic, tolerances
from emtau_dask.fit.settings import CONSTRAINTS, check_missing, check_settings, marginalises

__all__ = [
    "CONSTRAINTS",
    "LEAST_BYTES",
    "NAMED_TOL",
    "FitDemand",
    "FitOutline",
    "FitSettings",
    "FitSources",
    "Journal",
    "TemporaryJournal",
    "automatic",
    "automatic_cache",
    "cache_bytes",
    "check_missing",
    "check_settings",
    "demand",
    "fit",
    "largest_chunk",
    "marginalises",
    "open_context",
    "row_fields",
    "temporary_journal",
    "tolerances",
]
