"""A whole fit: its starts, which of them goes on, and the best run.

A default fit compares several starts on the smallest sample of the rows, or on all rows if these are few: by
short runs in memory (`em.short_runs`). If the sample has more than 65,536 rows, or 16 MiB, a start makes up
to 16 iterations on it instead, and is dropped after 4 if it can no longer reach the best one. With few rows
for each parameter every start has two runs, one of which begins with annealed passes. Other fits make
``n_init`` whole runs, and the run with the highest final bound is the result.

A `FitState` is committed between these stages, and a resumed fit goes on with the stage that it is in:

================================  ===========================  =============================================
state                             stage                        what follows
================================  ===========================  =============================================
new, and a small sample           all starts in memory         the best one, chosen
no ``current`` run                Θ₀ of the seed of ``run``    its run
``current`` run, not chosen       iterations on the sample     the next start; after the last, or when half
                                                               of ``max_iter`` is used, the best one, chosen
``current`` run, chosen           larger samples, all rows     ``finished``
``current`` run, none compared    all iterations               the next run; after the last, ``finished``
any run that collapses            is left out                  as after its end; an error if none is left
================================  ===========================  =============================================

A run iterates (`em.loop.iterate`) until its estimated gap is below the tolerance. With many rows, passes over
a weighted part of them follow each pass over all rows (`policies.sampled`).
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emtau_dask.dask_config import read_settings
from emtau_dask.data.cache import RowCache, release_rows
from emtau_dask.data.source import Source
from emtau_dask.em.acceleration import QuasiNewtonState
from emtau_dask.em.history import FitObserver
from emtau_dask.em.loop import iterate
from emtau_dask.em.problem import Context, Problem, first_unusable_row_named, make_problem
from emtau_dask.em.sampling import has_few_rows, sampled_rows
from emtau_dask.em.settings import ALL_ROWS, SAMPLE_GROWTH, EmSettings, max_sample_iterations
from emtau_dask.em.short_runs import ON_ALL_ROWS, ON_SAMPLE, best_start
from emtau_dask.em.starts import (
    STARTS,
    GivenParameters,
    StartRequest,
    StartRows,
    complete_rows,
    forget,
    start_from_responsibilities,
    starting_parameters,
    starting_rows,
)
from emtau_dask.em.state import FitState, KMeansProgress, Progress, RunState
from emtau_dask.em.state_store import StateStore
from emtau_dask.errors import SingularComponentError, warn_user
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.scheduler import lasting_processes
from emtau_dask.execution.threads import lasting_threads
from emtau_dask.interrupts import interruptible
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.process import threads_side_by_side
from emtau_dask.settings import MARGINALISE, missing_values

MAX_START_ITERATIONS, MAX_ANNEALED_START_ITERATIONS = 16, 10
"""Maximum iterations of a start on the first sample, without annealing and after it."""
MIN_START_ITERATIONS, MAX_GAPS = 4, 20.0
"""After 4 iterations, a start is dropped if its bound plus 20 estimated gaps is below the best bound."""
ROUNDING, ROUNDING_FLOAT32 = 1e-9, 1e-6
"""Maximum relative difference of the bounds of two starts at the same optimum, so that rounding does not
choose between them. The second is for rows of float32."""
RELEASE_SECONDS = 5.0
"""Maximum wait (seconds) at the end of a fit for workers to remove its cache."""


@dataclass(frozen=True)
class FitSources:
    """The sources that a fit reads.

    Weights and responsibilities have the chunks of the rows. Responsibilities replace every other start.
    """

    rows: Source
    weights: Source | None = None
    responsibilities: Source | None = None

    def named(self) -> dict[str, Source]:
        """Return the sources that are given, by the names of the estimator's arguments."""
        values = {
            "X": self.rows,
            "sample_weight": self.weights,
            "responsibilities_init": self.responsibilities,
        }
        return {name: source for name, source in values.items() if source is not None}


def fit(
    settings: EmSettings, sources: FitSources, executor: Executor, state_store: StateStore, context: Context
) -> FitState:
    """Run a fit until its runs have ended: one after several compared starts, or one for each seed.

    `em.settings.automatic` decides on the samples, the starts and the policy of a default fit, from the shape
    of the data. The best of several whole runs is the one with the highest final bound.

    Parameters
    ----------
    settings : EmSettings
    sources : FitSources
    executor : Executor
        Runs the passes over the rows.
    state_store : StateStore
        Saves the states of the fit, and has the first one: a new one, or one that is resumed.
    context : Context
        See `open_context`.

    Returns
    -------
    FitState
        Finished: its ``current`` is the best run.

    Raises
    ------
    SingularComponentError
        Every run collapsed.
    InvalidDataError
        A row cannot be used.
    CheckpointTakenError
        Another process has continued this fit.

    Warns
    -----
    UserWarning
        A run collapsed and is left out.
    """
    with lasting_threads(executor) as lasting, lasting_processes():
        context = replace(context, verifier=state_store.verifier)
        problem = _problem(settings, sources, lasting, context)
        settings = _without_small_samples(settings, problem)
        parts = _Fit(problem, settings, sources.responsibilities, state_store)
        state = state_store.state
        with first_unusable_row_named(problem), state_store.explained_errors():
            if parts.has_short_runs and state.current is None and not state.finished:
                state = _after_short_runs(parts, state)
            while not state.finished:
                context.observer.part(*_names_of_run(parts, state))
                try:
                    state = _begin_run(parts, state)
                    state = _iterate_run(parts, state)
                except SingularComponentError as error:
                    state = _leave_out_run(parts, state, error)
                notes = (*problem.notes, *state_store.verifier.notes)
                new = [note for note in notes if note not in state.notes]
                state = replace(state, notes=(*state.notes, *new))
                state_store.save(state, commit=True)
    return state


@dataclass(frozen=True, eq=False)
class _Fit:
    """What stays the same during a fit."""

    problem: Problem
    settings: EmSettings
    responsibilities: Source | None
    state_store: StateStore

    @property
    def compares_starts(self) -> bool:
        """Whether several starts are compared on the first sample, and only the best one goes on."""
        return len(self.settings.shares) > 0 and len(self.settings.seeds) > 1

    @property
    def has_short_runs(self) -> bool:
        """Whether starts are compared by short runs, because the first sample has few rows."""
        return self.compares_starts and self.has_few_rows(self.settings.shares[0])

    def has_few_rows(self, share: float) -> bool:
        """Return whether a share of all rows is so few that steps over them are made in memory."""
        problem = self.problem
        return has_few_rows(int(share * problem.rows.shape[0]), problem.n_components, problem.n_features)

    @property
    def rounding(self) -> float:
        """Maximum relative difference of the bounds of two starts at the same optimum."""
        return ROUNDING_FLOAT32 if self.problem.rows.dtype == np.float32 else ROUNDING

    def samples_are_over(self, run: RunState) -> bool:
        """Whether no more iterations on samples are allowed, so that the best start goes on."""
        return run.iteration >= max_sample_iterations(self.settings.max_iter)


def _problem(settings: EmSettings, sources: FitSources, executor: Executor, context: Context) -> Problem:
    requested = settings.requested
    return make_problem(
        sources.rows,
        sources.weights,
        requested.n_components,
        settings.structure,
        executor,
        context,
        compiled=settings.compiled,
        missing=missing_values(requested.missing),
    )


def _without_small_samples(settings: EmSettings, problem: Problem) -> EmSettings:
    """Return the settings without samples that are too small because many rows take no part."""
    acceleration = settings.acceleration
    if acceleration is None or settings.shares in ((), ALL_ROWS):
        return settings
    least = settings.shares[0] * problem.rows.shape[0] / SAMPLE_GROWTH
    shares = tuple(share for share in settings.shares if share * problem.n_rows >= least)
    samples = replace(acceleration.samples, shares=shares)
    return replace(settings, acceleration=replace(acceleration, samples=samples))


def _names_of_run(fit: _Fit, state: FitState) -> tuple[str, str]:
    """Return the name of the run that goes on, and that of the runs it is compared with, for people."""
    run, n_runs = state.current, len(fit.settings.seeds)
    if fit.compares_starts and run is not None and run.progress is not None and run.progress.chosen:
        return "from the best start", ""
    if n_runs == 1:
        return "fit", ""
    where = " on a sample" if fit.compares_starts else ""
    return f"start {state.run + 1} of {n_runs}{where}", f"best of {n_runs} starts{where}"


def _after_short_runs(fit: _Fit, state: FitState) -> FitState:
    """Return the state of a new fit with the best start; it is committed.

    That goes on over all rows if these are few, else over the samples.
    """
    problem, settings, n_starts = fit.problem, fit.settings, len(fit.settings.seeds)
    acceleration = settings.acceleration
    assert acceleration is not None
    shares, samples = settings.shares, acceleration.samples
    where = " on a sample" if shares != ALL_ROWS else ""
    problem.context.observer.part(f"best of {n_starts} starts{where}")
    sample = sampled_rows(problem, samples, problem.rows.shape[0])
    sample_index, effort = (len(shares), ON_ALL_ROWS) if fit.has_few_rows(1.0) else (0, ON_SAMPLE)
    best = best_start(problem, settings, sample, effort, fit.rounding)
    progress = Progress(
        QuasiNewtonState(best.parameters.means), sample_index=sample_index, sample_began=len(best.records)
    )
    run = RunState(best.parameters, settings.previous_bound, best.records, progress=progress)
    state = replace(state, run=n_starts - 1, current=run, left_out=best.left_out)
    fit.state_store.save(state, commit=True)
    return state


def _begin_run(fit: _Fit, state: FitState) -> FitState:
    """Return the state with a current run; a new run has its Θ₀, which is committed."""
    if state.current is not None:
        return state
    state_store = fit.state_store

    def after(progress: KMeansProgress) -> None:
        state_store.save(replace(state, start=progress), commit=state_store.due(progress.n_iter))

    parameters = _starting_parameters(fit, state, after)
    run = RunState(parameters, fit.settings.previous_bound)
    if fit.settings.acceleration is not None:
        records = () if state.best is None or not fit.compares_starts else state.best.records
        progress = Progress(
            QuasiNewtonState(parameters.means),
            sample_began=len(records),
            annealed_passes=fit.settings.acceleration.annealed_passes(state.run),
            chosen=not fit.compares_starts,
        )
        run = replace(run, records=records, progress=progress)
    state = replace(state, start=None, current=run)
    state_store.save(state, commit=True)
    return state


def _starting_parameters(
    fit: _Fit, state: FitState, after: Callable[[KMeansProgress], None]
) -> MixtureParameters:
    """Return Θ₀ of a run; ``after`` is called after each pass of k-means over all rows."""
    problem, settings = fit.problem, fit.settings
    acceleration = settings.acceleration
    if fit.responsibilities is not None:
        statistics = start_from_responsibilities(problem, fit.responsibilities)
        return starting_parameters(problem.structure, GivenParameters(), statistics, settings.reg_covar)
    complete = settings.given.complete(problem.structure.name)
    if complete is not None:
        return complete
    rows = StartRows(problem)
    if acceleration is not None and acceleration.samples.shares:
        rows, after = starting_rows(problem, acceleration.samples), forget
    if problem.missing == MARGINALISE:
        rows, after = complete_rows(rows, settings.seeds[state.run]), forget
    request = StartRequest(rows, settings.seeds[state.run], state.start, after)
    statistics = STARTS[settings.requested.init_params](request)
    return starting_parameters(problem.structure, settings.given, statistics, settings.reg_covar)


def _iterate_run(fit: _Fit, state: FitState) -> FitState:
    """Iterate the current run until it ends; return the state before the next run, or the finished one."""
    assert state.current is not None
    state_store = fit.state_store

    def after(run: RunState) -> None:
        goes_on = run.stop_reason is None
        state_store.save(replace(state, current=run), commit=goes_on and state_store.due(run.iteration))

    acceleration = fit.settings.acceleration
    annealed = acceleration is not None and acceleration.annealed_passes(state.run) > 0
    iterations = MAX_ANNEALED_START_ITERATIONS if annealed else MAX_START_ITERATIONS

    def start_is_over(run: RunState) -> bool:
        if run.progress is None or run.progress.chosen:
            return False
        return fit.samples_are_over(run) or _start_is_over(run, iterations, state.best, fit.rounding)

    run = iterate(fit.problem, state.current, fit.settings, state_store.writer, after, start_is_over)
    if not fit.compares_starts:
        best = state.best
        return _next_run(fit, state, run if best is None or run.lower_bound > best.lower_bound else best)
    if run.stop_reason is None:
        return _next_run(fit, state, _better_start(run, state.best, fit.rounding))
    return replace(state, start=None, current=run, best=None, finished=True)


def _start_is_over(run: RunState, iterations: int, best: RunState | None, rounding: float) -> bool:
    """Return whether a start has made its iterations on the first sample, or can no longer be the best."""
    progress = run.progress
    assert progress is not None
    if progress.annealed_passes:
        return False
    made = len(run.records) - progress.sample_began
    if progress.sample_index > 0 or made >= iterations:
        return True
    if made < MIN_START_ITERATIONS or best is None or best.bound is None:
        return False
    last = run.records[-1]
    return last.accepted and last.lower_bound + MAX_GAPS * last.gap < best.bound - rounding * max(
        1.0, abs(best.bound)
    )


def _better_start(run: RunState, best: RunState | None, rounding: float) -> RunState:
    """Return the better of two starts by their bounds on the first sample, with the records of both."""
    assert run.progress is not None
    # A start that left the first sample is compared by all records: those of others are not above the best.
    made = run.records[run.progress.sample_began :] if run.progress.sample_index == 0 else run.records
    bounds = [record.lower_bound for record in made if record.accepted]
    bound = max(bounds, default=-math.inf)
    least = bound - rounding * max(1.0, abs(bound)) if math.isfinite(bound) else bound
    if best is not None and best.bound is not None and best.bound >= least:
        return replace(best, records=run.records)
    return replace(run, bound=bound if math.isfinite(bound) else None)


def _leave_out_run(fit: _Fit, state: FitState, error: SingularComponentError) -> FitState:
    """Return the state after a run that collapsed; raises ``error`` after the last run if all collapsed."""
    n_runs = len(fit.settings.seeds)
    if state.run == n_runs - 1 and state.best is None:
        raise error
    message = f"start {state.run + 1} of {n_runs} is left out: {error}"
    warn_user(message)
    fit.problem.context.observer.left_out()
    return _next_run(fit, replace(state, left_out=(*state.left_out, message)), state.best)


def _next_run(fit: _Fit, state: FitState, best: RunState | None) -> FitState:
    """Return the state before the next run; after the last one, the best start goes on, or the fit ends."""
    is_over = fit.compares_starts and best is not None and fit.samples_are_over(best)
    if state.run + 1 < len(fit.settings.seeds) and not is_over:
        return replace(state, run=state.run + 1, start=None, current=None, best=best)
    if fit.compares_starts and best is not None and best.progress is not None:
        progress = replace(best.progress, chosen=True, sample_began=len(best.records))
        chosen = replace(best, bound=fit.settings.previous_bound, progress=progress)
        return replace(state, start=None, current=chosen, best=None)
    return replace(state, start=None, current=best, best=None, finished=True)


@contextmanager
def open_context(executor: Executor, observer: FitObserver, cache_bytes: int = 0) -> Iterator[Context]:
    """Open the context of a fit: BLAS has one thread, and active rows are cached between passes.

    Both end with the context, on workers too. Each process may cache ``cache_bytes`` in memory; 0 caches
    nothing.
    """
    with (
        interruptible(),
        threads_side_by_side(),
        _row_cache(executor, cache_bytes) as cache,
    ):
        yield Context(observer, cache, read_settings().read_ahead_bytes)


@contextmanager
def _row_cache(executor: Executor, limit: int) -> Iterator[RowCache | None]:
    """Open a cache of active rows and row state.

    There is none if ``limit`` is 0, or for a pool of processes: these may end after a pass, and they are not
    told when the fit ends.
    """
    client = executor.client
    if not limit or (client is None and not executor.in_process):
        yield None
        return
    cache = RowCache(uuid.uuid4().hex, limit)
    try:
        yield cache
    finally:
        release_rows(cache.token)
        if client is not None:
            _release_on(client, cache.token)


def _release_on(client: Any, token: str) -> None:
    """Make workers remove their caches. A worker that does not answer removes them in a later fit."""

    def release() -> None:
        with suppress(Exception):
            client.run(release_rows, token, on_error="ignore")

    thread = threading.Thread(target=release, name="emtau-cache-release", daemon=True)
    thread.start()
    thread.join(RELEASE_SECONDS)
