"""A fit of an estimator: its settings, sources and state store, and what it sets or reports at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from emtau_dask.checkpoint.codec import FormatError
from emtau_dask.checkpoint.fingerprints import fingerprint, sampled_digests
from emtau_dask.checkpoint.manifest import Manifest
from emtau_dask.checkpoint.state import MANIFEST
from emtau_dask.checkpoint.writer import CheckpointStateStore
from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import RangeSource, chunk_ranges
from emtau_dask.em.acceleration import memory_for
from emtau_dask.em.compiling import compile_ahead, compile_setting, worth_compiling
from emtau_dask.em.fit import FitSources, fit, open_context
from emtau_dask.em.history import FitObserver
from emtau_dask.em.memory import cache_bytes
from emtau_dask.em.settings import (
    ALL_ROWS,
    RUNS_PER_START,
    Acceleration,
    EmSettings,
    automatic,
    check_missing,
    policy_before_data,
    tolerances,
)
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import FitState
from emtau_dask.em.state_store import StateStore, row_fields, temporary_state_store
from emtau_dask.em.verification import DataVerifier
from emtau_dask.errors import (
    ConfigError,
    EmtauError,
    InvalidDataError,
    counted,
    features_named,
    shown,
    shutdown_named,
    warn_user,
)
from emtau_dask.estimator.doubtful import DoubtfulColumns
from emtau_dask.estimator.inputs import (
    BY_DEFAULT,
    FeatureChoice,
    Seeds,
    opened_data,
    opened_sources,
    settings_of,
)
from emtau_dask.estimator.prediction import FittedMixture
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import Executor, PassObserver
from emtau_dask.execution.workers import check_picklable, differing_workers, verify_access
from emtau_dask.interrupts import interrupt_with_text, interruptible
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import check_means, check_precisions, check_weights, free_parameters
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.policy import ActivityPolicy, WeightedPolicy, checked_row_arrays
from emtau_dask.policies.registry import as_policy
from emtau_dask.progress import closed_after, observer_for
from emtau_dask.settings import AUTO, Settings, marginalises
from emtau_dask.storage.commits import check_startable, open_log, start_log
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.stores import object_store, warn_unless_exclusive

FITTED_TO = "fitted to "
"""Beginning of the note on what was fitted of a file that holds more."""
J = TypeVar("J", bound=StateStore)
LOG = logging.getLogger(__name__)
COMPUTED_AGAIN = (
    "X is a dask graph that the cluster does not hold, so each pass over all rows computes it again. "
    "X.persist() keeps its rows in the workers' memory; or store them and fit the files."
)
"""The warning for rows that a cluster computes for EM on all rows."""


@contextmanager
def restored_on_failure(estimator: Any) -> Iterator[None]:
    """Restore all attributes of the estimator if the block raises; an interrupt says how to continue."""
    before = dict(vars(estimator))
    try:
        with shutdown_named():
            yield
    except KeyboardInterrupt:
        estimator.__dict__ = before
        raise interrupt_with_text(shown(_interrupt_text(estimator.checkpoint))) from None
    except BaseException:
        estimator.__dict__ = before
        raise


def _interrupt_text(checkpoint: Any) -> str:
    """Return the message of an interrupted fit: what can be resumed, and how."""
    interrupted = "The fit was interrupted; the estimator is as it was before."
    if checkpoint is None:
        return (
            f"{interrupted} Without a checkpoint nothing of the fit was kept. With checkpoint=PATH it is "
            "committed after every iteration, and GaussianMixture.resume(PATH, X) continues it."
        )
    try:
        number = open_log(object_store(checkpoint)).last
    except EmtauError:
        return f"{interrupted} There was no commit yet, so there is nothing to resume; fit it again."
    resume = f"GaussianMixture.resume({_checkpoint_text(checkpoint)}, X)"
    return f"{interrupted} Continue from the last commit, {number}: {resume}."


def _checkpoint_text(checkpoint: Any) -> str:
    if isinstance(checkpoint, ObjectStore):
        return repr(checkpoint.location)
    return repr(str(checkpoint)) if isinstance(checkpoint, (str, Path)) else "checkpoint"


def not_converged_text(estimator: Any) -> str:
    """Return the warning for a fit that ``max_iter`` stopped: its last change, and how to continue.

    A gap below the last change is too small an estimate, and is left out.
    """
    change, gap = estimator.history_.last_change, estimator.gap_
    progress = [
        f"The log-likelihood per row last changed by {change:.2g}" if math.isfinite(change) else "",
        f"it could still gain about {gap:.2g}" if math.isfinite(gap) and not gap < change else "",
        f"tol is {estimator.tol!r}",
    ]
    remedy = "set_params(max_iter=..., warm_start=True).fit(X)"
    if estimator.checkpoint is not None:
        remedy = f"GaussianMixture.resume({_checkpoint_text(estimator.checkpoint)}, X, max_iter=...)"
    return (
        "Best performing initialization did not converge. Try different init parameters, or increase "
        "max_iter, tol, or check for degenerate data. "
        f"{'; '.join(filter(None, progress))}. To continue from here: {remedy}."
    )


def _given_parameters(requested: Settings, n_features: int) -> GivenParameters:
    K, structure = requested.n_components, structure_named(requested.covariance_type)
    weights, means, precisions = requested.weights_init, requested.means_init, requested.precisions_init
    return GivenParameters(
        None if weights is None else check_weights(weights, K),
        None if means is None else check_means(means, K, n_features),
        None if precisions is None else check_precisions(precisions, structure, K, n_features),
    )


def _parameters_of_last_fit(
    estimator: FittedMixture, requested: Settings, n_features: int
) -> GivenParameters:
    parameters = estimator.parameters_
    expected = (requested.covariance_type, requested.n_components, n_features)
    last = (parameters.covariance_type, parameters.n_components, parameters.n_features)
    if last != expected:
        raise InvalidDataError(
            f"warm_start: the last fit had (covariance_type, components, features) = {last}, this one "
            f"has {expected}. Set warm_start=False, or use a new estimator."
        )
    precisions = parameters.covariances, parameters.precisions_cholesky
    return GivenParameters(parameters.weights, parameters.means, precisions)


def fit_settings(
    estimator: FittedMixture, requested: Settings, sources: FitSources, executor: Executor
) -> EmSettings:
    """Return the settings of a fit; settings such as "auto" are resolved by the shape of the data."""
    n_rows, n_features = sources.rows.shape
    K, structure = requested.n_components, structure_named(requested.covariance_type)
    responsibilities = sources.responsibilities is not None
    warm = requested.warm_start and hasattr(estimator, "converged_") and not responsibilities
    if warm:
        given = _parameters_of_last_fit(estimator, requested, n_features)
    else:
        given = _given_parameters(requested, n_features)
    plan = automatic(n_rows, K, n_features, requested.covariance_type)
    policy = plan.policy if requested.automatic else as_policy(requested.algorithm)
    n_init = requested.n_init
    if isinstance(n_init, str):
        n_init = plan.n_init if requested.automatic else 1
    p = free_parameters(structure, K, n_features)
    tol, gap_tol = tolerances(requested.tol, n_rows, p, auto=requested.automatic)
    seeds = Seeds(estimator.random_state)
    runs = (0,) if responsibilities or given.whole else tuple(seeds.draw() for _ in range(n_init))
    weighted = isinstance(policy, WeightedPolicy)
    accelerated = requested.acceleration == "quasi-newton" or (
        requested.acceleration == AUTO and (requested.automatic or weighted)
    )
    acceleration = None
    if accelerated or weighted or requested.automatic:
        memory = memory_for(structure, K, n_features) if accelerated else 0
        shares = plan.shares if requested.automatic and not responsibilities and not warm else ()
        if shares == ALL_ROWS and len(runs) == 1:
            shares = ()
        acceleration = Acceleration(memory, Samples(runs[0], shares), plan.annealed)
        if plan.annealed and shares:
            runs = tuple(seed for seed in runs for _ in range(RUNS_PER_START))
    bound = float(estimator.lower_bound_) if warm and np.isfinite(estimator.lower_bound_) else None
    compiled = compiled_here(requested, sources, executor)
    return EmSettings(requested, policy, tol, gap_tol, acceleration, runs, bound, given, compiled)


def compiled_here(requested: Settings, sources: FitSources, executor: Executor) -> bool:
    """Return whether a fit uses compiled loops."""
    return worth_compiling(
        executor.client,
        sources.rows.shape,
        requested.covariance_type,
        requested.n_components,
        missing=marginalises(requested.missing),
    )


@contextmanager
def fit_session(
    estimator: FittedMixture,
    policy: ActivityPolicy,
    X: Any,
    sample_weight: Any,
    responsibilities_init: Any,
    *,
    chosen: FeatureChoice,
    names: Sequence[str] | None = None,
    observer: FitObserver | None,
) -> Iterator[tuple[Executor, FitObserver, FitSources]]:
    """Yield the executor, the observer and the sources of a fit; see `opened_data` and `opened_sources`.

    Raises
    ------
    EmtauError
        One of dask's settings cannot be used, the policy cannot be sent to other processes, or the data
        cannot be used.
    """
    executor = choose_executor()
    compile_setting()
    if not executor.in_process:
        check_picklable("the policy", policy)
    with interruptible(), closed_after(observer or observer_for(estimator.verbose)) as fit_observer:
        fit_observer.part("preparing")
        data = opened_data(X, chosen, names, fit_observer)
        with opened_sources(
            executor.client, estimator, data, sample_weight, responsibilities_init
        ) as sources:
            yield executor, fit_observer, sources


def fit_estimator(
    estimator: FittedMixture,
    X: Any,
    sample_weight: Any,
    responsibilities_init: Any,
    *,
    chosen: FeatureChoice = BY_DEFAULT,
    run_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    observer: FitObserver | None = None,
) -> str | None:
    """Fit an estimator and set its fitted attributes; raises as `GaussianMixture.fit`.

    Parameters
    ----------
    chosen : FeatureChoice
        See `opened_data`.
    run_config : mapping, optional
        The config of the command line, to be stored in the checkpoint.
    overwrite : bool
        Replace the run that the checkpoint holds.
    observer : FitObserver, optional
        By default the progress display that suits standard output.

    Returns
    -------
    str or None
        The id of the checkpointed run; None without a checkpoint.
    """
    requested = settings_of(estimator)
    policy = policy_before_data(requested)
    check_missing(requested, responsibilities=responsibilities_init is not None)
    checked_row_arrays(policy, requested.n_components, requested.max_iter)
    with (
        restored_on_failure(estimator),
        fit_session(
            estimator,
            policy,
            X,
            sample_weight,
            responsibilities_init,
            chosen=chosen,
            observer=observer,
        ) as (executor, observer, sources),
    ):
        settings = fit_settings(estimator, requested, sources, executor)
        if (
            executor.client is not None
            and isinstance(settings.policy, FullEM)
            and sources.rows.computed_again
        ):
            warn_user(COMPUTED_AGAIN)
        opening = _new_state_store(estimator, settings, sources, run_config, overwrite, executor, observer)
        finished, state_store = run_fit("begins", estimator, settings, sources, executor, observer, opening)
        publish(estimator, finished)
    return state_store.run if isinstance(state_store, CheckpointStateStore) else None


def run_fit(
    how: str,
    estimator: FittedMixture,
    settings: EmSettings,
    sources: FitSources,
    executor: Executor,
    observer: FitObserver,
    opening: AbstractContextManager[J],
) -> tuple[FitState, J]:
    """Run a fit with the state store that ``opening`` opens; return its finished state and the store.

    A fit in this process compiles its loops in the background, while the state store is opened.
    """
    rows, features = sources.rows.shape
    if settings.compiled and executor.in_process:
        requested = settings.requested
        compile_ahead(
            settings.structure,
            requested.n_components,
            sources.rows,
            observer,
            missing=marginalises(requested.missing),
        )
    LOG.info(
        "fit %s: %s, %s, %s (%s), %s, on %s",
        how,
        counted(rows, "row"),
        counted(features, "feature"),
        counted(settings.requested.n_components, "component"),
        settings.requested.covariance_type,
        type(settings.policy).__name__,
        counted(executor.threads, "thread") if executor.in_process else "dask's workers",
    )
    doubtful = DoubtfulColumns(estimator._names, rows)
    with (
        opening as state_store,
        open_context(executor, observer, cache_bytes(settings, sources, executor)) as context,
        features_named(estimator._names),
    ):
        finished = fit(settings, sources, executor, state_store, replace(context, sampled=doubtful))
    finished = replace(finished, notes=(*finished.notes, *doubtful.notes))
    return with_notes(finished, differing_workers(executor.client)), state_store


@contextmanager
def _new_state_store(
    estimator: FittedMixture,
    settings: EmSettings,
    sources: FitSources,
    run_config: Mapping[str, Any] | None,
    overwrite: bool,
    executor: Executor,
    observer: PassObserver,
) -> Iterator[StateStore]:
    rows, requested = sources.rows, settings.requested
    fields = row_fields(rows, requested.n_components, settings.policy, requested.max_iter)
    chosen = rows.chosen if isinstance(rows, RangeSource) else ""
    new = FitState(notes=(f"{FITTED_TO}{chosen}",) if chosen else ())
    if estimator.checkpoint is None:
        with temporary_state_store(fields, len(rows.chunk_rows)) as temporary:
            temporary.save(verified_access(executor, temporary.objects, sources, new), commit=False)
            yield temporary
        return
    content = None if run_config is None else dict(run_config)
    manifest = Manifest(settings, estimator._names, content, **fingerprints(sources))
    try:
        MANIFEST.encode(manifest, None)
    except FormatError as error:
        raise ConfigError(
            f"a setting cannot be stored in a checkpoint ({error}). Give one that can, or fit without a "
            "checkpoint."
        ) from error
    objects = object_store(estimator.checkpoint)
    check_startable(objects, overwrite=overwrite)
    objects.prepare()
    warn_unless_exclusive(objects)
    state = verified_access(executor, objects, sources, new)
    verifier = DataVerifier()
    compare_samples(sources, verifier, executor, observer)
    log = start_log(objects, overwrite=overwrite)
    with log.withdrawn_on_failure():
        state_store = CheckpointStateStore(log, manifest, fields, verifier)
        with state_store.explained_errors():
            state_store.save(state, commit=True)
    yield state_store


def fingerprints(sources: FitSources) -> dict[str, Any]:
    """Return the fingerprints of all sources, by the names of a manifest's fields; no rows are read."""
    by_name = {name: fingerprint(source) for name, source in sources.named().items()}
    return {"data": by_name.pop("X"), "sample_weight": None, "responsibilities_init": None, **by_name}


def compare_samples(
    sources: FitSources, verifier: DataVerifier, executor: Executor, observer: PassObserver
) -> None:
    """Read sampled chunks of all sources, and compare their digests with those of ``verifier``."""
    for name, source in sources.named().items():
        verifier.compare(sampled_digests(source, name, executor, observer), chunk_ranges(source.chunk_rows))


def verified_access(
    executor: Executor, objects: ObjectStore | None, sources: FitSources, state: FitState
) -> FitState:
    """Verify that workers see the data and the objects; return the state with the notes of that."""
    return with_notes(state, verify_access(executor.client, objects, sources.named()))


def with_notes(state: FitState, notes: Sequence[str]) -> FitState:
    """Return the state with the notes that it does not have yet, after a warning of each."""
    new = [note for note in notes if note not in state.notes]
    for note in new:
        warn_user(note)
    return replace(state, notes=(*state.notes, *new))


def publish(estimator: FittedMixture, finished: FitState) -> None:
    """Set the estimator's fitted attributes."""
    run = finished.current
    assert run is not None
    assert run.stop_reason is not None
    LOG.info(
        "fit ended (%s): %s, %.4g passes over the data, log-likelihood per row %.9g",
        run.stop_reason,
        counted(len(run.history), "iteration"),
        run.history.work,
        run.lower_bound,
    )
    estimator._publish(run.parameters, replace(run.history, notes=finished.notes), run.stop_reason)
