"""Chunks in memory: how they are loaded, checked block by block, and digested.

`em.verification` compares the digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.cache import CachedName, CachedRows, RowCache
from emtau_dask.data.dask_arrays import BlockReader
from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import (
    NONE_UNSTORED,
    BlocksNeededError,
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
MAX_REUSED_ROWS = 2**20
"""Maximum length of an array of positions that is reused. Reuse saves 2% of scoring rows of 4 features."""
T = TypeVar("T")
LARGEST = np.float64(1e150)
"""Maximum magnitude of a value: its square, summed over rows and features, stays within float64. NumPy would
convert a Python float to float32 (infinity) to compare it with float32 values."""
SEARCHED_VALUES = 2**15
"""Number of values that are searched for NaN at a time, so that they stay in the processor's cache."""
INCOMPLETE = (
    ' Rows with NaN are left out by missing="drop" (emtau: --missing drop); '
    'missing="marginalise" (--missing marginalise) integrates over single missing values.'
)
"""What can be done about NaN."""
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
    """Creates read-only arrays 0, 1, …, and reuses the last one for the next chunk of the same length."""

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
        if n_rows <= MAX_REUSED_ROWS:
            self._last = positions
        return positions


@dataclass(frozen=True, eq=False)
class LoadedChunk:
    """A chunk in memory, as stored, and which of its rows are included in the fit.

    Included rows have a positive weight, and no NaN if rows with NaN are dropped.

    Attributes
    ----------
    rows : ndarray of shape (n, d)
        All rows of the chunk, or those at ``subset``.
    weights : ndarray of shape (n,) or None
        None if every row weighs 1.
    included : ndarray of intp or None
        Positions of the included rows; None for all rows.
    start : int or None
        Global number of the first row; None if chunk sizes are unknown.
    bytes_read : int
    chunk : int
    subset : ndarray of intp or None
        Positions in the chunk of ``rows``, ascending; None for all rows.
    source_bytes : int
        Bytes that were read from the source for the whole chunk.
    digest : GrowingDigest or None
        Of ``rows``, if they are a whole chunk and digests are computed. Each block of rows is added to it.
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
    included: Ints | None
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
        """Return the positions of the included rows; not to be written."""
        return np.arange(len(self.rows)) if self.included is None else self.included

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
            Read-only, and valid until the next block: a view of the chunk if
            possible, else of a buffer that is reused.
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
                elif self.rows.dtype == dtype:  # Without "clip" NumPy copies twice; all indices are valid.
                    np.take(self.rows, self._indices(positions[where]), axis=0, out=block, mode="clip")
                else:
                    block[...] = self.rows[self._indices(positions[where])]
            yield where, block
            if everything and self.digest is not None:  # The block is in the processor's cache now.
                self.digest.feed(begin, block if block.dtype == self.rows.dtype else self.rows[where])

    def check_values(self, positions: Ints, rows: Floats, squared: float) -> None:
        """Raise `UnusableRowError` for a value that is not finite, or too large to be squared.

        ``squared`` is the sum of all squares: if it is small enough, so is every value. Missing values are
        allowed.
        """
        if squared <= LARGEST**2 or np.abs(rows).max() <= LARGEST:
            return
        if self.missing:
            rows = np.where(np.isnan(rows), 0.0, rows)
            if np.abs(rows).max() <= LARGEST:
                return
        place, feature, value = describe_bad_value(rows, LARGEST)
        remedy = INCOMPLETE if np.isnan(rows[place, feature]) else ""
        raise self._unusable(
            int(positions[place]),
            f"contains {value}. Every value must be finite and at most {LARGEST:g}: drop or impute the row."
            f"{remedy}",
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
        where = f"row {number} (chunk {self.chunk}, its row {row})" if self.chunk else f"row {number}"
        return UnusableRowError(f"{where} of X {why}", number, feature)

    def weights_at(self, positions: Ints, factors: Floats | None = None) -> Floats | None:
        """Return the weights of ``positions``, times ``factors``; None if every row weighs 1."""
        if self.weights is None:
            return factors
        weights = self.weights[self._indices(positions)]
        return weights if factors is None else weights * factors

    def copied_rows(self, positions: Ints) -> CachedRows:
        """Return copies of the rows at ``positions``, and of their weights."""
        last = int(positions[-1]) if len(positions) else 0
        rows = np.ascontiguousarray(self.rows[self._indices(positions)])
        compact = positions.astype(np.min_scalar_type(last))
        return CachedRows(compact, rows, self.weights_at(positions), self.source_bytes)

    def _indices(self, positions: Ints) -> Ints:
        """Return the indices into ``rows`` of the rows at ``positions``."""
        return positions if self.subset is None else np.searchsorted(self.subset, positions)


@dataclass(frozen=True)
class ChunkLoader:
    """Loads a chunk's rows and weights inside a task.

    Attributes
    ----------
    rows : ChunkReader
    weights : ChunkReader or None
        None if every row weighs 1.
    cache : RowCache or None
        Cache of active rows, between passes.
    sampled : RowCache or None
        Cache of the rows of samples.
    positions : Positions
    made_in : str
        Identifies the fitting process.
    with_digests : bool
        Whether digests are computed of chunks that are read whole.
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
        """Return the whole chunk; raises `BlocksNeededError`, before any reading, without its blocks."""
        for reader, blocks in ((self.rows, row_blocks), (self.weights, weight_blocks)):
            if isinstance(reader, BlockReader) and not blocks:
                raise BlocksNeededError
        self._hold_for_process()
        chunk = chunk_range.chunk
        loaded = self.rows.load(chunk_range, row_blocks)
        rows, bytes_read = loaded.values, loaded.bytes_read
        weights = None
        is_included = complete_rows(rows) if self.missing == DROP else None
        weights_digests: tuple[ChunkDigest, ...] = ()
        if self.weights is not None:
            stored = self.weights.load(chunk_range, weight_blocks)
            weights = stored.values.astype(np.float64)
            bytes_read += stored.bytes_read
            if not (weights > 0).all():
                is_included = weights > 0 if is_included is None else is_included & (weights > 0)
            if self.with_digests:
                weights_digests = (chunk_digest(WEIGHTS, chunk, stored),)
        included = self.positions.of(len(rows)) if is_included is None else np.flatnonzero(is_included)
        return LoadedChunk(
            rows,
            weights,
            included,
            chunk_range.start,
            bytes_read,
            chunk,
            source_bytes=bytes_read,
            digest=GrowingDigest(rows) if self.with_digests else None,
            made_on=loaded.made_on,
            unstored=loaded.unstored,
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
        """Return the cached rows of the chunk, if all ``positions`` are cached; else the whole chunk.

        If the source is in memory and only some rows are active, no digest is computed: the other rows are
        not read.
        """
        cached_and_bytes = None if self.cache is None else self.cache.find(chunk_range.chunk, positions)
        if cached_and_bytes is None:
            loaded = self.load(chunk_range, row_blocks, weight_blocks)
            some = isinstance(self.rows, RowsInMemory) and len(positions) < len(loaded.rows)
            return replace(loaded, digest=None) if some else loaded
        cached, bytes_read = cached_and_bytes
        bytes_read += sum(block.nbytes for block in (*row_blocks, *weight_blocks))
        return self._from_cache(chunk_range, cached, bytes_read, positions)

    def load_sample(
        self,
        chunk_range: ChunkRange,
        samples: Samples,
        sample_index: int,
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> tuple[LoadedChunk, Ints]:
        """Return the rows of a sample, by its number, from the cache if they are in it, and their positions.

        Otherwise the chunk is loaded, and its rows of this sample and the larger ones are cached. Rows of
        smaller samples are removed: a run goes from each sample to the next larger one.
        """
        nothing = np.arange(0)
        cached_and_bytes = None
        if self.sampled is not None:
            self.drop_samples(chunk_range.chunk, samples.names[:sample_index])
            cached_and_bytes = self.sampled.find(chunk_range.chunk, nothing, samples.names[sample_index])
        if cached_and_bytes is None:
            loaded = self.load(chunk_range, row_blocks, weight_blocks)
            inside = samples.positions(chunk_range, loaded.positions())
            if self.sampled is not None:
                for number in range(sample_index, len(inside)):
                    copied = loaded.copied_rows(inside[number])
                    self.sampled.keep(chunk_range.chunk, copied, samples.names[number])
            return loaded, inside[sample_index]
        cached, bytes_read = cached_and_bytes
        bytes_read += sum(block.nbytes for block in (*row_blocks, *weight_blocks))
        loaded = self._from_cache(chunk_range, cached, bytes_read)
        return loaded, loaded.positions()

    def sample_cached_as(self, samples: Samples, sample_index: int) -> CachedName | None:
        """Return where the rows of a sample are cached; None if they are not."""
        return None if self.sampled is None else self.sampled.named(samples.names[sample_index])

    def _from_cache(
        self, chunk_range: ChunkRange, cached: CachedRows, bytes_read: int, included: Ints | None = None
    ) -> LoadedChunk:
        """Return cached rows of a chunk; ``included`` are positions in it, None for all cached rows."""
        self._hold_for_process()
        subset = cached.positions.astype(np.intp)
        return LoadedChunk(
            cached.rows,
            cached.weights,
            subset if included is None else included,
            chunk_range.start,
            bytes_read,
            chunk_range.chunk,
            subset=subset,
            source_bytes=cached.source_bytes,
            missing=self.missing == MARGINALISE,
        )

    def drop_samples(self, chunk: int, names: Sequence[str]) -> None:
        """Remove from the cache the rows of samples that no pass will score again."""
        if self.sampled is not None:
            for name in names:
                self.sampled.drop(chunk, name)

    def _hold_for_process(self) -> None:
        """Hold in a worker what tasks need. The fitting process does so itself, and tasks may outlive it."""
        if self.made_in != process_id():
            hold_for_process()

    def keep_active(self, loaded: LoadedChunk, positions: Ints) -> None:
        """Cache the rows at ``positions`` for the next pass, if they are at most half of those loaded."""
        if self.cache is None:
            return
        if 0 < 2 * len(positions) <= len(loaded.rows):
            self.cache.keep(loaded.chunk, loaded.copied_rows(positions))
        elif not len(positions) or loaded.subset is None:
            self.cache.drop(loaded.chunk)


def loaded_bytes(sources: Sequence[Source], chunk_rows: Sequence[int]) -> dict[int, int]:
    """Return by chunk the bytes of memory that its rows of all sources take, row state included."""
    width = ROW_BYTES + sum(
        math.prod(source.shape[1:]) * max(source.dtype.itemsize, DOUBLE.itemsize) for source in sources
    )
    return {chunk: rows * width for chunk, rows in enumerate(chunk_rows) if rows}
