"""Prototypes of other accelerators of EM, for `benchmarks/passes.py`: on rows in memory, all of them passes.

Each works on mean sufficient statistics, which are linear where the parameters are not, and measures them in
the metric of the complete data's Fisher information, so that they differ in their algorithm alone. What leads
to statistics of no mixture is refused before any row is scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from threadpoolctl import threadpool_limits

from emtau_dask.data.row_random import hashed_uniforms
from emtau_dask.em.compiling import worth_compiling
from emtau_dask.em.moments import MomentSpace
from emtau_dask.errors import SingularComponentError
from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.mixture.parameters import MixtureParameters, m_step
from emtau_dask.mixture.plan import plan_kernel
from emtau_dask.mixture.statistics import SufficientStatistics, merged

CHUNK_ROWS = 65_536
FALL = 1e-13
"""By how much the log-likelihood may fall for rounding alone, relative to it."""


@dataclass(frozen=True)
class Pass:
    """What is known after a pass; ``bound`` is the log-likelihood, nats per row, where it is ``exact``."""

    work: float
    seconds: float
    bound: float
    exact: bool = True
    accepted: bool = True
    gap: float = math.nan


@dataclass(frozen=True)
class Limits:
    """A fit ends after so many passes, or where accepted bounds change by less than ``tol``."""

    passes: int
    tol: float


@dataclass(frozen=True, eq=False)
class Point:
    """Moments whose M-step was scored, and what EM maps them to; both of one row."""

    moments: np.ndarray
    response: np.ndarray
    bound: float

    @property
    def step(self) -> np.ndarray:
        return self.response - self.moments


class Rows:
    """Scores rows in memory by the engine's kernels."""

    def __init__(self, rows: np.ndarray, components: int, threads: int) -> None:
        self.rows = rows
        self._compiled = worth_compiling(None, rows.shape, "full", components)
        self.threads = threads

    def __len__(self) -> int:
        return len(self.rows)

    def scored(self, parameters: MixtureParameters) -> tuple[SufficientStatistics, float]:
        """Return the statistics of all rows and their log-likelihood."""
        kernels = Kernels(plan_kernel(parameters), compiled=self._compiled)
        length = max(1024, min(CHUNK_ROWS, -(-len(self.rows) // self.threads)))

        def part(begin: int) -> tuple[SufficientStatistics | None, float]:
            return _chunk(kernels, self.rows[begin : begin + length])

        with threadpool_limits(1), ThreadPoolExecutor(self.threads) as pool:
            parts = list(pool.map(part, range(0, len(self.rows), length)))
        statistics = merged(parameters.structure, [found for found, _ in parts if found is not None])
        return statistics, sum(total for _, total in parts)


def _chunk(kernels: Kernels, rows: np.ndarray) -> tuple[SufficientStatistics | None, float]:
    kernel = kernels.acquire(len(rows))
    total = 0.0
    for begin in range(0, len(rows), kernel.n_rows):
        total += kernel.accumulate(rows[begin : begin + kernel.n_rows], None, None).total
    sums = kernels.release(kernel)
    return None if sums is None else kernels.plan.statistics(sums), total


class Scorer:
    """Makes the passes of an accelerator, and keeps what they found.

    Attributes
    ----------
    start : ndarray
        Moments of which the given start is the M-step.
    passes : list of Pass
    parameters : MixtureParameters
        Of the last point that was accepted.
    """

    def __init__(self, rows: Rows, parameters: MixtureParameters, reg_covar: float, limits: Limits) -> None:
        self.rows, self.parameters, self.reg_covar, self.limits = rows, parameters, reg_covar, limits
        self.passes: list[Pass] = []
        self.space = MomentSpace(parameters.structure, parameters.means)
        weights = parameters.weights
        scatter = weights[:, np.newaxis, np.newaxis] * parameters.covariances
        self.start = self.space.of(SufficientStatistics(weights, parameters.means, scatter))
        self._before = parameters
        self._began = time.perf_counter()

    @property
    def going_on(self) -> bool:
        last = self.passes[-2:]
        comparable = len(last) == 2 and all(each.accepted for each in last)
        if comparable and abs(last[1].bound - last[0].bound) < self.limits.tol:
            return False
        return not last or last[-1].work < self.limits.passes

    def mixture(self, moments: np.ndarray) -> MixtureParameters | None:
        """Return the M-step of moments; None where there is none."""
        statistics = self.space.statistics(moments)
        try:
            return statistics and m_step(statistics, self.space.structure, self.reg_covar)
        except SingularComponentError:
            return None

    def __call__(self, moments: np.ndarray) -> Point:
        """Score all rows under the M-step of moments."""
        parameters = self.mixture(moments)
        if parameters is None:
            raise SingularComponentError(0, 0.0, "an EM step led there")
        statistics, total = self.rows.scored(parameters)
        bound = total / len(self.rows)
        self.record(1.0, bound)
        self._before, self.parameters = self.parameters, parameters
        return Point(moments, self.space.of(statistics) / len(self.rows), bound)

    def record(self, work: float, bound: float, beside: float = 0.0) -> None:
        """Note a pass; ``beside`` are seconds that are none of the method's."""
        self._began += beside
        so_far = self.passes[-1].work if self.passes else 0.0
        self.passes.append(Pass(so_far + work, time.perf_counter() - self._began, bound))

    def refuse(self) -> None:
        """Do not keep what the last pass scored."""
        self.passes[-1] = replace(self.passes[-1], accepted=False)
        self.parameters = self._before

    def standardised(self, *vectors: np.ndarray) -> np.ndarray:
        """Return vectors of moments, as columns in the metric at the accepted parameters."""
        space = MomentSpace(self.space.structure, self.parameters.means)
        moved = [self.space.moved(vector, space.origins) for vector in vectors]
        return np.array([space.standardised(vector, self.parameters) for vector in moved]).T


def falls(bound: float, before: float) -> bool:
    return not bound >= before - FALL * max(1.0, abs(before))


def plain(score: Scorer) -> None:
    """EM."""
    moments = score.start
    while score.going_on:
        moments = score(moments).response


def anderson(score: Scorer, memory: int = 8) -> None:
    """Anderson mixing of the statistics of the last passes; it begins anew where the likelihood falls."""
    points: list[Point] = []
    moments = score.start
    while score.going_on:
        point = score(moments)
        if points and falls(point.bound, points[-1].bound):
            score.refuse()
            moments, points = points[-1].response, []
            continue
        points = [*points, point][-memory - 1 :]
        moments = _mixed(score, points)
        if score.mixture(moments) is None:
            moments, points = point.response, [point]


def _mixed(score: Scorer, points: list[Point]) -> np.ndarray:
    *earlier, last = points
    if not earlier:
        return last.response
    columns = score.standardised(last.step, *(last.step - point.step for point in earlier))
    target, changes = columns[:, 0], columns[:, 1:]
    lengths = np.linalg.norm(changes, axis=0)
    lengths[lengths == 0] = 1.0
    shares = np.linalg.lstsq(changes / lengths, target, rcond=1e-8)[0] / lengths
    return last.response - sum(
        share * (last.response - point.response) for share, point in zip(shares, earlier, strict=True)
    )


def squarem(score: Scorer) -> None:
    """SQUAREM, scheme S3, monotone (Varadhan and Roland 2008), with the step lengths of their R package."""
    longest = 1.0
    first = score(score.start)
    while score.going_on:
        second = score(first.response)
        if not score.going_on:
            return
        change = second.step - first.step
        sizes = np.linalg.norm(score.standardised(first.step, change), axis=0)
        length = float(np.clip(sizes[0] / sizes[1] if sizes[1] > 0 else 1.0, 1.0, longest))
        tried = first.moments + 2 * length * first.step + length**2 * change
        at_most = length == longest
        if score.mixture(tried) is None:
            refused = True
            third = second
        else:
            third = score(tried)
            refused = falls(third.bound, first.bound)
            if refused:
                score.refuse()
                third = second
        if at_most:
            longest = max(1.0, longest / 4) if refused else 4 * longest
        first = score(third.response)


def daarem(score: Scorer, order: int = 10) -> None:
    """DAAREM (Henderson and Varadhan 2019): damped Anderson mixing, begun anew every ``order`` steps.

    With the settings of their R package: a step may lower the log-likelihood of all rows by 0.01 nats;
    damping decreases with steps that are accepted, and increases where ``order`` steps lowered it.
    """
    slack = 0.01 / len(score.rows)
    base, least = 1.2, 25
    successes = 0
    before = score(score.start)
    point = score(before.response)
    cycle_began = point.bound
    steps: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    while score.going_on:
        steps.append(point.moments - before.moments)
        changes.append(point.step - before.step)
        columns = score.standardised(point.step, *changes)
        target = 1.0 / (1.0 + base ** (least - successes))
        shares = _damped(columns[:, 1:], columns[:, 0], target)
        proposed = point.response - sum(
            share * (step + change) for share, step, change in zip(shares, steps, changes, strict=True)
        )
        following = None
        if score.mixture(proposed) is not None:
            following = score(proposed)
            if following.bound >= point.bound - slack:
                successes += 1
            else:
                score.refuse()
                following = None
        before, point = point, following or score(point.response)
        if len(steps) == order:
            steps, changes = [], []
            if point.bound < cycle_began:
                successes = max(successes - order, -2 * least)
            cycle_began = point.bound


def _damped(changes: np.ndarray, step: np.ndarray, target: float) -> np.ndarray:
    """Return ridge coefficients whose squared length is ``target`` times that of least squares (eq. 9)."""
    left, singular, right = np.linalg.svd(changes, full_matrices=False)
    kept = singular > 1e-12 * max(singular[0], 1e-300)
    left, singular, right = left[:, kept], singular[kept], right[kept]
    products = left.T @ step
    wanted = target * float(np.sum((products / singular) ** 2))
    if not wanted > 0:
        return np.zeros(changes.shape[1])

    def excess(log_ridge: float) -> float:
        return float(np.sum((products * singular / (singular**2 + math.exp(log_ridge))) ** 2)) - wanted

    low, high = 2 * math.log(singular[-1]) - 60.0, 2 * math.log(singular[0]) + 60.0
    ridge = math.exp(brentq(excess, low, high)) if excess(low) > 0 > excess(high) else 0.0
    return right.T @ (products * singular / (singular**2 + ridge))


def incremental(score: Scorer, blocks: int = 16, seed: int = 0) -> None:
    """Incremental EM (Neal and Hinton 1998): an M-step after each block of rows, drawn by a hash.

    It makes no pass under one Θ. After each sweep the log-likelihood is measured beside, in no method's time.
    """
    numbers = hashed_uniforms((seed, blocks), np.arange(len(score.rows)))
    of_row = (numbers * blocks).astype(int)
    began = time.perf_counter()
    parts = [
        Rows(score.rows.rows[of_row == block], len(score.parameters.weights), score.rows.threads)
        for block in range(blocks)
    ]
    score._began += time.perf_counter() - began
    found = [part.scored(score.parameters) for part in parts]
    score.record(1.0, sum(total for _, total in found) / len(score.rows))
    statistics = [each for each, _ in found]
    structure = score.space.structure
    while score.going_on:
        for block, part in enumerate(parts):
            score.parameters = m_step(merged(structure, statistics), structure, score.reg_covar)
            statistics[block], _ = part.scored(score.parameters)
        began = time.perf_counter()
        score.parameters = m_step(merged(structure, statistics), structure, score.reg_covar)
        _, total = score.rows.scored(score.parameters)
        score.record(1.0, total / len(score.rows), beside=time.perf_counter() - began)


ACCELERATORS: dict[str, Callable[[Scorer], None]] = {
    "EM (prototype)": plain,
    "Anderson": anderson,
    "SQUAREM": squarem,
    "DAAREM": daarem,
    "incremental EM": incremental,
}
