"""A fitted model as a zarr group: arrays as arrays, the rest as JSON attributes; no pickle, no code."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
import zarr.errors

from emtau_dask.activity import ALGORITHMS, as_policy
from emtau_dask.engine.history import FitHistory, IterationRecord
from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.arrays import AnyArray, frozen
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.parameters import MixtureParameters

__all__ = ["load_model", "save_model"]

FORMAT, VERSION = "emtau-model", 1
ARRAYS = ("weights_", "means_", "covariances_", "precisions_cholesky_")
SETTINGS = ("covariance_type", "tol", "reg_covar", "max_iter", "n_init", "init_params", "warm_start")
COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
NAMES = (*(name.rstrip("_") for name in ARRAYS), *(f"history/{column}" for column in COLUMNS))


def _algorithm(estimator: Any) -> dict[str, Any] | None:
    policy: Any = as_policy(estimator.algorithm)
    for name, kind in ALGORITHMS.items():
        if type(policy) is kind:
            return {
                "name": name,
                "params": {key: _plain(value) for key, value in policy.get_params().items()},
            }
    return None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _digest(arrays: Mapping[str, AnyArray]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _arrays_of(estimator: Any) -> dict[str, AnyArray]:
    arrays = {name.rstrip("_"): np.asarray(getattr(estimator, name)) for name in ARRAYS}
    for column in COLUMNS:
        arrays[f"history/{column}"] = np.array([getattr(record, column) for record in estimator.history_])
    return arrays


def save_model(estimator: Any, path: Any) -> None:
    """Write a fitted estimator; raises `InvalidDataError` where something is there already."""
    taken = f"{path} already holds something; choose another path or remove it."
    if isinstance(path, (str, Path)) and "://" not in str(path):
        place = Path(path)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InvalidDataError(taken)
    try:
        group = zarr.create_group(store=path, overwrite=False, zarr_format=3)
    except (zarr.errors.ContainsGroupError, zarr.errors.ContainsArrayError, FileExistsError) as error:
        raise InvalidDataError(taken) from error
    except OSError as error:
        raise InvalidDataError(f"the model cannot be written to {path}: {error}") from error
    arrays = _arrays_of(estimator)
    for name, values in arrays.items():
        group.create_array(name, data=values)
    names = getattr(estimator, "feature_names_in_", None)
    settings = {name: _plain(getattr(estimator, name)) for name in SETTINGS}
    group.attrs.update(
        {
            "format": FORMAT,
            "version": VERSION,
            "settings": settings | {"covariance_type": estimator._fitted_type},
            "algorithm": _algorithm(estimator),
            "stop_reason": estimator.stop_reason_,
            "feature_names": None if names is None else [str(name) for name in names],
            "sha256": _digest(arrays),
        }
    )


def load_model(cls: Any, path: Any) -> Any:
    """Read an estimator of class ``cls``; raises `InvalidDataError` where there is none."""
    try:
        group = zarr.open_group(path, mode="r", zarr_format=3)
        attributes = dict(group.attrs)
    except (zarr.errors.BaseZarrError, OSError, ValueError, KeyError) as error:
        raise InvalidDataError(f"{path} holds no model ({type(error).__name__}: {error}).") from error
    if attributes.get("format") != FORMAT or attributes.get("version") != VERSION:
        raise InvalidDataError(
            f"{path} holds format {attributes.get('format')!r} version {attributes.get('version')!r}; "
            f"this version reads {FORMAT!r} version {VERSION}. Save the model again with this version."
        )
    try:
        arrays = {name: _values(group, name) for name in NAMES}
        if _digest(arrays) != attributes["sha256"]:
            raise ValueError("its arrays are not those that were saved")
        return _restored(cls, arrays, attributes)
    except Exception as error:  # whatever zarr, a codec or a setting says of damage
        raise InvalidDataError(f"the model in {path} is incomplete or damaged: {error!r}.") from error


def _values(group: zarr.Group, name: str) -> AnyArray:
    member = group[name]
    if not isinstance(member, zarr.Array):
        raise TypeError(f"{name} is not an array")
    return np.asarray(member[...])


def _restored(cls: Any, arrays: Mapping[str, AnyArray], attributes: dict[str, Any]) -> Any:
    weights, means, covariances, factors = (frozen(arrays[name.rstrip("_")]) for name in ARRAYS)
    settings: Any = attributes["settings"]
    structure = structure_named(settings["covariance_type"])
    n_iter = len(arrays["history/iteration"])
    records = tuple(
        IterationRecord(**{name: arrays[f"history/{name}"][i].item() for name in COLUMNS})
        for i in range(n_iter)
    )
    estimator = cls(len(weights), **settings)
    algorithm: Any = attributes["algorithm"]
    if algorithm is None:
        warnings.warn(
            "the model was fitted with a policy of the user's own, which is not stored; set algorithm "
            "before fitting it again.",
            stacklevel=4,
        )
    else:
        estimator.set_params(algorithm=as_policy(algorithm["name"]))
        estimator.algorithm.set_params(**algorithm["params"])
    parameters = MixtureParameters(structure.name, weights, means, covariances, factors)
    estimator._publish(parameters, FitHistory(records), str(attributes["stop_reason"]))
    estimator.n_features_in_ = means.shape[1]
    if attributes["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(attributes["feature_names"], dtype=object)
    return estimator
