"""The versions of what reads data and row state, in which processes that work together should agree."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, version

OWN = "emtau_dask"
READERS = (OWN, "zarr", "numcodecs", "dask", "distributed", "fsspec", "pyarrow")


def _version(package: str) -> str | None:
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def documentation() -> str:
    """Return the address of the documentation that the installed package names; "" where it names none."""
    try:
        named = metadata(OWN).get_all("Project-URL") or ()
    except PackageNotFoundError:
        return ""
    addresses = dict(line.split(", ", 1) for line in named)
    return str(addresses.get("Documentation", "")).rstrip("/")


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = ((package, _version(package)) for package in READERS)
    return tuple((package, number) for package, number in found if number is not None)


def software() -> dict[str, str]:
    """Return the versions of this process's packages, by name; of those that it has."""
    return dict(_versions())


def other_versions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return why a process with ``mine`` may fail where one with ``theirs`` does not; "" if they are alike.

    Both are `software`. The sentence ends in a space, to be followed by other remedies.
    """
    found = differences(mine, theirs, "the process that fits")
    return f"It has other versions of packages ({found}): install the same there. " if found else ""


def differences(its: Mapping[str, str], mine: Mapping[str, str], here: str = "here") -> str:
    """Return in what two processes differ, such as ``"zarr 3.0.1, here 3.1.3"``; "" where in nothing.

    Both have versions and the like by name; ``here`` is what the second process is called.
    """
    names = [*mine, *(name for name in its if name not in mine)]
    return ", ".join(
        f"{name} {its.get(name, 'missing')}, {here} {mine.get(name, 'missing')}"
        for name in names
        if its.get(name) != mine.get(name)
    )
