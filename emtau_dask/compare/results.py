"""The results of a comparison, and their tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from emtau_dask.compare.evaluate import Evaluation, FitSummary
from emtau_dask.config import PublishedFigures
from emtau_dask.mixture.numerics import Ints

PUBLISHED = "  published"
_STOPPED = {"no-active-rows": "empty", "max-iter": "max_iter"}


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
