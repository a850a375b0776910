"""A fit in commits: what is written, and how it is read back."""

from emtau_dask.checkpoint.fingerprints import check_same, fingerprint, fingerprint_of, source_entry
from emtau_dask.checkpoint.journal import CheckpointJournal
from emtau_dask.checkpoint.reader import SavedFit, read_newest
from emtau_dask.checkpoint.schema import (
    AlgorithmEntry,
    ConfigEntry,
    ParametersEntry,
    SourceEntry,
    first_problem,
)

__all__ = [
    "AlgorithmEntry",
    "CheckpointJournal",
    "ConfigEntry",
    "ParametersEntry",
    "SavedFit",
    "SourceEntry",
    "check_same",
    "fingerprint",
    "fingerprint_of",
    "first_problem",
    "read_newest",
    "source_entry",
]
