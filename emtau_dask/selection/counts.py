"""Rows that stand for several equal ones: how many there are in all, and how many the sample holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from emtau_dask.em import SCAN_ROWS, Problem, WeightsTask, chunk_costs
from emtau_dask.errors import InvalidDataError
from emtau_dask.execution import Pass
from emtau_dask.io.sources import ChunkRange
from emtau_dask.mixture.numerics import Floats, Ints
from emtau_dask.rows import ChunkLoader, ChunkTask, LoadedChunk, Samples

MOST_ROWS = 2.0**53
"""Rows beyond which float64 no longer counts each of them."""


@dataclass(frozen=True, eq=False)
class CountedRows:
    """Rows (m, d) in their order, and how many rows each of them stands for (m,), None where that is 1."""

    rows: Floats
    counts: Floats | None


def held_counts(samples: Samples, chunk_range: ChunkRange, positions: Ints, counts: Floats | None) -> Floats:
    """Return how many of the equal rows that each of ``positions`` stands for are in a sample of one share.

    Each of them is in it by itself, so that of s rows there are k with the probability ``Binomial(k; s,
    share)``. The k of a row is where its number in [0, 1) lies in that distribution, from above.
    """
    (share,) = samples.shares
    numbers = samples.numbers(chunk_range, positions)
    held = (numbers < share).astype(np.float64)
    if counts is not None:
        several = counts > 1
        held[several] = binom.isf(numbers[several], counts[several], share)
    return held


def _counted(chunk_range: ChunkRange, counts: NDArray[Any]) -> float | str:
    whole = counts == np.rint(counts)
    if not whole.all():
        place = int(np.argmin(whole))
        return f"{counts[place]} at row {chunk_range.start + place} (chunk {chunk_range.chunk})"
    return float(counts.sum(dtype=np.float64))


def _both(a: float | str, b: float | str) -> float | str:
    if isinstance(a, str):
        return a
    return b if isinstance(b, str) else a + b


def count_rows(problem: Problem) -> int:
    """Return N, the rows that all rows stand for; reads the weights, where there are any.

    Raises
    ------
    InvalidDataError
        A weight is no whole number, or they are too many.
    """
    weights = problem.weights
    if weights is None:
        return problem.rows.shape[0]
    counting = Pass(
        WeightsTask(weights.reader(), _counted),
        partial(reduce, _both),
        [weights],
        problem.chunk_ranges,
        name="count",
        stage="counting rows",
        costs=chunk_costs(weights),
    )
    context, ranges = problem.context, problem.chunk_ranges
    found = context.contents.run(problem.executor, counting, context.observer, ranges)
    assert found is not None
    if isinstance(found, str):
        raise InvalidDataError(
            f"sample_weight is {found}. In a selection a weight says how many equal rows a row stands for: "
            "give whole numbers, or none."
        )
    if found > MOST_ROWS:
        raise InvalidDataError(
            f"sample_weight adds up to {found:.3g} rows; at most {MOST_ROWS:.0f} can be counted. Divide all "
            "weights by a common factor."
        )
    return int(found)


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows of the sample in some chunks, in their order, from the chunk that is first."""

    first: int
    rows: Floats
    counts: Floats


@dataclass(frozen=True, eq=False)
class _SampleTask(ChunkTask[list[_Part]]):
    loader: ChunkLoader
    samples: Samples

    def compute(self, item: ChunkRange, found: LoadedChunk) -> list[_Part]:
        positions = found.positions()
        counts = held_counts(self.samples, item, positions, found.weights_at(positions))
        inside = counts > 0
        positions = positions[inside]
        rows = np.empty((len(positions), found.rows.shape[1]))
        for where, block in found.blocks(positions, SCAN_ROWS):
            rows[where] = block
        return [_Part(item.chunk, rows, counts[inside])]


def draw_sample(problem: Problem, samples: Samples) -> CountedRows:
    """Return the rows of a sample of one share, from one pass over all rows.

    Raises
    ------
    InvalidDataError
        A row of it holds NaN or infinity.
    """
    parts = problem.map_reduce(
        _SampleTask(problem.loader, samples),
        partial(reduce, list.__add__),
        name="sample",
        stage="sample rows",
    )
    assert parts is not None
    parts = sorted(parts, key=lambda part: part.first)
    counts = None if problem.weights is None else np.concatenate([part.counts for part in parts])
    return CountedRows(np.concatenate([part.rows for part in parts]), counts)
