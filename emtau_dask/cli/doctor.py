"""The command `emtau doctor`: checks of the packages, and of the places where a fit writes.

Each check imports what it needs, so that a package that cannot be imported is only one finding.
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

from emtau_dask.cli.options import common_options, json_option
from emtau_dask.cli.terminal import FAILED, SummarisedCommand, echo, echo_json
from emtau_dask.errors import EmtauError, shown

OWN = __name__.partition(".")[0]
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
"""Modules of packages whose names differ."""
FOR_DEVELOPMENT = {"test", "docs", "pages", "dev"}
OPTIONAL = {"numba"}
"""Packages that are installed by default if they have wheels, but that fits do not need."""
Status = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    """The result of a check: ``"note"`` for something that not everybody needs, ``"wrong"`` for a fault."""

    name: str
    status: Status
    text: str


@click.command(cls=SummarisedCommand)
@click.argument("checkpoint", required=False)
@json_option
@common_options
@click.pass_context
def doctor(ctx: click.Context, checkpoint: str | None, as_json: bool) -> None:
    """Check that everything that a fit needs is there.

    Checks the versions of packages, and that temporary files and, if given, a place for checkpoints
    (CHECKPOINT, a path or URL) can be written. Exits with 1 if something is wrong.
    """
    findings = [Finding("python", "ok", platform.python_version()), Finding(OWN, "ok", metadata.version(OWN))]
    findings += [*_packages(), _checked("temporary files", _temporary_files)]
    if checkpoint is not None:
        findings.append(_checked("checkpoint", partial(_checkpoint, checkpoint)))
    healthy = all(finding.status != "wrong" for finding in findings)
    if as_json:
        echo_json({"ok": healthy, "findings": [finding._asdict() for finding in findings]})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            echo(f"{finding.status:5}  {finding.name:{width}}  {finding.text}")
    ctx.exit(0 if healthy else FAILED)


def _checked(name: str, check: Callable[[], tuple[Status, str]]) -> Finding:
    """Return the finding of a check; any error is a fault."""
    try:
        return Finding(name, *check())
    except Exception as error:  # Any error is what the user wants to know.
        kind = "" if isinstance(error, EmtauError) else f"{type(error).__name__}: "
        return Finding(name, "wrong", shown(" ".join(f"{kind}{error}".split())))


def _packages() -> Iterator[Finding]:
    """Yield the findings on the packages that fits need, then on those of the extras for users."""
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
        absent: Status = "note" if extra or needed.name in OPTIONAL else "wrong"
        return absent, f"not installed: {remedy}"
    if not needed.specifier.contains(number, prereleases=True):
        return "wrong", f"{number}, but {needed.specifier} is needed: {remedy}"
    import_module(MODULES.get(needed.name.lower(), needed.name))
    return "ok", number


def _temporary_files() -> tuple[Status, str]:
    """Write a temporary file in the folder where fits without a checkpoint keep row state."""
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
    text = f"{objects.location} can be written and read{'; it holds a run' if holds_run(objects) else ''}"
    if not exclusive:
        return "note", f"{text}; two processes that resume one run might not notice"
    return "ok", text
