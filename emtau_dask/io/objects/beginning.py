"""How a run begins, replaces an earlier one, and is opened again."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from typing import Any

from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
)
from emtau_dask.io.formats import OWN_GROUPS
from emtau_dask.io.objects.base import CLAIM, ROOT_DOCUMENT, ObjectStore, begun_elsewhere, is_remnant
from emtau_dask.io.objects.commits import COMMIT_KEY, MAX_ROOT_BYTES, WRITTEN_KEY, CommitLog, read_root
from emtau_dask.io.objects.documents import digested_document, group_document

FORMAT, VERSION = "emtau-checkpoint", 5


def check_startable(objects: ObjectStore, *, overwrite: bool) -> dict[str, Any] | None:
    """Return the root document of the run that a new one would replace; None for an empty store.

    Writes nothing. Raises `CheckpointExistsError` where no new run may begin.
    """
    if objects.empty():
        return None
    found = _root_in(objects)
    if found is None:
        raise CheckpointExistsError(
            f"{objects.location} holds something that is not a run of emtau; choose another place for the "
            "checkpoint, or remove it."
        )
    if not overwrite:
        raise CheckpointExistsError(
            f"{objects.location} already holds a run; resume it (GaussianMixture.resume, emtau resume), "
            "choose another place, or replace it (remove it; emtau fit --overwrite)."
        )
    return found


def _root_in(objects: ObjectStore) -> dict[str, Any] | None:
    """Return the root document of a run; None where no run is."""
    try:
        found = read_root(objects)
    except CheckpointCorruptError:
        return None
    return found if found.get("format") == FORMAT else None


def holds_run(objects: ObjectStore) -> bool:
    """Return whether a run was begun there, even if it never committed."""
    return _root_in(objects) is not None


def _own_root(objects: ObjectStore) -> dict[str, Any]:
    """Return the root document; raises `CheckpointMismatchError` for one of another kind that we write."""
    try:
        return read_root(objects)
    except CheckpointCorruptError:
        found = None
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(objects.get(ROOT_DOCUMENT, MAX_ROOT_BYTES) or b"")["attributes"]["format"]
        if isinstance(found, str) and found in OWN_GROUPS and found != FORMAT:
            raise CheckpointMismatchError(
                f"{objects.location} is {OWN_GROUPS[found]}, not {OWN_GROUPS[FORMAT]}. Give the path of a "
                "checkpoint."
            ) from None
        raise


def start_log(objects: ObjectStore, *, overwrite: bool) -> CommitLog:
    """Begin a new run; with ``overwrite`` it may replace an earlier run, but nothing else.

    Only objects of the run found at the beginning are removed, and only while no other process
    may replace that run.

    Raises `CheckpointExistsError` where there is something already, `CheckpointTakenError` where another
    process began a run at the same time, and `CheckpointError` where the store failed; what was written is
    removed again.
    """
    earlier = check_startable(objects, overwrite=overwrite)
    objects.prepare()
    log = CommitLog(objects, uuid.uuid4().hex, -1)
    root = digested_document({"format": FORMAT, "version": VERSION, "run": log.run})
    with log.withdrawn_on_failure():
        if earlier is not None:
            _replace(objects, earlier, root)
        elif objects.create(ROOT_DOCUMENT, root):
            objects.delete([key for key in objects.list("") if is_remnant(key)])
        else:
            raise begun_elsewhere(objects)
        for folder in ("commits", "attempts"):
            objects.put(f"{folder}/zarr.json", group_document({}))
        objects.sync(["commits/zarr.json", "attempts/zarr.json"])
    return log


def _replace(objects: ObjectStore, earlier: dict[str, Any], root: bytes) -> None:
    """Remove an earlier run, commits first, and then replace its root document by ``root``.

    The earlier root document stays until then: the place is never empty for other processes, and if
    this one is killed, the rest can be replaced again.
    """
    with objects.claimed():
        keys = objects.list("")
        if _root_in(objects) != earlier:
            raise begun_elsewhere(objects)
        objects.delete([key for key in keys if COMMIT_KEY.fullmatch(key)])
        objects.delete([key for key in keys if key not in (ROOT_DOCUMENT, CLAIM)])
        objects.put(ROOT_DOCUMENT, root)
        objects.sync([ROOT_DOCUMENT])
        # A process that continued the earlier run may have written since; from now on it cannot commit.
        objects.delete([key for key in objects.list("") if WRITTEN_KEY.match(key)])


def open_log(objects: ObjectStore) -> CommitLog:
    """Open a run.

    Raises `CheckpointError` where there is none, `CheckpointMismatchError` where it is of another format or
    version, and `CheckpointCorruptError` where its root document is damaged or it has no commit.
    """
    if objects.get(ROOT_DOCUMENT, 0) is None:
        raise CheckpointError(
            f"{objects.location} holds no run: there is no {ROOT_DOCUMENT}. Give the path of a checkpoint."
        )
    root = _own_root(objects)
    name, version = root.get("format"), root.get("version")
    if (name, version) != (FORMAT, VERSION):
        raise CheckpointMismatchError(
            f"{objects.location} holds format {name!r} version {version!r}; this version of emtau_dask "
            f"reads {FORMAT!r} version {VERSION}. Resume it with the version that wrote it."
        )
    if not isinstance(root.get("run"), str):
        raise CheckpointCorruptError(f"{ROOT_DOCUMENT} in {objects.location} names no run.")
    log = CommitLog(objects, root["run"], -1)
    numbers = log.numbers()
    if not numbers:
        raise CheckpointCorruptError(
            f"{objects.location} holds no commit: its run ended before it began, or they were removed. "
            "Remove it, or replace it (emtau fit --overwrite)."
        )
    log.last = numbers[-1]
    return log
