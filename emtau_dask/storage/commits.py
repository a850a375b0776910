"""The commits of a run: creation, verification, removal of old ones; starting and opening a run.

A commit is the metadata document of a zarr group, ``commits/<n>/zarr.json``, whose attributes are its
manifest. Of two processes, the one that creates commit n + 1 continues the run. Nothing that one of the two
newest commits refers to is ever removed, and only the owner of the newest commit removes anything.

A process writes under an attempt id of its own, ``attempts/<base>-<random>``, where ``base`` is
the newest commit when it began. An attempt whose base is older than the newest commit can never commit
again, so its unreferenced objects may be removed.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointTakenError,
    StoreUnreachableError,
)
from emtau_dask.storage.locations import OWN_GROUPS
from emtau_dask.storage.objects import (
    CLAIM,
    ROOT_DOCUMENT,
    ObjectStore,
    begun_elsewhere,
    digested_document,
    group_document,
    is_remnant,
    read_document,
)

KEPT_COMMITS = 2
MAX_MANIFEST_BYTES, MAX_ROOT_BYTES = 2**26, 2**16
COMMIT_KEY = re.compile(r"commits/(0|[1-9][0-9]{0,11})/zarr\.json")
WRITTEN_KEY = re.compile(
    r"attempts/(?P<attempt>(?P<base>[0-9]{1,15})-[0-9a-f]{32})/|commits/(?P<number>[0-9]{1,15})/"
)
"""The beginning of the keys of an attempt or of a commit."""
FORMAT, VERSION = "emtau-checkpoint", 7
ZARR_NODES = {"group": "a zarr group", "array": "a zarr array"}


def _commit_key(number: int) -> str:
    return f"commits/{number}/zarr.json"


def new_attempt(base: int) -> str:
    """Return the id of a process that continues from commit ``base`` (0 also for a new run)."""
    return f"{base}-{uuid.uuid4().hex}"


def read_root(objects: ObjectStore) -> dict[str, Any]:
    """Return the root document; raises `CheckpointCorruptError` if it is missing or damaged."""
    return read_document(objects, ROOT_DOCUMENT, MAX_ROOT_BYTES)


class CommitLog:
    """The commits of one run, as one process sees them.

    Parameters
    ----------
    objects : ObjectStore
    run : str
        The run's id: a run that replaces another in the same place has its own.
    last : int
        The newest commit, even a damaged one; −1 for none.
    """

    def __init__(self, objects: ObjectStore, run: str, last: int) -> None:
        self.objects, self.run, self.last = objects, run, last
        self._attempt: str | None = None
        self._kept: dict[int, frozenset[str]] = {}
        self._candidates: set[str] = set()

    def numbers(self) -> list[int]:
        """Return the numbers of the existing commits, ascending."""
        matches = (COMMIT_KEY.fullmatch(key) for key in self.objects.list("commits/"))
        return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> dict[str, Any]:
        """Return the manifest of a commit; raises `CheckpointCorruptError` if it is missing or damaged."""
        key = _commit_key(number)
        manifest = read_document(self.objects, key, MAX_MANIFEST_BYTES)
        found, run = manifest.get("number"), manifest.get("run")
        if (found, run) != (number, self.run):
            raise CheckpointCorruptError(
                f"{key} in {self.objects.location} belongs elsewhere: it is commit {found!r} of the run "
                f"{run!r}, not {number} of {self.run!r}."
            )
        return manifest

    def keep(self, number: int, references: Iterable[str]) -> None:
        """Keep the objects of a commit that this process wrote or resumes from."""
        self._kept[number] = frozenset(references)
        self._candidates |= self._kept[number]

    def written(self, keys: Iterable[str]) -> None:
        """Add objects that this process wrote; those that no kept commit refers to are removed later."""
        self._candidates.update(keys)

    def append(self, manifest: Mapping[str, Any], references: Iterable[str]) -> None:
        """Create the next commit, and remove objects that only older ones refer to.

        ``run`` and ``number`` are added to ``manifest``, which is JSON. ``references`` are the keys of all
        objects that it refers to; these must be durable already.

        Raises `CheckpointTakenError` if another process has continued or replaced this run, and
        `CheckpointError` if the store failed, or if the manifest would be too long; then the last
        commit stays the newest.
        """
        with self.takeover_errors():
            number = self.last + 1
            document = digested_document({**manifest, "run": self.run, "number": number})
            if len(document) > MAX_MANIFEST_BYTES:
                raise CheckpointError(
                    f"commit {number} would have {len(document):,} bytes, more than {MAX_MANIFEST_BYTES:,}; "
                    "its history is too long. Start a new run from this model with warm_start=True."
                )
            self._attempt = manifest.get("attempt")
            self._check_own(self.last)
            if not self.objects.create(_commit_key(number), document):
                raise self._taken(number)
            try:
                self._check_own(number)
            except CheckpointTakenError:
                self.objects.delete([_commit_key(number)])
                raise
            self.last = number
            self.keep(number, references)
            while len(self._kept) > KEPT_COMMITS:
                del self._kept[min(self._kept)]
            stale = [older for older in self.numbers() if older < number and older not in self._kept]
            self.objects.delete([_commit_key(older) for older in stale])
            unused = self._candidates - self._referenced()
            self.objects.delete(unused)
            self._candidates -= unused

    @contextmanager
    def takeover_errors(self) -> Iterator[None]:
        """Raise `CheckpointTakenError` instead of an error that another process has caused.

        A process that continues the run removes objects that this one still needs.
        """
        try:
            yield
        except (CheckpointTakenError, StoreUnreachableError):
            raise
        except CheckpointError as error:
            try:
                self._check_own(self.last)
            except CheckpointTakenError as taken:
                raise taken from error
            except CheckpointError:
                pass
            raise

    def resume_advice(self) -> str:
        """Return a sentence on what can be resumed after the store has failed; reads the store."""
        with suppress(CheckpointError):
            if numbers := self.numbers():
                self.read(numbers[-1])
                return f"The last commit, {numbers[-1]}, is intact, and the run can be resumed from it."
        return self.offline_advice()

    def offline_advice(self) -> str:
        """Return the same as `resume_advice`, without reading the store."""
        if self.last < 0:
            return "There is no commit yet, so nothing can be resumed; begin again."
        return f"Its last commit is {self.last}: the run can be resumed once that can be read again."

    @contextmanager
    def withdrawn_on_failure(self) -> Iterator[None]:
        """Remove the run that this process has just begun, if the block fails before a first commit."""
        try:
            yield
        except BaseException:
            with suppress(CheckpointError):
                if self.last < 0 and not self.numbers() and read_root(self.objects).get("run") == self.run:
                    self.objects.delete([key for key in self.objects.list("") if key != ROOT_DOCUMENT])
                    self.objects.delete([ROOT_DOCUMENT])
            raise

    def _check_own(self, newest: int) -> None:
        """Raise `CheckpointTakenError` if another process has made a commit after ``newest``."""
        if self.objects.get(ROOT_DOCUMENT, 0) is None:
            raise CheckpointError(
                f"the run in {self.objects.location} has vanished: {ROOT_DOCUMENT} is gone. Restore it, and "
                "resume."
            )
        root = read_root(self.objects)
        if root.get("run") != self.run:
            raise CheckpointTakenError(
                f"{self.objects.location} now holds another run; this one was replaced. Nothing was written."
            )
        for number in self.numbers():
            if number > newest:
                try:
                    found = self.read(number).get("attempt")
                except CheckpointCorruptError:
                    self.objects.delete([_commit_key(number)])
                else:
                    if found is None or found != self._attempt:
                        raise self._taken(number)

    def _taken(self, number: int) -> CheckpointTakenError:
        return CheckpointTakenError(
            f"another process has continued the run in {self.objects.location}: its commit {number} is "
            "there. Let it finish, or stop it and resume again."
        )

    def _referenced(self) -> set[str]:
        return set().union(*self._kept.values())

    def sweep_everything(self, attempt: str) -> None:
        """Remove every unreferenced object of ``attempt``, this process's, and of attempts that ended.

        The metadata document of an array stays as long as one of its objects.
        """
        referenced = self._referenced()
        in_use = {str(folder) for key in referenced for folder in PurePosixPath(key).parents}
        unused = []
        for key in [*self.objects.list("attempts/"), *self.objects.list("commits/")]:
            match = WRITTEN_KEY.match(key)
            if match is None or key in referenced:
                continue
            own = match["attempt"] == attempt
            live = int(match["base"] or match["number"]) >= self.last + (match["base"] is None)
            document = key.endswith("/zarr.json")
            in_place = document and (own or match["number"] is not None or key.rpartition("/")[0] in in_use)
            if not in_place and (own or not live):
                unused.append(key)
        self.objects.delete(unused)


def check_startable(objects: ObjectStore, *, overwrite: bool) -> dict[str, Any] | None:
    """Return the root document of the run that a new one would replace; None for an empty store.

    Writes nothing. Raises `CheckpointExistsError` if no new run may begin.
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
    """Return the root document of a run; None without a run."""
    try:
        found = read_root(objects)
    except CheckpointCorruptError:
        return None
    return found if found.get("format") == FORMAT else None


def holds_run(objects: ObjectStore) -> bool:
    """Return whether a run was begun there, even if it never committed."""
    return _root_in(objects) is not None


def _own_root(objects: ObjectStore) -> dict[str, Any]:
    """Return the root document; raises `CheckpointMismatchError` for zarr data of another kind."""
    try:
        return read_root(objects)
    except CheckpointCorruptError:
        kind = None
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            document = json.loads(objects.get(ROOT_DOCUMENT, MAX_ROOT_BYTES) or b"")
            attributes = document.get("attributes", {})
            is_own = attributes.keys() & {"format", "sha256"}
            kind = OWN_GROUPS.get(attributes["format"]) if is_own else ZARR_NODES[document["node_type"]]
        if kind is not None and kind != OWN_GROUPS[FORMAT]:
            raise CheckpointMismatchError(
                f"{objects.location} is {kind}, not {OWN_GROUPS[FORMAT]}. Give the path of a checkpoint."
            ) from None
        raise


def start_log(objects: ObjectStore, *, overwrite: bool) -> CommitLog:
    """Begin a new run; with ``overwrite`` it may replace an earlier run, but nothing else.

    Only objects of the run found at the beginning are removed, and only while no other process
    may replace that run.

    Raises `CheckpointExistsError` if something exists already, `CheckpointTakenError` if another
    process began a run at the same time, and `CheckpointError` if the store failed; what was written is
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
    this process is killed, the rest can still be replaced.
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

    Raises `CheckpointError` if there is none, `CheckpointMismatchError` if it has another format or
    version, and `CheckpointCorruptError` if its root document is damaged or it has no commit.
    """
    if objects.get(ROOT_DOCUMENT, 0) is None:
        raise CheckpointError(
            f"{objects.location} holds no run: there is no {ROOT_DOCUMENT}. Give the path of a checkpoint, "
            "which a fit has with --checkpoint PATH, in Python with checkpoint=PATH."
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
