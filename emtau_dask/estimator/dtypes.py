"""Checks that arrays, lists and data frames in memory hold real numbers; errors name the column."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import scipy.sparse

from emtau_dask.data.source import check_dtype
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, cause_of, short

NOT_NUMBERS = "USMmV"
"""Kinds of dtypes that NumPy would convert to meaningless numbers: text, dates, records."""


@contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Raise errors of NumPy and scikit-learn as errors of the package that begin with ``what``."""
    try:
        yield
    except TypeError as error:
        raise InvalidDtypeError(f"{what}: {error}") from cause_of(error)
    except ValueError as error:
        raise InvalidDataError(f"{what}: {error}") from cause_of(error)
    except OverflowError as error:
        raise InvalidDataError(f"{what}: {error}. Remove or scale such values.") from error


def check_real_numbers(data: Any, what: str) -> None:
    """Raise unless an array, a list, a Series or a data frame holds real numbers; ``what`` is its name.

    Frames are those that narwhals supports, and those of dask, of which only dtypes are checked. In columns
    of objects every value is checked.

    Raises
    ------
    InvalidDtypeError
        A column holds something else. Its name and the first such value are in the message.
    InvalidDataError
        The frame has not been computed yet, or repeats names of columns.
    """
    if scipy.sparse.issparse(data):
        _check_array(data, what)
        return
    if isinstance(data, (np.ndarray, list, tuple)):
        with errors_named(what):
            array = np.asarray(data)
        _check_array(array, what)
        return
    import narwhals as nw  # Only frames need it.

    if hasattr(data, "to_dask_array"):
        data = data._meta
    pandas = sys.modules.get("pandas")  # Data of it exist only if it has been imported.
    if pandas is not None and isinstance(data, (pandas.Index, pandas.api.extensions.ExtensionArray)):
        data = pandas.Series(data)
    names = getattr(data, "column_names", getattr(data, "columns", ()))
    check_names_differ(map(str, names) if np.iterable(names) else ())
    frame = nw.from_native(data, pass_through=True, allow_series=True)
    if isinstance(frame, nw.LazyFrame):
        package = type(data).__module__.partition(".")[0]
        file = ", such as sink_parquet(path) writes" if package == "polars" else ""
        raise InvalidDataError(
            f"{what} is a {package} {type(data).__name__}, which has not been computed. Give "
            f"{what}.collect(), or, if it does not fit in memory, the path of a parquet file of it{file}."
        )
    if isinstance(frame, nw.DataFrame):
        if not frame.columns:
            raise InvalidDataError(f"{what} has no columns; give a data frame with at least one feature.")
        for column in frame.iter_columns():
            _check_column(column, f"column {column.name!r} of {what}", f"{what}[{column.name!r}]")
    elif isinstance(frame, nw.Series):
        _check_column(frame, what, what)
    else:
        with errors_named(what):
            array = np.asarray(data)
        _check_array(array, what)


def check_names_differ(names: Iterable[str]) -> None:
    """Raise `InvalidDataError` for names of columns that repeat."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidDataError(f"X has several columns {short(min(twice))}; give each a different name.")


def _check_array(array: Any, what: str) -> None:
    if array.dtype.kind == "c":
        raise InvalidDtypeError(
            f"{what}: Complex data not supported (dtype {array.dtype}). Give {what}.real, or the real and "
            "the imaginary parts as separate features."
        )
    if array.dtype.kind in NOT_NUMBERS:
        check_dtype(array.dtype, what)
    if array.dtype.kind != "O" or not array.ndim:
        return
    for place, value in np.ndenumerate(np.asarray(array)):
        if not _is_number(value):
            where = f"row {place[0]}" + (f", column {place[1]}" if len(place) > 1 else "")
            raise InvalidDtypeError(
                f"{what} has {short(value)} in {where}: argument must be no string, date or "
                "object, but a real number. Remove or convert it."
            )


def _check_column(column: Any, what: str, code: str) -> None:
    import narwhals as nw

    dtype = column.dtype
    if dtype.is_numeric() or dtype == nw.Boolean:
        return
    fits = _is_number if dtype in (nw.Object, nw.Unknown) else _is_missing
    wrong = next(((row, value) for row, value in enumerate(column) if not fits(value)), None)
    if wrong is None and len(column):
        return
    example = "" if wrong is None else f" (row {wrong[0]}: {short(wrong[1])})"
    if dtype == nw.Duration:
        remedy = f"Convert it, in pandas and polars with {code}.dt.total_seconds()."
    elif dtype.is_temporal():
        seconds = f"({code} - {code}.min()).dt.total_seconds()"
        remedy = f"Remove it, or convert it, in pandas and polars with {seconds}."
    else:
        remedy = "Remove it, or convert it to numbers."
    kind = str(dtype).partition("(")[0]
    raise InvalidDtypeError(
        f"{what} holds {kind}{example}, but a mixture is fitted to real numbers. {remedy}"
    )


def _is_number(value: Any) -> bool:
    number = isinstance(value, (Real, Decimal)) and not isinstance(value, np.timedelta64)
    return number or _is_missing(value)


def _is_missing(value: Any) -> bool:
    """Return whether a value is missing: None, NaN, or pandas' NA."""
    return (
        value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))
    )
