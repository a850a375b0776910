"""Field types of a run config: each refuses a wrong value in words of its own.

An error raised here carries the expectation and, where there is one, the nearest
valid value; `emtau_dask.config.messages` puts the key and the value before it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

from dask.utils import parse_bytes
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from emtau_dask.checks import MAX_ITERATIONS


def expected(what: str, nearest: object = None) -> PydanticCustomError:
    """Return the error for a value that is not `what`."""
    hint = "" if nearest is None else f"; the nearest valid value is {nearest}"
    return PydanticCustomError("expected", "{message}", {"message": f"must be {what}{hint}"})


def check_whole(value: object, minimum: int, what: str | None = None, maximum: int = MAX_ITERATIONS) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`."""
    what = what or f"a whole number of {minimum} or more"
    if isinstance(value, float) and value.is_integer():
        raise expected(what, max(minimum, int(value)))
    if isinstance(value, bool) or not isinstance(value, int):
        raise expected(what, _unquoted(value))
    if value < minimum:
        raise expected(what, minimum)
    if value > maximum:
        raise expected(f"{what}, and at most {maximum:,}", maximum)
    return value


def check_number(value: object, low: float, high: float, what: str, *, above_low: bool = False) -> float:
    """Return `value` as a float if it is finite and between `low` and `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise expected(what, _unquoted(value))
    try:
        result = float(value)
    except OverflowError:
        raise expected(what) from None
    if not math.isfinite(result):
        raise expected(what)
    if result < low or (above_low and result == low):
        raise expected(what, None if above_low else f"{low:g}")
    if result > high:
        raise expected(what, f"{high:g}")
    return result


def whole(minimum: int, maximum: int = MAX_ITERATIONS) -> BeforeValidator:
    """Return a validator for integers from `minimum` to `maximum`."""
    return BeforeValidator(lambda value: check_whole(value, minimum, maximum=maximum))


def number(minimum: float) -> BeforeValidator:
    """Return a validator for finite numbers of at least `minimum`."""
    what = f"a finite number of {minimum:g} or more"
    return BeforeValidator(lambda value: check_number(value, minimum, math.inf, what))


def choice(*names: str) -> BeforeValidator:
    """Return a validator for one of a few names."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in names:
            return value
        near = difflib.get_close_matches(str(value), names, n=1)
        raise expected(f"one of {', '.join(names)}", near[0] if near else None)

    return BeforeValidator(check)


def text(what: str) -> BeforeValidator:
    """Return a validator for a string that is not empty, described as `what`."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise expected(f"{what}, as text", f"'{value}'" if isinstance(value, int | float) else None)
        return value

    return BeforeValidator(check)


def strings(what: str) -> BeforeValidator:
    """Return a validator for a list of distinct names, described as `what`."""

    def check(value: object) -> tuple[str, ...]:
        names = tuple(value) if isinstance(value, list | tuple) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise expected(f"a list of {what}")
        if len(set(names)) < len(names):
            raise expected(f"a list of {what} without repeats")
        return names

    return BeforeValidator(check)


def boolean() -> BeforeValidator:
    """Return a validator for ``true`` and ``false``."""

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise expected("true or false")
        return value

    return BeforeValidator(check)


def memory() -> BeforeValidator:
    """Return a validator for an amount of memory, in dask's notation."""
    what = "an amount of memory above 0, such as 2GB or 512MiB"

    def check(value: object) -> str:
        try:
            size = parse_bytes(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else 0
        except (ValueError, OverflowError):
            size = 0
        if size <= 0:
            raise expected(what)
        return str(value)

    return BeforeValidator(check)


def optional(validator: BeforeValidator) -> BeforeValidator:
    """Return `validator` with ``null`` allowed as well."""
    inner: Callable[[Any], Any] = validator.func  # type: ignore[assignment]
    return BeforeValidator(lambda value: None if value is None else inner(value))


def _unquoted(value: object) -> str | None:
    """Return the number that a quoted value spells, if it does."""
    if not isinstance(value, str):
        return None
    try:
        return f"{float(value):g} (without quotes)"
    except ValueError:
        return None
