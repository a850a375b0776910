"""Predictions with the index of a DataFrame, where scikit-learn's settings ask for it."""

from __future__ import annotations

import sys
from typing import Any

import dask.array as da
import sklearn

from emtau_dask.errors import ConfigError

OUTPUTS = ("default", "pandas")
COMPONENT, LOG_LIKELIHOOD = "component", "log_likelihood"
"""Names of the labels, also of the columns of responsibilities, and of the scores."""


def checked_output(transform: Any) -> str:
    """Return what ``set_output`` is given; raises `ConfigError` where it is none of `OUTPUTS`."""
    if transform not in OUTPUTS:
        raise ConfigError(
            f"set_output(transform={transform!r}): give 'pandas', for predictions with the index of a "
            "DataFrame, or 'default', for arrays."
        )
    return str(transform)


def _asked_for(estimator: Any) -> bool:
    """Return whether the estimator's ``set_output`` says pandas, or else scikit-learn's config."""
    own = getattr(estimator, "_sklearn_output_config", {}).get("transform")
    return bool((own or sklearn.get_config()["transform_output"]) == "pandas")


def with_index(estimator: Any, X: Any, values: Any, name: str) -> Any:
    """Return predictions as they are, or of a DataFrame and where asked for, with its index.

    Parameters
    ----------
    estimator : GaussianMixture
    X : object
        What the user passed.
    values : ndarray or dask array of shape (n,) or (n, K)
        Its predictions.
    name : str
        Of the Series, or of the index of the columns.

    Returns
    -------
    ndarray, dask array, Series or DataFrame
        Of pandas where X is a DataFrame of pandas, lazy ones of dask where it is one of dask.
    """
    pandas = sys.modules.get("pandas")  # Data of it exist only where it has been imported.
    if pandas is None or not _asked_for(estimator):
        return values
    columns = name if values.ndim == 1 else pandas.RangeIndex(values.shape[1], name=name)
    if isinstance(X, pandas.DataFrame):
        if values.ndim == 1:
            return pandas.Series(values, index=X.index, name=columns)
        return pandas.DataFrame(values, index=X.index, columns=columns)
    frames = sys.modules.get("dask.dataframe")
    if isinstance(values, da.Array) and frames is not None and isinstance(X, frames.DataFrame):
        return frames.from_dask_array(values, columns=columns, index=X.index)
    return values
