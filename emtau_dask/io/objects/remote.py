"""Objects behind fsspec URLs and in zarr stores, and the choice of a store for a location."""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from emtau_dask.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointTakenError,
    InvalidDataError,
    StoreUnreachableError,
)
from emtau_dask.io.files import each, reason_of
from emtau_dask.io.objects.base import CLAIM, PROBES, ROOT_DOCUMENT, LocalObjects, ObjectStore, storage_errors
from emtau_dask.io.remote import (
    Url,
    answers_within,
    is_unreachable,
    missing_package,
    remote_remedy,
    upload_seconds,
)
from emtau_dask.messages import cause_of, masked, masked_url

CONDITIONAL_PUT = frozenset({"s3", "s3a", "gs", "gcs"})
"""Protocols whose file systems create objects by a conditional PUT; others look first, then write."""

CONFLICT_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds, about, between attempts that the server answers with a conflict."""

T = TypeVar("T")


def _is_conflict(error: Exception) -> bool:
    """Return whether the server said 409: of S3 a ClientError behind an OSError, of Google an HttpError."""
    for each_error in (error, error.__cause__):
        response = getattr(each_error, "response", None)
        if isinstance(response, dict):
            return bool(response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 409)
        if getattr(each_error, "code", None) == 409:
            return True
    return False


def _kind_of(error: Exception) -> type[CheckpointError]:
    return StoreUnreachableError if is_unreachable(error) else CheckpointError


@dataclass(frozen=True, repr=False)
class UrlObjects:
    """Objects below an fsspec URL.

    Attributes
    ----------
    files : fsspec.AbstractFileSystem
        In its synchronous form.
    root : str
        A path of that file system.
    """

    files: Any
    root: str

    def __repr__(self) -> str:
        return f"UrlObjects({self.location!r})"

    @property
    def location(self) -> str:
        """The URL, without secrets."""
        whole = "://" in self.root  # a path of fsspec's HTTP is the URL itself
        return masked_url(self.root if whole else str(self.files.unstrip_protocol(self.root)))

    @property
    def shared(self) -> bool:
        """Yes, but for fsspec's ``memory://``."""
        return "memory" not in self._protocols

    @property
    def exclusive(self) -> bool:
        """Whether the file system has a conditional PUT."""
        return bool(self._protocols & CONDITIONAL_PUT)

    @property
    def _protocols(self) -> frozenset[str]:
        names = self.files.protocol
        return frozenset([names] if isinstance(names, str) else names)

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(self.location, doing, remote_remedy, _kind_of)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def prepare(self) -> None:
        """Do nothing: object stores have no folders."""

    def empty(self) -> bool:
        """List the root, but not what another process tries there."""
        with self._errors("see what is there"):
            self.files.invalidate_cache()
            try:
                paths = self.files.ls(self.root, detail=False)
            except FileNotFoundError:
                return True
            return all(path.rstrip("/").rpartition("/")[2] == PROBES for path in paths)

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a range from the beginning; an empty object has none."""
        path = self._path(key)
        with self._errors(f"read {key}"):
            try:
                with answers_within(limit + 1):
                    return bytes(self.files.cat_file(path, start=0, end=limit + 1))
            except FileNotFoundError:
                return None
            except Exception as error:
                if is_unreachable(error):
                    raise
                with suppress(Exception):
                    self.files.invalidate_cache()
                    if self.files.info(path)["size"] == 0:
                        return b""
                raise

    def put(self, key: str, data: bytes) -> None:
        """Upload."""
        with self._errors(f"write {key}"):
            self._upload(key, data)

    def _upload(self, key: str, data: bytes, **condition: str) -> None:
        """Upload, in bounded time: a client that waits to be told to go on with its body waits for ever."""
        patience = {"timeout": upload_seconds(len(data))} if isinstance(self.files, AsyncFileSystem) else {}
        self.files.pipe_file(self._path(key), data, **condition, **patience)

    def create(self, key: str, data: bytes) -> bool:
        """Upload on condition that there is no such object.

        A lost answer makes the client ask again and meet its own object, so what
        is there is compared with what was to be written. Where another request
        for the same key is under way, S3 answers 409, which says nothing of who
        will be first: that is asked again.
        """
        with self._errors(f"write {key}"):
            pauses = iter(CONFLICT_PAUSES)
            while True:
                try:
                    self._upload(key, data, mode="create")
                    return True
                except Exception as error:
                    conflict = _is_conflict(error)
                    if is_unreachable(error) or not (conflict or isinstance(error, OSError)):
                        raise
                    found = self.get(key, len(data))
                    if found is not None:
                        return found == data
                    pause = next(pauses, None)
                    if not conflict or pause is None:
                        raise
                time.sleep(pause * random.uniform(0.5, 1.5))

    def sync(self, keys: Iterable[str]) -> None:
        """Do nothing: an upload that was acknowledged is durable."""

    def list(self, prefix: str) -> list[str]:
        """List below the prefix, never from a cache."""
        start = len(self.root) + 1
        with self._errors(f"list {prefix or 'the objects'}"):
            self.files.invalidate_cache()
            try:
                return sorted(path[start:] for path in self.files.find(self._path(prefix).rstrip("/")))
            except FileNotFoundError:
                return []

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects side by side."""

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self.files.rm_file(self._path(key))

        with self._errors("remove objects"):
            each(remove, keys)

    def claimed(self) -> AbstractContextManager[None]:
        """Create an object, as exclusively as any."""
        return _claimed(self)


_in_process = threading.Lock()


@dataclass(frozen=True, eq=False)
class ZarrStoreObjects:
    """Objects in a zarr store that the user made."""

    store: Store

    @classmethod
    def opened(cls, store: Store) -> ZarrStoreObjects:
        """Return the objects of a store that need not be open yet."""
        with storage_errors(str(store), "open the store"):
            sync(store._ensure_open())
        return cls(store)

    @property
    def location(self) -> str:
        """What the store calls itself, without secrets."""
        return masked(str(self.store))

    @property
    def shared(self) -> bool:
        """Yes, but for a store in this process's memory."""
        return not isinstance(self.store, MemoryStore)

    @property
    def exclusive(self) -> bool:
        """Only in memory, where a lock makes it so: zarr's stores swallow the error that would tell."""
        return isinstance(self.store, MemoryStore)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return sync(coroutine)

    def prepare(self) -> None:
        """Do nothing: the user made the store."""

    def empty(self) -> bool:
        """Ask the store."""
        with storage_errors(self.location, "see what is there"):
            return self._run(self.store.is_empty(""))

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a range from the beginning."""
        with storage_errors(self.location, f"read {key}"):
            wanted = RangeByteRequest(0, limit + 1)
            value = self._run(self.store.get(key, default_buffer_prototype(), wanted))
        return None if value is None else value.to_bytes()

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with storage_errors(self.location, f"write {key}"):
            self._run(self.store.set(key, default_buffer_prototype().buffer.from_bytes(data)))

    def create(self, key: str, data: bytes) -> bool:
        """Look whether there is such an object, and write it if not."""
        with _in_process:
            if self.get(key, 0) is not None:
                return False
            self.put(key, data)
        return True

    def sync(self, keys: Iterable[str]) -> None:
        """Do nothing: what a store promises of durability is its own."""

    def list(self, prefix: str) -> list[str]:
        """List below the prefix."""

        async def collect() -> list[str]:
            return [key async for key in self.store.list_prefix(prefix)]

        with storage_errors(self.location, f"list {prefix or 'the objects'}"):
            return sorted(self._run(collect()))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        with storage_errors(self.location, "remove objects"):
            for key in keys:
                with suppress(FileNotFoundError, KeyError):
                    self._run(self.store.delete(key))

    def claimed(self) -> AbstractContextManager[None]:
        """Create an object, as exclusively as any."""
        return _claimed(self)


@contextmanager
def _claimed(objects: UrlObjects | ZarrStoreObjects) -> Iterator[None]:
    if not objects.create(CLAIM, uuid.uuid4().hex.encode()):
        raise CheckpointTakenError(
            f"another process is replacing the run in {objects.location}, or ended while it did. See that "
            f"none is, remove {CLAIM} there, and start again."
        )
    try:
        yield
    finally:
        objects.delete([CLAIM])


def warn_unless_exclusive(objects: ObjectStore) -> None:
    """Warn where two processes could both create one commit without noticing.

    A file system that should have conditional PUTs is tried: some endpoints
    accept the condition and ignore it. So is a folder's.

    Raises
    ------
    CheckpointError
        The folder's file system cannot create a file on condition that it is new.
    """
    if isinstance(objects, LocalObjects):
        objects.check_exclusive()
    if objects.exclusive and (not isinstance(objects, UrlObjects) or _refuses_second(objects)):
        return
    warnings.warn(
        f"{objects.location} cannot create an object on condition that it is new, so two processes "
        "that go on "
        "with this run at the same moment might not notice each other. See that only one does.",
        stacklevel=6,
    )


def _refuses_second(objects: UrlObjects) -> bool:
    key = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        return objects.create(key, b"first") and not objects.create(key, b"second")
    finally:
        objects.delete([key])


def copy_new(source: ObjectStore, target: ObjectStore) -> None:
    """Copy all objects to where nothing is yet, the root document last.

    Of several that do this at once, one writes; where it fails, nothing stays.

    Raises
    ------
    CheckpointExistsError
        Another has begun, or left something.
    CheckpointError
        A store failed.
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


def object_store(where: object) -> ObjectStore:
    """Return the objects of a location.

    Parameters
    ----------
    where : str, Path, zarr store or ObjectStore
        A path, an fsspec URL, or an open zarr store.

    Raises
    ------
    CheckpointError
        It is none of these, a URL of an unknown or missing file system, or a
        store that cannot be written.
    """
    if isinstance(where, (LocalObjects, UrlObjects, ZarrStoreObjects)):
        return where
    if isinstance(where, Path):
        return LocalObjects(str(where.absolute()))
    if isinstance(where, str) and where:
        return _at(where) if "://" in where else LocalObjects(str(Path(where).absolute()))
    if not isinstance(where, Store):
        raise CheckpointError(f"checkpoint is {where!r}; give a path, a URL or a zarr store.")
    if where.read_only or not where.supports_deletes:
        raise CheckpointError(f"{where} cannot be written and deleted from; give a store that can.")
    if isinstance(where, LocalStore):
        return LocalObjects(str(Path(where.root).absolute()))
    if isinstance(where, FsspecStore):
        return UrlObjects(_synchronous(where.fs), where.path.rstrip("/"))
    return ZarrStoreObjects(where)


def _at(url: str) -> ObjectStore:
    try:
        files, path = Url.of(url).connect()
    except InvalidDataError as error:
        raise CheckpointError(str(error)) from error
    except ImportError as error:
        raise CheckpointError(f"{Url(url)}: {missing_package(url, error)}") from error
    except Exception as error:
        raise CheckpointError(
            f"{Url(url)} cannot be used ({reason_of(error)}). {remote_remedy(error)}."
        ) from cause_of(error)
    if isinstance(files, LocalFileSystem):
        return LocalObjects(str(Path(path).absolute()))
    return UrlObjects(files, path.rstrip("/"))


def _synchronous(files: Any) -> Any:
    """Return the file system in the form that blocks, without zarr's wrapper around one that does."""
    inner = getattr(files, "sync_fs", None)
    if inner is not None:
        return inner
    if isinstance(files, AsyncFileSystem) and files.asynchronous:
        options = {**files.storage_options, "asynchronous": False}
        return fsspec.filesystem(
            files.protocol if isinstance(files.protocol, str) else files.protocol[0], **options
        )
    return files
