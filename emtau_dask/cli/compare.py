"""`emtau compare`: several algorithms on the same data from the same start, and tables of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    policy_of,
)
from emtau_dask.cli.inputs import open_inputs, starting_responsibilities
from emtau_dask.compare import (
    Evaluation,
    FinishedFit,
    FitSummary,
    classification_error,
    clustered,
    confusion,
    evaluate,
    fitted,
    known_labels,
)
from emtau_dask.dask_config import read_settings
from emtau_dask.data.opening import as_source
from emtau_dask.em.compiling import worth_compiling
from emtau_dask.em.history import FitObserver
from emtau_dask.em.problem import Context, Problem, first_unusable_row_named, make_problem
from emtau_dask.em.settings import EmSettings, marginalises, tolerances
from emtau_dask.em.starts import (
    STARTS,
    GivenParameters,
    StartRequest,
    start_from_responsibilities,
    starting_parameters,
)
from emtau_dask.errors import ConfigError
from emtau_dask.estimator.inputs import Seeds
from emtau_dask.execution.choice import choose_executor
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.policy import Traced, WeightedPolicy
from emtau_dask.process import threads_side_by_side
from emtau_dask.progress import watching

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


def run_compare(config: RunConfig, console: Console) -> None:
    """Print tables of the algorithms that ``algorithm.compare`` lists; progress goes to standard error.

    Raises
    ------
    EmtauError
        The data or settings cannot be used, or a component collapsed.
    """
    with watching(sys.stderr) as observer, computing(config.cluster, observer), threads_side_by_side():
        comparison = compare(config, observer)
    print_comparison(comparison, console)


def compare(config: RunConfig, observer: FitObserver) -> Comparison:
    """Return the evaluated fits of a config; see `run_compare`."""
    _check_comparable(config)
    inputs = open_inputs(config, overwrite=False, observer=observer)
    model = config.model
    executor, shape = choose_executor(), inputs.rows.shape
    problem = make_problem(
        inputs.rows,
        inputs.weights,
        model.n_components,
        structure_named(model.covariance_type),
        executor,
        Context(observer, read_ahead=read_settings().read_ahead_bytes),
        compiled=worth_compiling(executor.client, shape, model.covariance_type, model.n_components),
    )
    with first_unusable_row_named(problem):
        start = _start(config, problem)
        labels = known_labels(problem, inputs.labels)
        with fitted(problem, start, _em_settings(config, problem, FullEM()), "em") as em:
            pass  # It keeps no row state.
        lines = []
        for settings in config.algorithm.compare:
            with _fit_of(config, problem, start, settings, em) as fit:
                evaluation = evaluate(problem, fit, em.held, labels)
            lines.append(ComparisonLine(fit.summary, evaluation, settings.published))
    return Comparison(tuple(lines), None if labels.source is None else labels.classes)


def _check_comparable(config: RunConfig) -> None:
    """Raise `ConfigError` for rows with missing values, and for rows that hold no responsibilities."""
    if marginalises(config.model.missing):
        raise ConfigError(
            f"model.missing is {config.model.missing!r}, but compare takes complete rows: no algorithm but "
            "em fits incomplete ones. Set model.missing to 'raise', and leave such rows out."
        )
    for settings in config.algorithm.compare:
        if not isinstance(settings, KMeansSettings) and isinstance(policy_of(settings), WeightedPolicy):
            raise ConfigError(
                f"algorithm.compare lists {settings.name!r}: its active rows stand for others, so that no "
                "row holds responsibilities that could be compared. Leave it out."
            )


def _start(config: RunConfig, problem: Problem) -> MixtureParameters:
    given = starting_responsibilities(config, problem.rows.shape[0])
    if given is None:
        seed = Seeds(config.model.random_state).draw()
        statistics = STARTS[config.model.init_params](StartRequest(problem, seed))
    else:
        responsibilities = as_source(given, ndim=2, what="responsibilities_init")
        statistics = start_from_responsibilities(problem, responsibilities)
    return starting_parameters(problem, GivenParameters(), statistics, config.model.reg_covar)


def _em_settings(config: RunConfig, problem: Problem, policy: Any) -> EmSettings:
    p = free_parameters(problem.structure, problem.n_components, problem.n_features)
    tol, gap_tol = tolerances(config.stop.tol, problem.rows.shape[0], p, auto=False)
    return EmSettings(policy, tol, config.stop.max_iter, config.model.reg_covar, gap_tol)


@contextmanager
def _fit_of(
    config: RunConfig,
    problem: Problem,
    start: MixtureParameters,
    settings: ComparedSettings,
    em: FinishedFit,
) -> Iterator[FinishedFit]:
    """Yield the fit of an entry of ``algorithm.compare``; traditional EM is fitted once for all."""
    if isinstance(settings, KMeansSettings):
        yield clustered(problem, Seeds(config.model.random_state).draw())
    elif settings.name == "em":
        yield em
    else:
        values = settings.model_dump(exclude={"name", "published"}).values()
        name = f"{settings.name}({', '.join(map(str, values))})"
        chosen = _em_settings(config, problem, Traced(policy_of(settings)))
        with fitted(problem, start, chosen, name) as fit:
            yield fit


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
