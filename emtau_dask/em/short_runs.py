"""The best of several starts, by short runs of EM on rows in the memory of this process.

Biernacki, Celeux and Govaert 2003, "Choosing starting values for the EM algorithm for getting the highest
likelihood in multivariate Gaussian mixture models", section 3. Here the better half of the runs goes on after
every few steps, and the last one until its steps gain little. A step costs a fraction of a pass, which
schedules tasks and estimates the gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from emtau_dask.em.history import IterationRecord
from emtau_dask.em.iteration import kernels_of, plan_of
from emtau_dask.em.problem import Problem
from emtau_dask.em.sampling import RowSample
from emtau_dask.em.settings import Acceleration, EmSettings, max_sample_iterations
from emtau_dask.em.starts import (
    STARTS,
    SampledRows,
    StartRequest,
    StartRows,
    complete_rows,
    starting_parameters,
)
from emtau_dask.errors import SingularComponentError, warn_user
from emtau_dask.mixture.parameters import MixtureParameters, m_step, tempered
from emtau_dask.mixture.plan import KernelPlan
from emtau_dask.mixture.statistics import RowSums
from emtau_dask.settings import MARGINALISE

MAX_LAST_STEPS = 40
"""Maximum steps of the run that is left."""


class Effort(NamedTuple):
    """Steps of each run after which the better half goes on, and the gain (nats per row) that ends a run."""

    steps: int
    min_gain: float


ON_ALL_ROWS, ON_SAMPLE = Effort(4, 1e-3), Effort(8, 1e-4)
"""A gain of 1e-3 is scikit-learn's default tolerance. With it, one of 20 fits of a sample ended in another
optimum."""


@dataclass(frozen=True, eq=False)
class ShortRun:
    """A run after some steps; the parameters are those of the last M-step.

    Attributes
    ----------
    number : int
        Of its start, from 0.
    parameters : MixtureParameters
    steps : int
        Steps made, annealed ones included.
    bound, gain : float
        Log-likelihood per row in the last E-step, and by how much the step before raised it, nats.
    """

    number: int
    parameters: MixtureParameters
    steps: int
    bound: float = -math.inf
    gain: float = math.inf


@dataclass(frozen=True, eq=False)
class BestStart:
    """Parameters to go on from, a record of each round of runs, and a message for each run that collapsed."""

    parameters: MixtureParameters
    records: tuple[IterationRecord, ...]
    left_out: tuple[str, ...]


def best_start(
    problem: Problem, settings: EmSettings, sample: RowSample, effort: Effort, rounding: float
) -> BestStart:
    """Return the best of the starts of ``settings``, by short runs over the rows of a sample.

    Bounds whose relative difference is at most ``rounding`` count as equal; then the first start is better.

    Raises
    ------
    SingularComponentError
        Every run collapsed.
    """
    rounds = max_sample_iterations(settings.max_iter)
    n_starts = len(settings.seeds) if rounds else 1
    survivors = partial(_survivors, n_starts)
    runs, left_out = survivors((s, partial(_begun, problem, settings, sample, s)) for s in range(n_starts))
    records: list[IterationRecord] = []
    made_before: dict[int, int] = {}
    is_last = False
    while len(records) < rounds and not is_last:
        began, is_last = time.perf_counter(), len(runs) == 1
        now = effort._replace(steps=MAX_LAST_STEPS) if is_last else effort
        advance = partial(_advanced, problem, settings, sample, now)
        runs, collapsed = survivors((run.number, partial(advance, run)) for run in runs)
        left_out += collapsed
        made = sum(run.steps - made_before.get(run.number, 0) for run in runs)
        runs = _ranked(runs, rounding)[: max(1, len(runs) // 2)]
        made_before = {run.number: run.steps for run in runs}
        if not made:
            continue
        records.append(
            IterationRecord(
                iteration=len(records) + 1,
                lower_bound=runs[0].bound,
                active_rows=made * len(sample.rows),
                full_pass=False,
                chunks_processed=0,
                chunks_skipped=len(problem.chunks),
                bytes_read=0,
                seconds=time.perf_counter() - began,
                rows=problem.n_rows,
            )
        )
        problem.context.observer.iteration(records[-1], runs[0].parameters)
    return BestStart(runs[0].parameters, tuple(records), tuple(left_out))


def _survivors(
    n_starts: int, calls: Iterable[tuple[int, Callable[[], ShortRun]]]
) -> tuple[list[ShortRun], list[str]]:
    """Return the runs that calls return, and a message for each that collapsed; raises if all did."""
    runs, errors = [], {}
    for number, call in calls:
        try:
            runs.append(call())
        except SingularComponentError as error:
            errors[number] = error
    if not runs:
        raise errors[max(errors)]
    messages = [f"start {number + 1} of {n_starts} is left out: {error}" for number, error in errors.items()]
    for message in messages:
        warn_user(message)
    return runs, messages


def _ranked(runs: list[ShortRun], rounding: float) -> list[ShortRun]:
    """Return runs, the best first."""
    best = max(run.bound for run in runs)
    limit = best - rounding * max(1.0, abs(best)) if math.isfinite(best) else best
    return sorted(runs, key=lambda run: (-min(run.bound, limit), run.number))


def _begun(problem: Problem, settings: EmSettings, sample: RowSample, number: int) -> ShortRun:
    """Return the run from a start, after its annealed steps."""
    seed, acceleration = settings.seeds[number], settings.acceleration
    rows: StartRows = SampledRows(problem, sample)
    if problem.missing == MARGINALISE:
        rows = complete_rows(rows, seed)
    statistics = STARTS[settings.requested.init_params](StartRequest(rows, seed))
    parameters = starting_parameters(problem.structure, settings.given, statistics, settings.reg_covar)
    annealed_passes = 0 if acceleration is None else acceleration.annealed_passes(number)
    for left in range(annealed_passes, 0, -1):
        hot = tempered(parameters, Acceleration.inverse_temperature(left))
        parameters, _ = em_step(problem, sample, hot, settings.reg_covar)
    return ShortRun(number, parameters, annealed_passes)


def _advanced(
    problem: Problem, settings: EmSettings, sample: RowSample, effort: Effort, run: ShortRun
) -> ShortRun:
    """Return a run after more steps, until one gains little."""
    for _ in range(effort.steps):
        if not run.gain >= effort.min_gain:
            break
        parameters, bound = em_step(problem, sample, run.parameters, settings.reg_covar)
        run = ShortRun(run.number, parameters, run.steps + 1, bound, bound - run.bound)
    return run


def em_step(
    problem: Problem, sample: RowSample, parameters: MixtureParameters, reg_covar: float
) -> tuple[MixtureParameters, float]:
    """Return the M-step after an E-step over the rows of a sample, and the log-likelihood per row in nats.

    If a row is beyond the range of float64, the parameters are the same and the log-likelihood is −inf. The
    next pass over all rows then names the row.

    Raises
    ------
    SingularComponentError
        A component collapsed.
    """
    plan = plan_of(problem, parameters, len(sample.rows))
    total = float(sample.weights.sum())
    sums = _sums(problem, sample, plan)
    if not math.isfinite(sums.log_likelihood):
        return parameters, -math.inf
    try:
        after = m_step(plan.statistics(sums), problem.structure, reg_covar)
        kept = plan.kept_digits(after)
    except SingularComponentError:
        if plan.exact:
            raise
        kept = False
    if not kept:
        plan = plan.centred
        sums = _sums(problem, sample, plan)
        after = m_step(plan.statistics(sums), problem.structure, reg_covar)
    return after, sums.log_likelihood / total


def _sums(problem: Problem, sample: RowSample, plan: KernelPlan) -> RowSums:
    """Return the sums over the rows of a sample, scored under ``plan``."""
    weights = None if problem.weights is None else sample.weights
    kernels = kernels_of(problem, plan)
    kernel = kernels.acquire(len(sample.rows))
    totals = []
    for begin in range(0, len(sample.rows), kernel.n_rows):
        block = slice(begin, begin + kernel.n_rows)
        block_weights = None if weights is None else weights[block]
        rows = sample.rows[block].astype(plan.dtype, copy=False)
        found = kernel.accumulate(rows, block_weights, None)
        totals.append(found.total if block_weights is None else float(block_weights @ found.log_likelihoods))
    sums = kernels.release(kernel)
    assert sums is not None
    return sums._replace(log_likelihood=math.fsum(totals))
