"""`MixtureOutlierDetector`: labels of outliers, as scikit-learn's detectors give them."""

from __future__ import annotations

from typing import Any, Self

import dask.array as da
import numpy as np
from sklearn.base import BaseEstimator, OutlierMixin, clone
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from emtau_dask.checks import FRACTION
from emtau_dask.errors import ConfigError
from emtau_dask.messages import short
from emtau_dask.outliers.quantile import score_quantile


def check_contamination(value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is a share of outliers."""
    if not (FRACTION.holds(value) and value <= 0.5):
        raise ConfigError(
            f"contamination = {short(value)} must be a number above 0 and at most 0.5: the share of the rows "
            "that are outliers."
        )


class MixtureOutlierDetector(OutlierMixin, BaseEstimator):  # type: ignore[misc]
    """Detector of outliers: the rows that are least probable under a mixture.

    It has the methods of scikit-learn's detectors, such as ``sklearn.covariance.EllipticEnvelope``. The
    mixture keeps its own ``predict``, which returns components.

    Parameters
    ----------
    estimator : GaussianMixture
        The mixture, which is cloned and fitted. For one that is fitted already give
        ``sklearn.frozen.FrozenEstimator(gm)``: then only the threshold is computed.
    contamination : float, default=0.01
        The share of the rows of the fit that are outliers, above 0 and at most 0.5.

    Attributes
    ----------
    estimator_ : GaussianMixture
        Fitted.
    offset_ : float
        The threshold, nats: the quantile ``contamination`` of the log-likelihoods of the rows of the fit,
        ``numpy.quantile(scores, contamination)`` for at most 8,388,608 rows, else within a millionth of its
        size. Every row counts once, whatever weights the mixture was fitted with.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features,)
        Where the data names its features.

    Notes
    -----
    Beside the fit, the threshold takes one pass over the data for at most 8,388,608 rows, else two, see
    ``emtau_dask.outliers.score_quantile``. It has the same bits for any number of threads and workers.
    Memory is bounded.

    Examples
    --------
    >>> import dask.array as da
    >>> from emtau_dask import GaussianMixture, MixtureOutlierDetector
    >>> X = da.random.default_rng(0).normal(size=(1000, 2), chunks=(250, 2))
    >>> detector = MixtureOutlierDetector(GaussianMixture(1, random_state=0), contamination=0.05).fit(X)
    >>> int((detector.predict(X) == -1).sum())
    50
    """

    def __init__(self, estimator: Any, *, contamination: float = 0.01) -> None:
        self.estimator = estimator
        self.contamination = contamination

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = get_tags(self.estimator).input_tags.allow_nan
        return tags

    def fit(self, X: Any, y: Any = None, *, columns: Any = None) -> Self:
        """Fit the mixture and compute the threshold.

        Parameters
        ----------
        X : dask array, zarr array or array-like of shape (n_samples, n_features), or str
            As for `GaussianMixture.fit`.
        y : ignored
        columns : sequence of str, optional
            Columns of parquet or CSV.

        Raises
        ------
        EmtauError
            As `GaussianMixture.fit`; `ConfigError` where ``contamination`` is impossible.
        """
        check_contamination(self.contamination)
        mixture = clone(self.estimator).fit(X, y, **_options(columns))
        offset = score_quantile(mixture.score_samples(X, **_options(columns)), float(self.contamination))
        self.estimator_, self.offset_ = mixture, offset
        self.n_features_in_ = mixture.n_features_in_
        if hasattr(mixture, "feature_names_in_"):
            self.feature_names_in_ = mixture.feature_names_in_
        return self

    def score_samples(self, X: Any, *, columns: Any = None) -> Any:
        """Return log-likelihoods, (n_samples,) float64, nats; X and columns as for `fit`."""
        check_is_fitted(self)
        return self.estimator_.score_samples(X, **_options(columns))

    def decision_function(self, X: Any, *, columns: Any = None) -> Any:
        """Return ``score_samples(X) - offset_``, (n_samples,) float64, nats: below 0 for outliers."""
        return self.score_samples(X, columns=columns) - self.offset_

    def predict(self, X: Any, *, columns: Any = None) -> Any:
        """Return -1 for outliers and 1 for other rows.

        Returns
        -------
        ndarray, or lazy dask array for dask, zarr and paths, of shape (n_samples,), intp
            X and columns are as for `GaussianMixture.predict`.
        """
        scores = self.score_samples(X, columns=columns)
        if isinstance(scores, da.Array):
            return scores.map_blocks(inliers, self.offset_, dtype=np.intp)
        return inliers(scores, self.offset_)


def inliers(scores: Any, offset: float) -> Any:
    """Return -1 where log-likelihoods are below the threshold ``offset``, else 1."""
    return np.where(scores < offset, -1, 1).astype(np.intp)


def _options(columns: Any) -> dict[str, Any]:
    return {} if columns is None else {"columns": columns}
