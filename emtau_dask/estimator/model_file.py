"""A fitted model as a zarr group: arrays as arrays, the rest as JSON attributes; no pickle, no code."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import zarr
import zarr.errors
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from emtau_dask.em import FitHistory, IterationRecord
from emtau_dask.errors import (
    CheckpointError,
    CheckpointExistsError,
    EmtauError,
    InvalidDataError,
    PathTakenError,
    ShutdownError,
    StorageError,
    shutdown_named,
    warn_user,
)
from emtau_dask.estimator.model_schema import AUTO, ModelEntry, SettingsEntry, check_names, model_entry
from emtau_dask.io.files import writing_errors
from emtau_dask.io.formats import OWN_GROUPS, kind_of
from emtau_dask.io.objects import FORMAT as RUN_FORMAT
from emtau_dask.io.objects import ROOT_DOCUMENT, ObjectStore, ZarrStoreObjects, copy_new, object_store
from emtau_dask.io.output import published
from emtau_dask.io.remote import is_url, plain_path
from emtau_dask.io.zarr_format import own_group
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.mixture.numerics import AnyArray, read_only_copy
from emtau_dask.policies import ALGORITHMS, as_policy, checked_row_arrays, describe_policy, matching_policy

FORMAT, VERSION = "emtau-model", 2
ARRAYS = ("weights_", "means_", "covariances_", "precisions_cholesky_")
COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
WEIGHTS_TOLERANCE = 1e-6
"""The same as for initial weights."""
MOST_PASSES = 1000
"""So many times an iteration scores the rows at most: it measures a gap by tens of passes."""
NAMES = (*(name.rstrip("_") for name in ARRAYS), *(f"history/{column}" for column in COLUMNS))


def _digest(arrays: Mapping[str, AnyArray]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def save_model(estimator: Any, path: Any, *, overwrite: bool = False) -> None:
    """Write a fitted estimator; raises `InvalidDataError` where something is there that it may not replace.

    A local folder appears when it is complete. Elsewhere the root document, without which there is
    no model, is written last, and an error removes what was written before it. With ``overwrite`` a model is
    replaced, and nothing else; elsewhere than in a local folder it is removed first.
    """
    place = _local_path(path)
    if place is None:
        _upload(estimator, MemoryStore(path) if isinstance(path, dict) else path, overwrite)
        return
    replaceable = _holds_model if overwrite else None
    try:
        with writing_errors("the model", place):
            free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
            if not free and not (overwrite and _holds_model(place)):
                raise InvalidDataError(_taken(place, place))
            with published(place, replaceable=replaceable) as private:
                _write(estimator, zarr.create_group(str(private), zarr_format=3))
    except PathTakenError as error:
        raise InvalidDataError(_taken(place, place)) from error


def _holds_model(where: object) -> bool:
    """Return whether a model is at a path, a URL or in a store, of whatever version."""
    try:
        group = own_group(where)
    except InvalidDataError:
        return False
    return group is not None and group.attributes.get("format") == FORMAT


def _taken(where: object, name: object) -> str:
    if _holds_model(where):
        return f"{name} already holds a model; choose another path, or replace it: save(..., overwrite=True)."
    return f"{name} already holds something that is not a model; choose another path or remove it."


def _local_path(path: Any) -> Path | None:
    """Return the folder that a model is saved to; None for a URL or another store."""
    if isinstance(path, LocalStore):
        return Path(path.root)
    if isinstance(path, (str, Path)):
        plain = plain_path(str(path))
        return None if is_url(plain) else Path(plain)
    return None


def _write(estimator: Any, group: zarr.Group) -> None:
    arrays = {name.rstrip("_"): np.asarray(getattr(estimator, name)) for name in ARRAYS}
    for column in COLUMNS:
        arrays[f"history/{column}"] = np.array([getattr(record, column) for record in estimator.history_])
    for name, values in arrays.items():
        group.create_array(name, data=values, filters=None, compressors=ZstdCodec())
    names = getattr(estimator, "feature_names_in_", None)
    settings = {name: getattr(estimator, name) for name in SettingsEntry.model_fields}
    settings = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()
    }
    state = settings["random_state"]
    settings["random_state"] = int(state) if isinstance(state, Integral) else None
    automatic = isinstance(estimator.algorithm, str) and estimator.algorithm == AUTO
    policy: Any = None if automatic else as_policy(estimator.algorithm)
    algorithm: Any = {"name": AUTO, "params": {}} if automatic else None
    if type(policy) in ALGORITHMS.values():  # A user's own policy is not stored.
        policy_name, _, parameters = describe_policy(policy)
        algorithm = {"name": policy_name, "params": parameters}
    entry = model_entry(
        {
            "settings": settings | {"covariance_type": estimator._fitted_type},
            "algorithm": algorithm,
            "stop_reason": estimator.stop_reason_,
            "feature_names": None if names is None else [str(name) for name in names],
            "notes": list(estimator.history_.notes),
            "sha256": _digest(arrays),
        }
    )
    group.attrs.update({"format": FORMAT, "version": VERSION, **entry.model_dump()})


def _upload(estimator: Any, path: Any, overwrite: bool) -> None:
    """Write the model to memory, then copy it to a URL or a zarr store."""
    try:
        target = ZarrStoreObjects.opened(path) if isinstance(path, Store) else object_store(path)
        if not target.empty():
            if not (overwrite and _holds_model(path)):
                raise InvalidDataError(_taken(path, target.location))
            target.delete([ROOT_DOCUMENT])
            target.delete(target.list(""))
        write_model(estimator, target)
    except CheckpointExistsError as error:
        raise InvalidDataError(_taken(path, target.location)) from error
    except CheckpointError as error:
        raise StorageError(f"the model cannot be saved: {error}") from error


def write_model(estimator: Any, objects: ObjectStore) -> None:
    """Write a fitted estimator to an empty object store, its root document last: without it there is none.

    Raises
    ------
    CheckpointExistsError
        Another process writes there, or has written.
    CheckpointError
        The store failed; what was written is removed again.
    """
    made = MemoryStore()
    _write(estimator, zarr.create_group(made, zarr_format=3))
    copy_new(ZarrStoreObjects(made), objects)


def read_model(cls: Any, objects: ObjectStore) -> Any:
    """Read an estimator of class ``cls`` from an object store.

    Raises
    ------
    InvalidDataError
        There is none, or it is damaged.
    CheckpointError
        The store failed.
    """
    made = MemoryStore()
    if not objects.empty():
        copy_new(objects, ZarrStoreObjects(made))
    return load_model(cls, made)


def load_model(cls: Any, path: Any) -> Any:
    """Read an estimator of class ``cls``; raises `InvalidDataError` where there is none."""
    group = own_group(path)
    found = None if group is None else group.attributes.get("format")
    if group is None or found != FORMAT:
        raise InvalidDataError(_no_model(path, found))
    attributes = group.attributes
    if attributes.get("version") != VERSION:
        raise InvalidDataError(
            f"{path} holds format {attributes.get('format')!r} version {attributes.get('version')!r}; "
            f"this version reads {FORMAT!r} version {VERSION}. Save the model again with this version."
        )
    try:
        with shutdown_named():
            entry, arrays = model_entry(attributes), group.arrays(NAMES)
            if _digest(arrays) != entry.sha256:
                raise InvalidDataError("its arrays are not those that were saved")
            return _restored(cls, arrays, entry)
    except ShutdownError:
        raise
    except Exception as error:  # of zarr, a codec or a policy, whatever the damage causes
        reason = str(error).rstrip(".") if isinstance(error, EmtauError) else repr(error)
        raise InvalidDataError(
            f"the model in {path} is incomplete or damaged: {reason}. Save it again, or take another copy."
        ) from error


def _no_model(path: Any, found: Any) -> str:
    """Return what to say where a place holds no model; ``found`` is the format that its group states."""
    place = _local_path(path)
    if place is not None and not place.exists():
        return f"{path} does not exist. Give the path of a saved model."
    kind = OWN_GROUPS.get(str(found)) or (None if place is None else kind_of(str(place)))
    if kind == OWN_GROUPS[RUN_FORMAT]:
        return (
            f"{path} is {kind}, not a saved model. Go on with it: GaussianMixture.resume({str(path)!r}, X)."
        )
    if kind is not None:
        return f"{path} is {kind}, not a saved model. Give the path of one."
    return f"{path} holds no model: it is no zarr group that GaussianMixture.save wrote."


def _restored(cls: Any, arrays: Mapping[str, AnyArray], entry: ModelEntry) -> Any:
    _check_kinds(arrays)
    weights, means, covariances, factors = (read_only_copy(arrays[name.rstrip("_")]) for name in ARRAYS)
    settings = dict(entry.settings)
    parameters = MixtureParameters(settings["covariance_type"], weights, means, covariances, factors)
    _check_mixture(parameters)
    check_names(entry.feature_names, parameters.n_features)
    records = _records(arrays)
    estimator = cls(len(weights), **settings)
    if entry.algorithm is None:
        warn_user(
            "the model was fitted with a policy of the user's own, which is not stored; set algorithm "
            "before fitting it again."
        )
    elif entry.algorithm.name != AUTO:
        name = entry.algorithm.name
        estimator.algorithm = matching_policy(None, name, name, entry.algorithm.params)
        checked_row_arrays(estimator.algorithm, len(weights), estimator.max_iter)
    estimator._publish(parameters, FitHistory(records, tuple(entry.notes)), entry.stop_reason)
    estimator.n_features_in_ = parameters.n_features
    if entry.feature_names is not None:
        estimator.feature_names_in_ = np.asarray(entry.feature_names, dtype=object)
    return estimator


def _check_kinds(arrays: Mapping[str, AnyArray]) -> None:
    """Raise `InvalidDataError` unless arrays have the dtypes of what they hold, and columns one length."""
    length = arrays[f"history/{COLUMNS[0]}"].size
    for name, array in arrays.items():
        column = name.rpartition("/")[2]
        kind = np.dtype(get_type_hints(IterationRecord).get(column, float))
        if array.dtype.kind != kind.kind and array.size:  # Of no iterations all columns are of float64.
            raise InvalidDataError(f"{name} is of {array.dtype}; it must be of {kind}")
        if column != name and array.shape != (length,):
            raise InvalidDataError(f"{name} has the shape {array.shape}; it must be {(length,)}")
    if arrays["means"].ndim != 2:
        raise InvalidDataError(f"means has {arrays['means'].ndim} axes; it must have 2")


def _records(arrays: Mapping[str, AnyArray]) -> tuple[IterationRecord, ...]:
    """Return the iterations; raises `InvalidDataError` where one is impossible."""
    columns = [arrays[f"history/{name}"].tolist() for name in COLUMNS]
    records = tuple(IterationRecord(*values) for values in zip(*columns, strict=True))
    for number, record in enumerate(records, start=1):
        counts = (record.chunks_processed, record.chunks_skipped, record.bytes_read, record.seconds)
        rows_possible = 0 <= record.active_rows <= MOST_PASSES * record.rows and record.rows > 0
        numbers = math.isfinite(record.lower_bound + record.seconds) and not math.isinf(record.gap)
        if not (record.iteration == number and rows_possible and numbers and min(counts) >= 0):
            raise InvalidDataError(f"its history has the impossible iteration {record}")
    return records


def _check_mixture(parameters: MixtureParameters) -> None:
    """Raise `InvalidDataError` unless rows can be scored with the parameters."""
    derived = {
        "weights": parameters.weights,
        "means": parameters.means,
        "covariances": parameters.covariances,
        "precisions": parameters.structure.precisions(parameters.precisions_cholesky),
        "logarithms of weights and determinants": parameters.log_scales,
    }
    for name, values in derived.items():
        if not np.isfinite(values).all():
            raise InvalidDataError(f"its {name} are not finite")
    total = float(parameters.weights.sum())
    if abs(total - 1.0) > WEIGHTS_TOLERANCE:
        raise InvalidDataError(f"its weights sum to {total:.9g}, which must be 1")
