"""`emtau compare`: several algorithms on the same data from the same start, evaluated alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from emtau_dask.compare import (
    Comparison,
    ComparisonLine,
    FinishedFit,
    FitSummary,
    Held,
    evaluate,
    known_labels,
    posterior,
    print_comparison,
)
from emtau_dask.config.schema import KMeansSettings, RunConfig, policy_of
from emtau_dask.dask_config import read_settings
from emtau_dask.data.opening import as_source
from emtau_dask.em.assignment import NearestCentre
from emtau_dask.em.compiling import worth_compiling
from emtau_dask.em.history import FitObserver
from emtau_dask.em.journal import row_fields, temporary_journal
from emtau_dask.em.loop import iterate
from emtau_dask.em.problem import Context, Problem, first_unusable_row_named, make_problem
from emtau_dask.em.settings import EmSettings, marginalises, tolerances
from emtau_dask.em.starts import (
    STARTS,
    GivenParameters,
    StartRequest,
    lloyd,
    start_from_responsibilities,
    starting_parameters,
)
from emtau_dask.em.state import RunState
from emtau_dask.errors import ConfigError
from emtau_dask.estimator.inputs import Seeds
from emtau_dask.execution.choice import choose_executor
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.policy import Traced, WeightedPolicy
from emtau_dask.process import threads_side_by_side
from emtau_dask.progress import watching
from emtau_dask.runs.inputs import computing, open_inputs, starting_responsibilities


@dataclass(frozen=True, eq=False)
class _Common:
    """What all fits of a comparison share; all begin at ``start``."""

    config: RunConfig
    problem: Problem
    start: MixtureParameters


def run_compare(config: RunConfig, console: Console) -> None:
    """Print tables of the algorithms that ``algorithm.compare`` lists; progress goes to standard error.

    Raises
    ------
    EmtauError
        The data or settings cannot be used, or a component collapsed.
    """
    with watching(sys.stderr) as observer, computing(config, observer), threads_side_by_side():
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
        common = _Common(config, problem, start)
        with _fitted(common, "em", FullEM()) as em:
            pass  # It keeps no row state.
        lines = []
        for settings in config.algorithm.compare:
            with _fit_of(common, settings, em) as fit:
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


@contextmanager
def _fit_of(common: _Common, settings: Any, em: FinishedFit) -> Iterator[FinishedFit]:
    """Yield the fit of an entry of ``algorithm.compare``; traditional EM is fitted once for all."""
    if isinstance(settings, KMeansSettings):
        yield _clustered(common)
    elif settings.name == "em":
        yield em
    else:
        values = settings.model_dump(exclude={"name", "published"}).values()
        name = f"{settings.name}({', '.join(map(str, values))})"
        with _fitted(common, name, Traced(policy_of(settings))) as fit:
            yield fit


@contextmanager
def _fitted(common: _Common, name: str, policy: Any) -> Iterator[FinishedFit]:
    """Yield a fit from the common start; its row state exists until the block ends."""
    problem, stop = common.problem, common.config.stop
    p = free_parameters(problem.structure, problem.n_components, problem.n_features)
    tol, gap_tol = tolerances(stop.tol, problem.rows.shape[0], p, auto=False)
    settings = EmSettings(policy, tol, stop.max_iter, common.config.model.reg_covar, gap_tol)
    fields = row_fields(problem.rows, problem.n_components, policy, stop.max_iter)
    scored_under = [common.start]
    problem.context.observer.note(name)
    with temporary_journal(fields, len(problem.rows.chunk_rows)) as journal:

        def after(state: RunState) -> None:
            journal.retain(state)
            scored_under.append(state.parameters)

        began = time.perf_counter()
        with journal.watched():
            state = iterate(problem, RunState(common.start, None), settings, journal.writer, after)
        seconds = time.perf_counter() - began
        e_steps = tuple(
            partial(posterior, scoring_kernels(parameters, compiled=problem.compiled))
            for parameters in scored_under[:-1]
        )
        work, stop_reason = state.history.work, state.stop_reason or ""
        summary = FitSummary(name, state.iteration, work, seconds, stop_reason, state.parameters)
        yield FinishedFit(summary, Held(e_steps, journal.objects), state.slots)


def _clustered(common: _Common) -> FinishedFit:
    common.problem.context.observer.note("kmeans")
    began = time.perf_counter()
    outcome = lloyd(common.problem, Seeds(common.config.model.random_state).draw())
    seconds = time.perf_counter() - began
    stop_reason = "tol" if outcome.converged else "max-iter"
    summary = FitSummary("kmeans", outcome.n_iter, float(outcome.n_iter), seconds, stop_reason, None)
    return FinishedFit(summary, Held((NearestCentre.of(outcome.centres).responsibilities,)), {})
