"""Reading YAML, overriding its values, and writing it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from emtau_dask.errors import ConfigError, short
from emtau_dask.storage.files import stream_at
from emtau_dask.storage.locations import kind_of

ENDINGS = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses repeated keys; PyYAML's silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} appears twice; keep one of them",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that puts into quotes whatever `_Loader` would read as something else."""


# YAML 1.1, which PyYAML follows, requires a point and a sign, as in 1.0e-06; people write 1e-6.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parse_yaml(text: str, origin: str) -> object:
    """Return the value of one YAML document; ``origin`` names it in messages.

    Raises
    ------
    ConfigError
        It is not YAML, or a mapping repeats a key.
    """
    try:
        return cast(object, yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{origin} is not valid YAML{place}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        # PyYAML does not catch Python's errors for an invalid date, number or binary value.
        raise ConfigError(f"{origin} holds a value that cannot be read: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping of sections in a YAML file; raises `ConfigError` if there is none."""
    kind = kind_of(str(path))
    if kind is not None:
        raise ConfigError(
            f"{path} is {kind}, not a run config (YAML). Give a file that names rows by data.path and the "
            "number of components by model.n_components; see configs/ for examples"
        )
    stream = stream_at(str(path))
    if stream not in (None, "a pipe"):
        raise ConfigError(f"config {path} is {stream}; give a file")
    try:
        with open(path, encoding="utf-8", opener=_opened_at_once) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config {path} cannot be read: {reason}") from error
    if stream is not None and not text:
        raise ConfigError(f"config {path} is a pipe that nobody writes to; give a file")
    content = parse_yaml(text, f"config {path}")
    if not isinstance(content, dict):
        raise ConfigError(
            f"config {path} must hold a mapping of sections (data, model, …), "
            f"but it holds {_kind(content)}; see configs/ for examples"
        )
    return content


def _opened_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe; later reads do wait."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    return descriptor


def apply_override(content: dict[str, Any], override: str) -> dict[str, Any]:
    """Return a copy of nested mappings with one override: a dotted key, ``=``, and a value in YAML.

    Raises
    ------
    ConfigError
        The override has no ``=`` or no key, or a part of the key is not a mapping.
    """
    key, equals, text = override.partition("=")
    *sections, last = (part.strip() for part in key.split("."))
    if not equals or not all((*sections, last)):
        raise ConfigError(
            f"--set {short(override)} must read section.key=value, for example model.n_components=8"
        )
    changed = section = dict(content)
    for name in sections:
        inner = {} if section.get(name) is None else section[name]
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {key}: {name} holds {_kind(inner)}, which has no such key; set {name} as a whole"
            )
        section[name] = dict(inner)
        section = section[name]
    section[last] = parse_yaml(text, f"--set {key.strip()}")
    return changed


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else short(value)


def to_yaml(content: Mapping[str, Any]) -> str:
    """Return values as a YAML document, which `parse_yaml` reads as the same values."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def in_yaml(value: str) -> str:
    """Return a string in YAML, in quotes if `parse_yaml` would read it as something else."""
    try:
        if value.isprintable() and "  " not in value and parse_yaml(value, "a value") == value:
            return value
    except ConfigError:
        pass

    def escaped(char: str) -> str:
        if char in '"\\':
            return f"\\{char}"
        hidden = not char.isprintable() or (char == " " and "  " in value)
        return f"\\U{ord(char):08x}" if hidden else char

    return f'"{"".join(map(escaped, value))}"'


def setting(key: str, value: object) -> str:
    """Return the argument of ``--set`` that sets a key to a string or a list of strings."""
    if isinstance(value, list | tuple):
        return f"{key}=[{', '.join(map(in_yaml, value))}]"
    return f"{key}={in_yaml(str(value))}"
