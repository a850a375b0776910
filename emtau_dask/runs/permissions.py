"""The settings of a checkpoint's config that need the consent of a person.

A checkpoint may come from a stranger. Without consent a resume computes on this machine, reads local
data, and writes results beside the checkpoint. Consent is needed to reach a server, to read a URL, and
to write elsewhere. It is given by an argument of the command line, or at the terminal.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emtau_dask.config.schema import ClusterSection, DataSection, OutputSection, RunConfig
from emtau_dask.config.yaml import in_yaml
from emtau_dask.errors import HIDDEN, ConfigError, shown
from emtau_dask.storage.files import followed
from emtau_dask.storage.urls import is_url, plain_path


@dataclass(frozen=True)
class Demand:
    """A setting that needs consent: its dotted key, its value, one or a list, and what it would do."""

    key: str
    value: str | tuple[str, ...]
    why: str

    @property
    def complete(self) -> bool:
        """Whether the value has all its parts; a checkpoint stores a URL without its secrets."""
        return HIDDEN not in self.in_yaml

    @property
    def in_yaml(self) -> str:
        """The value, as a config or ``--set`` spells it."""
        if isinstance(self.value, str):
            return in_yaml(self.value)
        return f"[{', '.join(map(in_yaml, self.value))}]"

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else ", ".join(self.value)
        return shown(f"{self.key} = {value} ({self.why})")


def demands(config: RunConfig, run: str, given: Collection[str]) -> list[Demand]:
    """Return the settings of a config that need consent.

    ``config`` is what `resumed_config` returned, ``run`` the path or URL of the checkpoint, and
    ``given`` are the keys that the command line sets: they need none.
    """
    found = (*_of_cluster(config.cluster), *_of_data(config.data), *_of_output(config.output, run, given))
    return [demand for demand in found if demand.key not in given]


def _of_cluster(cluster: ClusterSection) -> Iterator[Demand]:
    if cluster.scheduler not in ("threads", "processes"):
        yield Demand("cluster.scheduler", cluster.scheduler, "a server whose messages run code here")
    if cluster.tls is not None:
        for name, value in cluster.tls.model_dump().items():
            yield Demand(f"cluster.tls.{name}", value, "a file that the connection uses")
    cores = os.cpu_count() or 1
    if (cluster.workers or cores) * cluster.threads > cores:
        why = f"more than the {cores} cores of this machine"
        if cluster.workers is not None:
            yield Demand("cluster.workers", str(cluster.workers), why)
        if cluster.threads != 1:
            yield Demand("cluster.threads", str(cluster.threads), why)


def _of_data(data: DataSection) -> Iterator[Demand]:
    for name in ("path", "weights", "labels"):
        value = getattr(data, name)
        places = [value] if isinstance(value, str) else value or ()
        if any(is_url(plain_path(place)) for place in places):
            yield Demand(f"data.{name}", value, "a URL to read")


def _of_output(output: OutputSection, run: str, given: Collection[str]) -> Iterator[Demand]:
    why = "a place to write, not beside the checkpoint"
    local = plain_path(run)
    roots = [] if is_url(local) else [Path(local).absolute().parent]
    results = {"model": output.model, "labels": output.labels, "report": output.report}
    wanted = {name: value for name, value in results.items() if value is not None}
    if any(not Path(value).is_absolute() for value in wanted.values()):
        folder = Path(output.directory)
        if "output.directory" not in given and not _lies_in(folder / "result", roots):
            yield Demand("output.directory", output.directory, why)
        roots.append(folder)
    for name, value in wanted.items():
        if not _lies_in(output.place(value), roots):
            yield Demand(f"output.{name}", value, why)


def _lies_in(path: Path, roots: Iterable[Path]) -> bool:
    """Return whether a path lies below one of the folders, and not in a hidden folder there."""
    path = followed(path)
    return any(
        path.is_relative_to(root) and not any(part.startswith(".") for part in path.relative_to(root).parts)
        for root in map(followed, roots)
    )


def require(found: Iterable[Demand], run: str, confirm: Callable[[Demand], bool] | None) -> None:
    """Ask for consent to each demand by ``confirm``; None where nobody can be asked.

    Raises
    ------
    ConfigError
        A demand has no consent; the message has the arguments that give it.
    """
    refused = [demand for demand in found if confirm is None or not demand.complete or not confirm(demand)]
    if not refused:
        return
    hidden = ""
    if not all(demand.complete for demand in refused):
        hidden = f" In place of {HIDDEN} write the user, password or query, which a checkpoint does not keep."
    raise ConfigError(
        f"the checkpoint {run} asks for {'; '.join(map(str, refused))}. Checkpoints may come from others, so "
        f"it is not obeyed in that. If you want it, add: {as_arguments(refused)}{hidden}"
    )


def as_arguments(found: Iterable[Demand]) -> str:
    """Return the arguments of the command line that consent to demands, quoted for a shell."""
    return " ".join(f"--set {shlex.quote(f'{each.key}={each.in_yaml}')}" for each in found)
