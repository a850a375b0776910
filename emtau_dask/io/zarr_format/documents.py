"""Metadata documents of zarr arrays and groups, read and checked before zarr sees them.

Only a node's own document counts. Consolidated metadata may describe other arrays than those whose
chunks are read, so at most its names are used.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import zarr
import zarr.abc.store
from numpy.typing import NDArray
from zarr.codecs import ShardingCodec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath

from emtau_dask.checks import integer
from emtau_dask.errors import InvalidDataError, InvalidDtypeError
from emtau_dask.io.files import fresh, read_regular
from emtau_dask.io.remote import UrlStore, byte_limits
from emtau_dask.io.zarr_format.codecs import (
    CHECKSUMS,
    COMPRESSORS,
    FILTERS,
    Decompressor,
    Encoded,
    FormatTwoDecompressor,
    checked_chain,
    number_type,
)

MAX_DOCUMENT_BYTES = 2**26
MAX_CHUNKS_IN_SHARD = 2**20
CHUNK_BEYOND_ARRAY = 2**30
"""Bytes by which a chunk may be larger than all of its array."""
Document = Mapping[str, Any]
PAIRED = FILTERS | COMPRESSORS | CHECKSUMS
INDEX = frozenset({"bytes", "crc32c"})
SHARDING = frozenset({"chunk_shape", "codecs", "index_codecs", "index_location"})
SERIALIZERS = frozenset({"bytes", "endian"})
KEYS_OF_FORMAT_THREE = frozenset(
    {
        *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value"),
        *("codecs", "attributes", "storage_transformers", "dimension_names", "consolidated_metadata"),
    }
)
V3_NAMES = frozenset(
    {
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    }
)


async def get_within(
    store: zarr.abc.store.Store,
    key: str,
    prototype: BufferPrototype,
    limit: int,
    byte_range: zarr.abc.store.ByteRequest | None = None,
) -> Buffer | None:
    """Return an object of a store, or a range of it, of at most ``limit`` bytes; None where there is none.

    Raises
    ------
    InvalidDataError
        It is longer, or no regular file.
    """
    start, stop = byte_limits(byte_range)
    if stop is not None and not 0 <= stop - start <= limit:
        raise InvalidDataError(
            f"{key} of {store} is asked for {stop - start:,} bytes, but at most {limit:,} belong to what is "
            "declared. Restore it, or write it again."
        )
    if type(store) is LocalStore:
        found = await asyncio.to_thread(local_within, store, key, limit, start, stop)
        return None if found is None else prototype.buffer.from_array_like(found)
    if isinstance(store, UrlStore):
        data = await store.get_within(key, start, stop, limit)
        return None if data is None else prototype.buffer.from_bytes(data)
    await store._ensure_open()
    value = await store.get(key, prototype, byte_range)
    if value is not None and len(value) > limit:
        raise InvalidDataError(
            f"{key} of {store} has {len(value):,} bytes, but at most {limit:,} belong to what is declared."
        )
    return value


def local_within(
    store: LocalStore,
    key: str,
    limit: int,
    start: int = 0,
    stop: int | None = None,
    room_for: Callable[[int], NDArray[np.uint8]] = fresh,
) -> NDArray[np.uint8] | None:
    """Do as `get_within` for bytes ``start`` to ``stop`` of a local file, in the calling thread."""
    with suppress(FileNotFoundError):
        return read_regular(store.root / key, start, stop, limit, room_for)
    return None


def _read_document(store: zarr.abc.store.Store, key: str) -> tuple[Document, bytes] | None:
    """Return a JSON object and the bytes it was read from, None where there is none; see `document_at`."""
    found = None
    with suppress(IsADirectoryError, NotADirectoryError):
        found = sync(get_within(store, key, default_buffer_prototype(), MAX_DOCUMENT_BYTES))
    if found is None:
        return None
    data = found.to_bytes()
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{key} is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"{key} is no JSON object")
    return document, data


@dataclass(frozen=True)
class Found:
    """A document, its ``kind`` (``"array"`` or ``"group"``), and the bytes that it was read from."""

    zarr_format: int
    kind: str
    document: Document
    data: bytes


def document_at(store: zarr.abc.store.Store, path: str, formats: tuple[int, ...] = (3, 2)) -> Found | None:
    """Return what is at a path of a store, None where nothing is; format 3 is looked for before 2.

    Documents are read without asking first whether they exist: some stores do not permit the question.

    Raises
    ------
    InvalidDataError
        A document is too long, or no regular file.
    ValueError
        It describes neither an array nor a group.
    """
    for zarr_format in formats:
        names = {"zarr.json": ""} if zarr_format == 3 else {".zarray": "array", ".zgroup": "group"}
        for name, kind in names.items():
            found = _read_document(store, f"{path}/{name}".lstrip("/"))
            if found is None:
                continue
            document, data = found
            kind = kind or str(document.get("node_type"))
            if document.get("zarr_format") != zarr_format or kind not in ("array", "group"):
                raise ValueError(f"{name} is of no zarr array or group of format {zarr_format}")
            return Found(zarr_format, kind, document, data)
    return None


@dataclass(frozen=True, eq=False)
class ArrayDocument:
    """A checked description of an array, called ``where`` in messages.

    ``document`` has the part of the stored document that zarr needs, its codecs unchanged. A chunk is
    decoded at a time; a shard is stored in one object, where there are shards. ``itemsize`` is in bytes.
    """

    document: Document
    where: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    itemsize: int

    @classmethod
    def checked(cls, document: Document, where: str) -> ArrayDocument:
        """Return a stored document of an array, checked.

        Raises
        ------
        InvalidDataError
            A codec is not read, or chunks are much larger than the array.
        InvalidDtypeError
            The array is not of numbers.
        ValueError
            The document is damaged.
        """
        if "fill_value" not in document:
            raise ValueError("it has no fill_value")
        make = _format_three if document.get("zarr_format") == 3 else _format_two
        found = make(document, where)
        found._check_sizes()
        found.given_to_zarr()
        return found

    def _check_sizes(self) -> None:
        if self.shards is not None:
            if any(shard % chunk for shard, chunk in zip(self.shards, self.chunks, strict=True)):
                raise ValueError(f"shards of {self.shards} are not of whole chunks of {self.chunks}")
            if self._chunks_in_shard > MAX_CHUNKS_IN_SHARD:
                raise InvalidDataError(
                    f"{self.where} has {self._chunks_in_shard:,} chunks in a shard; at most "
                    f"{MAX_CHUNKS_IN_SHARD:,} are read. Write it again with larger chunks."
                )
        whole, chunk = self.n_bytes, math.prod(self.chunks) * self.itemsize
        if chunk > whole + CHUNK_BEYOND_ARRAY:
            raise InvalidDataError(
                f"{self.where} has chunks of {self.chunks}, {chunk:,} bytes, though all of it, "
                f"{self.shape}, is {whole:,} bytes. Write it again with chunks that are no longer than it is."
            )

    @property
    def zarr_format(self) -> int:
        """2 or 3."""
        return int(self.document["zarr_format"])

    @property
    def n_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.itemsize

    @property
    def _chunks_in_shard(self) -> int:
        return math.prod(self.shards or self.chunks) // math.prod(self.chunks)

    @property
    def object_limit(self) -> int:
        """The most bytes that a stored object may have: its values, encoded, and what writers waste."""
        return 2 * math.prod(self.shards or self.chunks) * self.itemsize + 16 * self._chunks_in_shard + 2**20

    def given_to_zarr(self) -> dict[str, Any]:
        """Return the document with bounded decompressors in place of its compressors."""
        values = math.prod(self.chunks)
        chunk = Encoded(values * self.itemsize)
        document = dict(self.document)
        if document["zarr_format"] == 2:
            compressor = document["compressor"]
            chain = [*(document["filters"] or []), *([] if compressor is None else [compressor])]
            made: list[Any] = [
                FormatTwoDecompressor(name, size) if name in COMPRESSORS else codec
                for name, codec, size in checked_chain(chain, PAIRED, chunk, values, self.where)
            ]
            document["compressor"] = None if compressor is None else made.pop()
            document["filters"] = made or None
            return document
        codecs = document["codecs"]
        if self.shards is None:
            document["codecs"] = self._bounded(codecs, chunk, values)
        else:
            sharding = codecs[0]["configuration"]
            index = checked_chain(sharding["index_codecs"], INDEX, chunk, values, self.where)
            if not index or index[0][0] != "bytes":
                raise ValueError("index_codecs must begin with bytes")
            document["codecs"] = [
                ShardingCodec(
                    chunk_shape=self.chunks,
                    codecs=self._bounded(sharding["codecs"], chunk, values),
                    index_codecs=sharding["index_codecs"],
                    index_location=sharding.get("index_location", "end"),
                )
            ]
        return document

    def _bounded(self, codecs: list[object], chunk: Encoded, values: int) -> list[Any]:
        return [
            Decompressor(name, size) if name in COMPRESSORS else codec
            for name, codec, size in checked_chain(codecs, PAIRED | SERIALIZERS, chunk, values, self.where)
        ]


def _sizes(document: Document, key: str, least: int) -> tuple[int, ...]:
    sizes = document.get(key)
    if not isinstance(sizes, (list, tuple)) or not all(map(integer(least, 2**62 - 1).holds, sizes)):
        raise ValueError(f"{key} is {str(sizes)[:60]!r}")
    return tuple(sizes)


def _itemsize(name: object, where: str) -> int:
    try:
        return number_type(name).itemsize
    except ValueError as error:
        raise InvalidDtypeError(
            f"{where}: {error}; argument must be real numbers (floating, integer or bool). Convert them, "
            "for example with .astype('float64')."
        ) from error


def _check_axes(shape: tuple[int, ...], *others: tuple[int, ...]) -> None:
    if len(shape) > 32 or any(len(other) != len(shape) for other in others):
        raise ValueError(f"shape {shape} and chunks {others} differ in their axes")


def _format_two(document: Document, where: str) -> ArrayDocument:
    shape, chunks = _sizes(document, "shape", 0), _sizes(document, "chunks", 1)
    _check_axes(shape, chunks)
    itemsize = _itemsize(document.get("dtype"), where)
    if document.get("order") not in ("C", "F"):
        raise ValueError(f"order is {str(document.get('order'))[:60]!r}, neither 'C' nor 'F'")
    filters = document.get("filters")
    if filters is not None and not isinstance(filters, (list, tuple)):
        raise ValueError(f"filters are {str(filters)[:60]!r}")
    kept = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": document["dtype"],
        "order": document["order"],
        "fill_value": document["fill_value"],
        "dimension_separator": document.get("dimension_separator", "."),
        "filters": filters,
        "compressor": document.get("compressor"),
        "attributes": {},
    }
    return ArrayDocument(kept, where, shape, chunks, None, itemsize)


def _configuration(document: Document, key: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the configuration of a named part of a document of format 3."""
    part = document.get(key)
    if isinstance(part, str):
        part = {"name": part}
    found = part.get("configuration") or {} if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or part.get("name") not in names or not isinstance(found, Mapping):
        raise ValueError(f"{key} is {str(part)[:60]!r}, none of {', '.join(names)}")
    return found


def _check_known(document: Document, keys: frozenset[str]) -> None:
    """Raise ValueError where a document has an unknown key that may change what chunks mean.

    https://zarr-specs.readthedocs.io/en/latest/v3/core/v3.0.html#extension-definition
    """
    for key in sorted(document.keys() - keys):
        value = document[key]
        if not isinstance(value, Mapping) or value.get("must_understand") is not False:
            raise ValueError(f"it has the key {key[:60]!r}, which is not known")


def _format_three(document: Document, where: str) -> ArrayDocument:
    shape = _sizes(document, "shape", 0)
    stored = _sizes(_configuration(document, "chunk_grid", ("regular",)), "chunk_shape", 1)
    _configuration(document, "chunk_key_encoding", ("default", "v2"))
    _check_known(document, KEYS_OF_FORMAT_THREE)
    data_type, codecs = document.get("data_type"), document.get("codecs")
    known = not isinstance(data_type, str) or data_type in V3_NAMES
    itemsize = _itemsize(data_type if known else None, where)
    if document.get("storage_transformers"):
        raise ValueError("storage transformers are not supported")
    if not isinstance(codecs, (list, tuple)):
        raise ValueError(f"codecs are {str(codecs)[:60]!r}")
    kept = {key: document[key] for key in ("data_type", "chunk_grid", "chunk_key_encoding", "fill_value")}
    kept |= {"zarr_format": 3, "node_type": "array", "shape": shape, "codecs": list(codecs), "attributes": {}}
    chunks, shards = stored, None
    first = codecs[0] if codecs else None
    if isinstance(first, Mapping) and first.get("name") == "sharding_indexed":
        sharding = _configuration({"codecs": first}, "codecs", ("sharding_indexed",))
        if (
            sharding.keys() - SHARDING
            or len(codecs) > 1
            or not all(isinstance(sharding.get(key), (list, tuple)) for key in ("codecs", "index_codecs"))
        ):
            raise ValueError("shards are encoded once more, or not described")
        chunks, shards = _sizes(sharding, "chunk_shape", 1), stored
    _check_axes(shape, stored, chunks)
    return ArrayDocument(kept, where, shape, chunks, shards, itemsize)


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in a store, opened by its checked description and pickled as this."""

    store: zarr.abc.store.Store
    path: str
    description: ArrayDocument

    @cached_property
    def array(self) -> zarr.Array[Any]:
        """The array, for reading; raises whatever zarr raises for a document that it cannot use."""
        return zarr.Array.from_dict(StorePath(self.store, self.path), self.description.given_to_zarr())

    def within(self, store: zarr.abc.store.Store) -> zarr.Array[Any]:
        """Return the array as read through another store; its document is not read again."""
        return zarr.Array(zarr.AsyncArray(self.array.metadata, StorePath(store, self.path)))

    def object_key(self, place: int) -> str:
        """Return the key of the stored object at a place along rows, the first of those side by side."""
        indices = (place, *(0 for _ in self.description.shape[1:]))
        return f"{self.path}/{self.array.metadata.encode_chunk_key(indices)}".lstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredArray, (self.store, self.path, self.description)
