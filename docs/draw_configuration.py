"""Writes `docs/configuration.md`: every key of a config, read from the schema.

Run it after a change of the schema, of its docstrings, or of the parameters of a policy:

    python docs/draw_configuration.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from emtau_dask.cli.config import RunConfig
from emtau_dask.cli.sections import Allowed, Section, sections_in
from emtau_dask.cli.yaml import in_yaml
from emtau_dask.constraints import MAX_ITERATIONS
from emtau_dask.datasets import DATASETS
from emtau_dask.policies.registry import ALGORITHMS
from emtau_dask.settings import AUTO

PAGE = Path(__file__).parent / "configuration.md"
COMPLETED = {"output.directory": "`runs/` and the name of the config", "algorithm.name": f"`{AUTO}`"}
"""Defaults of keys that the schema wants given, and that are added before."""
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false"}
SHORTER = (
    (f" and at most {MAX_ITERATIONS:,}", ""),
    (f"{2**64 - 1:,}", "2⁶⁴ − 1"),
    (f"{2**32 - 1:,}", "2³² − 1"),
    (r"(an integer|a finite number) of at least (\S+) and at most ([^ ]+( − 1)?)", r"\2 to \3"),
    (r"(an integer|a finite number) of at least (\S+)", r"≥ \2"),
    (r"(a number )?above 0 and at most 1", "above 0, at most 1"),
    (r"one of |a (?=list of)| as text|^a list of numbers(?= or null)", ""),
)
"""Words of messages, and what replaces them in a table that has a column of types."""
KEY = re.compile(r"^(\w+(?:, \w+)*) : ")
HEAD = """<!-- Written by docs/draw_configuration.py from the schema. -->
# Configuration

A config is YAML: sections with keys. `emtau fit CONFIG` and `emtau compare CONFIG` read it,
`--set section.key=value` changes a key, and `emtau fit DATA -k 8 --save-config FILE` writes one. Needed are
`model.n_components` and either `data.path` or `data.dataset`.

```yaml
# fit.yaml
data:
  path: points.zarr
model:
  n_components: 4
stop:
  max_iter: 100
```

Relative paths are relative to the working directory, those of `output.model` and `output.labels` to
`output.directory`. Anything else than what the tables allow is refused, with the key's full name and the
nearest valid one. A key with a name in brackets belongs to what has that name: `algorithm.tau` (em-tau) to
`algorithm.name: em-tau`. A key whose default is `null` allows `null`. Integers are at most 10¹², where the
table names no limit.
"""


@dataclass(frozen=True)
class Key:
    """A key of a config: its dotted name, the variants of its section that have it, and its field."""

    path: str
    variants: tuple[str, ...]
    field: FieldInfo
    meaning: str


def meanings(text: str) -> dict[str, str]:
    """Return what a numpydoc docstring says of each attribute or parameter, on one line."""
    found: dict[str, str] = {}
    names: list[str] = []
    lines = re.split(r"^Parameters\n-+\n", text, flags=re.MULTILINE)
    for line in lines[1].splitlines() if len(lines) > 1 else []:
        if re.match(r"-+$", line):
            break
        if head := KEY.match(line):
            names = head[1].split(", ")
        elif line.startswith("    "):
            for name in names:
                found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def meaning_of(model: type[Section], key: str) -> str:
    """Return what a key of a section means; raises `LookupError` where nothing says it.

    The text below it in the schema, or the docstring of the policy or dataset whose parameter it is.
    """
    for each in model.__mro__:
        field = each.model_fields.get(key) if issubclass(each, Section) else None
        if field is not None and field.description:
            return " ".join(field.description.split())
    variant = str(variant_of(model))
    found = meanings(getdoc(ALGORITHMS.get(variant, DATASETS.get(variant))) or "")
    if key in found:
        return found[key]
    raise LookupError(f"nothing says what {key} of {model.__name__} means")


def variant_of(model: type[Section]) -> str | None:
    """Return the name by which a section is chosen among others; None where there are no others."""
    return next((name for name, each in model.variants.items() if each is model), None)


def keys(
    prefix: str,
    models: list[type[Section]],
    described: frozenset[tuple[str, tuple[str, ...]]] = frozenset(),
) -> Iterator[Key]:
    """Yield the keys of a section, which is one of some variants, in their order; sections inside last.

    Keys of variants that are ``described``, by name and variants, are left out.
    """
    owners: dict[str, list[type[Section]]] = {}
    for model in models:
        for name in model.model_fields:
            owners.setdefault(name, []).append(model)
    variants_of = {
        name: () if having == models else tuple(str(variant_of(model)) for model in having)
        for name, having in owners.items()
    }
    here = frozenset((name, variants) for name, variants in variants_of.items() if variants)
    inside: list[Key] = []
    for name, having in owners.items():
        field, variants = having[0].model_fields[name], variants_of[name]
        if (name, variants) in described:
            continue
        inner = sections_in(field.annotation)
        yield Key(f"{prefix}.{name}", variants, merged(name, having), meaning_of(having[0], name))
        entry = "[]" if get_origin(field.annotation) is tuple else ""
        inside += keys(f"{prefix}.{name}{entry}", inner, here)
    yield from inside


def merged(name: str, models: list[type[Section]]) -> FieldInfo:
    """Return the field of a key; of one that tells variants apart, with all their names."""
    fields = [model.model_fields[name] for model in models]
    if len(fields) == 1 or get_origin(fields[0].annotation) is not Literal:
        return fields[0]
    names = tuple(get_args(field.annotation)[0] for field in fields)
    return FieldInfo(annotation=Literal[names])


def type_text(annotation: Any) -> str:
    """Return a type in the words of YAML."""
    if sections_in(annotation):
        return "list of sections" if get_origin(annotation) is tuple else "section"
    if annotation in TYPES:
        return TYPES[annotation]
    origin, inner = get_origin(annotation), [each for each in get_args(annotation) if each is not NoneType]
    if origin is Literal:
        return "text"
    if origin is tuple:
        return f"list of {type_text(inner[0])}s"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_text, inner)))
    return type_text(inner[0])


def default_text(key: Key) -> str:
    """Return the value of a key that is left out."""
    if key.path in COMPLETED:
        return COMPLETED[key.path]
    if key.field.is_required():
        return "needed"
    value = key.field.default
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == ():
        return "`[]`"
    if isinstance(value, str):
        return f"`{in_yaml(value)}`"
    return f"`{value:_}`" if isinstance(value, int) else f"`{value}`"


def allowed_text(key: Key) -> str:
    """Return what the schema says of allowed values; nothing where the type says all."""
    if get_origin(key.field.annotation) is Literal:
        return ", ".join(f"`{name}`" for name in get_args(key.field.annotation))
    said = [
        each.func.words for each in key.field.metadata if isinstance(getattr(each, "func", None), Allowed)
    ]
    text = re.sub(r"'([^']+)'", r"`\1`", "; ".join(said))
    for long, short in SHORTER:
        text = re.sub(long, short, text)
    return text.removesuffix(" or null") if key.field.default is None else text


def value_text(key: Key) -> str:
    """Return what values a key takes: what is allowed, behind its type where that is a range."""
    kind, allowed = type_text(key.field.annotation), allowed_text(key)
    return f"{kind.partition(' or ')[0]} {allowed}" if re.match(r"[\d≥]|above", allowed) else allowed or kind


def table(title: str, listed: list[Key]) -> str:
    """Return a section's keys as a table."""
    lines = [f"## {title}\n", "| key | value | default | meaning |", "|---|---|---|---|"]
    for key in listed:
        name = f"`{key.path}`" + (f" ({', '.join(key.variants)})" if key.variants else "")
        meaning = re.sub(r"`+([^`]+)`+", r"`\1`", key.meaning).replace("`None`", "`null`")
        cells = [name, value_text(key), default_text(key), meaning]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    tables = [
        table(name, list(keys(name, sections_in(field.annotation))))
        for name, field in RunConfig.model_fields.items()
    ]
    return "\n\n".join([HEAD.rstrip(), *tables]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
