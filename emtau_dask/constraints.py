"""Constraints on settings: each is stated once, for estimators, policies and run configs alike.

Only the standard library is imported, as in `settings`.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_ITERATIONS = 10**12
"""Maximum iterations: more than a fit can do, and counters are stored as integers of bounded size."""


@dataclass(frozen=True)
class Constraint:
    """The allowed values of a setting.

    Attributes
    ----------
    words : str
        The end of the sentence "the value must be …".
    holds : callable
        Return whether any value is allowed.
    nearest : callable
        Return the nearest allowed value to one that is not, for display; None if there is none.
    """

    words: str
    holds: Callable[[Any], bool]
    nearest: Callable[[Any], object] = lambda value: None

    def hint(self, value: Any) -> str:
        """Return the nearest allowed value as the last words of a message; "" if there is none."""
        near = self.nearest(value)
        return "" if near is None else f"; the nearest valid value is {near}"


def integer(minimum: int, maximum: int = MAX_ITERATIONS) -> Constraint:
    """Allow integers from ``minimum`` to ``maximum``."""

    def is_whole(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool)

    def holds(value: Any) -> bool:
        return is_whole(value) and minimum <= int(value) <= maximum

    def nearest(value: Any) -> object:
        if is_whole(value) or (isinstance(value, float) and value.is_integer()):
            return min(max(int(value), minimum), maximum)
        return _unquoted(value)

    return Constraint(f"an integer of at least {minimum} and at most {maximum:,}", holds, nearest)


def number(minimum: float) -> Constraint:
    """Allow finite numbers of at least ``minimum``."""

    def nearest(value: Any) -> object:
        return f"{minimum:g}" if _as_float(value, Real) < minimum else _unquoted(value)

    return Constraint(
        f"a finite number of at least {minimum:g}",
        lambda value: math.isfinite(_as_float(value, Real)) and minimum <= _as_float(value, Real),
        nearest,
    )


FRACTION = Constraint(
    "a number above 0 and at most 1",
    lambda value: 0 < _as_float(value) <= 1,
    lambda value: "1" if 1 < _as_float(value) < math.inf else _unquoted(value),
)
FLAG = Constraint("True or False", lambda value: isinstance(value, (bool, *_of_numpy("bool_"))))
NONE = Constraint("None", lambda value: value is None)


def choice(*names: str) -> Constraint:
    """Allow one of a few names."""
    listed = ", ".join(map(repr, names))
    return Constraint(
        listed if len(names) == 1 else f"one of {listed}",
        lambda value: isinstance(value, str) and value in names,
        lambda value: (
            next(iter(difflib.get_close_matches(value, names, 1)), None) if isinstance(value, str) else None
        ),
    )


def text(what: str) -> Constraint:
    """Allow a text that is not empty, described as ``what``."""
    return Constraint(
        f"{what} as text",
        lambda value: isinstance(value, str) and bool(value.strip()),
        lambda value: f"'{value}'" if isinstance(value, int | float) else None,
    )


def either(*constraints: Constraint) -> Constraint:
    """Allow every value that one of several constraints allows."""
    *first, last = (constraint.words for constraint in constraints)
    return Constraint(
        f"{', '.join(first)}{',' if len(first) > 1 else ''} or {last}",
        lambda value: any(constraint.holds(value) for constraint in constraints),
        lambda value: next((near for each in constraints if (near := each.nearest(value)) is not None), None),
    )


def _of_numpy(*names: str) -> tuple[type, ...]:
    """Return types of NumPy, of which there are values only if it has been imported."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else tuple(getattr(numpy, name) for name in names)


def _as_float(value: Any, kind: type | None = None) -> float:
    """Return a number as a float; NaN for all else, infinity for what is beyond float64.

    ``kind`` is what counts as a number, by default those of Python and NumPy.
    """
    kinds: Any = (int, float, *_of_numpy("integer", "floating")) if kind is None else kind
    if isinstance(value, bool) or not isinstance(value, kinds):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _unquoted(value: Any) -> str | None:
    """Return the number in a text, None if it is not one."""
    if not isinstance(value, str):
        return None
    try:
        return f"{float(value):g} (without quotes)"
    except ValueError:
        return None
