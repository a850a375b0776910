"""Which rows are outliers: the least probable under a mixture."""

from emtau_dask.outliers.detector import MixtureOutlierDetector, check_contamination
from emtau_dask.outliers.quantile import exact_quantile

__all__ = ["MixtureOutlierDetector", "check_contamination", "exact_quantile"]
