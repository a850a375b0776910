"""The fits of a selection: each candidate's to the sample, and the finalists' to all rows."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask
from sklearn.exceptions import ConvergenceWarning

from emtau_dask.em.history import FitHistory, FitObserver, IterationRecord
from emtau_dask.em.settings import automatic
from emtau_dask.errors import CheckpointCorruptError, InvalidDataError, SingularComponentError
from emtau_dask.estimator.fitting import fit_estimator, is_automatic
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.resuming import open_saved, resume_estimator, saved_estimator
from emtau_dask.execution.executor import Executor
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.selection.checkpoint import CandidateEntry, SelectionCheckpoint
from emtau_dask.selection.criteria import ROWS_PER_PARAMETER, Candidate, SelectionSettings
from emtau_dask.selection.passes import CountedRows
from emtau_dask.storage.commits import holds_run
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.stores import NotExclusiveWarning

STARTS, SHORT = 8, 30
"""Short runs of a candidate on a sample of few rows, and the iterations of each."""


@dataclass(frozen=True, eq=False)
class CandidateFit:
    """A candidate's fit to the sample.

    Attributes
    ----------
    parameters : MixtureParameters or None
        None where it could not be fitted.
    mean : float
        The log-likelihood of the sample, nats per row; minus infinity where it could not be fitted.
    converged : bool
    seconds : float
    reason : str
        Why it could not be fitted.
    """

    parameters: MixtureParameters | None
    mean: float
    converged: bool
    seconds: float
    reason: str


class Unclosed:
    """Passes on to an observer all but that one of several fits is over."""

    def __init__(self, observer: FitObserver) -> None:
        self._observer = observer

    def stage(self, name: str, chunks: int) -> None:
        """Pass on."""
        self._observer.stage(name, chunks)

    def chunks_done(self, count: int) -> None:
        """Pass on."""
        self._observer.chunks_done(count)

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Pass on."""
        self._observer.iteration(record, parameters)

    def note(self, message: str) -> None:
        """Pass on."""
        self._observer.note(message)

    def close(self, *, done: bool) -> None:
        """Ignore."""


@contextmanager
def _here(executor: Executor) -> Iterator[None]:
    """Let fits run in this process, where the sample is, and say nothing of what the table says."""
    threads = {} if executor.in_process else {"scheduler": "threads"}
    with dask.config.set(threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ConvergenceWarning)
        warnings.filterwarnings("ignore", message=r"start \d+ of \d+ is left out")
        yield


def fit_candidates(
    settings: SelectionSettings,
    seed: int,
    sample: Callable[[], CountedRows],
    checkpoint: SelectionCheckpoint | None,
    executor: Executor,
    observer: FitObserver,
) -> dict[Candidate, CandidateFit]:
    """Return the fit of every candidate to the sample; those that the checkpoint holds are not fitted again.

    A candidate whose likelihood is lower than that of one of the same type with fewer components ended in a
    worse optimum than there is. It is fitted once more, from other starts, and the better fit is kept.
    """
    found: dict[Candidate, CandidateFit] = {}
    best: dict[str, float] = {}
    for candidate in settings.candidates:
        kept = None if checkpoint is None else _kept(checkpoint, candidate)
        if kept is None:
            least = best.get(candidate.covariance_type, -math.inf)
            with _here(executor):
                kept = _fit_to_sample(settings, seed, candidate, sample(), least)
            if checkpoint is not None:
                _keep(checkpoint, candidate, kept)
        found[candidate] = kept
        best[candidate.covariance_type] = max(kept.mean, best.get(candidate.covariance_type, -math.inf))
        said = (
            "could not be fitted"
            if kept.parameters is None
            else f"{kept.mean:.6g} nats per row of the sample"
        )
        observer.note(f"candidate {len(found)} of {len(settings.candidates)}, {candidate}: {said}")
    return found


def _kept(checkpoint: SelectionCheckpoint, candidate: Candidate) -> CandidateFit | None:
    entry = checkpoint.candidate(candidate.name)
    if entry is None:
        return None
    parameters = None
    if entry.mean is not None:
        try:
            parameters = checkpoint.model(candidate.name).parameters_
        except InvalidDataError:  # It is damaged: the candidate is fitted again.
            checkpoint.forget_candidate(candidate.name)
            return None
    mean = -math.inf if entry.mean is None else entry.mean
    return CandidateFit(parameters, mean, entry.converged, entry.seconds, entry.reason)


def _keep(checkpoint: SelectionCheckpoint, candidate: Candidate, fit: CandidateFit) -> None:
    model = mean = None
    if fit.parameters is not None:
        mean = fit.mean
        model = GaussianMixture(candidate.n_components, covariance_type=candidate.covariance_type)
        model._publish(fit.parameters, FitHistory(), "tol" if fit.converged else "max-iter")
    entry = CandidateEntry(converged=fit.converged, mean=mean, seconds=fit.seconds, reason=fit.reason)
    checkpoint.keep_candidate(candidate.name, entry, model)


def _fit_to_sample(
    settings: SelectionSettings, seed: int, candidate: Candidate, sample: CountedRows, least: float
) -> CandidateFit:
    began = time.perf_counter()
    mixtures, reason = [], ""
    for random_state in (seed, seed + 1):
        try:
            mixture = fit_sample(settings.estimator(candidate, random_state), sample)
        except SingularComponentError as error:
            reason = reason or str(error)
            continue
        mixtures.append(mixture)
        if mixture.lower_bound_ >= least:
            break
    seconds = time.perf_counter() - began
    if not mixtures:
        return CandidateFit(None, -math.inf, False, seconds, reason)
    best = max(mixtures, key=lambda mixture: mixture.lower_bound_)
    return CandidateFit(best.parameters_, float(best.lower_bound_), bool(best.converged_), seconds, "")


def fit_sample(mixture: GaussianMixture, sample: CountedRows) -> GaussianMixture:
    """Fit a candidate's estimator to the sample; return it.

    Where rows are few, ``"auto"`` would have few annealed starts, or one. In their place come eight short
    runs of EM with quasi-Newton steps, of which the best goes on: Biernacki, Celeux and Govaert 2003,
    "Choosing starting values for the EM algorithm".
    """
    mixture.set_params(verbose=0)
    rows, counts = sample.rows, sample.counts
    if not _has_short_runs(mixture, *rows.shape):
        return mixture.fit(rows, sample_weight=counts)
    structure, (n_rows, n_features) = structure_named(mixture.covariance_type), rows.shape
    p = free_parameters(structure, mixture.n_components, n_features)
    most = mixture.max_iter
    if mixture.tol == "auto" and n_rows >= ROWS_PER_PARAMETER * p:
        mixture.set_params(tol="statistical")
    if mixture.acceleration == "auto":
        mixture.set_params(acceleration="quasi-newton")
    mixture.set_params(algorithm="em", n_init=STARTS, max_iter=min(SHORT, most))
    mixture.fit(rows, sample_weight=counts)
    return mixture.set_params(warm_start=True, max_iter=most).fit(rows, sample_weight=counts)


def _has_short_runs(mixture: GaussianMixture, n_rows: int, n_features: int) -> bool:
    if mixture.n_components == 1 or not is_automatic(mixture.algorithm) or mixture.n_init != "auto":
        return False
    plan = automatic(n_rows, mixture.n_components, n_features, mixture.covariance_type)
    return plan.annealed or not plan.shares


def fit_to_all_rows(
    settings: SelectionSettings,
    candidate: Candidate,
    start: MixtureParameters,
    data: Mapping[str, Any],
    checkpoint: SelectionCheckpoint | None,
    observer: FitObserver,
) -> GaussianMixture:
    """Return a candidate fitted to all rows from its fit to the sample; a fit that was killed is resumed.

    Parameters
    ----------
    settings : SelectionSettings
    candidate : Candidate
    start : MixtureParameters
    data : mapping
        ``X``, ``sample_weight`` and ``columns``, as for `GaussianMixture.fit`.
    checkpoint : SelectionCheckpoint or None
    observer : FitObserver

    Raises
    ------
    SingularComponentError
        A component collapsed.
    """
    place = None if checkpoint is None else checkpoint.fit(candidate.name)
    resumed = None if place is None else _resumed(settings, place, data, observer)
    mixture = resumed or settings.estimator(candidate, settings.template.random_state)
    if resumed is None:
        mixture._publish(start, FitHistory(), "max-iter")  # A warm start begins from these parameters.
        mixture.lower_bound_ = -math.inf
        mixture.set_params(warm_start=True, checkpoint=place)
        with _said_already():
            fit_estimator(
                mixture,
                data["X"],
                data["sample_weight"],
                None,
                columns=data["columns"],
                overwrite=True,
                observer=observer,
            )
    mixture._warn_unless_converged()
    asked = settings.estimator(candidate, settings.template.random_state)
    return mixture.set_params(**asked.get_params(deep=False))


def _resumed(
    settings: SelectionSettings, place: ObjectStore, data: Mapping[str, Any], observer: FitObserver
) -> GaussianMixture | None:
    """Return the fit of a checkpoint, at its end; None where there is none, or it has committed nothing."""
    if not holds_run(place):
        return None
    try:
        saved = open_saved(place)
    except CheckpointCorruptError:
        return None
    own = saved.config.algorithm.name is None
    mixture = saved_estimator(
        type(settings.template), saved, place, settings.template.algorithm if own else None
    )
    with _said_already():
        resume_estimator(
            mixture,
            saved,
            data["X"],
            sample_weight=data["sample_weight"],
            responsibilities_init=None,
            columns=data["columns"],
            observer=observer,
        )
    return mixture


@contextmanager
def _said_already() -> Iterator[None]:
    """Say nothing of a store that the selection has warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotExclusiveWarning)
        yield
