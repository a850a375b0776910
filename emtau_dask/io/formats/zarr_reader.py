"""Rows of a zarr array: stored bytes are counted, and large local data are read past the page cache.

Rows that lie in a local file as they do in memory are the bytes of that file, read without zarr.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore, ZipStore

from emtau_dask.io.files import LEAST_BYTES, ReusedMemory, fresh, passes_cache, read_directly
from emtau_dask.io.formats.base import Loaded, RangeReader, Unstored
from emtau_dask.io.formats.read_budget import ReadBudget
from emtau_dask.io.remote import UrlStore, read_errors
from emtau_dask.io.zarr_format import (
    MAX_DOCUMENT_BYTES,
    ShardIndex,
    StoredArray,
    ZarrLayout,
    count_unstored,
    document_at,
    get_within,
    local_within,
    place_of_object,
)
from emtau_dask.mixture.numerics import Bools
from emtau_dask.process import of_process


class CountingStore(WrapperStore[Store]):
    """The store during one read: it counts ``bytes_read``, and notes what is not stored.

    No object may have more than ``limit`` bytes. ``lacking`` says which chunks objects lack, by key; None for
    an object that is not there.
    """

    def __init__(self, store: Store, limit: int, index: ShardIndex | None = None) -> None:
        super().__init__(store)
        self._limit, self._index = limit, index
        self._absent: set[str] = set()
        self.begin(0)

    def begin(self, n_objects: int) -> None:
        """Begin to count for another read.

        ``n_objects`` hold all the data, each like the one that is read: local files that together are too
        large for the page cache are read past it; never where it is 0.
        """
        self._n_objects = n_objects
        self.bytes_read = 0
        self.lacking: dict[str, Bools | None] = {}

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read and count."""
        value = None
        if self._n_objects and byte_range is None and isinstance(self._store, LocalStore):
            found = await asyncio.to_thread(self._read_large, self._store.root / key)
            value = None if found is None else prototype.buffer.from_array_like(found)
        if value is None:
            value = await get_within(self._store, key, prototype, self._limit, byte_range)
        if value is None:
            await self._check_no_folder(key)
            self.lacking[key] = None
            return None
        if not len(value) and byte_range is None:  # Zarr takes an empty shard for one that is not stored.
            raise ValueError(f"{key} is empty: it was cut off")
        self.bytes_read += len(value)
        if self._index is not None:
            lacking = self._index.lacking(value, byte_range)
            if lacking is not None and lacking.any():
                self.lacking[key] = lacking
        return value

    async def _check_no_folder(self, key: str) -> None:
        """Raise IsADirectoryError where a folder is in the place of an object behind a URL."""
        if not isinstance(self._store, UrlStore) or key in self._absent:
            return
        with suppress(FileNotFoundError, PermissionError):  # Some buckets let nobody ask.
            about = await asyncio.to_thread((self._store.root / key).info)
            if about["type"] == "directory":
                raise IsADirectoryError(f"{self._store.root / key} is a folder")
        self._absent.add(key)

    def local_bytes(self, key: str, size: int, reused: ReusedMemory) -> NDArray[np.uint8] | None:
        """Read and count an object of ``size`` bytes in the calling thread, into ``reused`` memory.

        None where it has another size or is missing, or where the store is not of local files.
        """
        if type(self._store) is not LocalStore:
            return None
        found = self._read_large(self._store.root / key, reused.room) if self._n_objects else None
        if found is None:
            found = local_within(self._store, key, self._limit, room_for=reused.room)
        if found is None or len(found) != size:
            return None
        self.bytes_read += size
        return found

    def _read_large(
        self, path: Path, room_for: Callable[[int], NDArray[np.uint8]] = fresh
    ) -> NDArray[np.uint8] | None:
        """Return a file's bytes; None where the page cache may hold all files, or has to be used."""
        try:
            about = path.stat()
        except OSError:
            return None
        regular = stat.S_ISREG(about.st_mode) and about.st_size <= self._limit
        if not regular or not passes_cache(self._n_objects * about.st_size):
            return None
        return read_directly(path, room_for=room_for)


def is_remote(store: Store) -> bool:
    """Return whether what a store reads may come from a network."""
    return not isinstance(store, (LocalStore, MemoryStore, ZipStore))


@dataclass(frozen=True, eq=False)
class ZarrReader(RangeReader):
    """Reads rows of a zarr array."""

    stored: StoredArray

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows; the bytes are the stored (compressed) ones."""
        try:
            store, array = self._spare.pop()
        except IndexError:
            store, array = self._counted()
        store.begin(self._layout.n_objects if self._may_pass_cache(start, stop) else 0)
        budget = of_process(ReadBudget)
        with self._errors(f"rows {start} to {stop} of "), budget.reading(self.peak_bytes(start, stop)):
            rows = self._rows(store, array, start, stop)
        if store.lacking:
            self.identity()  # It raises where the whole array is gone.
        found = Loaded(rows, store.bytes_read, self._unstored(store, start, stop))
        self._spare.append((store, array))
        return found

    def _unstored(self, store: CountingStore, start: int, stop: int) -> Unstored:
        skipped = len(self.stored.path)
        places = {place_of_object(key[skipped:]): lacking for key, lacking in store.lacking.items()}
        chunks, of = count_unstored(self._layout, start, stop, places)
        fill_value = self.stored.array.fill_value  # None in format 2 stands for the dtype's zero.
        return Unstored(chunks, of, "0" if fill_value is None else str(fill_value))

    def _counted(self) -> tuple[CountingStore, zarr.Array[Any]]:
        limit = max(self.stored.description.object_limit, MAX_DOCUMENT_BYTES)
        store = CountingStore(self.stored.store, limit, ShardIndex.of(self.stored))
        return store, self.stored.within(store)

    def _errors(self, part: str = "") -> AbstractContextManager[None]:
        where = self.stored.description.where
        return read_errors(f"{part}the zarr array {where}", remote=is_remote(self.stored.store))

    def _rows(self, store: CountingStore, array: zarr.Array[Any], start: int, stop: int) -> NDArray[Any]:
        """Return the rows; those of very many chunks are read in parts.

        A chunk that is stored as the rows are in memory becomes them. Whatever is unusual about its object,
        zarr says or makes of it.
        """
        if self._layout.is_stored_as_it_is(start, stop):
            key = self.stored.object_key(start // self._layout.object_rows)
            found = store.local_bytes(key, self._layout.object_bytes, self._reused)
            if found is not None:
                return found.view(array.dtype).reshape(self._layout.stored)[: stop - start]
        step = self._layout.rows_at_once(start)
        if stop - start <= step:
            buffers = self._layout.prototype(start, stop)
            return np.asarray(array.get_basic_selection(slice(start, stop), prototype=buffers))
        rows = np.empty((stop - start, *array.shape[1:]), array.dtype)
        while start < stop:
            part = slice(start, min(stop, start + step))
            rows[len(rows) - (stop - start) :][: part.stop - start] = array.get_basic_selection(part)
            start, step = part.stop, self._layout.rows_at_once(part.stop)
        return rows

    def identity(self) -> str:
        """Return the SHA-256 of the array's metadata document, as stored."""
        stored = self.stored
        with self._errors():
            found = document_at(stored.store, stored.path, (stored.description.zarr_format,))
            if found is None:
                raise FileNotFoundError("it has no metadata document")
        return f"zarr array, SHA-256 {sha256(found.data).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds at once, the rows included."""
        return self._layout.peak_bytes(start, stop, remote=is_remote(self.stored.store))

    def _may_pass_cache(self, start: int, stop: int) -> bool:
        """Return whether the rows are whole, large objects, and all the data decoded exceed the page cache.

        After a part of an object its other parts are read soon, so the cache helps.
        """
        layout = self._layout
        large = layout.object_bytes >= LEAST_BYTES and passes_cache(layout.n_objects * layout.object_bytes)
        return large and layout.is_whole_objects(start, stop)

    @cached_property
    def _spare(self) -> list[tuple[CountingStore, zarr.Array[Any]]]:
        """What no read uses now: to make an array anew takes a twentieth of a read of a small chunk."""
        return []

    @cached_property
    def _reused(self) -> ReusedMemory:
        return ReusedMemory()

    def __reduce__(self) -> tuple[Any, ...]:
        return ZarrReader, (self.stored,)

    @cached_property
    def _layout(self) -> ZarrLayout:
        return ZarrLayout.of(self.stored.array)
