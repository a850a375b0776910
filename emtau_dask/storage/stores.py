"""Objects in a folder, at a URL, in a user's zarr store; the store of a location."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from emtau_dask.errors import (
    CheckpointError,
    CheckpointTakenError,
    InvalidDataError,
    cause_of,
    masked,
    warn_user,
)
from emtau_dask.process import of_process
from emtau_dask.storage.errors import remedy_of, remote_remedy
from emtau_dask.storage.files import each, give_free_name, paths_below, read_regular
from emtau_dask.storage.objects import (
    PARTIAL,
    PARTIAL_NAME,
    PROBES,
    ObjectStore,
    storage_errors,
)
from emtau_dask.storage.urls import Url, plain_path

CONDITIONAL_PUT = frozenset({"s3", "s3a", "gs", "gcs"})
"""Protocols with a conditional PUT. Other file systems are asked for an object before it is written."""
MAX_FOLDER_ATTEMPTS = 10
"""Maximum attempts to make an object's folder, which others may find empty and remove."""


@dataclass(frozen=True, repr=False)
class UrlObjects(ObjectStore):
    """Objects below an fsspec URL."""

    root: Url

    def __repr__(self) -> str:
        return f"UrlObjects({self.location!r})"

    @property
    def location(self) -> str:
        """The URL, without secrets."""
        return str(self.root)

    @property
    def shared(self) -> bool:
        """Yes, except fsspec's ``memory://``."""
        return "memory" not in self.root.opener.protocols

    @property
    def exclusive(self) -> bool:
        """Whether the file system has a conditional PUT."""
        return bool(self.root.opener.protocols & CONDITIONAL_PUT)

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(self.location, doing, remote_remedy)

    def empty(self) -> bool:
        """List the root; tests of other processes do not count."""
        with self._errors("see what is there"):
            return all(name == PROBES for name in self.root.names())

    def get(self, key: str, limit: int) -> bytes | None:
        """Read the whole object: no server gives a range of an empty one."""
        with self._errors(f"read {key}"):
            return (self.root / key).read_if_there()

    def put(self, key: str, data: bytes) -> None:
        """Upload."""
        with self._errors(f"write {key}"):
            (self.root / key).write(data)

    def create(self, key: str, data: bytes) -> bool:
        """Upload on condition that there is no such object; see `Url.create`."""
        with self._errors(f"write {key}"):
            return (self.root / key).create(data)

    def list(self, prefix: str) -> list[str]:
        """List below the prefix, never from a cache."""
        folder = self.root / prefix.rstrip("/") if prefix else self.root
        with self._errors(f"list {prefix or 'the objects'}"):
            return sorted(f"{prefix}{name}" for name in folder.find())

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects in parallel."""
        with self._errors("remove objects"):
            each(lambda key: (self.root / key).delete(), keys)


@dataclass(frozen=True)
class LocalObjects(ObjectStore):
    """Objects as files below a folder, whose path ``root`` is absolute."""

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
        """Yes: `give_free_name` fails if the name exists."""
        return True

    def _path(self, key: str) -> Path:
        return Path(self.root, key)

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(self.root, doing, lambda error: remedy_of(error, self.root))

    def prepare(self) -> None:
        """Make the folder."""
        with self._errors("make the folder"):
            Path(self.root).mkdir(parents=True, exist_ok=True)
            _fsync(str(Path(self.root).parent))

    def empty(self) -> bool:
        """Look for the folder, and for anything in it but probes and remnants of an interrupted `create`."""
        root = Path(self.root)
        with self._errors("see what is there"):
            if not root.is_dir():
                return not root.exists()
            names = [path.name for path in root.iterdir()]
            return all(name == PROBES or PARTIAL_NAME.fullmatch(name) for name in names)

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a file; anything else, such as a pipe, counts as missing."""
        with self._errors(f"read {key}"):
            try:
                return read_regular(self._path(key), 0, limit + 1).tobytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, InvalidDataError):
                return None

    @contextmanager
    def _written(self, path: Path, data: bytes, *, durable: bool) -> Iterator[Path]:
        """Yield a temporary file next to ``path``; after an error it is removed."""
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
        try:
            with self._opened(partial) as file:
                left = memoryview(data)
                while len(left):
                    left = left[file.write(left) :]
                if durable:
                    os.fsync(file.fileno())
            yield partial
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            self._remove_empty(path.parent)
            raise

    def _opened(self, path: Path) -> io.FileIO:
        """Return a new file; its folder is made if it is missing, again if others remove it."""
        for _ in range(MAX_FOLDER_ATTEMPTS):
            try:
                return path.open("xb", buffering=0)
            except FileNotFoundError:
                if not Path(self.root).is_dir():
                    raise
            with suppress(FileNotFoundError):
                self._make_folder(path.parent)
        return path.open("xb", buffering=0)

    def _make_folder(self, folder: Path) -> None:
        """Make folders below the root, never the root itself: if that has vanished, so has the run."""
        root = Path(self.root)
        missing = [path for path in (folder, *folder.parents) if root in path.parents]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
        each(_fsync, [str(path.parent) for path in missing])

    def put(self, key: str, data: bytes) -> None:
        """Write a temporary file and rename it."""
        path = self._path(key)
        with self._errors(f"write {key}"), self._written(path, data, durable=False) as partial:
            partial.replace(path)

    def create(self, key: str, data: bytes) -> bool:
        """Write a temporary file, fsync it, give it its name, fsync the folders."""
        path = self._path(key)
        with self._errors(f"write {key}"), self._written(path, data, durable=True) as partial:
            try:
                give_free_name(partial, path)
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
        with self._errors("make written objects durable"):
            each(_fsync, [str(path) for path in {*paths, *(path.parent for path in paths)}])

    def list(self, prefix: str) -> list[str]:
        """Walk the folder; temporary files are listed too."""
        top = Path(self.root, prefix)
        with self._errors(f"list {prefix or 'the objects'}"):
            return sorted(path.removeprefix(f"{self.root}/") for path in paths_below(top, changing=True))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the folders that this leaves empty."""
        folders = set()
        with self._errors("remove objects"):
            for key in keys:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(f"{self.root}/{key}")  # noqa: PTH108 (making a Path takes longer)
                folders.add(key.rpartition("/")[0])
        for folder in sorted(folders, key=lambda name: -name.count("/")):
            self._remove_empty(self._path(folder))

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder below the root and its parents, as long as they are empty."""
        while folder != Path(self.root) and folder.is_relative_to(self.root):
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                break
            folder = folder.parent

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder until the block or this process ends; on file systems without locks do nothing."""
        with self._errors("open the folder"):
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise CheckpointTakenError(
                        f"another process is replacing the run in {self.root}; choose another place, or "
                        "start again when it has ended."
                    ) from error
            yield
        finally:
            os.close(descriptor)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, eq=False)
class ZarrStoreObjects(ObjectStore):
    """Objects below a path, "" for all, in a zarr store that the user made."""

    store: Store
    path: str = ""

    @classmethod
    def opened(cls, store: Store) -> ZarrStoreObjects:
        """Open a store, if it is not open yet, and return its objects."""
        with storage_errors(str(store), "open the store"):
            sync(store._ensure_open())
        return cls(store)

    @property
    def location(self) -> str:
        """The store's own description, without secrets."""
        return masked(f"{self.store}/{self.path}".rstrip("/"))

    @property
    def shared(self) -> bool:
        """Yes, except a store in this process's memory."""
        return not isinstance(self.store, MemoryStore)

    @property
    def exclusive(self) -> bool:
        """Only in memory, see `create`: zarr's other stores hide the error of a second creation."""
        return isinstance(self.store, MemoryStore)

    def _key(self, key: str) -> str:
        return f"{self.path}/{key}" if self.path else key

    def empty(self) -> bool:
        """Ask the store."""
        with storage_errors(self.location, "see what is there"):
            return sync(self.store.is_empty(self.path))

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a range from the beginning."""
        with storage_errors(self.location, f"read {key}"):
            value = sync(
                self.store.get(self._key(key), default_buffer_prototype(), RangeByteRequest(0, limit + 1))
            )
        return None if value is None else value.to_bytes()

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with storage_errors(self.location, f"write {key}"):
            sync(self.store.set(self._key(key), default_buffer_prototype().buffer.from_bytes(data)))

    def create(self, key: str, data: bytes) -> bool:
        """Look for the object, and write it if it is missing, in one thread of this process at a time."""

        async def look_and_set() -> bool:
            prototype = default_buffer_prototype()
            found = await self.store.get(self._key(key), prototype, RangeByteRequest(0, 1))
            if found is None:
                await self.store.set(self._key(key), prototype.buffer.from_bytes(data))
            return found is None

        with storage_errors(self.location, f"write {key}"), of_process(threading.Lock):
            return sync(look_and_set())

    def list(self, prefix: str) -> list[str]:
        """List below the prefix."""

        async def collect() -> list[str]:
            found = [key async for key in self.store.list_prefix(self._key(prefix))]
            return [key.removeprefix(self._key("")) for key in found]

        with storage_errors(self.location, f"list {prefix or 'the objects'}"):
            return sorted(sync(collect()))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        with storage_errors(self.location, "remove objects"):
            for key in keys:
                with suppress(FileNotFoundError, KeyError):
                    sync(self.store.delete(self._key(key)))


class NotExclusiveWarning(UserWarning):
    """Two processes that resume one run might not notice each other in a store."""


def warn_unless_exclusive(objects: ObjectStore) -> None:
    """Warn if two processes could both create one commit without noticing.

    At a URL it is tested, since some endpoints accept the condition of a conditional PUT and ignore it;
    raises `CheckpointError` if that fails.
    """
    if objects.exclusive and (not isinstance(objects, UrlObjects) or try_store(objects)):
        return
    warn_user(
        f"{objects.location} cannot create an object on condition that it is new, so two processes "
        "that resume this run at the same moment might not notice each other. See that only one does.",
        NotExclusiveWarning,
    )


def try_store(objects: ObjectStore) -> bool:
    """Write, read and remove a small object; return whether two processes would notice each other there.

    No object or folder stays. Raises `CheckpointError` if one of these fails.
    """
    root = Path(objects.root) if isinstance(objects, LocalObjects) else None
    new = [] if root is None else [folder for folder in (root, *root.parents) if not folder.exists()]
    key, content = f"{PROBES}/{uuid.uuid4().hex}", b"emtau"
    try:
        objects.prepare()
        objects.create(key, content)
        if objects.get(key, len(content)) != content or key not in objects.list(f"{PROBES}/"):
            raise CheckpointError(f"{objects.location} does not give back what is written there.")
        return objects.exclusive and not objects.create(key, b"other")
    finally:
        with suppress(CheckpointError):
            objects.delete([key])
        with suppress(OSError):
            for folder in new:
                folder.rmdir()


def object_store(where: object) -> ObjectStore:
    """Return the object store of a path, an fsspec URL or an open zarr store; an object store itself.

    Raises `CheckpointError` if ``where`` is none of these, a URL of an unknown or missing file system, or
    a store that cannot be written.
    """
    if isinstance(where, ObjectStore) and not isinstance(where, type):
        return where
    if isinstance(where, Path):
        where = str(where)
    if isinstance(where, str) and where:
        where = plain_path(where)
        return _at(where) if "://" in where else LocalObjects(str(Path(where).absolute()))
    if not isinstance(where, Store):
        raise CheckpointError(f"checkpoint is {where!r}; give a path, a URL or a zarr store.")
    if where.read_only or not where.supports_deletes:
        raise CheckpointError(f"{where} cannot be written and deleted from; give a store that can.")
    if isinstance(where, LocalStore):
        return LocalObjects(str(Path(where.root).absolute()))
    if isinstance(where, FsspecStore):
        return UrlObjects(Url.within(where.fs, where.path))
    return ZarrStoreObjects(where)


def objects_below(objects: ObjectStore, folder: str) -> ObjectStore:
    """Return the store of the objects of another whose keys begin with ``folder`` and a slash."""
    if isinstance(objects, LocalObjects):
        return LocalObjects(str(Path(objects.root, folder)))
    if isinstance(objects, UrlObjects):
        return UrlObjects(objects.root / folder)
    assert isinstance(objects, ZarrStoreObjects)
    return replace(objects, path=objects._key(folder))


def _at(url: str) -> ObjectStore:
    try:
        return UrlObjects(Url.of(url))
    except InvalidDataError as error:
        raise CheckpointError(str(error)) from cause_of(error)
