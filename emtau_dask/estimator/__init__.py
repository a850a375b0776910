"""`GaussianMixture`, and what its fits, predictions and results need around them."""

from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.summary import ComponentSummary, FitSummary

__all__ = ["ComponentSummary", "FitSummary", "GaussianMixture"]
