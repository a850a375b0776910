"""YAML read, overridden and saved."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from emtau_dask.errors import ConfigError, EmtauError, masked_values, short
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.locations import kind_of

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_DIGITS = 400
"""Far more than a config needs. Without limits, aliases of a short text fill the memory."""
ENDINGS = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """A SafeLoader with limits, which refuses repeated keys and reads ``1e-6`` as a number."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a value, counting what it holds; an alias counts as all that it stands for."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._too_large(f"it is nested more than {MAX_DEPTH} levels deep")
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return node
        if alias:
            if id(node) not in self._sizes:
                raise self._too_large("an alias stands for what it lies in")
        else:
            self._sizes[id(node)] = 1 + sum(self._sizes[id(inner)] for inner in _inside(node))
        if self._sizes[id(node)] > MAX_VALUES:
            raise self._too_large(f"it holds more than {MAX_VALUES:,} values, those of aliases counted")
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
            raise self._too_large(f"a number has {len(node.value):,} digits, and {MAX_DIGITS} are the most")
        return node

    def _too_large(self, problem: str) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

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


def _inside(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the values directly inside a composed one, keys too."""
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that puts into quotes whatever `_Loader` would read as something else."""


# YAML 1.1, which PyYAML follows, wants a point and a sign in 1.0e-06; people write 1e-6.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parse_yaml(text: str, origin: str) -> object:
    """Return the value of one YAML document; ``origin`` names it in messages.

    Raises
    ------
    ConfigError
        It is not YAML, a mapping repeats a key, or a limit is exceeded: `MAX_BYTES`, `MAX_DEPTH`,
        `MAX_VALUES` or `MAX_DIGITS`.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{origin} is longer than {MAX_BYTES:,} characters, the most that is read")
    try:
        return cast(object, yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{origin} is not valid YAML{place}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        # PyYAML passes on what Python says of a date, a number or a binary value that is none.
        raise ConfigError(f"{origin} holds a value that cannot be read: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping of sections in a YAML file; raises `ConfigError` where there is none."""
    kind = kind_of(str(path))
    if kind is not None:
        raise ConfigError(
            f"{path} is {kind}, not a run config (YAML). Give a file that names rows by data.path and the "
            "number of components by model.n_components; see configs/ for examples"
        )
    try:
        with open(path, encoding="utf-8", opener=_opened_at_once) as file:
            text = file.read(MAX_BYTES + 1)
            unwritten = not text and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config {path} cannot be read: {reason}") from error
    if unwritten:
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
        The override has no ``=`` or no key, or the key leads through something that is not a mapping.
    """
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        raise ConfigError(
            f"--set {short(override)} must read section.key=value, for example model.n_components=8"
        )
    value = parse_yaml(text, f"--set {key.strip()}")
    return _with_value(content, parts, value, ".".join(parts))


def to_yaml(content: Mapping[str, Any]) -> str:
    """Return plain values as a YAML document, which `parse_yaml` reads as the same values."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def in_yaml(value: str) -> str:
    """Return a string in YAML, in quotes where `parse_yaml` would read it as something else."""
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


def _with_value(content: dict[str, Any], parts: Sequence[str], value: object, dotted: str) -> dict[str, Any]:
    head, *rest = parts
    if not rest:
        return {**content, head: value}
    inner = {} if content.get(head) is None else content[head]
    if not isinstance(inner, dict):
        raise ConfigError(
            f"--set {dotted}: {head} holds {_kind(inner)}, which has no key {rest[0]!r}; "
            f"set {head} as a whole"
        )
    return {**content, head: _with_value(inner, rest, value, dotted)}


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else short(value)


def save_config(content: Mapping[str, Any], path: Path, *, overwrite: bool) -> None:
    """Write the plain values of a config to a YAML file, whole; a file that holds the same may be there.

    Raises
    ------
    ConfigError
        The name does not end as that of a config, or the values hold the password or the query of a URL.
    EmtauError
        Another file is there and ``overwrite`` is not set, or nothing can be written there.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"{path} must end in {' or '.join(ENDINGS)}, so that emtau fit takes it for a config"
        )
    if masked_values(content) != content:
        raise ConfigError(
            f"{path} would hold a secret: the user, password or query of a URL. Give credentials by the "
            "environment, or save no config"
        )
    text = to_yaml(content)
    with writing_errors("the config", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not overwrite and path.read_bytes() != text.encode():
            raise EmtauError(f"{path} already exists; use --overwrite to replace it, or choose another name")
        with tempfile.TemporaryDirectory(prefix=".emtau-", dir=path.parent) as folder:
            private = Path(folder) / path.name
            private.write_text(text, encoding="utf-8")
            private.replace(path)
