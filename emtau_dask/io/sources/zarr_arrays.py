"""zarr arrays as addressable sources, with the stored bytes of every read counted."""

from __future__ import annotations

import asyncio
import stat
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import zarr
import zarr.abc.store
from dask.array.core import getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise
from dask.highlevelgraph import MaterializedLayer
from numpy.typing import NDArray
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath, WrapperStore, ZipStore

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.files import LEAST_BYTES, passes_cache, read_directly
from emtau_dask.io.remote import Url, UrlStore, is_url, read_errors
from emtau_dask.io.sources.base import RangeSource
from emtau_dask.io.sources.checks import CHUNK_BYTES, equal_chunks
from emtau_dask.io.sources.read_budget import ReadBudget
from emtau_dask.io.zarr_format import (
    MAX_CHUNKS_AT_ONCE,
    MAX_DOCUMENT_BYTES,
    ArrayDocument,
    Found,
    StoredArray,
    ZarrLayout,
    document_at,
    get_within,
)

READ_BUDGET = ReadBudget(2**28)
MANY_CHUNKS = 2**16
"""Row chunks of an array from which on small ones are grouped."""
GROUPED = 2**12
"""The most chunks that are read as one for that reason: each takes zarr some kilobytes."""
MAX_MEMBERS = 2**16


@dataclass
class _Reads:
    """What reading has brought so far in one context.

    Attributes
    ----------
    n_objects : int
        Objects like those that are read, which hold all the data; 0 where they are not to be read directly.
    sizes : list of int
        Bytes of each object.
    missing : bool
        Whether one was not there.
    """

    n_objects: int
    sizes: list[int] = field(default_factory=list)
    missing: bool = False


_reads: ContextVar[_Reads | None] = ContextVar("emtau_reads", default=None)


class CountingStore(WrapperStore[Any]):
    """Adds the size of everything read to the counter of the reading context, and bounds it.

    Local files that together are too large for the page cache are read past it.

    zarr reads in an event loop of its own, but its coroutines inherit the
    context of the thread that asked, so that concurrent tasks count apart.

    Parameters
    ----------
    store : zarr.abc.store.Store
    limit : int
        Bytes that an object has at most.
    """

    def __init__(self, store: zarr.abc.store.Store, limit: int) -> None:
        super().__init__(store)
        self._limit = limit

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: zarr.abc.store.ByteRequest | None = None,
    ) -> Buffer | None:
        """Read, and count."""
        reads = _reads.get()
        value = None
        if reads is not None and reads.n_objects and byte_range is None:
            value = await self._directly(key, prototype, reads.n_objects)
        if value is None:
            value = await get_within(self._store, key, prototype, self._limit, byte_range)
        if reads is not None and value is not None:
            reads.sizes.append(len(value))
        elif reads is not None:
            reads.missing = True
        return value

    async def _directly(self, key: str, prototype: BufferPrototype, n_objects: int) -> Buffer | None:
        """Return an object from its file; None where the store is to read it."""
        if not isinstance(self._store, LocalStore):
            return None
        path = self._store.root / key
        found = await asyncio.to_thread(_read_large, path, n_objects, self._limit)
        return None if found is None else prototype.buffer.from_array_like(found)


def _read_large(path: Path, n_objects: int, limit: int) -> NDArray[np.uint8] | None:
    """Return a file's bytes; None where so many like it may be in the page cache, or it cannot be read so."""
    try:
        about = path.stat()
    except OSError:
        return None
    regular = stat.S_ISREG(about.st_mode) and about.st_size <= limit
    return read_directly(path) if regular and passes_cache(n_objects * about.st_size) else None


@dataclass(frozen=True, eq=False)
class ZarrReader:
    """Reads rows of a zarr array, one call at a time for each task.

    Attributes
    ----------
    stored : StoredArray
        In a `CountingStore`.
    where : str
        Names the array in messages.
    remote : bool
        Whether it lies behind a URL.
    """

    stored: StoredArray
    where: str
    remote: bool

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return the rows and the stored (compressed) bytes read for them.

        Raises
        ------
        InvalidDataError
            They cannot be read.
        """
        reads = _Reads(self._layout.n_objects if self._may_pass_cache(start, stop) else 0)
        token = _reads.set(reads)
        try:
            with (
                read_errors(f"rows {start} to {stop} of the zarr array {self.where}", remote=self.remote),
                READ_BUDGET.reading(self.peak_bytes(start, stop)),
            ):
                rows = self._rows(start, stop)
        finally:
            _reads.reset(token)
        if reads.missing:
            # A chunk that is not stored holds the fill value; but is the array itself still there?
            self.identity()
        return rows, sum(reads.sizes)

    def _rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return the rows, of more chunks than zarr should begin with at once one part after another."""
        array, step = self.stored.array, self._layout.rows_at_once(start)
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
        """Return the SHA-256 of the array's metadata document, as stored.

        Raises
        ------
        InvalidDataError
            This process does not see it.
        """
        place = self.stored
        with read_errors(f"the zarr array {self.where}", remote=self.remote):
            found = document_at(place.store, place.path, (place.description.zarr_format,))
            if found is None:
                raise FileNotFoundError("it has no metadata document")
        return f"zarr array, SHA-256 {sha256(found.data).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds at once, the rows included."""
        return self._layout.peak_bytes(start, stop, remote=self.remote)

    def _may_pass_cache(self, start: int, stop: int) -> bool:
        """Return whether these rows are whole, large objects, too many, decoded, for the page cache.

        Parts of an object are soon followed by its other parts.
        """
        layout = self._layout
        large = layout.object_bytes >= LEAST_BYTES and passes_cache(layout.n_objects * layout.object_bytes)
        return large and layout.is_whole_objects(start, stop)

    @cached_property
    def _layout(self) -> ZarrLayout:
        return ZarrLayout.of(self.stored.array)


def _wherever_it_is_read(store: zarr.abc.store.Store) -> zarr.abc.store.Store:
    """Return a store of local files by its absolute path: workers have working directories of their own."""
    if type(store) is LocalStore:
        return LocalStore(store.root.absolute(), read_only=store.read_only)
    if type(store) is ZipStore and store.read_only:
        return ZipStore(store.path.absolute(), mode="r", read_only=True)
    return store


def zarr_source(array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Return a zarr array as a source.

    Its own stored document says how it is read, whatever ``array`` was opened by.

    Parameters
    ----------
    array : zarr.Array
    chunk_rows : tuple of int, optional
        By default its own row chunks, see `own_chunk_rows`.

    Raises
    ------
    InvalidDataError
        The document is gone, or another, or says what is not read.
    """
    return _source_in(_wherever_it_is_read(array.store), array, chunk_rows)


def _source_in(
    store: zarr.abc.store.Store, array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None
) -> RangeSource:
    where = str(StorePath(store, array.path))
    remote = not isinstance(store, (LocalStore, MemoryStore, ZipStore))
    with read_errors(f"the zarr array {where}", remote=remote):
        found = document_at(store, array.path, (array.metadata.zarr_format,))
        if found is None or found.kind != "array":
            raise FileNotFoundError("it has no metadata document of its own")
        source = _source(store, array.path, found, where, remote, chunk_rows)
        opened = np.dtype(array.dtype)
        if source.shape != array.shape or source.dtype.newbyteorder("=") != opened.newbyteorder("="):
            raise ValueError(f"it has another shape or dtype now, {source.shape} and {source.dtype}")
    return replace(source, dtype=opened)


def _source(
    store: zarr.abc.store.Store,
    path: str,
    found: Found,
    where: str,
    remote: bool,
    chunk_rows: tuple[int, ...] | None = None,
) -> RangeSource:
    description = ArrayDocument.checked(found.document, where)
    counted = CountingStore(store, max(description.object_limit, MAX_DOCUMENT_BYTES))
    stored = StoredArray(counted, path, description)
    dtype = np.dtype(stored.array.dtype)
    if chunk_rows is None:
        chunk_rows = own_chunk_rows(ZarrLayout.of(stored.array), where)
    return RangeSource(ZarrReader(stored, where, remote), description.shape, dtype, chunk_rows)


def own_chunk_rows(layout: ZarrLayout, where: str) -> tuple[int, ...]:
    """Return the rows of an array's own row chunks; of a sharded array's shards, so that each is read once.

    Of more than 65,536 small ones, some consecutive ones are read as one: what a fit keeps of
    each would take more memory than the rows.

    Raises
    ------
    InvalidDataError
        There are too many, along rows or along features.
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
    remote = is_url(path)
    store = UrlStore(Url.of(path)) if remote else LocalStore(Path(path).absolute(), read_only=True)
    where = str(store) if remote else path
    with read_errors(where, remote=remote):
        found = document_at(store, "")
        if found is None:
            raise InvalidDataError(
                f"{where} holds no zarr array or group: it has no zarr.json, .zarray or .zgroup."
            )
        if found.kind == "group":
            return _member(store, "", found, array, where, remote)
        if array is not None:
            raise InvalidDataError(
                f"{where} is a zarr array, not a group; leave out the array name {array!r}."
            )
        return _source(store, "", found, str(StorePath(store)), remote)


def group_source(group: zarr.Group, array: str | None, where: str) -> RangeSource:
    """Return a member of a zarr group as a source; see `open_zarr`.

    Parameters
    ----------
    group : zarr.Group
    array : str or None
    where : str
        Names the group in errors.
    """
    store = _wherever_it_is_read(group.store)
    remote = not isinstance(store, (LocalStore, MemoryStore, ZipStore))
    with read_errors(where, remote=remote):
        found = document_at(store, group.path, (group.metadata.zarr_format,))
        if found is None:
            raise FileNotFoundError("it has no metadata document")
        return _member(store, group.path, found, array, where, remote)


def _member(
    store: zarr.abc.store.Store, path: str, group: Found, array: str | None, where: str, remote: bool
) -> RangeSource:
    formats = (group.zarr_format,)

    def below(name: str) -> str:
        return f"{path}/{name}".lstrip("/")

    def opened(name: str, found: Found) -> RangeSource:
        return _source(store, below(name), found, str(StorePath(store, below(name))), remote)

    member = document_at(store, below(array or "X"), formats)
    if member is not None and member.kind == "array":
        return opened(array or "X", member)
    members = {name: document_at(store, below(name), formats) for name in _names(store, path, group)}
    arrays = {name: found for name, found in members.items() if found is not None and found.kind == "array"}
    tables = [name for name, found in arrays.items() if len(found.document.get("shape", ())) == 2]
    if array is None and len(tables) == 1:
        return opened(tables[0], arrays[tables[0]])
    wanted = f"no array {array!r}" if array else "no array 'X' and not exactly one with two axes"
    raise InvalidDataError(
        f"the zarr group {where} has {wanted}; its arrays are {sorted(arrays) or 'none'}. Name one of them."
    )


def _names(store: zarr.abc.store.Store, path: str, group: Found) -> list[str]:
    """Return the names of what is in a group, as the store lists them, or consolidated metadata does."""

    async def listed() -> list[str]:
        names = []
        async for name in store.list_dir(path):
            names.append(name)
            if len(names) > MAX_MEMBERS:
                raise InvalidDataError(f"{store} lists more than {MAX_MEMBERS:,} members; name one of them.")
        return names

    consolidated = (group.document.get("consolidated_metadata") or {}).get("metadata") or {}
    return sorted({*(name for name in consolidated if "/" not in name), *sync(listed())})


def plain_zarr_of(array: da.Array) -> zarr.Array[Any] | None:
    """Return the zarr array that a dask array plainly is, None where it is anything else.

    Plainly: made by ``dask.array.from_zarr`` or ``from_array``, inline or not,
    and nothing done to it since, so that block i is exactly its rows i.
    """
    layers = array.__dask_graph__().layers
    last = layers.get(array.name)
    if len(layers) > 2 or not isinstance(last, Blockwise):
        return None
    if getattr(last.task, "func", None) not in (getter, getter_nofancy, getter_inline):
        return None
    if any(isinstance(layer, Blockwise) for name, layer in layers.items() if name != array.name):
        return None
    found = _zarr_arrays_in(array)
    if len(found) != 1 or found[0].shape != array.shape or found[0].dtype != array.dtype:
        return None
    return found[0]


def zarr_beneath(array: da.Array) -> list[RangeSource]:
    """Return the zarr arrays that the tasks of a dask array read, by whatever paths these read them."""
    return [_source_in(found.store, found, None) for found in _zarr_arrays_in(array)]


def _zarr_arrays_in(array: da.Array) -> list[zarr.Array[Any]]:
    candidates: list[Any] = []
    for layer in array.__dask_graph__().layers.values():
        if isinstance(layer, Blockwise):
            candidates += [argument for argument, _ in layer.indices]
        elif isinstance(layer, MaterializedLayer):
            candidates += [getattr(value, "value", value) for value in dict(layer).values()]
    unlike = {id(candidate): candidate for candidate in candidates if isinstance(candidate, zarr.Array)}
    return list(unlike.values())
