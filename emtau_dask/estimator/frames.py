"""Data frames: their columns, and predictions with their index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sklearn

from emtau_dask.errors import ConfigError, InvalidDataError, did_you_mean, one_line, short

OUTPUTS = ("default", "pandas", "polars")
COLUMNS = {"labels": "label", "probabilities": "probability", "scores": "score", "outliers": "outlier"}
"""What arrays of results are called, and a Series or a column of them."""
COMPONENT = "component"
"""Name of the columns, or of the dimension, of responsibilities."""


def with_columns(data: Any, columns: Sequence[str]) -> Any:
    """Return a data frame, of any library that narwhals knows, with some of its columns.

    Raises
    ------
    InvalidDataError
        The data are no frame, have no such column, or repeat names of columns.
    """
    import narwhals as nw  # Only frames need it.

    of_dask = hasattr(data, "to_dask_array")
    try:
        frame = data if of_dask else nw.from_native(data, pass_through=True, allow_series=False)
    except nw.exceptions.DuplicateError as error:
        raise InvalidDataError(
            f"X has several columns of one name ({one_line(error)}). Give each a different name."
        ) from error
    if not of_dask and not isinstance(frame, (nw.DataFrame, nw.LazyFrame)):
        raise InvalidDataError(
            f"columns = {short(list(columns))} can be chosen where X is a data frame or the path of parquet "
            f"or CSV, but X is of the type {type(data).__name__}. Choose them before."
        )
    names = list(frame.columns) if of_dask else frame.collect_schema().names()
    unknown = next((name for name in columns if name not in names), None)
    if unknown is not None:
        near = did_you_mean(unknown, names)
        raise InvalidDataError(f"X has no column {unknown!r}.{near} Its columns are {short(names, 200)}.")
    return data[list(columns)] if of_dask else frame.select(*columns).to_native()


def checked_output(transform: Any) -> str:
    """Return what ``set_output`` is given; raises `ConfigError` where it is none of `OUTPUTS`."""
    if transform not in OUTPUTS:
        raise ConfigError(
            f"set_output(transform={transform!r}): give 'pandas' or 'polars', for frames of the library of "
            "X, or 'default'."
        )
    return str(transform)


def as_frame(estimator: Any, X: Any, values: Any, name: str) -> Any:
    """Return predictions as they are, or those of a data frame as a Series or a frame with its index.

    Parameters
    ----------
    estimator : GaussianMixture
        Whose ``set_output``, or else scikit-learn's config, says what is wanted. By default labels of a frame
        are a Series, and all else is an array.
    X : object
        What the user passed.
    values : ndarray or dask array of shape (n,) or (n, K)
        Its predictions.
    name : str
        That of an array of them, as in `COLUMNS`.

    Returns
    -------
    ndarray, dask array, Series or DataFrame
        Of the library of X; lazy ones of dask where X is a frame of dask.
    """
    own = getattr(estimator, "_sklearn_output_config", {}).get("transform")
    wanted = own or sklearn.get_config()["transform_output"]
    if own == "default" or (wanted == "default" and name != "labels"):
        return values
    library = type(X).__module__.partition(".")[0]
    frames = {"pandas": _in_pandas, "polars": _in_polars, "dask": _in_dask}
    is_frame = library in frames and hasattr(X, "columns")
    return frames[library](X, values, COLUMNS[name]) if is_frame else values


def _in_pandas(X: Any, values: Any, name: str) -> Any:
    import pandas as pd

    if values.ndim == 1:
        return pd.Series(values, index=X.index, name=name)
    return pd.DataFrame(values, index=X.index, columns=pd.RangeIndex(values.shape[1], name=COMPONENT))


def _in_polars(X: Any, values: Any, name: str) -> Any:
    import polars as pl

    if values.ndim == 1:
        return pl.Series(name, values)
    return pl.DataFrame(values, schema=[f"{COMPONENT}_{k}" for k in range(values.shape[1])])


def _in_dask(X: Any, values: Any, name: str) -> Any:
    import dask.dataframe as dd
    import pandas as pd

    columns = name if values.ndim == 1 else pd.RangeIndex(values.shape[1], name=COMPONENT)
    return dd.from_dask_array(values, columns=columns, index=X.index)
