"""What a zarr document may say (codecs, dtypes, declared bytes), checked before anything is decoded.

zarr looks codecs up by name in a registry that any package may add to. One that it ships, ``pickle``,
runs the code in a chunk. So names and configurations are compared with a list before zarr sees them. A
compressed chunk itself states its decoded size; the decompressors here are told the size beforehand.

Only a node's own document counts. Consolidated metadata may describe other arrays than those whose
chunks are read, so at most its names are used.

A model may come from a stranger. Of models only format 3 is read, only each array's own document, and only
the data types and codecs that this package writes. Arrays that declare far more than is stored are refused.
"""

from __future__ import annotations

import asyncio
import bz2
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr.abc.store
from numcodecs.abc import Codec as Numcodec
from numcodecs.blosc import Blosc
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import Store
from zarr.codecs import ShardingCodec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath

from emtau_dask.constraints import integer
from emtau_dask.errors import EmtauError, InvalidDataError, InvalidDtypeError, cause_of, shutdown_named
from emtau_dask.storage.files import fresh, read_regular
from emtau_dask.storage.urls import Url, UrlStore, byte_limits, is_url, plain_path

Bytes = NDArray[np.uint8]
_BLOSC, _LZ4, _ZSTD = Blosc(), LZ4(), Zstd()
PIECE = 2**18
"""Compressed bytes that are decompressed at a time, where a decompressor takes pieces."""
LZMA_DICTIONARY = 2**27
"""Bytes that a stream of lzma may take beside its values; its highest preset takes half of that."""
CHECKSUMS = frozenset({"crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3"})
"""Each adds four bytes."""
FILTERS = frozenset(
    {"delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits", "shuffle", "transpose"}
)
"""Codecs that turn numbers into other numbers, all by NumPy, and shuffle, which reorders bytes."""
MAX_DOCUMENT_BYTES = 2**26
MAX_CHUNKS_IN_SHARD = 2**20
CHUNK_BEYOND_ARRAY = 2**30
"""Bytes by which a chunk may be larger than all of its array."""
Document = Mapping[str, Any]
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
DTYPES = frozenset({"float64", "int64", "int32", "bool"})
CODECS = frozenset({"bytes", "zstd"})
MAX_CHUNKS = 2**16
PLAIN_BYTES, MOST_COMPRESSED = 2**26, 100
"""Arrays may declare so many bytes, and beyond that so many times their stored bytes."""


@dataclass(frozen=True)
class Encoded:
    """The bytes of a chunk at one step of its decoding: exactly ``size``, or at most."""

    size: int
    exact: bool = True

    def check(self, size: int) -> int:
        """Return ``size``; raises ValueError where it contradicts this declaration."""
        if size > self.size or (self.exact and size != self.size):
            raise ValueError(f"a chunk decodes to {size:,} bytes where {self.size:,} are declared")
        return size


def number_type(name: object) -> np.dtype[Any]:
    """Return the dtype that a metadata document names; raises ValueError unless it is of numbers."""
    try:
        dtype = np.dtype(name) if isinstance(name, str) and len(name) < 16 else np.dtype(object)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc":
        raise ValueError(f"the data type {str(name)[:60]!r} is not of numbers")
    return dtype


def allowed(codec: object, names: frozenset[str], where: str) -> tuple[str, dict[str, Any]]:
    """Return name (without ``numcodecs.``) and configuration of a codec described as in format 2 or 3.

    Raises
    ------
    InvalidDataError
        The name is not among ``names``.
    ValueError
        The description is damaged, or makes anything but numbers.
    """
    name, configuration = _parsed(codec)
    if name not in names:
        raise InvalidDataError(
            f"{where} is stored with the codec {name!r}, which is not read: only codecs of numbers that are "
            f"known to run no code are, here {', '.join(sorted(names))}. If you trust the data, copy them "
            "once with the codecs that zarr chooses: zarr.create_array('copy.zarr', "
            "data=zarr.open_array(...)[...])."
        )
    for key in ("dtype", "astype", "encode_dtype", "decode_dtype"):
        if configuration.get(key) is not None:
            number_type(configuration[key])
    if name == "shuffle":
        size = configuration.get("elementsize", 4)
        if not isinstance(size, int) or not 0 < size <= 2**16:
            raise ValueError(f"the codec 'shuffle' has the element size {size!r}")
    return name, configuration


def _parsed(codec: object) -> tuple[str, dict[str, Any]]:
    if isinstance(codec, str):
        return codec.removeprefix("numcodecs."), {}
    if not isinstance(codec, Mapping):
        raise ValueError(f"a codec is {str(codec)[:60]!r}")
    if "id" in codec:
        name, configuration = codec["id"], {key: codec[key] for key in codec if key != "id"}
    else:
        name, configuration = codec.get("name"), codec.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, Mapping) or "id" in configuration:
        raise ValueError(f"a codec is {str(dict(codec))[:60]!r}")
    return name.removeprefix("numcodecs."), dict(configuration)


def encoded_by(name: str, configuration: Mapping[str, Any], before: Encoded, n_values: int) -> Encoded:
    """Return the bytes of a chunk of ``n_values`` after a codec, see `allowed`, has encoded them."""
    if name in COMPRESSORS:
        return Encoded(before.size + before.size // 64 + 2**12, exact=False)
    if name in CHECKSUMS:
        return Encoded(before.size + 4, before.exact)
    if name == "packbits":
        return Encoded(1 + -(-n_values // 8), before.exact)
    made = configuration.get("encode_dtype") or configuration.get("astype") or configuration.get("dtype")
    if name in FILTERS - {"bitround", "shuffle", "transpose"} and made is not None:
        return Encoded(n_values * number_type(made).itemsize, before.exact)
    return before


def _blosc(data: Bytes, made: Encoded) -> Any:
    if len(data) < 16 or int.from_bytes(data[12:16].tobytes(), "little") != len(data):
        raise ValueError("a chunk is not a whole buffer of blosc")
    made.check(int.from_bytes(data[4:8].tobytes(), "little"))
    return _BLOSC.decode(data)


def _lz4(data: Bytes, made: Encoded) -> Any:
    made.check(int.from_bytes(data[:4].tobytes(), "little"))
    return _LZ4.decode(data)


def _zstd(data: Bytes, made: Encoded) -> Any:
    """Decompress into an array of the declared size, or of the size that the frame states.

    The array alone limits a frame that does not state its size, or that others follow.
    """
    stated = _zstd_size(data)
    if stated is None and not made.exact:
        raise ValueError("a frame of zstd does not state its size")
    size = made.size if stated is None or made.exact else made.check(stated)
    room = np.empty(size, np.uint8)
    try:
        _ZSTD.decode(data, room)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"a chunk is not the {size:,} bytes that are declared: {error}") from error
    if stated not in (None, size) and _fits(data, size - 1):
        raise ValueError(f"a chunk decodes to fewer than the {size:,} bytes that are declared")
    return room


def _fits(data: Bytes, size: int) -> bool:
    """Return whether one or more frames of zstd decompress to at most ``size`` bytes."""
    try:
        _ZSTD.decode(data, np.empty(size, np.uint8))
    except (RuntimeError, ValueError):
        return False
    return True


def _zstd_size(data: Bytes) -> int | None:
    """Return the size that a frame's header states, None if it states none (RFC 8878, 3.1.1.1)."""
    head = data[:18].tobytes()
    if head[:4] != b"\x28\xb5\x2f\xfd" or len(head) < 6:
        raise ValueError("a chunk is no frame of zstd")
    descriptor = head[4]
    single = bool(descriptor & 0x20)
    width = (int(single), 2, 4, 8)[descriptor >> 6]
    begin = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    if not width:
        return None
    return int.from_bytes(head[begin : begin + width], "little") + 256 * (width == 2)


def _by_pieces(begin: Callable[[], Any], data: Bytes, made: Encoded) -> Bytes:
    """Decompress one stream after another, up to the declared size."""
    room, held, start = np.empty(made.size, np.uint8), 0, 0
    stream = begin()
    while start < len(data):
        if stream.eof:
            stream = begin()
        given = data[start : start + PIECE]
        found = stream.decompress(given, made.size - held + 1)
        if held + len(found) > made.size:
            raise ValueError(f"a chunk decodes to more than the {made.size:,} bytes that are declared")
        room[held : held + len(found)] = np.frombuffer(found, np.uint8)
        held += len(found)
        start += len(given) - (len(stream.unused_data) if stream.eof else 0)
    if not stream.eof:
        raise ValueError("a chunk ends before its compressed stream does")
    return room[: made.check(held)]


_DECODERS: dict[str, Callable[[Bytes, Encoded], Any]] = {
    "blosc": _blosc,
    "lz4": _lz4,
    "zstd": _zstd,
    "gzip": partial(_by_pieces, partial(zlib.decompressobj, wbits=31)),
    "zlib": partial(_by_pieces, zlib.decompressobj),
    "bz2": partial(_by_pieces, bz2.BZ2Decompressor),
    "lzma": partial(_by_pieces, partial(lzma.LZMADecompressor, memlimit=LZMA_DICTIONARY)),
}
COMPRESSORS = frozenset(_DECODERS)


def decompressed(name: str, data: Any, made: Encoded) -> Bytes:
    """Return what a compressor of `COMPRESSORS` made these bytes of; ValueError unless it is ``made``."""
    given = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    try:
        found = _DECODERS[name](given, made)
    except (RuntimeError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"a chunk is not the {made.size:,} bytes that are declared: {error}") from error
    values = np.frombuffer(found, np.uint8)
    made.check(len(values))
    return values


@dataclass(frozen=True)
class Decompressor(BytesBytesCodec):
    """A decompressor for zarr's format 3 that makes no more bytes than ``made`` declares."""

    is_fixed_size = False

    name: str
    made: Encoded

    def to_dict(self) -> dict[str, Any]:
        """Return a description for messages."""
        return {"name": self.name, "configuration": {"bytes": self.made.size}}

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        found = await asyncio.to_thread(decompressed, self.name, chunk_bytes.as_numpy_array(), self.made)
        return chunk_spec.prototype.buffer.from_array_like(found)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Refuse: the size is not known."""
        raise NotImplementedError


class FormatTwoDecompressor(Numcodec):  # type: ignore[misc]
    """A `Decompressor` for zarr's format 2."""

    codec_id = "emtau_dask.decompressor"

    def __init__(self, name: str, made: Encoded) -> None:
        self.name = name
        self.made = made

    def encode(self, buf: Any) -> Any:
        """Refuse: it reads only."""
        raise NotImplementedError

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decompress."""
        return decompressed(self.name, buf, self.made)


def checked_chain(
    codecs: Sequence[object], names: frozenset[str], chunk: Encoded, n_values: int, where: str
) -> list[tuple[str, object, Encoded]]:
    """Return, for each codec of a chunk, its name, its description and the bytes that it decodes to.

    ``codecs`` are in the order in which they encode a ``chunk`` of ``n_values``. Raises as `allowed` does.
    """
    found, made = [], chunk
    for codec in codecs:
        name, configuration = allowed(codec, names, where)
        found.append((name, codec, made))
        made = encoded_by(name, configuration, made, n_values)
    return found


PAIRED = FILTERS | COMPRESSORS | CHECKSUMS


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
            An array is missing or is not as this package writes it, or they declare too many bytes for
            those stored.
        Exception
            Whatever zarr and codecs raise for damage.
        """
        read = {name: self._read(name) for name in names}
        declared = sum(array.description.n_bytes for array, _ in read.values())
        found = sum(size for _, size in read.values())
        if declared > PLAIN_BYTES + MOST_COMPRESSED * found:
            raise InvalidDataError(
                f"its arrays declare {declared:,} bytes, but only {found:,} are stored, too few for them"
            )
        return {name: np.asarray(array.array[...]) for name, (array, _) in read.items()}

    def _read(self, name: str) -> tuple[StoredArray, int]:
        """Return an array whose stored bytes were copied to memory, and their number."""
        path = f"{self.path}/{name}".lstrip("/")
        found = document_at(self.store, path, (3,))
        if found is None or found.kind != "array":
            raise InvalidDataError(f"{name} is not an array")
        description = ArrayDocument.checked(found.document, name)
        document = description.document
        codecs = {codec.get("name") if isinstance(codec, Mapping) else codec for codec in document["codecs"]}
        if document["data_type"] not in DTYPES or not codecs <= CODECS:
            raise InvalidDataError(
                f"{name} is of {document['data_type']!r} with the codecs {sorted(map(str, codecs))}, which "
                "emtau does not write"
            )
        memory: dict[str, Buffer] = {}
        there = StoredArray(MemoryStore(memory), "", description)
        counts = [-(-n // step) for n, step in zip(description.shape, description.chunks, strict=True)]
        if math.prod(max(1, count) for count in counts) > MAX_CHUNKS:
            raise InvalidDataError(f"{name} has {math.prod(counts):,} chunks, more than emtau writes")
        for place in np.ndindex(*counts):
            key = there.array.metadata.encode_chunk_key(place)
            data = sync(
                get_within(self.store, f"{path}/{key}", default_buffer_prototype(), description.object_limit)
            )
            if data is not None:
                memory[key] = data
        return there, sum(map(len, memory.values()))


def own_group(where: object) -> OwnGroup | None:
    """Return the zarr group of format 3 at a path, a URL or in an open zarr store; None where there is none.

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
    except Exception as error:  # whatever a store says
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
