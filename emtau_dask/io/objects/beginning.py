"""How a run begins where there is none, replaces an earlier one, and is opened again."""

from __future__ import annotations

import uuid
from typing import Any

from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
)
from emtau_dask.io.objects.base import CLAIM, ROOT_DOCUMENT, ObjectStore, begun_elsewhere, is_remnant
from emtau_dask.io.objects.commits import COMMIT_KEY, WRITTEN_KEY, CommitLog, read_root
from emtau_dask.io.objects.documents import digested_document, group_document

FORMAT, VERSION = "emtau-checkpoint", 2


def check_startable(objects: ObjectStore, *, overwrite: bool) -> dict[str, Any] | None:
    """Return the root document of the run that a new one would replace, None where nothing is there.

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
            f"{objects.location} already holds a run; resume it, choose another place, or replace it "
            "(emtau fit --overwrite)."
        )
    return found


def _root_in(objects: ObjectStore) -> dict[str, Any] | None:
    """Return the root document of the run that is there, None where there is none."""
    try:
        found = read_root(objects)
    except CheckpointCorruptError:
        return None
    return found if found.get("format") == FORMAT else None


def holds_run(objects: ObjectStore) -> bool:
    """Return whether a run was begun there, whatever became of it."""
    return _root_in(objects) is not None


def start_log(objects: ObjectStore, *, overwrite: bool) -> CommitLog:
    """Begin a new run where there is none.

    Only objects of the run found at the beginning are removed, and only while no other process
    may replace that run.

    Parameters
    ----------
    objects : ObjectStore
    overwrite : bool
        Replace an earlier run; anything else is never replaced.

    Raises
    ------
    CheckpointExistsError
        There is a run already, or something else.
    CheckpointTakenError
        Another process began one at the same time.
    CheckpointError
        The store failed; what was written is removed again.
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
    """Remove an earlier run, and then put a new root document in place of its own.

    The earlier root document stays until then: nobody else finds the place empty, and what a
    process leaves that is killed here can be replaced again. Commits go before what they refer to.
    """
    with objects.claimed():
        keys = objects.list("")
        if _root_in(objects) != earlier:
            raise begun_elsewhere(objects)
        objects.delete([key for key in keys if COMMIT_KEY.fullmatch(key)])
        objects.delete([key for key in keys if key not in (ROOT_DOCUMENT, CLAIM)])
        objects.put(ROOT_DOCUMENT, root)
        objects.sync([ROOT_DOCUMENT])
        # What a process that continued the earlier run has written since; from now on it cannot commit.
        objects.delete([key for key in objects.list("") if WRITTEN_KEY.match(key)])


def open_log(objects: ObjectStore) -> CommitLog:
    """Open the run that is there.

    Raises
    ------
    CheckpointCorruptError
        The root document is damaged, or there is no commit.
    CheckpointMismatchError
        It is of another format or version.
    CheckpointError
        There is no run.
    """
    if objects.get(ROOT_DOCUMENT, 0) is None:
        raise CheckpointError(
            f"{objects.location} holds no run: there is no {ROOT_DOCUMENT}. Give the path of a checkpoint."
        )
    root = read_root(objects)
    found, expected = (root.get("format"), root.get("version")), (FORMAT, VERSION)
    if found != expected:
        raise CheckpointMismatchError(
            f"{objects.location} holds format {found[0]!r} version {found[1]!r}; this version of "
            f"emtau_dask reads {expected[0]!r} version {expected[1]}. Resume it with the version that "
            "wrote it."
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
