"""The policies by name, and as plain values for checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

import numpy as np

from emtau_dask.constraints import NONE, choice, either
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


@dataclass(frozen=True)
class DescribedPolicy:
    """A policy as commits describe it. Its own methods raise; it stands in for a user's own policy.

    Attributes
    ----------
    name : str or None
        None for a user's own policy.
    kind : str
        The name of its class.
    params : dict
        As JSON has them.
    """

    name: Annotated[str | None, either(choice(*ALGORITHMS), NONE)]
    kind: str
    params: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{key}={value!r}' for key, value in self.params.items())})"

    def row_arrays(self, *_: Any) -> NoReturn:
        """Raise `CheckpointMismatchError`."""
        raise CheckpointMismatchError(
            f"the run uses {self}, a policy that is not emtau_dask's; give it again as algorithm."
        )

    update = schedule = row_arrays


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


def describe_policy(policy: Any) -> DescribedPolicy:
    """Return the description of a policy for commits.

    Raises
    ------
    ConfigError
        JSON cannot hold the parameters.
    """
    if isinstance(policy, DescribedPolicy):
        return policy
    name = next((name for name, kind in ALGORITHMS.items() if type(policy) is kind), None)
    kind = type(policy).__qualname__
    get_params = getattr(policy, "get_params", None)
    values = get_params(deep=False) if get_params else getattr(policy, "__dict__", {})
    values = {key: _python_scalar(value) for key, value in values.items()}
    try:
        parameters = json.loads(json.dumps(values, default=repr), parse_constant=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the parameters of {kind} cannot be stored in a checkpoint ({error}); give it parameters that "
            "are numbers, texts, and lists or mappings of these"
        ) from error
    return DescribedPolicy(name, kind, parameters)


def policy_described(entry: DescribedPolicy) -> ActivityPolicy:
    """Return a new policy with this name and these parameters; for a user's own policy, the description.

    Raises
    ------
    ConfigError
        The policy of this name has no such parameters.
    """
    if entry.name is None:
        return entry
    made: Any = as_policy(entry.name)
    try:
        policy: ActivityPolicy = made.set_params(**entry.params)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{entry.name} has no such parameters: {error}") from error
    return policy


def matching_policy(algorithm: Any, stored: ActivityPolicy) -> ActivityPolicy:
    """Return the policy of a checkpointed run, or ``algorithm``, if given, which must be the same.

    Raises
    ------
    CheckpointMismatchError
        It differs.
    """
    if algorithm is None:
        return stored
    policy = as_policy(algorithm)
    found, wanted = describe_policy(policy), describe_policy(stored)
    if found != wanted:
        raise CheckpointMismatchError(
            f"algorithm is {found}, but the checkpointed run uses {wanted}. Give the same, or leave it out."
        )
    return policy


def _python_scalar(value: Any) -> Any:
    """Return a NumPy scalar as a Python scalar; anything else unchanged."""
    if isinstance(value, np.longdouble):
        return float(value)
    return value.item() if isinstance(value, np.generic) else value
