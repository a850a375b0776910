"""The number of components, and the covariance type, chosen by criteria on all rows."""

from emtau_dask.selection.criteria import Score
from emtau_dask.selection.select import select_components
from emtau_dask.selection.table import CandidateRecord, ComponentSelection, SelectionPasses, SelectionTable

__all__ = [
    "CandidateRecord",
    "ComponentSelection",
    "Score",
    "SelectionPasses",
    "SelectionTable",
    "select_components",
]
