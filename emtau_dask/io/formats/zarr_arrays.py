"""zarr arrays and groups as addressable sources in chunks of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath, ZipStore

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.formats.base import RangeSource
from emtau_dask.io.formats.checks import CHUNK_BYTES, equal_chunks
from emtau_dask.io.formats.zarr_reader import ZarrReader, is_remote
from emtau_dask.io.remote import Url, UrlStore, is_url, read_errors
from emtau_dask.io.zarr_format import (
    MAX_CHUNKS_AT_ONCE,
    ArrayDocument,
    Found,
    StoredArray,
    ZarrLayout,
    document_at,
)

MANY_CHUNKS = 2**16
"""Of more row chunks than these, small ones are read in groups."""
GROUPED = 2**12
"""The most chunks in such a group: zarr takes some kilobytes for each."""
MAX_MEMBERS = 2**16


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
