"""What an activity policy is: the paper's ``f(·)``, split between worker and driver.

A policy decides which rows the next E-step scores. The row-wise half, `update`,
runs where the rows are and sees one chunk; the global half, `schedule`, runs on
the driver and sees only counts and the bound. Both are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

RowState = Mapping[str, NDArray[Any]]
"""A policy's arrays by name, one value for each active row of a chunk, in row order."""


@dataclass(frozen=True)
class RowArray:
    """One array that a policy keeps for every row.

    Attributes
    ----------
    name : str
    maximum : int
        Largest value it will hold; decides the unsigned integer type.
    keep : bool
        Whether an inactive row's value is still needed. If not it is stored as
        zero, which compresses to almost nothing.
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
    """What the E-step of iteration ``iteration`` found for one chunk's active rows.

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
    unsure : float
        Mean of ``1 − responsibilities`` over the data, as last known: from a
        sample, or from the last pass over all rows. NaN where it is not known.
    """

    iteration: int
    labels: NDArray[Any]
    responsibilities: NDArray[np.float64]
    log_likelihoods: NDArray[np.float64]
    draws: NDArray[np.float64] | None = None
    unsure: float = math.nan


class NextPass(Enum):
    """Which rows the next iteration scores."""

    ACTIVE = "active"
    """Those that `ActivityPolicy.update` left active (possibly none)."""
    ALL = "all"
    """Every row, with all row state started afresh."""
    STOP = "stop"
    """None: the fit ends, with ``stop_reason_`` ``"no-active-rows"``."""


@dataclass(frozen=True)
class PassSummary:
    """What the driver knows after an iteration.

    Attributes
    ----------
    iteration : int
        1-based.
    full_pass : bool
        Whether every row was scored in it.
    remaining : int
        Rows left active for the next iteration.
    change : float or None
        Change of the lower bound against the iteration before, nats per row;
        None where there is none to compare with.
    tol : float
        The fit's tolerance, nats per row.
    since_reset : int
        Iterations run since every row was last made active, this one included.
    accepted : bool
        Whether the parameters that were scored are kept.
    gap, gap_at_reset : float
        Estimated nats per row between the bound and where it would end, on the rows that are scored now:
        after this iteration, and when every row was last scored, by what is known now. NaN where there is
        no estimate.
    failures : int
        How often partial passes led to parameters that lowered the bound of all rows, or crawled.
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
    """The interface of a policy; a user's own object that has it can be passed as ``algorithm``."""

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return the arrays needed beside the active mask; None where every row is always active."""
        ...

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, NDArray[np.bool_]]:
        """Return the next state of a chunk's active rows, and which of them stay active.

        Pure: called again with the same arguments it must return the same.
        """
        ...

    def schedule(self, summary: PassSummary) -> Schedule:
        """Return what the next iteration scores and whether tol may be tested now."""
        ...


@runtime_checkable
class WeightedPolicy(ActivityPolicy, Protocol):
    """A policy whose active rows stand for more than themselves."""

    def row_weights(self, state: RowState) -> NDArray[np.float64]:
        """Return how many rows each active row stands for, itself included: at least 1, a pure function.

        What the other rows contribute is held, less what the active rows stand for beyond themselves.
        """
        ...
