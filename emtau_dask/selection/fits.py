"""The fits of a selection, each an ordinary run: candidates to the sample, the best ones to all rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from zarr.storage import MemoryStore

from emtau_dask.checkpoint.reader import SavedFit
from emtau_dask.em.history import FitHistory, FitObserver
from emtau_dask.em.problem import Problem
from emtau_dask.em.settings import automatic
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointTakenError,
    SingularComponentError,
)
from emtau_dask.estimator.fitting import fit_estimator, publish
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.resuming import open_saved, resume_estimator, saved_estimator
from emtau_dask.execution.executor import Executor
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import free_parameters
from emtau_dask.policies.registry import DescribedPolicy
from emtau_dask.selection.checkpoint import SelectionCheckpoint, SelectionEntry
from emtau_dask.selection.criteria import ROWS_PER_PARAMETER, SelectionSettings
from emtau_dask.selection.passes import CountedRows
from emtau_dask.selection.split import split_start
from emtau_dask.settings import Settings
from emtau_dask.storage.commits import check_startable, holds_run
from emtau_dask.storage.objects import ObjectStore, copy_new
from emtau_dask.storage.stores import ZarrStoreObjects

STARTS, SHORT = 8, 30
"""Number of short runs of a candidate on a small sample, and their iterations."""


@contextmanager
def _here(executor: Executor) -> Iterator[None]:
    """Run fits in this process, where the sample is, without warnings that the table repeats."""
    threads = {} if executor.in_process else {"scheduler": "threads"}
    with dask.config.set(threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ConvergenceWarning)
        warnings.filterwarnings("ignore", message=r"start \d+ of \d+ is left out")
        yield


@dataclass(frozen=True, eq=False)
class SampleFits:
    """The fits of candidates to the sample.

    Attributes
    ----------
    fits : mapping of str to GaussianMixture
        By the names of candidates.
    reasons : mapping of str to str
        Why runs collapsed, by their names.
    split_from : mapping of str to int
        The number of components of the smaller fit, for each candidate whose fit began at a split of it.
    """

    fits: Mapping[str, GaussianMixture]
    reasons: Mapping[str, str]
    split_from: Mapping[str, int]


def fit_candidates(
    settings: SelectionSettings,
    entry: SelectionEntry,
    sample: Callable[[], CountedRows],
    checkpoint: SelectionCheckpoint | None,
    problem: Problem,
) -> SampleFits:
    """Return the fits of candidates to the sample.

    If the likelihood of a candidate is below that of one of the same type with fewer components, it missed a
    better optimum. It is fitted once more, from a split of the smaller one, and the better fit is kept. A
    collapsed one is fitted once more, too; from other starts if there is nothing to split. Fits in the
    checkpoint are read, and runs that are known to collapse are skipped.
    """
    fits: dict[str, GaussianMixture] = {}
    split_from: dict[str, int] = {}
    best: dict[str, GaussianMixture] = {}
    runs = _Runs(entry, sample, checkpoint, problem.executor, dict(entry.reasons))
    for number, candidate in enumerate(settings.candidates, 1):
        called = f"{candidate}, candidate {number} of {len(settings.candidates)}"
        problem.context.observer.part(called)
        name, smaller = candidate.name, best.get(candidate.covariance_type)
        estimator, seed = partial(settings.estimator, candidate), entry.seeds[1]
        found = runs.fitted(name, estimator(seed))
        if smaller is not None and not _at_least(found, smaller):
            split = runs.fitted(f"{name}-split", estimator(seed), smaller)
            if split is not None and (found is None or not _at_least(found, split)):
                found, split_from[name] = split, len(smaller.means_)
        found = found or runs.fitted(f"{name}-again", estimator(seed + 1))
        result = "could not be fitted"
        if found is not None:
            fits[name] = found
            best[candidate.covariance_type] = (
                found if smaller is None or _at_least(found, smaller) else smaller
            )
            result = f"log-likelihood per row {found.lower_bound_:.7g} on the sample"
        if name in split_from:
            result += f", from a split of the fit with {split_from[name]} components"
        problem.context.observer.note(f"{called}: {result}")
    return SampleFits(fits, runs.reasons, split_from)


@dataclass(frozen=True, eq=False)
class _Runs:
    """The runs on the sample; ``reasons`` grows with those that collapse."""

    entry: SelectionEntry
    sample: Callable[[], CountedRows]
    checkpoint: SelectionCheckpoint | None
    executor: Executor
    reasons: dict[str, str]

    def fitted(
        self, name: str, estimator: GaussianMixture, smaller: GaussianMixture | None = None
    ) -> GaussianMixture | None:
        """Return the fit of a run, from a split of ``smaller`` if that is given.

        None if it collapsed, now or before it was interrupted, or if nothing can be split.
        """
        if name in self.entry.reasons:
            return None
        place = None if self.checkpoint is None else self.checkpoint.run("candidates", name)
        try:
            with _here(self.executor):
                return _fitted_to_sample(estimator, self.sample, place, smaller)
        except SingularComponentError as error:
            self.reasons[name] = str(error)
            return None


def _at_least(mixture: GaussianMixture | None, other: GaussianMixture) -> bool:
    """Return whether the likelihood of a fit is not below that of another."""
    return mixture is not None and bool(mixture.lower_bound_ >= other.lower_bound_)


def _fitted_to_sample(
    estimator: GaussianMixture,
    sample: Callable[[], CountedRows],
    place: ObjectStore | None,
    smaller: GaussianMixture | None,
) -> GaussianMixture | None:
    """Return an estimator that is fitted to the sample; None if ``smaller``, if given, cannot be split.

    Its run is written when it has ended, since starts and iterations on a sample take less time than commits.
    """
    saved = None if place is None else _saved(place)
    if place is not None and saved is not None:
        mixture = _estimator_of_run(estimator, saved, place)
        publish(mixture, saved.state)
        return mixture
    if smaller is not None:
        start = split_start(smaller, sample(), estimator.n_components)
        if start is None:
            return None
        estimator.set_params(**start)
    if place is None:
        return fit_sample(estimator, sample())
    run = ZarrStoreObjects.opened(MemoryStore())
    mixture = fit_sample(estimator, sample(), run)
    with _as_new(place):
        check_startable(place, overwrite=False)
    place.prepare()
    copy_new(run, place)
    place.sync(place.list(""))
    return mixture


def fit_sample(
    mixture: GaussianMixture, sample: CountedRows, run: ObjectStore | None = None
) -> GaussianMixture:
    """Fit a candidate's estimator to the sample, with ``run`` as its checkpoint; return it.

    For few rows per parameter ``"auto"`` has only a few annealed starts. So eight short runs of EM with
    quasi-Newton steps replace them, and the best continues: Biernacki, Celeux and Govaert 2003, "Choosing
    starting values for the EM algorithm".
    """
    mixture.set_params(verbose=0)
    rows, counts = sample.rows, sample.counts
    if _has_short_runs(mixture, *rows.shape):
        structure, most = structure_named(mixture.covariance_type), mixture.max_iter
        p = free_parameters(structure, mixture.n_components, rows.shape[1])
        if mixture.tol == "auto" and len(rows) >= ROWS_PER_PARAMETER * p:
            mixture.set_params(tol="statistical")
        if mixture.acceleration == "auto":
            mixture.set_params(acceleration="quasi-newton")
        mixture.set_params(algorithm="em", n_init=STARTS, max_iter=min(SHORT, most))
        mixture.fit(rows, sample_weight=counts)
        mixture.set_params(warm_start=True, max_iter=most)
    mixture.set_params(checkpoint=run, checkpoint_every=max(1, mixture.max_iter))
    return mixture.fit(rows, sample_weight=counts)


def _has_short_runs(mixture: GaussianMixture, n_rows: int, n_features: int) -> bool:
    if mixture.means_init is not None or not Settings.of(mixture).automatic or mixture.n_init != "auto":
        return False
    return automatic(n_rows, mixture.n_components, n_features, mixture.covariance_type).annealed


def fit_to_all_rows(
    estimator: GaussianMixture,
    start: GaussianMixture,
    data: Mapping[str, Any],
    place: ObjectStore | None,
    observer: FitObserver,
) -> GaussianMixture:
    """Return an estimator fitted to all rows from ``start``, its fit to the sample.

    A killed run in ``place`` is resumed. Raises `SingularComponentError` if a component collapsed.
    """
    saved = None if place is None else _saved(place)
    if saved is None:
        mixture: GaussianMixture = clone(estimator)
        mixture._publish(start.parameters_, FitHistory(), "max-iter")  # A warm start begins from these.
        mixture.set_params(warm_start=True, checkpoint=place)
        with _as_new(place):
            fit_estimator(
                mixture,
                data["X"],
                data["sample_weight"],
                None,
                chosen=data["chosen"],
                observer=observer,
            )
    else:
        mixture = _estimator_of_run(estimator, saved, place)
        resume_estimator(
            mixture,
            saved,
            data["X"],
            sample_weight=data["sample_weight"],
            responsibilities_init=None,
            chosen=data["chosen"],
            observer=observer,
        )
    mixture._warn_unless_converged()
    return mixture.set_params(**estimator.get_params(deep=False))


@contextmanager
def _as_new(place: ObjectStore | None) -> Iterator[None]:
    """Raise `CheckpointTakenError` if the place of a new run has one by now."""
    try:
        yield
    except CheckpointExistsError as error:
        assert place is not None
        raise CheckpointTakenError(
            f"another process continues this selection: it has begun the fit in {place.location} "
            "meanwhile. Let it finish, or stop it and give the same call again."
        ) from error


def _saved(place: ObjectStore) -> SavedFit | None:
    """Return the stored run; None if there is none. Remnants of a damaged one are removed."""
    try:
        if holds_run(place):
            return open_saved(place)
    except CheckpointCorruptError:
        pass
    place.delete(place.list(""))
    return None


def _estimator_of_run(
    estimator: GaussianMixture, saved: SavedFit, place: ObjectStore | None
) -> GaussianMixture:
    own = isinstance(saved.config.policy, DescribedPolicy)
    return saved_estimator(type(estimator), saved, place, estimator.algorithm if own else None)
