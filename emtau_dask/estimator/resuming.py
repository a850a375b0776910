"""What `GaussianMixture.resume` does, and what a checkpoint holds of an estimator."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from emtau_dask.checkpoint import (
    CheckpointJournal,
    ParametersEntry,
    SavedFit,
    check_same,
    fingerprint,
    read_newest,
)
from emtau_dask.cluster import numerical_environment, prove_access
from emtau_dask.em import EmSettings, FitObserver, FitState
from emtau_dask.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, ConfigError
from emtau_dask.estimator.fit_sources import FitSources, opened_sources
from emtau_dask.estimator.fitting import check_surroundings, finish, proved, publish
from emtau_dask.estimator.progress import observer_for
from emtau_dask.execution import interrupts_as_they_are, threads_side_by_side
from emtau_dask.fit import FitPlan, check_settings, row_fields
from emtau_dask.init import GivenParameters
from emtau_dask.io.objects import object_store, open_log, warn_unless_exclusive
from emtau_dask.messages import shown
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.policies import ActivityPolicy, as_policy, checked_row_arrays, matching_policy

if TYPE_CHECKING:
    from emtau_dask.estimator.gaussian_mixture import GaussianMixture


def open_saved(checkpoint: Any) -> SavedFit:
    """Return the newest whole commit of a run; warns where newer ones are damaged.

    Raises
    ------
    CheckpointError
        There is no run, it is of another version, or no commit is whole.
    """
    objects = object_store(checkpoint)
    saved = read_newest(open_log(objects))
    if saved.passed_over:
        warnings.warn(_passed_over(saved), stacklevel=4)
    return saved


def _passed_over(saved: SavedFit) -> str:
    return f"commit {saved.number} is used, since newer ones are damaged: {' '.join(saved.passed_over)}"


def saved_estimator(
    cls: type[GaussianMixture], saved: SavedFit, checkpoint: Any, algorithm: Any = None
) -> GaussianMixture:
    """Return the estimator of a checkpointed run, not fitted.

    Raises
    ------
    CheckpointMismatchError
        A user's own policy was not given again, or differs.
    CheckpointCorruptError
        Its settings are impossible.
    """
    config, given = saved.config, saved.given
    entry = config.algorithm
    try:
        policy = matching_policy(algorithm, entry.name, entry.kind, entry.params)
        precisions = None
        if given.precisions is not None:
            precisions = structure_named(config.covariance_type).precisions(given.precisions[1])
        estimator = cls(
            config.n_components,
            covariance_type=config.covariance_type,
            algorithm=policy,
            tol=config.tol,
            reg_covar=config.reg_covar,
            max_iter=config.max_iter,
            n_init=config.n_init,
            init_params=config.init_params,
            weights_init=None if config.warm_start else given.weights,
            means_init=None if config.warm_start else given.means,
            precisions_init=None if config.warm_start else precisions,
            random_state=config.random_state,
            warm_start=config.warm_start,
            checkpoint=checkpoint,
            checkpoint_every=config.checkpoint_every,
        )
        check_settings(estimator.get_params(deep=False))
        checked_row_arrays(policy, config.n_components, config.max_iter)
    except ConfigError as error:
        raise CheckpointCorruptError(
            f"the settings in {saved.log.objects.location} are impossible: {error}"
        ) from error
    return estimator


def mixture_in(cls: type[GaussianMixture], checkpoint: Any) -> GaussianMixture:
    """Return the mixture of a run's last commit; warns where the run has not ended.

    Raises
    ------
    CheckpointError
        There is no run, no commit is whole, or it has no parameters yet.
    """
    saved = open_saved(checkpoint)
    state = saved.state
    run = state.current or state.best
    if run is None:
        raise CheckpointError(
            f"the run in {saved.log.objects.location} is still looking for its start and has no model yet; "
            "resume it first."
        )
    entry = saved.config.algorithm
    estimator = saved_estimator(cls, saved, checkpoint, None if entry.name else "em")
    if not state.finished:
        warnings.warn(
            f"the run in {saved.log.objects.location} has not ended: its parameters are those after "
            "iteration "
            f"{run.iteration}.",
            stacklevel=3,
        )
    estimator.n_features_in_ = saved.config.n_features
    if saved.config.feature_names is not None:
        estimator.feature_names_in_ = np.asarray(saved.config.feature_names, dtype=object)
    history = replace(run.history, notes=state.notes)
    estimator._publish(run.parameters, history, run.stop_reason or "max-iter")
    return estimator


def resume_estimator(
    cls: type[GaussianMixture],
    checkpoint: Any,
    X: Any,
    *,
    sample_weight: Any,
    responsibilities_init: Any,
    algorithm: Any,
    max_iter: int | None,
    checkpoint_every: int | None,
    verbose: int,
    saved: SavedFit | None = None,
) -> GaussianMixture:
    """Go on with a checkpointed run; see `GaussianMixture.resume`."""
    saved = saved or open_saved(checkpoint)
    estimator = saved_estimator(cls, saved, checkpoint, algorithm)
    estimator.set_params(
        max_iter=estimator.max_iter if max_iter is None else max_iter,
        checkpoint_every=estimator.checkpoint_every if checkpoint_every is None else checkpoint_every,
        verbose=verbose,
    )
    check_settings(estimator.get_params(deep=False))
    policy = as_policy(estimator.algorithm)
    check_surroundings(policy)
    state, given = saved.state, saved.given
    needed = responsibilities_init if state.current is None and state.best is None else None
    observer = observer_for(verbose)
    with interrupts_as_they_are():
        try:
            with (
                opened_sources(estimator, X, sample_weight, needed) as sources,
                threads_side_by_side(),
            ):
                _check_names(estimator, saved)
                prove_access(None, sources.named())
                _check_data(saved, sources, needed is None and state.current is not None, observer)
                finished = _resumed(estimator, policy, saved, state, given, sources, observer)
        finally:
            observer.close()
    publish(estimator, finished)
    return estimator


def _check_names(estimator: GaussianMixture, saved: SavedFit) -> None:
    names, theirs = getattr(estimator, "feature_names_in_", None), saved.config.feature_names
    if names is not None and theirs is not None and list(names) != theirs:
        raise CheckpointMismatchError(
            f"X has the features {list(names)}; the checkpointed run had {theirs}. Give the same in "
            "the same order."
        )
    if theirs is not None:
        estimator.feature_names_in_ = np.asarray(theirs, dtype=object)


def _check_data(saved: SavedFit, sources: FitSources, started: bool, observer: FitObserver) -> None:
    """Raise `CheckpointMismatchError` unless the data is what the run was begun with."""
    found = {name: fingerprint(source, name, observer) for name, source in sources.named().items()}
    manifest = saved.manifest
    check_same("X", manifest.data, found["X"])
    check_same("sample_weight", manifest.sample_weight, found.get("sample_weight"))
    if not started:
        check_same(
            "responsibilities_init",
            manifest.responsibilities_init,
            found.get("responsibilities_init"),
        )


def _resumed(
    estimator: GaussianMixture,
    policy: ActivityPolicy,
    saved: SavedFit,
    state: FitState,
    given: GivenParameters,
    sources: FitSources,
    observer: FitObserver,
) -> FitState:
    run = state.current
    if state.finished and run is not None:
        if run.stop_reason != "max-iter" or run.iteration >= estimator.max_iter:
            return state
        state = replace(state, current=replace(run, stop_reason=None), finished=False)
    config = saved.config.model_copy(
        update={
            "max_iter": int(estimator.max_iter),
            "checkpoint_every": int(estimator.checkpoint_every),
            "given": ParametersEntry(),
        }
    )
    plan = FitPlan(
        policy=policy,
        settings=EmSettings(config.tol, config.max_iter, config.reg_covar),
        init_params=config.init_params,
        given=given,
        responsibilities=sources.responsibilities,
        seeds=tuple(config.seeds),
        previous_bound=config.previous_bound,
    )
    objects = saved.log.objects
    warn_unless_exclusive(objects)
    state = proved(objects, sources, _noted(saved, state, numerical_environment(compiled=sources.compiled)))
    fields = row_fields(sources.rows, config.n_components, policy, config.max_iter)
    manifest = saved.manifest
    entries = {
        "data": manifest.data,
        "sample_weight": manifest.sample_weight,
        "responsibilities_init": manifest.responsibilities_init,
    }
    journal = CheckpointJournal(saved.log, config, given, entries, fields, compiled=sources.compiled)
    journal.inherit(saved)
    return finish(estimator, plan, sources, state, journal, observer)


def _noted(saved: SavedFit, state: FitState, now: dict[str, str]) -> FitState:
    """Return the state with notes of what is different now, the environment among it."""
    notes = [_passed_over(saved)] if saved.passed_over else []
    then = saved.manifest.environment
    if then != now:
        changes = ", ".join(
            f"{name} {then.get(name, 'not used')} -> {now.get(name, 'not used')}"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        )
        note = (
            f"resumed in another environment ({shown(changes)}): the last bits may differ from an "
            "undisturbed run's."
        )
        warnings.warn(note, stacklevel=6)
        notes.append(note)
    return replace(state, notes=(*state.notes, *notes))
