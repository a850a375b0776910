"""The codecs that stored numbers may have, and decoding to no more bytes than are declared.

zarr looks codecs up by name in a registry that any package may add to. One that it ships, ``pickle``,
runs the code in a chunk. So names and configurations are compared with a list before zarr sees them. A
compressed chunk itself states its decoded size; the decompressors here are told the size beforehand.
"""

from __future__ import annotations

import asyncio
import bz2
import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numcodecs.abc import Codec as Numcodec
from numcodecs.blosc import Blosc
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec

from emtau_dask.errors import InvalidDataError

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
