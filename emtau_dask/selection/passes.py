"""One pass for the sample, one for the scores of all candidates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from emtau_dask.checkpoint.fingerprints import fingerprint, sampled_contents
from emtau_dask.data.chunk import ChunkLoader, LoadedChunk
from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import ChunkRange, chunk_ranges
from emtau_dask.em.contents import ChunkTask, Contents
from emtau_dask.em.fit import FitSources, open_context
from emtau_dask.em.history import FitObserver
from emtau_dask.em.predict import ENTROPIES, LOG_LIKELIHOODS, kernels_to_score, score_chunk
from emtau_dask.em.problem import (
    SCAN_ROWS,
    Problem,
    WeightsTask,
    chunk_costs,
    first_unusable_row_named,
    make_problem,
)
from emtau_dask.errors import InvalidDataError
from emtau_dask.estimator.fitting import is_automatic
from emtau_dask.estimator.inputs import Seeds
from emtau_dask.execution.executor import Executor, Pass
from emtau_dask.execution.workers import prove_access
from emtau_dask.kernels.dispatch import RowKernels
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.policies.registry import as_policy, describe_policy
from emtau_dask.selection.checkpoint import SampleEntry, SelectionCheckpoint, SelectionEntry, new_id
from emtau_dask.selection.criteria import Candidate, Score, SelectionSettings, sample_share

MOST_ROWS = 2.0**53
"""Rows beyond which float64 no longer counts each of them."""
LOG_LIKELIHOOD, ENTROPY, HELD_OUT = range(3)
"""Columns of the sums of a pass."""
T = TypeVar("T")
_OF_A_FIT: tuple[str, ...] = ("n_components", "covariance_type", "random_state", "verbose", "checkpoint")


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


_OF_A_FIT += ("algorithm", "weights_init", "means_init", "precisions_init", "warm_start")
"""Settings that are not those of the selection, or are stored in another form."""


@dataclass(frozen=True, eq=False)
class SelectionPass:
    """Makes the passes of a selection.

    Attributes
    ----------
    sources : FitSources
        Rows, and weights that say how many rows each stands for.
    contents : Contents
        What they were found to hold.
    executor : Executor
    observer : FitObserver
    checkpoint : SelectionCheckpoint or None
        Which keeps scores.
    samples : Samples
        Of one share: which rows are in the sample.
    n_rows : int
        N: rows, or the sum of their weights.
    fit_seed : int
        Of all fits to the sample, so that a candidate's does not depend on the others.
    least : int
        Rows that the sample must have.
    structure : CovarianceStructure
        Of some candidate; neither the sample nor scores depend on it.
    """

    sources: FitSources
    contents: Contents
    executor: Executor
    observer: FitObserver
    checkpoint: SelectionCheckpoint | None
    samples: Samples
    n_rows: int
    fit_seed: int
    least: int
    structure: CovarianceStructure

    def _passed(self, run: Callable[[Problem], T]) -> T:
        return _passed(self.sources, self.contents, self.structure, self.executor, self.observer, run)

    @cached_property
    def _sample(self) -> CountedRows:
        found = self._passed(lambda problem: draw_sample(problem, self.samples))
        if len(found.rows) < self.least:
            raise InvalidDataError(
                f"n_components goes up to {self.least:,}, but the sample has {len(found.rows):,} of "
                f"{self.sources.rows.shape[0]:,} rows. Lower n_components, or raise sample_rows."
            )
        return found

    def sample(self) -> CountedRows:
        """Return the rows of the sample, which are read once.

        Raises
        ------
        InvalidDataError
            There are fewer than the components of a candidate, or one holds NaN or infinity.
        """
        return self._sample

    def scores(
        self, which: str, mixtures: Mapping[Candidate, MixtureParameters | None]
    ) -> dict[Candidate, Score]:
        """Return the scores of the mixtures that there are, from one pass or from the checkpoint's ``which``.

        Raises
        ------
        InvalidDataError
            A row cannot be used.
        """
        given = {candidate: mixture for candidate, mixture in mixtures.items() if mixture is not None}
        if not given:
            return {}
        by_name = {candidate.name: candidate for candidate in given}
        kept = None if self.checkpoint is None else self.checkpoint.scores(which, list(by_name))
        if kept is None:
            found = self._passed(lambda problem: score_all(problem, self.samples, list(given.values())))
            kept = dict(zip(by_name, found, strict=True))
            if self.checkpoint is not None:
                self.checkpoint.keep_scores(which, kept)
        return {by_name[name]: score for name, score in kept.items()}


def _passed(
    sources: FitSources,
    contents: Contents,
    structure: CovarianceStructure,
    executor: Executor,
    observer: FitObserver,
    run: Callable[[Problem], T],
) -> T:
    with open_context(executor, observer) as opened:
        context = replace(opened, contents=contents)
        problem = make_problem(sources.rows, sources.weights, 1, structure, executor, context, compiled=False)
        with first_unusable_row_named(problem):
            return run(problem)


def begin_passes(
    settings: SelectionSettings,
    sources: FitSources,
    checkpoint: SelectionCheckpoint | None,
    executor: Executor,
    observer: FitObserver,
) -> SelectionPass:
    """Return what makes the passes; the selection of a checkpoint goes on with its seeds.

    Raises
    ------
    CheckpointError
        Something else is there, it cannot be written, or it is of other data or settings.
    InvalidDataError
        The weights cannot be used.
    """
    structure = structure_named(settings.candidates[0].covariance_type)
    contents = Contents()
    n_rows = _passed(sources, contents, structure, executor, observer, count_rows)
    n_features = sources.rows.shape[1]
    most_parameters = max(candidate.n_parameters(n_features) for candidate in settings.candidates)
    share = sample_share(n_rows, n_features, most_parameters, settings.sample_rows)
    state = settings.template.random_state
    seeds = Seeds(state)
    sample_seed, fit_seed = seeds.draw(), seeds.draw()
    if checkpoint is not None:
        checkpoint.prepare()
        # The fits say in what workers differ.
        prove_access(executor.client, checkpoint.objects, sources.named())
        named = sources.named()
        found = [one for name in named for one in sampled_contents(named[name], name, executor, observer)]
        entries = {name: fingerprint(source) for name, source in named.items()}
        entry = checkpoint.begin(
            SelectionEntry(
                id=new_id(),
                candidates=tuple((each.n_components, each.covariance_type) for each in settings.candidates),
                settings=_stored(settings),
                random_state=int(state) if isinstance(state, Integral) else None,
                seeds=(sample_seed, fit_seed),
                share=share,
                data=entries["X"],
                sample_weight=entries.get("sample_weight"),
                samples=tuple(
                    SampleEntry(one.source, one.made_on, one.chunk, one.digest.hex()) for one in found
                ),
            )
        )
        contents = entry.contents()
        contents.compare(found, chunk_ranges(sources.rows.chunk_rows))
        sample_seed, fit_seed = entry.seeds
    samples = Samples(sample_seed, (share,))
    least = settings.largest.n_components
    return SelectionPass(
        sources, contents, executor, observer, checkpoint, samples, n_rows, fit_seed, least, structure
    )


def _stored(settings: SelectionSettings) -> dict[str, Any]:
    """Return the settings of the fits as JSON has them; raises `ConfigError` where it cannot."""
    template = settings.template
    values = {name: value for name, value in template.get_params(deep=False).items() if name not in _OF_A_FIT}
    automatic = is_automatic(template.algorithm)
    values["algorithm"] = "auto" if automatic else list(describe_policy(as_policy(template.algorithm)))
    plain: dict[str, Any] = json.loads(json.dumps(values, default=float))
    return plain
