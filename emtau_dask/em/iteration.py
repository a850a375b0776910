"""A pass of a run: partial E-steps over chunks, and the statistics, M-step and bound that they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import NamedTuple

from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import Climbing, EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.em.sums import FrozenRows, PassTotals, merge_passes, totals_of
from emtau_dask.em.task import EStepItem, EStepTask, RowTracking, SampleLevel
from emtau_dask.errors import CheckpointCorruptError, SingularComponentError
from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.mixture.missing import PatternKernels
from emtau_dask.mixture.parameters import MixtureParameters, expected_log_density, m_step, tempered
from emtau_dask.mixture.plan import DOUBLE, KernelPlan, plan_kernel, plan_tiles
from emtau_dask.mixture.statistics import SufficientStatistics, merge
from emtau_dask.storage.row_state import RowStateWriter


class Scored(NamedTuple):
    """A pass: its totals, and what follows from them for all rows that it stands for.

    Attributes
    ----------
    totals : PassTotals
    weight : float
        Of the rows that it stands for: those of the sample, or all.
    statistics : SufficientStatistics or None
        None where they are those of no mixture.
    plain : MixtureParameters or None
        Their M-step; None where there is none, and where a component collapsed.
    bound : float
        Nats per row of ``weight``.
    collapse : SingularComponentError or None
        Which component collapsed.
    repeated : bool
        Whether the rows were scored again, since the first pass lost too many digits.
    """

    totals: PassTotals
    weight: float
    statistics: SufficientStatistics | None
    plain: MixtureParameters | None
    bound: float
    collapse: SingularComponentError | None
    repeated: bool


def sample_of(state: RunState, settings: EmSettings) -> SampleLevel | None:
    """Return the sample that a run scores next; None where it scores all rows, or active ones."""
    if settings.climbing is None or state.progress is None:
        return None
    samples, level = settings.climbing.samples, state.progress.level
    return SampleLevel(samples, level) if level < len(samples.shares) else None


def score(
    problem: Problem,
    state: RunState,
    settings: EmSettings,
    chunks: Sequence[int],
    sample: SampleLevel | None,
    writer: Callable[[], RowStateWriter | None],
) -> Scored:
    """Return a pass over ``chunks``, or over the rows of a sample in them, under the parameters of a state.

    Raises
    ------
    SingularComponentError
        A component collapsed, in a run that does not extrapolate.
    CheckpointCorruptError
        Row state has no active row where there should be some.
    InvalidDataError
        A row holds NaN or infinity, or is beyond the range of float64.
    """
    frozen = None if state.afresh else state.frozen
    cycle = None if state.progress is None else state.progress.cycle
    held = None if state.afresh or cycle is None else cycle.held
    structure, threads = problem.structure, problem.executor.threads

    def totals_by(plan: KernelPlan) -> PassTotals:
        return _e_step(problem, state, plan, settings, chunks, sample, None if sample else writer())

    def statistics(totals: PassTotals) -> SufficientStatistics | None:
        if held is not None:
            return held.total(structure, totals.statistics)
        if sample is not None:
            return totals.statistics
        return _all_rows(problem, totals, frozen)

    def maximise(totals: PassTotals) -> MixtureParameters | None:
        found = statistics(totals)
        return None if found is None else m_step(found, structure, settings.reg_covar, threads)

    heat = 0 if state.progress is None else state.progress.heat
    parameters = tempered(state.parameters, Climbing.inverse_temperature(heat))
    dtype = DOUBLE if problem.missing else problem.rows.dtype
    if problem.compiled:
        plan = plan_tiles(parameters, dtype, _rows_of_a_chunk(problem, state, chunks, sample))
    else:
        plan = plan_kernel(parameters, dtype)
    totals, plain, collapse, repeated = _with_enough_digits(totals_by, maximise, plan)
    if collapse is not None and settings.climbing is None:
        raise collapse
    weight = problem.total_weight
    if sample is not None:
        weight = 0.0 if totals.statistics is None else float(totals.statistics.weights.sum())
        bound = totals.log_likelihood / weight if weight else -math.inf
    elif held is not None:
        bound = (totals.log_likelihood + held.bound(structure, state.parameters)) / weight
    else:
        bound = _lower_bound(problem, state.parameters, totals, frozen)
    found = None if plain is None else statistics(totals)
    return Scored(totals, weight, found, plain, bound, collapse, repeated)


def _rows_of_a_chunk(
    problem: Problem, state: RunState, chunks: Sequence[int], sample: SampleLevel | None
) -> float:
    """Return how many rows of a chunk are scored, on average."""
    counts = problem.rows.chunk_rows
    if sample is None and not state.afresh:
        return sum(state.remaining[chunk] for chunk in chunks) / max(1, len(chunks))
    share = 1.0 if sample is None else sample.samples.shares[sample.level]
    return share * sum(counts[chunk] for chunk in chunks) / max(1, len(chunks))


def _with_enough_digits(
    score: Callable[[KernelPlan], PassTotals],
    maximise: Callable[[PassTotals], MixtureParameters | None],
    plan: KernelPlan,
) -> tuple[PassTotals, MixtureParameters | None, SingularComponentError | None, bool]:
    """Return the totals of a pass by ``plan``, and Θ; where too many digits were lost, of one that kept them.

    In place of Θ there may be the collapse of a component, or neither where ``maximise`` finds no mixture.
    The last of what is returned says whether there was another pass.
    """
    first, bytes_read = plan, 0
    while True:
        totals = score(plan)
        bytes_read += totals.bytes_read
        parameters, collapse = None, None
        try:
            parameters = maximise(totals)
            again = None if parameters is None else plan.again(parameters)
        except SingularComponentError as error:
            collapse, again = error, None if plan.exact else plan.centred
        if again is None:
            return replace(totals, bytes_read=bytes_read), parameters, collapse, plan is not first
        plan = again if plan is first else plan.centred


def _e_step(
    problem: Problem,
    state: RunState,
    plan: KernelPlan,
    settings: EmSettings,
    chunks: Sequence[int],
    sample: SampleLevel | None,
    writer: RowStateWriter | None,
) -> PassTotals:
    tracking = None
    if writer is not None:
        tracking = RowTracking(settings.policy, writer, problem.context.cache)
        if settings.climbing is not None and state.progress is not None:
            samples = settings.climbing.samples
            tracking = replace(tracking, seed=samples.seed, unsure=state.progress.unsure, left=samples.names)
    ranges, sizes, width = problem.chunk_ranges, problem.costs, problem.n_features
    slots = {} if state.afresh else state.slots
    active = sizes if state.afresh else {chunk: float(state.remaining[chunk] * width) for chunk in chunks}
    if sample is not None:
        share = sample.samples.shares[sample.level]
        active = {chunk: share * size for chunk, size in sizes.items()}
    iteration = state.iteration + 1
    kernels = PatternKernels(plan) if problem.missing else Kernels(plan, compiled=problem.compiled)
    found = problem.map_reduce(
        EStepTask(problem.loader, kernels, iteration, tracking, sample),
        partial(merge_passes, problem.structure),
        name="estep",
        stage=f"iteration {iteration}",
        items={chunk: EStepItem(ranges[chunk], slots.get(chunk)) for chunk in chunks},
        costs={chunk: active[chunk] + sizes[chunk] / 16 for chunk in chunks},
    )
    return PassTotals() if found is None else totals_of(plan, found)


def _all_rows(problem: Problem, totals: PassTotals, frozen: FrozenRows | None) -> SufficientStatistics:
    parts = [part.statistics for part in (frozen, totals) if part is not None and part.statistics is not None]
    if not parts:
        raise CheckpointCorruptError(
            "row state has no active row where the checkpoint says that there are some."
        )
    return reduce(partial(merge, problem.structure), parts)


def _lower_bound(
    problem: Problem, parameters: MixtureParameters, totals: PassTotals, frozen: FrozenRows | None
) -> float:
    """Return Neal and Hinton's free energy F(Θ, q), nats per (weighted) row."""
    total = totals.log_likelihood
    if frozen is not None:
        total += expected_log_density(frozen.statistics, parameters) + frozen.entropy
    return total / problem.total_weight
