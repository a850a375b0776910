"""Checkpoints of a fit: what is written, and how it is read back."""

from emtau_dask.checkpoint.fingerprints import check_same, fingerprint, sampled_contents
from emtau_dask.checkpoint.reader import SavedFit, read_newest
from emtau_dask.checkpoint.schema import (
    AlgorithmEntry,
    ClimbingEntry,
    ConfigEntry,
    ParametersEntry,
    SourceEntry,
    first_problem,
)
from emtau_dask.checkpoint.writer import CheckpointJournal

__all__ = [
    "AlgorithmEntry",
    "CheckpointJournal",
    "ClimbingEntry",
    "ConfigEntry",
    "ParametersEntry",
    "SavedFit",
    "SourceEntry",
    "check_same",
    "fingerprint",
    "first_problem",
    "read_newest",
    "sampled_contents",
]
