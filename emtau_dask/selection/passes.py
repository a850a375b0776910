"""The passes of a selection over all rows: one for the sample, one for the scores of all candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add, or_
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from emtau_dask.data.chunk import ChunkLoader, LoadedChunk
from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import ChunkRange
from emtau_dask.em.predict import ENTROPIES, LOG_LIKELIHOODS, kernels_to_score, score_chunk
from emtau_dask.em.problem import SCAN_ROWS, Problem, WeightsTask, chunk_costs, first_unusable_row_named
from emtau_dask.em.verification import ChunkTask
from emtau_dask.errors import InvalidDataError
from emtau_dask.execution.executor import MapReduce
from emtau_dask.kernels.dispatch import RowKernels
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.selection.criteria import Score

MAX_ROWS = 2.0**53
"""Maximum rows that float64 counts exactly."""


@dataclass(frozen=True, eq=False)
class CountedRows:
    """Rows (m, d) in their order, and the number of equal rows of each, (m,); None if that is 1."""

    rows: Floats
    counts: Floats | None


def sampled_counts(
    samples: Samples, chunk_range: ChunkRange, positions: Ints, counts: Floats | None
) -> Floats:
    """Return how many of the equal rows of each of ``positions`` are in a sample of one share.

    Each of them is drawn by itself, so k of s rows are in the sample with the probability ``Binomial(k; s,
    share)``. The k of a row is the upper quantile of that distribution at its number in [0, 1).
    """
    (share,) = samples.shares
    numbers = samples.numbers(chunk_range, positions)
    sampled = (numbers < share).astype(np.float64)
    if counts is not None:
        several = counts > 1
        sampled[several] = binom.isf(numbers[several], counts[several], share)
    return sampled


def _fractions(chunk_range: ChunkRange, counts: NDArray[Any]) -> dict[int, str]:
    """Return the first weight of a chunk that is not a whole number, by its row."""
    whole = counts == np.rint(counts)
    place = int(np.argmin(whole))
    row = chunk_range.start + place
    return {} if whole.all() else {row: f"{counts[place]} at row {row} (chunk {chunk_range.chunk})"}


def count_rows(problem: Problem) -> int:
    """Return N, the sum of the weights, or the number of rows that take part.

    Raises `InvalidDataError` if a weight is not a whole number, or N is too large.
    """
    weights, context = problem.weights, problem.context
    if weights is not None:
        work = MapReduce(
            WeightsTask(weights.reader(), _fractions),
            partial(reduce, or_),
            [weights],
            problem.chunk_ranges,
            name="count",
            stage="counting rows",
            costs=chunk_costs(weights),
        )
        fractions = context.verifier.run(problem.executor, work, context.observer, problem.chunk_ranges)
        if fractions:
            raise InvalidDataError(
                f"sample_weight is {fractions[min(fractions)]}. In a selection a weight is the number of "
                "equal rows: give whole numbers, or none."
            )
    if problem.total_weight > MAX_ROWS:
        raise InvalidDataError(
            f"sample_weight adds up to {problem.total_weight:.3g} rows; at most {MAX_ROWS:.0f} can be "
            "counted. Divide all weights by a common factor."
        )
    return int(problem.total_weight)


@dataclass(frozen=True, eq=False)
class _SampleTask(ChunkTask[list[tuple[int, Floats, Floats]]]):
    """Returns the number of a chunk, its rows in the sample, and their counts."""

    loader: ChunkLoader
    samples: Samples

    def compute(self, item: ChunkRange, loaded: LoadedChunk) -> list[tuple[int, Floats, Floats]]:
        positions = loaded.positions()
        counts = sampled_counts(self.samples, item, positions, loaded.weights_at(positions))
        inside = counts > 0
        positions = positions[inside]
        rows = np.empty((len(positions), loaded.rows.shape[1]))
        for where, block in loaded.blocks(positions, SCAN_ROWS):
            rows[where] = block
        return [(item.chunk, rows, counts[inside])]


def draw_sample(problem: Problem, samples: Samples, least: int) -> CountedRows:
    """Return the rows of a sample of one share, from one pass over all rows.

    Raises `InvalidDataError` if one has NaN or infinity, or there are fewer than ``least``.
    """
    with first_unusable_row_named(problem):
        parts = problem.map_reduce(
            _SampleTask(problem.loader, samples), partial(reduce, add), name="sample", stage="sample rows"
        )
    assert parts is not None
    _, rows, counts = zip(*sorted(parts, key=lambda part: part[0]), strict=True)
    sample = CountedRows(np.concatenate(rows), None if problem.weights is None else np.concatenate(counts))
    if len(sample.rows) < least:
        raise InvalidDataError(
            f"n_components goes up to {least:,}, but the sample has {len(sample.rows):,} of "
            f"{problem.rows.shape[0]:,} rows. Lower n_components, or raise sample_rows."
        )
    return sample


@dataclass(frozen=True, eq=False)
class _ScoreTask(ChunkTask[Floats]):
    """Returns the sums of a `Score` of a chunk for one mixture after another: an array (mixtures, 5)."""

    loader: ChunkLoader
    samples: Samples
    kernels: tuple[RowKernels, ...]

    def compute(self, item: ChunkRange, loaded: LoadedChunk) -> Floats:
        positions = loaded.positions()
        weights = loaded.weights_at(positions)
        counts = np.ones(len(positions)) if weights is None else weights
        held_out = counts - sampled_counts(self.samples, item, positions, weights)
        sums = np.empty((len(self.kernels), 5))
        for kernels, row in zip(self.kernels, sums, strict=True):
            logs, entropies = score_chunk(loaded, kernels, [LOG_LIKELIHOODS, ENTROPIES])
            row[:] = (
                (logs * counts).sum(),
                (entropies * counts).sum(),
                logs @ held_out,
                counts.sum(),
                held_out.sum(),
            )
        return sums


def score_all(problem: Problem, samples: Samples, mixtures: Sequence[MixtureParameters]) -> list[Score]:
    """Return the score of each mixture on all rows, in one pass; rows of the sample are not held out.

    Raises `InvalidDataError` if a row has NaN or infinity, or is too far from every component.
    """
    client, n_rows = problem.executor.client, problem.rows.shape[0] * len(mixtures)
    kernels = tuple(
        kernels_to_score(client, mixture, n_rows, missing=problem.missing) for mixture in mixtures
    )
    with first_unusable_row_named(problem):
        sums = problem.map_reduce(
            _ScoreTask(problem.loader, samples, kernels),
            partial(reduce, add),
            name="score",
            stage=f"scoring {len(mixtures)} mixtures",
            costs={chunk: cost * len(mixtures) for chunk, cost in problem.costs.items()},
        )
    assert sums is not None
    return [
        Score(
            float(log_likelihood),
            float(entropy),
            float(held_out),
            int(rows),
            int(held_out_rows),
            free_parameters(mixture.structure, mixture.n_components, mixture.n_features),
        )
        for (log_likelihood, entropy, held_out, rows, held_out_rows), mixture in zip(
            sums, mixtures, strict=True
        )
    ]
