"""Sections and field types of a config, and its errors as one message.

An error names the full dotted key, the value, what is allowed and, where there is one, the nearest valid
key or value.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from dask.utils import parse_bytes
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from emtau_dask.constraints import FLAG, NONE, Constraint, choice, either, integer, number, text
from emtau_dask.errors import short

_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
MOST = 10
"""The most errors that are described; a file that is no config may have a million."""
Steps = list[int | str]


class Section(BaseModel):
    """A frozen part of a run config that refuses unknown keys; a text below a key says what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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


def explain(
    error: ValidationError, content: Mapping[str, Any], model: type[BaseModel], names: Mapping[str, str]
) -> str:
    """Return the first errors in one line, separated by semicolons.

    ``content`` is the config as read; ``names`` are what keys are called where it is not by themselves.
    """
    keys = tuple(dict.fromkeys(valid_keys(model)))
    tags = frozenset(_tags(model))
    findings = error.errors(include_url=False)
    described = [
        _describe(finding, _steps(finding["loc"], content, tags), keys, names) for finding in findings[:MOST]
    ]
    more = [f"and {len(findings) - MOST:,} more"] if len(findings) > MOST else []
    return "; ".join(described + more)


def valid_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of a model, those of sections included."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        for inner in _models(field.annotation):
            yield from valid_keys(inner, f"{key}.")


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _tags(model: type[BaseModel]) -> Iterator[str]:
    """Yield the values by which pydantic tells the variants of a section apart."""
    for field in model.model_fields.values():
        values = get_args(field.annotation)
        if get_origin(field.annotation) is Literal and len(values) == 1:
            yield values[0]
        for inner in _models(field.annotation):
            yield from _tags(inner)


def _steps(loc: tuple[int | str, ...], content: object, tags: frozenset[str]) -> Steps:
    """Return the keys that lead to an error, without the tags that pydantic puts between them."""
    steps: Steps = []
    for step in loc:
        if isinstance(content, Mapping):
            if step in tags and step not in content:
                continue
            content = content.get(step)
        elif isinstance(content, list) and isinstance(step, int):
            content = content[step]
        steps.append(step)
    return steps


def _describe(finding: ErrorDetails, steps: Steps, keys: tuple[str, ...], names: Mapping[str, str]) -> str:
    path, value = _dotted(steps), finding["input"]
    key = names.get(path, path) or "the config"
    context, setting = finding.get("ctx", {}), f"{key} = {short(value)}"
    match finding["type"]:
        case "expected":
            message = f"{key if isinstance(value, Mapping) else setting} {context['message']}"
        case "extra_forbidden":
            variant = ("", *finding["loc"])[-2]
            message = (
                f"{key} is not a known key (its value is {short(value)}); {_nearest(steps, variant, keys)}"
            )
        case "missing":
            message = f"{key} is missing; give it a value"
        case "union_tag_not_found":
            message = f"{key}.{_bare(context['discriminator'])} is missing; give it a value"
        case "union_tag_invalid":
            tags = choice(*map(_bare, context["expected_tags"].split(",")))
            refusal = expected(tags.words, tags.nearest(context["tag"]))
            named = f"{path}.{_bare(context['discriminator'])}"
            message = f"{names.get(named, named)} = {short(context['tag'])} {refusal.message()}"
        case "model_type" | "model_attributes_type" | "dict_type":
            inside = ", ".join(_siblings(f"{_plain(steps)}.", keys))
            message = f"{setting} must be a section with keys of its own: {inside}"
        case "tuple_type":
            message = f"{setting} must be a list"
        case _:
            message = f"{setting}: {finding['msg']}"
    return message


def _dotted(steps: Steps) -> str:
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps]
    return "".join(parts).lstrip(".")


def _plain(steps: Steps) -> str:
    return ".".join(step for step in steps if isinstance(step, str))


def _nearest(steps: Steps, variant: int | str, keys: tuple[str, ...]) -> str:
    """Say which valid key is nearest to an unknown one of a section's `variant`."""
    key = _plain(steps)
    section, _, leaf = key.rpartition(".")
    if key in keys:
        return f"{variant} does not take it: leave it out, or set {section} as a whole"
    siblings = _siblings(key, keys)
    leaves = [name.rpartition(".")[2] for name in siblings]
    if near := difflib.get_close_matches(leaf, leaves, n=1) or [name for name in leaves if leaf in name]:
        return f"the nearest valid key is {siblings[leaves.index(near[0])]}"
    if same := [name for name in keys if name.rpartition(".")[2] == leaf]:
        return f"the nearest valid key is {same[0]}"
    return f"valid keys are {', '.join(siblings)}"


def _siblings(key: str, keys: tuple[str, ...]) -> list[str]:
    """Return the keys of the section that ``key`` lies in."""
    section = key.rpartition(".")[0]
    return [name for name in keys if name.rpartition(".")[0] == section]


def _bare(name: str) -> str:
    return name.strip(" '")
