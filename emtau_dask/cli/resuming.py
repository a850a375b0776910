"""The config of a resumed run: the parts that are taken from a checkpoint, and those that are given again.

A checkpoint may come from others. A resume takes from it the fit, local data and places to write in the same
folder. Schedulers, URLs and other places to write must be repeated on the command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from emtau_dask.cli.config import RunConfig, checked_config
from emtau_dask.cli.yaml import apply_override, setting
from emtau_dask.errors import HIDDEN, ConfigError, masked_values
from emtau_dask.storage.files import followed
from emtau_dask.storage.urls import is_url, plain_path

RESUMABLE = ("stop.max_iter", "checkpoint.every", "data.path", "data.weights", "data.labels")
RESUMABLE_SECTIONS = ("cluster.", "output.")
_HIDDEN_PARTS = f" In place of {HIDDEN} write the user, password or query, which a checkpoint does not keep."


def portable(config: RunConfig) -> dict[str, Any]:
    """Return the config as a checkpoint stores it: values for JSON, absolute paths, URLs without secrets."""
    content = config.model_dump(mode="json", exclude_unset=True)
    data, checkpoint = content["data"], content.get("checkpoint", {})
    paths = [(data, "path"), (checkpoint, "path"), (content["output"], "directory")]
    paths += [(data, key) for key in ("weights", "labels") if "/" in (data.get(key) or "")]
    for section, key in paths:
        if isinstance(path := section.get(key), list):
            section[key] = [_absolute(each) for each in path]
        elif path is not None:
            section[key] = _absolute(path)
    return dict(masked_values(content))


def _absolute(path: str) -> str:
    return path if is_url(path) else str(Path(path).absolute())


def resumed_config(content: dict[str, Any], run: str, overrides: Sequence[str]) -> RunConfig:
    """Return the config of a checkpointed run, changed by overrides.

    A dataset is read, not created. A scheduler among the overrides replaces the whole section `cluster`.

    ``content`` is as `portable` returned it, ``run`` the present place of the checkpoint. Raises
    `ConfigError` for a value that is not allowed, and for keys other than `RESUMABLE` and
    `RESUMABLE_SECTIONS`.
    """
    keys = override_keys(overrides)
    if "cluster.scheduler" in keys:
        content = {**content, "cluster": {}}
    stored = checked_config(content)
    data = {key: value for key, value in content["data"].items() if not key.startswith("dataset")}
    data["path"] = stored.data.path or str(stored.output.place(f"{stored.data.dataset}.zarr"))
    checkpoint = {"path": run, "every": stored.checkpoint.every}
    content = {**content, "data": data, "checkpoint": checkpoint}
    for key, override in zip(keys, overrides, strict=True):
        if key not in RESUMABLE and not key.startswith(RESUMABLE_SECTIONS):
            raise ConfigError(
                f"--set {key} cannot be changed when a run is resumed; these can: "
                f"{', '.join(RESUMABLE)}, cluster.* and output.*"
            )
        if HIDDEN in override and is_url(override):
            raise ConfigError(
                f"--set {override}: {HIDDEN} replaces secrets, which a checkpoint does not keep; write them "
                "out"
            )
        content = apply_override(content, override)
    return checked_config(content)


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that overrides set, in their order."""
    return [override.partition("=")[0].strip() for override in overrides]


def check_repeated(config: RunConfig, run: str, given: Collection[str]) -> None:
    """Raise `ConfigError` if settings must be repeated; the message has the arguments to paste.

    ``config`` is what `resumed_config` returned for the checkpoint ``run``; ``given`` are the keys that the
    command line gives.
    """
    if repeated := to_repeat(config, run, given):
        hidden = _HIDDEN_PARTS if HIDDEN in "".join(repeated) else ""
        raise ConfigError(
            f"the checkpoint {run} asks for {'; '.join(repeated)}. Checkpoints may come from others, so "
            "schedulers, URLs, and places to write outside its folder must be given on the command line. "
            f"If you want it, add: {as_arguments(repeated)}{hidden}"
        )


def to_repeat(config: RunConfig, run: str, given: Collection[str] = ()) -> list[str]:
    """Return the settings, as ``key=value``, that a resume uses only if the command line gives them.

    ``config`` is what `resumed_config` returned for the checkpoint ``run``; ``given`` are the keys that the
    command line gives.
    """
    untrusted = (*_scheduler_settings(config), *config.data.urls, *_places_elsewhere(config, run))
    return [setting(key, value) for key, value in untrusted if key not in given]


def as_arguments(settings: Sequence[str]) -> str:
    """Return settings as arguments of the command line, quoted for a shell."""
    return " ".join(f"--set {shlex.quote(each)}" for each in settings)


def _scheduler_settings(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the address and the TLS files of a remote scheduler, whose messages run code in this process."""
    cluster = config.cluster
    if cluster.scheduler not in ("threads", "processes"):
        yield "cluster.scheduler", cluster.scheduler
    if cluster.tls is not None:
        for name, value in cluster.tls.model_dump().items():
            yield f"cluster.tls.{name}", value


def _places_elsewhere(config: RunConfig, run: str) -> Iterator[tuple[str, object]]:
    """Yield the places to write outside the folder of the checkpoint, or in a hidden folder in it.

    For results in `output.directory`, only that key is yielded.
    """
    output, local = config.output, plain_path(run)
    folders = [] if is_url(local) else [followed(Path(local).absolute().parent)]
    results = output.results
    if not all(Path(place).is_absolute() for place in results.values()):
        if not _lies_in(output.place("result"), folders):
            yield "output.directory", output.directory
        folders.append(followed(Path(output.directory)))
    for name, place in results.items():
        if not _lies_in(output.place(place), folders):
            yield f"output.{name}", place


def _lies_in(place: Path, folders: Sequence[Path]) -> bool:
    path = followed(place)
    return any(
        path.is_relative_to(folder) and not any(p.startswith(".") for p in path.relative_to(folder).parts)
        for folder in folders
    )


def resume_arguments(config: RunConfig) -> str:
    """Return the arguments that a later `emtau resume` of this run needs; "" if it needs none."""
    run = str(config.checkpoint.path)
    return as_arguments(to_repeat(resumed_config(portable(config), run, ()), run))
