"""The commits of a run: created exclusively, digested, removed when no longer needed.

A commit is the metadata document of a zarr group, ``commits/<n>/zarr.json``, whose attributes are its
manifest. Of two processes, the one that creates commit n + 1 continues the run. Nothing that a kept
commit refers to is ever removed, and only the owner of the newest commit removes anything.

What a process writes lies under an attempt id of its own, ``attempts/<base>-<random>``, where ``base`` is
the newest commit when it began. An attempt whose base is older than the newest commit can never commit
again, so its unreferenced objects may be removed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointTakenError,
    StoreUnreachableError,
)
from emtau_dask.io.objects.base import ROOT_DOCUMENT, ObjectStore
from emtau_dask.io.objects.documents import digested_document, read_document

KEPT = 2
MAX_MANIFEST_BYTES = 2**26
MAX_ROOT_BYTES = 2**16
MAX_COMMITS = 10**12
COMMIT_KEY = re.compile(r"commits/(0|[1-9][0-9]{0,11})/zarr\.json")
WRITTEN_KEY = re.compile(
    r"attempts/(?P<attempt>(?P<base>[0-9]{1,15})-[0-9a-f]{32})/|commits/(?P<number>[0-9]{1,15})/"
)
"""Begins the keys of an attempt or of a commit."""


def _commit_key(number: int) -> str:
    return f"commits/{number}/zarr.json"


def new_attempt(base: int) -> str:
    """Return the id of a process that continues from commit ``base`` (0 also for a new run)."""
    return f"{base}-{uuid.uuid4().hex}"


def read_root(objects: ObjectStore) -> dict[str, Any]:
    """Return what the root document says; raises `CheckpointCorruptError` where it is missing or damaged."""
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
        """Return the numbers of the commits that are there, ascending."""
        matches = (COMMIT_KEY.fullmatch(key) for key in self.objects.list("commits/"))
        return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> dict[str, Any]:
        """Return the manifest of a commit; raises `CheckpointCorruptError` where it is missing or damaged."""
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
        """Remember the references of a commit that this process made or resumes from."""
        self._kept[number] = frozenset(references)
        self._candidates |= self._kept[number]

    def written(self, keys: Iterable[str]) -> None:
        """Remember objects that this process wrote."""
        self._candidates.update(keys)

    def append(self, manifest: Mapping[str, Any], references: Iterable[str]) -> None:
        """Create the next commit, and remove what only older ones referred to.

        ``run`` and ``number`` are added to ``manifest``, which is JSON. ``references`` are the keys of all
        objects that it refers to; these must be durable already.

        Raises `CheckpointTakenError` where another process has continued or replaced this run, and
        `CheckpointError` where the store failed, or where there would be too many commits or too long a
        manifest; then the last commit stands.
        """
        with self.watched():
            number = self.last + 1
            if number >= MAX_COMMITS:
                raise CheckpointError(
                    f"{self.objects.location} has {number:,} commits, the most that there can be. Start a "
                    "new run from this model with warm_start=True."
                )
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
            while len(self._kept) > KEPT:
                del self._kept[min(self._kept)]
            stale = [older for older in self.numbers() if older < number and older not in self._kept]
            self.objects.delete([_commit_key(older) for older in stale])
            unused = self._candidates - self._referenced()
            self.objects.delete(unused)
            self._candidates -= unused

    @contextmanager
    def watched(self) -> Iterator[None]:
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

    def standing(self) -> str:
        """Return a sentence on what can be resumed after the store has failed; looks at the store."""
        with suppress(CheckpointError):
            if numbers := self.numbers():
                self.read(numbers[-1])
                return f"The last commit, {numbers[-1]}, is intact, and the run can be resumed from it."
        return self.remembered()

    def remembered(self) -> str:
        """Return a sentence on what can be resumed, as far as this process knows."""
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
        """Raise `CheckpointTakenError` where another process has made a commit after ``newest``."""
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

        Their metadata documents stay as long as one of their objects does.
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
