"""Covariance types: one file each, and a registry."""

from emtau_dask.mixture.covariance.types import STRUCTURES, CovarianceStructure, structure_named

__all__ = ["STRUCTURES", "CovarianceStructure", "structure_named"]
