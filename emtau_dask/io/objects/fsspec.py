"""Objects behind fsspec URLs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from emtau_dask.errors import CheckpointError, StoreUnreachableError
from emtau_dask.io.files import each
from emtau_dask.io.objects.base import PROBES, ObjectStore, storage_errors
from emtau_dask.io.remote import RemotePath, is_unreachable, remote_remedy

CONDITIONAL_PUT = frozenset({"s3", "s3a", "gs", "gcs"})
"""Protocols with a conditional PUT; other file systems look first, then write."""


def _kind_of(error: Exception) -> type[CheckpointError]:
    return StoreUnreachableError if is_unreachable(error) else CheckpointError


@dataclass(frozen=True, repr=False)
class UrlObjects(ObjectStore):
    """Objects below an fsspec URL."""

    root: RemotePath

    def __repr__(self) -> str:
        return f"UrlObjects({self.location!r})"

    @property
    def location(self) -> str:
        """The URL, without secrets."""
        return str(self.root)

    @property
    def shared(self) -> bool:
        """Yes, but for fsspec's ``memory://``."""
        return "memory" not in self.root.protocols

    @property
    def exclusive(self) -> bool:
        """Whether the file system has a conditional PUT."""
        return bool(self.root.protocols & CONDITIONAL_PUT)

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(self.location, doing, remote_remedy, _kind_of)

    def empty(self) -> bool:
        """List the root; what another process tries there does not count."""
        with self._errors("see what is there"):
            return all(name == PROBES for name in self.root.names())

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a range from the beginning."""
        with self._errors(f"read {key}"):
            return (self.root / key).read_beginning(limit + 1)

    def put(self, key: str, data: bytes) -> None:
        """Upload."""
        with self._errors(f"write {key}"):
            (self.root / key).write(data)

    def create(self, key: str, data: bytes) -> bool:
        """Upload on condition that there is no such object; see `RemotePath.create`."""
        with self._errors(f"write {key}"):
            return (self.root / key).create(data)

    def list(self, prefix: str) -> list[str]:
        """List below the prefix, never from a cache."""
        folder = self.root / prefix.rstrip("/") if prefix else self.root
        with self._errors(f"list {prefix or 'the objects'}"):
            return sorted(f"{prefix}{name}" for name, _ in folder.find())

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects side by side."""
        with self._errors("remove objects"):
            each(lambda key: (self.root / key).delete(), keys)
