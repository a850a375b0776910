"""`emtau compare`: several algorithms on the same data from the same start, judged alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.compare.evaluate import Held, HeldByCentre, HeldByIteration, Verdict, distinct_labels, judge
from emtau_dask.compare.tables import print_comparison
from emtau_dask.config import KMeansSettings, PublishedFigures, policy_of
from emtau_dask.em import (
    Context,
    EmSettings,
    FitObserver,
    IterationRecord,
    Problem,
    RunState,
    first_unusable_row_named,
    iterate,
    make_problem,
    worth_compiling,
)
from emtau_dask.estimator import Seeds, watching
from emtau_dask.execution import choose_executor, threads_side_by_side
from emtau_dask.fit import TemporaryJournal, row_fields, temporary_journal
from emtau_dask.init import (
    STARTS,
    GivenParameters,
    NearestCentre,
    StartRequest,
    kmeans,
    start_from_responsibilities,
    starting_parameters,
)
from emtau_dask.io.objects import SlotState
from emtau_dask.io.sources import Source, as_source
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.estep import plan_kernel
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.policies import FullEM, Traced
from emtau_dask.runs import computing, open_inputs, starting_responsibilities
from emtau_dask.settings import read_settings

if TYPE_CHECKING:
    from rich.console import Console

    from emtau_dask.config import RunConfig


@dataclass(frozen=True, eq=False)
class Judged:
    """One line of a comparison.

    Attributes
    ----------
    name : str
        With the algorithm's parameters.
    iterations : int
    work : float
        Passes over the data that the scored rows amount to.
    seconds : float
        Wall-clock time from the common start to the end of the fit.
    stop_reason : str
    verdict : Verdict
        Against traditional EM.
    parameters : MixtureParameters or None
        None for k-means.
    published : PublishedFigures or None
    """

    name: str
    iterations: int
    work: float
    seconds: float
    stop_reason: str
    verdict: Verdict
    parameters: MixtureParameters | None
    published: PublishedFigures | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """Traditional EM and everything compared with it.

    Attributes
    ----------
    lines : tuple of Judged
        In the config's order.
    classes : ndarray
        The known labels that occur.
    labelled : bool
        Whether labels are known at all.
    """

    lines: tuple[Judged, ...]
    classes: NDArray[Any]
    labelled: bool


class _Recorder:
    """Passes everything on to another observer, and keeps the parameters of every iteration."""

    def __init__(self, observer: FitObserver, start: MixtureParameters) -> None:
        self._observer = observer
        self.parameters = [start]

    def stage(self, name: str, chunks: int) -> None:
        self._observer.stage(name, chunks)

    def chunks_done(self, count: int) -> None:
        self._observer.chunks_done(count)

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        self.parameters.append(parameters)
        self._observer.iteration(record, parameters)

    def note(self, message: str) -> None:
        self._observer.note(message)

    def close(self) -> None:
        self._observer.close()


def run_compare(config: RunConfig, console: Console) -> None:
    """Compare the algorithms that ``algorithm.compare`` lists, and print the tables.

    Parameters
    ----------
    config : RunConfig
    console : rich.console.Console
        For the tables; progress goes to standard error.

    Raises
    ------
    EmtauError
        The data or settings cannot be used, or a component collapsed.
    """
    import sys

    with watching(sys.stderr) as observer, computing(config), threads_side_by_side():
        comparison = compare(config, observer)
    print_comparison(comparison, console)


def compare(config: RunConfig, observer: FitObserver) -> Comparison:
    """Run and judge every algorithm that ``algorithm.compare`` lists.

    Raises
    ------
    EmtauError
    """
    inputs = open_inputs(config, overwrite=False, observer=observer)
    model = config.model
    executor = choose_executor()
    problem = make_problem(
        inputs.rows,
        inputs.weights,
        model.n_components,
        structure_named(model.covariance_type),
        executor,
        Context(observer, read_ahead=read_settings().read_ahead_bytes),
        compiled=worth_compiling(
            executor.client, inputs.rows.shape, model.covariance_type, model.n_components
        ),
    )
    with first_unusable_row_named(problem):
        return _compared(config, problem, inputs.labels)


def _compared(config: RunConfig, problem: Problem, known: Source | None) -> Comparison:
    start = _start(config, problem)
    labels = None if known is None else known.aligned(problem.rows.chunk_rows)
    classes = np.zeros(1) if labels is None else distinct_labels(problem, labels)

    def verdict(
        held: Held,
        states: Mapping[int, SlotState],
        reference: Held,
        final: MixtureParameters | None,
        name: str,
    ) -> Verdict:
        stage = f"judging {name}"
        return judge(problem, held, states, reference, final, labels, classes, stage=stage)

    runner = _Runner(problem, start, config)
    reference, lines = runner.reference(), []
    for settings in config.algorithm.compare:
        if isinstance(settings, KMeansSettings):
            lines.append(runner.run_kmeans(settings, reference.held, verdict))
        elif settings.name == "em":
            lines.append(reference.judged(getattr(settings, "published", None), verdict))
        else:
            lines.append(runner.run(settings, reference.held, verdict))
    return Comparison(tuple(lines), classes, labels is not None)


def _start(config: RunConfig, problem: Problem) -> MixtureParameters:
    given = starting_responsibilities(config, problem.rows.shape[0])
    if given is None:
        seed = Seeds(config.model.random_state).draw()
        statistics = STARTS[config.model.init_params](StartRequest(problem, seed))
    else:
        source: Source = as_source(given, ndim=2, what="responsibilities_init")
        statistics = start_from_responsibilities(problem, source)
    return starting_parameters(problem, GivenParameters(), statistics, config.model.reg_covar)


Judge = Callable[[Held, Mapping[int, SlotState], Held, MixtureParameters | None, str], Verdict]


@dataclass(frozen=True, eq=False)
class _Finished:
    name: str
    outcome: RunState
    held: HeldByIteration
    seconds: float

    def judged(
        self, published: PublishedFigures | None, judge_it: Judge, reference: Held | None = None
    ) -> Judged:
        outcome = self.outcome
        return Judged(
            self.name,
            outcome.iteration,
            outcome.history.work,
            self.seconds,
            outcome.stop_reason or "",
            judge_it(self.held, outcome.slots, reference or self.held, outcome.parameters, self.name),
            outcome.parameters,
            published,
        )


@dataclass(frozen=True, eq=False)
class _Runner:
    problem: Problem
    start: MixtureParameters
    config: RunConfig

    def _fit(self, name: str, policy: Any, journal: TemporaryJournal) -> _Finished:
        stop, model = self.config.stop, self.config.model
        observer = self.problem.context.observer
        settings = EmSettings(policy, stop.tol, stop.max_iter, model.reg_covar)
        recorder = _Recorder(observer, self.start)
        observer.note(name)
        began = time.perf_counter()
        with journal.watched():
            problem = replace(self.problem, context=replace(self.problem.context, observer=recorder))
            outcome = iterate(problem, RunState(self.start, None), settings, journal.writer, journal.retain)
        seconds = time.perf_counter() - began
        plans = tuple(plan_kernel(parameters) for parameters in recorder.parameters[:-1])
        return _Finished(name, outcome, HeldByIteration(plans, journal.objects), seconds)

    def _journal(self, policy: Any) -> AbstractContextManager[TemporaryJournal]:
        problem = self.problem
        fields = row_fields(problem.rows, problem.n_components, policy, self.config.stop.max_iter)
        return temporary_journal(fields, len(problem.rows.chunk_rows))

    def reference(self) -> _Finished:
        with self._journal(FullEM()) as journal:
            return self._fit("em", FullEM(), journal)

    def run(self, settings: Any, reference: Held, judge_it: Judge) -> Judged:
        policy = Traced(policy_of(settings))
        with self._journal(policy) as journal:
            finished = self._fit(_described(settings), policy, journal)
            return finished.judged(settings.published, judge_it, reference)

    def run_kmeans(self, settings: Any, reference: Held, judge_it: Judge) -> Judged:
        self.problem.context.observer.note("kmeans")
        began = time.perf_counter()
        seed = Seeds(self.config.model.random_state).draw()
        outcome = kmeans(self.problem, seed)
        seconds = time.perf_counter() - began
        return Judged(
            "kmeans",
            outcome.n_iter,
            float(outcome.n_iter),
            seconds,
            "tol" if outcome.converged else "max-iter",
            judge_it(HeldByCentre(NearestCentre.of(outcome.centres)), {}, reference, None, "kmeans"),
            None,
            settings.published,
        )


def _described(settings: Any) -> str:
    values = settings.model_dump(exclude={"name", "published"}).values()
    return f"{settings.name}({', '.join(map(str, values))})" if values else str(settings.name)
