"""Several fits judged in one pass against one another and against labels, and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from emtau_dask.config.schema import PublishedFigures
from emtau_dask.data.chunk import ChunkContents, ChunkLoader, LoadedChunk
from emtau_dask.data.source import ChunkRange, ChunkReader, Source
from emtau_dask.em.compiling import check_compiler
from emtau_dask.em.contents import NotingTask
from emtau_dask.em.problem import SCAN_ROWS, Problem
from emtau_dask.em.task import EStepItem
from emtau_dask.execution.executor import NO_SOURCE, Pass
from emtau_dask.kernels.dispatch import RowKernels, Scorer, scoring_kernels
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.policy import SCORED_AT
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.row_state import SlotState

PUBLISHED = "  published"
_STOPPED = {"no-active-rows": "empty", "max-iter": "max_iter"}


def _scored(kernels: RowKernels, rows: Floats) -> tuple[Floats, Floats]:
    """Return responsibilities (n, K) and log-likelihoods (n,).

    Tiles are not handed back for later blocks: each iteration of a fit has kernels of its own, which would
    keep theirs for as long as the evaluation lasts.
    """
    if kernels.by_tiles:
        check_compiler()
    kernel: Scorer = kernels.made(len(rows))
    responsibilities = np.empty((len(rows), kernels.plan.parameters.n_components))
    log_likelihoods = np.empty(len(rows))
    for begin in range(0, len(rows), kernel.n_rows):
        where = slice(begin, begin + kernel.n_rows)
        _, parts = kernel.score(rows[where], responsibilities=True)
        for found in parts:
            responsibilities[where][found.places] = found.responsibilities.T
            log_likelihoods[where][found.places] = found.log_likelihoods
    return responsibilities, log_likelihoods


def posterior(kernels: RowKernels, rows: Floats) -> Floats:
    """Return the responsibilities (n, K) of rows (n, d); see `scoring_kernels`."""
    return _scored(kernels, rows)[0]


@dataclass(frozen=True, eq=False)
class Held:
    """The responsibilities held by a finished fit: each row has those of the E-step that last scored it.

    Attributes
    ----------
    e_steps : tuple of callable (rows (n, d)) -> (n, K)
        Those of iterations 1, 2, …; k-means has one.
    objects : ObjectStore or None
        The store of the row state, which has the array ``scored_at``. None where the last
        iteration scored every row.
    """

    e_steps: tuple[Callable[[Floats], Floats], ...]
    objects: ObjectStore | None = None

    def scored_at(self, state: SlotState | None, n_rows: int) -> NDArray[Any]:
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
    """How the fit of the algorithm ``name`` went.

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
    """A fit, the responsibilities that it holds, and its last row state by chunk."""

    summary: FitSummary
    held: Held
    states: Mapping[int, SlotState]


@dataclass(frozen=True, eq=False)
class KnownLabels:
    """Labels (N,) in the problem's chunks, and their distinct values, ascending.

    Where no labels are known, ``source`` is None, and ``classes`` has one value without a meaning.
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
class _EvaluationTask(NotingTask[tuple[LoadedChunk, NDArray[Any] | None], Evaluation]):
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

    def compute(self, item: EStepItem, found: tuple[LoadedChunk, NDArray[Any] | None]) -> Evaluation:
        loaded, labels = found
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

    def contents(
        self, item: EStepItem, found: tuple[LoadedChunk, NDArray[Any] | None]
    ) -> tuple[ChunkContents, ...]:
        return found[0].contents()


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
    work = Pass(
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
        beside=source or NO_SOURCE,
    )
    assert evaluation is not None
    return evaluation


@dataclass(frozen=True, eq=False)
class ComparisonLine:
    """One fit of a comparison, evaluated against traditional EM."""

    fit: FitSummary
    evaluation: Evaluation
    published: PublishedFigures | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """The fits in the config's order, and the distinct known labels; None where no labels are known."""

    lines: tuple[ComparisonLine, ...]
    classes: NDArray[Any] | None


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


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print how the algorithms went and what they got, then confusion tables where labels are known."""
    console.print(_courses(comparison))
    console.print(_errors(comparison))
    if all(line.fit.parameters is None or line.fit.parameters.n_features == 1 for line in comparison.lines):
        console.print(_parameters(comparison))
    if comparison.classes is not None:
        console.print("\nRows by class of their component (its most frequent label) and known label, held:\n")
        tables = [_confusion_table(line, comparison.classes) for line in comparison.lines]
        console.print(Columns(tables, padding=(1, 3)))


def _courses(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("algorithm", overflow="fold")
    for heading in ("iter-\nations", "passes", "seconds", "stopped", "log-likelihood\nper row"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in comparison.lines:
        fit, published = line.fit, line.published
        table.add_row(
            fit.name,
            f"{fit.iterations:,}",
            f"{fit.work:.1f}",
            f"{fit.seconds:.2f}",
            _STOPPED.get(fit.stop_reason, fit.stop_reason),
            _cell(
                None if fit.parameters is None else line.evaluation.log_likelihood / line.evaluation.rows,
                ".9f",
            ),
        )
        if published is not None:
            cells = _cell(published.iterations, ","), "", _cell(published.seconds, ".4g")
            table.add_row(PUBLISHED, *cells, style="dim")
    return table


def _errors(comparison: Comparison) -> Table:
    labelled = comparison.classes is not None
    table = Table(
        box=SIMPLE_HEAD,
        caption="membership error: ‖W − W_EM‖²_F / N of the responsibilities held at the end\n"
        "classification error: of the held responsibilities, and of the final posterior",
    )
    table.add_column("algorithm", overflow="fold")
    headings = ["classification error\nheld", "\nfinal"] if labelled else []
    for heading in ["membership error", *headings]:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in comparison.lines:
        fit, evaluation, published = line.fit, line.evaluation, line.published
        distance = None if fit.parameters is None else evaluation.squared_distance / evaluation.rows
        errors = [classification_error(t) for t in (evaluation.held, evaluation.final)] if labelled else []
        table.add_row(fit.name, *(_cell(value, ".6f") for value in (distance, *errors)))
        if published is not None:
            theirs = [published.membership_error, published.classification_error][: 1 + labelled]
            table.add_row(PUBLISHED, *(_cell(value, ".6f") for value in theirs), style="dim")
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _parameters(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, title="parameters, components in order of their means")
    for heading in ("algorithm", "weights", "means", "variances"):
        table.add_column(heading)
    for line in comparison.lines:
        theta = line.fit.parameters
        if theta is not None:
            order = np.argsort(theta.means[:, 0])
            variances = np.broadcast_to(theta.covariances.reshape(-1), len(order))
            ours = (theta.weights, theta.means[:, 0], variances)
            table.add_row(line.fit.name, *(_numbers(values[order]) for values in ours))
        figures = line.published
        if figures is not None:
            theirs = (figures.weights, figures.means, figures.variances)
            table.add_row(PUBLISHED, *(_numbers(values or ()) for values in theirs), style="dim")
    return table


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _confusion_table(line: ComparisonLine, classes: NDArray[Any]) -> Table:
    counts = confusion(line.evaluation.held)
    name = line.fit.name
    table = Table(box=SIMPLE_HEAD, title=name, min_width=len(name) + 2, padding=(0, 0, 0, 1), show_edge=False)
    for heading in ("", *map(str, classes)):
        table.add_column(heading, justify="right", overflow="fold")
    for label, row in zip(classes, counts, strict=True):
        if row.any():
            table.add_row(f"{label}", *(f"{count:,}" for count in row))
    return table
