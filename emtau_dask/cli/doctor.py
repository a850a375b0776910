"""The command `emtau doctor`: versions of the packages, and whether a fit can write where it must.

Each check imports what it looks at, so that a package that cannot be imported is a finding like another.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from typing import Literal, NamedTuple

import click
from packaging.requirements import Requirement

from emtau_dask.cli.options import debug_option, json_option
from emtau_dask.cli.terminal import FAILED, echo, echo_json
from emtau_dask.errors import EmtauError, shown

OWN = __name__.partition(".")[0]
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
"""Modules of packages that are called otherwise."""
FOR_DEVELOPMENT = {"test", "docs", "pages", "dev"}
DISPENSABLE = {"numba"}
"""Packages that a plain install brings where they have wheels, and that fits do without."""
Status = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    """What a check found: ``"note"`` is of something that not everybody needs, ``"wrong"`` of a fault."""

    name: str
    status: Status
    text: str


@click.command()
@click.argument("checkpoint", required=False)
@json_option
@debug_option
@click.pass_context
def doctor(ctx: click.Context, checkpoint: str | None, as_json: bool) -> None:
    """Say whether all that a fit needs is there; exit with 1 if something is wrong.

    Versions of packages, and whether temporary files and, if it is given, a place for checkpoints
    (CHECKPOINT, a path or URL) can be written.
    """
    found = [Finding("python", "ok", platform.python_version()), Finding(OWN, "ok", metadata.version(OWN))]
    found += [*_packages(), _checked("temporary files", _temporary_files)]
    if checkpoint is not None:
        found.append(_checked("checkpoint", partial(_checkpoint, checkpoint)))
    healthy = all(finding.status != "wrong" for finding in found)
    if as_json:
        echo_json({"ok": healthy, "findings": [finding._asdict() for finding in found]})
    else:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            echo(f"{finding.status:5}  {finding.name:{width}}  {finding.text}")
    ctx.exit(0 if healthy else FAILED)


def _checked(name: str, check: Callable[[], tuple[Status, str]]) -> Finding:
    """Return what a check finds; whatever it raises is a fault."""
    try:
        return Finding(name, *check())
    except Exception as error:  # of whatever is broken here; that is what is asked for
        kind = "" if isinstance(error, EmtauError) else f"{type(error).__name__}: "
        return Finding(name, "wrong", shown(" ".join(f"{kind}{error}".split())))


def _packages() -> Iterator[Finding]:
    """Yield what is found of the packages that fits need, then of those that extras bring to users."""
    requirements = [Requirement(line) for line in metadata.requires(OWN) or ()]
    extras = metadata.metadata(OWN).get_all("Provides-Extra") or ()
    done: set[str] = set()
    for extra in ("", *(each for each in extras if each not in FOR_DEVELOPMENT)):
        for needed in requirements:
            applies = needed.marker is None or needed.marker.evaluate({"extra": extra})
            if applies and needed.name not in done:
                done.add(needed.name)
                yield _checked(needed.name, partial(_package, needed, extra))


def _package(needed: Requirement, extra: str) -> tuple[Status, str]:
    """Import a package; return the status and the version or the remedy."""
    remedy = f"pip install '{OWN}[{extra}]'" if extra else f"pip install '{needed.name}{needed.specifier}'"
    try:
        number = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        absent: Status = "note" if extra or needed.name in DISPENSABLE else "wrong"
        return absent, f"not installed: {remedy}"
    if not needed.specifier.contains(number, prereleases=True):
        return "wrong", f"{number}, but {needed.specifier} is needed: {remedy}"
    import_module(MODULES.get(needed.name.lower(), needed.name))
    return "ok", number


def _temporary_files() -> tuple[Status, str]:
    """Write a file without a name where fits without a checkpoint keep the state of rows."""
    import dask
    from dask.utils import format_bytes

    place = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"emtau")
    return "ok", f"{format_bytes(shutil.disk_usage(place).free)} free in {place}"


def _checkpoint(place: str) -> tuple[Status, str]:
    """Write, read and remove a small object in a place for checkpoints."""
    from emtau_dask.storage.commits import holds_run
    from emtau_dask.storage.stores import object_store, try_store

    objects = object_store(place)
    exclusive = try_store(objects)
    said = f"{objects.location} can be written and read{'; it holds a run' if holds_run(objects) else ''}"
    if not exclusive:
        return "note", f"{said}; two processes that resume one run might not notice"
    return "ok", said
