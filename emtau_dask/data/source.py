"""The port `Source`: rows in chunks; rows in memory; checks that all sources share.

A source is either *addressable* (a task gets a small reader and the range of a chunk, and reads the chunk
itself) or a *graph* (tasks of the user's own compute a chunk, and the fit's task depends on them). Both are
used alike: an addressable source has no references and an empty graph.

Values are recognised by a digest, XXH3 with 128 bits:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from emtau_dask.errors import InvalidDataError, InvalidDtypeError

CHUNK_BYTES = 2**24
"""Maximum size of a chunk (bytes) if the stored data have no chunks of their own."""
MAX_CHUNKS = 2**20
"""Maximum number of chunks of a source; a fit keeps some hundred bytes for each."""
DIGEST_BYTES = 16
STEP_BYTES = 2**16
"""Bytes hashed at a time. With more, xxhash releases the interpreter's lock, and waits to acquire it
again."""
COPIED_BYTES = 2**20
"""Bytes copied at a time to hash values that are not in C order."""


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Raise `InvalidDtypeError` unless ``dtype`` is real numbers of at most 8 bytes."""
    if dtype.kind not in "fiub":
        remedy = {
            "M": f"({what} - {what}.min()) / numpy.timedelta64(1, 's')",
            "m": f"{what} / numpy.timedelta64(1, 's')",
            "V": f"numpy.lib.recfunctions.structured_to_unstructured({what})",
            "c": f"{what}.real, or its real and imaginary parts as two features",
        }.get(dtype.kind, ".astype('float64')")
        raise InvalidDtypeError(
            f"{what} has dtype {dtype}: argument must be real numbers (floating, integer or bool), not "
            f"a string, object or complex number. Convert it, for example with {remedy}."
        )
    if dtype.itemsize > 8:
        raise InvalidDtypeError(
            f"{what} has dtype {dtype} of {dtype.itemsize} bytes; at most float64 (8 bytes) is used. "
            "Convert it with .astype('float64')."
        )


def check_shape(shape: tuple[int, ...], ndim: int, what: str) -> None:
    """Raise `InvalidDataError` unless ``shape`` has ``ndim`` axes and at least one column."""
    if len(shape) != ndim:
        wanted, remedy = "one value a row", "array.ravel()"
        if ndim == 2:
            wanted, remedy = "rows x features", "array.reshape(-1, 1) for a single feature"
        raise InvalidDataError(
            f"{what} has shape {tuple(shape)} ({len(shape)} axes); expected {ndim} ({wanted}). "
            f"Reshape your data, for example with {remedy}."
        )
    if ndim == 2 and shape[1] == 0:
        raise InvalidDataError(
            f"{what} has 0 feature(s) (shape={tuple(shape)}) while a minimum of 1 is required."
        )


def even_chunks(n_rows: int, row_bytes: int, what: str) -> tuple[int, ...]:
    """Return row counts of chunks of at most 16 MiB each, the last one shorter; see `equal_chunks`."""
    return equal_chunks(n_rows, max(1, CHUNK_BYTES // max(row_bytes, 1)), what)


def equal_chunks(n_rows: int, chunk_rows: int, what: str) -> tuple[int, ...]:
    """Return row counts of chunks of ``chunk_rows`` rows each, the last one shorter.

    Raises
    ------
    InvalidDataError
        There are more than 1,048,576.
    """
    if -(-n_rows // chunk_rows) > MAX_CHUNKS:
        raise InvalidDataError(
            f"{what} has {n_rows:,} rows in chunks of {chunk_rows:,}; at most {MAX_CHUNKS:,} chunks are "
            "allowed. Write it again with more rows in a chunk."
        )
    return tuple(min(chunk_rows, n_rows - start) for start in range(0, n_rows, chunk_rows))


def describe_bad_value(values: NDArray[np.float64], limit: float) -> tuple[int, int, str]:
    """Return the row and the feature of the first bad value, and a text that describes it.

    At least one of the ``values``, of shape (n, d), must be bad: NaN, or above ``limit`` in magnitude.
    """
    bad = ~(np.abs(values) <= limit)
    position, feature = divmod(int(np.argmax(bad)), values.shape[1])
    value = values[position, feature]
    name = "NaN" if math.isnan(value) else f"infinity ({value})" if math.isinf(value) else f"{value:.3g}"
    return position, feature, f"{name} (feature {feature})"


class BlocksNeededError(Exception):
    """A task was run without the blocks of its chunk, and what it needs of them is not cached."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Which rows a chunk holds: global row numbers ``start`` to ``stop``."""

    chunk: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Rows of the chunk."""
        return self.stop - self.start


def chunk_ranges(chunk_rows: Sequence[int]) -> dict[int, ChunkRange]:
    """Return the ranges of the chunks that hold rows, by chunk."""
    ends = list(accumulate(chunk_rows))
    return {i: ChunkRange(i, ends[i] - rows, ends[i]) for i, rows in enumerate(chunk_rows) if rows}


class Unstored(NamedTuple):
    """Of ``of`` chunks of a zarr array, ``chunks`` are not stored, so that zarr reads them as ``value``."""

    chunks: int = 0
    of: int = 0
    value: str = ""

    def and_those(self, other: Unstored) -> Unstored:
        """Return the sums of the numbers of two parts."""
        return Unstored(self.chunks + other.chunks, self.of + other.of, self.value or other.value)


NONE_UNSTORED = Unstored()


class Loaded(NamedTuple):
    """What was read.

    Attributes
    ----------
    values : ndarray
    bytes_read : int
        Stored bytes that were read.
    unstored : Unstored
        Chunks that are not stored.
    made_on : str
        If tasks of the user computed the values: the kind of CPU and versions of libraries, on which last
        bits may depend. Empty for values that are stored or in memory.
    """

    values: NDArray[Any]
    bytes_read: int
    unstored: Unstored = NONE_UNSTORED
    made_on: str = ""


class ChunkReader(Protocol):
    """Reads the rows of a chunk inside a task; small and picklable."""

    def load(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Loaded:
        """Return a chunk's values.

        ``blocks`` are the computed references of the chunk; an addressable source has none.
        """


class Source(Protocol):
    """Chunked rows: shape (n, d), or (n,) for one value a row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and features if there are any."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the rows as stored."""

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows of each chunk; chunks of 0 rows are allowed."""

    @property
    def addressable(self) -> bool:
        """Whether tasks read chunks by themselves."""

    @property
    def computed_again(self) -> bool:
        """Whether tasks of the user's own compute a chunk each time, from data that no cluster holds."""

    def reader(self) -> ChunkReader:
        """Return the reader that tasks take along."""

    def references(self, chunk: int) -> list[Hashable]:
        """Return the keys of the tasks that a chunk's task depends on."""

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        """Return the tasks that compute the references of ``chunks``, and no others."""

    def aligned(self, chunk_rows: tuple[int, ...]) -> Source:
        """Return the same rows in chunks of ``chunk_rows`` rows."""


class RangeReader(ChunkReader, Protocol):
    """Reads any range of rows of something addressable; picklable."""

    def load(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Loaded:
        """Return the rows of a chunk."""
        return self.read(chunk_range.start, chunk_range.stop)

    def read(self, start: int, stop: int) -> Loaded:
        """Return rows ``start`` to ``stop``.

        Raises
        ------
        InvalidDataError
            The rows cannot be read, or are not those that were opened.
        """

    def identity(self) -> str:
        """Return a short text that identifies the data that this process sees, from metadata alone.

        Raises
        ------
        InvalidDataError
            The data cannot be found or read.
        """

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes held while rows are read, the rows included."""


@dataclass(frozen=True)
class RangeSource:
    """An addressable source over a `RangeReader`.

    ``names`` are those of its features, if they have any. ``chosen`` is a text for people that names the part
    of the opened place that is read, such as an array of a group; "" for all of it.
    """

    addressable = True
    computed_again = False

    ranges: RangeReader
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: tuple[int, ...]
    names: tuple[str, ...] | None = None
    chosen: str = ""

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in this process's memory."""
        return isinstance(self.ranges, RowsInMemory)

    def reader(self) -> ChunkReader:
        """Return the reader of its ranges."""
        return self.ranges

    def references(self, chunk: int) -> list[Hashable]:
        """Return nothing: the task reads the chunk itself."""
        return []

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        """Return nothing."""
        return {}

    def aligned(self, chunk_rows: tuple[int, ...]) -> Source:
        """Return the same rows in other chunks; nothing is read."""
        return replace(self, chunk_rows=chunk_rows)


def is_stored(source: Source) -> bool:
    """Return whether tasks read the source's chunks from storage, not from memory or a graph."""
    return isinstance(source, RangeSource) and not source.in_memory


def is_in_memory(source: Source) -> bool:
    """Return whether tasks take the source's chunks from this process's memory."""
    return isinstance(source, RangeSource) and source.in_memory


class RowsInMemory(RangeReader):
    """Reads the rows of one or more consecutive arrays in memory, or memory maps that the user made.

    They have one dtype, and their shapes differ in the number of rows only.
    """

    def __init__(self, *blocks: NDArray[Any]) -> None:
        self._blocks = blocks
        self._ends = list(accumulate(len(block) for block in blocks))

    def read(self, start: int, stop: int) -> Loaded:
        """Return a view if one block has all the rows, else a copy."""
        parts: list[NDArray[Any]] = []
        block = min(bisect_right(self._ends, start), len(self._blocks) - 1)
        while not parts or stop > self._ends[block - 1]:
            before = self._ends[block] - len(self._blocks[block])
            parts.append(self._blocks[block][max(0, start - before) : stop - before])
            block += 1
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return Loaded(rows, rows.nbytes)

    def identity(self) -> str:
        """Return ``"memory"``: the reader takes its arrays along."""
        return "memory"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the rows."""
        return (stop - start) * math.prod(self._blocks[0].shape[1:]) * self._blocks[0].itemsize


def memory_source(array: NDArray[Any]) -> RangeSource:
    """Return an in-memory array as a source, in chunks of about 16 MiB."""
    chunk_rows = even_chunks(len(array), array.nbytes // max(len(array), 1), "the array")
    return RangeSource(RowsInMemory(array), array.shape, array.dtype, chunk_rows)


class GrowingDigest:
    """The digest of an array. Its rows are fed in order, while they are in the processor's cache anyway.

    Parameters
    ----------
    values : ndarray
        Of any dtype and memory order.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        self._values, self._fed = values, 0
        self._hash = xxh3_128(f"{values.dtype.str} {values.shape}".encode())

    def feed(self, begin: int, rows: NDArray[Any]) -> None:
        """Add the rows from number ``begin`` on, of the array's dtype, if they are the next ones."""
        if begin == self._fed:
            self._take(np.ascontiguousarray(rows))
            self._fed += len(rows)

    def digest(self) -> bytes:
        """Return the digest of all values (16 bytes), after adding those that were not fed."""
        values, fed = self._values, self._fed
        if values.flags.c_contiguous and fed < len(values):
            self._take(values[fed:])
        elif fed < len(values):
            step = max(1, COPIED_BYTES * len(values) // max(1, values.nbytes))
            for begin in range(fed, len(values), step):
                self._take(np.ascontiguousarray(values[begin : begin + step]))
        self._fed = len(values)
        return self._hash.digest()

    def _take(self, rows: NDArray[Any]) -> None:
        if rows.nbytes <= STEP_BYTES:
            self._hash.update(rows.data)
            return
        data, update = rows.reshape(-1).view(np.uint8).data, self._hash.update
        for begin in range(0, len(data), STEP_BYTES):
            update(data[begin : begin + STEP_BYTES])


def values_digest(values: NDArray[Any]) -> bytes:
    """Return the 16 bytes of the digest of an array of any dtype and memory order."""
    return GrowingDigest(values).digest()
