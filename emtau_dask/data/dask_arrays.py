"""Dask arrays as sources: their own tasks compute the chunks, unless these are stored or in memory.

If the fitting process and its workers see the same stored rows, each reads them itself. Two stored arrays may
have equal metadata. So every process, also a worker that joins late, compares a few rows before its first
read.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import zarr
from dask.array.core import getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from numpy.typing import NDArray

from emtau_dask.data.source import (
    ChunkRange,
    ChunkReader,
    Loaded,
    RangeReader,
    RangeSource,
    RowsInMemory,
    Source,
    check_dtype,
    chunk_ranges,
    values_digest,
)
from emtau_dask.data.zarr_arrays import source_in
from emtau_dask.errors import InvalidDataError
from emtau_dask.process import (
    VerifiedTokens,
    numerical_environment,
    of_process,
    other_versions,
    software,
    this_process,
)

MAX_SAMPLES = 4
MAX_SAMPLE_BYTES = 2**22
"""Maximum size of a sample (bytes), unless a single row is longer."""
MAX_SAMPLED_BYTES = 2**28
"""Maximum memory for reading all samples (bytes). The first sample is read in any case."""
REMEDY = "Put it where every worker sees it under the same path, or into an object store."


@dataclass(frozen=True)
class Sample:
    """The digest of rows ``start`` to ``stop``."""

    start: int
    stop: int
    digest: str

    @classmethod
    def of(cls, ranges: RangeReader, start: int, stop: int) -> Sample:
        """Read the rows."""
        return cls(start, stop, values_digest(ranges.read(start, stop).values).hex())


@dataclass(frozen=True)
class SharedRows(RangeReader):
    """A `RangeReader` that reads only in processes that see the same data as the one that created it.

    That process found the identity ``seen`` and the ``samples``, with the versions ``made_with``. Messages
    call the rows ``name``.
    """

    ranges: RangeReader
    name: str
    seen: str
    samples: tuple[Sample, ...]
    made_with: Mapping[str, str]
    token: str

    def read(self, start: int, stop: int) -> Loaded:
        """Verify, then read."""
        self.verify()
        return self.ranges.read(start, stop)

    def identity(self) -> str:
        """Return the identity of the rows."""
        return self.ranges.identity()

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return the bound of ``ranges``, without that of the verification."""
        return self.ranges.peak_bytes(start, stop)

    def verify(self) -> None:
        """Raise `InvalidDataError` if this process sees other data, or none; a success is not repeated."""
        of_process(VerifiedTokens).once(self.token, self._verify)

    def _verify(self) -> None:
        if difference := self.difference():
            raise InvalidDataError(f"{this_process()} {difference}")

    def difference(self) -> str:
        """Return how this process's data differ, and the remedy, as text after the name of the process.

        The text is "" if they do not differ.
        """
        why = other_versions(software(), self.made_with)
        try:
            difference = self._difference_of_rows()
        except Exception as error:
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {cause}" if why else str(error)
            difference = f"cannot see {self.name}: {reason.rstrip('.')}"
        return difference and f"{difference}. {why}{REMEDY}"

    def _difference_of_rows(self) -> str:
        """Return how the identity or a sample differs from that of the fitting process; "" if none does."""
        other = f"sees other data as {self.name} than the fitting process"
        identity = self.ranges.identity()
        if identity != self.seen:
            return f"{other} ({identity}; there {self.seen})"
        for sample in self.samples:
            here = Sample.of(self.ranges, sample.start, sample.stop)
            if here != sample:
                return (
                    f"{other} (rows {sample.start} to {sample.stop} have the digest {here.digest[:12]}…; "
                    f"there {sample.digest[:12]}…)"
                )
        return ""


def shared_rows(source: RangeSource, name: str) -> SharedRows:
    """Return a reader of stored rows for many processes; messages call the rows ``name``.

    At most four samples are read, at the beginnings of evenly spread chunks. Raises `InvalidDataError`
    if they cannot be read.
    """
    ranges, chunks = source.ranges, list(chunk_ranges(source.chunk_rows).values())
    identity = ranges.identity()
    row_bytes = max(1, source.dtype.itemsize * int(np.prod(source.shape[1:])))
    count, sampled_bytes = min(MAX_SAMPLES, len(chunks)), 0
    samples: list[Sample] = []
    for chunk in (chunks[(2 * i + 1) * len(chunks) // (2 * count)] for i in range(count)):
        stop = min(chunk.stop, chunk.start + max(1, MAX_SAMPLE_BYTES // row_bytes))
        sampled_bytes += ranges.peak_bytes(chunk.start, stop)
        if not samples or sampled_bytes <= MAX_SAMPLED_BYTES:
            samples.append(Sample.of(ranges, chunk.start, stop))
    shared = SharedRows(ranges, name, identity, tuple(samples), software(), uuid4().hex)
    of_process(VerifiedTokens).add(shared.token)
    return shared


def check_dense(block: Any, chunk: int) -> None:
    """Raise `InvalidDataError` for a block of a dask array that is masked or sparse."""
    if isinstance(block, np.ma.MaskedArray):
        raise InvalidDataError(
            f"chunk {chunk} of the dask array is masked; fill it, for example with "
            "dask.array.ma.filled(X, numpy.nan)."
        )
    dense = next((name for name in ("toarray", "todense") if hasattr(block, name)), None)
    if dense is not None:
        raise InvalidDataError(
            f"chunk {chunk} of the dask array is sparse ({type(block).__name__}), but rows are read dense. "
            f"Convert it with X.map_blocks(lambda block: block.{dense}())."
        )


@dataclass(frozen=True)
class BlockReader:
    """Joins the blocks of a chunk, which may be split over features.

    Each process first verifies that it sees the same ``stored_inputs``, which the user's tasks read.
    ``computed`` says whether the user's tasks compute the blocks.
    """

    row_shape: tuple[int, ...]
    stored_inputs: tuple[SharedRows, ...] = ()
    computed: bool = True

    def load(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Loaded:
        """Return the chunk; its bytes are those of the decoded blocks.

        Raises
        ------
        InvalidDataError
            The blocks differ from what the dask array declares, or this process sees other stored inputs.
        """
        for stored_input in self.stored_inputs:
            stored_input.verify()
        chunk, declared = chunk_range.chunk, (chunk_range.n_rows, *self.row_shape)
        for block in blocks:
            check_dense(block, chunk)
            shape = np.shape(block)
            if len(shape) != len(declared) or shape[0] != declared[0] or not isinstance(block, np.ndarray):
                raise self._mismatch(chunk, f"{type(block).__name__} of shape {shape}", declared)
            check_dtype(block.dtype, f"chunk {chunk} of the dask array")
        rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        if rows.shape != declared:
            raise self._mismatch(chunk, f"an array of shape {rows.shape}", declared)
        return Loaded(rows, rows.nbytes, made_on=environment_text() if self.computed else "")

    @staticmethod
    def _mismatch(chunk: int, found: str, declared: tuple[int, ...]) -> InvalidDataError:
        return InvalidDataError(
            f"chunk {chunk} of the dask array is {found}, but the array declares {declared}. Correct the "
            "function that computes it, or the chunks and dtype that it was given."
        )


@cache
def environment_text() -> str:
    """Return the processor and library versions of this process: the last bits of values depend on them."""
    environment = numerical_environment()
    return ", ".join(f"{name} {environment[name]}" for name in ("cpu", "blas", "numpy", "scipy"))


class GraphSource:
    """Any dask array: its own optimised tasks, and one reference for each block of a chunk.

    ``stored_inputs`` are the stored rows that its tasks read, if several processes compute it. ``computed``
    is False if the blocks are in memory. ``persisted`` says whether a cluster holds some of its tasks.
    """

    addressable = False

    def __init__(
        self, array: da.Array, stored_inputs: tuple[SharedRows, ...] = (), *, computed: bool = True
    ) -> None:
        self.array = array
        self.stored_inputs, self.computed = stored_inputs, computed
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = array.dtype
        self.chunk_rows: tuple[int, ...] = array.chunks[0]
        distributed = sys.modules.get("distributed")
        self.persisted = distributed is not None and bool(distributed.client.futures_of(array))
        # dask's optimiser drops the futures of persisted arrays, so their graph is not optimised.
        (optimised,) = (array,) if self.persisted else dask.optimize(array)
        self._graph: HighLevelGraph = optimised.__dask_graph__()
        self._keys = optimised.__dask_keys__()

    @property
    def computed_again(self) -> bool:
        """Whether neither this process nor a cluster holds anything of it."""
        return self.computed and not self.persisted

    def reader(self) -> ChunkReader:
        """Return a reader that only joins blocks."""
        return BlockReader(self.shape[1:], self.stored_inputs, self.computed)

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
        """Return the rows rechunked by dask, or this source if it has these chunks already."""
        if chunk_rows == self.chunk_rows:
            return self
        return GraphSource(self.array.rechunk({0: chunk_rows}), self.stored_inputs, computed=self.computed)


def numpy_blocks_of(array: da.Array) -> RangeSource | None:
    """Return the rows of a dask array whose blocks are NumPy arrays; None for any other.

    Examples are ``dask.array.from_array`` of a NumPy array, and arrays persisted in this process. As tasks of
    a graph they would be sent to a cluster's workers in every pass.
    """
    (layer, *others) = array.__dask_graph__().layers.values()
    if others or not isinstance(layer, MaterializedLayer) or any(n != 1 for n in array.numblocks[1:]):
        return None
    blocks = []
    for chunk, rows in enumerate(array.chunks[0]):
        task = layer.get((array.name, chunk, *[0] * (array.ndim - 1)))
        block: Any = getattr(task, "value", task)
        declared = (rows, *array.shape[1:]), array.dtype
        if type(block) is not np.ndarray or (block.shape, block.dtype) != declared:
            return None
        blocks.append(block)
    return RangeSource(RowsInMemory(*blocks), array.shape, array.dtype, array.chunks[0])


def array_of_blocks(source: RangeSource, name: str) -> da.Array:
    """Return the chunks of rows in memory as the blocks of a dask array called ``name``."""
    chunks = (source.chunk_rows, *((size,) for size in source.shape[1:]))
    ends = accumulate(source.chunk_rows, initial=0)
    features = [0] * (len(source.shape) - 1)
    blocks = {
        (name, chunk, *features): source.ranges.read(start, stop).values
        for chunk, (start, stop) in enumerate(pairwise(ends))
    }
    return da.Array(blocks, name, chunks, dtype=source.dtype)


def unchanged_zarr_array(array: da.Array) -> zarr.Array[Any] | None:
    """Return the zarr array from which a dask array was created without any change; None for any other.

    Such a dask array is the result of ``dask.array.from_zarr`` or ``from_array``, inline or not: block i has
    exactly the rows of chunk i.
    """
    layers = array.__dask_graph__().layers
    last = layers.get(array.name)
    if len(layers) > 2 or not isinstance(last, Blockwise):
        return None
    if getattr(last.task, "func", None) not in (getter, getter_nofancy, getter_inline):
        return None
    if any(isinstance(layer, Blockwise) for name, layer in layers.items() if name != array.name):
        return None
    stored = _zarr_arrays_in(array)
    same = len(stored) == 1 and (stored[0].shape, stored[0].dtype) == (array.shape, array.dtype)
    return stored[0] if same else None


def zarr_sources_in(array: da.Array) -> list[RangeSource]:
    """Return the zarr arrays that the tasks of a dask array read, each through the store of its task."""
    return [source_in(stored.store, stored) for stored in _zarr_arrays_in(array)]


def _zarr_arrays_in(array: da.Array) -> list[zarr.Array[Any]]:
    candidates: list[Any] = []
    for layer in array.__dask_graph__().layers.values():
        if isinstance(layer, Blockwise):
            candidates += [argument for argument, _ in layer.indices]
        elif isinstance(layer, MaterializedLayer):
            candidates += [getattr(value, "value", value) for value in dict(layer).values()]
    by_identity = {id(candidate): candidate for candidate in candidates if isinstance(candidate, zarr.Array)}
    return list(by_identity.values())
