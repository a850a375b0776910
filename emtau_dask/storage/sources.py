"""Chunked data as the engine reads it: a port with few verbs, and its in-memory and graph forms.

A source is either *addressable* (a task gets a small reader and a chunk number
and reads the chunk itself) or a *graph* (a chunk is computed by tasks of the
user's own, on which the engine's task depends). The engine does not tell the
two apart: an addressable source has no references and an empty graph.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, cast

import dask
import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.arrays import check_dtype, even_chunks

__all__ = [
    "ChunkPlace",
    "ChunkReader",
    "GraphSource",
    "NumpySource",
    "RangeReader",
    "RangeSource",
    "Source",
    "is_stored",
    "numpy_source",
    "places_of",
]


@dataclass(frozen=True)
class ChunkPlace:
    """Which rows a chunk holds.

    Attributes
    ----------
    chunk : int
    start, stop : int
        Global row numbers.
    """

    chunk: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Rows of the chunk."""
        return self.stop - self.start


def places_of(chunk_rows: Sequence[int]) -> dict[int, ChunkPlace]:
    """Return the places of the chunks that hold rows, by chunk."""
    ends = list(accumulate(chunk_rows))
    return {i: ChunkPlace(i, ends[i] - rows, ends[i]) for i, rows in enumerate(chunk_rows) if rows}


class ChunkReader(Protocol):
    """What travels into a task to turn a chunk's place into rows; small and picklable."""

    def load(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], int]:
        """Return a chunk's values and the bytes read for them.

        Parameters
        ----------
        place : ChunkPlace
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


class RangeReader(Protocol):
    """Reads any range of rows of something addressable; picklable."""

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return rows ``start`` to ``stop`` and the stored bytes read for them."""
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
    def in_memory(self) -> NDArray[Any] | None:
        """The array behind it where that lies in this process's memory, else None."""
        return self.ranges.array if isinstance(self.ranges, NumpySource) else None

    def reader(self) -> ChunkReader:
        """Return a reader of a chunk's range of rows."""
        return RangeChunkReader(self.ranges)

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
    return isinstance(source, RangeSource) and source.in_memory is None


@dataclass(frozen=True)
class RangeChunkReader:
    """Chunks to row ranges."""

    ranges: RangeReader

    def load(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], int]:
        """Read the chunk."""
        return self.ranges.read(place.start, place.stop)


@dataclass(frozen=True, eq=False)
class NumpySource:
    """Reads an array in memory (or a memory map that the user made)."""

    array: NDArray[Any]

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return a view."""
        rows = self.array[start:stop]
        return rows, rows.nbytes

    def identity(self) -> str:
        """Return ``"memory"``: wherever the reader is, the array is with it."""
        return "memory"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the rows."""
        return int(self.array[start:stop].nbytes)


def numpy_source(array: NDArray[Any]) -> RangeSource:
    """Return an in-memory array as a source, in chunks of about 16 MiB."""
    row_bytes = array.nbytes // max(len(array), 1)
    return RangeSource(NumpySource(array), array.shape, array.dtype, even_chunks(len(array), row_bytes))


@dataclass(frozen=True)
class BlockReader:
    """Puts the blocks of a chunk, which may be split over features, together.

    Attributes
    ----------
    row_shape : tuple of int
        The shape that a row is declared to have.
    """

    row_shape: tuple[int, ...]

    def load(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], int]:
        """Return the chunk; its bytes are those of the decoded blocks.

        Raises
        ------
        InvalidDataError
            The blocks are not what the dask array declares them to be.
        """
        chunk, declared = place.chunk, (place.n_rows, *self.row_shape)
        for block in blocks:
            if isinstance(block, np.ma.MaskedArray):
                raise InvalidDataError(
                    f"chunk {chunk} of the dask array is masked; fill it, for example with "
                    "dask.array.ma.filled(X, numpy.nan)."
                )
            shape = np.shape(block)
            if len(shape) != len(declared) or shape[0] != declared[0] or not isinstance(block, np.ndarray):
                raise self._mismatch(chunk, f"{type(block).__name__} of shape {shape}", declared)
            check_dtype(block.dtype, f"chunk {chunk} of the dask array")
        rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        if rows.shape != declared:
            raise self._mismatch(chunk, f"an array of shape {rows.shape}", declared)
        return rows, rows.nbytes

    @staticmethod
    def _mismatch(chunk: int, found: str, declared: tuple[int, ...]) -> InvalidDataError:
        return InvalidDataError(
            f"chunk {chunk} of the dask array is {found}, but the array declares {declared}; correct the "
            "function that makes it, or what was passed to it as chunks and dtype."
        )


def _holds_futures(array: da.Array) -> bool:
    distributed = sys.modules.get("distributed")
    return distributed is not None and bool(distributed.client.futures_of(array))


class GraphSource:
    """Any dask array: its own optimised tasks, and one reference for each block of a chunk."""

    def __init__(self, array: da.Array) -> None:
        self.array = array
        # dask's optimiser drops the futures of persisted arrays, so those keep their graph as it is.
        (kept,) = (array,) if _holds_futures(array) else dask.optimize(array)
        self._graph: HighLevelGraph = kept.__dask_graph__()
        self._keys = kept.__dask_keys__()

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and features where there are any."""
        return cast("tuple[int, ...]", self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dask array's dtype."""
        return cast("np.dtype[Any]", self.array.dtype)

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """The dask array's row chunks."""
        return cast("tuple[int, ...]", self.array.chunks[0])

    @property
    def addressable(self) -> bool:
        """No: other tasks compute its chunks."""
        return False

    def reader(self) -> ChunkReader:
        """Return a reader that only puts blocks together."""
        return BlockReader(self.shape[1:])

    def references(self, chunk: int) -> list[Hashable]:
        """Return the keys of the chunk's blocks."""
        keys = self._keys[chunk]
        return list(keys) if isinstance(keys, list) else [keys]

    def graph(self, chunks: Sequence[int]) -> Mapping[Any, Any]:
        """Return the part of the array's optimised graph that ``chunks`` need."""
        if not chunks:
            return {}
        wanted = {key for chunk in chunks for key in self.references(chunk)}
        return dict(self._graph.cull(wanted))

    def aligned(self, chunk_rows: tuple[int, ...]) -> Source:
        """Return the rows rechunked by dask, where they do not have these chunks already."""
        if chunk_rows == self.chunk_rows:
            return self
        return GraphSource(self.array.rechunk({0: chunk_rows}))
