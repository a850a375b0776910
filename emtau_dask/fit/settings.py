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
from emtau_dask.policies import ActivityPolicy, FullEM

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
        "missing": choice("raise", "marginalise"),
        "verbose": either(integer(0), FLAG),
    }
)
"""Of the estimator's settings; a run config has the same."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first setting that is impossible, naming value and limit."""
    for name, constraint in CONSTRAINTS.items():
        if not constraint.holds(settings[name]):
            raise ConfigError(f"{name} is {short(settings[name])}; it must be {constraint.words}.")


def check_missing(
    missing: str, policy: ActivityPolicy, acceleration: str | None, *, responsibilities: bool
) -> None:
    """Raise `ConfigError` where a fit cannot integrate over missing values as these settings ask for."""
    if not marginalises(missing):
        return
    asked = None
    if not isinstance(policy, FullEM):
        asked = "another algorithm"
    elif acceleration == "quasi-newton":
        asked = "acceleration='quasi-newton'"
    elif responsibilities:
        asked = "responsibilities_init"
    if asked is not None:
        raise ConfigError(
            f"missing='marginalise' needs algorithm='em' without acceleration and responsibilities_init, but "
            f"{asked} is asked for. Set algorithm='em', or fit complete rows and set missing='marginalise' "
            "afterwards, for predictions."
        )


def marginalises(missing: Any) -> bool:
    """Return whether NaN stands for a missing value; raises `ConfigError` for an impossible setting."""
    constraint = CONSTRAINTS["missing"]
    if not constraint.holds(missing):
        raise ConfigError(f"missing is {short(missing)}; it must be {constraint.words}.")
    return bool(missing == "marginalise")
