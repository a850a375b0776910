"""From locations to object stores: a path, a URL or a zarr store; and whether these are exclusive."""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore

from emtau_dask.errors import CheckpointError, InvalidDataError, warn_user
from emtau_dask.io.files import reason_of
from emtau_dask.io.objects.base import PROBES, ObjectStore
from emtau_dask.io.objects.fsspec import UrlObjects
from emtau_dask.io.objects.local import LocalObjects
from emtau_dask.io.objects.prefixed import PrefixedObjects
from emtau_dask.io.objects.zarr_store import ZarrStoreObjects
from emtau_dask.io.remote import OpenedPath, Url, missing_package, remote_remedy
from emtau_dask.messages import cause_of


class NotExclusiveWarning(UserWarning):
    """Two processes that resume one run might not notice each other in a store."""


def warn_unless_exclusive(objects: ObjectStore) -> None:
    """Warn where two processes could both create one commit without noticing.

    A conditional PUT is tried, since some endpoints accept the condition and ignore it. A folder is tried
    too; raises `CheckpointError` where its file system cannot create a file on condition that it is new.
    """
    if _is_exclusive(objects):
        return
    warn_user(
        f"{objects.location} cannot create an object on condition that it is new, so two processes "
        "that resume this run at the same moment might not notice each other. See that only one does.",
        NotExclusiveWarning,
    )


def _is_exclusive(objects: ObjectStore) -> bool:
    if isinstance(objects, LocalObjects):
        objects.check_exclusive()
    return objects.exclusive and (not isinstance(objects, UrlObjects) or _refuses_second(objects))


def try_store(objects: ObjectStore) -> bool:
    """Write, read and remove a small object; return whether two processes would notice each other there.

    Nothing stays, no folder either. Raises `CheckpointError` where one of these fails.
    """
    root = Path(objects.root) if isinstance(objects, LocalObjects) else None
    new = [] if root is None else [folder for folder in (root, *root.parents) if not folder.exists()]
    key, content = f"{PROBES}/{uuid.uuid4().hex}", b"emtau"
    try:
        objects.prepare()
        objects.put(key, content)
        if objects.get(key, len(content)) != content or key not in objects.list(f"{PROBES}/"):
            raise CheckpointError(f"{objects.location} does not give back what is written there.")
        return _is_exclusive(objects)
    finally:
        with suppress(CheckpointError):
            objects.delete([key])
        with suppress(OSError):
            for folder in new:
                folder.rmdir()


def _refuses_second(objects: UrlObjects) -> bool:
    key = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        return objects.create(key, b"first") and not objects.create(key, b"second")
    finally:
        objects.delete([key])


def object_store(where: object) -> ObjectStore:
    """Return the object store of a path, an fsspec URL or an open zarr store; an object store as it is.

    Raises `CheckpointError` where ``where`` is none of these, a URL of an unknown or missing file system, or
    a store that cannot be written.
    """
    if isinstance(where, ObjectStore) and not isinstance(where, type):
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
        return UrlObjects(OpenedPath.of(where.fs, where.path))
    return ZarrStoreObjects(where)


def objects_below(objects: ObjectStore, folder: str) -> ObjectStore:
    """Return the store of the objects of another whose keys begin with ``folder`` and a slash."""
    if isinstance(objects, LocalObjects):
        return LocalObjects(str(Path(objects.root, folder)))
    if isinstance(objects, UrlObjects):
        return UrlObjects(objects.root / folder)
    return PrefixedObjects(objects, folder)


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
    return UrlObjects(OpenedPath.of(files, path))
