"""Where a run keeps what it must not lose: named objects, some created exclusively.

An object is bytes under a key such as ``commits/3/zarr.json``. Three stores
have the same face: a folder, any fsspec URL, and a zarr store that the user
made. Objects are written whole or not at all, and never changed; the only
question of concurrency, who writes a commit first, is answered by `create`.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

from emtau_dask.errors import CheckpointError

__all__ = ["LocalObjects", "ObjectStore", "each", "storage_errors"]

PARTIAL = ".partial"
_PARTIAL_NAME = re.compile(r"\..*\.[0-9a-f]{32}\.partial")
ROOT_DOCUMENT = "zarr.json"
PARALLEL = 16

T = TypeVar("T")
R = TypeVar("R")


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
        """Make the place where objects go, before the first is written."""
        ...

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
        """Make objects survive a loss of power."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``, a folder name ending in ``/`` or nothing."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        ...

    def delete_everything(self) -> None:
        """Remove the store and all its objects."""
        ...


_inside = threading.local()


@cache
def _pool() -> ThreadPoolExecutor:
    """Return this process's threads, kept: starting some takes longer than most calls."""
    return ThreadPoolExecutor(
        PARALLEL,
        thread_name_prefix="emtau-objects",
        initializer=lambda: setattr(_inside, "pool", True),
    )


os.register_at_fork(after_in_child=_pool.cache_clear)


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of every item, computed side by side: what takes time here is waiting.

    All calls have ended when this one does, also where one of them raises.
    Called from within such a call, it works through the items in turn.
    """
    todo = list(items)
    if len(todo) < 2 or getattr(_inside, "pool", False):
        return [function(item) for item in todo]
    futures: list[Future[R]] = []
    try:
        futures.extend(_pool().submit(function, item) for item in todo)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


_REMEDIES = {
    errno.ENOSPC: "The disk is full: free space",
    errno.EDQUOT: "The quota is used up: free space",
    errno.EROFS: "The file system is read-only: make it writable",
    errno.EACCES: "Permission is denied: make it writable for this user",
    errno.ENOENT: "The folder has vanished: restore it",
}


@contextmanager
def storage_errors(location: str, doing: str) -> Iterator[None]:
    """Raise `CheckpointError` for whatever a store says is wrong; ``doing`` completes "cannot …"."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        remedy = _REMEDIES.get(number or 0, "Restore access to it")
        reason = f"{type(error).__name__}: {error}".strip().rstrip(".")
        raise CheckpointError(
            f"cannot {doing} in {location} ({reason}). {remedy}; the last commit is intact, and the run can "
            "be resumed from it."
        ) from error


@dataclass(frozen=True)
class LocalObjects:
    """Objects as files below a folder.

    Attributes
    ----------
    root : str
        Absolute.
    """

    root: str

    @property
    def location(self) -> str:
        """The folder."""
        return self.root

    @property
    def shared(self) -> bool:
        """Yes, with processes that see the folder."""
        return True

    @property
    def exclusive(self) -> bool:
        """Yes: ``link`` fails where the name exists."""
        return True

    def _path(self, key: str) -> Path:
        return Path(self.root, key)

    def prepare(self) -> None:
        """Make the folder."""
        with storage_errors(self.root, "make the folder"):
            Path(self.root).mkdir(parents=True, exist_ok=True)
            _fsync(str(Path(self.root).parent))

    def empty(self) -> bool:
        """Look for the folder and anything in it but what an interrupted `create` left."""
        root = Path(self.root)
        with storage_errors(self.root, "look for an earlier run"):
            if not root.is_dir():
                return not root.exists()
            return all(_PARTIAL_NAME.fullmatch(path.name) for path in root.iterdir())

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a file; anything else, such as a pipe, is as if it did not exist."""
        with storage_errors(self.root, f"read {key}"):
            try:
                descriptor = os.open(self._path(key), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode):
                    return None
                return _read(descriptor, min(limit, about.st_size) + 1)
            finally:
                os.close(descriptor)

    def _write_partial(self, path: Path, data: bytes, *, durable: bool) -> Path:
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
        try:
            with self._opened(partial) as file:
                left = memoryview(data)
                while len(left):
                    left = left[file.write(left) :]
                if durable:
                    os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        return partial

    def _opened(self, path: Path) -> io.FileIO:
        """Return a new file, in a folder that is made where there is none."""
        try:
            return path.open("xb", buffering=0)
        except FileNotFoundError:
            self._make_folder(path.parent)
            return path.open("xb", buffering=0)

    def _make_folder(self, folder: Path) -> None:
        """Make folders below the root, never the root itself: where it has vanished, so has the run."""
        root = Path(self.root)
        missing = [path for path in (folder, *folder.parents) if root in path.parents]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
        each(_fsync, [str(path.parent) for path in missing])

    def put(self, key: str, data: bytes) -> None:
        """Write a temporary file and rename it."""
        path = self._path(key)
        with storage_errors(self.root, f"write {key}"):
            self._write_partial(path, data, durable=False).replace(path)

    def create(self, key: str, data: bytes) -> bool:
        """Write a temporary file, fsync it, link it to its name, fsync the folders."""
        path = self._path(key)
        with storage_errors(self.root, f"write {key}"):
            partial = self._write_partial(path, data, durable=True)
            try:
                os.link(partial, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                if path.exists():
                    return False
                raise
            finally:
                partial.unlink(missing_ok=True)
            _fsync(str(path.parent))
        return True

    def sync(self, keys: Iterable[str]) -> None:
        """Fsync files and the folders that name them."""
        paths = [self._path(key) for key in keys]
        with storage_errors(self.root, "make written objects durable"):
            each(_fsync, [str(path) for path in {*paths, *(path.parent for path in paths)}])

    def list(self, prefix: str) -> list[str]:
        """Walk the folder; temporary files are listed too."""
        top = Path(self.root, prefix)
        with storage_errors(self.root, f"list {prefix or 'the objects'}"):
            return sorted(
                str(Path(folder, name).relative_to(self.root))
                for folder, _, names in os.walk(top)
                for name in names
            )

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the folders that this leaves empty."""
        folders = set()
        with storage_errors(self.root, "remove objects"):
            for key in keys:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(f"{self.root}/{key}")  # noqa: PTH108 (making a Path takes longer)
                folders.add(key.rpartition("/")[0])
        paths = [Path(self.root, folder) for folder in folders]
        for folder in sorted(paths, key=lambda path: -len(path.parts)):
            while folder != Path(self.root) and folder.is_relative_to(self.root):
                try:
                    folder.rmdir()
                except OSError:
                    break
                folder = folder.parent

    def delete_everything(self) -> None:
        """Remove the folder; last the document that says whose it is, so that this can be done again."""
        root = Path(self.root)
        with storage_errors(self.root, "remove the run"):
            if not root.is_dir():
                return
            for path in sorted(root.iterdir(), key=lambda path: path.name == ROOT_DOCUMENT):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            root.rmdir()


def _read(descriptor: int, limit: int) -> bytes:
    """Return what there is of a file from where it stands, at most ``limit`` bytes."""
    pieces = []
    while limit > 0 and (piece := os.read(descriptor, limit)):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
