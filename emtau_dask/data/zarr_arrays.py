"""Zarr arrays as sources: chunks read and decoded, within a budget of memory.

While zarr reads a chunk it holds the stored bytes, the decoded chunk and, where a result has several
chunks, the array that it copies into: two or three times the chunk. With chunks of 128 MB two reads at
once take more than the fit itself. So reads share a budget; small chunks are still read side by side.

Rows that lie in a local file as they do in memory are the bytes of that file, read without zarr.
"""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath, WrapperStore, ZipStore

from emtau_dask.data.source import CHUNK_BYTES, Loaded, RangeReader, RangeSource, Unstored, equal_chunks
from emtau_dask.data.zarr_layout import (
    MAX_CHUNKS_AT_ONCE,
    ShardIndex,
    ZarrLayout,
    count_unstored,
    place_of_object,
)
from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.linalg import Bools
from emtau_dask.process import of_process
from emtau_dask.storage.direct_reads import LEAST_BYTES, ReusedMemory, passes_cache, read_directly
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import fresh
from emtau_dask.storage.urls import Url, UrlStore, is_url
from emtau_dask.storage.zarr_check import (
    MAX_DOCUMENT_BYTES,
    ArrayDocument,
    Found,
    StoredArray,
    document_at,
    get_within,
    local_within,
)

READ_BYTES = 2**28
"""The budget of a process."""
MANY_CHUNKS = 2**16
"""Of more row chunks than these, small ones are read in groups."""
GROUPED = 2**12
"""The most chunks in such a group: zarr takes some kilobytes for each."""
MAX_MEMBERS = 2**16


class ReadBudget:
    """Lets reads begin while they take at most ``limit`` bytes together; one alone always may."""

    def __init__(self, limit: int = READ_BYTES) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()  # An interrupt in a condition's own `with` could leave it taken.
        self._freed = threading.Condition(self._lock)

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """Take ``size`` bytes of the budget; wait until they are free."""
        with self._lock:
            self._freed.wait_for(lambda: self._taken == 0 or self._taken + size <= self.limit)
            self._taken += size
        try:
            yield
        finally:
            with self._lock:
                self._taken -= size
                self._freed.notify_all()


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


def _wherever_it_is_read(store: Store) -> Store:
    """Return a store with its absolute path if it is local: workers have other working directories."""
    if type(store) is LocalStore:
        return LocalStore(store.root.absolute(), read_only=store.read_only)
    if type(store) is ZipStore and store.read_only:
        return ZipStore(store.path.absolute(), mode="r", read_only=True)
    return store


def zarr_source(array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Return a zarr array as a source with these row chunks, by default its own, see `own_chunk_rows`.

    The array's own stored document says how it is read, however ``array`` was opened.

    Raises
    ------
    InvalidDataError
        The document is gone or has changed, or it describes an array that is not read.
    """
    return source_in(_wherever_it_is_read(array.store), array, chunk_rows)


def source_in(store: Store, array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Do as `zarr_source`, but read through ``store``, also where its path is relative."""
    with read_errors(f"the zarr array {StorePath(store, array.path)}", remote=is_remote(store)):
        found = document_at(store, array.path, (array.metadata.zarr_format,))
        if found is None or found.kind != "array":
            raise FileNotFoundError("it has no metadata document of its own")
        source = _source(store, array.path, found, chunk_rows)
        opened = np.dtype(array.dtype)
        if source.shape != array.shape or source.dtype.newbyteorder("=") != opened.newbyteorder("="):
            raise ValueError(f"it has another shape or dtype now, {source.shape} and {source.dtype}")
    return replace(source, dtype=opened)


def _source(store: Store, path: str, found: Found, chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    where = str(StorePath(store, path))
    stored = StoredArray(store, path, ArrayDocument.checked(found.document, where))
    if chunk_rows is None:
        chunk_rows = own_chunk_rows(ZarrLayout.of(stored.array), where)
    return RangeSource(ZarrReader(stored), stored.description.shape, np.dtype(stored.array.dtype), chunk_rows)


def own_chunk_rows(layout: ZarrLayout, where: str) -> tuple[int, ...]:
    """Return the rows of an array's own row chunks, or of its shards, so that each is read once.

    If there are more than 65,536, several consecutive small ones are one: what a fit keeps for each would
    take more memory than its rows. Raises `InvalidDataError` for too many, along rows or along features.
    """
    if not layout.shape:
        return ()
    n_rows, unit = layout.shape[0], layout.object_rows
    if layout.chunks_across > MAX_CHUNKS_AT_ONCE:
        raise InvalidDataError(
            f"{where} has {layout.chunks_across:,} chunks side by side; at most {MAX_CHUNKS_AT_ONCE:,} are "
            "read. Write it again with chunks of more columns."
        )
    if -(-n_rows // unit) > MANY_CHUNKS:
        row_bytes = layout.object_bytes // unit
        unit *= max(1, min(CHUNK_BYTES // max(1, unit * row_bytes), GROUPED // layout.chunks_across))
    return equal_chunks(n_rows, unit, where)


def open_zarr(path: str, array: str | None) -> RangeSource:
    """Open a zarr array, or a member of a zarr group, as a source.

    Parameters
    ----------
    path : str
        A local path or a URL.
    array : str or None
        The group's member; by default ``"X"``, or the only array with two axes.

    Raises
    ------
    InvalidDataError
        Nothing is there, or the group does not say which array is meant.
    """
    store = UrlStore(Url.of(path)) if is_url(path) else LocalStore(Path(path).absolute(), read_only=True)
    where = str(store) if is_remote(store) else path
    with read_errors(where, remote=is_remote(store)):
        found = document_at(store, "")
        if found is None:
            raise InvalidDataError(
                f"{where} holds no zarr array or group: it has no zarr.json, .zarray or .zgroup."
            )
        if found.kind == "group":
            return _member(store, "", found, array, where)
        if array is not None:
            raise InvalidDataError(
                f"{where} is a zarr array, not a group; leave out the array name {array!r}."
            )
        return _source(store, "", found)


def group_source(group: zarr.Group, array: str | None, where: str) -> RangeSource:
    """Return a member of a zarr group, which errors call ``where``, as a source; see `open_zarr`."""
    store = _wherever_it_is_read(group.store)
    with read_errors(where, remote=is_remote(store)):
        found = document_at(store, group.path, (group.metadata.zarr_format,))
        if found is None:
            raise FileNotFoundError("it has no metadata document")
        return _member(store, group.path, found, array, where)


def _member(store: Store, path: str, group: Found, array: str | None, where: str) -> RangeSource:
    def found_at(name: str) -> Found | None:
        return document_at(store, f"{path}/{name}".lstrip("/"), (group.zarr_format,))

    name = array or "X"
    member = found_at(name)
    if member is None or member.kind != "array":
        members = {each: found_at(each) for each in _names(store, path, group)}
        arrays = {each: found for each, found in members.items() if found and found.kind == "array"}
        tables = [each for each, found in arrays.items() if len(found.document.get("shape", ())) == 2]
        if array is not None or len(tables) != 1:
            wanted = f"no array {array!r}" if array else "no array 'X' and not exactly one with two axes"
            raise InvalidDataError(
                f"the zarr group {where} has {wanted}; its arrays are {sorted(arrays) or 'none'}. Name one "
                "of them."
            )
        (name,) = tables
        member = arrays[name]
    return _source(store, f"{path}/{name}".lstrip("/"), member)


def _names(store: Store, path: str, group: Found) -> list[str]:
    """Return the names in a group, from the store's list and from consolidated metadata."""

    async def listed() -> list[str]:
        names = []
        async for name in store.list_dir(path):
            names.append(name)
            if len(names) > MAX_MEMBERS:
                raise InvalidDataError(f"{store} lists more than {MAX_MEMBERS:,} members; name one of them.")
        return names

    consolidated = (group.document.get("consolidated_metadata") or {}).get("metadata") or {}
    return sorted({*(name for name in consolidated if "/" not in name), *sync(listed())})
