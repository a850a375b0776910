"""Where a run keeps what must outlast it: named objects, some created exclusively.

An object is bytes under a key such as ``commits/3/zarr.json``. It is written whole or not at all, and
not changed afterwards. A store is a folder, an fsspec URL, or a zarr store of the user's.
`ObjectStore.create` decides which of several processes writes a commit.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

from emtau_dask.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTakenError,
    ShutdownError,
    shutdown_named,
)
from emtau_dask.io.files import each, reason_of, remedy_of
from emtau_dask.messages import cause_of

PARTIAL = ".partial"
PARTIAL_NAME = re.compile(r"\..*\.[0-9a-f]{32}\.partial")
CLAIM = "replacing"
"""In stores without locks, this object exists while a process replaces a run."""
PROBES = "probe"
"""The folder where processes try a store before a run begins; they remove what they write."""
ROOT_DOCUMENT = "zarr.json"


@runtime_checkable
class ObjectStore(Protocol):
    """Objects by key; picklable, so that tasks can take it along."""

    @property
    def location(self) -> str:
        """Names the store in messages."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes can reach the same objects."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether `create` is certain to let only one of several processes win."""
        ...

    def prepare(self) -> None:
        """Make the folder of the first object, where the store has folders."""
        return

    def empty(self) -> bool:
        """Return whether nothing is there."""
        ...

    def get(self, key: str, limit: int) -> bytes | None:
        """Return an object's bytes, at most ``limit + 1`` of them; None where it does not exist."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object whole; a second writer of the same key wins."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that does not exist, durably; return False where it does."""
        ...

    def sync(self, keys: Iterable[str]) -> None:
        """Make objects survive a loss of power, where writing them does not do so already."""
        return

    def list(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``: a folder name ending in ``/``, or ""."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        ...

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Let this process alone replace what is there; raises `CheckpointTakenError` where another does."""
        if not self.create(CLAIM, uuid.uuid4().hex.encode()):
            raise CheckpointTakenError(
                f"another process is replacing the run in {self.location}, or ended while it did. See that "
                f"none is, remove {CLAIM} there, and start again."
            )
        try:
            yield
        finally:
            self.delete([CLAIM])


@contextmanager
def storage_errors(
    location: str,
    doing: str,
    remedy: Callable[[Exception], str] = remedy_of,
    kind: Callable[[Exception], type[CheckpointError]] = lambda _: CheckpointError,
) -> Iterator[None]:
    """Raise `CheckpointError`, or the subclass that ``kind`` chooses, for any error of a store.

    ``doing`` completes "cannot …"; ``remedy`` says what is wrong and what to do about it.
    """
    try:
        with shutdown_named():
            yield
    except (CheckpointError, ShutdownError):
        raise
    except Exception as error:
        message = f"cannot {doing} in {location} ({reason_of(error)}). {remedy(error)}."
        raise kind(error)(message) from cause_of(error)


def is_remnant(key: str) -> bool:
    """Return whether an object may remain of a process that ended before it had begun a run."""
    return key.startswith(f"{PROBES}/") or PARTIAL_NAME.fullmatch(key) is not None


def begun_elsewhere(objects: ObjectStore) -> CheckpointTakenError:
    """Return the error for a run that another process has begun just before this one."""
    return CheckpointTakenError(f"another process has just begun a run in {objects.location}.")


def copy_new(source: ObjectStore, target: ObjectStore) -> None:
    """Copy all objects into an empty store, the root document last; where that fails, nothing stays.

    Of several processes that do this at once one succeeds; others raise `CheckpointExistsError`, as does
    one that finds remains. A store that fails raises `CheckpointError`.
    """
    first, *others = [key for key in source.list("") if key != ROOT_DOCUMENT]
    limit = sys.maxsize - 1
    try:
        if not target.create(first, source.get(first, limit) or b""):
            raise CheckpointExistsError(f"{target.location} is being written by another process.")
        each(lambda key: target.put(key, source.get(key, limit) or b""), others)
        target.create(ROOT_DOCUMENT, source.get(ROOT_DOCUMENT, limit) or b"")
    except CheckpointExistsError:
        raise
    except BaseException:
        with suppress(CheckpointError):
            target.delete([ROOT_DOCUMENT])
            target.delete([first, *others])
        raise
