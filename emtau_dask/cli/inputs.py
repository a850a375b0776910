"""The rows that a config names, opened, with their weights and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from emtau_dask.cli.config import DataSection, RunConfig
from emtau_dask.data.cube_files import cube_at, flags_of_fit, open_dataset
from emtau_dask.data.cubes import Cube
from emtau_dask.data.opening import as_source, column_names, has_columns, open_column, open_source
from emtau_dask.data.source import RangeSource, Source
from emtau_dask.data.zarr_arrays import group_source
from emtau_dask.datasets import holds_dataset, make_dataset, outlined_dataset
from emtau_dask.em.history import FitObserver
from emtau_dask.errors import ConfigError, InvalidDataError, counted, one_line
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.storage.locations import ENDINGS_OF_ROWS, NPY, Place, paths_at, place_text
from emtau_dask.storage.urls import is_url, suffix_of

MAX_START_BYTES = 2**30
"""Maximum size of starting responsibilities (bytes)."""
MAX_NAMES = 12
"""Maximum number of features that are named in a text."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: rows (N, d), and their weights (N,) and known labels (N,) if given.

    If ``outlined``, they have the shapes of a dataset that does not exist yet. ``cube`` holds the dimensions
    and coordinates of the rows if they come from a cube.
    """

    rows: Source
    weights: Source | None
    labels: Source | None
    outlined: bool
    cube: Cube | None = None

    @property
    def data(self) -> Source | Cube:
        """The data to fit: the cube if there is one, else the rows."""
        return self.rows if self.cube is None else self.cube


def open_inputs(config: RunConfig, *, overwrite: bool, observer: FitObserver) -> Inputs:
    """Create the dataset that a run names, if any, and open the data; only CSV is read.

    ``overwrite`` lets it replace a dataset that was created with other options. Raises `InvalidDataError` for
    data that do not exist, cannot be read or have another number of rows, `ConfigError` for names of columns
    or arrays in a format without them.
    """
    place = config.place
    missing = _missing_dataset(config.data, place, overwrite)
    if missing is not None:
        name, options, path = missing
        make_dataset(name, path, overwrite=overwrite, observer=observer, **options)
    return _opened(config.data, paths_at(place), None, observer)


def data_text(config: RunConfig, inputs: Inputs) -> str:
    """Return a text for people on the data of a fit: place, chosen part, shape and features."""
    where, names, rows = place_text(config.place), None, inputs.rows
    if inputs.cube is not None:
        where, names = f"{where}, a cube of {' × '.join(map(str, inputs.cube.dims))}", inputs.cube.names
    elif isinstance(rows, RangeSource):
        where, names = rows.chosen or where, rows.names
    features = counted(rows.shape[1], "feature")
    if names is not None:
        more = ", …" if len(names) > MAX_NAMES else ""
        features += f": {', '.join(map(one_line, names[:MAX_NAMES]))}{more}"
    return f"{where}; {counted(rows.shape[0], 'row')} of {features}"


def planned_inputs(config: RunConfig, *, overwrite: bool) -> Inputs:
    """Open the data as `open_inputs` does, but create no dataset; return its outline instead.

    Raises as `open_inputs`, and `InvalidDataError` for a dataset whose number of rows is unknown before.
    """
    place = config.place
    missing = _missing_dataset(config.data, place, overwrite)
    if missing is None:
        return _opened(config.data, paths_at(place), None)
    name, options, path = missing
    if name == "mnist":
        raise InvalidDataError(
            f"{path} does not hold the dataset, and its number of rows is not known before it exists; create "
            f"it with: emtau dataset mnist {path} --source {options['source']}"
        )
    return _opened(config.data, (str(path),), outlined_dataset(name, options))


def _opened(
    data: DataSection, paths: Sequence[str], outline: zarr.Group | None, observer: FitObserver | None = None
) -> Inputs:
    """Open the inputs of a config; ``outline`` replaces a group that does not exist at the path yet."""
    where, cube = place_text(paths), None
    if outline is None:
        cube = cube_at(paths, data.features, data.array)
    weights = _open_column(paths, "data.weights", data.weights, outline, observer, cube)
    labels = _open_column(paths, "data.labels", data.labels, outline, observer, cube)
    stored: Any
    if cube is not None:
        stored = cube.rows
    elif outline is None:
        columns = _feature_columns(data, paths)
        stored = open_rows(paths, array=data.array, columns=columns, observer=observer)
    else:
        stored = group_source(outline, data.array, where)
    rows = as_source(stored, ndim=2, what=where)
    for key, column in (("data.weights", weights), ("data.labels", labels)):
        if column is not None and column.shape != rows.shape[:1]:
            raise InvalidDataError(
                f"{key} has shape {column.shape}, but {where} has {counted(rows.shape[0], 'row')}; "
                "give one value for each row"
            )
    return Inputs(rows, weights, labels, outline is not None, cube)


def open_rows_or_cube(
    place: str,
    *,
    array: str | None,
    columns: Sequence[str] | None,
    fitted: GaussianMixture,
    observer: FitObserver,
    features: Sequence[str] | None = None,
) -> tuple[Source, Cube | None]:
    """Open rows for a fitted mixture, and their cube if they have one; ``features`` are those of a cube.

    Raises as `open_rows` and `cube_at`, and `InvalidDataError` for other features than those of the fit.
    """
    names = getattr(fitted, "feature_names_in_", None)
    try:
        cube = cube_at(place, features, array, names, fitted._array)
        if cube is None or columns is not None:
            rows = open_rows(place, array=array, columns=columns, observer=observer)
            if rows.shape[1] != fitted.n_features_in_:
                raise InvalidDataError(
                    f"{place_text(place)} has {counted(rows.shape[1], 'feature')}; the fit had "
                    f"{fitted.n_features_in_}. Give rows with the features of the fit."
                )
            return rows, None
    except InvalidDataError as error:
        flags = flags_of_fit(place, names) if features is None and array is None else ""
        if not flags:
            raise
        raise InvalidDataError(f"{error} The features of the fit are read with {flags}.") from error
    if names is not None and cube.names != tuple(names):
        raise InvalidDataError(
            f"{place} has the features {list(cube.names)}; the fit had {list(names)}. "
            "Give the same ones in the same order."
        )
    return as_source(cube.rows, ndim=2, what=place), cube


def open_rows(
    path: Place, *, array: str | None, columns: Sequence[str] | None, observer: FitObserver | None = None
) -> Source:
    """Open stored rows: ``array`` is a member of a zarr group, ``columns`` are those of parquet or CSV.

    Raises `ConfigError` if one is given for a format without them, and as `open_source`.
    """
    named = has_columns(path)
    if array is not None and (named or _is_npy(path)):
        raise ConfigError(
            f"array {array!r} (data.array in a config) is a member of a zarr group, but "
            f"{place_text(path)} is none; leave it out"
        )
    if columns is not None and not named:
        raise ConfigError(
            f"columns {', '.join(columns)} (data.columns in a config) are those of parquet or CSV, "
            f"but {place_text(path)} is none; leave them out"
        )
    return open_source(path, array=array, columns=columns, observer=observer)


def _is_npy(path: Place) -> bool:
    return any(suffix_of(each) in NPY.endings for each in paths_at(path))


def _missing_dataset(
    data: DataSection, place: Place, overwrite: bool
) -> tuple[str, dict[str, Any], Path] | None:
    """Return name, options and path of the dataset to create; None if there is none.

    Raises `ConfigError` and `InvalidDataError` if it cannot be created, or something else is there.
    """
    name, options = data.dataset, {} if data.dataset_options is None else data.dataset_options.model_dump()
    if name is None or not isinstance(place, str):
        return None
    if is_url(place):
        raise ConfigError(
            f"data.path = {place!r} is a URL, but the dataset {name} can be created in local folders "
            "only; give a local data.path, or remove data.dataset to read the data at the URL"
        )
    path = Path(place)
    if path.exists() and holds_dataset(name, options, path):
        return None
    if path.exists() and not overwrite:
        raise InvalidDataError(
            f"{path} is not the dataset {name} with these data.dataset_options; "
            "use --overwrite to replace it, or another data.path"
        )
    if name == "mnist" and options["source"] is None:
        raise InvalidDataError(
            f"{path} does not hold the dataset; create it with: emtau dataset mnist {path} --source FILE.npz "
            "(or without --source, which downloads MNIST)"
        )
    return name, options, path


def _open_column(
    path: Place,
    key: str,
    name: str | None,
    outline: zarr.Group | None,
    observer: FitObserver | None,
    cube: Cube | None,
) -> Source | None:
    if name is None:
        return None
    if cube is not None:
        data = open_dataset(paths_at(path)[0])
        if name not in data.variables:
            raise ConfigError(
                f"{key} = {name!r} is not a variable of {place_text(path)}, which is a cube; name a variable"
            )
        return as_source(cube.row_values(data[name], key), ndim=1, what=key)
    if is_url(name) or "/" in name or name.endswith(ENDINGS_OF_ROWS):
        return open_column(name, None, observer) if has_columns(name) else open_source(name)
    if outline is not None:
        return group_source(outline, name, place_text(path))
    if has_columns(path):
        return open_column(path, name, observer)
    if _is_npy(path):
        raise ConfigError(
            f"{key} = {name!r} is a name, but {place_text(path)} has no names; give the path of a file"
        )
    return open_source(path, array=name)


def _feature_columns(data: DataSection, path: Place) -> tuple[str, ...] | None:
    """Return the columns of parquet or CSV that are features: all except those of weights and labels."""
    others = {data.weights, data.labels} - {None}
    if data.columns is not None or not others or not has_columns(path):
        return data.columns
    return tuple(name for name in column_names(path) if name not in others)


def starting_responsibilities(config: RunConfig, rows: int) -> NDArray[np.float64] | None:
    """Return the responsibilities that `model.init` starts from, shape (rows, K), or None.

    Raises `ConfigError` if they would take more than 1 GiB.
    """
    if config.model.init is None:
        return None
    k, seed = config.model.n_components, config.model.init.dirichlet_seed
    if rows * k * 8 > MAX_START_BYTES:
        raise ConfigError(
            f"model.init.dirichlet_seed = {seed} needs {rows:,} × {k} responsibilities in memory, more than "
            f"{MAX_START_BYTES // 2**30} GiB; use model.init_params for data of this size"
        )
    return np.random.default_rng(seed).dirichlet(np.ones(k), rows)
