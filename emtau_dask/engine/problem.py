"""What is fitted: the rows, their weights, and the shape of the mixture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.engine.blas import hold_single_thread
from emtau_dask.engine.observer import FitObserver
from emtau_dask.engine.passes import ReadingTask, run_pass
from emtau_dask.engine.readahead import AheadBudget, read_ahead_limit
from emtau_dask.errors import InvalidDataError, UnusableRowError
from emtau_dask.mixture.arrays import Floats, Ints
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.storage import (
    CachedRows,
    ChunkPlace,
    ChunkReader,
    RowCache,
    Source,
    is_stored,
    places_of,
)
from emtau_dask.storage.arrays import describe_bad_value

__all__ = [
    "SCAN_ROWS",
    "ChunkLoader",
    "LoadedChunk",
    "Problem",
    "check_counts",
    "chunk_costs",
    "first_unusable_row_named",
    "loaded_bytes",
    "pose",
]

LARGEST = np.float64(1e150)
"""Largest magnitude of a value: its square, summed over rows and features, stays within float64.
NumPy would make a plain float one of float32, infinity, to compare float32 values with it."""
SCAN_ROWS = 2**12
ROW_BYTES = 16
"""Of a loaded row beside its values: its position, and its row state."""
DOUBLE = np.dtype(np.float64)


@dataclass(frozen=True, eq=False)
class LoadedChunk:
    """A chunk in memory, as stored, with the rows of positive weight picked out.

    Attributes
    ----------
    rows : ndarray of shape (n, d)
        All rows of the chunk, or those at ``held``.
    weights : ndarray of shape (n,) or None
        None where every row weighs 1.
    present : ndarray of intp or None
        Positions of the rows of positive weight; None where all are.
    start : int or None
        Global number of the first row; None where chunk sizes are unknown.
    bytes_read : int
    chunk : int
    held : ndarray of intp or None
        Positions in the chunk of the only rows that are here, ascending; None
        where all are.
    source_bytes : int
        Bytes that were read from the source for the whole chunk.
    """

    rows: NDArray[Any]
    weights: Floats | None
    present: Ints | None
    start: int | None
    bytes_read: int
    chunk: int
    held: Ints | None = None
    source_bytes: int = 0

    def positions(self) -> Ints:
        """Return the positions of the rows of positive weight."""
        return np.arange(len(self.rows)) if self.present is None else self.present

    def blocks(
        self, positions: Ints, size: int, dtype: np.dtype[Any] = DOUBLE
    ) -> Iterator[tuple[slice, Floats]]:
        """Give rows a block at a time, in C order.

        Parameters
        ----------
        positions : ndarray of intp
            Rows of the chunk, in order.
        size : int
            Rows of a block.
        dtype : dtype
            What they are converted to.

        Yields
        ------
        where : slice
            The block's place in ``positions``.
        rows : ndarray of shape (at most ``size``, d)
            Not to be changed, and valid until the next block: a view of the
            chunk where that will do, else of one buffer into which rows are gathered.

        Raises
        ------
        UnusableRowError
            A row holds NaN, infinity or a number too large to be squared.
        """
        everything = len(positions) == len(self.rows)
        direct = everything and self.rows.dtype == dtype and self.rows.flags.c_contiguous
        shape = (0 if direct else min(size, len(positions)), self.rows.shape[1])
        gathered = np.empty(shape, dtype=dtype)
        for begin in range(0, len(positions), size):
            where = slice(begin, min(begin + size, len(positions)))
            if direct:
                block = self.rows[where]
            else:
                block = gathered[: where.stop - begin]
                block[...] = self.rows[where] if everything else self.rows[self._places(positions[where])]
            if not (float(block.min()) >= -LARGEST and float(block.max()) <= LARGEST):
                place, value = describe_bad_value(block, LARGEST)
                raise self._unusable(
                    int(positions[begin + place]),
                    f"contains {value}. Every value must be finite and at most {LARGEST:g}: "
                    "drop or impute the row.",
                )
            yield where, block

    def check_reach(self, positions: Ints, log_likelihoods: Floats) -> None:
        """Raise `UnusableRowError` for the first of ``positions`` whose log-likelihood is not finite."""
        reachable = np.isfinite(log_likelihoods)
        if not reachable.all():
            raise self._unusable(
                int(positions[np.argmin(reachable)]),
                "is so far from every component that its density is beyond the range of float64 (distances "
                "above about 1e154 standard deviations). Remove the row or scale the features.",
            )

    def _unusable(self, row: int, why: str) -> UnusableRowError:
        if self.start is None:
            return UnusableRowError(f"row {row} of chunk {self.chunk} of X {why}", row)
        number = self.start + row
        return UnusableRowError(f"row {number} (chunk {self.chunk}, its row {row}) of X {why}", number)

    def weights_at(self, positions: Ints) -> Floats | None:
        """Return the weights of ``positions``, None where every row weighs 1."""
        return None if self.weights is None else self.weights[self._places(positions)]

    def taken(self, positions: Ints) -> CachedRows:
        """Return copies of the rows at ``positions``, and of their weights."""
        last = int(positions[-1]) if len(positions) else 0
        rows = np.ascontiguousarray(self.rows[self._places(positions)])
        compact = positions.astype(np.min_scalar_type(last))
        return CachedRows(compact, rows, self.weights_at(positions), self.source_bytes)

    def _places(self, positions: Ints) -> Ints:
        """Return where in ``rows`` the rows at ``positions`` are."""
        return positions if self.held is None else np.searchsorted(self.held, positions)


@dataclass(frozen=True)
class ChunkLoader:
    """Loads a chunk's rows and weights inside a task.

    Attributes
    ----------
    rows : ChunkReader
    weights : ChunkReader or None
        None where every row weighs 1.
    cache : RowCache or None
        Where active rows are kept between passes; None where they are not.
    """

    rows: ChunkReader
    weights: ChunkReader | None
    cache: RowCache | None = None

    def load(
        self,
        place: ChunkPlace,
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> LoadedChunk:
        """Return the chunk."""
        hold_single_thread()
        rows, bytes_read = self.rows.load(place, row_blocks)
        weights, present = None, None
        if self.weights is not None:
            stored, weight_bytes = self.weights.load(place, weight_blocks)
            weights = stored.astype(np.float64)
            bytes_read += weight_bytes
            if not (weights > 0).all():
                present = np.flatnonzero(weights > 0)
        return LoadedChunk(
            rows, weights, present, place.start, bytes_read, place.chunk, source_bytes=bytes_read
        )

    def load_active(
        self,
        place: ChunkPlace,
        positions: Ints,
        row_blocks: Sequence[NDArray[Any]],
        weight_blocks: Sequence[NDArray[Any]] = (),
    ) -> LoadedChunk:
        """Return the chunk, or only some rows of it from the cache, among them those at ``positions``."""
        found = None if self.cache is None else self.cache.find(place.chunk, positions)
        if found is None:
            return self.load(place, row_blocks, weight_blocks)
        hold_single_thread()
        cached, bytes_read = found
        return LoadedChunk(
            cached.rows,
            cached.weights,
            None,
            place.start,
            bytes_read + sum(block.nbytes for block in weight_blocks),
            place.chunk,
            held=cached.positions.astype(np.intp),
            source_bytes=cached.source_bytes,
        )

    def keep_active(self, loaded: LoadedChunk, positions: Ints) -> None:
        """Keep the rows at ``positions`` for the next pass, once they are at most half of those loaded."""
        if self.cache is None:
            return
        if 0 < 2 * len(positions) <= len(loaded.rows):
            self.cache.keep(loaded.chunk, loaded.taken(positions))
        elif not len(positions) or loaded.held is None:
            self.cache.drop(loaded.chunk)


def chunk_costs(source: Source) -> dict[int, float]:
    """Return the numbers that each chunk holds, by chunk."""
    width = math.prod(source.shape[1:])
    return {chunk: float(rows * width) for chunk, rows in enumerate(source.chunk_rows) if rows}


def loaded_bytes(sources: Sequence[Source]) -> dict[int, int]:
    """Return the bytes that each chunk takes when it is loaded, by chunk.

    Parameters
    ----------
    sources : sequence of Source
        The rows, and what is read beside them, in the same chunks.
    """
    width = ROW_BYTES + sum(
        math.prod(source.shape[1:]) * max(source.dtype.itemsize, DOUBLE.itemsize) for source in sources
    )
    return {chunk: rows * width for chunk, rows in enumerate(sources[0].chunk_rows) if rows}


@dataclass(frozen=True)
class Problem:
    """The data and the mixture's shape; the counts are of rows of positive weight.

    Attributes
    ----------
    rows : Source
        (N, d).
    weights : Source or None
        (N,), in the same chunks.
    n_components : int
    structure : CovarianceStructure
    n_present : int
        Rows of positive weight.
    total_weight : float
        ``Σ s_n``.
    cache : RowCache or None
        Where active rows are kept between passes; None where they are not.
    read_ahead : int
        Bytes that a pass may hold read ahead.
    """

    rows: Source
    weights: Source | None
    n_components: int
    structure: CovarianceStructure
    n_present: int
    total_weight: float
    cache: RowCache | None = None
    read_ahead: int = 0

    @property
    def n_features(self) -> int:
        """Number of features d."""
        return self.rows.shape[1]

    @cached_property
    def places(self) -> dict[int, ChunkPlace]:
        """The places of the chunks that hold rows, by chunk."""
        return places_of(self.rows.chunk_rows)

    @property
    def chunks(self) -> list[int]:
        """The chunks that hold rows."""
        return list(self.places)

    @cached_property
    def costs(self) -> dict[int, float]:
        """The numbers that each chunk holds, by chunk."""
        return chunk_costs(self.rows)

    @property
    def sources(self) -> list[Source]:
        """The sources that a pass over the rows reads."""
        return [self.rows] if self.weights is None else [self.rows, self.weights]

    @cached_property
    def ahead(self) -> AheadBudget | None:
        """What a pass over the rows may read ahead; None for rows that are not stored, or no bytes."""
        if not self.read_ahead or not is_stored(self.rows):
            return None
        return AheadBudget(self.read_ahead, loaded_bytes(self.sources))

    def loader(self) -> ChunkLoader:
        """Return what tasks take along to load chunks."""
        weights = None if self.weights is None else self.weights.reader()
        return ChunkLoader(self.rows.reader(), weights, self.cache)


@dataclass(frozen=True)
class _WeightTotals:
    weight: float
    present: int
    first_bad: str | None

    def plus(self, other: _WeightTotals) -> _WeightTotals:
        return _WeightTotals(
            self.weight + other.weight, self.present + other.present, self.first_bad or other.first_bad
        )


@dataclass(frozen=True)
class _WeightTask:
    reader: ChunkReader

    def __call__(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> _WeightTotals:
        weights, _ = self.reader.load(place, blocks)
        good = (weights >= 0) & (weights <= LARGEST)
        if not good.all():
            position = int(np.argmin(good))
            where = f"row {place.start + position} (chunk {place.chunk})"
            return _WeightTotals(0.0, 0, f"sample_weight is {weights[position]} at {where}")
        return _WeightTotals(math.fsum(weights), int(np.count_nonzero(weights > 0)), None)


def check_counts(rows: Source, weights: Source | None, n_components: int) -> None:
    """Raise `InvalidDataError` for no rows, fewer than components, or not one weight for each."""
    n_rows = rows.shape[0]
    if n_rows == 0:
        raise InvalidDataError(
            f"Found array with 0 sample(s) (shape={rows.shape}) while a minimum of 1 is required."
        )
    if n_rows < n_components:
        raise _too_few_rows(n_components, n_rows, "")
    if weights is not None and weights.shape[0] != n_rows:
        raise InvalidDataError(
            f"sample_weight has {weights.shape[0]} values, X has {n_rows} rows; give one for each row."
        )


def pose(
    rows: Source,
    weights: Source | None,
    n_components: int,
    structure: CovarianceStructure,
    observer: FitObserver,
) -> Problem:
    """Return the problem after checking it; reads the weights, where there are any, and no rows.

    Raises
    ------
    InvalidDataError
        No rows, fewer rows of positive weight than components, or weights that
        are negative, not finite, all zero, or not one for each row.
    """
    check_counts(rows, weights, n_components)
    n_present, total_weight = rows.shape[0], float(rows.shape[0])
    if weights is not None:
        weights = weights.aligned(rows.chunk_rows)
        totals = run_pass(
            _WeightTask(weights.reader()),
            _WeightTotals.plus,
            [weights],
            places_of(rows.chunk_rows),
            costs=chunk_costs(weights),
            name="weights",
            stage="weights",
            observer=observer,
        )
        assert totals is not None
        n_present, total_weight = totals.present, totals.weight
        if totals.first_bad is not None:
            raise InvalidDataError(
                f"{totals.first_bad}; weights must be finite and at least 0 (and at most {LARGEST:g})."
            )
        if n_present == 0:
            raise InvalidDataError(
                "every sample_weight is zero; at least one row must have a positive weight."
            )
    if n_present < n_components:
        raise _too_few_rows(n_components, n_present, " of positive weight")
    return Problem(
        rows, weights, n_components, structure, n_present, total_weight, read_ahead=read_ahead_limit()
    )


def _too_few_rows(n_components: int, n_rows: int, counted: str) -> InvalidDataError:
    return InvalidDataError(
        f"Expected n_samples >= n_components but got n_components = {n_components}, "
        f"n_samples = {n_rows}{counted}. Lower n_components or give more rows."
    )


def _earlier(a: UnusableRowError | None, b: UnusableRowError | None) -> UnusableRowError | None:
    return a or b


@dataclass(frozen=True)
class _ScanTask(ReadingTask[LoadedChunk, UnusableRowError | None]):
    loader: ChunkLoader

    def read(self, item: ChunkPlace, *blocks: Sequence[NDArray[Any]]) -> LoadedChunk:
        return self.loader.load(item, *blocks)

    def compute(self, item: ChunkPlace, found: LoadedChunk) -> UnusableRowError | None:
        positions = found.positions()
        try:
            for _ in found.blocks(positions, SCAN_ROWS):
                pass
        except UnusableRowError as error:
            return error
        return None


@contextmanager
def first_unusable_row_named(problem: Problem, observer: FitObserver) -> Iterator[None]:
    """Raise the `UnusableRowError` of the first unusable row, whichever a pass stumbled over.

    Chunks run side by side, so a pass may meet a later one first; another pass
    then looks at them all.
    """
    try:
        yield
    except UnusableRowError as error:
        first = run_pass(
            _ScanTask(problem.loader()),
            _earlier,
            problem.sources,
            problem.places,
            costs=problem.costs,
            name="scan",
            stage="looking for the first unusable row",
            observer=observer,
            ahead=problem.ahead,
        )
        raise (first or error) from None
