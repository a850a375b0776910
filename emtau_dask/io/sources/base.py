"""Chunked data as the engine reads it: a port with few verbs, and its addressable form.

A source is either *addressable* (a task gets a small reader and a chunk number
and reads the chunk itself) or a *graph* (a chunk is computed by tasks of the
user's own, on which the engine's task depends). The engine does not tell the
two apart: an addressable source has no references and an empty graph.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emtau_dask.io.sources.checks import even_chunks


@dataclass(frozen=True)
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


class ChunkReader(Protocol):
    """What travels into a task to turn a chunk's range into rows; small and picklable."""

    def load(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], int]:
        """Return a chunk's values and the bytes read for them.

        Parameters
        ----------
        chunk_range : ChunkRange
        blocks : sequence of ndarray
            The computed references of the chunk; empty for an addressable source.
        """
        ...


class Source(Protocol):
    """Chunked rows: shape (n, d), or (n,) for one value a row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and features where there are any."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """As stored."""
        ...

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows of each chunk; chunks of 0 rows are allowed."""
        ...

    @property
    def addressable(self) -> bool:
        """Whether tasks read chunks by themselves."""
        ...

    def reader(self) -> ChunkReader:
        """Return the reader that tasks take along."""
        ...

    def references(self, chunk: int) -> list[Hashable]:
        """Return the keys of the tasks that a chunk's task depends on."""
        ...

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        """Return the tasks behind the references of ``chunks``, and no others."""
        ...

    def aligned(self, chunk_rows: tuple[int, ...]) -> Source:
        """Return the same rows in chunks of ``chunk_rows`` rows."""
        ...


class RangeReader(ChunkReader, Protocol):
    """Reads any range of rows of something addressable; picklable."""

    def load(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], int]:
        """Return the rows of a chunk and the stored bytes read for them."""
        return self.read(chunk_range.start, chunk_range.stop)

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return rows ``start`` to ``stop`` and the stored bytes read for them.

        Raises
        ------
        InvalidDataError
            They cannot be read, or are not those that were opened.
        """
        ...

    def identity(self) -> str:
        """Return a short text that identifies what this process sees there, from metadata alone.

        Raises
        ------
        InvalidDataError
            It cannot be seen.
        """
        ...

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes held while rows are read, the rows included."""
        ...


@dataclass(frozen=True)
class RangeSource:
    """An addressable source over a `RangeReader`; ``names`` are its features', where they have any."""

    ranges: RangeReader
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: tuple[int, ...]
    names: tuple[str, ...] | None = None

    @property
    def addressable(self) -> bool:
        """Yes."""
        return True

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
        """Return the same rows cut elsewhere; nothing is read."""
        return replace(self, chunk_rows=chunk_rows)


def is_stored(source: Source) -> bool:
    """Return whether tasks read the source's chunks from storage.

    Not where they lie in memory, nor those of graph sources, which come with their tasks.
    """
    return isinstance(source, RangeSource) and not source.in_memory


class RowsInMemory(RangeReader):
    """Reads arrays in memory (or memory maps that the user made), of which each continues the one before.

    Parameters
    ----------
    *blocks : ndarray
        At least one; of one dtype, and alike but for their number of rows.
    """

    def __init__(self, *blocks: NDArray[Any]) -> None:
        self._blocks = blocks
        self._ends = list(accumulate(len(block) for block in blocks))

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return a view where one block has all the rows, else a copy."""
        found: list[NDArray[Any]] = []
        block = min(bisect_right(self._ends, start), len(self._blocks) - 1)
        while not found or stop > self._ends[block - 1]:
            before = self._ends[block] - len(self._blocks[block])
            found.append(self._blocks[block][max(0, start - before) : stop - before])
            block += 1
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        return rows, rows.nbytes

    def identity(self) -> str:
        """Return ``"memory"``: wherever the reader is, the arrays are with it."""
        return "memory"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the rows."""
        return (stop - start) * math.prod(self._blocks[0].shape[1:]) * self._blocks[0].itemsize


def memory_source(array: NDArray[Any]) -> RangeSource:
    """Return an in-memory array as a source, in chunks of about 16 MiB."""
    row_bytes = array.nbytes // max(len(array), 1)
    return RangeSource(
        RowsInMemory(array), array.shape, array.dtype, even_chunks(len(array), row_bytes, "the array")
    )
