"""The iteration loop: the only one, for every policy, covariance type, scheduler and storage."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dask
import numpy as np
import zarr

from emtau_dask.activity import ActivityPolicy, NextPass, PassSummary
from emtau_dask.activity.guard import ACTIVE, checked_row_arrays, checked_schedule
from emtau_dask.engine.history import FitHistory, IterationRecord
from emtau_dask.engine.observer import FitObserver
from emtau_dask.engine.passes import run_pass
from emtau_dask.engine.problem import Problem
from emtau_dask.engine.scoring import (
    EStepTask,
    HeldRows,
    PassTotals,
    RowTracking,
    merge_held,
    merge_totals,
)
from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.parameters import MixtureParameters, expected_log_density, m_step
from emtau_dask.mixture.statistics import SufficientStatistics, merge
from emtau_dask.storage import RowStateStore

__all__ = ["EmOutcome", "EmSettings", "best_run", "iterate", "temporary_row_state"]


@dataclass(frozen=True)
class EmSettings:
    """How long a fit goes on.

    Attributes
    ----------
    tol : float
        Nats per row; 0 never stops by it.
    max_iter : int
    reg_covar : float
    previous_bound : float or None
        The bound that iteration 1 is compared with, for a warm start.
    """

    tol: float
    max_iter: int
    reg_covar: float
    previous_bound: float | None = None


@dataclass(frozen=True, eq=False)
class EmOutcome:
    """How a fit ended.

    Attributes
    ----------
    parameters : MixtureParameters
        Of the last M-step.
    history : FitHistory
    stop_reason : str
        ``"tol"``, ``"no-active-rows"`` or ``"max-iter"``.
    """

    parameters: MixtureParameters
    history: FitHistory
    stop_reason: str

    @property
    def lower_bound(self) -> float:
        """The last iteration's bound, nats per row; −inf where there was none."""
        return self.history[-1].lower_bound if len(self.history) else -np.inf


@contextmanager
def temporary_row_state(
    problem: Problem, policy: ActivityPolicy, max_iter: int
) -> Iterator[RowStateStore | None]:
    """Hold a temporary local store for the row state of ``policy``; None where it needs none.

    It lies in dask's ``temporary-directory``, or the system's.
    """
    arrays = checked_row_arrays(policy, problem.n_components, max_iter)
    if arrays is None:
        yield None
        return
    dtypes = {ACTIVE: np.dtype(np.bool_)} | {array.name: array.dtype for array in arrays}
    folder = dask.config.get("temporary-directory", None)
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="emtau-state-", dir=folder, ignore_cleanup_errors=True) as path:
        yield RowStateStore(zarr.create_group(store=path), problem.rows.chunk_rows, dtypes)


def best_run(
    problem: Problem,
    start_of_run: Callable[[int], MixtureParameters],
    n_runs: int,
    policy: ActivityPolicy,
    settings: EmSettings,
    observer: FitObserver,
) -> EmOutcome:
    """Run `iterate` from several starts, with temporary row state; the best final bound wins.

    Parameters
    ----------
    start_of_run : callable (run) -> MixtureParameters
        Called for each run when it begins.
    n_runs : int
        At least 1.
    problem, policy, settings, observer
        As for `iterate`.

    Raises
    ------
    SingularComponentError
        Every run collapsed.

    Warns
    -----
    UserWarning
        A run collapsed and is left out.
    """
    outcomes: list[EmOutcome] = []
    for run in range(n_runs):
        try:
            start = start_of_run(run)
            with temporary_row_state(problem, policy, settings.max_iter) as row_state:
                outcomes.append(iterate(problem, start, policy, settings, row_state, observer))
        except SingularComponentError as error:
            if run == n_runs - 1 and not outcomes:
                raise
            warnings.warn(f"start {run + 1} of {n_runs} is left out: {error}", stacklevel=3)
    return max(outcomes, key=lambda outcome: outcome.lower_bound)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The rows that the next iteration scores: all of them afresh, or what is left in ``chunks``."""

    afresh: bool
    chunks: list[int]


def iterate(
    problem: Problem,
    start: MixtureParameters,
    policy: ActivityPolicy,
    settings: EmSettings,
    row_state: RowStateStore | None,
    observer: FitObserver,
) -> EmOutcome:
    """Run EM with partial E-steps (the paper's Algorithm 2) from ``start``.

    Parameters
    ----------
    problem : Problem
    start : MixtureParameters
        Θ₀.
    policy : ActivityPolicy
    settings : EmSettings
    row_state : RowStateStore or None
        For the arrays that the policy declares; None where it declares none.
    observer : FitObserver

    Returns
    -------
    EmOutcome

    Raises
    ------
    SingularComponentError
        A component collapsed.
    InvalidDataError
        A row holds NaN or infinity, or is beyond the range of float64.
    """
    everything = problem.chunks
    arrays = checked_row_arrays(policy, problem.n_components, settings.max_iter) or ()
    kept = frozenset(array.name for array in arrays if array.keep)
    parameters = start
    held: HeldRows | None = None
    bound = settings.previous_bound
    since_reset = 0
    records: list[IterationRecord] = []
    plan = _Plan(True, everything)
    for iteration in range(1, settings.max_iter + 1):
        began = time.perf_counter()
        if plan.afresh:
            held, since_reset = None, 0
        since_reset += 1
        totals = _e_step(problem, parameters, policy, iteration, plan, row_state, kept, observer)
        previous, bound = bound, _lower_bound(problem, parameters, totals, held)
        parameters = m_step(_all_rows(problem, totals, held), problem.structure, settings.reg_covar)
        if totals is not None:
            held = merge_held(problem.structure, held, totals.leaving)
        remaining = dict(totals.remaining) if totals is not None else {}
        scored = totals.scored if totals is not None else 0
        record = IterationRecord(
            iteration=iteration,
            lower_bound=bound,
            active_rows=scored,
            full_pass=scored == problem.n_present,
            chunks_processed=len(plan.chunks),
            chunks_skipped=len(everything) - len(plan.chunks),
            bytes_read=totals.bytes_read if totals is not None else 0,
            seconds=time.perf_counter() - began,
            rows=problem.n_present,
        )
        records.append(record)
        observer.iteration(record, parameters)
        change = None if previous is None else bound - previous
        schedule = checked_schedule(
            policy,
            PassSummary(
                iteration, record.full_pass, sum(remaining.values()), change, settings.tol, since_reset
            ),
        )
        if schedule.test_tol and change is not None and abs(change) < settings.tol:
            return EmOutcome(parameters, FitHistory(tuple(records)), "tol")
        if schedule.next_pass is NextPass.STOP:
            return EmOutcome(parameters, FitHistory(tuple(records)), "no-active-rows")
        afresh = schedule.next_pass is NextPass.ALL
        plan = _Plan(afresh, everything if afresh else [c for c, rows in remaining.items() if rows])
    return EmOutcome(parameters, FitHistory(tuple(records)), "max-iter")


def _e_step(
    problem: Problem,
    parameters: MixtureParameters,
    policy: ActivityPolicy,
    iteration: int,
    plan: _Plan,
    row_state: RowStateStore | None,
    kept: frozenset[str],
    observer: FitObserver,
) -> PassTotals | None:
    tracking = None
    if row_state is not None and plan.chunks:
        read = {}
        for chunk in plan.chunks:
            generation = row_state.latest(chunk)
            if generation is not None and not plan.afresh:
                read[chunk] = generation
        tracking = RowTracking(policy, read, row_state.begin(iteration), kept)
    totals = run_pass(
        EStepTask(problem.loader(), parameters, iteration, tracking),
        partial(merge_totals, problem.structure),
        problem.sources,
        plan.chunks,
        name="estep",
        stage=f"iteration {iteration}",
        observer=observer,
    )
    if row_state is not None and totals is not None:
        finished = [chunk for chunk, rows in totals.remaining if not rows and not kept]
        row_state.commit(iteration, plan.chunks, finished)
    return totals


def _all_rows(problem: Problem, totals: PassTotals | None, held: HeldRows | None) -> SufficientStatistics:
    parts = [part.statistics for part in (held, totals) if part is not None and part.statistics is not None]
    statistics = parts[0]
    for part in parts[1:]:
        statistics = merge(problem.structure, statistics, part)
    return statistics


def _lower_bound(
    problem: Problem, parameters: MixtureParameters, totals: PassTotals | None, held: HeldRows | None
) -> float:
    """Return Neal and Hinton's free energy F(Θ, q), nats per (weighted) row."""
    total = 0.0 if totals is None else totals.log_likelihood
    if held is not None:
        total += expected_log_density(held.statistics, parameters) + held.entropy
    return total / problem.total_weight
