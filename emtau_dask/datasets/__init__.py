"""Datasets that a run can make for itself."""

from emtau_dask.datasets.registry import holds_dataset, make_dataset, outlined_dataset

__all__ = ["holds_dataset", "make_dataset", "outlined_dataset"]
