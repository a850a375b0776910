"""Θ₀ by k-means, k-means++, random, or given responsibilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import numpy as np
from sklearn.cluster import KMeans, kmeans_plusplus
from threadpoolctl import ThreadpoolController

from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import Source
from emtau_dask.em.assignment import (
    Assignment,
    GivenResponsibilities,
    NearestCentre,
    RandomResponsibilities,
    distinct_rows,
    statistics_in_memory,
    statistics_under,
)
from emtau_dask.em.problem import Problem
from emtau_dask.em.sampling import RowSample, rows_of_sample, sample_rows, sample_size, sampled_rows
from emtau_dask.em.state import KMeansProgress
from emtau_dask.errors import AbsentFeatureError, InvalidDataError, counted
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.linalg import Floats, read_only_copy
from emtau_dask.mixture.parameters import MixtureParameters, m_step
from emtau_dask.mixture.statistics import SufficientStatistics

RELATIVE_TOLERANCE = 1e-4
"""Tolerance of k-means for the squared movement of the centres, in mean variances of the features."""
SEED_LIMIT = 2**32
"""Number of seeds that scikit-learn accepts."""
MAX_KMEANS_PASSES = 10
"""Maximum passes of a k-means start over all rows."""
SPARE_ROWS = 64
"""Rows per component among which a start from rows looks for distinct ones."""


@dataclass(frozen=True, eq=False)
class StartRows:
    """The rows that starts are made from: all rows of a problem, which passes read."""

    problem: Problem

    def sample(self, seed: int, size: int) -> RowSample:
        """Return ``size`` of the rows, or all if there are fewer, in random order."""
        return sample_rows(self.problem, seed, size)

    def statistics(self, assignment: Assignment, stage: str) -> SufficientStatistics:
        """Return the statistics of the rows under an assignment that reads nothing."""
        return statistics_under(self.problem, assignment, stage=stage)


@dataclass(frozen=True, eq=False)
class SampledRows(StartRows):
    """Rows of a problem that are in this process's memory."""

    rows: RowSample

    def sample(self, seed: int, size: int) -> RowSample:
        """See `StartRows`."""
        return rows_of_sample(self.rows, seed, size)

    def statistics(self, assignment: Assignment, stage: str) -> SufficientStatistics:
        """See `StartRows`."""
        problem, weights = self.problem, None if self.problem.weights is None else self.rows.weights
        return statistics_in_memory(
            problem.structure, problem.n_components, self.rows.rows, weights, assignment
        )


@dataclass(frozen=True, eq=False)
class KMeansOutcome:
    """The statistics of all rows under the last assignment, and the number of passes over the rows."""

    statistics: SufficientStatistics
    n_iter: int
    converged: bool

    @property
    def centres(self) -> Floats:
        """The means of the last assignment, (K, d)."""
        return self.statistics.means


@cache
def _loaded_libraries() -> ThreadpoolController:
    """Return the controller of scikit-learn's OpenMP library; to find it takes milliseconds."""
    return ThreadpoolController()


def plusplus_seeds(sample: RowSample, n_components: int, seed: int) -> Floats:
    """Return k-means++ seeds (Arthur and Vassilvitskii 2007) among the rows of a sample, (K, d)."""
    with _loaded_libraries().limit(limits=1, user_api="openmp"):
        centres, _ = kmeans_plusplus(
            sample.rows, n_components, sample_weight=sample.weights, random_state=seed % SEED_LIMIT
        )
    return read_only_copy(centres)


def _kmeans_on_sample(rows: StartRows, seed: int) -> KMeansProgress:
    problem = rows.problem
    sample = rows.sample(seed, sample_size(problem.n_components, problem.n_features))
    with _loaded_libraries().limit(limits=1, user_api="openmp"):
        start = KMeans(problem.n_components, n_init=1, random_state=seed % SEED_LIMIT).fit(
            sample.rows, sample_weight=sample.weights
        )
    tolerance = RELATIVE_TOLERANCE * float(np.var(sample.rows, axis=0).mean())
    return KMeansProgress(read_only_copy(start.cluster_centers_), tolerance, 0)


def forget(progress: KMeansProgress) -> None:
    """Do not save the progress."""


def lloyd(
    rows: StartRows,
    seed: int,
    *,
    max_iter: int = 300,
    progress: KMeansProgress | None = None,
    after: Callable[[KMeansProgress], None] = forget,
) -> KMeansOutcome:
    """Run k-means: to convergence on a bounded sample, then by Lloyd passes over all rows.

    It stops when the squared movement of the centres is at most 1e-4 of the features'
    mean variance (scikit-learn's default). A centre without rows moves to the
    centre with the most rows, and the two share these in one more pass.

    Parameters
    ----------
    rows : StartRows
    seed : int
    max_iter : int
        Maximum passes over the rows, at least 1; up to K more if centres lose all their rows.
    progress : KMeansProgress, optional
        Of a run that is resumed.
    after : callable (KMeansProgress) -> None
        Called after the sample and after each pass but the last.
    """
    if progress is None:
        progress = _kmeans_on_sample(rows, seed)
        after(progress)
    while True:
        centres, n_iter = progress.centres, progress.n_iter + 1
        statistics = rows.statistics(NearestCentre.of(centres), f"k-means {n_iter}")
        empty = statistics.weights == 0
        if empty.any() and n_iter < max_iter + rows.problem.n_components:
            heaviest = int(np.argmax(statistics.weights))
            rows.problem.context.observer.note(
                f"k-means: {counted(int(empty.sum()), 'empty centre')} moved onto centre {heaviest}"
            )
            moved = np.where(empty[:, np.newaxis], statistics.means[heaviest], statistics.means)
            progress = replace(progress, centres=read_only_copy(moved), n_iter=n_iter)
        else:
            movement = float(((statistics.means - centres) ** 2).sum())
            converged = movement <= progress.tolerance
            if converged or n_iter >= max_iter:
                return KMeansOutcome(statistics, n_iter, converged)
            progress = replace(progress, centres=statistics.means, n_iter=n_iter)
        after(progress)


@dataclass(frozen=True, eq=False)
class StartRequest:
    """The arguments of a start; ``progress`` and ``after`` are those of `lloyd`."""

    rows: StartRows
    seed: int
    progress: KMeansProgress | None = None
    after: Callable[[KMeansProgress], None] = forget


@dataclass(frozen=True, eq=False)
class GivenParameters:
    """Starting parameters that the user gives, None for the others.

    Weights (K,), means (K, d), and as ``precisions`` the covariances and the precision factors.
    """

    weights: Floats | None = None
    means: Floats | None = None
    precisions: tuple[Floats, Floats] | None = None

    @property
    def whole(self) -> bool:
        """Whether all parameters are given."""
        return self.weights is not None and self.means is not None and self.precisions is not None

    def complete(self, covariance_type: str) -> MixtureParameters | None:
        """Return Θ₀ if all parameters are given, else None."""
        if self.weights is None or self.means is None or self.precisions is None:
            return None
        return MixtureParameters(covariance_type, self.weights, self.means, *self.precisions)


def _kmeans_start(request: StartRequest) -> SufficientStatistics:
    return lloyd(
        request.rows,
        request.seed,
        max_iter=MAX_KMEANS_PASSES,
        progress=request.progress,
        after=request.after,
    ).statistics


def _seeded_start(rows: StartRows, seeds: Floats) -> SufficientStatistics:
    return rows.statistics(NearestCentre.of(seeds), "nearest seed")


def _plusplus_start(request: StartRequest) -> SufficientStatistics:
    rows, seed = request.rows, request.seed
    n_components, n_features = rows.problem.n_components, rows.problem.n_features
    sample = rows.sample(seed, sample_size(n_components, n_features))
    return _seeded_start(rows, plusplus_seeds(sample, n_components, seed))


def _random_rows_start(request: StartRequest) -> SufficientStatistics:
    rows = request.rows
    n_components, n_features = rows.problem.n_components, rows.problem.n_features
    size = min(SPARE_ROWS * n_components, sample_size(n_components, n_features))
    sample = rows.sample(request.seed, size)
    first, _ = distinct_rows(sample.rows)
    distinct = sample.rows[np.sort(first)[:n_components]]
    return _seeded_start(rows, read_only_copy(np.resize(distinct, (n_components, n_features))))


def _random_start(request: StartRequest) -> SufficientStatistics:
    assignment = RandomResponsibilities(request.seed, request.rows.problem.n_components)
    return request.rows.statistics(assignment, "random responsibilities")


STARTS: Mapping[str, Callable[[StartRequest], SufficientStatistics]] = MappingProxyType(
    {
        "kmeans": _kmeans_start,
        "k-means++": _plusplus_start,
        "random": _random_start,
        "random_from_data": _random_rows_start,
    }
)
"""The starts by their ``init_params``; each returns the statistics whose M-step is Θ₀."""


def starting_rows(problem: Problem, samples: Samples) -> StartRows:
    """Return rows of the first sample, in this process's memory.

    They take one pass over the data, after which the rows of all samples are in the cache. If starts draw all
    rows anyway, these are all rows.
    """
    size = sample_size(problem.n_components, problem.n_features)
    if size >= problem.rows.shape[0]:
        return StartRows(problem)
    return SampledRows(problem, sampled_rows(problem, samples, size))


def complete_rows(rows: StartRows, seed: int) -> StartRows:
    """Return sampled rows without missing values, in this process's memory.

    Raises
    ------
    InvalidDataError
        There are too few such rows among those that are sampled.
    """
    problem = rows.problem
    sample = rows.sample(seed, sample_size(problem.n_components, problem.n_features))
    known = np.isfinite(sample.rows)
    complete = np.flatnonzero(known.all(axis=1))
    if len(complete) < problem.n_components:
        shares = known.mean(axis=0)
        rarest = int(shares.argmin())
        found = f"of {len(sample.rows):,} sampled rows only {len(complete):,} have all features"
        if shares[rarest] == 0:
            raise AbsentFeatureError(f"{found}, and none has feature {rarest}. Leave that feature out.")
        raise AbsentFeatureError(
            f"{found}, fewer than the {problem.n_components} components; feature {rarest} is known in "
            f"{shares[rarest]:.1%} of them. Leave such features out, or fit a GaussianMixture with "
            "weights_init, means_init and precisions_init, or with warm_start from another fit."
        )
    return SampledRows(
        problem, RowSample(sample.rows[complete], sample.weights[complete], sample.numbers[complete])
    )


def check_responsibilities_shape(responsibilities: Source | None, rows: Source, n_components: int) -> None:
    """Raise `InvalidDataError` unless ``responsibilities``, if given, are rows x components."""
    wanted = (rows.shape[0], n_components)
    if responsibilities is not None and responsibilities.shape != wanted:
        raise InvalidDataError(
            f"responsibilities_init has shape {responsibilities.shape}; expected {wanted}, rows x components."
        )


def start_from_responsibilities(problem: Problem, responsibilities: Source) -> SufficientStatistics:
    """Return the statistics of all rows under given responsibilities.

    Raises
    ------
    InvalidDataError
        One is negative or not finite, or those of a row do not sum to 1 within 1e-6.
    """
    aligned = responsibilities.aligned(problem.rows.chunk_rows)
    return statistics_under(
        problem, GivenResponsibilities(aligned.reader()), source=aligned, stage="given responsibilities"
    )


def starting_parameters(
    structure: CovarianceStructure, given: GivenParameters, statistics: SufficientStatistics, reg_covar: float
) -> MixtureParameters:
    """Return Θ₀: the given parameters, and the M-step of ``statistics`` for the rest.

    Raises
    ------
    SingularComponentError
        The start itself is singular.
    """
    start = m_step(statistics, structure, reg_covar)
    weights = start.weights if given.weights is None else given.weights
    means = start.means if given.means is None else given.means
    if given.precisions is None:
        return replace(start, weights=weights, means=means)
    return MixtureParameters(start.covariance_type, weights, means, *given.precisions)
