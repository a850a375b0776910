"""Starting parameters Θ₀, in bounded memory, the same for a seed under any chunking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from emtau_dask.em import Context, KMeansProgress, Problem, make_problem
from emtau_dask.errors import InvalidDataError
from emtau_dask.execution import one_thread
from emtau_dask.init.assignment import (
    GivenResponsibilities,
    NearestCentre,
    RandomResponsibilities,
    distinct_rows,
    statistics_under,
)
from emtau_dask.init.kmeans import forget, lloyd, plusplus_seeds
from emtau_dask.init.sampling import sample_rows, sample_size, sampled_rows
from emtau_dask.io.sources import Source, as_source
from emtau_dask.mixture.model import MixtureParameters, SufficientStatistics, m_step
from emtau_dask.mixture.numerics import Floats, read_only_copy
from emtau_dask.rows import Samples

KMEANS_PASSES = 10
SPARE_ROWS = 64


@dataclass(frozen=True, eq=False)
class StartRequest:
    """What a start depends on; ``progress`` and ``after`` are those of `lloyd`."""

    problem: Problem
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
        """Return Θ₀ where all parameters are given, else None."""
        if self.weights is None or self.means is None or self.precisions is None:
            return None
        return MixtureParameters(covariance_type, self.weights, self.means, *self.precisions).factorised()


def _kmeans_start(request: StartRequest) -> SufficientStatistics:
    return lloyd(
        request.problem, request.seed, max_iter=KMEANS_PASSES, progress=request.progress, after=request.after
    ).statistics


def _seeded_start(problem: Problem, seeds: Floats) -> SufficientStatistics:
    return statistics_under(problem, NearestCentre.of(seeds), stage="nearest seed")


def _plusplus_start(request: StartRequest) -> SufficientStatistics:
    problem, seed = request.problem, request.seed
    sample = sample_rows(problem, seed, sample_size(problem.n_components, problem.n_features))
    return _seeded_start(problem, plusplus_seeds(sample, problem.n_components, seed))


def _random_rows_start(request: StartRequest) -> SufficientStatistics:
    problem, n_components = request.problem, request.problem.n_components
    size = min(SPARE_ROWS * n_components, sample_size(n_components, problem.n_features))
    sample = sample_rows(problem, request.seed, size)
    first, _ = distinct_rows(sample.rows)
    distinct = sample.rows[np.sort(first)[:n_components]]
    return _seeded_start(problem, read_only_copy(np.resize(distinct, (n_components, problem.n_features))))


def _random_start(request: StartRequest) -> SufficientStatistics:
    assignment = RandomResponsibilities(request.seed, request.problem.n_components)
    return statistics_under(request.problem, assignment, stage="random responsibilities")


STARTS: Mapping[str, Callable[[StartRequest], SufficientStatistics]] = MappingProxyType(
    {
        "kmeans": _kmeans_start,
        "k-means++": _plusplus_start,
        "random": _random_start,
        "random_from_data": _random_rows_start,
    }
)
"""The starts by their ``init_params``; each returns the statistics whose M-step is Θ₀."""


def starting_problem(problem: Problem, samples: Samples) -> Problem:
    """Return the problem of a start on rows of the first sample, in this process's memory.

    The one pass over the data that it takes leaves the rows of all samples in the cache. Where starts draw
    all rows anyway, the problem is the same.
    """
    size = sample_size(problem.n_components, problem.n_features)
    if size >= problem.rows.shape[0]:
        return problem
    sample = sampled_rows(problem, samples, size)
    return _in_memory(problem, sample.rows, sample.weights)


def complete_problem(problem: Problem, seed: int) -> Problem:
    """Return the problem of a start on sampled rows of which no value is missing, in this process's memory.

    Raises
    ------
    InvalidDataError
        There are too few such rows among those that are sampled.
    """
    sample = sample_rows(problem, seed, sample_size(problem.n_components, problem.n_features))
    complete = np.flatnonzero(np.isfinite(sample.rows).all(axis=1))
    if len(complete) < problem.n_components:
        raise InvalidDataError(
            f"of {len(sample.rows):,} sampled rows only {len(complete):,} have all features, fewer than the "
            f"{problem.n_components} components. Give weights_init, means_init and precisions_init, or "
            "warm_start from another fit."
        )
    return _in_memory(problem, sample.rows[complete], sample.weights[complete])


def _in_memory(problem: Problem, rows: Floats, weights: Floats) -> Problem:
    """Return the problem of some rows, in this process's memory; all have weight 1 where the data has."""
    weighted = None if problem.weights is None else as_source(weights, ndim=1, what="sample_weight")
    return make_problem(
        as_source(rows, ndim=2, what="X"),
        weighted,
        problem.n_components,
        problem.structure,
        one_thread(),
        Context(problem.context.observer),
        compiled=problem.compiled,
    )


def check_responsibilities_shape(responsibilities: Source | None, rows: Source, n_components: int) -> None:
    """Raise `InvalidDataError` unless ``responsibilities``, where given, are rows x components."""
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
        One is negative or not finite, or a row that does not sum to 1 within 1e-6.
    """
    aligned = responsibilities.aligned(problem.rows.chunk_rows)
    return statistics_under(
        problem, GivenResponsibilities(aligned.reader()), source=aligned, stage="given responsibilities"
    )


def starting_parameters(
    problem: Problem, given: GivenParameters, statistics: SufficientStatistics, reg_covar: float
) -> MixtureParameters:
    """Return Θ₀: the given parameters, and the M-step of ``statistics`` for the rest.

    Raises
    ------
    SingularComponentError
        The start itself is singular.
    """
    start = m_step(statistics, problem.structure, reg_covar)
    weights = start.weights if given.weights is None else given.weights
    means = start.means if given.means is None else given.means
    if given.precisions is None:
        return replace(start, weights=weights, means=means)
    return MixtureParameters(start.covariance_type, weights, means, *given.precisions).factorised()
