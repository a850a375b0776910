"""A chunk in memory: loaded, checked, a block of rows at a time, with the digest of what it holds.

What becomes of the digests is in `em.verification`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.cache import CachedRows, RowCache
from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import (
    NONE_UNSTORED,
    ChunkRange,
    ChunkReader,
    GrowingDigest,
    Loaded,
    RowsInMemory,
    Source,
    Unstored,
    describe_bad_value,
    values_digest,
)
from emtau_dask.errors import UnusableRowError
from emtau_dask.mixture.estep import Accumulated, ScoredBlock
from emtau_dask.mixture.linalg import Bools, Floats, Ints, squared_length
from emtau_dask.mixture.missing import Observed
from emtau_dask.process import hold_for_process, process_id
from emtau_dask.settings import DROP, MARGINALISE, RAISE

ROWS, WEIGHTS, RESPONSIBILITIES = "X", "sample_weight", "responsibilities_init"
"""What users call the sources of a fit."""
KEPT = 2**20
"""The longest array that is kept. Without it positions take a fiftieth of the time of scoring 4 features."""
T = TypeVar("T")
LARGEST = np.float64(1e150)
"""Largest magnitude of a value: its square, summed over rows and features, stays within float64. It is not a
plain float, which NumPy would convert to float32 (infinity) to compare it with float32 values."""
SEARCHED_VALUES = 2**15
"""Values that are searched for NaN at a time: they stay in a cache."""
ROW_BYTES = 16
"""Bytes of a loaded row's position and row state."""
DOUBLE = np.dtype(np.float64)


class ChunkDigest(NamedTuple):
    """The digest of a whole chunk of a source.

    Attributes
    ----------
    source : {"X", "sample_weight", "responsibilities_init"}
    chunk : int
    digest : bytes
        See `GrowingDigest`.
    made_on : str
    unstored : Unstored
        See `Loaded`.
    """

    source: str
    chunk: int
    digest: bytes
    made_on: str
    unstored: Unstored


def chunk_digest(source: str, chunk: int, loaded: Loaded) -> ChunkDigest:
    """Return the digest of a whole chunk that a reader loaded."""
    digest = values_digest(np.asarray(loaded.values))
    return ChunkDigest(source, chunk, digest, loaded.made_on, loaded.unstored)


def complete_rows(rows: NDArray[Any]) -> Bools | None:
    """Return which of the rows (n, d) have no NaN; None if all have none."""
    if rows.dtype.kind != "f":
        return None
    complete: Bools | None = None
    size = max(1, SEARCHED_VALUES // rows.shape[1])
    for begin in range(0, len(rows), size):
        block = rows[begin : begin + size]
        if np.isnan(block.min()):
            complete = np.ones(len(rows), np.bool_) if complete is None else complete
            # NumPy is ten times slower along short axes.
            by_feature = np.ascontiguousarray(np.isnan(block).T)
            complete[begin : begin + len(block)] = ~by_feature.any(axis=0)
    return complete


class Positions:
    """Makes read-only arrays 0, 1, …, and gives the last one again to the next chunk of the same length."""

    def __init__(self) -> None:
        self._last: Ints = np.arange(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return Positions, ()

    def of(self, n_rows: int) -> Ints:
        """Return the positions of ``n_rows`` rows, intp."""
        last = self._last
        if len(last) == n_rows:
            return last
        positions = np.arange(n_rows)
        positions.setflags(write=False)
        if n_rows <= KEPT:
            self._last = positions
        return positions


@dataclass(frozen=True, eq=False)
class LoadedChunk:
    """A chunk in memory, as stored, with the rows that take part picked out.

    These have a positive weight, and no NaN where such rows are dropped.

    Attributes
    ----------
    rows : ndarray of shape (n, d)
        All rows of the chunk, or those at ``subset``.
    weights : ndarray of shape (n,) or None
        None where every row weighs 1.
    present : ndarray of intp or None
        Positions of the rows that take part; None for all rows.
    start : int or None
        Global number of the first row; None where chunk sizes are unknown.
    bytes_read : int
    chunk : int
    subset : ndarray of intp or None
        Positions in the chunk of ``rows``, ascending; None for all rows.
    source_bytes : int
        Bytes that were read from the source for the whole chunk.
    digest : GrowingDigest or None
        Of ``rows``, if they are a whole chunk and digests are computed; it grows with the blocks of rows.
    made_on : str
    unstored : Unstored
        See `Loaded`.
    weights_digests : tuple of ChunkDigest
        Of the weights, if there are any and digests are computed.
    missing : bool
        Whether NaN stands for a missing value.
    """

    rows: NDArray[Any]
    weights: Floats | None
    present: Ints | None
    start: int | None
    bytes_read: int
    chunk: int
    subset: Ints | None = None
    source_bytes: int = 0
    digest: GrowingDigest | None = None
    made_on: str = ""
    unstored: Unstored = NONE_UNSTORED
    weights_digests: tuple[ChunkDigest, ...] = ()
    missing: bool = False

    def digests(self) -> tuple[ChunkDigest, ...]:
        """Return the digests of the chunk, if it was read whole and they are computed."""
        if self.digest is None:
            return ()
        own = ChunkDigest(ROWS, self.chunk, self.digest.digest(), self.made_on, self.unstored)
        return (own, *self.weights_digests)

    def positions(self) -> Ints:
        """Return the positions of the rows that take part; not to be written."""
        return np.arange(len(self.rows)) if self.present is None else self.present

    def blocks(
        self, positions: Ints, size: int, dtype: np.dtype[Any] = DOUBLE
    ) -> Iterator[tuple[slice, Floats]]:
        """Yield what `unchecked_blocks` yields, after `check_values`."""
        for where, rows in self.unchecked_blocks(positions, size, dtype):
            self.check_values(positions[where], rows, squared_length(rows))
            yield where, rows

    def unchecked_blocks(
        self, positions: Ints, size: int, dtype: np.dtype[Any] = DOUBLE
    ) -> Iterator[tuple[slice, Floats]]:
        """Yield the rows at ``positions`` (ascending) as ``dtype``, in C order, a block at a time.

        Yields
        ------
        where : slice
            The block's place in ``positions``.
        rows : ndarray of shape (at most ``size``, d)
            Read-only, and valid until the next block: a view of the chunk where
            possible, else of a buffer that is used again.
        """
        everything = len(positions) == len(self.rows)
        direct = (
            everything
            and self.rows.dtype == dtype
            and self.rows.flags.c_contiguous
            and self.rows.flags.aligned
        )
        shape = (0 if direct else min(size, len(positions)), self.rows.shape[1])
        gathered = np.empty(shape, dtype=dtype)
        for begin in range(0, len(positions), size):
            where = slice(begin, min(begin + size, len(positions)))
            if direct:
                block = self.rows[where]
            else:
                block = gathered[: where.stop - begin]
                if everything:
                    block[...] = self.rows[where]
                elif self.rows.dtype == dtype:  # without "clip" NumPy copies once more; no place is beyond
                    np.take(self.rows, self._places(positions[where]), axis=0, out=block, mode="clip")
                else:
                    block[...] = self.rows[self._places(positions[where])]
            yield where, block
            if everything and self.digest is not None:  # Now it is in the cache.
                self.digest.feed(begin, block if block.dtype == self.rows.dtype else self.rows[where])

    def check_values(self, positions: Ints, rows: Floats, squared: float) -> None:
        """Raise `UnusableRowError` for a value that is not finite, or too large to be squared.

        ``squared`` is the sum of all squares: where it is small enough, so is every value. Missing values are
        none.
        """
        if squared <= LARGEST**2 or np.abs(rows).max() <= LARGEST:
            return
        if self.missing:
            rows = np.where(np.isnan(rows), 0.0, rows)
            if np.abs(rows).max() <= LARGEST:
                return
        place, feature, value = describe_bad_value(rows, LARGEST)
        raise self._unusable(
            int(positions[place]),
            f"contains {value}. Every value must be finite and at most {LARGEST:g}: drop or impute the row.",
            feature,
        )

    def check_log_likelihoods(self, positions: Ints, scored: Observed | Accumulated | ScoredBlock) -> None:
        """Raise `UnusableRowError` for the first of ``positions`` whose log-likelihood is not finite."""
        if math.isfinite(scored.total):
            return
        finite = np.isfinite(scored.log_likelihoods)
        if not finite.all():
            raise self._unusable(
                int(positions[np.argmin(finite)]),
                "is so far from every component that its density is beyond the range of float64 (distances "
                "above about 1e154 standard deviations). Remove the row or scale the features.",
            )

    def _unusable(self, row: int, why: str, feature: int | None = None) -> UnusableRowError:
        if self.start is None:
            return UnusableRowError(f"row {row} of chunk {self.chunk} of X {why}", row, feature)
        number = self.start + row
        where = f"row {number} (chunk {self.chunk}, its row {row})"
        return UnusableRowError(f"{where} of X {why}", number, feature)

    def weights_at(self, positions: Ints, factors: Floats | None = None) -> Floats | None:
        """Return the weights of ``positions``, times ``factors``; None where every row weighs 1."""
        if self.weights is None:
            return factors
        weights = self.weights[self._places(positions)]
        return weights if factors is None else weights * factors

    def taken(self, positions: Ints) -> CachedRows:
        """Return copies of the rows at ``positions``, and of their weights."""
        last = int(positions[-1]) if len(positions) else 0
        rows = np.ascontiguousarray(self.rows[self._places(positions)])
        compact = positions.astype(np.min_scalar_type(last))
        return CachedRows(compact, rows, self.weights_at(positions), self.source_bytes)

    def _places(self, positions: Ints) -> Ints:
        """Return where in ``rows`` the rows at ``positions`` are."""
        return positions if self.subset is None else np.searchsorted(self.subset, positions)


@dataclass(frozen=True)
class ChunkLoader:
    """Loads a chunk's rows and weights inside a task.

    Attributes
    ----------
    rows : ChunkReader
    weights : ChunkReader or None
        None where every row weighs 1.
    cache : RowCache or None
        Of active rows, between passes.
    sampled : RowCache or None
        Of the rows of samples.
    positions : Positions
    made_in : str
        The fitting process.
    with_digests : bool
        Whether digests of chunks that are read whole are computed.
    missing : {"raise", "drop", "marginalise"}
    """

    rows: ChunkReader
    weights: ChunkReader | None
    cache: RowCache | None = None
    sampled: RowCache | None = None
    positions: Positions = field(default_factory=Positions)
    made_in: str = field(default_factory=process_id)
    with_digests: bool = False
    missing: str = RAISE

    def load(
        self,
        chunk_range: ChunkRange,
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> LoadedChunk:
        """Return the chunk."""
        self._hold()
        chunk = chunk_range.chunk
        found = self.rows.load(chunk_range, row_blocks)
        rows, bytes_read = found.values, found.bytes_read
        weights = None
        taking_part = complete_rows(rows) if self.missing == DROP else None
        weights_digests: tuple[ChunkDigest, ...] = ()
        if self.weights is not None:
            stored = self.weights.load(chunk_range, weight_blocks)
            weights = stored.values.astype(np.float64)
            bytes_read += stored.bytes_read
            if not (weights > 0).all():
                taking_part = weights > 0 if taking_part is None else taking_part & (weights > 0)
            if self.with_digests:
                weights_digests = (chunk_digest(WEIGHTS, chunk, stored),)
        present = self.positions.of(len(rows)) if taking_part is None else np.flatnonzero(taking_part)
        return LoadedChunk(
            rows,
            weights,
            present,
            chunk_range.start,
            bytes_read,
            chunk,
            source_bytes=bytes_read,
            digest=GrowingDigest(rows) if self.with_digests else None,
            made_on=found.made_on,
            unstored=found.unstored,
            weights_digests=weights_digests,
            missing=self.missing == MARGINALISE,
        )

    def load_active(
        self,
        chunk_range: ChunkRange,
        positions: Ints,
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> LoadedChunk:
        """Return the cached rows of the chunk, at least those at ``positions``, or else the whole chunk.

        Of rows in memory no others are read then.
        """
        found = None if self.cache is None else self.cache.find(chunk_range.chunk, positions)
        if found is None:
            loaded = self.load(chunk_range, row_blocks, weight_blocks)
            some = isinstance(self.rows, RowsInMemory) and len(positions) < len(loaded.rows)
            return replace(loaded, digest=None) if some else loaded
        cached, bytes_read = found
        bytes_read += sum(block.nbytes for block in weight_blocks)
        return self._from_cache(chunk_range, cached, bytes_read, positions)

    def load_sample(
        self,
        chunk_range: ChunkRange,
        samples: Samples,
        level: int,
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> tuple[LoadedChunk, Ints]:
        """Return the rows of a sample, from the cache where they are there, and their positions.

        Where they are not, the chunk is loaded, and its rows of all samples are cached. The samples below are
        left: a run goes from each to the next, so that their rows need no memory.
        """
        nothing = np.arange(0)
        found = None
        if self.sampled is not None:
            self.drop_samples(chunk_range.chunk, samples.names[:level])
            found = self.sampled.find(chunk_range.chunk, nothing, samples.names[level])
        if found is None:
            loaded = self.load(chunk_range, row_blocks, weight_blocks)
            inside = samples.positions(chunk_range, loaded.positions())
            if self.sampled is not None:
                for number in range(level, len(inside)):
                    taken = loaded.taken(inside[number])
                    self.sampled.keep(chunk_range.chunk, taken, samples.names[number])
            return loaded, inside[level]
        loaded = self._from_cache(chunk_range, *found)
        return loaded, loaded.positions()

    def _from_cache(
        self, chunk_range: ChunkRange, cached: CachedRows, bytes_read: int, present: Ints | None = None
    ) -> LoadedChunk:
        """Return cached rows of a chunk; ``present`` are those that take part, None where all do."""
        self._hold()
        subset = cached.positions.astype(np.intp)
        return LoadedChunk(
            cached.rows,
            cached.weights,
            subset if present is None else present,
            chunk_range.start,
            bytes_read,
            chunk_range.chunk,
            subset=subset,
            source_bytes=cached.source_bytes,
            missing=self.missing == MARGINALISE,
        )

    def drop_samples(self, chunk: int, names: Sequence[str]) -> None:
        """Remove the rows of samples that no pass will score again from the cache."""
        if self.sampled is not None:
            for name in names:
                self.sampled.drop(chunk, name)

    def _hold(self) -> None:
        """Hold what tasks need in a worker; the fitting process does so itself, and tasks may outlive it."""
        if self.made_in != process_id():
            hold_for_process()

    def keep_active(self, loaded: LoadedChunk, positions: Ints) -> None:
        """Keep the rows at ``positions`` for the next pass, once they are at most half of those loaded."""
        if self.cache is None:
            return
        if 0 < 2 * len(positions) <= len(loaded.rows):
            self.cache.keep(loaded.chunk, loaded.taken(positions))
        elif not len(positions) or loaded.subset is None:
            self.cache.drop(loaded.chunk)


def loaded_bytes(sources: Sequence[Source], chunk_rows: Sequence[int]) -> dict[int, int]:
    """Return the bytes that each chunk of ``chunk_rows`` rows of all sources takes in memory, by chunk."""
    width = ROW_BYTES + sum(
        math.prod(source.shape[1:]) * max(source.dtype.itemsize, DOUBLE.itemsize) for source in sources
    )
    return {chunk: rows * width for chunk, rows in enumerate(chunk_rows) if rows}
