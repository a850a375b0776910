"""What a policy returns, checked: a user's own may return anything."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import ConfigError
from emtau_dask.messages import short
from emtau_dask.policies.base import (
    ActivityPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    RowState,
    Schedule,
    WeightedPolicy,
)

ACTIVE = "active"
"""The row array that no policy may name: which rows the next E-step scores."""


def _refuse(policy: ActivityPolicy, method: str, found: object, wanted: str) -> ConfigError:
    return ConfigError(f"{type(policy).__name__}.{method} returned {found}; it must return {wanted}.")


def checked_row_arrays(
    policy: ActivityPolicy, n_components: int, max_iter: int
) -> tuple[RowArray, ...] | None:
    """Return ``policy.row_arrays(…)``; raises `ConfigError` where it is no tuple of named arrays."""
    arrays = policy.row_arrays(n_components, max_iter)
    if arrays is None:
        return None
    wanted = f"None, or a tuple of RowArray of different names other than {ACTIVE!r}"
    if not isinstance(arrays, (tuple, list)) or not all(isinstance(array, RowArray) for array in arrays):
        raise _refuse(policy, "row_arrays", repr(arrays), wanted)
    names = [array.name for array in arrays]
    if ACTIVE in names or len(set(names)) < len(names):
        raise _refuse(policy, "row_arrays", f"arrays named {names}", wanted)
    return tuple(arrays)


def checked_update(
    policy: ActivityPolicy, state: RowState, evidence: Evidence
) -> tuple[RowState, NDArray[np.bool_]]:
    """Return ``policy.update(…)``, its arrays of the types of ``state``.

    Raises
    ------
    ConfigError
        It does not fit the rows.
    """
    n = len(evidence.labels)
    result = policy.update(state, evidence)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Mapping):
        raise _refuse(policy, "update", type(result).__name__, "a pair (state, stays)")
    after, stays = result
    if not isinstance(stays, np.ndarray) or stays.dtype != np.bool_ or stays.shape != (n,):
        found = f"stays = {getattr(stays, 'dtype', type(stays).__name__)} of shape {np.shape(stays)}"
        raise _refuse(policy, "update", found, f"a boolean array of shape ({n},)")
    if set(after) != set(state):
        raise _refuse(policy, "update", f"the arrays {sorted(after)}", f"the arrays {sorted(state)}")
    for name, values in after.items():
        if isinstance(values, np.ndarray) and values.dtype == state[name].dtype and values.shape == (n,):
            continue
        array, limit = np.asarray(values), int(np.iinfo(state[name].dtype).max)
        whole = array.shape == (n,) and array.dtype.kind in "iub"
        if not whole or (n and not 0 <= int(array.min()) <= int(array.max()) <= limit):
            found = f"{name} = {array.dtype} of shape {array.shape}"
            raise _refuse(policy, "update", found, f"integers from 0 to {limit}, of shape ({n},)")
        after = {**after, name: array.astype(state[name].dtype)}
    return after, stays


def checked_schedule(policy: ActivityPolicy, summary: PassSummary) -> Schedule:
    """Return ``policy.schedule(…)``; raises `ConfigError` where it is no `Schedule`."""
    schedule = policy.schedule(summary)
    if not isinstance(schedule, Schedule) or not isinstance(schedule.next_pass, NextPass):
        raise _refuse(policy, "schedule", repr(schedule), "a Schedule whose next_pass is a NextPass")
    return schedule


def checked_weights(policy: WeightedPolicy, state: RowState, n_rows: int) -> NDArray[np.float64]:
    """Return ``policy.row_weights(…)``; raises `ConfigError` unless every row stands for 1 or more."""
    weights = policy.row_weights(state)
    good = isinstance(weights, np.ndarray) and weights.dtype == np.float64 and weights.shape == (n_rows,)
    if not good or not (np.isfinite(weights) & (weights >= 1)).all():
        raise _refuse(
            policy, "row_weights", short(weights), f"finite float64 of at least 1, of shape ({n_rows},)"
        )
    return weights
