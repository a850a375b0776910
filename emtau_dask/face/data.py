"""What users pass as X, as the engine's sources, with scikit-learn's checks for arrays in memory."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from sklearn.utils.validation import check_array, validate_data

from emtau_dask.errors import InvalidDataError, InvalidDtypeError
from emtau_dask.storage import Source, as_source, is_lazy

__all__ = ["checked_array", "checked_lazy", "fit_source", "row_values_source"]


def _from_frame(data: Any) -> Any:
    return data.to_dask_array() if hasattr(data, "to_dask_array") else data


def checked_array(estimator: Any, data: Any, *, reset: bool) -> Any:
    """Return array-like ``data`` as float32 or float64 rows x features, checked by scikit-learn.

    Raises
    ------
    InvalidDataError, InvalidDtypeError
        With scikit-learn's message.
    """
    try:
        return validate_data(
            estimator, data, reset=reset, dtype=[np.float64, np.float32], ensure_all_finite=False
        )
    except TypeError as error:
        raise InvalidDtypeError(str(error)) from error
    except ValueError as error:
        raise InvalidDataError(str(error)) from error


def checked_lazy(estimator: Any, data: Any) -> Any:
    """Return lazy ``data`` (or None where it is in memory) after checking its number of features.

    Raises
    ------
    InvalidDataError
        It has other features than the fit.
    """
    data = _from_frame(data)
    if not is_lazy(data):
        return None
    if len(data.shape) != 2 or data.shape[1] != estimator.n_features_in_:
        found = data.shape[1] if len(data.shape) == 2 else f"shape {data.shape}, not rows x"
        raise InvalidDataError(
            f"X has {found} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input."
        )
    return data


def fit_source(estimator: Any, data: Any) -> Source:
    """Return the rows to fit as a source, and set ``n_features_in_`` (and names, where known).

    Raises
    ------
    InvalidDataError, InvalidDtypeError
    """
    columns = getattr(data, "columns", None)
    data = _from_frame(data)
    if not is_lazy(data):
        return as_source(checked_array(estimator, data, reset=True), ndim=2, what="X")
    source = as_source(data, ndim=2, what="X")
    if hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_
    if isinstance(data, da.Array) and columns is not None:
        estimator.feature_names_in_ = np.asarray(columns, dtype=object)
    estimator.n_features_in_ = source.shape[1]
    return source


def row_values_source(values: Any, *, ndim: int, what: str) -> Source | None:
    """Return weights (ndim 1) or responsibilities (ndim 2) as a source; None stays None.

    Raises
    ------
    InvalidDataError, InvalidDtypeError
    """
    if values is None or is_lazy(values):
        return None if values is None else as_source(values, ndim=ndim, what=what)
    try:
        array = check_array(
            values,
            dtype=[np.float64, np.float32],
            ensure_2d=False,
            ensure_all_finite=False,
            ensure_min_samples=0,
            input_name=what,
        )
    except TypeError as error:
        raise InvalidDtypeError(str(error)) from error
    except ValueError as error:
        raise InvalidDataError(str(error)) from error
    return as_source(array, ndim=ndim, what=what)
