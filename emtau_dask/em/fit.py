"""A whole fit: its starts, which of them goes on, and the best run.

A default fit of enough rows compares several starts on the smallest sample of the rows. A start makes up to
16 iterations there, and is dropped after 4 if it can no longer reach the best one. The best start goes on
over larger samples, then over all rows (`em.loop.iterate`), until its estimated gap is below the tolerance.
Other fits make ``n_init`` whole runs, and the run with the highest final bound is the result.
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
from emtau_dask.em.acceleration import Ascent
from emtau_dask.em.history import FitObserver
from emtau_dask.em.journal import Journal
from emtau_dask.em.loop import iterate
from emtau_dask.em.problem import Context, Problem, first_unusable_row_named, make_problem
from emtau_dask.em.settings import FINER, EmSettings, most_on_samples
from emtau_dask.em.starts import (
    STARTS,
    GivenParameters,
    StartRequest,
    complete_problem,
    forget,
    start_from_responsibilities,
    starting_parameters,
    starting_problem,
)
from emtau_dask.em.state import FitState, KMeansProgress, Progress, RunState
from emtau_dask.errors import SingularComponentError, warn_user
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.threads import lasting_threads
from emtau_dask.interrupts import interruptible
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.process import threads_side_by_side
from emtau_dask.settings import MARGINALISE, missing_values

STARTING_ITERATIONS, AFTER_ANNEALING = 16, 10
"""Maximum iterations of a start on the first sample before starts are compared: of one that was not annealed,
and of one that was."""
MIN_ITERATIONS, MOST_GAPS = 4, 20.0
"""After 4 iterations, a start is dropped if its bound plus 20 estimated gaps is below the best bound."""
SAME_OPTIMUM, SAME_OPTIMUM_FLOAT32 = 1e-9, 1e-6
"""Maximum relative difference of the bounds of two starts at the same optimum, so that rounding does not
choose between them. The second is for rows of float32."""
RELEASE_SECONDS = 5.0
"""Maximum wait (seconds) at the end of a fit for workers to remove its cache."""


@dataclass(frozen=True)
class FitSources:
    """What a fit reads. Weights and responsibilities have the chunks of the rows; given responsibilities
    replace every other start.
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
    settings: EmSettings, sources: FitSources, executor: Executor, journal: Journal, context: Context
) -> FitState:
    """Run a fit until its runs have ended: one after several compared starts, or one for each seed.

    `em.settings.automatic` decides what a default fit does, from the shape of the data: its samples, starts
    and policy. Of whole runs the one with the highest final bound is the best. Where starts are compared,
    only one goes on after them.

    Parameters
    ----------
    settings : EmSettings
    sources : FitSources
    executor : Executor
        Runs the passes over the rows.
    journal : Journal
        The fit begins from its ``state``: a new one, or one that is resumed.
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
    with lasting_threads(executor) as its_threads:
        problem = _problem_of(settings, sources, its_threads, replace(context, contents=journal.contents))
        settings = _with_large_samples(settings, problem)
        fixed = _Fit(problem, settings, sources.responsibilities, journal)
        state = journal.state
        with first_unusable_row_named(problem), journal.watched():
            while not state.finished:
                try:
                    state = _run_ended(fixed, _run_started(fixed, state))
                except SingularComponentError as error:
                    state = _run_left_out(fixed, state, error)
                new = [note for note in journal.contents.notes if note not in state.notes]
                state = replace(state, notes=(*state.notes, *new))
                journal.save(state, commit=True)
    return state


def _problem_of(settings: EmSettings, sources: FitSources, executor: Executor, context: Context) -> Problem:
    asked = settings.asked
    return make_problem(
        sources.rows,
        sources.weights,
        asked.n_components,
        settings.structure,
        executor,
        context,
        compiled=settings.compiled,
        missing=missing_values(asked.missing),
    )


@dataclass(frozen=True, eq=False)
class _Fit:
    """What stays the same during a fit."""

    problem: Problem
    settings: EmSettings
    responsibilities: Source | None
    journal: Journal

    @property
    def compares_starts(self) -> bool:
        """Whether several starts are compared on the first sample, and only the best one goes on."""
        return len(self.settings.shares) > 0 and len(self.settings.seeds) > 1

    @property
    def same(self) -> float:
        """Maximum relative difference of the bounds of two starts at the same optimum."""
        return SAME_OPTIMUM_FLOAT32 if self.problem.rows.dtype == np.float32 else SAME_OPTIMUM

    def comparison_over(self, run: RunState) -> bool:
        """Whether all iterations that a fit may make on samples are made, so that the best start goes on."""
        return run.iteration >= most_on_samples(self.settings.max_iter)


def _with_large_samples(settings: EmSettings, problem: Problem) -> EmSettings:
    """Return the settings without samples that are too small because many rows take no part."""
    acceleration = settings.acceleration
    if acceleration is None or not settings.shares:
        return settings
    least = settings.shares[0] * problem.rows.shape[0] / FINER
    shares = tuple(share for share in settings.shares if share * problem.n_present >= least)
    samples = replace(acceleration.samples, shares=shares)
    return replace(settings, acceleration=replace(acceleration, samples=samples))


def _run_left_out(fixed: _Fit, state: FitState, error: SingularComponentError) -> FitState:
    """Return the state before the next run; raises ``error`` after the last run if all collapsed."""
    n_runs = len(fixed.settings.seeds)
    if state.run == n_runs - 1 and state.best is None:
        raise error
    message = f"start {state.run + 1} of {n_runs} is left out: {error}"
    warn_user(message)
    return _next_run(fixed, replace(state, left_out=(*state.left_out, message)), state.best)


def _start(fixed: _Fit, state: FitState, after: Callable[[KMeansProgress], None]) -> MixtureParameters:
    problem, settings = fixed.problem, fixed.settings
    acceleration = settings.acceleration
    if fixed.responsibilities is not None:
        statistics = start_from_responsibilities(problem, fixed.responsibilities)
        return starting_parameters(problem, GivenParameters(), statistics, settings.reg_covar)
    complete = settings.given.complete(problem.structure.name)
    if complete is not None:
        return complete
    if problem.missing == MARGINALISE:
        problem, after = complete_problem(problem, settings.seeds[state.run]), forget
    elif acceleration is not None and acceleration.samples.shares:
        problem, after = starting_problem(problem, acceleration.samples), forget
    request = StartRequest(problem, settings.seeds[state.run], state.start, after)
    statistics = STARTS[settings.asked.init_params](request)
    return starting_parameters(problem, settings.given, statistics, settings.reg_covar)


def _run_started(fixed: _Fit, state: FitState) -> FitState:
    """Return the state with a current run, whose Θ₀ is committed."""
    if state.current is not None:
        return state
    journal = fixed.journal

    def after(progress: KMeansProgress) -> None:
        journal.save(replace(state, start=progress), commit=journal.due(progress.n_iter))

    parameters = _start(fixed, state, after)
    run = RunState(parameters, fixed.settings.previous_bound)
    if fixed.settings.acceleration is not None:
        records = () if state.best is None or not fixed.compares_starts else state.best.records
        chosen = not fixed.compares_starts
        annealed = fixed.settings.acceleration.annealed_passes(state.run)
        progress = Progress(
            Ascent(parameters.means), level_began=len(records), annealed_passes=annealed, chosen=chosen
        )
        run = replace(run, records=records, progress=progress)
    begun = replace(state, start=None, current=run)
    journal.save(begun, commit=True)
    return begun


def _run_ended(fixed: _Fit, state: FitState) -> FitState:
    """Return the state after the current run: that before the next, or the finished one."""
    assert state.current is not None
    journal = fixed.journal

    def after(run: RunState) -> None:
        going_on = run.stop_reason is None
        journal.save(replace(state, current=run), commit=going_on and journal.due(run.iteration))

    acceleration = fixed.settings.acceleration
    annealed = acceleration is not None and acceleration.annealed_passes(state.run) > 0
    iterations = AFTER_ANNEALING if annealed else STARTING_ITERATIONS

    def left(run: RunState) -> bool:
        if run.progress is None or run.progress.chosen:
            return False
        return fixed.comparison_over(run) or _start_done(run, iterations, state.best, fixed.same)

    ended = iterate(fixed.problem, state.current, fixed.settings, journal.writer, after, left)
    if fixed.compares_starts and ended.stop_reason is None:
        return _next_run(fixed, state, _better_start(ended, state.best, fixed.same))
    if fixed.compares_starts:
        return replace(state, start=None, current=ended, best=None, finished=True)
    best = state.best
    return _next_run(fixed, state, ended if best is None or ended.lower_bound > best.lower_bound else best)


def _better_start(run: RunState, best: RunState | None, same: float) -> RunState:
    """Return the better of two starts by their bounds on the first sample, with the records of both."""
    assert run.progress is not None
    # A start that left the first sample is compared by all records: those of others are not above the best.
    made = run.records[run.progress.level_began :] if run.progress.level == 0 else run.records
    bounds = [record.lower_bound for record in made if record.accepted]
    bound = max(bounds, default=-math.inf)
    least = bound - same * max(1.0, abs(bound)) if math.isfinite(bound) else bound
    if best is not None and best.bound is not None and best.bound >= least:
        return replace(best, records=run.records)
    return replace(run, bound=bound if math.isfinite(bound) else None)


def _start_done(run: RunState, iterations: int, best: RunState | None, same: float) -> bool:
    """Return whether a start has made its iterations on the first sample, or can no longer reach the best."""
    progress = run.progress
    assert progress is not None
    if progress.annealed_passes:
        return False
    made = len(run.records) - progress.level_began
    if progress.level > 0 or made >= iterations:
        return True
    if made < MIN_ITERATIONS or best is None or best.bound is None:
        return False
    last = run.records[-1]
    return last.accepted and last.lower_bound + MOST_GAPS * last.gap < best.bound - same * max(
        1.0, abs(best.bound)
    )


def _next_run(fixed: _Fit, state: FitState, best: RunState | None) -> FitState:
    cut = fixed.compares_starts and best is not None and fixed.comparison_over(best)
    if state.run + 1 < len(fixed.settings.seeds) and not cut:
        return replace(state, run=state.run + 1, start=None, current=None, best=best)
    if fixed.compares_starts and best is not None and best.progress is not None:
        progress = replace(best.progress, chosen=True, level_began=len(best.records))
        chosen = replace(best, bound=fixed.settings.previous_bound, progress=progress)
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

    There is none if ``limit`` is 0, or for a pool of processes: these may end with a pass, and nothing tells
    them that the fit has ended.
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
    """Let workers remove their caches. A worker that does not answer removes them in a later fit."""

    def tell() -> None:
        with suppress(Exception):
            client.run(release_rows, token, on_error="ignore")

    telling = threading.Thread(target=tell, name="emtau-cache-release", daemon=True)
    telling.start()
    telling.join(RELEASE_SECONDS)
