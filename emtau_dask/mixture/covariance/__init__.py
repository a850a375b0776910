"""Covariance types: one file each, and a registry."""

from emtau_dask.mixture.covariance.base import CovarianceStructure, Frame, Moments, Split
from emtau_dask.mixture.covariance.matrices import add_outer_products
from emtau_dask.mixture.covariance.registry import STRUCTURES, structure_named

__all__ = [
    "STRUCTURES",
    "CovarianceStructure",
    "Frame",
    "Moments",
    "Split",
    "add_outer_products",
    "structure_named",
]
