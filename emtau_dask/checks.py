"""Checks of policy parameters, made when a fit starts (scikit-learn's rule: never in __init__)."""

from __future__ import annotations

from numbers import Integral

import numpy as np

from emtau_dask.errors import ConfigError
from emtau_dask.messages import short

MAX_ITERATIONS = 10**12
"""More than a fit can do; what counts iterations is stored as integers of bounded size."""


def check_integer(policy: str, name: str, value: object, minimum: int) -> None:
    """Raise `ConfigError` unless ``value`` is an integer from ``minimum`` to `MAX_ITERATIONS`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not minimum <= int(value) <= MAX_ITERATIONS:  # type: ignore[call-overload]
        raise ConfigError(
            f"{policy}({name}={short(value)}): {name} must be an integer of at least {minimum} and at most "
            f"{MAX_ITERATIONS:,}."
        )


def check_fraction(policy: str, name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a real number in (0, 1]."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:  # type: ignore[operator]
        raise ConfigError(f"{policy}({name}={short(value)}): {name} must be a number above 0 and at most 1.")
