"""Reading YAML the way a run config needs it, and applying ``--set`` overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from emtau_dask.errors import ConfigError

__all__ = ["apply_override", "parse_yaml", "read_yaml"]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and reads ``1e-6`` as a number."""

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


# YAML 1.1, which PyYAML follows, wants a point and a sign in 1.0e-06; people write 1e-6.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, origin: str) -> object:
    """Parse one YAML document.

    Parameters
    ----------
    text : str
        The document.
    origin : str
        Where it came from, for the error message.

    Returns
    -------
    object
        What the document holds.

    Raises
    ------
    ConfigError
        If it is not YAML, or a mapping repeats a key.
    """
    try:
        return cast(object, yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{origin} is not valid YAML{place}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping of sections.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    dict
        Its content; a fresh object that the caller may change.

    Raises
    ------
    ConfigError
        If the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config {path} cannot be read: {reason}") from error
    content = parse_yaml(text, f"config {path}")
    if not isinstance(content, dict):
        raise ConfigError(
            f"config {path} must hold a mapping of sections (data, model, …), "
            f"but it holds {_kind(content)}; see configs/ for examples"
        )
    return content


def apply_override(content: dict[str, Any], override: str) -> dict[str, Any]:
    """Return `content` with one ``a.b=c`` override applied.

    Parameters
    ----------
    content : dict
        Nested mappings; left as it is.
    override : str
        Dotted key, ``=``, and a value in YAML.

    Returns
    -------
    dict
        The changed copy.

    Raises
    ------
    ConfigError
        If `override` has no ``=`` or no key, or the key leads through something
        that is not a mapping.
    """
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {override!r} must read section.key=value, for example model.n_components=8")
    value = parse_yaml(text, f"--set {key.strip()}")
    return _with_value(content, parts, value, ".".join(parts))


def _with_value(content: dict[str, Any], parts: Sequence[str], value: object, dotted: str) -> dict[str, Any]:
    head, *rest = parts
    if not rest:
        return {**content, head: value}
    inner = content.get(head)
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        raise ConfigError(
            f"--set {dotted}: {head} holds {_kind(inner)}, which has no key {rest[0]!r}; "
            f"set {head} as a whole"
        )
    return {**content, head: _with_value(inner, rest, value, dotted)}


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else f"{value!r}"
