"""What users give: rows, weights, seeds and data frames, checked and opened."""

from emtau_dask.inputs.frames import COMPONENT, LOG_LIKELIHOOD, checked_output, with_index
from emtau_dask.inputs.rows import checked_array, checked_lazy, opened_path, row_values_source
from emtau_dask.inputs.seeds import Seeds
from emtau_dask.inputs.sources import opened_sources

__all__ = [
    "COMPONENT",
    "LOG_LIKELIHOOD",
    "Seeds",
    "checked_array",
    "checked_lazy",
    "checked_output",
    "opened_path",
    "opened_sources",
    "row_values_source",
    "with_index",
]
