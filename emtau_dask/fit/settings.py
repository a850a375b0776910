"""Checks of the estimator's settings, before any data is touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from emtau_dask.checks import MAX_ITERATIONS
from emtau_dask.errors import ConfigError
from emtau_dask.init import STARTS
from emtau_dask.messages import short
from emtau_dask.mixture.covariance import STRUCTURES

MAX_STARTS = 10_000
"""Each is a fit of its own."""
MAX_COMPONENTS = 2**24

Check = Callable[[Any], bool]


def _integer(minimum: int, maximum: int) -> tuple[Check, str]:
    def allowed(value: Any) -> bool:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        return whole and minimum <= int(value) <= maximum

    return allowed, f"an integer of at least {minimum} and at most {maximum:,}"


def _number() -> tuple[Check, str]:
    def allowed(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        try:
            return 0 <= float(value) < math.inf
        except OverflowError:
            return False

    return allowed, "a finite number of at least 0"


def _choice(names: Any) -> tuple[Check, str]:
    return (lambda value: isinstance(value, str) and value in names), f"one of {', '.join(map(repr, names))}"


_LIMITS: dict[str, tuple[Check, str]] = {
    "n_components": _integer(1, MAX_COMPONENTS),
    "covariance_type": _choice(STRUCTURES),
    "tol": _number(),
    "reg_covar": _number(),
    "max_iter": _integer(0, MAX_ITERATIONS),
    "n_init": _integer(1, MAX_STARTS),
    "init_params": _choice(STARTS),
    "warm_start": (lambda value: isinstance(value, (bool, np.bool_)), "True or False"),
    "checkpoint_every": _integer(1, MAX_ITERATIONS),
    "verbose": (lambda value: isinstance(value, Integral) and int(value) >= 0, "an integer of at least 0"),
}


def check_settings(settings: dict[str, Any]) -> None:
    """Raise `ConfigError` for the first setting that is impossible, naming value and limit."""
    for name, (allowed, limit) in _LIMITS.items():
        if not allowed(settings[name]):
            raise ConfigError(f"{name} is {short(settings[name])}; it must be {limit}.")
