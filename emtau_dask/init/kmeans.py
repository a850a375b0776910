"""K-means over chunks: Lloyd's algorithm on the same passes and tree as EM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from sklearn.cluster import KMeans, kmeans_plusplus
from threadpoolctl import threadpool_limits

from emtau_dask.em import KMeansProgress, Problem
from emtau_dask.init.assignment import NearestCentre, statistics_under
from emtau_dask.init.sampling import RowSample, sample_rows, sample_size
from emtau_dask.mixture.model import SufficientStatistics
from emtau_dask.mixture.numerics import Floats, read_only_copy

RELATIVE_TOLERANCE = 1e-4
SEED_LIMIT = 2**32


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


def plusplus_seeds(sample: RowSample, n_components: int, seed: int) -> Floats:
    """Return k-means++ seeds (Arthur and Vassilvitskii 2007) among the rows of a sample, (K, d)."""
    with threadpool_limits(limits=1, user_api="openmp"):
        centres, _ = kmeans_plusplus(
            sample.rows, n_components, sample_weight=sample.weights, random_state=seed % SEED_LIMIT
        )
    return read_only_copy(centres)


def _on_sample(problem: Problem, seed: int) -> KMeansProgress:
    sample = sample_rows(problem, seed, sample_size(problem.n_components, problem.n_features))
    with threadpool_limits(limits=1, user_api="openmp"):
        start = KMeans(problem.n_components, n_init=1, random_state=seed % SEED_LIMIT).fit(
            sample.rows, sample_weight=sample.weights
        )
    tolerance = RELATIVE_TOLERANCE * float(np.var(sample.rows, axis=0).mean())
    return KMeansProgress(read_only_copy(start.cluster_centers_), tolerance, 0)


def forget(progress: KMeansProgress) -> None:
    """Do not save the progress."""


def lloyd(
    problem: Problem,
    seed: int,
    *,
    max_iter: int = 300,
    progress: KMeansProgress | None = None,
    after: Callable[[KMeansProgress], None] = forget,
) -> KMeansOutcome:
    """Run k-means: to convergence on a bounded sample, then by Lloyd passes over all rows.

    It stops when the centres' squared movement is at most 1e-4 of the features'
    mean variance (scikit-learn's default). A centre without rows moves onto the
    centre with the most rows, and the two share them in one more pass.

    Parameters
    ----------
    problem : Problem
    seed : int
    max_iter : int
        Passes over the rows, at least 1; up to K more where centres lose all their rows.
    progress : KMeansProgress, optional
        Of a run that is resumed.
    after : callable (KMeansProgress) -> None
        Called after the sample and after each pass but the last.
    """
    if progress is None:
        progress = _on_sample(problem, seed)
        after(progress)
    while True:
        centres, n_iter = progress.centres, progress.n_iter + 1
        statistics = statistics_under(problem, NearestCentre.of(centres), stage=f"k-means {n_iter}")
        empty = statistics.weights == 0
        if empty.any() and n_iter < max_iter + problem.n_components:
            heaviest = int(np.argmax(statistics.weights))
            problem.context.observer.note(
                f"k-means: {int(empty.sum())} empty centre(s) moved onto centre {heaviest}"
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
