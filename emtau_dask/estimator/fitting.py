"""What `GaussianMixture.fit` does, from settings and data to a finished fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from emtau_dask.checkpoint import (
    AlgorithmEntry,
    CheckpointJournal,
    ConfigEntry,
    ParametersEntry,
    first_problem,
)
from emtau_dask.cluster import active_client, check_portable, differing_workers, prove_access
from emtau_dask.em import EmSettings, FitObserver, FitState, compile_setting, first_unusable_row_named, pose
from emtau_dask.errors import ConfigError, InvalidDataError
from emtau_dask.estimator.fit_sources import FitSources, opened_sources
from emtau_dask.estimator.progress import observer_for
from emtau_dask.estimator.seeds import Seeds
from emtau_dask.execution import interrupts_as_they_are, read_ahead_limit, threads_side_by_side
from emtau_dask.fit import (
    FitPlan,
    Journal,
    cache_limit,
    check_settings,
    kept_between_passes,
    row_fields,
    run_fit,
    temporary_journal,
)
from emtau_dask.init import GivenParameters
from emtau_dask.io.files import direct_setting
from emtau_dask.io.objects import ObjectStore, check_startable, object_store, start_log, warn_unless_exclusive
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.model import check_means, check_precisions, check_weights
from emtau_dask.policies import ActivityPolicy, as_policy, checked_row_arrays, describe_policy

if TYPE_CHECKING:
    from emtau_dask.estimator.gaussian_mixture import GaussianMixture


def _given(estimator: GaussianMixture, n_features: int) -> GivenParameters:
    K, structure = int(estimator.n_components), structure_named(estimator.covariance_type)
    weights, means, precisions = estimator.weights_init, estimator.means_init, estimator.precisions_init
    return GivenParameters(
        None if weights is None else check_weights(weights, K),
        None if means is None else check_means(means, K, n_features),
        None if precisions is None else check_precisions(precisions, structure, K, n_features),
    )


def _last_fit(estimator: GaussianMixture, n_features: int) -> GivenParameters:
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


def _plan(estimator: GaussianMixture, policy: ActivityPolicy, seeds: Seeds, sources: FitSources) -> FitPlan:
    n_features, responsibilities = sources.rows.shape[1], sources.responsibilities
    warm = estimator.warm_start and hasattr(estimator, "converged_") and responsibilities is None
    given = _last_fit(estimator, n_features) if warm else _given(estimator, n_features)
    drawn = responsibilities is None and given.complete(estimator.covariance_type) is None
    bound = float(estimator.lower_bound_) if warm and np.isfinite(estimator.lower_bound_) else None
    return FitPlan(
        policy=policy,
        settings=EmSettings(float(estimator.tol), int(estimator.max_iter), float(estimator.reg_covar)),
        init_params=estimator.init_params,
        given=given,
        responsibilities=responsibilities,
        seeds=tuple(seeds.draw() for _ in range(estimator.n_init)) if drawn else (0,),
        previous_bound=bound,
    )


def _config(
    estimator: GaussianMixture, plan: FitPlan, n_features: int, run_config: Mapping[str, Any] | None
) -> ConfigEntry:
    """Return the settings as a commit has them; raises `ConfigError` where it cannot have them."""
    name, kind, parameters = describe_policy(plan.policy)
    names = getattr(estimator, "feature_names_in_", None)
    state = estimator.random_state
    settings = {
        "n_components": int(estimator.n_components),
        "n_features": int(n_features),
        "covariance_type": estimator.covariance_type,
        "algorithm": AlgorithmEntry(name=name, kind=kind, params=parameters),
        "tol": plan.settings.tol,
        "reg_covar": plan.settings.reg_covar,
        "max_iter": plan.settings.max_iter,
        "n_init": int(estimator.n_init),
        "init_params": plan.init_params,
        "checkpoint_every": int(estimator.checkpoint_every),
        "random_state": int(state) if isinstance(state, Integral) else None,
        "warm_start": bool(estimator.warm_start),
        "seeds": list(plan.seeds),
        "given": ParametersEntry(),
        "previous_bound": plan.previous_bound,
        "feature_names": None if names is None else [str(name) for name in names],
        "run_config": None if run_config is None else dict(run_config),
    }
    try:
        config = ConfigEntry.model_validate(settings)
        config.model_dump(mode="json")
    except (ValueError, RecursionError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"a setting cannot be stored in a checkpoint ({why}). Give one that can, or fit without a "
            "checkpoint."
        ) from error
    return config


def fit_estimator(
    estimator: GaussianMixture,
    X: Any,
    sample_weight: Any,
    responsibilities_init: Any,
    *,
    run_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> str | None:
    """Fit an estimator and set its fitted attributes; return the id of its checkpointed run, if it has one.

    Parameters
    ----------
    estimator : GaussianMixture
    X, sample_weight, responsibilities_init
        As for `GaussianMixture.fit`, which see for what is raised.
    run_config : mapping, optional
        Of the command line; travels in the checkpoint.
    overwrite : bool
        Replace a run that the checkpoint's place holds.
    """
    check_settings(estimator.get_params(deep=False))
    seeds, policy = Seeds(estimator.random_state), as_policy(estimator.algorithm)
    checked_row_arrays(policy, int(estimator.n_components), int(estimator.max_iter))
    check_surroundings(policy)
    observer = observer_for(estimator.verbose)
    with interrupts_as_they_are():
        try:
            with opened_sources(estimator, X, sample_weight, responsibilities_init) as sources:
                plan = _plan(estimator, policy, seeds, sources)
                with (
                    threads_side_by_side(),
                    _new_journal(estimator, plan, sources, run_config, overwrite, observer) as (
                        journal,
                        state,
                    ),
                ):
                    finished = finish(estimator, plan, sources, state, journal, observer)
        finally:
            observer.close()
    publish(estimator, finished)
    return journal.run if isinstance(journal, CheckpointJournal) else None


@contextmanager
def _new_journal(
    estimator: GaussianMixture,
    plan: FitPlan,
    sources: FitSources,
    run_config: Mapping[str, Any] | None,
    overwrite: bool,
    observer: FitObserver,
) -> Iterator[tuple[Journal, FitState]]:
    rows = sources.rows
    fields = row_fields(rows, int(estimator.n_components), plan.policy, plan.settings.max_iter)
    if estimator.checkpoint is None:
        with temporary_journal(fields, len(rows.chunk_rows)) as temporary:
            yield temporary, proved(temporary.objects, sources, FitState())
        return
    config = _config(estimator, plan, rows.shape[1], run_config)
    objects = object_store(estimator.checkpoint)
    check_startable(objects, overwrite=overwrite)
    objects.prepare()
    warn_unless_exclusive(objects)
    state = proved(objects, sources, FitState())
    entries = sources.entries(observer)
    log = start_log(objects, overwrite=overwrite)
    with log.withdrawn_on_failure():
        journal = CheckpointJournal(log, config, plan.given, entries, fields, compiled=sources.compiled)
        with journal.watched():
            journal.save(state, commit=True)
    yield journal, state


def check_surroundings(policy: ActivityPolicy) -> None:
    """Raise `EmtauError` for settings of dask that a fit cannot use, or a policy that cannot travel."""
    active_client()
    cache_limit()
    read_ahead_limit()
    compile_setting()
    direct_setting()
    check_portable("the policy", policy)


def proved(objects: ObjectStore | None, sources: FitSources, state: FitState) -> FitState:
    """Return the state with a note for what workers say, after they proved that they see everything."""
    return _noted(state, prove_access(objects, sources.named()))


def _noted(state: FitState, notes: Sequence[str]) -> FitState:
    """Return the state with those notes that it does not have yet, after warning of them."""
    new = [note for note in notes if note not in state.notes]
    for note in new:
        warnings.warn(note, stacklevel=7)
    return replace(state, notes=(*state.notes, *new))


def finish(
    estimator: GaussianMixture,
    plan: FitPlan,
    sources: FitSources,
    state: FitState,
    journal: Journal,
    observer: FitObserver,
) -> FitState:
    """Return the last state of a fit that goes on from ``state``."""
    structure = structure_named(estimator.covariance_type)
    problem = pose(
        sources.rows,
        sources.weights,
        int(estimator.n_components),
        structure,
        observer,
        compiled=sources.compiled,
    )
    with first_unusable_row_named(problem, observer), kept_between_passes(problem, journal.fields) as cached:
        noting = replace(cached, contents=journal.contents)
        finished = run_fit(noting, plan, state, journal, observer)
    return _noted(finished, differing_workers())


def publish(estimator: GaussianMixture, finished: FitState) -> None:
    """Set the estimator's fitted attributes."""
    run = finished.current
    assert run is not None
    assert run.stop_reason is not None
    estimator._publish(run.parameters, replace(run.history, notes=finished.notes), run.stop_reason)
