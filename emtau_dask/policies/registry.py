"""The policies by name, and as plain values for checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from emtau_dask.errors import CheckpointMismatchError, ConfigError, short
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.lazy import EMLazy
from emtau_dask.policies.policy import ActivityPolicy, BuiltInPolicy
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.policies.star import EMStar
from emtau_dask.policies.tau import EMTau

ALGORITHMS: Mapping[str, type[BuiltInPolicy]] = MappingProxyType(
    {"em": FullEM, "em-tau": EMTau, "em-star": EMStar, "em-lazy": EMLazy, "em-sampled": EMSampled}
)


def as_policy(algorithm: object) -> ActivityPolicy:
    """Return the policy that ``algorithm`` names or is.

    Raises
    ------
    ConfigError
        It is neither one of the names nor an object with a policy's methods.
    """
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]()
    if isinstance(algorithm, ActivityPolicy) and not isinstance(algorithm, type):
        return algorithm
    raise ConfigError(
        f"algorithm is {short(algorithm)}; use 'auto', {', '.join(map(repr, ALGORITHMS))}, or an object with "
        "the methods row_arrays, update and schedule."
    )


def describe_policy(policy: Any) -> tuple[str | None, str, dict[str, Any]]:
    """Return a policy's name (None for a user's own), class name and parameters, as JSON has them.

    Raises
    ------
    ConfigError
        JSON cannot hold the parameters.
    """
    name = next((name for name, kind in ALGORITHMS.items() if type(policy) is kind), None)
    kind = type(policy).__qualname__
    get_params = getattr(policy, "get_params", None)
    values = get_params(deep=False) if get_params else getattr(policy, "__dict__", {})
    plain = {key: _plain(value) for key, value in values.items()}
    try:
        parameters = json.loads(json.dumps(plain, default=repr), parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the parameters of {kind} cannot be stored in a checkpoint ({error}); give it parameters that "
            "are numbers, texts, and lists or mappings of these"
        ) from error
    return name, kind, parameters


def matching_policy(algorithm: Any, name: str | None, kind: str, parameters: dict[str, Any]) -> Any:
    """Return the policy of a checkpointed run: rebuilt, or ``algorithm`` if it is the same.

    Raises
    ------
    CheckpointMismatchError
        A policy that is not emtau_dask's was not given again, or differs.
    ConfigError
        No built-in policy has the checkpoint's name or parameters.
    """
    stored = _call(kind, parameters)
    if algorithm is not None:
        policy = as_policy(algorithm)
        found = describe_policy(policy)
        if found != (name, kind, parameters):
            raise CheckpointMismatchError(
                f"algorithm is {_call(*found[1:])}, but the checkpointed run uses {stored}. "
                "Give the same, or leave it out."
            )
        return policy
    if name is None:
        raise CheckpointMismatchError(
            f"the run uses {stored}, a policy that is not emtau_dask's; give it again as algorithm."
        )
    rebuilt: Any = as_policy(name)
    try:
        return rebuilt.set_params(**parameters)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} has no such parameters: {error}") from error


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python scalar; anything else unchanged."""
    if isinstance(value, np.longdouble):
        return float(value)
    return value.item() if isinstance(value, np.generic) else value


def _call(kind: str, parameters: dict[str, Any]) -> str:
    return f"{kind}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"
