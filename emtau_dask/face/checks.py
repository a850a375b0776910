"""Checks of the estimator's settings, before any data is touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from emtau_dask.engine.starts import STARTS
from emtau_dask.errors import ConfigError
from emtau_dask.mixture.covariance import STRUCTURES

__all__ = ["check_settings"]

Check = Callable[[Any], bool]


def _integer(minimum: int) -> tuple[Check, str]:
    def allowed(value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= minimum

    return allowed, f"an integer of at least {minimum}"


def _number() -> tuple[Check, str]:
    def allowed(value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf

    return allowed, "a finite number of at least 0"


def _choice(names: Any) -> tuple[Check, str]:
    return (lambda value: isinstance(value, str) and value in names), f"one of {', '.join(map(repr, names))}"


_LIMITS: dict[str, tuple[Check, str]] = {
    "n_components": _integer(1),
    "covariance_type": _choice(STRUCTURES),
    "tol": _number(),
    "reg_covar": _number(),
    "max_iter": _integer(0),
    "n_init": _integer(1),
    "init_params": _choice(STARTS),
    "warm_start": (lambda value: isinstance(value, (bool, np.bool_)), "True or False"),
    "checkpoint_every": _integer(1),
    "verbose": (lambda value: isinstance(value, Integral) and int(value) >= 0, "an integer of at least 0"),
}


def check_settings(settings: dict[str, Any]) -> None:
    """Raise `ConfigError` for the first setting that is impossible, naming value and limit."""
    for name, (allowed, limit) in _LIMITS.items():
        if not allowed(settings[name]):
            raise ConfigError(f"{name} is {settings[name]!r}; it must be {limit}.")
