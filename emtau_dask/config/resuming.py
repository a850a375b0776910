"""A run config in a checkpoint: how it is stored, and what a resume may change in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emtau_dask.config.schema import RunConfig, checked_config
from emtau_dask.config.yaml import apply_override
from emtau_dask.errors import ConfigError
from emtau_dask.io.remote import is_url
from emtau_dask.messages import HIDDEN, masked_values

RESUMABLE = ("stop.max_iter", "checkpoint.every", "data.path", "data.weights", "data.labels")
RESUMABLE_SECTIONS = ("cluster.", "output.")


def portable(config: RunConfig) -> dict[str, Any]:
    """Return the config as a checkpoint stores it: plain values, paths absolute, URLs without secrets."""
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

    A dataset is read, not made. A scheduler among the overrides replaces the whole section `cluster`.

    Parameters
    ----------
    content : dict
        As `portable` returned it.
    run : str
        Where the checkpoint is now.
    overrides : sequence of str
        ``key=value`` for keys of `RESUMABLE` and of the sections of `RESUMABLE_SECTIONS`.

    Raises
    ------
    ConfigError
        Another key is set, or a value is not allowed.
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
                f"--set {override}: {HIDDEN} stands for what a checkpoint does not keep; write it out"
            )
        content = apply_override(content, override)
    return checked_config(content)


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that overrides set, in their order."""
    return [override.partition("=")[0].strip() for override in overrides]
