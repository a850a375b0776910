"""Comparison of several fits with each other and with known labels, in one pass each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.dask_config import read_settings
from emtau_dask.data.chunk import ChunkDigest, ChunkLoader, LoadedChunk
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import ChunkRange, ChunkReader, Source
from emtau_dask.em.assignment import NearestCentre
from emtau_dask.em.compiling import check_compiler, worth_compiling
from emtau_dask.em.history import FitObserver
from emtau_dask.em.loop import iterate
from emtau_dask.em.problem import SCAN_ROWS, Context, Problem, first_unusable_row_named, make_problem
from emtau_dask.em.settings import EmSettings, tolerances
from emtau_dask.em.starts import (
    STARTS,
    GivenParameters,
    StartRequest,
    StartRows,
    lloyd,
    start_from_responsibilities,
    starting_parameters,
)
from emtau_dask.em.state import RunState
from emtau_dask.em.state_store import row_fields, temporary_state_store
from emtau_dask.em.task import EStepItem
from emtau_dask.em.verification import DigestingTask
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import Seeds
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import NO_SOURCE, MapReduce
from emtau_dask.kernels.dispatch import RowKernels, Scorer, scoring_kernels
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.policy import SCORED_AT, ActivityPolicy, Traced
from emtau_dask.settings import Settings
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.row_state import RowStateRef


def _scored(kernels: RowKernels, rows: Floats) -> tuple[Floats, Floats]:
    """Return responsibilities (n, K) and log-likelihoods (n,).

    Tiles are not returned for later blocks: each iteration of a fit has kernels of its own, which would keep
    them until the evaluation ends.
    """
    if kernels.by_tiles:
        check_compiler()
    kernel: Scorer = kernels.acquire(len(rows))
    responsibilities = np.empty((len(rows), kernels.plan.parameters.n_components))
    log_likelihoods = np.empty(len(rows))
    for begin in range(0, len(rows), kernel.n_rows):
        where = slice(begin, begin + kernel.n_rows)
        _, parts = kernel.score(rows[where], responsibilities=True)
        for part in parts:
            responsibilities[where][part.places] = part.responsibilities.T
            log_likelihoods[where][part.places] = part.log_likelihoods
    return responsibilities, log_likelihoods


def posterior(kernels: RowKernels, rows: Floats) -> Floats:
    """Return the responsibilities (n, K) of rows (n, d); see `scoring_kernels`."""
    return _scored(kernels, rows)[0]


@dataclass(frozen=True, eq=False)
class Held:
    """The held responsibilities of a finished fit: each row has those of the E-step that last scored it.

    Attributes
    ----------
    e_steps : tuple of callable (rows (n, d)) -> (n, K)
        Those of iterations 1, 2, …; k-means has one.
    objects : ObjectStore or None
        The store of the row state, which has the array ``scored_at``. None if the last
        iteration scored every row.
    """

    e_steps: tuple[Callable[[Floats], Floats], ...]
    objects: ObjectStore | None = None

    def scored_at(self, state: RowStateRef | None, n_rows: int) -> NDArray[Any]:
        """Return the iteration that last scored each row of a chunk; without row state, the last one."""
        if self.objects is None or state is None:
            return np.full(n_rows, len(self.e_steps))
        return state.read(self.objects, n_rows)[SCORED_AT]

    def responsibilities(self, rows: Floats, scored_at: NDArray[Any], n_components: int) -> Floats:
        """Return (n, K) for a block of rows."""
        result = np.empty((len(rows), n_components))
        for iteration in np.unique(scored_at):
            members = scored_at == iteration
            result[members] = self.e_steps[int(iteration) - 1](rows[members])
        return result


@dataclass(frozen=True, eq=False)
class FitSummary:
    """Figures of the fit of the algorithm ``name``.

    ``work`` is in passes over the data, ``seconds`` are from the common start. ``parameters`` are
    the last ones; None for k-means, whose final posterior is the held one.
    """

    name: str
    iterations: int
    work: float
    seconds: float
    stop_reason: str
    parameters: MixtureParameters | None


@dataclass(frozen=True, eq=False)
class FinishedFit:
    """A fit, its held responsibilities, and its last row state by chunk."""

    summary: FitSummary
    held: Held
    states: Mapping[int, RowStateRef]


@dataclass(frozen=True, eq=False)
class KnownLabels:
    """Labels (N,) in the problem's chunks, and their distinct values, ascending.

    Without known labels, ``source`` is None, and ``classes`` has one value without a meaning.
    """

    source: Source | None
    classes: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Sums over rows; all are additive over chunks.

    Attributes
    ----------
    rows : int
    squared_distance : float
        ``‖W − W_reference‖²_F`` of the held responsibilities.
    held, final : ndarray of int, shape (K, number of classes)
        Rows by component (largest held responsibility; largest final posterior)
        and known label.
    log_likelihood : float
        Under the final parameters, nats.
    """

    rows: int
    squared_distance: float
    held: Ints
    final: Ints
    log_likelihood: float

    def plus(self, other: Evaluation) -> Evaluation:
        """Return the sums over both parts."""
        return Evaluation(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, eq=False)
class _EvaluationTask(DigestingTask[tuple[LoadedChunk, NDArray[Any] | None], Evaluation]):
    loader: ChunkLoader
    n_components: int
    labels: ChunkReader | None
    classes: NDArray[Any]
    held: Held
    reference: Held
    final: RowKernels | None

    def read(
        self, item: EStepItem, *blocks: Sequence[NDArray[Any]]
    ) -> tuple[LoadedChunk, NDArray[Any] | None]:
        label_blocks, *chunk_blocks = blocks
        loaded, where = self.loader.load(item.chunk_range, *chunk_blocks), item.chunk_range
        return loaded, None if self.labels is None else self.labels.load(where, label_blocks).values

    def compute(self, item: EStepItem, loaded_labels: tuple[LoadedChunk, NDArray[Any] | None]) -> Evaluation:
        loaded, labels = loaded_labels
        n_rows = len(loaded.rows)
        positions = loaded.positions()
        classes = np.zeros(n_rows, dtype=np.intp)
        if labels is not None:
            classes = np.searchsorted(self.classes, labels)
        held_at = self.held.scored_at(item.state, n_rows)
        reference_at = self.reference.scored_at(None, n_rows)
        distances, likelihoods = [], []
        held_table, final_table = np.zeros((2, self.n_components, len(self.classes)), dtype=np.intp)
        for where, rows in loaded.blocks(positions, SCAN_ROWS):
            at = positions[where]
            held = self.held.responsibilities(rows, held_at[at], self.n_components)
            reference = self.reference.responsibilities(rows, reference_at[at], self.n_components)
            final = held
            if self.final is not None:
                final, log_likelihoods = _scored(self.final, rows)
                likelihoods.append(float(log_likelihoods.sum()))
            distances.append(float(((held - reference) ** 2).sum()))
            np.add.at(held_table, (held.argmax(axis=1), classes[at]), 1)
            np.add.at(final_table, (final.argmax(axis=1), classes[at]), 1)
        return Evaluation(
            len(positions), math.fsum(distances), held_table, final_table, math.fsum(likelihoods)
        )

    def digests(
        self, item: EStepItem, loaded_labels: tuple[LoadedChunk, NDArray[Any] | None]
    ) -> tuple[ChunkDigest, ...]:
        return loaded_labels[0].digests()


@dataclass(frozen=True)
class _DistinctTask:
    reader: ChunkReader

    def __call__(self, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.unique(self.reader.load(chunk_range, blocks).values)


def known_labels(problem: Problem, labels: Source | None) -> KnownLabels:
    """Return labels (N,) in the problem's chunks, with their distinct values: one pass over them."""
    if labels is None:
        return KnownLabels(None, np.zeros(1))
    aligned = labels.aligned(problem.rows.chunk_rows)
    work = MapReduce(
        _DistinctTask(aligned.reader()),
        partial(reduce, np.union1d),
        [aligned],
        problem.chunk_ranges,
        name="labels",
        stage="labels",
        costs=problem.costs,
    )
    classes: NDArray[Any] | None = problem.executor.map_reduce(work, problem.context.observer)
    assert classes is not None
    return KnownLabels(aligned, classes)


def evaluate(problem: Problem, fit: FinishedFit, reference: Held, labels: KnownLabels) -> Evaluation:
    """Return the sums that a comparison needs, in one pass over the rows.

    The row state of ``fit`` must still exist. ``reference`` has the responsibilities of traditional
    EM, which keeps no row state.
    """
    source, parameters = labels.source, fit.summary.parameters
    task = _EvaluationTask(
        problem.loader,
        problem.n_components,
        None if source is None else source.reader(),
        labels.classes,
        fit.held,
        reference,
        None if parameters is None else scoring_kernels(parameters, compiled=problem.compiled),
    )
    ranges = problem.chunk_ranges.items()
    evaluation: Evaluation | None = problem.map_reduce(
        task,
        partial(reduce, Evaluation.plus),
        name="evaluate",
        stage=f"evaluating {fit.summary.name}",
        items={chunk: EStepItem(chunk_range, fit.states.get(chunk)) for chunk, chunk_range in ranges},
        extra=source or NO_SOURCE,
    )
    assert evaluation is not None
    return evaluation


@dataclass(frozen=True, eq=False)
class ComparisonLine:
    """One fit of a comparison, evaluated against traditional EM."""

    fit: FitSummary
    evaluation: Evaluation


@dataclass(frozen=True, eq=False)
class Comparison:
    """The fits in the order of their algorithms, and the distinct known labels, None without labels."""

    lines: tuple[ComparisonLine, ...]
    classes: NDArray[Any] | None


def compare(
    estimator: GaussianMixture,
    algorithms: Sequence[tuple[str, ActivityPolicy | None]],
    rows: Source,
    *,
    sample_weight: Source | None,
    labels: Source | None,
    responsibilities_init: NDArray[np.float64] | None,
    observer: FitObserver,
) -> Comparison:
    """Return the fits of several algorithms from one start, each evaluated against traditional EM.

    Parameters
    ----------
    estimator : GaussianMixture
        Gives the settings of all fits, except the algorithm.
    algorithms : sequence of (str, policy or None)
        With their names in the result; None is Lloyd's k-means.
    rows : Source
        Of shape (N, d).
    sample_weight, labels : Source or None
        Of shape (N,).
    responsibilities_init : ndarray of shape (N, K), or None
        The start; by default that of ``init_params``.
    observer : FitObserver

    Raises
    ------
    EmtauError
        The data or settings cannot be used, or a component collapsed.
    """
    executor, shape = choose_executor(), rows.shape
    n_components, covariance_type = estimator.n_components, estimator.covariance_type
    problem = make_problem(
        rows,
        sample_weight,
        n_components,
        structure_named(covariance_type),
        executor,
        Context(observer, read_ahead=read_settings().read_ahead_bytes),
        compiled=worth_compiling(executor.client, shape, covariance_type, n_components),
    )
    seed, lines = Seeds(estimator.random_state).draw(), []
    with first_unusable_row_named(problem):
        if responsibilities_init is None:
            statistics = STARTS[estimator.init_params](StartRequest(StartRows(problem), seed))
        else:
            given = as_source(responsibilities_init, ndim=2, what="responsibilities_init")
            statistics = start_from_responsibilities(problem, given)
        start = starting_parameters(problem.structure, GivenParameters(), statistics, estimator.reg_covar)
        known = known_labels(problem, labels)
        with _fitted(problem, start, _settings(estimator, problem, FullEM()), "em") as em:
            pass  # It keeps no row state.
        for name, policy in algorithms:
            fit: AbstractContextManager[FinishedFit]
            if policy is None:
                fit = nullcontext(_clustered(problem, seed))
            elif isinstance(policy, FullEM):
                fit = nullcontext(em)
            else:
                fit = _fitted(problem, start, _settings(estimator, problem, Traced(policy)), name)
            with fit as finished:
                lines.append(ComparisonLine(finished.summary, evaluate(problem, finished, em.held, known)))
    return Comparison(tuple(lines), None if known.source is None else known.classes)


def _settings(estimator: GaussianMixture, problem: Problem, policy: ActivityPolicy) -> EmSettings:
    p = free_parameters(problem.structure, problem.n_components, problem.n_features)
    tol, gap_tol = tolerances(estimator.tol, problem.rows.shape[0], p, auto=False)
    return EmSettings(Settings.of(estimator), policy, tol, gap_tol)


@contextmanager
def _fitted(
    problem: Problem, start: MixtureParameters, settings: EmSettings, name: str
) -> Iterator[FinishedFit]:
    """Yield the fit of a problem from a start; its row state exists until the block ends."""
    fields = row_fields(problem.rows, problem.n_components, settings.policy, settings.max_iter)
    scored_under = [start]
    problem.context.observer.part(name)
    with temporary_state_store(fields, len(problem.rows.chunk_rows)) as state_store:

        def after(state: RunState) -> None:
            state_store.retain(state)
            scored_under.append(state.parameters)

        began = time.perf_counter()
        with state_store.explained_errors():
            state = iterate(problem, RunState(start, None), settings, state_store.writer, after)
        seconds = time.perf_counter() - began
        e_steps = tuple(
            partial(posterior, scoring_kernels(parameters, compiled=problem.compiled))
            for parameters in scored_under[:-1]
        )
        work, stop_reason = state.history.work, state.stop_reason or ""
        summary = FitSummary(name, state.iteration, work, seconds, stop_reason, state.parameters)
        yield FinishedFit(summary, Held(e_steps, state_store.objects), state.row_state)


def _clustered(problem: Problem, seed: int) -> FinishedFit:
    """Return Lloyd's k-means of a problem's rows, from a seed of its own."""
    problem.context.observer.part("kmeans")
    began = time.perf_counter()
    outcome = lloyd(StartRows(problem), seed)
    seconds = time.perf_counter() - began
    stop_reason = "tol" if outcome.converged else "max-iter"
    summary = FitSummary("kmeans", outcome.n_iter, float(outcome.n_iter), seconds, stop_reason, None)
    return FinishedFit(summary, Held((NearestCentre.of(outcome.centres).responsibilities,)), {})


def classification_error(table: Ints) -> float:
    """Return the fraction of rows whose label is not the most frequent one of their component.

    ``table``, of shape (K, number of classes), has the rows by component and known label.
    """
    return 1.0 - float(table.max(axis=1).sum()) / float(table.sum())


def confusion(table: Ints) -> Ints:
    """Return rows by class of their component (its most frequent label) and known label.

    ``table`` is as for `classification_error`. Components of one class are added up, as in the
    paper's tables. The shape is (number of classes, number of classes).
    """
    result = np.zeros((table.shape[1], table.shape[1]), dtype=np.intp)
    np.add.at(result, table.argmax(axis=1), table)
    return result
