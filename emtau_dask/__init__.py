"""Gaussian mixtures fitted by EM with partial E-steps on data larger than memory."""

from emtau_dask.activity import EMLazy, EMStar, EMTau, FullEM
from emtau_dask.errors import (
    ConfigError,
    EmtauError,
    InvalidDataError,
    SingularComponentError,
)
from emtau_dask.face.estimator import GaussianMixture

__all__ = [
    "ConfigError",
    "EMLazy",
    "EMStar",
    "EMTau",
    "EmtauError",
    "FullEM",
    "GaussianMixture",
    "InvalidDataError",
    "SingularComponentError",
]
