"""A fitted model as a zarr group."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import zarr.errors
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from emtau_dask.constraints import NONE, Constraint, choice, either, integer
from emtau_dask.em.history import FitHistory, IterationRecord
from emtau_dask.em.settings import CONSTRAINTS
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
from emtau_dask.estimator.summary import STOP_REASONS
from emtau_dask.mixture.linalg import AnyArray, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.policy import checked_row_arrays
from emtau_dask.policies.registry import ALGORITHMS, as_policy, describe_policy, matching_policy
from emtau_dask.storage.commits import FORMAT as RUN_FORMAT
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.locations import OWN_GROUPS, kind_of
from emtau_dask.storage.objects import ROOT_DOCUMENT, ObjectStore, copy_new
from emtau_dask.storage.publishing import published
from emtau_dask.storage.stores import ZarrStoreObjects, object_store
from emtau_dask.storage.urls import is_url, plain_path
from emtau_dask.storage.zarr_check import own_group

AUTO = "auto"
_SEED = either(integer(0, 2**32 - 1), NONE)
FORMAT, VERSION = "emtau-model", 2
ARRAYS = ("weights_", "means_", "covariances_", "precisions_cholesky_")
COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
WEIGHTS_TOLERANCE = 1e-6
"""The same as for initial weights."""
MOST_PASSES = 1000
"""So many times an iteration scores the rows at most: it measures a gap by tens of passes."""
NAMES = (*(name.rstrip("_") for name in ARRAYS), *(f"history/{column}" for column in COLUMNS))


def _checked(constraint: Constraint, value: Any) -> Any:
    if not constraint.holds(value):
        raise PydanticCustomError("allowed", "it must be {words}", {"words": constraint.words})
    return value


def _allowed(constraint: Constraint) -> AfterValidator:
    return AfterValidator(partial(_checked, constraint))


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AlgorithmEntry(_Entry):
    """A policy by its name, or what ``auto`` chooses; `matching_policy` checks the parameters."""

    name: Annotated[str, _allowed(choice(AUTO, *ALGORITHMS))]
    params: dict[str, Any]


class SettingsEntry(_Entry):
    """The estimator's settings but the policy; they may be what they may be for a fit."""

    covariance_type: Any
    tol: Any
    reg_covar: Any
    max_iter: Any
    n_init: Any
    init_params: Any
    warm_start: Any
    acceleration: Any
    missing: Any
    random_state: Any

    @field_validator("*")
    @classmethod
    def _checked(cls, value: Any, field: ValidationInfo) -> Any:
        return _checked(CONSTRAINTS.get(str(field.field_name), _SEED), value)


class ModelEntry(_Entry):
    """All but the arrays; ``algorithm`` is None for a policy of the user's own. Others may add to it."""

    model_config = ConfigDict(extra="ignore")

    settings: SettingsEntry
    algorithm: AlgorithmEntry | None
    stop_reason: Annotated[str, _allowed(choice(*STOP_REASONS))]
    feature_names: list[str] | None
    notes: list[str] = []
    sha256: str


def model_entry(values: Mapping[str, Any]) -> ModelEntry:
    """Return the entry of plain values; raises `InvalidDataError`, which names the first bad field."""
    try:
        return ModelEntry.model_validate(values)
    except ValidationError as error:
        raise InvalidDataError(_problem(error.errors(include_url=False)[0])) from None


def check_names(names: Sequence[str] | None, n_features: int) -> None:
    """Raise `InvalidDataError` unless stored names of features, if there are any, are one for each."""
    if names is not None and (len(names) != n_features or len(set(names)) < n_features):
        raise InvalidDataError(
            f"feature_names is {short(names)}: it must be a list of {n_features} different names"
        )


def _problem(found: ErrorDetails) -> str:
    field = short(".".join(map(str, found["loc"])))[1:-1]
    if found["type"] == "missing":
        return f"{field} is missing"
    return f"{field} is {short(found['input'])}: {found['msg'][:1].lower()}{found['msg'][1:]}"


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
