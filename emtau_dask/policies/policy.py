"""The port of activity policies, and checks of what they return.

A policy decides which rows the next E-step scores. Its method `update` runs in the
task of a chunk and gets the active rows of that chunk. `schedule` runs in the fitting
process and gets only counts and the bound. Both are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from emtau_dask.constraints import Constraint
from emtau_dask.errors import ConfigError, short

RowState = Mapping[str, NDArray[Any]]
"""A policy's arrays by name, one value for each active row of a chunk, in row order."""
ACTIVE = "active"
"""Name of the row array that says which rows the next E-step scores; policies may not use it."""
SCORED_AT = "scored_at"
"""Name of the row array of `Traced`: the iteration that scored the row last."""


@dataclass(frozen=True)
class RowArray:
    """One array of a policy, with a value for every row.

    Attributes
    ----------
    name : str
    maximum : int
        Largest value, which decides the unsigned integer type.
    keep : bool
        Whether an inactive row's value is still needed. If not, zero is stored,
        which compresses to almost nothing.
    """

    name: str
    maximum: int
    keep: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds ``maximum``."""
        return np.min_scalar_type(self.maximum)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The results of the E-step of iteration ``iteration`` for one chunk's active rows.

    Attributes
    ----------
    iteration : int
        1-based.
    labels : ndarray of shape (n,), smallest unsigned integer that fits
        Most probable component; ties go to the lowest index.
    responsibilities : ndarray of shape (n,), float64
        Responsibility of that component, ``max_k w_nk``.
    log_likelihoods : ndarray of shape (n,), float64
        ``ln p(x_n | Θ)``, nats.
    draws : ndarray of shape (n,), float64, or None
        Uniform in [0, 1): a function of the fit's seed, the iteration and the
        row's number. None unless the policy is a `WeightedPolicy`.
    uncertainty : float
        Mean of ``1 − responsibilities`` over the data, from a sample or from the
        last full pass. NaN if it is not known.
    """

    iteration: int
    labels: NDArray[Any]
    responsibilities: NDArray[np.float64]
    log_likelihoods: NDArray[np.float64]
    draws: NDArray[np.float64] | None = None
    uncertainty: float = math.nan


class NextPass(Enum):
    """Which rows the next iteration scores."""

    ACTIVE = "active"
    """Those that `ActivityPolicy.update` left active (possibly none)."""
    ALL = "all"
    """Every row, with new row state."""
    STOP = "stop"
    """None: the fit ends, with ``stop_reason_`` ``"no-active-rows"``."""


@dataclass(frozen=True)
class PassSummary:
    """The state of a fit after an iteration.

    Attributes
    ----------
    iteration : int
        1-based.
    full_pass : bool
        Whether every row was scored in it.
    remaining : int
        Rows left active for the next iteration.
    change : float or None
        Change of the log-likelihood per row since the iteration before;
        None if there is none to compare with.
    tol : float
        The fit's tolerance for that change.
    since_reset : int
        Iterations run since every row was last made active, this one included.
    accepted : bool
        Whether the parameters that were scored are kept.
    gap, gap_at_reset : float
        How much the log-likelihood per row could still gain: after this iteration, and after the last full
        pass, both as estimated now. NaN without an estimate.
    failures : int
        Number of cycles of partial passes that lowered the bound of all rows, or hardly raised it.
    """

    iteration: int
    full_pass: bool
    remaining: int
    change: float | None
    tol: float
    since_reset: int
    accepted: bool = True
    gap: float = math.nan
    gap_at_reset: float = math.nan
    failures: int = 0


@dataclass(frozen=True)
class Schedule:
    """A policy's decision after an iteration.

    Attributes
    ----------
    next_pass : NextPass
    test_tol : bool
        Whether ``|change| < tol`` after this iteration ends the fit.
    """

    next_pass: NextPass
    test_tol: bool


@runtime_checkable
class ActivityPolicy(Protocol):
    """The interface of a policy; any object that has it can be passed as ``algorithm``."""

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return the arrays in addition to the active mask; None if every row is always active."""
        ...

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Return the next state of a chunk's active rows, and which of them stay active.

        Pure: called again with the same arguments it must return the same.
        """
        ...

    def schedule(self, summary: PassSummary) -> Schedule:
        """Return which rows the next iteration scores, and whether tol may be tested now."""
        ...


@runtime_checkable
class WeightedPolicy(ActivityPolicy, Protocol):
    """A policy whose active rows have sampling weights."""

    def row_weights(self, state: RowState) -> NDArray[np.float64]:
        """Return the sampling weight of each active row, at least 1; pure.

        The part of the weights above 1 is subtracted from the frozen statistics of the other rows.
        """
        ...


def _refuse(policy: ActivityPolicy, method: str, found: object, wanted: str) -> ConfigError:
    return ConfigError(f"{type(policy).__name__}.{method} returned {found}; it must return {wanted}.")


def checked_row_arrays(
    policy: ActivityPolicy, n_components: int, max_iter: int
) -> tuple[RowArray, ...] | None:
    """Return ``policy.row_arrays(…)``; raises `ConfigError` unless it is None or a tuple of named arrays."""
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
    """Return ``policy.schedule(…)``; raises `ConfigError` unless it is a `Schedule`."""
    schedule = policy.schedule(summary)
    if not isinstance(schedule, Schedule) or not isinstance(schedule.next_pass, NextPass):
        raise _refuse(policy, "schedule", repr(schedule), "a Schedule whose next_pass is a NextPass")
    return schedule


def checked_weights(policy: WeightedPolicy, state: RowState, n_rows: int) -> NDArray[np.float64]:
    """Return ``policy.row_weights(…)``; raises `ConfigError` unless every weight is 1 or more."""
    weights = policy.row_weights(state)
    good = isinstance(weights, np.ndarray) and weights.dtype == np.float64 and weights.shape == (n_rows,)
    if not good or not (np.isfinite(weights) & (weights >= 1)).all():
        raise _refuse(
            policy, "row_weights", short(weights), f"finite float64 of at least 1, of shape ({n_rows},)"
        )
    return weights


@dataclass(frozen=True)
class Traced:
    """A policy that keeps row state, with the additional row array ``scored_at``.

    From that array and the history of the parameters, the responsibilities that inactive rows keep can be
    computed again; the paper's comparisons evaluate them.
    """

    policy: ActivityPolicy

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return the policy's arrays and ``scored_at``, which inactive rows keep."""
        own = self.policy.row_arrays(n_components, max_iter) or ()
        return (*own, RowArray(SCORED_AT, max_iter, keep=True))

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Update the policy's state, and set ``scored_at`` to the iteration."""
        own = {name: values for name, values in state.items() if name != SCORED_AT}
        after, stays = self.policy.update(own, evidence)
        return {**after, SCORED_AT: np.full_like(state[SCORED_AT], evidence.iteration)}, stays

    def schedule(self, summary: PassSummary) -> Schedule:
        """Return the policy's schedule."""
        return self.policy.schedule(summary)


class BuiltInPolicy(BaseEstimator):  # type: ignore[misc]
    """Base class of the policies that have a name.

    Attributes
    ----------
    constraints : mapping of str to Constraint
        Of each parameter of ``__init__``. A run config has the same
        parameters, defaults and constraints.
    """

    constraints: ClassVar[Mapping[str, Constraint]] = {}

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return no arrays: most policies need only the active mask.

        Raises
        ------
        ConfigError
            A parameter is out of range. Parameters are checked when a fit starts, not
            in ``__init__``, by scikit-learn's convention.
        """
        for name, constraint in self.constraints.items():
            value = getattr(self, name)
            if not constraint.holds(value):
                raise ConfigError(
                    f"{type(self).__name__}({name}={short(value)}): {name} must be {constraint.words}."
                )
        return ()
