"""From the `data` section of a run config to open sources; a dataset is made where it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emtau_dask.config import DataSection, MnistOptions, RunConfig
from emtau_dask.em import FitObserver
from emtau_dask.errors import ConfigError, InvalidDataError
from emtau_dask.io.remote import is_url, plain_path, suffix_of
from emtau_dask.io.sources import (
    Place,
    Source,
    as_source,
    column_names,
    has_columns,
    open_column,
    open_source,
    paths_at,
    place_text,
)

PATH_SUFFIXES = (".zarr", ".npy", ".parquet", ".pq", ".csv", ".tsv")


@dataclass(frozen=True)
class Inputs:
    """What a run reads: rows (N, d), and their weights (N,) and known labels (N,) where given."""

    rows: Source
    weights: Source | None
    labels: Source | None


def open_inputs(config: RunConfig, *, overwrite: bool, observer: FitObserver) -> Inputs:
    """Make the dataset that a run names, if any, and open the data; reads metadata alone.

    ``overwrite`` lets it replace a dataset that was made with other options.

    Raises
    ------
    ConfigError
        The format of the data has no such names as those of weights or labels.
    InvalidDataError
        Something does not exist, cannot be read, or has another number of rows.
    """
    data = config.data
    given = data_path(config)
    _provide_dataset(data, given, overwrite, observer)
    path = paths_at(given)
    weights = _open_column(path, "data.weights", data.weights)
    labels = _open_column(path, "data.labels", data.labels)
    stored = open_rows(path, array=data.array, columns=_feature_columns(data, path))
    rows = as_source(stored, ndim=2, what=place_text(path))
    for key, column in (("data.weights", weights), ("data.labels", labels)):
        if column is not None and column.shape != rows.shape[:1]:
            raise InvalidDataError(
                f"{key} has shape {column.shape}, but {place_text(path)} has {rows.shape[0]:,} rows; "
                "give one value for each row"
            )
    return Inputs(rows, weights, labels)


def open_rows(path: Place, *, array: str | None, columns: Sequence[str] | None) -> Source:
    """Open stored rows: ``array`` is a member of a zarr group, ``columns`` are those of parquet or CSV.

    Raises
    ------
    ConfigError
        ``array`` or ``columns`` is given for a format that has none.
    InvalidDataError
        The path or URL holds nothing that can be read.
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
    return open_source(path, array=array, columns=columns)


def data_path(config: RunConfig) -> Place:
    """Return where a run's rows are, or where the dataset that it names is made."""
    path = config.data.path
    if path is not None and not isinstance(path, str):
        return path
    return plain_path(path or str(config.output.place(f"{config.data.dataset}.zarr")))


def _is_npy(path: Place) -> bool:
    return any(suffix_of(each) == ".npy" for each in paths_at(path))


def _provide_dataset(data: DataSection, path: Place, overwrite: bool, observer: FitObserver) -> None:
    options = data.dataset_options
    if options is None or not isinstance(path, str):
        return
    if is_url(path):
        raise ConfigError(
            f"data.path = {path!r} is a URL, but the dataset {options.dataset} is made in local folders "
            "only; give a local data.path, or leave out data.dataset to read what is there"
        )
    from emtau_dask.datasets import holds_dataset, make_dataset

    place = Path(path)
    if place.exists() and holds_dataset(options, place):
        return
    if place.exists() and not overwrite:
        raise InvalidDataError(
            f"{path} is not the dataset {options.dataset} with these data.dataset_options; "
            "use --overwrite to make it anew, or another data.path"
        )
    if isinstance(options, MnistOptions) and options.source is None:
        raise InvalidDataError(
            f"{path} does not hold the dataset; make it with: emtau dataset mnist {path} --source FILE.npz "
            "(or without --source, which downloads MNIST)"
        )
    make_dataset(options, place, overwrite=overwrite, observer=observer)


def _open_column(path: Place, key: str, name: str | None) -> Source | None:
    if name is None:
        return None
    if is_url(name) or "/" in name or name.endswith(PATH_SUFFIXES):
        return open_column(name, None) if has_columns(name) else open_source(name)
    if has_columns(path):
        return open_column(path, name)
    if _is_npy(path):
        raise ConfigError(
            f"{key} = {name!r} is a name, but {place_text(path)} has no names; give the path of a file"
        )
    return open_source(path, array=name)


def _feature_columns(data: DataSection, path: Place) -> tuple[str, ...] | None:
    """Return the columns of parquet or CSV that are features: all but those of weights and labels."""
    others = {data.weights, data.labels} - {None}
    if data.columns is not None or not others or not has_columns(path):
        return data.columns
    return tuple(name for name in column_names(path) if name not in others)
