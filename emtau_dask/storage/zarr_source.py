"""zarr arrays as addressable sources, with the stored bytes of every read counted."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import dask.array as da
import numpy as np
import zarr
import zarr.abc.store
import zarr.errors
from dask.array.core import getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise
from dask.highlevelgraph import MaterializedLayer
from numpy.typing import NDArray
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.direct import LEAST_BYTES, passes_cache, read_directly
from emtau_dask.storage.readbudget import ReadBudget
from emtau_dask.storage.sources import RangeSource
from emtau_dask.storage.url_store import UrlStore
from emtau_dask.storage.urls import Url, is_url, read_errors
from emtau_dask.storage.zarr_memory import ZarrLayout

__all__ = ["group_source", "open_zarr", "plain_zarr_of", "zarr_source"]

READ_BUDGET = ReadBudget(2**28)


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
    """Adds the size of everything read to the counter of the reading context.

    Local files that together are too large for the page cache are read past it.

    zarr reads in an event loop of its own, but its coroutines inherit the
    context of the thread that asked, so that concurrent tasks count apart.
    """

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
            value = cast("Buffer | None", await self._store.get(key, prototype, byte_range))
        if reads is not None and value is not None:
            reads.sizes.append(len(value))
        elif reads is not None:
            reads.missing = True
        return value

    async def _directly(self, key: str, prototype: BufferPrototype, n_objects: int) -> Buffer | None:
        """Return an object from its file; None where the store is to read it."""
        if not isinstance(self._store, LocalStore):
            return None
        found = await asyncio.to_thread(_read_large, self._store.root / key, n_objects)
        return None if found is None else prototype.buffer.from_array_like(found)


def _read_large(path: Path, n_objects: int) -> NDArray[np.uint8] | None:
    """Return a file's bytes; None where so many like it may be in the page cache, or it cannot be read so."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    return read_directly(path) if passes_cache(n_objects * size) else None


@dataclass(frozen=True, eq=False)
class ZarrReader:
    """Reads rows of a zarr array, one call at a time for each task.

    Attributes
    ----------
    array : zarr.Array
        Over a `CountingStore`.
    where : str
        Names the array in messages.
    remote : bool
        Whether it lies behind a URL.
    """

    array: zarr.Array[Any]
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
                buffers = self._layout.prototype(start, stop)
                rows = np.asarray(self.array.get_basic_selection(slice(start, stop), prototype=buffers))
        finally:
            _reads.reset(token)
        if reads.missing:
            # A chunk that is not stored holds the fill value; but is the array itself still there?
            self.identity()
        return rows, sum(reads.sizes)

    def identity(self) -> str:
        """Return the SHA-256 of the array's metadata document, as stored.

        Raises
        ------
        InvalidDataError
            This process does not see it.
        """
        name = "zarr.json" if self.array.metadata.zarr_format == 3 else ".zarray"
        key = f"{self.array.path}/{name}".lstrip("/")
        with read_errors(f"the zarr array {self.where}", remote=self.remote):
            document = sync(self.array.store.get(key, default_buffer_prototype()))
            if document is None:
                raise FileNotFoundError(f"it has no {name}")
        return f"zarr array, SHA-256 {sha256(document.to_bytes()).hexdigest()}"

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
        return ZarrLayout.of(self.array)


def zarr_source(array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Return a zarr array as a source.

    Parameters
    ----------
    array : zarr.Array
    chunk_rows : tuple of int, optional
        By default its own row chunks; of a sharded array its shards, so that
        each shard is read once.
    """
    mode: Literal["r", "r+"] = "r" if array.store.read_only else "r+"
    counted = zarr.open_array(
        store=CountingStore(array.store),
        path=array.path,
        mode=mode,
        zarr_format=array.metadata.zarr_format,
    )
    if chunk_rows is None:
        unit = (array.shards or array.chunks)[0] if array.ndim else 1
        n_rows = array.shape[0] if array.ndim else 0
        edges = (*range(0, n_rows, unit), n_rows)
        chunk_rows = tuple(stop - start for start, stop in pairwise(edges)) if n_rows else ()
    remote = not isinstance(array.store, (LocalStore, MemoryStore))
    reader = ZarrReader(counted, str(array.store_path), remote)
    return RangeSource(reader, array.shape, np.dtype(array.dtype), chunk_rows)


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
    store = UrlStore(Url.of(path)) if remote else LocalStore(path, read_only=True)
    where = str(store) if remote else path
    with read_errors(where, remote=remote):
        node = _node(store, where)
        if isinstance(node, zarr.Group):
            return group_source(node, array, where)
        if array is not None:
            raise InvalidDataError(
                f"{where} is a zarr array, not a group; leave out the array name {array!r}."
            )
        return zarr_source(node)


def _node(store: zarr.abc.store.Store, where: str) -> zarr.Array[Any] | zarr.Group:
    """Open what is there, format 3 before 2: some who may read may not ask whether something exists."""
    for zarr_format in (3, 2):
        try:
            return zarr.open(store, mode="r", zarr_format=zarr_format)
        except (zarr.errors.BaseZarrError, FileNotFoundError, KeyError, TypeError, AttributeError) as error:
            reason = error
    raise InvalidDataError(
        f"{where} holds no zarr array or group ({type(reason).__name__}: {reason})."
    ) from reason


def group_source(group: zarr.Group, array: str | None, where: str) -> RangeSource:
    """Return a member of a zarr group as a source; see `open_zarr`.

    Parameters
    ----------
    group : zarr.Group
    array : str or None
    where : str
        Names the group in errors.
    """
    member = group.get(array or "X")
    if isinstance(member, zarr.Array):
        return zarr_source(member)
    arrays = dict(group.arrays())
    tables = [table for table in arrays.values() if table.ndim == 2]
    if array is None and len(tables) == 1:
        return zarr_source(tables[0])
    wanted = f"no array {array!r}" if array else "no array 'X' and not exactly one with two axes"
    raise InvalidDataError(
        f"the zarr group {where} has {wanted}; its arrays are {sorted(arrays) or 'none'}. Name one of them."
    )


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
    candidates = [argument for argument, _ in last.indices]
    for name, layer in layers.items():
        if name != array.name and isinstance(layer, MaterializedLayer):
            candidates += [getattr(value, "value", value) for value in dict(layer).values()]
    found = [candidate for candidate in candidates if isinstance(candidate, zarr.Array)]
    if len(found) != 1 or found[0].shape != array.shape or found[0].dtype != array.dtype:
        return None
    return found[0]
