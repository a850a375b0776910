"""A fitted model as a zarr group: arrays as arrays, the rest as JSON attributes; no pickle, no code."""

from __future__ import annotations

import dataclasses
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


def _algorithm(estimator: Any) -> dict[str, Any] | None:
    policy = as_policy(estimator.algorithm)
    for name, kind in ALGORITHMS.items():
        if type(policy) is kind:
            return {"name": name, "params": policy.get_params()}  # type: ignore[attr-defined]
    return None


def save_model(estimator: Any, path: Any) -> None:
    """Write a fitted estimator; raises `InvalidDataError` where something is there already."""
    try:
        group = zarr.create_group(store=path, overwrite=False)
    except (zarr.errors.ContainsGroupError, zarr.errors.ContainsArrayError, FileExistsError) as error:
        raise InvalidDataError(
            f"{path} already holds something; choose another path or remove it."
        ) from error
    except OSError as error:
        raise InvalidDataError(f"the model cannot be written to {path}: {error}") from error
    for name in ARRAYS:
        group.create_array(name.rstrip("_"), data=np.asarray(getattr(estimator, name)))
    history = group.create_group("history")
    for column in COLUMNS:
        values = np.array([getattr(record, column) for record in estimator.history_])
        history.create_array(column, data=values)
    names = getattr(estimator, "feature_names_in_", None)
    group.attrs.update(
        {
            "format": FORMAT,
            "version": VERSION,
            "settings": {name: getattr(estimator, name) for name in SETTINGS}
            | {"covariance_type": estimator._fitted_type},
            "algorithm": _algorithm(estimator),
            "stop_reason": estimator.stop_reason_,
            "feature_names": None if names is None else [str(name) for name in names],
        }
    )


def load_model(cls: Any, path: Any) -> Any:
    """Read an estimator of class ``cls``; raises `InvalidDataError` where there is none."""
    try:
        group = zarr.open_group(path, mode="r")
        attributes = dict(group.attrs)
    except (zarr.errors.BaseZarrError, OSError, ValueError, KeyError) as error:
        raise InvalidDataError(f"{path} holds no model ({type(error).__name__}: {error}).") from error
    if attributes.get("format") != FORMAT or attributes.get("version") != VERSION:
        raise InvalidDataError(
            f"{path} holds format {attributes.get('format')!r} version {attributes.get('version')!r}; "
            f"this version reads {FORMAT!r} version {VERSION}. Save the model again with this version."
        )
    try:
        return _restored(cls, group, attributes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidDataError(f"the model in {path} is incomplete or damaged: {error!r}.") from error


def _values(group: zarr.Group, name: str) -> AnyArray:
    member = group[name]
    if not isinstance(member, zarr.Array):
        raise TypeError(f"{name} is not an array")
    return np.asarray(member[...])


def _restored(cls: Any, group: zarr.Group, attributes: dict[str, Any]) -> Any:
    weights, means, covariances, factors = (frozen(_values(group, name.rstrip("_"))) for name in ARRAYS)
    settings: Any = attributes["settings"]
    structure = structure_named(settings["covariance_type"])
    shape = structure.shape(*means.shape)
    if weights.shape != means.shape[:1] or covariances.shape != shape or factors.shape != shape:
        raise ValueError("array shapes do not agree")
    columns = {name: _values(group, f"history/{name}") for name in COLUMNS}
    records = tuple(
        IterationRecord(**{name: columns[name][i].item() for name in COLUMNS})
        for i in range(len(columns["iteration"]))
    )
    estimator = cls(len(weights), **settings)
    algorithm: Any = attributes["algorithm"]
    if algorithm is not None:
        estimator.set_params(algorithm=as_policy(algorithm["name"]))
        estimator.algorithm.set_params(**algorithm["params"])
    parameters = MixtureParameters(structure.name, weights, means, covariances, factors)
    estimator._publish(parameters, FitHistory(records), str(attributes["stop_reason"]))
    estimator.n_features_in_ = means.shape[1]
    if attributes["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(attributes["feature_names"], dtype=object)
    return estimator
