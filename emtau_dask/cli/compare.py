"""`emtau compare`: several algorithms on the same data from the same start, and tables of their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from emtau_dask.cli.cluster import computing
from emtau_dask.cli.config import (
    ComparedSettings,
    KMeansSettings,
    PublishedFigures,
    RunConfig,
    estimator_of,
    policy_of,
)
from emtau_dask.cli.inputs import open_inputs, starting_responsibilities
from emtau_dask.cli.verbosity import watching
from emtau_dask.compare import Comparison, ComparisonLine, classification_error, compare, confusion
from emtau_dask.em.history import FitObserver
from emtau_dask.errors import ConfigError
from emtau_dask.policies.policy import WeightedPolicy
from emtau_dask.process import threads_side_by_side
from emtau_dask.settings import RAISE

PUBLISHED = "  published"
_STOPPED = {"no-active-rows": "empty", "max-iter": "max_iter"}


def run_compare(config: RunConfig, console: Console) -> None:
    """Print tables of the algorithms that ``algorithm.compare`` lists."""
    with watching() as observer, computing(config.cluster, observer), threads_side_by_side():
        comparison = comparison_of(config, observer)
    published = [settings.published for settings in config.algorithm.compare]
    print_comparison(comparison, published, console)


def comparison_of(config: RunConfig, observer: FitObserver) -> Comparison:
    """Return the evaluated fits of a config; see `emtau_dask.compare.compare`."""
    listed = config.algorithm.compare
    _check_comparable(config)
    inputs = open_inputs(config, overwrite=False, observer=observer)
    return compare(
        estimator_of(config),
        [
            (_name(settings), None if isinstance(settings, KMeansSettings) else policy_of(settings))
            for settings in listed
        ],
        inputs.rows,
        sample_weight=inputs.weights,
        labels=inputs.labels,
        responsibilities_init=starting_responsibilities(config, inputs.rows.shape[0]),
        observer=observer,
    )


def _name(settings: ComparedSettings) -> str:
    values = settings.model_dump(exclude={"name", "published"}).values()
    return f"{settings.name}({', '.join(map(str, values))})" if values else settings.name


def _check_comparable(config: RunConfig) -> None:
    """Raise `ConfigError` for missing values, and for algorithms without responsibilities of every row."""
    if config.model.missing != RAISE:
        raise ConfigError(
            f"model.missing is {config.model.missing!r}, but compare needs complete rows: only the algorithm "
            "em fits incomplete ones. Set model.missing to 'raise', and remove such rows."
        )
    for settings in config.algorithm.compare:
        if not isinstance(settings, KMeansSettings) and isinstance(policy_of(settings), WeightedPolicy):
            raise ConfigError(
                f"algorithm.compare lists {settings.name!r}: it samples the active rows, so inactive rows "
                "have no responsibilities to compare. Remove it."
            )


def print_comparison(
    comparison: Comparison, published: Sequence[PublishedFigures | None], console: Console
) -> None:
    """Print tables of the algorithms' iterations and errors, then confusion tables if labels are known.

    ``published`` are the figures to print below each line.
    """
    console.print(_iterations_table(comparison, published))
    console.print(_errors_table(comparison, published))
    if all(line.fit.parameters is None or line.fit.parameters.n_features == 1 for line in comparison.lines):
        console.print(_parameters_table(comparison, published))
    if comparison.classes is not None:
        console.print("\nRows by class of their component (its most frequent label) and known label, held:\n")
        tables = [_confusion_table(line, comparison.classes) for line in comparison.lines]
        console.print(Columns(tables, padding=(1, 3)))


def _iterations_table(comparison: Comparison, published: Sequence[PublishedFigures | None]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("algorithm", overflow="fold")
    for heading in ("iter-\nations", "passes", "seconds", "stopped", "log-likelihood\nper row"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line, figures in zip(comparison.lines, published, strict=True):
        fit = line.fit
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
        if figures is not None:
            cells = _cell(figures.iterations, ","), "", _cell(figures.seconds, ".4g")
            table.add_row(PUBLISHED, *cells, style="dim")
    return table


def _errors_table(comparison: Comparison, published: Sequence[PublishedFigures | None]) -> Table:
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
    for line, figures in zip(comparison.lines, published, strict=True):
        fit, evaluation = line.fit, line.evaluation
        distance = None if fit.parameters is None else evaluation.squared_distance / evaluation.rows
        errors = [classification_error(t) for t in (evaluation.held, evaluation.final)] if labelled else []
        table.add_row(fit.name, *(_cell(value, ".6f") for value in (distance, *errors)))
        if figures is not None:
            published_values = [figures.membership_error, figures.classification_error][: 1 + labelled]
            table.add_row(PUBLISHED, *(_cell(value, ".6f") for value in published_values), style="dim")
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _parameters_table(comparison: Comparison, published: Sequence[PublishedFigures | None]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="parameters, components in order of their means")
    for heading in ("algorithm", "weights", "means", "variances"):
        table.add_column(heading)
    for line, figures in zip(comparison.lines, published, strict=True):
        theta = line.fit.parameters
        if theta is not None:
            order = np.argsort(theta.means[:, 0])
            variances = np.broadcast_to(theta.covariances.reshape(-1), len(order))
            ours = (theta.weights, theta.means[:, 0], variances)
            table.add_row(line.fit.name, *(_numbers(values[order]) for values in ours))
        if figures is not None:
            published_values = (figures.weights, figures.means, figures.variances)
            table.add_row(PUBLISHED, *(_numbers(values or ()) for values in published_values), style="dim")
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
