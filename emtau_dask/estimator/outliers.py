"""`MixtureOutlierDetector`: which rows are the least probable under a mixture."""

from __future__ import annotations

from typing import Any, Self

import dask.array as da
import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OutlierMixin, clone
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from emtau_dask.constraints import FRACTION
from emtau_dask.errors import ConfigError, InvalidDataError, short
from emtau_dask.execution.choice import compute_collections

MAX_COMPUTED = 2**23
"""Maximum number of scores that are held in memory (64 MiB). If there are more, they are counted."""
FAN_IN = 8
NO_ROWS = "X has no rows; give at least one."


def score_quantile(scores: Any, share: float) -> float:
    """Return a quantile of scores.

    Up to 8,388,608 lazy scores are computed once, and the result is ``numpy.quantile(scores, share)``. More
    scores, or an unknown number, are computed twice, and counted by their leading 32 bits. Then the result is
    the order statistic of rank ``floor((n - 1) share)``, counted from 0, rounded down by less than a
    millionth of its size, so at most this share of the rows is below it. The bits do not depend on threads
    and chunks, because counts are exact sums.

    Parameters
    ----------
    scores : ndarray or dask array of shape (n,), float64
        NaN, the score of a dropped row, is ignored.
    share : float
        From 0 to 1.

    Raises
    ------
    InvalidDataError
        There are no scores.
    """
    if isinstance(scores, da.Array):
        if not scores.shape[0] <= MAX_COMPUTED:  # This is also true for NaN, an unknown number.
            return _counted_quantile(scores, share)
        (scores,) = compute_collections("the quantile of the scores", scores)
    scores = scores[~np.isnan(scores)]
    if len(scores) == 0:
        raise InvalidDataError(NO_ROWS)
    return float(np.quantile(scores, share))


def _counted_quantile(scores: da.Array, share: float) -> float:
    """Return the leading 32 bits of an order statistic, from counts of the first 16, then of the next 16."""

    def cumulative_counts(first: int | None) -> NDArray[np.int64]:
        shape = ((1,) * scores.numblocks[0], (2**16,))
        counts = scores.map_blocks(_counts, first, dtype=np.int64, new_axis=1, chunks=shape)
        total = counts.sum(axis=0, split_every=FAN_IN)
        return np.cumsum(*compute_collections("the quantile of the scores", total))

    below = cumulative_counts(None)
    if below[-1] == 0:
        raise InvalidDataError(NO_ROWS)
    rank = int((int(below[-1]) - 1) * share)
    first = int(np.searchsorted(below, rank, side="right"))
    rank -= int(below[first - 1]) if first else 0
    second = int(np.searchsorted(cumulative_counts(first), rank, side="right"))
    leading = np.array([(first << 16 | second) - 2**31], dtype=np.int64)
    return float(_order_preserving(leading << 32).view(np.float64)[0])


def _counts(scores: NDArray[np.float64], first: int | None) -> NDArray[np.int64]:
    """Count scores by their first 16 bits, or those that begin with ``first`` by the next; (1, 65,536)."""
    scores = scores[~np.isnan(scores)]
    leading = (_order_preserving((scores + 0.0).view(np.int64)) >> 32) + 2**31  # 0.0 and -0.0 are one score
    values = leading >> 16 if first is None else leading[leading >> 16 == first] & 0xFFFF
    return np.bincount(values, minlength=2**16)[np.newaxis]


def _order_preserving(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert the bits of floats to integers in the same order, or these integers back to the bits."""
    return bits ^ ((bits >> 63) & np.int64(2**63 - 1))


def check_contamination(value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is a share of outliers."""
    if not (FRACTION.holds(value) and value <= 0.5):
        raise ConfigError(
            f"contamination = {short(value)} must be above 0 and at most 0.5: the share of the rows that are "
            "outliers."
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
        Set only if the data name their features.

    Notes
    -----
    The threshold takes one pass over the data after the fit for at most 8,388,608 rows, else two; see
    ``estimator.outliers.score_quantile``. It is identical for any number of threads and workers.
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
            As `GaussianMixture.fit`; `ConfigError` if ``contamination`` is impossible.
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
        """Return -1 for outliers and 1 for other rows, 0 for rows that the mixture drops.

        Returns
        -------
        ndarray, or lazy dask array for dask, zarr and paths, of shape (n_samples,), intp
            X and columns are as for `GaussianMixture.predict`.
        """
        scores = self.score_samples(X, columns=columns)
        labels = np.where(scores < self.offset_, -1, 1)
        return np.where(np.isnan(scores), 0, labels).astype(np.intp)


def _options(columns: Any) -> dict[str, Any]:
    return {} if columns is None else {"columns": columns}
