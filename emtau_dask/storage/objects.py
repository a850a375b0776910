"""The port of object stores, arrays as objects, and digests.

An object is bytes under a key such as ``commits/3/zarr.json``. It is written whole or not at all, and
not changed afterwards. A store is a folder, an fsspec URL, or a zarr store of the user's.
`ObjectStore.create` decides which of several processes writes a commit.

The metadata documents are zarr's own, so ``zarr.open`` reads the arrays. This module does not use them to
read, because a checkpoint may be untrusted: it compares the bytes of a chunk with their digest, and their
decoded size with the expected one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata import ArrayV3Metadata

from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointTakenError,
    ShutdownError,
    StoreUnreachableError,
    cause_of,
    shutdown_named,
)
from emtau_dask.storage.errors import is_unreachable, reason_of, remedy_of
from emtau_dask.storage.files import each

PARTIAL = ".partial"
PARTIAL_NAME = re.compile(r"\..*\.[0-9a-f]{32}\.partial")
CLAIM = "replacing"
"""In stores without locks, this object exists while a process replaces a run."""
PROBES = "probe"
"""The folder in which processes test a store before a run begins; they remove what they write."""
ROOT_DOCUMENT = "zarr.json"
ZSTD_LEVEL = 1


@runtime_checkable
class ObjectStore(Protocol):
    """Objects by key. It can be pickled, so that tasks can carry it."""

    @property
    def location(self) -> str:
        """The name of the store in messages."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes can reach the same objects."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether `create` certainly succeeds in only one of several processes."""
        ...

    def prepare(self) -> None:
        """Make the folder of the first object, if the store has folders."""
        return

    def empty(self) -> bool:
        """Return whether the store has no objects."""
        ...

    def get(self, key: str, limit: int) -> bytes | None:
        """Return an object's bytes, at least the first ``limit + 1``; None for no object."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object whole; a second writer of the same key wins."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object durably, unless it exists; return False if it does."""
        ...

    def sync(self, keys: Iterable[str]) -> None:
        """Make objects durable, so that they survive a loss of power; a store may do so when it writes."""
        return

    def list(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``: a folder name ending in ``/``, or ""."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        ...

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the store for replacing a run; `CheckpointTakenError` if another process has the lock."""
        if not self.create(CLAIM, uuid.uuid4().hex.encode()):
            raise CheckpointTakenError(
                f"another process is replacing the run in {self.location}, or was killed while replacing it. "
                f"If none is, remove the object {CLAIM!r} there, and start again."
            )
        try:
            yield
        finally:
            self.delete([CLAIM])


@contextmanager
def storage_errors(
    location: str, doing: str, remedy: Callable[[Exception], str] = remedy_of
) -> Iterator[None]:
    """Raise `CheckpointError` for any error of a store, `StoreUnreachableError` if it does not answer.

    ``doing`` completes "cannot …"; ``remedy`` says what is wrong and what to do about it.
    """
    try:
        with shutdown_named():
            yield
    except (CheckpointError, ShutdownError):
        raise
    except Exception as error:
        message = f"cannot {doing} in {location} ({reason_of(error)}). {remedy(error)}."
        kind = StoreUnreachableError if is_unreachable(error) else CheckpointError
        raise kind(message) from cause_of(error)


def is_remnant(key: str) -> bool:
    """Return whether an object may be left from a process that ended before its run began."""
    return key.startswith(f"{PROBES}/") or PARTIAL_NAME.fullmatch(key) is not None


def begun_elsewhere(objects: ObjectStore) -> CheckpointTakenError:
    """Return the error for a run that another process has begun just before this one."""
    return CheckpointTakenError(
        f"another process has just begun a run in {objects.location}. Choose another place."
    )


def copy_new(source: ObjectStore, target: ObjectStore) -> None:
    """Copy all objects into an empty store, the root document last; after a failure nothing stays.

    Of several processes that copy at once, one succeeds; the others raise `CheckpointExistsError`, as does
    one that finds remnants. If a store fails, it raises `CheckpointError`.
    """
    first, *others = [key for key in source.list("") if key != ROOT_DOCUMENT]
    limit = sys.maxsize - 1
    try:
        if not target.create(first, source.get(first, limit) or b""):
            raise CheckpointExistsError(
                f"another process is writing {target.location}. Choose another place."
            )
        each(lambda key: target.put(key, source.get(key, limit) or b""), others)
        target.create(ROOT_DOCUMENT, source.get(ROOT_DOCUMENT, limit) or b"")
    except CheckpointExistsError:
        raise
    except BaseException:
        with suppress(CheckpointError):
            target.delete([ROOT_DOCUMENT])
            target.delete([first, *others])
        raise


def digest(data: bytes) -> str:
    """Return the SHA-256 of an object's bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """Return a zarr v3 group's metadata document; raises ValueError for NaN or infinity, unknown to JSON."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def digested_document(content: Mapping[str, Any]) -> bytes:
    """Return a group document whose attributes are ``content`` and the digest of that."""
    return group_document({**content, "sha256": digest(canonical(content))})


def canonical(content: Any) -> bytes:
    """Return the canonical JSON, of which digests are computed."""
    return json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def read_document(objects: ObjectStore, key: str, limit: int) -> dict[str, Any]:
    """Return the content of a digested document of at most ``limit`` bytes.

    Raises `CheckpointCorruptError` if it is missing, too large, damaged, or has another digest.
    """
    data = objects.get(key, limit)
    where = f"{key} in {objects.location}"
    if data is None:
        raise CheckpointCorruptError(f"{where} is missing.")
    if len(data) > limit:
        raise CheckpointCorruptError(f"{where} has more than {limit:,} bytes, the most that is read.")
    try:
        document = json.loads(data)
        content = document["attributes"]
        expected = content.pop("sha256")
        intact = document["node_type"] == "group" and digest(canonical(content)) == expected
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is damaged ({type(error).__name__}: {error}).") from error
    if not intact:
        raise CheckpointCorruptError(f"{where} has been altered: its SHA-256 is not the one that it states.")
    return dict(content)


@dataclass(frozen=True)
class ArrayLayout:
    """A zarr array in the folder ``name``, of which single chunks are written; ``dtype`` is NumPy's name.

    A chunk is its values, little-endian, in C order; compressed by zstd if ``compressed``.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    compressed: bool = False
    attributes: Mapping[str, Any] | None = None

    def chunk_key(self, *place: int) -> str:
        """Return the key of a chunk, its remaining indices zero."""
        rest = (0,) * (len(self.shape) - len(place))
        return f"{self.name}/c.{'.'.join(map(str, place + rest))}"

    def document(self) -> bytes:
        """Return the metadata document that zarr itself writes."""
        plain = BytesCodec() if np.dtype(self.dtype).itemsize == 1 else BytesCodec(endian="little")
        codecs = [plain.to_dict(), *([ZstdCodec(level=ZSTD_LEVEL).to_dict()] if self.compressed else [])]
        metadata = ArrayV3Metadata.from_dict(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": self.shape,
                "data_type": self.dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunks}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "fill_value": 0,
                "codecs": codecs,
                "attributes": dict(self.attributes or {}),
                "dimension_names": self.axes,
            }
        )
        return metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes()


def encode(values: NDArray[Any]) -> bytes:
    """Return a chunk's bytes: its values, little-endian, in C order."""
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()


def decode(data: bytes, layout: ArrayLayout, where: str) -> NDArray[Any]:
    """Return the values, read-only, of a chunk of one step that `encode` wrote.

    Raises `CheckpointCorruptError`, which names ``where``, for bytes that are not a chunk of this size.
    """
    return _decoded(data, layout.chunks[1:], np.dtype(layout.dtype), where)


def _decoded(data: bytes, shape: Sequence[int], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise CheckpointCorruptError(f"{where} cannot be decoded: {len(data)} bytes, {size} expected.")
    values = np.frombuffer(data, dtype=dtype.newbyteorder("<")).reshape(shape).astype(dtype, copy=False)
    values.setflags(write=False)
    return values


def compress(values: NDArray[Any]) -> bytes:
    """Return the bytes of `encode`, compressed by zstd."""
    return bytes(Zstd(level=ZSTD_LEVEL).encode(np.frombuffer(encode(values), dtype=np.uint8)))


def decompress(data: bytes, shape: Sequence[int], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Return the values, read-only, that were given to `compress`; raises as `decode` does."""
    try:
        found = Zstd(level=ZSTD_LEVEL).decode(data)
    except (RuntimeError, ValueError) as error:
        raise CheckpointCorruptError(f"{where} cannot be decoded: {error}.") from error
    return _decoded(found, shape, dtype, where)


def read_verified(objects: ObjectStore, key: str, expected: str, limit: int) -> bytes:
    """Return the bytes, at most ``limit``, of an object with the digest ``expected``.

    Raises `CheckpointCorruptError` if it is missing, or not what was written.
    """
    data = objects.get(key, limit)
    if data is None:
        raise CheckpointCorruptError(f"{key} in {objects.location} is missing.")
    found = digest(data)
    if found != expected:
        raise CheckpointCorruptError(
            f"{key} in {objects.location} has been altered: its SHA-256 begins with {found[:12]}, the commit "
            f"says {expected[:12]}."
        )
    return data
