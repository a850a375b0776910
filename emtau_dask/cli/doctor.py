"""The command `emtau doctor`: whether all that a fit needs is there, and what it has to work with.

Each check imports what it looks at, so that a package that cannot be imported is a finding like another.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Literal

import click
from packaging.requirements import Requirement

from emtau_dask.cli.exits import FAILED
from emtau_dask.cli.options import debug_option, json_option
from emtau_dask.cli.printing import echo, echo_json
from emtau_dask.errors import EmtauError
from emtau_dask.messages import shown
from emtau_dask.versions import OWN

MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
"""Modules of packages that are called otherwise."""
FOR_DEVELOPMENT = {"test", "docs", "pages", "dev"}
DISPENSABLE = {"numba"}
"""Packages that a plain install brings where they have wheels, and that fits do without."""
Status = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
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
    """Say whether all that a fit needs is there; exit with 1 where something is wrong.

    Versions of packages, threads, memory, the compiler, settings of dask, temporary files, and, if it is
    given, a place for checkpoints (CHECKPOINT, a path or URL): whether it can be reached and written.
    """
    found = findings(checkpoint)
    healthy = all(finding.status != "wrong" for finding in found)
    if as_json:
        described = {"ok": healthy, "findings": [dataclasses.asdict(finding) for finding in found]}
        echo_json(described)
    else:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            echo(f"{finding.status:5}  {finding.name:{width}}  {finding.text}")
    ctx.exit(0 if healthy else FAILED)


def findings(checkpoint: str | None) -> list[Finding]:
    """Return what all checks find; ``checkpoint`` is a path or URL for checkpoints."""
    found = [*_packages(), *_optional_packages()]
    checks: dict[str, Callable[[], Finding]] = {
        "threads": _threads,
        "BLAS": _blas,
        "memory": _memory,
        "compiled tiles": _compiled,
        "settings": _settings,
        "temporary files": _temporary,
    }
    if checkpoint is not None:
        checks["checkpoint"] = partial(_checkpoint, checkpoint)
    return [*found, *(_checked(name, check) for name, check in checks.items())]


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except EmtauError as error:
        return Finding(name, "wrong", str(error))
    except Exception as error:  # of whatever is broken here; that is what is asked for
        return Finding(name, "wrong", shown(" ".join(f"{type(error).__name__}: {error}".split())))


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires(OWN) or ()]


def _applies(needed: Requirement, extra: str = "") -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": extra})


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", platform.python_version())
    yield Finding(OWN, "ok", metadata.version(OWN))
    for needed in _requirements():
        if _applies(needed):
            remedy = f"pip install '{needed.name}{needed.specifier}'"
            absent: Status = "note" if needed.name in DISPENSABLE else "wrong"
            yield _checked(needed.name, partial(_package, needed, absent, remedy))


def _optional_packages() -> Iterator[Finding]:
    required = {needed.name for needed in _requirements() if _applies(needed)}
    for extra in metadata.metadata(OWN).get_all("Provides-Extra") or ():
        for needed in _requirements():
            asked = needed.name not in required and _applies(needed, extra)
            if extra not in FOR_DEVELOPMENT and asked:
                remedy = f"pip install '{OWN}[{extra}]'"
                yield _checked(needed.name, partial(_package, needed, "note", remedy))


def _package(needed: Requirement, absent: Status, remedy: str) -> Finding:
    """Return what is found of a package, which is imported; ``absent`` is the status where there is none."""
    try:
        number = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return Finding(needed.name, absent, f"not installed: {remedy}")
    if not needed.specifier.contains(number, prereleases=True):
        return Finding(needed.name, "wrong", f"{number}, but {needed.specifier} is needed: {remedy}")
    import_module(MODULES.get(needed.name.lower(), needed.name))
    return Finding(needed.name, "ok", number)


def _threads() -> Finding:
    from dask.system import cpu_count

    from emtau_dask.cluster import local_threads

    usable, cores = cpu_count(), os.cpu_count()
    return Finding(
        "threads", "ok", f"{local_threads()} for a fit; this process may use {usable} of {cores} cores"
    )


def _blas() -> Finding:
    import scipy.linalg  # noqa: F401  its own BLAS
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    texts = [f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads" for pool in pools]
    if not texts:
        return Finding("BLAS", "note", "none whose threads can be limited; it may use more of them")
    return Finding("BLAS", "ok", "; ".join(dict.fromkeys(texts)))


def _memory() -> Finding:
    """Return the memory that this process may use; cgroups and limits of the process count."""
    from dask.utils import format_bytes
    from distributed.system import memory_limit

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    least = "" if limit >= total else " by a limit of its cgroup or of the process"
    return Finding("memory", "ok", f"{format_bytes(limit)} of {format_bytes(total)} may be used{least}")


def _compiled() -> Finding:
    from emtau_dask.em import compile_setting
    from emtau_dask.mixture.compiled import why_not_compiled

    setting, why_not = compile_setting(), why_not_compiled()
    if why_not is not None:
        remedy = "pip install numba makes large fits faster"
        return Finding("compiled tiles", "note", f"not available ({why_not}); {remedy}")
    return Finding("compiled tiles", "ok", f"available; emtau.compiled is {setting!r}")


def _settings() -> Finding:
    from emtau_dask.settings import read_settings

    values = dataclasses.asdict(read_settings())
    named = ", ".join(f"emtau.{name.replace('_', '-')}={value}" for name, value in values.items())
    return Finding("settings", "ok", named)


def _temporary() -> Finding:
    """Return whether row state of fits without a checkpoint can be kept, and in how much room."""
    import dask
    from dask.utils import format_bytes

    folder = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder):
        free = shutil.disk_usage(folder).free
    return Finding("temporary files", "ok", f"{format_bytes(free)} free in {folder}")


def _checkpoint(place: str) -> Finding:
    from emtau_dask.io.objects import holds_run, object_store, try_store

    objects = object_store(place)
    exclusive = try_store(objects)
    said = f"{objects.location} can be written and read"
    if holds_run(objects):
        said += "; it holds a run"
    if not exclusive:
        return Finding("checkpoint", "note", f"{said}; two processes that resume one run might not notice")
    return Finding("checkpoint", "ok", said)
