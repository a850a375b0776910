"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from emtau_dask.compare.run import Comparison, Judged
    from emtau_dask.config import PublishedFigures
    from emtau_dask.mixture.model import MixtureParameters

_STOPPED = {"no-active-rows": "empty", "max-iter": "max_iter"}


def classification_error(table: NDArray[np.intp]) -> float:
    """Return the fraction of rows whose label is not the most frequent one of their component.

    Parameters
    ----------
    table : ndarray of shape (K, number of classes)
        Rows by component and known label.
    """
    return 1.0 - float(table.max(axis=1).sum()) / float(table.sum())


def confusion(table: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return rows by class that a component stands for (its most frequent label) and known label.

    Components of one class are added up, as the paper's tables have it; shape
    (number of classes, number of classes).
    """
    result = np.zeros((table.shape[1], table.shape[1]), dtype=np.intp)
    np.add.at(result, table.argmax(axis=1), table)
    return result


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table of all algorithms, then a confusion table for each where labels are known."""
    console.print(_overview(comparison))
    if all(line.parameters is None or line.parameters.n_features == 1 for line in comparison.lines):
        console.print(_parameters(comparison))
    if comparison.labelled:
        console.print("\nRows by class of their component (its most frequent label) and known label, held:\n")
        tables = [_confusion_table(line, comparison.classes) for line in comparison.lines]
        console.print(Columns(tables, padding=(1, 3)))


def _overview(comparison: Comparison) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        caption="membership error: ‖W − W_EM‖²_F / N of the responsibilities held at the end\n"
        "classification error: of the held responsibilities, and of the final posterior",
    )
    table.add_column("algorithm", no_wrap=True)
    headings = ["iter-\nations", "passes", "seconds", "stopped", "membership\nerror"]
    headings += ["class. error\nheld", "\nfinal"] if comparison.labelled else []
    for heading in [*headings, "log-likelihood\nper row"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in comparison.lines:
        table.add_row(line.name, *_cells(line, comparison.labelled))
        if line.published is not None:
            table.add_row("  published", *_published_cells(line.published, comparison.labelled), style="dim")
    return table


def _cells(line: Judged, labelled: bool) -> list[str]:
    verdict = line.verdict
    is_mixture = line.parameters is not None
    errors = [f"{classification_error(t):.6f}" for t in (verdict.held, verdict.final)]
    return [
        f"{line.iterations:,}",
        f"{line.work:.1f}",
        f"{line.seconds:.2f}",
        _STOPPED.get(line.stop_reason, line.stop_reason),
        f"{verdict.squared_distance / verdict.rows:.6f}" if is_mixture else "",
        *(errors if labelled else []),
        f"{verdict.log_likelihood / verdict.rows:.9f}" if is_mixture else "",
    ]


def _published_cells(figures: PublishedFigures, labelled: bool) -> list[str]:
    return [
        _figure(figures.iterations, "{:,}"),
        "",
        _figure(figures.seconds, "{:.4g}"),
        "",
        _figure(figures.membership_error, "{:.6f}"),
        *([_figure(figures.classification_error, "{:.6f}"), ""] if labelled else []),
        "",
    ]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _parameters(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, title="parameters, components in order of their means")
    for heading in ("algorithm", "weights", "means", "variances"):
        table.add_column(heading)
    for line in comparison.lines:
        if line.parameters is not None:
            table.add_row(line.name, *_parameter_cells(line.parameters))
        figures = line.published
        if figures is not None:
            theirs = (figures.weights, figures.means, figures.variances)
            table.add_row("  published", *(_numbers(values or ()) for values in theirs), style="dim")
    return table


def _parameter_cells(parameters: MixtureParameters) -> list[str]:
    order = np.argsort(parameters.means[:, 0])
    variances = np.broadcast_to(parameters.covariances.reshape(-1), len(order))
    return [_numbers(values[order]) for values in (parameters.weights, parameters.means[:, 0], variances)]


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _confusion_table(line: Judged, classes: NDArray[Any]) -> Table:
    counts = confusion(line.verdict.held)
    table = Table(box=SIMPLE_HEAD, title=line.name, min_width=len(line.name) + 2)
    table.add_column("", justify="right")
    for known in classes:
        table.add_column(f"{known}", justify="right")
    for label, row in zip(classes, counts, strict=True):
        if row.any():
            table.add_row(f"{label}", *(f"{count:,}" for count in row))
    return table
