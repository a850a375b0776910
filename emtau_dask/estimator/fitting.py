"""What `fit` does around the fit: settings, sources, journal, results, and how an unfinished one goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from emtau_dask.checkpoint.codec import FormatError
from emtau_dask.checkpoint.fingerprints import fingerprint, sampled_contents
from emtau_dask.checkpoint.manifest import Algorithm, FitConfig, SourceEntry, Unresolvable
from emtau_dask.checkpoint.state import CONFIG
from emtau_dask.checkpoint.writer import CheckpointJournal
from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import chunk_ranges
from emtau_dask.em.acceleration import memory_for
from emtau_dask.em.compiling import compile_ahead, compile_setting, worth_compiling
from emtau_dask.em.contents import Contents
from emtau_dask.em.fit import FitSettings, FitSources, fit, open_context
from emtau_dask.em.history import FitObserver
from emtau_dask.em.journal import Journal, row_fields, temporary_journal
from emtau_dask.em.memory import cache_bytes
from emtau_dask.em.settings import (
    RUNS_EACH,
    Acceleration,
    EmSettings,
    automatic,
    check_missing,
    check_settings,
    marginalises,
    tolerances,
)
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import FitState
from emtau_dask.errors import (
    ConfigError,
    EmtauError,
    InvalidDataError,
    features_named,
    shown,
    shutdown_named,
    warn_user,
)
from emtau_dask.estimator.inputs import Seeds, opened_path, opened_sources
from emtau_dask.estimator.prediction import FittedMixture
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import Executor, PassObserver
from emtau_dask.execution.workers import check_portable, differing_workers, prove_access
from emtau_dask.interrupts import interrupt_saying, interruptible
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import check_means, check_precisions, check_weights, free_parameters
from emtau_dask.policies.policy import ActivityPolicy, WeightedPolicy, checked_row_arrays
from emtau_dask.policies.registry import as_policy, describe_policy
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.progress import closed_after, observer_for
from emtau_dask.storage.commits import check_startable, open_log, start_log
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.stores import object_store, warn_unless_exclusive

LOG = logging.getLogger(__name__)


@contextmanager
def as_it_was_unless_done(estimator: Any) -> Iterator[None]:
    """Set back all attributes of the estimator where the block raises; an interrupt says how to go on."""
    before = dict(vars(estimator))
    try:
        with shutdown_named():
            yield
    except KeyboardInterrupt:
        estimator.__dict__ = before
        raise interrupt_saying(shown(_going_on(estimator.checkpoint))) from None
    except BaseException:
        estimator.__dict__ = before
        raise


def _going_on(checkpoint: Any) -> str:
    """Return what an interrupted fit has left, and how to go on."""
    left = "The fit was interrupted; the estimator is as it was before."
    if checkpoint is None:
        return (
            f"{left} Without a checkpoint nothing of the fit was kept; with checkpoint=PATH it is committed "
            "after every iteration, and GaussianMixture.resume(PATH, X) goes on."
        )
    try:
        number = open_log(object_store(checkpoint)).last
    except EmtauError:
        return f"{left} That was before the first commit, so there is nothing to resume; fit it again."
    return f"{left} Go on from the last commit, {number}: GaussianMixture.resume({_named(checkpoint)}, X)."


def _named(checkpoint: Any) -> str:
    if isinstance(checkpoint, ObjectStore):
        return repr(checkpoint.location)
    return repr(str(checkpoint)) if isinstance(checkpoint, (str, Path)) else "checkpoint"


def not_converged(estimator: Any) -> str:
    """Return what a fit that ``max_iter`` stopped should say: how far it was, and how it goes on."""
    change, gap = estimator.history_.last_change, estimator.gap_
    far = [
        f"The lower bound last changed by {change:.2g} nats per row" if math.isfinite(change) else "",
        f"its estimated gap is {gap:.2g} nats per row" if math.isfinite(gap) else "",
        f"tol is {estimator.tol!r}",
    ]
    how = "set_params(max_iter=..., warm_start=True).fit(X)"
    if estimator.checkpoint is not None:
        how = f"GaussianMixture.resume({_named(estimator.checkpoint)}, X, max_iter=...)"
    return (
        "Best performing initialization did not converge. Try different init parameters, or increase "
        "max_iter, tol, or check for degenerate data. "
        f"{'; '.join(filter(None, far))}. To go on from here: {how}."
    )


def _given(estimator: FittedMixture, n_features: int) -> GivenParameters:
    K, structure = int(estimator.n_components), structure_named(estimator.covariance_type)
    weights, means, precisions = estimator.weights_init, estimator.means_init, estimator.precisions_init
    return GivenParameters(
        None if weights is None else check_weights(weights, K),
        None if means is None else check_means(means, K, n_features),
        None if precisions is None else check_precisions(precisions, structure, K, n_features),
    )


def _last_fit(estimator: FittedMixture, n_features: int) -> GivenParameters:
    parameters = estimator.parameters_
    expected = (estimator.covariance_type, int(estimator.n_components), n_features)
    found = (parameters.covariance_type, parameters.n_components, parameters.n_features)
    if found != expected:
        raise InvalidDataError(
            f"warm_start: the last fit had (covariance_type, components, features) = {found}, this one "
            f"has {expected}. Set warm_start=False, or use a new estimator."
        )
    precisions = parameters.covariances, parameters.precisions_cholesky
    return GivenParameters(parameters.weights, parameters.means, precisions)


def fit_settings(
    estimator: FittedMixture, seeds: Seeds, sources: FitSources, executor: Executor
) -> FitSettings:
    """Return the settings of a fit, those in words resolved by the data's shape."""
    shape, n_components = sources.rows.shape, int(estimator.n_components)
    covariance_type = estimator.covariance_type
    warm = estimator.warm_start and hasattr(estimator, "converged_") and sources.responsibilities is None
    given = _last_fit(estimator, shape[1]) if warm else _given(estimator, shape[1])
    drawn = sources.responsibilities is None and not given.whole
    auto = is_automatic(estimator.algorithm)
    plan = automatic(shape[0], n_components, shape[1], covariance_type)
    policy = plan.policy if auto else as_policy(estimator.algorithm)
    n_init = estimator.n_init
    if isinstance(n_init, str):
        n_init = plan.n_init if auto else 1
    p = free_parameters(structure_named(covariance_type), n_components, shape[1])
    tol, gap_tol = tolerances(estimator.tol, shape[0], p, auto=auto)
    runs = tuple(seeds.draw() for _ in range(n_init)) if drawn else (0,)
    weighted = isinstance(policy, WeightedPolicy)
    asked = estimator.acceleration == "quasi-newton" or (
        estimator.acceleration == "auto" and (auto or weighted)
    )
    missing = marginalises(estimator.missing)  # Patterns of missing values go by NumPy.
    acceleration = None
    if asked or weighted or auto:
        structure = structure_named(covariance_type)
        memory = memory_for(structure, n_components, shape[1]) if asked else 0
        shares = plan.shares if auto and sources.responsibilities is None and not warm else ()
        acceleration = Acceleration(memory, Samples(runs[0], shares), plan.annealed)
        if plan.annealed and shares:
            runs = tuple(seed for seed in runs for _ in range(RUNS_EACH))
    return FitSettings(
        n_components,
        structure_named(covariance_type),
        EmSettings(policy, tol, int(estimator.max_iter), float(estimator.reg_covar), gap_tol, acceleration),
        estimator.init_params,
        given,
        runs,
        float(estimator.lower_bound_) if warm and np.isfinite(estimator.lower_bound_) else None,
        not missing and worth_compiling(executor.client, shape, covariance_type, n_components),
        missing,
    )


def is_automatic(algorithm: object) -> bool:
    """Return whether the data's shape decides on the algorithm."""
    return isinstance(algorithm, str) and algorithm == "auto"


def _config(
    estimator: FittedMixture, settings: FitSettings, n_features: int, run_config: Mapping[str, Any] | None
) -> FitConfig:
    """Return the settings as a commit stores them; raises `ConfigError` for one that JSON cannot hold."""
    names, state = getattr(estimator, "feature_names_in_", None), estimator.random_state
    names_in_words: tuple[Unresolvable, ...] = ("algorithm", "tol", "n_init", "acceleration")
    given = {name: getattr(estimator, name) for name in names_in_words}
    config = FitConfig(
        n_components=int(estimator.n_components),
        n_features=int(n_features),
        covariance_type=estimator.covariance_type,
        algorithm=Algorithm(*describe_policy(settings.em.policy)),
        tol=settings.em.tol,
        gap_tol=settings.em.gap_tol,
        acceleration=settings.em.acceleration,
        unresolved={name: value for name, value in given.items() if isinstance(value, str | None)},
        missing=estimator.missing,
        reg_covar=settings.em.reg_covar,
        max_iter=settings.em.max_iter,
        n_init=len(settings.seeds),
        init_params=settings.init_params,
        checkpoint_every=int(estimator.checkpoint_every),
        random_state=int(state) if isinstance(state, Integral) else None,
        warm_start=bool(estimator.warm_start),
        seeds=settings.seeds,
        previous_bound=settings.previous_bound,
        feature_names=None if names is None else tuple(str(name) for name in names),
        run_config=None if run_config is None else dict(run_config),
    )
    try:
        CONFIG.encode(config, None)
    except FormatError as error:
        raise ConfigError(
            f"a setting cannot be stored in a checkpoint ({error}). Give one that can, or fit without a "
            "checkpoint."
        ) from error
    return config


@contextmanager
def fit_session(
    policy: ActivityPolicy, verbose: int, observer: FitObserver | None
) -> Iterator[tuple[Executor, FitObserver]]:
    """Give the executor and the observer of a fit, after the checks that need no data.

    Raises
    ------
    EmtauError
        One of dask's settings cannot be used, or the policy cannot be sent to other processes.
    """
    executor = choose_executor()
    compile_setting()
    if not executor.in_process:
        check_portable("the policy", policy)
    with interruptible(), closed_after(observer or observer_for(verbose)) as watched:
        yield executor, watched


def fit_estimator(
    estimator: FittedMixture,
    X: Any,
    sample_weight: Any,
    responsibilities_init: Any,
    *,
    columns: Any = None,
    run_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    observer: FitObserver | None = None,
) -> str | None:
    """Fit an estimator and set its fitted attributes; see `GaussianMixture.fit`, also for what is raised.

    Parameters
    ----------
    columns : sequence of str, optional
        See `opened_path`.
    run_config : mapping, optional
        The config of the command line, to be stored in the checkpoint.
    overwrite : bool
        Replace the run that the checkpoint holds.
    observer : FitObserver, optional
        By default one that suits standard output.

    Returns
    -------
    str or None
        The id of the checkpointed run; None without a checkpoint.
    """
    check_settings(estimator.get_params(deep=False))
    auto = is_automatic(estimator.algorithm)
    seeds, policy = Seeds(estimator.random_state), EMSampled() if auto else as_policy(estimator.algorithm)
    given = responsibilities_init is not None
    check_missing(estimator.missing, policy, estimator.acceleration, responsibilities=given)
    checked_row_arrays(policy, int(estimator.n_components), int(estimator.max_iter))
    with (
        as_it_was_unless_done(estimator),
        fit_session(policy, estimator.verbose, observer) as (executor, observer),
        opened_sources(
            executor.client,
            estimator,
            opened_path(X, columns, None, observer),
            sample_weight,
            responsibilities_init,
        ) as sources,
    ):
        settings = fit_settings(estimator, seeds, sources, executor)
        compile_beside(settings, sources, executor, observer)
        log_beginning("begins", settings, sources, executor)
        with (
            _new_journal(estimator, settings, sources, run_config, overwrite, executor, observer) as journal,
            open_context(executor, observer, cache_bytes(settings, sources, executor)) as context,
            features_named(getattr(estimator, "feature_names_in_", None)),
        ):
            finished = fit(settings, sources, executor, journal, context)
        publish(estimator, with_notes(finished, differing_workers(executor.client)))
    return journal.run if isinstance(journal, CheckpointJournal) else None


def log_beginning(how: str, settings: FitSettings, sources: FitSources, executor: Executor) -> None:
    """Log what a fit is of and where it runs."""
    rows, features = sources.rows.shape
    LOG.info(
        "fit %s: %s rows, %d features, %d components (%s), %s, on %s",
        how,
        f"{rows:,}",
        features,
        settings.n_components,
        settings.structure.name,
        type(settings.em.policy).__name__,
        f"{executor.threads} threads" if executor.in_process else "other processes",
    )


def compile_beside(
    settings: FitSettings, sources: FitSources, executor: Executor, observer: FitObserver
) -> None:
    """Begin to compile what a fit in this process needs; see `compile_ahead`."""
    if settings.compiled and executor.in_process:
        compile_ahead(settings.structure, settings.n_components, sources.rows, observer)


@contextmanager
def _new_journal(
    estimator: FittedMixture,
    settings: FitSettings,
    sources: FitSources,
    run_config: Mapping[str, Any] | None,
    overwrite: bool,
    executor: Executor,
    observer: PassObserver,
) -> Iterator[Journal]:
    rows = sources.rows
    fields = row_fields(rows, settings.n_components, settings.em.policy, settings.em.max_iter)
    if estimator.checkpoint is None:
        with temporary_journal(fields, len(rows.chunk_rows)) as temporary:
            temporary.save(proved(executor, temporary.objects, sources, FitState()), commit=False)
            yield temporary
        return
    config = _config(estimator, settings, rows.shape[1], run_config)
    objects = object_store(estimator.checkpoint)
    check_startable(objects, overwrite=overwrite)
    objects.prepare()
    warn_unless_exclusive(objects)
    state = proved(executor, objects, sources, FitState())
    contents = Contents()
    compare_samples(sources, contents, executor, observer)
    log = start_log(objects, overwrite=overwrite)
    with log.withdrawn_on_failure():
        journal = CheckpointJournal(
            log,
            config,
            settings.given,
            fingerprints(sources),
            fields,
            contents,
            compiled=settings.compiled,
        )
        with journal.watched():
            journal.save(state, commit=True)
    yield journal


def fingerprints(sources: FitSources) -> dict[str, SourceEntry | None]:
    """Return what all sources are, by the names of a manifest's fields; reads nothing of them."""
    found = {name: fingerprint(source) for name, source in sources.named().items()}
    return {"data": found.pop("X"), "sample_weight": None, "responsibilities_init": None, **found}


def compare_samples(
    sources: FitSources, contents: Contents, executor: Executor, observer: PassObserver
) -> None:
    """Read sampled chunks of all sources, and compare what they hold with ``contents``."""
    for name, source in sources.named().items():
        contents.compare(sampled_contents(source, name, executor, observer), chunk_ranges(source.chunk_rows))


def proved(executor: Executor, objects: ObjectStore | None, sources: FitSources, state: FitState) -> FitState:
    """Let the workers prove that they see the data and the objects; return the state with their notes."""
    return with_notes(state, prove_access(executor.client, objects, sources.named()))


def with_notes(state: FitState, notes: Sequence[str]) -> FitState:
    """Return the state with the notes that are new to it, after warning of each."""
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
        "fit ended (%s): %d iterations, %.4g passes over the data, bound %.9g",
        run.stop_reason,
        len(run.history),
        run.history.work,
        run.lower_bound,
    )
    estimator._publish(run.parameters, replace(run.history, notes=finished.notes), run.stop_reason)
