"""Rows, weights, responsibilities, seeds and data frames as users pass them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, validate_data

from emtau_dask.data.csv import ReadObserver
from emtau_dask.data.cube_files import cube_at
from emtau_dask.data.cubes import Cube, cube_of, is_labelled
from emtau_dask.data.dask_arrays import GraphSource
from emtau_dask.data.opening import as_source, columns_of_fit, is_lazy, open_source, unlabelled
from emtau_dask.data.source import RangeSource, Source, check_dtype, check_shape
from emtau_dask.data.zarr_arrays import group_source
from emtau_dask.em.fit import FitSources
from emtau_dask.em.problem import check_counts
from emtau_dask.em.starts import check_responsibilities_shape
from emtau_dask.errors import ConfigError, InvalidDataError, short
from emtau_dask.estimator.dtypes import check_names_differ, check_real_numbers, errors_named
from emtau_dask.estimator.frames import with_columns
from emtau_dask.execution.workers import resident, shared_source
from emtau_dask.settings import Settings
from emtau_dask.storage.locations import paths_at


class FeatureChoice(NamedTuple):
    """Which features a user chose: ``columns`` of tables, ``features`` of xarray data."""

    columns: Any = None
    features: Any = None


BY_DEFAULT = FeatureChoice()


def opened_data(
    data: Any,
    chosen: FeatureChoice,
    fitted: Sequence[str] | None,
    observer: ReadObserver | None = None,
    fitted_array: str | None = None,
) -> Any:
    """Return the rows at a path or a list of paths as a source, and data of xarray as a `Cube`.

    Other data are returned with the chosen columns.

    Parameters
    ----------
    data : str, Path, a list of these, or anything else that users pass as X
    chosen : FeatureChoice
        Its columns are those of parquet, CSV or a data frame.
    fitted : sequence of str or None
        The names of the features in the fit, which are the columns by default.
    observer : ReadObserver, optional
        Is notified of how much of a CSV table has been read.
    fitted_array : str, optional
        The variable of a cube that had these features.

    Raises
    ------
    InvalidDataError
        The rows cannot be read, or have no such columns.
    InvalidDtypeError
        The values are not real numbers.
    """
    columns: Sequence[str] | None = None
    if chosen.columns is not None:
        columns = _checked_names(chosen.columns, "columns")
    if is_labelled(data) and columns is None:
        return cube_of(data, chosen.features, fitted) or data
    paths = _paths(data)
    features = chosen.features
    if features is not None and (paths is None or columns is not None):
        raise InvalidDataError(
            f"features = {short(features)} names a dimension or variables of xarray data, but X is of "
            f"the type {type(data).__name__}. Remove features, or give a DataArray, a Dataset or the path of "
            "netCDF or a zarr group, without columns."
        )
    if paths is not None:
        if features is not None:
            features = _checked_names([features] if isinstance(features, str) else features, "features")
        if columns is None and (cube := cube_at(paths, features, None, fitted, fitted_array)) is not None:
            return cube
        columns = columns_of_fit(paths, fitted) if columns is None else columns
        return open_source(paths, columns=columns, observer=observer)
    return data if columns is None else with_columns(data, columns)


def _paths(data: Any) -> tuple[str, ...] | None:
    """Return the paths of a path, a pattern or a list of these; None for anything else."""
    if isinstance(data, (str, Path)):
        return paths_at(str(data))
    if isinstance(data, (list, tuple)) and data and all(isinstance(each, (str, Path)) for each in data):
        return paths_at([str(each) for each in data])
    return None


def _checked_names(given: Any, what: str) -> list[str]:
    in_order = np.iterable(given) and not isinstance(given, (str, set, frozenset))
    names = list(given) if in_order else []
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidDataError(
            f"{what} = {short(given)} must be a list of one or more different names, such as ['x', 'y']."
        )
    return [str(name) for name in names]


def _opened(data: Any) -> Any:
    """Open a zarr group, a cube or a dask dataframe; return anything else as it is.

    Raises `InvalidDtypeError` if a column of a dataframe does not hold real numbers.
    """
    if isinstance(data, zarr.Group):
        return group_source(data, None, str(data.store_path))
    if isinstance(data, Cube):
        return data.rows
    if not hasattr(data, "to_dask_array"):
        return data
    check_real_numbers(data, "X")
    dtypes = list(data.dtypes) if data.ndim == 2 else []
    if not all(isinstance(dtype, np.dtype) for dtype in dtypes):
        data = data.astype(np.float64)  # pandas would convert its extension types to objects.
    elif {dtype.kind == "b" for dtype in dtypes} == {True, False}:
        data = data.astype(np.result_type(*dtypes))  # The same for booleans together with numbers.
    return data.to_dask_array()


def _feature_names(data: Any, opened: Any) -> list[str] | None:
    if isinstance(opened, RangeSource):
        return None if opened.names is None else list(opened.names)
    names = list(data.names) if isinstance(data, Cube) else list(map(str, getattr(data, "columns", ())))
    check_names_differ(names)
    return names or None


def _refuse_kinds(data: Any, what: str) -> None:
    """Refuse iterators, masked arrays, and what scikit-learn would silently convert to numbers."""
    if isinstance(data, Iterator):
        raise InvalidDataError(
            f"{what} is a {type(data).__name__}, whose rows can be read only once, but a fit reads them many "
            f"times. Give numpy.array(list({what})), or, if the rows do not fit in memory, a dask array or "
            "the path of stored rows."
        )
    if hasattr(data, "obsm"):
        raise InvalidDataError(
            f"{what} is an AnnData, which holds several arrays. Give one, such as {what}.obsm['X_pca']."
        )
    if isinstance(data, np.ma.MaskedArray):
        raise InvalidDataError(f"{what} is a masked array; fill it, for example with .filled(numpy.nan).")
    check_real_numbers(data, what)


def checked_array(estimator: Any, data: Any, *, reset: bool) -> Any:
    """Return array-like ``data`` as an array of real numbers, rows x features, checked by scikit-learn.

    An array of numbers is returned as it is, without a copy; its blocks are converted when they are read.

    Raises
    ------
    InvalidDataError, InvalidDtypeError
        With scikit-learn's message.
    """
    _refuse_kinds(data, "X")
    is_array = type(data) in (np.ndarray, np.memmap) and data.ndim == 2
    is_numeric = is_array and data.shape[1] and data.dtype.kind in "fiub"
    to_check, dtypes = data[:1] if is_numeric else data, [np.float64, np.float32]
    with errors_named("X"):
        checked = validate_data(estimator, to_check, reset=reset, dtype=dtypes, ensure_all_finite=False)
    return data if is_numeric else checked


def checked_lazy(estimator: Any, data: Any) -> Any:
    """Return lazy ``data``; None if it is in memory.

    Raises
    ------
    InvalidDataError, InvalidDtypeError
        The data has other features than the fit, or is not a table of numbers.
    """
    given = unlabelled(data)
    data = _opened(given)
    if not is_lazy(data):
        return None
    names, fitted = _feature_names(given, data), getattr(estimator, "feature_names_in_", None)
    if names is not None and fitted is not None and names != list(fitted):
        remedy = "Give the same ones in the same order."
        if isinstance(given, Cube):
            remedy = given.selecting(list(fitted))
        raise InvalidDataError(f"X has the features {names}; the fit had {list(fitted)}. {remedy}")
    check_shape(data.shape, 2, "X")
    check_dtype(data.dtype, "X")
    if data.shape[1] != estimator.n_features_in_ and not np.isnan(data.shape[1]):
        raise InvalidDataError(
            f"X has {data.shape[1]} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input."
        )
    return data


def fit_source(estimator: Any, data: Any) -> Source:
    """Return the rows to fit as a source, and set ``n_features_in_`` and, if known, ``feature_names_in_``.

    Raises `InvalidDataError` and `InvalidDtypeError`.
    """
    given = unlabelled(data)
    estimator._array = given.array if isinstance(given, Cube) else None
    data = _opened(given)
    if not is_lazy(data):
        return as_source(checked_array(estimator, data, reset=True), ndim=2, what="X")
    source = as_source(data, ndim=2, what="X")
    if hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_
    names = _feature_names(given, data)
    if names is not None:
        estimator.feature_names_in_ = np.asarray(names, dtype=object)
    estimator.n_features_in_ = source.shape[1]
    return source


def row_values_source(values: Any, *, ndim: int, what: str) -> Source | None:
    """Return weights (ndim 1) or responsibilities (ndim 2) as a source; None stays None.

    Raises `InvalidDataError` and `InvalidDtypeError`.
    """
    if values is None:
        return None
    values = unlabelled(values)
    if not is_lazy(values):
        _refuse_kinds(values, what)
        with errors_named(what):
            values = check_array(
                values,
                dtype=[np.float64, np.float32],
                ensure_2d=False,
                allow_nd=True,
                ensure_all_finite=False,
                ensure_min_samples=0,
            )
    return as_source(values, ndim=ndim, what=what)


class Seeds:
    """A stream of seeds from None, an integer, a RandomState or a Generator.

    Raises
    ------
    ConfigError
        ``random_state`` is none of these.
    """

    def __init__(self, random_state: Any) -> None:
        is_generator = isinstance(random_state, np.random.Generator)
        try:
            self._state = random_state if is_generator else check_random_state(random_state)
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"random_state is {short(random_state)}; it must be None, an integer from 0 to 2**32 - 1, a "
                "RandomState or a Generator."
            ) from error

    def draw(self) -> int:
        """Return the next seed, from 0 to 2**31 - 2."""
        pick = getattr(self._state, "integers", None) or self._state.randint
        return int(pick(2**31 - 1))


def settings_of(estimator: Any) -> Settings:
    """Return the settings of an estimator; raises `ConfigError` for the first that is impossible."""
    Seeds(estimator.random_state)
    return Settings.of(estimator).checked()


@contextmanager
def opened_sources(
    client: Any, estimator: Any, X: Any, sample_weight: Any, responsibilities_init: Any
) -> Iterator[FitSources]:
    """Open the sources of a fit. Workers of a client keep arrays in memory until the block ends."""
    rows = fit_source(estimator, X)
    if isinstance(X, Cube) and not isinstance(sample_weight, (RangeSource, GraphSource, type(None))):
        sample_weight = X.row_values(sample_weight, "sample_weight")
    if isinstance(X, Cube) and len(X.dims) > 1 and responsibilities_init is not None:
        raise InvalidDataError(
            "responsibilities_init needs an order of the rows, but the rows of X are in several dimensions. "
            "Give means_init, weights_init and precisions_init instead."
        )
    weights = row_values_source(sample_weight, ndim=1, what="sample_weight")
    responsibilities = row_values_source(responsibilities_init, ndim=2, what="responsibilities_init")
    check_responsibilities_shape(responsibilities, rows, estimator.n_components)
    check_counts(rows, weights, estimator.n_components)

    def aligned(values: Source | None, name: str) -> Source | None:
        """Return values in the chunks of the rows, shared with workers as the rows are; None stays None."""
        return None if values is None else shared_source(client, values.aligned(rows.chunk_rows), name)

    with (
        resident(client, shared_source(client, rows, "X")) as resident_rows,
        resident(client, aligned(weights, "sample_weight")) as resident_weights,
        resident(client, aligned(responsibilities, "responsibilities_init")) as resident_responsibilities,
    ):
        yield FitSources(resident_rows, resident_weights, resident_responsibilities)
