"""The commits of a run: created exclusively, sealed by a digest, removed by reference.

A commit is the metadata document of a zarr group, ``commits/<n>/zarr.json``,
whose attributes are its manifest. Which of two processes continues a run is
decided by who creates commit n + 1. Nothing that a kept commit refers to is
ever removed, and only the owner of the newest commit removes anything.

What another process writes lies under an attempt id of its own,
``attempts/<base>-<random>``, where ``base`` is the newest commit when it began.
An attempt whose base is older than the newest commit can never commit again,
which is why its unreferenced objects may go.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointTakenError,
    StoreUnreachableError,
)
from emtau_dask.io.objects.base import CLAIM, ROOT_DOCUMENT, ObjectStore, begun_elsewhere, is_remnant
from emtau_dask.io.objects.encoding import digest, group_document

FORMAT, VERSION = "emtau-checkpoint", 2
ROOT = ROOT_DOCUMENT
KEPT = 2
MAX_MANIFEST_BYTES = 2**26
MAX_ROOT_BYTES = 2**16
MAX_COMMITS = 10**12
_COMMIT = re.compile(r"commits/(0|[1-9][0-9]{0,11})/zarr\.json")
_WRITER = re.compile(
    r"attempts/(?P<attempt>(?P<base>[0-9]{1,15})-[0-9a-f]{32})/|commits/(?P<number>[0-9]{1,15})/"
)


def _commit_key(number: int) -> str:
    return f"commits/{number}/zarr.json"


def _canonical(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return a group document whose attributes are ``content`` and its digest."""
    return group_document({**content, "sha256": digest(_canonical(content))})


def _unsealed(objects: ObjectStore, key: str, limit: int) -> dict[str, Any]:
    """Return what was sealed; raises `CheckpointCorruptError`."""
    data = objects.get(key, limit)
    where = f"{key} in {objects.location}"
    if data is None:
        raise CheckpointCorruptError(f"{where} is missing.")
    if len(data) > limit:
        raise CheckpointCorruptError(f"{where} has more than {limit:,} bytes, the most that is read.")
    try:
        document = json.loads(data)
        content = document["attributes"]
        expected = content.pop("sha256")
        intact = document["node_type"] == "group" and digest(_canonical(content)) == expected
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is damaged ({type(error).__name__}: {error}).") from error
    if not intact:
        raise CheckpointCorruptError(f"{where} has been altered: its SHA-256 is not the one that it states.")
    return dict(content)


def new_attempt(base: int) -> str:
    """Return the id of a process that goes on from commit ``base`` (0 also for a new run)."""
    return f"{base}-{uuid.uuid4().hex}"


@dataclass(frozen=True, eq=False)
class Commit:
    """A commit that was read.

    Attributes
    ----------
    number : int
    manifest : dict
    """

    number: int
    manifest: dict[str, Any]


class CommitLog:
    """The commits of one run, as one process sees them.

    Parameters
    ----------
    objects : ObjectStore
    run : str
        The run's id: a run that replaces another in the same place has its own.
    last : int
        The newest commit there is, also where it is damaged; −1 for none.
    """

    def __init__(self, objects: ObjectStore, run: str, last: int) -> None:
        self.objects = objects
        self.run = run
        self.last = last
        self._attempt: str | None = None
        self._kept: dict[int, frozenset[str]] = {}
        self._candidates: set[str] = set()

    def numbers(self) -> list[int]:
        """Return the numbers of the commits that are there, ascending."""
        matches = (_COMMIT.fullmatch(key) for key in self.objects.list("commits/"))
        return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> Commit:
        """Return a commit.

        Raises
        ------
        CheckpointCorruptError
            It is missing or damaged.
        """
        key = _commit_key(number)
        manifest = _unsealed(self.objects, key, MAX_MANIFEST_BYTES)
        if manifest.get("run") != self.run or manifest.get("number") != number:
            raise CheckpointCorruptError(
                f"{key} in {self.objects.location} belongs elsewhere: it is commit "
                f"{manifest.get('number')!r} of "
                f"the run {manifest.get('run')!r}, not {number} of {self.run!r}."
            )
        return Commit(number, manifest)

    def keep(self, number: int, references: Iterable[str]) -> None:
        """Remember what an earlier commit refers to, from which this process goes on."""
        self._kept[number] = frozenset(references)
        self._candidates |= self._kept[number]

    def written(self, keys: Iterable[str]) -> None:
        """Remember objects that this process wrote."""
        self._candidates.update(keys)

    def append(self, manifest: Mapping[str, Any], references: Iterable[str]) -> None:
        """Create the next commit, and remove what only older ones referred to.

        Parameters
        ----------
        manifest : mapping
            JSON; ``run`` and ``number`` are added.
        references : iterable of str
            Every object that it refers to; all durable already.

        Raises
        ------
        CheckpointTakenError
            Another process has continued this run, or replaced it.
        CheckpointError
            The store failed; the last commit stands.
        """
        with self.watched():
            self._append(manifest, frozenset(references))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise `CheckpointTakenError` in place of what comes of another process having gone on.

        The other one removes what this one still uses, which is then missing or
        cannot be written.
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

    def standing(self) -> str:
        """Return what can be resumed after the store has failed, as a sentence; looks at the store."""
        with suppress(CheckpointError):
            for number in self.numbers()[-1:]:
                self.read(number)
                return f"The last commit, {number}, is intact, and the run can be resumed from it."
        return self.remembered()

    def remembered(self) -> str:
        """Return what can be resumed as far as this process knows, as a sentence."""
        if self.last < 0:
            return "There is no commit yet, so nothing can be resumed; begin again."
        return f"Its last commit is {self.last}: the run can be resumed once that can be read again."

    @contextmanager
    def withdrawn_on_failure(self) -> Iterator[None]:
        """Remove the run, just begun by this process, where the block fails before a first commit."""
        try:
            yield
        except BaseException:
            if self.last < 0:
                with suppress(CheckpointError):
                    self._withdraw()
            raise

    def _withdraw(self) -> None:
        if self.numbers() or _unsealed(self.objects, ROOT, MAX_ROOT_BYTES).get("run") != self.run:
            return
        self.objects.delete([key for key in self.objects.list("") if key != ROOT])
        self.objects.delete([ROOT])

    def _append(self, manifest: Mapping[str, Any], references: frozenset[str]) -> None:
        number = self.last + 1
        if number >= MAX_COMMITS:
            raise CheckpointError(
                f"{self.objects.location} has {number:,} commits, the most that there can be. Start a new "
                "run from this model with warm_start=True."
            )
        document = sealed({**manifest, "run": self.run, "number": number})
        if len(document) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"commit {number} would have {len(document):,} bytes, more than {MAX_MANIFEST_BYTES:,}; its "
                "history is too long. Start a new run from this model with warm_start=True."
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
        self._kept[number] = references
        self._candidates |= references
        while len(self._kept) > KEPT:
            del self._kept[min(self._kept)]
        self._sweep()

    def _check_own(self, newest: int) -> None:
        """Raise `CheckpointTakenError` where somebody else has made a newer commit than ``newest``."""
        if self.objects.get(ROOT, 0) is None:
            raise CheckpointError(
                f"the run in {self.objects.location} has vanished: {ROOT} is gone. Restore it, and resume."
            )
        root = _unsealed(self.objects, ROOT, MAX_ROOT_BYTES)
        if root.get("run") != self.run:
            raise CheckpointTakenError(
                f"{self.objects.location} now holds another run; this one was replaced. Nothing was written."
            )
        for number in self.numbers():
            if number > newest:
                try:
                    found = self.read(number).manifest.get("attempt")
                except CheckpointCorruptError:
                    self.objects.delete([_commit_key(number)])
                else:
                    if found is None or found != self._attempt:
                        raise self._taken(number)

    def _taken(self, number: int) -> CheckpointTakenError:
        return CheckpointTakenError(
            f"another process has continued the run in {self.objects.location}: its commit {number} is "
            "there. "
            "Let it finish, or stop it and resume again."
        )

    @property
    def _referenced(self) -> set[str]:
        return set().union(*self._kept.values())

    def _sweep(self) -> None:
        stale = [number for number in self.numbers() if number < self.last and number not in self._kept]
        self.objects.delete([_commit_key(number) for number in stale])
        unused = self._candidates - self._referenced
        self.objects.delete(unused)
        self._candidates -= unused

    def sweep_everything(self, attempt: str) -> None:
        """Remove every unreferenced object of ``attempt``, this process's, and of attempts that ended.

        Their metadata documents stay as long as one of their objects does.
        """
        referenced = self._referenced
        in_use = {folder for key in referenced for folder in _folders(key)}
        unused = []
        for key in [*self.objects.list("attempts/"), *self.objects.list("commits/")]:
            match = _WRITER.match(key)
            if match is None or key in referenced:
                continue
            own = match["attempt"] == attempt
            live = int(match["base"] or match["number"]) >= self.last + (match["base"] is None)
            document = key.endswith("/zarr.json")
            in_place = document and (own or match["number"] is not None or key.rpartition("/")[0] in in_use)
            if not in_place and (own or not live):
                unused.append(key)
        self.objects.delete(unused)


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def check_startable(objects: ObjectStore, *, overwrite: bool) -> None:
    """Raise `CheckpointExistsError` unless a new run may begin there; writes nothing."""
    _to_replace(objects, overwrite=overwrite)


def _to_replace(objects: ObjectStore, *, overwrite: bool) -> dict[str, Any] | None:
    """Return the root document of the run that a new one would replace, None where nothing is there."""
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
            f"{objects.location} already holds a run; go on with it by resume, choose another place, or "
            "replace it (emtau fit --overwrite)."
        )
    return found


def _root_in(objects: ObjectStore) -> dict[str, Any] | None:
    """Return the root document of the run that is there, None where there is none."""
    try:
        found = _unsealed(objects, ROOT, MAX_ROOT_BYTES)
    except CheckpointCorruptError:
        return None
    return found if found.get("format") == FORMAT else None


def holds_run(objects: ObjectStore) -> bool:
    """Return whether a run was begun there, whatever became of it."""
    return _root_in(objects) is not None


def start_log(objects: ObjectStore, *, overwrite: bool) -> CommitLog:
    """Begin a new run where there is none.

    Nothing is removed that is not of the run found at the beginning, and what is removed
    goes while no other process may replace that run.

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
    earlier = _to_replace(objects, overwrite=overwrite)
    objects.prepare()
    log = CommitLog(objects, uuid.uuid4().hex, -1)
    root = sealed({"format": FORMAT, "version": VERSION, "run": log.run})
    with log.withdrawn_on_failure():
        if earlier is not None:
            _replace(objects, earlier, root)
        elif objects.create(ROOT, root):
            objects.delete([key for key in objects.list("") if is_remnant(key)])
        else:
            raise begun_elsewhere(objects)
        for folder in ("commits", "attempts"):
            objects.put(f"{folder}/zarr.json", group_document({}))
        objects.sync(["commits/zarr.json", "attempts/zarr.json"])
    return log


def _replace(objects: ObjectStore, earlier: Mapping[str, Any], root: bytes) -> None:
    """Remove an earlier run, and then put a new root document in place of its own.

    That one stays till then, so that nobody else finds the place empty, and a process that is
    killed here leaves something that can be replaced again. Commits go before what they refer to.
    """
    with objects.claimed():
        keys = objects.list("")
        if _root_in(objects) != earlier:
            raise begun_elsewhere(objects)
        objects.delete([key for key in keys if _COMMIT.fullmatch(key)])
        objects.delete([key for key in keys if key not in (ROOT, CLAIM)])
        objects.put(ROOT, root)
        objects.sync([ROOT])
        # What a process that went on with the earlier run has written since; now it can write no more.
        objects.delete([key for key in objects.list("") if _WRITER.match(key)])


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
    if objects.get(ROOT, 0) is None:
        raise CheckpointError(
            f"{objects.location} holds no run: there is no {ROOT}. Give the path of a checkpoint."
        )
    root = _unsealed(objects, ROOT, MAX_ROOT_BYTES)
    found, expected = (root.get("format"), root.get("version")), (FORMAT, VERSION)
    if found != expected:
        raise CheckpointMismatchError(
            f"{objects.location} holds format {found[0]!r} version {found[1]!r}; this version of "
            "emtau_dask reads "
            f"{expected[0]!r} version {expected[1]}. Resume it with the version that wrote it."
        )
    if not isinstance(root.get("run"), str):
        raise CheckpointCorruptError(f"{ROOT} in {objects.location} names no run.")
    log = CommitLog(objects, root["run"], -1)
    numbers = log.numbers()
    if not numbers:
        raise CheckpointCorruptError(
            f"{objects.location} holds no commit: its run ended before it began, or they were removed. "
            "Remove it, or replace it (emtau fit --overwrite)."
        )
    log.last = numbers[-1]
    return log
