"""Frozen records as strict JSON and arrays, and back, by the records' own annotations.

Input may be untrusted. It becomes records, numbers and texts of the annotated types within the annotated
constraints, or is refused; no name in it is looked up. Numbers are finite, integers are counts of at most
2**48, and nesting is as deep as the annotations, or 32 levels if these allow any JSON.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from emtau_dask.constraints import Constraint
from emtau_dask.errors import short

MAX_COUNT = 2**48
MAX_INTEGER, MAX_DEPTH = 10**20, 32
"""Maximum integer and depth in JSON of any kind, such as the parameters of a user's policy."""


class FormatError(ValueError):
    """A value cannot be written or read; ``path`` are the fields that lead to it, and ``why`` says why."""

    def __init__(self, why: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(f"{short('.'.join(path), 120)[1:-1] or 'it'} {why}")
        self.why, self.path = why, path

    def within(self, name: str) -> FormatError:
        """Return the error for the value in a field."""
        return FormatError(self.why, (name, *self.path))


class Form(NamedTuple):
    """How values of one type become JSON, and how JSON becomes values; both raise `FormatError`.

    The second argument stores the arrays in values: ``put(name, array)`` returns the JSON for an array, and
    ``get(name, json)`` returns the array. ``name`` is the stored name of the attribute.
    """

    encode: Callable[[Any, Any], Any]
    decode: Callable[[Any, Any], Any]


def _wrong(value: object, allowed: str) -> FormatError:
    return FormatError(f"is {short(value)}: it must be {allowed}")


def _flag(value: Any, _: Any = None) -> bool:
    if type(value) is not bool:
        raise _wrong(value, "true or false")
    return value


def _count(value: Any, _: Any = None) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise _wrong(value, f"an integer from 0 to {MAX_COUNT}")
    return value


def _number(value: Any, _: Any = None) -> float:
    if isinstance(value, float) and math.isfinite(value):
        return value
    if type(value) is int and abs(value) <= MAX_COUNT:
        return float(value)
    raise _wrong(value, "a finite number")


def _text(value: Any, _: Any = None) -> str:
    try:
        str.encode(value)
    except (TypeError, UnicodeEncodeError):
        raise _wrong(value, "a text of valid Unicode") from None
    return str(value)


def _any_json(value: Any, _: Any = None, depth: int = MAX_DEPTH) -> Any:
    """Return JSON of any kind."""
    if depth == 0:
        raise FormatError(f"is nested too deeply: it must have at most {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return _by_name(value, _text, lambda inner: _any_json(inner, None, depth - 1))
    if isinstance(value, (list, tuple)):
        return [_any_json(inner, None, depth - 1) for inner in value]
    if isinstance(value, str):
        return _text(value)
    whole = type(value) is int and abs(value) <= MAX_INTEGER
    if value is None or type(value) is bool or whole or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise _wrong(
        value, "text, a number of at most 20 digits, true, false, null, or lists and objects of these"
    )


def _by_name(
    values: Mapping[Any, Any], key: Callable[[Any], Any], converted: Callable[[Any], Any]
) -> dict[str, Any]:
    found, name = {}, ""
    try:
        for name, value in values.items():
            found[key(name)] = converted(value)
    except FormatError as error:
        raise error.within(str(name)) from error
    return found


def as_list(value: Any) -> list[Any]:
    """Return a JSON array."""
    if not isinstance(value, list):
        raise _wrong(value, "a list")
    return value


def as_object(value: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a JSON object; ``names``, if given, are those of all its fields."""
    if not isinstance(value, dict):
        raise _wrong(value, "an object")
    for name in names or ():
        if name not in value:
            raise FormatError("is missing", (name,))
    for name in value:
        if names is not None and name not in names:
            raise FormatError(f"is {short(value[name])}: there is no such field", (name,))
    return value


SCALARS: Mapping[Any, Form] = MappingProxyType(
    {
        kind: Form(check, check)
        for kind, check in ((bool, _flag), (int, _count), (float, _number), (str, _text), (Any, _any_json))
    }
)

Arguments = tuple[Any, ...]


def _none() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Codec:
    """A format: what the annotations of records do not say.

    Attributes
    ----------
    names : mapping of type to mapping of str to str
        The stored attributes of a record, with their stored names; without an entry all fields are stored
        under their own names. An attribute that is not a field is an array.
    makers : mapping of type to callable (arrays, values) -> object
        Makes a record from the values of these attributes, if its type alone cannot.
    not_finite : mapping of (type, str) to float
        Attributes that may have this value, which JSON does not have; it is stored as null.
    by_column : frozenset of type
        Tuples of these records are stored as one list for each attribute.
    special : mapping of type to Form
        Types with a form of their own.
    """

    names: Mapping[type, Mapping[str, str]] = field(default_factory=_none)
    makers: Mapping[type, Callable[[Any, dict[str, Any]], Any]] = field(default_factory=_none)
    not_finite: Mapping[tuple[type, str], float] = field(default_factory=_none)
    by_column: frozenset[type] = frozenset()
    special: Mapping[type, Form] = field(default_factory=_none)

    def form(self, kind: Any, name: str = "") -> Form:
        """Return the form of an annotation, for an attribute that is stored under ``name``."""
        found = self.special.get(kind) or SCALARS.get(kind)
        if found is not None:
            return found
        builders: dict[Any, Callable[[Arguments, str], Form]] = {
            np.ndarray: self._array,
            Union: self._optional,
            UnionType: self._optional,
            Literal: self._literal,
            Annotated: self._constrained,
            tuple: self._tuple,
            dict: self._mapping,
            abc.Mapping: self._mapping,
        }
        build = builders.get(get_origin(kind) or kind)
        if build is not None:
            return build(get_args(kind), name)
        if issubclass(kind, Enum):
            return _choice({member.value: member for member in kind})
        assert is_dataclass(kind), kind
        return self.record(kind)

    def _array(self, _: Arguments, name: str) -> Form:
        return Form(
            lambda values, arrays: arrays.put(name, values), lambda json, arrays: arrays.get(name, json)
        )

    def _optional(self, arguments: Arguments, name: str) -> Form:
        (inner,) = (self.form(each, name) for each in arguments if each is not NoneType)
        return Form(
            lambda value, arrays: None if value is None else inner.encode(value, arrays),
            lambda json, arrays: None if json is None else inner.decode(json, arrays),
        )

    def _literal(self, arguments: Arguments, _: str) -> Form:
        return _choice({each: each for each in arguments})

    def _constrained(self, arguments: Arguments, _: str) -> Form:
        constraint: Constraint = arguments[1]

        def check(value: Any, _: Any) -> Any:
            if not constraint.holds(value):
                raise _wrong(value, constraint.words)
            return _any_json(value)

        return Form(check, check)

    def _tuple(self, arguments: Arguments, name: str) -> Form:
        if arguments[0] in self.by_column:
            return self._columns(arguments[0])
        forms = [self.form(each, name) for each in arguments if each is not ...]
        endless = len(forms) < len(arguments)

        def each_with(values: Any) -> Iterator[tuple[Form, Any]]:
            return zip(forms * len(values) if endless else forms, values, strict=True)

        def encode(values: Any, arrays: Any) -> list[Any]:
            return [form.encode(value, arrays) for form, value in each_with(values)]

        def decode(json: Any, arrays: Any) -> tuple[Any, ...]:
            if len(as_list(json)) != len(forms) and not endless:
                raise _wrong(json, f"a list of {len(forms)}")
            return tuple(form.decode(value, arrays) for form, value in each_with(json))

        return Form(encode, decode)

    def _mapping(self, arguments: Arguments, name: str) -> Form:
        key, inner = (self.form(each, name) for each in arguments)

        def encode(values: Any, arrays: Any) -> dict[str, Any]:
            return _by_name(
                values, lambda own: key.encode(own, arrays), lambda value: inner.encode(value, arrays)
            )

        def decode(json: Any, arrays: Any) -> dict[str, Any]:
            return _by_name(
                as_object(json),
                lambda text: key.decode(text, arrays),
                lambda value: inner.decode(value, arrays),
            )

        return Form(encode, decode)

    def record(self, kind: Any) -> Form:
        """Return the form of a record: an object with exactly its stored attributes."""
        forms, make = self._attributes(kind), self.makers.get(kind)
        names = [name for name, _ in forms.values()]

        def encode(record: Any, arrays: Any) -> dict[str, Any]:
            found, name = {}, ""
            try:
                for attribute, (name, form) in forms.items():
                    found[name] = form.encode(getattr(record, attribute), arrays)
            except FormatError as error:
                raise error.within(name) from error
            return found

        def decode(json: Any, arrays: Any) -> Any:
            json, found, name = as_object(json, names), {}, ""
            try:
                for attribute, (name, form) in forms.items():
                    found[attribute] = form.decode(json[name], arrays)
            except FormatError as error:
                raise error.within(name) from error
            return kind(**found) if make is None else make(arrays, found)

        return Form(encode, decode)

    def _attributes(self, kind: Any) -> dict[str, tuple[str, Form]]:
        hints, forms = get_type_hints(kind, include_extras=True), {}
        for attribute, name in (self.names.get(kind) or {hint: hint for hint in hints}).items():
            unknown = self.not_finite.get((kind, attribute))
            form = self.form(hints.get(attribute, np.ndarray), name) if unknown is None else _or_null(unknown)
            forms[attribute] = name, form
        return forms

    def _columns(self, kind: Any) -> Form:
        record, names = self.record(kind), [name for name, _ in self._attributes(kind).values()]

        def encode(records: Sequence[Any], arrays: Any) -> dict[str, Any]:
            rows = [record.encode(each, arrays) for each in records]
            return {name: [row[name] for row in rows] for name in names}

        def decode(json: Any, arrays: Any) -> tuple[Any, ...]:
            columns = [as_list(as_object(json, names)[name]) for name in names]
            if len({len(column) for column in columns}) > 1:
                raise FormatError("has columns of several lengths")
            rows = zip(*columns, strict=True)
            return tuple(record.decode(dict(zip(names, row, strict=True)), arrays) for row in rows)

        return Form(encode, decode)


def _choice(members: Mapping[str, Any]) -> Form:
    """Return the form of one of several values, from their texts on disk."""
    texts = {member: text for text, member in members.items()}

    def looked_up(value: Any, table: Mapping[Any, Any]) -> Any:
        try:
            return table[value]
        except (KeyError, TypeError):
            raise _wrong(value, f"one of {', '.join(map(repr, members))}") from None

    return Form(lambda member, _: looked_up(member, texts), lambda json, _: looked_up(json, members))


def _or_null(unknown: float) -> Form:
    return Form(
        lambda value, _: _number(value) if math.isfinite(value) else None,
        lambda json, _: unknown if json is None else _number(json),
    )
