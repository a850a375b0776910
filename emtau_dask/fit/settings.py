"""Checks of the estimator's settings, before any data is touched."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from emtau_dask.checks import FLAG, NONE, Constraint, choice, either, integer, number
from emtau_dask.errors import ConfigError
from emtau_dask.init import STARTS
from emtau_dask.messages import short
from emtau_dask.mixture.covariance import STRUCTURES

CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        "n_components": integer(1, 2**24),
        "covariance_type": choice(*STRUCTURES),
        "tol": either(number(0), choice("auto", "statistical")),
        "acceleration": either(choice("auto", "quasi-newton"), NONE),
        "reg_covar": number(0),
        "max_iter": integer(0),
        "n_init": either(integer(1, 10_000), choice("auto")),
        "init_params": choice(*STARTS),
        "warm_start": FLAG,
        "checkpoint_every": integer(1),
        "verbose": either(integer(0), FLAG),
    }
)
"""Of the estimator's settings; a run config has the same."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first setting that is impossible, naming value and limit."""
    for name, constraint in CONSTRAINTS.items():
        if not constraint.holds(settings[name]):
            raise ConfigError(f"{name} is {short(settings[name])}; it must be {constraint.words}.")
