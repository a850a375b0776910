"""Which rows are outliers: the least probable under a mixture."""

from emtau_dask.outliers.detector import MixtureOutlierDetector, check_contamination
from emtau_dask.outliers.quantile import score_quantile

__all__ = ["MixtureOutlierDetector", "check_contamination", "score_quantile"]
