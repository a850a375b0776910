"""One pass over all rows that scores several mixtures: each chunk is read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np

from emtau_dask.em import (
    ENTROPIES,
    LOG_LIKELIHOODS,
    Problem,
    first_unusable_row_named,
    kernels_to_score,
    score_chunk,
)
from emtau_dask.io.sources import ChunkRange
from emtau_dask.mixture.compiled import RowKernels
from emtau_dask.mixture.model import MixtureParameters, free_parameters
from emtau_dask.mixture.numerics import Floats
from emtau_dask.rows import ChunkLoader, ChunkTask, LoadedChunk, Samples
from emtau_dask.selection.counts import held_counts
from emtau_dask.selection.criteria import Score

LOG_LIKELIHOOD, ENTROPY, HELD_OUT = range(3)
"""Columns of the sums of a pass."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over rows: an array (mixtures, 3) of nats, and how many rows were there and not in the sample."""

    values: Floats
    rows: float
    held_out_rows: float


def _added(a: Sums, b: Sums) -> Sums:
    return Sums(a.values + b.values, a.rows + b.rows, a.held_out_rows + b.held_out_rows)


@dataclass(frozen=True, eq=False)
class _ScoreTask(ChunkTask[Sums]):
    """Scores a chunk with one mixture after another, a block of rows at a time."""

    loader: ChunkLoader
    samples: Samples
    kernels: tuple[RowKernels, ...]

    def compute(self, item: ChunkRange, found: LoadedChunk) -> Sums:
        positions = found.positions()
        weights = found.weights_at(positions)
        counts = np.ones(len(positions)) if weights is None else weights
        held_out = counts - held_counts(self.samples, item, positions, weights)
        values = np.zeros((len(self.kernels), 3))
        for kernels, row in zip(self.kernels, values, strict=True):
            log_likelihoods, entropies = score_chunk(found, kernels, [LOG_LIKELIHOODS, ENTROPIES])
            row[LOG_LIKELIHOOD] = (log_likelihoods * counts).sum()
            row[ENTROPY] = (entropies * counts).sum()
            row[HELD_OUT] = log_likelihoods @ held_out
        return Sums(values, counts.sum(), held_out.sum())


def score_all(problem: Problem, samples: Samples, mixtures: Sequence[MixtureParameters]) -> list[Score]:
    """Return the score of each mixture on all rows, in one pass.

    Parameters
    ----------
    problem : Problem
        Its weights say how many rows each row stands for.
    samples : Samples
        Of one share: which rows are not held out.
    mixtures : sequence of MixtureParameters

    Raises
    ------
    InvalidDataError
        A row holds NaN or infinity, or is beyond the reach of every component.
    """
    client, n_rows = problem.executor.client, problem.rows.shape[0] * len(mixtures)
    kernels = tuple(kernels_to_score(client, mixture, n_rows) for mixture in mixtures)
    task = _ScoreTask(problem.loader, samples, kernels)
    costs = {chunk: cost * len(mixtures) for chunk, cost in problem.costs.items()}
    with first_unusable_row_named(problem):
        sums = problem.map_reduce(
            task,
            partial(reduce, _added),
            name="score",
            stage=f"scoring {len(mixtures)} mixtures",
            costs=costs,
        )
    assert sums is not None
    return [
        Score(
            float(values[LOG_LIKELIHOOD]),
            float(values[ENTROPY]),
            float(values[HELD_OUT]),
            int(sums.rows),
            int(sums.held_out_rows),
            free_parameters(mixture.structure, mixture.n_components, mixture.n_features),
        )
        for values, mixture in zip(sums.values, mixtures, strict=True)
    ]
