"""The number of components, and the covariance type, chosen by criteria on all rows."""

from emtau_dask.selection.checkpoint import SelectionCheckpoint, SelectionEntry, selection_checkpoint
from emtau_dask.selection.criteria import CRITERIA, Criterion, Score
from emtau_dask.selection.selecting import select, select_components
from emtau_dask.selection.settings import Candidate, SelectionSettings, checked_settings
from emtau_dask.selection.table import (
    HEADINGS,
    CandidateRecord,
    ComponentSelection,
    SelectionPasses,
    SelectionTable,
)

__all__ = [
    "CRITERIA",
    "HEADINGS",
    "Candidate",
    "CandidateRecord",
    "ComponentSelection",
    "Criterion",
    "Score",
    "SelectionCheckpoint",
    "SelectionEntry",
    "SelectionPasses",
    "SelectionSettings",
    "SelectionTable",
    "checked_settings",
    "select",
    "select_components",
    "selection_checkpoint",
]
