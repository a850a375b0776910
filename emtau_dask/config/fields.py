"""Sections and field types of a run config.

An error says what is allowed and, where there is one, the nearest valid value. `config.messages` puts
the key and the value before it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from dask.utils import parse_bytes
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from emtau_dask.checks import FLAG, NONE, Constraint, either, integer, number

_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}


class Section(BaseModel):
    """A frozen part of a run config that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def expected(what: str, nearest: object = None) -> PydanticCustomError:
    """Return the error for a value that is not ``what``."""
    hint = "" if nearest is None else f"; the nearest valid value is {nearest}"
    return PydanticCustomError("expected", "{message}", {"message": f"must be {what}{hint}"})


@dataclass(frozen=True)
class Allowed:
    """Refuses values that a constraint does not allow, in `words`, which end "the value must be …"."""

    words: str
    constraint: Constraint

    def __call__(self, value: object) -> object:
        """Return the value; raises pydantic's error for one that is not allowed."""
        if not self.constraint.holds(value):
            raise expected(self.words, self.constraint.nearest(value))
        return value


def allowed(constraint: Constraint) -> BeforeValidator:
    """Return the validator of a constraint, whose messages say null, true and false, as YAML does."""
    words = re.sub(r"\b(None|True|False)\b", lambda found: _YAML_WORDS[found[0]], constraint.words)
    return BeforeValidator(Allowed(words, constraint))


def optional(constraint: Constraint) -> BeforeValidator:
    """Return the validator of a constraint, with ``null`` allowed as well."""
    return allowed(either(constraint, NONE))


def text(what: str) -> Constraint:
    """Allow a text that is not empty, described as ``what``."""
    return Constraint(
        f"{what} as text",
        lambda value: isinstance(value, str) and bool(value.strip()),
        lambda value: f"'{value}'" if isinstance(value, int | float) else None,
    )


def names(what: str) -> Constraint:
    """Allow a list of one or more distinct texts, described as ``what``."""
    return Constraint(
        f"a list of {what} without repeats",
        lambda value: (
            isinstance(value, list | tuple)
            and bool(value)
            and all(isinstance(name, str) and name for name in value)
            and len(set(value)) == len(value)
        ),
    )


NUMBERS = Constraint(
    "a list of numbers",
    lambda value: isinstance(value, list | tuple) and all(map(number(-math.inf).holds, value)),
)


def _is_memory(value: Any) -> bool:
    try:
        return isinstance(value, str | int) and not isinstance(value, bool) and parse_bytes(value) > 0
    except (ValueError, OverflowError):
        return False


Count = Annotated[int, allowed(integer(1))]
Seed = Annotated[int, allowed(integer(0, 2**64 - 1))]
Switch = Annotated[bool, allowed(FLAG)]
FilePath = Annotated[str, allowed(text("a path"))]
OptionalPath = Annotated[str | None, optional(text("a path"))]
OptionalPaths = Annotated[str | tuple[str, ...] | None, optional(either(text("a path"), names("paths")))]
MemoryLimit = Annotated[
    Annotated[str, Field(coerce_numbers_to_str=True)] | None,
    optional(Constraint("an amount of memory above 0 (such as 2GB or 512MiB)", _is_memory)),
]
"""In dask's notation; a number is one of bytes."""
