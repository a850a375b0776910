"""A fitted model as a zarr group: four arrays, and the rest in attributes by the codec of checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr.errors
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from emtau_dask.checkpoint.codec import FormatError
from emtau_dask.checkpoint.state import CODEC
from emtau_dask.em.history import FitHistory, IterationRecord
from emtau_dask.em.state import StopReason
from emtau_dask.errors import (
    CheckpointError,
    CheckpointExistsError,
    EmtauError,
    InvalidDataError,
    PathTakenError,
    ShutdownError,
    StorageError,
    short,
    shutdown_named,
    warn_user,
)
from emtau_dask.mixture.linalg import AnyArray, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.policy import checked_row_arrays
from emtau_dask.policies.registry import ALGORITHMS, as_policy
from emtau_dask.settings import AUTO, Settings
from emtau_dask.storage.commits import FORMAT as RUN_FORMAT
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.locations import OWN_GROUPS, kind_of
from emtau_dask.storage.objects import ROOT_DOCUMENT, canonical, copy_new
from emtau_dask.storage.publishing import published
from emtau_dask.storage.stores import ZarrStoreObjects, object_store
from emtau_dask.storage.urls import is_url, plain_path
from emtau_dask.storage.zarr_check import own_group

FORMAT, VERSION = "emtau-model", 4
ARRAYS = ("weights", "means", "covariances", "precisions_cholesky")
WEIGHTS_TOLERANCE = 1e-6
"""Maximum difference of the sum of weights from 1, the same as for initial weights."""
MAX_PASSES = 1000
"""Maximum number of passes of an iteration; one that measures the gap needs some tens."""


@dataclass(frozen=True)
class ModelEntry:
    """All of a model except its arrays. ``settings.algorithm`` is None for a policy of the user's own.

    ``array`` is the variable of a cube that has the features along a dimension; models may lack it.
    """

    settings: Settings
    stop_reason: StopReason
    feature_names: tuple[str, ...] | None
    array: str | None
    notes: tuple[str, ...]
    history: tuple[IterationRecord, ...]
    sha256: str


ENTRY = CODEC.record(ModelEntry)
ENTRY_NAMES = tuple(each.name for each in fields(ModelEntry))


def _check_entry(entry: ModelEntry) -> None:
    """Raise `FormatError` for a history that no fit can have."""
    for number, record in enumerate(entry.history, start=1):
        if record.iteration != number or not 0 < record.rows * MAX_PASSES >= record.active_rows:
            raise FormatError(f"has the impossible iteration {record}", ("history",))


def check_names(names: Sequence[str] | None, n_features: int) -> None:
    """Raise `InvalidDataError` unless there are no names of features, or a different one for each."""
    if names is not None and (len(names) != n_features or len(set(names)) < n_features):
        raise InvalidDataError(
            f"feature_names is {short(list(names))}: it must be a list of {n_features} different names"
        )


def _digest(arrays: Mapping[str, AnyArray], history: Any) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values, sorted by name, then of the history."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    digest.update(canonical(history))
    return digest.hexdigest()


def save_model(estimator: Any, path: Any, *, overwrite: bool = False) -> None:
    """Write a fitted estimator; raises `InvalidDataError` if the place holds something else.

    A local folder appears when it is complete. In other places the root document, without which there is
    no model, is written last, and an error removes what was written before it. With ``overwrite`` a model is
    replaced, and nothing else; in other places than a local folder it is removed first.
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
    """Return whether a path, a URL or a store holds a model of any version."""
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
        local = plain_path(str(path))
        return None if is_url(local) else Path(local)
    return None


def _write(estimator: Any, group: zarr.Group) -> None:
    arrays = {name: np.asarray(getattr(estimator, f"{name}_")) for name in ARRAYS}
    for name, values in arrays.items():
        group.create_array(name, data=values, filters=None, compressors=ZstdCodec())
    history = estimator.history_
    k, kind = len(estimator.weights_), estimator._fitted_type
    requested = replace(Settings.of(estimator), n_components=k, covariance_type=kind)
    if not requested.automatic and type(as_policy(requested.algorithm)) not in ALGORITHMS.values():
        requested = replace(requested, algorithm=None)
    entry = ModelEntry(
        requested,
        estimator.stop_reason_,
        estimator._names,
        estimator._array,
        history.notes,
        history.records,
        sha256="",
    )
    try:
        _check_entry(entry)
        document = ENTRY.encode(entry, None)
    except FormatError as error:
        raise InvalidDataError(f"the model cannot be saved: {error}.") from error
    document["sha256"] = _digest(arrays, document["history"])
    group.attrs.update({"format": FORMAT, "version": VERSION, **document})


def _upload(estimator: Any, path: Any, overwrite: bool) -> None:
    """Write the model to memory, then copy it to a URL or a zarr store, its root document last."""
    private_store = MemoryStore()
    try:
        target = ZarrStoreObjects.opened(path) if isinstance(path, Store) else object_store(path)
        if not target.empty():
            if not (overwrite and _holds_model(path)):
                raise InvalidDataError(_taken(path, target.location))
            target.delete([ROOT_DOCUMENT])
            target.delete(target.list(""))
        _write(estimator, zarr.create_group(private_store, zarr_format=3))
        copy_new(ZarrStoreObjects(private_store), target)
    except CheckpointExistsError as error:
        raise InvalidDataError(_taken(path, target.location)) from error
    except CheckpointError as error:
        raise StorageError(f"the model cannot be saved: {error}") from error


def load_model(cls: Any, path: Any) -> Any:
    """Read an estimator of class ``cls``; raises `InvalidDataError` if there is none."""
    group = own_group(path)
    found = None if group is None else group.attributes.get("format")
    if group is None or found != FORMAT:
        raise InvalidDataError(_no_model(path, found))
    attributes = group.attributes
    if attributes.get("version") != VERSION:
        raise InvalidDataError(
            f"{path} holds format {attributes.get('format')!r} version {attributes.get('version')!r}; "
            f"this version reads {FORMAT!r} version {VERSION}. Load it with the version that saved it, or "
            "fit again."
        )
    try:
        with shutdown_named():
            document = {"array": None}
            document |= {name: attributes[name] for name in ENTRY_NAMES if name in attributes}
            entry, arrays = ENTRY.decode(document, None), group.arrays(ARRAYS)
            _check_entry(entry)
            if _digest(arrays, document["history"]) != entry.sha256:
                raise InvalidDataError("its arrays or its history are not those that were saved")
            return _restored(cls, arrays, entry)
    except ShutdownError:
        raise
    except Exception as error:  # of zarr, a codec or a policy, whatever the damage causes
        named = isinstance(error, (EmtauError, FormatError))
        reason = str(error).rstrip(".") if named else repr(error)
        raise InvalidDataError(
            f"the model in {path} is incomplete or damaged: {reason}. Save it again, or take another copy."
        ) from error


def _no_model(path: Any, stated: Any) -> str:
    """Return the message for a place without a model; ``stated`` is the format of its group."""
    place = _local_path(path)
    if place is not None and not place.exists():
        return f"{path} does not exist. Give the path of a saved model."
    kind = OWN_GROUPS.get(str(stated)) or (None if place is None else kind_of(str(place)))
    if kind == OWN_GROUPS[RUN_FORMAT]:
        return f"{path} is {kind}, not a saved model. Continue it: GaussianMixture.resume({str(path)!r}, X)."
    if kind is not None:
        below = () if place is None else (*place.glob("*.zarr"), *place.glob("*/*.zarr"))
        found = next((f", such as {each}" for each in sorted(below) if _holds_model(each)), "")
        return f"{path} is {kind}, not a saved model. Give the path of one{found}."
    return f"{path} holds no model: it is not a zarr group that GaussianMixture.save wrote."


def _restored(cls: Any, arrays: Mapping[str, AnyArray], entry: ModelEntry) -> Any:
    for name, array in arrays.items():
        if array.dtype != np.float64:
            raise InvalidDataError(f"{name} is of {array.dtype}; it must be of float64")
    if arrays["means"].ndim != 2:
        raise InvalidDataError(f"means has {arrays['means'].ndim} axes; it must have 2")
    requested = entry.settings
    parameters = MixtureParameters(
        requested.covariance_type, *(read_only_copy(arrays[name]) for name in ARRAYS)
    )
    if parameters.n_components != requested.n_components:
        raise InvalidDataError(
            f"settings.n_components is {requested.n_components}; its means are of {parameters.n_components}"
        )
    _check_mixture(parameters)
    check_names(entry.feature_names, parameters.n_features)
    estimator = cls(**requested.stored)
    if requested.algorithm is None:
        estimator.algorithm = AUTO
        warn_user(
            "the model was fitted with a policy of the user's own, which is not stored; set algorithm "
            "before fitting it again."
        )
    elif not isinstance(requested.algorithm, str):
        checked_row_arrays(requested.algorithm, requested.n_components, requested.max_iter)
    history = FitHistory(entry.history, entry.notes)
    estimator._publish(parameters, history, entry.stop_reason, entry.feature_names)
    estimator._array = entry.array
    return estimator


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
