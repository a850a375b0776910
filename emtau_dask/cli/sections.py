"""Sections and field types of a config, and its errors as one message.

An error names the full dotted key, the value, what is allowed and, if there is one, the nearest valid key or
value.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from dask.utils import parse_bytes
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from emtau_dask.constraints import FLAG, NONE, Constraint, choice, either, integer, number, text
from emtau_dask.errors import short
from emtau_dask.storage.files import with_home

_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
MAX_ERRORS = 10
"""Maximum number of errors in a message; a file that is not a config may have a million."""


class Section(BaseModel):
    """A frozen part of a run config that refuses unknown keys; the docstring below a key describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    variants: ClassVar[Mapping[str, type[Section]]] = MappingProxyType({})
    """The alternatives of a section, by the value of its key `name`."""


def expected(what: str) -> PydanticCustomError:
    """Return the error for a value that is not ``what``."""
    return PydanticCustomError("expected", "{message}", {"message": f"must be {what}"})


@dataclass(frozen=True)
class Allowed:
    """Refuses values that a constraint does not allow; `words` end the message "the value must be …"."""

    words: str
    constraint: Constraint

    def __call__(self, value: object) -> object:
        """Return the value; raises pydantic's error for one that is not allowed."""
        if not self.constraint.holds(value):
            raise expected(self.words + self.constraint.hint(value))
        return value


def allowed(constraint: Constraint) -> BeforeValidator:
    """Return the validator of a constraint, whose messages write null, true and false as YAML does."""
    words = re.sub(r"\b(None|True|False)\b", lambda match: _YAML_WORDS[match[0]], constraint.words)
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
Paths = TypeVar("Paths", str, str | None, str | tuple[str, ...] | None)


def _with_home(paths: Paths) -> Paths:
    if isinstance(paths, str):
        return with_home(paths)
    return paths if paths is None else tuple(map(with_home, paths))


HOME = AfterValidator(_with_home)
"""Replaces ``~`` in paths."""
FilePath = Annotated[str, allowed(text("a path")), HOME]
OptionalPath = Annotated[str | None, optional(text("a path")), HOME]
OptionalPaths = Annotated[
    str | tuple[str, ...] | None, optional(either(text("a path"), names("paths"))), HOME
]
MemoryLimit = Annotated[
    Annotated[str, Field(coerce_numbers_to_str=True)] | None,
    optional(Constraint("an amount of memory above 0 (such as 2GiB or 512MiB)", _is_memory)),
]
"""A size in dask's notation; a number is a size in bytes."""


def as_variant(kind: type[Section], name: str, content: Mapping[Any, Any]) -> Section:
    """Return a section as the variant called ``name``; raises pydantic's error."""
    variant = kind.variants[name]
    keys = {key for each in kind.variants.values() for key in each.model_fields}
    foreign = [
        InitErrorDetails(
            type=PydanticCustomError("foreign", "{name}", {"name": name}), loc=(key,), input=content[key]
        )
        for key in content
        if key in keys and key not in variant.model_fields
    ]
    if foreign:
        raise ValidationError.from_exception_data(name, foreign)
    return variant.model_validate(content)


def named(kind: type[Section], default: str | None = None) -> BeforeValidator:
    """Return the validator of sections whose key `name` selects the variant."""

    def as_named_variant(content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        name, names = content.get("name", default), choice(*kind.variants)
        if names.holds(name):
            return as_variant(kind, name, {"name": name, **content})
        refusal = expected(names.words + names.hint(name)) if "name" in content else "missing"
        raise ValidationError.from_exception_data(
            kind.__name__, [InitErrorDetails(type=refusal, loc=("name",), input=name)]
        )

    return BeforeValidator(as_named_variant)


def explain(error: ValidationError, model: type[Section], names: Mapping[str, str]) -> str:
    """Return the first errors in one line, separated by semicolons.

    ``names`` are the names of some keys in the message; others have their own names.
    """
    keys = tuple(dict.fromkeys(valid_keys(model)))
    findings = error.errors(include_url=False)
    described = [_describe(finding, keys, names) for finding in findings[:MAX_ERRORS]]
    more = [f"and {len(findings) - MAX_ERRORS:,} more"] if len(findings) > MAX_ERRORS else []
    return "; ".join(described + more)


def valid_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of a model, those of sections included."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        for inner in sections_in(field.annotation):
            yield from valid_keys(inner, f"{key}.")


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a value may be or contain."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [*annotation.variants.values()] or [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]


def _describe(finding: ErrorDetails, keys: tuple[str, ...], names: Mapping[str, str]) -> str:
    steps, value = finding["loc"], finding["input"]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    plain = ".".join(step for step in steps if isinstance(step, str))
    key = names.get(path, path) or "the config"
    context, setting = finding.get("ctx", {}), f"{key} = {short(value)}"
    unknown = f"{key} is not a known key (its value is {short(value)})"
    match finding["type"]:
        case "expected":
            message = f"{key if isinstance(value, Mapping) else setting} {context['message']}"
        case "extra_forbidden":
            message = f"{unknown}; {_nearest(plain, keys)}"
        case "foreign":
            section = path.rpartition(".")[0]
            message = f"{unknown}; {context['name']} has no such key: remove it, or set {section} as a whole"
        case "missing":
            message = f"{key} is missing; give it a value"
        case "model_type" | "model_attributes_type" | "dict_type":
            inside = ", ".join(_siblings(f"{plain}.", keys))
            message = f"{setting} must be a section with the keys {inside}"
        case "tuple_type":
            message = f"{setting} must be a list"
        case _:
            message = f"{setting}: {finding['msg']}"
    return message


def _nearest(key: str, keys: tuple[str, ...]) -> str:
    """Return a text that names the valid key nearest to an unknown one."""
    leaf, siblings = key.rpartition(".")[2], _siblings(key, keys)
    leaves = [name.rpartition(".")[2] for name in siblings]
    if similar := difflib.get_close_matches(leaf, leaves, n=1) or [name for name in leaves if leaf in name]:
        return f"the nearest valid key is {siblings[leaves.index(similar[0])]}"
    if same := [name for name in keys if name.rpartition(".")[2] == leaf]:
        return f"the nearest valid key is {same[0]}"
    return f"valid keys are {', '.join(siblings)}"


def _siblings(key: str, keys: tuple[str, ...]) -> list[str]:
    """Return the keys of the section of ``key``."""
    section = key.rpartition(".")[0]
    return [name for name in keys if name.rpartition(".")[0] == section]
