"""The pass that computes sufficient statistics without an E-step.

Its responsibilities come from k-means, from random numbers or from the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.chunk import RESPONSIBILITIES, ChunkDigest, ChunkLoader, LoadedChunk, chunk_digest
from emtau_dask.data.row_random import RESPONSIBILITY, row_uniforms
from emtau_dask.data.source import ChunkRange, ChunkReader, Source
from emtau_dask.em.problem import Problem
from emtau_dask.em.verification import DigestingTask
from emtau_dask.errors import InvalidDataError
from emtau_dask.execution.executor import NO_SOURCE
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.mixture.plan import block_rows, even_length
from emtau_dask.mixture.statistics import (
    PairwiseMerger,
    SufficientStatistics,
    block_statistics,
    group_statistics,
    merge,
    merged,
    zero,
)

DRAWN_ROWS = 2**12
"""Number of rows whose random numbers are drawn together, whether or not all of them are needed."""


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows (n, d) of one chunk, at ascending ``positions``; ``start`` is the chunk's first row number."""

    rows: Floats
    weights: Floats | None
    positions: Ints
    start: int


class Prepared(NamedTuple):
    """The assignment of one chunk, and the digests of what was read for it."""

    assignment: Assignment
    digests: tuple[ChunkDigest, ...] = ()


class Assignment(Protocol):
    """Gives responsibilities to the rows of one chunk."""

    def prepare(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Prepared:
        """Return the assignment for one chunk."""
        ...

    def statistics(self, structure: CovarianceStructure, block: RowBlock) -> SufficientStatistics:
        """Return the statistics of a block."""
        ...


def _under(structure: CovarianceStructure, block: RowBlock, responsibilities: Floats) -> SufficientStatistics:
    """Return the statistics of a block under responsibilities (n, K)."""
    if block.weights is not None:
        responsibilities = responsibilities * block.weights[:, np.newaxis]
    return block_statistics(structure, block.rows, np.ascontiguousarray(responsibilities.T))


def nearest(rows: Floats, centres: Floats) -> Ints:
    """Return the index of each row's nearest centre; ties go to the lowest."""
    origin = centres.mean(axis=0)
    centred = centres - origin
    scores = (rows - origin) @ (-2.0 * centred.T)
    scores += np.einsum("ij,ij->i", centred, centred)
    labels: Ints = scores.argmin(axis=1)
    return labels


def distinct_rows(rows: Floats) -> tuple[Ints, Ints]:
    """Return the index of the first of each group of equal rows, and the group of each row, in sorted order.

    `numpy.unique` along an axis does the same, but raises TypeError when it is interrupted.
    """
    order = np.lexsort(rows.T[::-1])
    in_order = rows[order]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    group = np.empty(len(rows), dtype=np.intp)
    group[order] = np.cumsum(begins) - 1
    return order[begins], group


@dataclass(frozen=True, eq=False)
class NearestCentre:
    """Assignment to the nearest centre; equal centres share their rows equally.

    Attributes
    ----------
    distinct : ndarray of shape (m, d)
        The centres, each once.
    shares : ndarray of shape (m, K)
        Responsibilities of a row of each: 1, or 1/n for each of n equal centres.
    """

    distinct: Floats
    shares: Floats

    @classmethod
    def of(cls, centres: Floats) -> NearestCentre:
        """Return the assignment to ``centres`` (K, d)."""
        first, group = distinct_rows(centres)
        same = group[:, np.newaxis] == np.arange(len(first))
        order = np.argsort(first)
        return cls(centres[first[order]], (same / same.sum(axis=0)).T[order])

    def prepare(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Prepared:
        """Return itself."""
        return Prepared(self)

    def responsibilities(self, rows: Floats) -> Floats:
        """Return 1 for the nearest centre, or 1/n for each of n equal ones, (n, K)."""
        return self.shares[nearest(rows, self.distinct)]

    def statistics(self, structure: CovarianceStructure, block: RowBlock) -> SufficientStatistics:
        """Return the statistics of a block."""
        n_distinct, n_components = self.shares.shape
        if n_distinct < n_components:
            return _under(structure, block, self.responsibilities(block.rows))
        labels = nearest(block.rows, self.distinct)
        return group_statistics(structure, block.rows, labels, block.weights, n_components)


@dataclass(frozen=True)
class RandomResponsibilities:
    """Uniform random numbers, a function of the row's number, divided by their sum in each row."""

    seed: int
    n_components: int

    def prepare(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Prepared:
        """Return itself."""
        return Prepared(self)

    def statistics(self, structure: CovarianceStructure, block: RowBlock) -> SufficientStatistics:
        """Return the statistics of a block."""
        positions, start = block.positions, block.start
        result = np.empty((len(positions), self.n_components))
        begin = 0
        while begin < len(positions):
            first = int(positions[begin])
            end = int(np.searchsorted(positions, first + DRAWN_ROWS))
            last = int(positions[end - 1]) + 1
            draws = row_uniforms(self.seed, RESPONSIBILITY, start + first, start + last, self.n_components)
            result[begin:end] = draws[positions[begin:end] - first]
            begin = end
        result /= result.sum(axis=1, keepdims=True)
        return _under(structure, block, result)


@dataclass(frozen=True, eq=False)
class GivenResponsibilities:
    """Responsibilities that the user gives; ``values`` are those of the chunk."""

    reader: ChunkReader
    values: NDArray[Any] | None = None

    def prepare(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> Prepared:
        """Return itself with the chunk's responsibilities loaded."""
        loaded = self.reader.load(chunk_range, blocks)
        digest = chunk_digest(RESPONSIBILITIES, chunk_range.chunk, loaded)
        return Prepared(GivenResponsibilities(self.reader, loaded.values), (digest,))

    def statistics(self, structure: CovarianceStructure, block: RowBlock) -> SufficientStatistics:
        """Return the statistics of a block; for errors see `start_from_responsibilities`."""
        assert self.values is not None
        values = self.values[block.positions].astype(np.float64)
        sums = values.sum(axis=1)
        good = (np.abs(sums - 1.0) <= 1e-6) & (values >= 0).all(axis=1)
        if not good.all():
            i = int(np.argmin(good))
            raise InvalidDataError(
                f"responsibilities_init of row {block.start + block.positions[i]} is {values[i]} "
                f"(sum {sums[i]:.6g}); each must be at least 0 and finite, and they must sum to 1 within "
                "1e-6."
            )
        return _under(structure, block, values)


def _block_length(structure: CovarianceStructure, n_components: int, n_features: int, n_rows: int) -> int:
    return even_length(n_rows, block_rows(structure.name, n_components, n_features, features=False))


@dataclass(frozen=True, eq=False)
class _StatisticsTask(DigestingTask["tuple[LoadedChunk, Prepared]", SufficientStatistics]):
    loader: ChunkLoader
    assignment: Assignment
    structure: CovarianceStructure
    n_components: int

    def read(self, item: ChunkRange, *blocks: Sequence[NDArray[Any]]) -> tuple[LoadedChunk, Prepared]:
        assignment_blocks, *chunk_blocks = blocks
        loaded = self.loader.load(item, *chunk_blocks)
        return loaded, self.assignment.prepare(item, assignment_blocks)

    def compute(self, item: ChunkRange, found: tuple[LoadedChunk, Prepared]) -> SufficientStatistics:
        loaded, (assignment, _) = found
        positions = loaded.positions()
        weights = loaded.weights_at(positions)
        n_features = loaded.rows.shape[1]
        n_rows = _block_length(self.structure, self.n_components, n_features, len(positions))
        merger = PairwiseMerger(partial(merge, self.structure))
        for where, rows in loaded.blocks(positions, n_rows):
            block_weights = None if weights is None else weights[where]
            block = RowBlock(rows, block_weights, positions[where], item.start)
            merger.push(assignment.statistics(self.structure, block))
        return merger.total() or zero(self.structure, self.n_components, n_features)

    def digests(self, item: ChunkRange, found: tuple[LoadedChunk, Prepared]) -> tuple[ChunkDigest, ...]:
        loaded, prepared = found
        return (*loaded.digests(), *prepared.digests)


def statistics_under(
    problem: Problem, assignment: Assignment, *, stage: str, source: Source | None = None
) -> SufficientStatistics:
    """Return the statistics of all rows, in one pass; the assignment reads ``source``, in the same chunks."""
    total: SufficientStatistics | None = problem.map_reduce(
        _StatisticsTask(problem.loader, assignment, problem.structure, problem.n_components),
        partial(merged, problem.structure),
        name="assign",
        stage=stage,
        extra=source or NO_SOURCE,
    )
    assert total is not None
    return total


def statistics_in_memory(
    structure: CovarianceStructure,
    n_components: int,
    rows: Floats,
    weights: Floats | None,
    assignment: Assignment,
) -> SufficientStatistics:
    """Return the statistics of rows (n, d) with weights (n,) in this process's memory, as of one chunk."""
    n, n_features = rows.shape
    length = _block_length(structure, n_components, n_features, n)
    merger, positions = PairwiseMerger(partial(merge, structure)), np.arange(n)
    for begin in range(0, n, length):
        block = slice(begin, begin + length)
        block_weights = None if weights is None else weights[block]
        merger.push(
            assignment.statistics(structure, RowBlock(rows[block], block_weights, positions[block], 0))
        )
    return merger.total() or zero(structure, n_components, n_features)
