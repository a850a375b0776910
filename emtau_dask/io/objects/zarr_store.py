"""Objects in a zarr store that the user made."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from emtau_dask.io.objects.base import ObjectStore, storage_errors
from emtau_dask.messages import masked
from emtau_dask.process import of_process


@dataclass(frozen=True, eq=False)
class ZarrStoreObjects(ObjectStore):
    """Objects in a zarr store that the user made."""

    store: Store

    @classmethod
    def opened(cls, store: Store) -> ZarrStoreObjects:
        """Open a store, if it is not open yet, and return its objects."""
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
        """Only in memory, see `create`: zarr's other stores hide the error that would tell."""
        return isinstance(self.store, MemoryStore)

    def empty(self) -> bool:
        """Ask the store."""
        with storage_errors(self.location, "see what is there"):
            return sync(self.store.is_empty(""))

    def get(self, key: str, limit: int) -> bytes | None:
        """Read a range from the beginning."""
        with storage_errors(self.location, f"read {key}"):
            value = sync(self.store.get(key, default_buffer_prototype(), RangeByteRequest(0, limit + 1)))
        return None if value is None else value.to_bytes()

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with storage_errors(self.location, f"write {key}"):
            sync(self.store.set(key, default_buffer_prototype().buffer.from_bytes(data)))

    def create(self, key: str, data: bytes) -> bool:
        """Look for the object, and write it if it is missing; one thread of this process at a time."""

        async def look_and_set() -> bool:
            prototype = default_buffer_prototype()
            found = await self.store.get(key, prototype, RangeByteRequest(0, 1))
            if found is None:
                await self.store.set(key, prototype.buffer.from_bytes(data))
            return found is None

        with storage_errors(self.location, f"write {key}"), of_process(threading.Lock):
            return sync(look_and_set())

    def list(self, prefix: str) -> list[str]:
        """List below the prefix."""

        async def collect() -> list[str]:
            return [key async for key in self.store.list_prefix(prefix)]

        with storage_errors(self.location, f"list {prefix or 'the objects'}"):
            return sorted(sync(collect()))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        with storage_errors(self.location, "remove objects"):
            for key in keys:
                with suppress(FileNotFoundError, KeyError):
                    sync(self.store.delete(key))
