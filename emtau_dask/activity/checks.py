"""Checks of policy parameters, made when a fit starts (scikit-learn's rule: never in __init__)."""

from __future__ import annotations

from numbers import Integral, Real

from emtau_dask.errors import ConfigError


def check_integer(policy: str, name: str, value: object, minimum: int) -> None:
    """Raise `ConfigError` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise ConfigError(f"{policy}({name}={value!r}): {name} must be an integer of at least {minimum}.")


def check_fraction(policy: str, name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a real number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 1:
        raise ConfigError(f"{policy}({name}={value!r}): {name} must be a number above 0 and at most 1.")
