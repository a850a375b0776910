"""Checks of a zarr document (codecs, data types, declared bytes) before zarr opens the array.

zarr looks codecs up by name in a registry that any package may add to. One that numcodecs ships, ``pickle``,
runs the code in a chunk. So names are compared with a list before zarr sees them.

Only an array's own document counts: consolidated metadata may describe other arrays than those whose chunks
are read. Of what this package writes, such as models, only format 3 is read.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath, WrapperStore

from emtau_dask.errors import EmtauError, InvalidDataError, InvalidDtypeError, cause_of, shutdown_named
from emtau_dask.storage.files import read_regular
from emtau_dask.storage.urls import Url, UrlStore, byte_limits, is_url, plain_path

Document = Mapping[str, Any]
COMPRESSORS = frozenset({"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"})
CHECKSUMS = frozenset({"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"})
FILTERS = frozenset(
    {"astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle", "transpose"}
)
SERIALIZERS = frozenset({"bytes", "endian"})
CODECS = COMPRESSORS | CHECKSUMS | FILTERS | SERIALIZERS
INDEX_CODECS = frozenset({"bytes", "crc32c"})
MAX_EXCESS_BYTES = 2**30
"""Maximum bytes by which a chunk may be larger than its whole array."""


class StrictStore(WrapperStore[Store]):
    """A store to read from, in which an object is absent only if nothing is at its path.

    zarr reads an absent chunk as the fill value, and its own stores take an object for absent if there is a
    folder instead of it, or a file instead of a folder above it.
    """

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return an object or a range of it; None if there is none."""
        if type(self._store) is LocalStore:
            data = await asyncio.to_thread(self.local_bytes, self._store.root / key, byte_range)
            return None if data is None else prototype.buffer.from_array_like(data)
        await self._store._ensure_open()
        value = await self._store.get(key, prototype, byte_range)
        if value is None:
            await self._check_no_folder(key)
        return value

    def local_bytes(self, path: Path, byte_range: ByteRequest | None = None) -> NDArray[np.uint8] | None:
        """Return a file's bytes or a range of them, None if there is no file; raises OSError."""
        with suppress(FileNotFoundError):
            return read_regular(path, *byte_limits(byte_range))
        return None

    async def _check_no_folder(self, key: str) -> None:
        with suppress(FileNotFoundError, PermissionError):  # Some buckets let nobody ask.
            async for _ in self._store.list_dir(key):
                raise IsADirectoryError(f"{key} of {self._store} is a folder")


@dataclass(frozen=True)
class Found:
    """A document, its ``kind`` (``"array"`` or ``"group"``), and the bytes that it was read from."""

    zarr_format: int
    kind: str
    document: Document
    data: bytes


def document_at(store: Store, path: str, formats: tuple[int, ...] = (3, 2)) -> Found | None:
    """Return the document at a path of a store, None if there is none; format 3 comes before 2.

    Raises
    ------
    ValueError
        It describes neither an array nor a group.
    Exception
        Any error of the store.
    """
    for zarr_format in formats:
        names = {"zarr.json": ""} if zarr_format == 3 else {".zarray": "array", ".zgroup": "group"}
        for name, kind in names.items():
            buffer = None
            with suppress(IsADirectoryError, NotADirectoryError):
                key = f"{path}/{name}".lstrip("/")
                buffer = sync(StrictStore(store).get(key, default_buffer_prototype()))
            if buffer is None:
                continue
            document = _parsed(name, buffer.to_bytes())
            kind = kind or str(document.get("node_type"))
            if document.get("zarr_format") != zarr_format or kind not in ("array", "group"):
                raise ValueError(f"{name} is of no zarr array or group of format {zarr_format}")
            return Found(zarr_format, kind, document, buffer.to_bytes())
    return None


def attributes_at(store: Store, path: str, found: Found) -> Document:
    """Return the attributes of what `document_at` found; raises as that does."""
    if found.zarr_format == 3:
        attributes = found.document.get("attributes", {})
        return attributes if isinstance(attributes, dict) else {}
    key = f"{path}/.zattrs".lstrip("/")
    buffer = sync(StrictStore(store).get(key, default_buffer_prototype()))
    return {} if buffer is None else _parsed(key, buffer.to_bytes())


def _parsed(name: str, data: bytes) -> Document:
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"{name} is no JSON object")
    return document


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array that its own checked document describes; errors call it ``where``.

    ``codecs`` are the names of the codecs that encode a chunk, in order; with shards, a chunk of a shard.
    """

    array: zarr.Array[Any]
    codecs: tuple[str, ...]
    where: str

    @classmethod
    def of(cls, store: Store, path: str, document: Document, where: str) -> StoredArray:
        """Return the array at a path of a store.

        Raises
        ------
        InvalidDataError
            A codec is not read, or chunks are much larger than the array.
        InvalidDtypeError
            The array is not of real numbers.
        Exception
            Any error of zarr for a damaged document.
        """
        _check_dtype(document, where)
        codecs = _codecs_of(document, where)
        array = zarr.Array.from_dict(StorePath(store, path), {**document, "attributes": {}})
        chunk = math.prod(array.shards or array.chunks) * array.dtype.itemsize
        if chunk > array.nbytes + MAX_EXCESS_BYTES:
            raise InvalidDataError(
                f"{where} has chunks of {array.shards or array.chunks}, {chunk:,} bytes, though all of it, "
                f"{array.shape}, is {array.nbytes:,} bytes. Write it again with chunks that are no longer "
                "than it is."
            )
        return cls(array, codecs, where)

    def through(self, store: Store) -> zarr.Array[Any]:
        """Return the array as read through another store."""
        return zarr.Array(zarr.AsyncArray(self.array.metadata, StorePath(store, self.array.path)))


def _check_dtype(document: Document, where: str) -> None:
    name = document.get("dtype" if document.get("zarr_format") == 2 else "data_type")
    try:
        kind = np.dtype(name).kind if isinstance(name, str) else "O"
    except TypeError:
        kind = "O"
    if kind not in "biuf":
        raise InvalidDtypeError(
            f"{where} has the data type {str(name)[:60]!r}; argument must be real numbers (floating, integer "
            "or bool). Convert them, for example with .astype('float64')."
        )


def _codecs_of(document: Document, where: str) -> tuple[str, ...]:
    if document["zarr_format"] == 2:
        chain = [*(document.get("filters") or ()), document.get("compressor")]
        return _allowed([codec for codec in chain if codec is not None], "id", CODECS, where)
    codecs = document["codecs"]
    if len(codecs) == 1 and isinstance(codecs[0], Mapping) and codecs[0].get("name") == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        _allowed(sharding["index_codecs"], "name", INDEX_CODECS, where)
        codecs = sharding["codecs"]
    return _allowed(codecs, "name", CODECS, where)


def _allowed(codecs: Iterable[Any], key: str, names: frozenset[str], where: str) -> tuple[str, ...]:
    """Return the names of codecs, without ``numcodecs.``; raises `InvalidDataError` for any other."""
    given = (codec[key] if isinstance(codec, Mapping) else codec for codec in codecs)
    found = tuple(str(name).removeprefix("numcodecs.") for name in given)
    for name in found:
        if name not in names:
            raise InvalidDataError(
                f"{where} is stored with the codec {name!r}, which is not read: only codecs of numbers that "
                f"are known to run no code are, here {', '.join(sorted(names))}. If you trust the data, copy "
                "them once with the codecs that zarr chooses: zarr.create_array('copy.zarr', "
                "data=zarr.open_array(...)[...])."
            )
    return found


@dataclass(frozen=True, eq=False)
class OwnGroup:
    """A group at a path of a store, and its attributes."""

    store: Store
    path: str
    attributes: Mapping[str, Any]

    def arrays(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return the values of arrays of the group, by name.

        Raises
        ------
        InvalidDataError
            An array is missing or is not read.
        Exception
            Any error of zarr or of a codec for damaged data.
        """
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> NDArray[Any]:
        path = f"{self.path}/{name}".lstrip("/")
        found = document_at(self.store, path, (3,))
        if found is None or found.kind != "array":
            raise InvalidDataError(f"{name} is not an array")
        stored = StoredArray.of(StrictStore(self.store), path, found.document, name)
        return np.asarray(stored.array[...])


def own_group(where: object) -> OwnGroup | None:
    """Return the zarr group of format 3 at a path, a URL or in an open zarr store; None if there is none.

    Raises
    ------
    InvalidDataError
        What is there is something else, or cannot be read.
    """
    store, path = _store_of(where)
    try:
        with shutdown_named():
            found = document_at(store, path, (3,))
    except EmtauError:
        raise
    except Exception as error:  # of any store
        message = f"{where} cannot be read ({type(error).__name__}: {error})."
        raise InvalidDataError(message) from cause_of(error)
    if found is None or found.kind != "group":
        return None
    attributes = found.document.get("attributes", {})
    if not isinstance(attributes, Mapping):
        raise InvalidDataError(f"{where} has attributes that are no JSON object.")
    return OwnGroup(store, path, attributes)


def _store_of(where: object) -> tuple[Store, str]:
    if isinstance(where, StorePath):
        return where.store, where.path
    if isinstance(where, Store):
        return where, ""
    if isinstance(where, (str, Path)):
        place = plain_path(str(where))
        return (UrlStore(Url.of(place)) if is_url(place) else LocalStore(place, read_only=True)), ""
    raise InvalidDataError(f"{where!r} is no place of a zarr group; give a path, a URL or a zarr store.")
