"""Objects behind fsspec URLs and in zarr stores, and the choice of a store for a location."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from emtau_dask.errors import CheckpointError
from emtau_dask.storage.objects import LocalObjects, ObjectStore, each, storage_errors

__all__ = ["UrlObjects", "ZarrStoreObjects", "object_store", "warn_unless_exclusive"]

CONDITIONAL_PUT = frozenset({"s3", "s3a", "gs", "gcs"})
"""Protocols whose file systems create objects by a conditional PUT; others look first, then write."""

T = TypeVar("T")


@dataclass(frozen=True)
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

    @property
    def location(self) -> str:
        """The URL."""
        return str(self.files.unstrip_protocol(self.root))

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

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def prepare(self) -> None:
        """Do nothing: object stores have no folders."""

    def empty(self) -> bool:
        """List the root."""
        with storage_errors(self.location, "look for an earlier run"):
            self.files.invalidate_cache()
            try:
                return not self.files.ls(self.root, detail=False)
            except FileNotFoundError:
                return True

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a range from the beginning; an empty object has none."""
        path = self._path(key)
        with storage_errors(self.location, f"read {key}"):
            try:
                return bytes(self.files.cat_file(path, start=0, end=limit + 1))
            except FileNotFoundError:
                return None
            except Exception:
                with suppress(Exception):
                    self.files.invalidate_cache()
                    if self.files.info(path)["size"] == 0:
                        return b""
                raise

    def put(self, key: str, data: bytes) -> None:
        """Upload."""
        with storage_errors(self.location, f"write {key}"):
            self.files.pipe_file(self._path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Upload on condition that there is no such object.

        A lost answer makes the client ask again and meet its own object, so what
        is there is compared with what was to be written.
        """
        with storage_errors(self.location, f"write {key}"):
            try:
                self.files.pipe_file(self._path(key), data, mode="create")
            except OSError:
                found = self.get(key, len(data))
                if found is None:
                    raise
                return found == data
        return True

    def sync(self, keys: Iterable[str]) -> None:
        """Do nothing: an upload that was acknowledged is durable."""

    def list(self, prefix: str) -> list[str]:
        """List below the prefix, never from a cache."""
        start = len(self.root) + 1
        with storage_errors(self.location, f"list {prefix or 'the objects'}"):
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

        with storage_errors(self.location, "remove objects"):
            each(remove, keys)

    def delete_everything(self) -> None:
        """Remove all objects below the root."""
        self.delete(self.list(""))


_in_process = threading.Lock()


@dataclass(frozen=True, eq=False)
class ZarrStoreObjects:
    """Objects in a zarr store that the user made."""

    store: Store

    @property
    def location(self) -> str:
        """What the store calls itself."""
        return str(self.store)

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
        with storage_errors(self.location, "look for an earlier run"):
            return self._run(self.store.is_empty(""))

    def get(self, key: str, limit: int) -> bytes | None:
        """Read an object."""
        with storage_errors(self.location, f"read {key}"):
            value = self._run(self.store.get(key, default_buffer_prototype()))
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

    def delete_everything(self) -> None:
        """Remove all objects of the store."""
        with storage_errors(self.location, "remove the run"):
            self._run(self.store.clear())


def warn_unless_exclusive(objects: ObjectStore) -> None:
    """Warn where two processes could both create one commit without noticing.

    A file system that should have conditional PUTs is tried: some endpoints
    accept the condition and ignore it.
    """
    if objects.exclusive and (not isinstance(objects, UrlObjects) or _refuses_second(objects)):
        return
    warnings.warn(
        f"{objects.location} cannot create an object on condition that it is new, so two processes "
        "that go on "
        "with this run at the same moment might not notice each other. See that only one does.",
        stacklevel=6,
    )


def _refuses_second(objects: UrlObjects) -> bool:
    key = f"probe/{uuid.uuid4().hex}"
    try:
        return objects.create(key, b"first") and not objects.create(key, b"second")
    finally:
        objects.delete([key])


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
        files, path = url_to_fs(url)
    except ImportError as error:
        protocol = url.partition("://")[0]
        extra = {"s3a": "s3", "gcs": "gs"}.get(protocol, protocol)
        raise CheckpointError(
            f"{url} needs a package that is not installed ({error}). For s3:// and gs:// install it with: "
            f"pip install 'emtau_dask[{extra}]'"
        ) from error
    except ValueError as error:
        known = ", ".join(sorted(name for name in ("s3", "gs", "file", "memory", "az", "sftp")))
        raise CheckpointError(f"{url} is no URL that can be used ({error}); known are {known}.") from error
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
