"""A bounded random sample of the rows, the same under any chunking."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.cache import CachedName
from emtau_dask.data.chunk import ChunkDigest, ChunkLoader, LoadedChunk
from emtau_dask.data.row_random import PRIORITY, Samples, row_uniforms
from emtau_dask.data.source import ChunkRange, Source
from emtau_dask.em.problem import SCAN_ROWS, Problem, WeightsTask
from emtau_dask.em.verification import ChunkTask, DigestingTask
from emtau_dask.execution.executor import MapReduce, Task
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.settings import DROP

SAMPLE_ELEMENTS = 2**21
"""Default number of values of a sample."""
MIN_SAMPLE_ROWS, MAX_SAMPLE_ROWS, MIN_ROWS_PER_COMPONENT = 2**12, 2**16, 16
"""Minimum and maximum rows of a sample; the minimum for each component may exceed the maximum."""
DRAWN_ROWS = 2**18
"""Number of rows whose priorities are drawn together."""


def sample_size(n_components: int, n_features: int) -> int:
    """Return the maximum rows of a sample: 16 MiB, but 4,096 to 65,536 rows and at least 16 per component."""
    rows = max(MIN_SAMPLE_ROWS, min(MAX_SAMPLE_ROWS, SAMPLE_ELEMENTS // n_features))
    return max(rows, MIN_ROWS_PER_COMPONENT * n_components)


def has_few_rows(n_rows: int, n_components: int, n_features: int) -> bool:
    """Return whether rows are at most `sample_size`, so that starts on them make short runs in memory."""
    return n_rows <= sample_size(n_components, n_features)


@dataclass(frozen=True, eq=False)
class RowSample:
    """Rows (m, d) drawn without replacement, with their weights and numbers (m,).

    Each row that takes part is equally likely.
    """

    rows: Floats
    weights: Floats
    numbers: Ints


@dataclass(frozen=True, eq=False)
class _Draw:
    priorities: Floats
    numbers: Ints


def _merge_draws(size: int, a: _Draw, b: _Draw) -> _Draw:
    """Return the ``size`` rows of the lowest priorities, in their order."""
    priorities, numbers = np.append(a.priorities, b.priorities), np.append(a.numbers, b.numbers)
    order = np.lexsort((numbers, priorities))[:size]
    return _Draw(priorities[order], numbers[order])


def _drawn(seed: int, size: int, chunk_range: ChunkRange, present: NDArray[Any] | None = None) -> _Draw:
    """Return the draw among the rows of a chunk, those that are ``present`` (n,), by default all."""
    start, stop = chunk_range.start, chunk_range.stop
    drawn = _Draw(np.empty(0), np.empty(0, dtype=np.intp))
    for first in range(start, stop, DRAWN_ROWS):
        last = min(first + DRAWN_ROWS, stop)
        priorities = row_uniforms(seed, PRIORITY, first, last, 1)[:, 0]
        numbers = np.arange(first, last)
        if present is not None:
            here = present[first - start : last - start]
            priorities, numbers = priorities[here], numbers[here]
        drawn = _merge_draws(size, drawn, _Draw(priorities, numbers))
    return drawn


def _drawn_by_weight(seed: int, size: int, chunk_range: ChunkRange, weights: NDArray[Any]) -> _Draw:
    return _drawn(seed, size, chunk_range, weights > 0)


@dataclass(frozen=True)
class _DrawTask(ChunkTask[_Draw]):
    """Draws among the rows of a chunk that take part."""

    loader: ChunkLoader
    seed: int
    size: int

    def compute(self, item: ChunkRange, found: LoadedChunk) -> _Draw:
        present = np.zeros(item.n_rows, np.bool_)
        present[found.positions()] = True
        return _drawn(self.seed, self.size, item, present)


@dataclass(frozen=True, eq=False)
class _Chosen:
    chunk_range: ChunkRange
    numbers: Ints


@dataclass(frozen=True, eq=False)
class _TakeTask(DigestingTask[LoadedChunk, RowSample]):
    loader: ChunkLoader

    def read(self, item: _Chosen, *blocks: Sequence[NDArray[Any]]) -> LoadedChunk:
        return self.loader.load(item.chunk_range, *blocks)

    def compute(self, item: _Chosen, found: LoadedChunk) -> RowSample:
        positions = item.numbers - item.chunk_range.start
        rows = np.empty((len(positions), found.rows.shape[1]))
        for where, block in found.blocks(positions, SCAN_ROWS):
            rows[where] = block
        weights = found.weights_at(positions)
        return RowSample(rows, np.ones(len(rows)) if weights is None else weights, item.numbers)

    def digests(self, item: _Chosen, found: LoadedChunk) -> tuple[ChunkDigest, ...]:
        return found.digests()


def _join(a: RowSample, b: RowSample) -> RowSample:
    return RowSample(
        np.concatenate([a.rows, b.rows]),
        np.append(a.weights, b.weights),
        np.append(a.numbers, b.numbers),
    )


def _by_chunk(problem: Problem, numbers: Ints) -> dict[int, _Chosen]:
    """Return the chosen rows (ascending) of each chunk that has any."""
    ranges = list(problem.chunk_ranges.values())
    edges = np.searchsorted(numbers, [chunk_range.stop for chunk_range in ranges])
    parts = np.split(numbers, edges[:-1])
    return {p.chunk: _Chosen(p, part) for p, part in zip(ranges, parts, strict=True) if len(part)}


def _draw(problem: Problem, seed: int, size: int) -> _Draw:
    """Return which rows are chosen; reads the weights, where there are any, or rows that may be dropped."""
    if problem.missing == DROP:
        dropping = problem.map_reduce(
            _DrawTask(problem.loader, seed, size),
            partial(reduce, partial(_merge_draws, size)),
            name="draw",
            stage="sample",
        )
        assert dropping is not None
        return dropping
    weights, executor, observer = problem.weights, problem.executor, problem.context.observer

    def work(task: Task[_Draw], sources: Sequence[Source]) -> MapReduce[_Draw]:
        merge = partial(reduce, partial(_merge_draws, size))
        ranges = problem.chunk_ranges
        return MapReduce(
            task,
            merge,
            sources,
            ranges,
            name="draw",
            stage="sample",
            costs=problem.costs,
            interpreted=problem.is_interpreted(problem.costs),
        )

    if weights is None:
        found = executor.map_reduce(work(partial(_drawn, seed, size), []), observer)
    else:
        draw = partial(_drawn_by_weight, seed, size)
        drawing = work(WeightsTask(weights.reader(), draw), [weights])
        found = problem.context.verifier.run(executor, drawing, observer, problem.chunk_ranges)
    assert found is not None
    return found


def sample_rows(problem: Problem, seed: int, size: int) -> RowSample:
    """Return ``size`` rows, or all if there are fewer, in random order.

    Each row number has a random priority, and the lowest are chosen. The first pass draws them and
    reads no rows, the second reads the chunks of the chosen rows.

    Raises
    ------
    InvalidDataError
        A chosen row holds NaN or infinity.
    """
    draw = _draw(problem, seed, size)
    sample = problem.map_reduce(
        _TakeTask(problem.loader),
        partial(reduce, _join),
        name="take",
        stage="sample rows",
        items=_by_chunk(problem, np.sort(draw.numbers)),
    )
    assert sample is not None
    problem.context.sampled(sample.rows, sample.numbers)
    order = np.searchsorted(sample.numbers, draw.numbers)
    return RowSample(sample.rows[order], sample.weights[order], draw.numbers)


def rows_of_sample(sample: RowSample, seed: int, size: int) -> RowSample:
    """Return ``size`` rows of a sample, or all if there are fewer, in random order; as `sample_rows`."""
    drawn = _drawn(seed, size, ChunkRange(0, 0, len(sample.rows))).numbers
    return RowSample(sample.rows[drawn], sample.weights[drawn], sample.numbers[drawn])


@dataclass(frozen=True, eq=False)
class _FirstSampleTask(DigestingTask["tuple[LoadedChunk, Ints]", RowSample]):
    loader: ChunkLoader
    samples: Samples
    share: float

    @property
    def cached_as(self) -> CachedName | None:
        return self.loader.sample_cached_as(self.samples, 0)

    def is_cached(self, item: ChunkRange, state: Hashable) -> bool:
        return True

    def read(self, item: ChunkRange, *blocks: Sequence[NDArray[Any]]) -> tuple[LoadedChunk, Ints]:
        return self.loader.load_sample(item, self.samples, 0, *blocks)

    def compute(self, item: ChunkRange, found: tuple[LoadedChunk, Ints]) -> RowSample:
        loaded, positions = found
        positions = self.samples.within_share(item, positions, self.share)
        rows = np.empty((len(positions), loaded.rows.shape[1]))
        for where, block in loaded.blocks(positions, SCAN_ROWS):
            rows[where] = block
        weights = loaded.weights_at(positions)
        numbers = item.start + positions
        return RowSample(rows, np.ones(len(rows)) if weights is None else weights, numbers)

    def digests(self, item: ChunkRange, found: tuple[LoadedChunk, Ints]) -> tuple[ChunkDigest, ...]:
        loaded, _ = found
        return loaded.digests()


def sampled_rows(problem: Problem, samples: Samples, size: int) -> RowSample:
    """Return about ``size`` rows of the first sample, or all if there are fewer, in their order.

    Raises
    ------
    InvalidDataError
        A row holds NaN or infinity.
    """
    share = min(samples.shares[0], size / problem.rows.shape[0])
    sample = problem.map_reduce(
        _FirstSampleTask(problem.loader, samples, share),
        partial(reduce, _join),
        name="sample",
        stage="sample rows",
    )
    assert sample is not None
    problem.context.sampled(sample.rows, sample.numbers)
    order = np.argsort(sample.numbers)
    return RowSample(sample.rows[order], sample.weights[order], sample.numbers[order])
