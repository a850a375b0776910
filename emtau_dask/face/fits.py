"""What `GaussianMixture.fit` and `GaussianMixture.resume` do, from settings and data to a finished fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from emtau_dask.activity import ActivityPolicy, as_policy
from emtau_dask.activity.guard import checked_row_arrays
from emtau_dask.engine.blas import single_threaded_blas
from emtau_dask.engine.caching import active_rows_cached, cache_limit
from emtau_dask.engine.checkpoint import CheckpointJournal
from emtau_dask.engine.checkpoint_reading import SavedFit, read_newest
from emtau_dask.engine.cluster import check_portable, environment, prove_access, resident
from emtau_dask.engine.fingerprint import check_same, fingerprint, fingerprint_of, source_entry
from emtau_dask.engine.fitting import FitPlan, Journal, row_fields, run_fit, temporary_journal
from emtau_dask.engine.loop import EmSettings
from emtau_dask.engine.manifest import AlgorithmEntry, ConfigEntry, ParametersEntry, SourceEntry
from emtau_dask.engine.observer import FitObserver
from emtau_dask.engine.problem import check_counts, first_unusable_row_named, pose
from emtau_dask.engine.readahead import read_ahead_limit
from emtau_dask.engine.scheduler import active_client
from emtau_dask.engine.starts import GivenParameters, check_responsibilities_shape
from emtau_dask.engine.state import FitState
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    InvalidDataError,
)
from emtau_dask.face.checks import check_settings
from emtau_dask.face.data import fit_source, row_values_source
from emtau_dask.face.policies import describe_policy, matching_policy, plain
from emtau_dask.face.progress import observer_for
from emtau_dask.face.seeds import Seeds
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.parameters import check_means, check_precisions, check_weights
from emtau_dask.storage import ObjectStore, Source, object_store, open_log, start_log
from emtau_dask.storage.commits import check_startable
from emtau_dask.storage.remote import warn_unless_exclusive

if TYPE_CHECKING:
    from emtau_dask.face.estimator import GaussianMixture

__all__ = ["fit_estimator", "mixture_in", "open_saved", "resume_estimator", "saved_estimator"]


@dataclass(frozen=True)
class _Sources:
    """What a fit reads."""

    rows: Source
    weights: Source | None
    responsibilities: Source | None

    def named(self) -> dict[str, Source]:
        values = {
            "X": self.rows,
            "sample_weight": self.weights,
            "responsibilities_init": self.responsibilities,
        }
        return {name: source for name, source in values.items() if source is not None}

    def entries(self, observer: FitObserver) -> dict[str, SourceEntry | None]:
        found = {
            name: source_entry(fingerprint(source, name, observer)) for name, source in self.named().items()
        }
        return {
            "data": found["X"],
            "sample_weight": found.get("sample_weight"),
            "responsibilities_init": found.get("responsibilities_init"),
        }


@contextmanager
def _sources(estimator: Any, X: Any, sample_weight: Any, responsibilities_init: Any) -> Iterator[_Sources]:
    """Open what a fit reads; what of it lies in memory is on the workers of a cluster until the end."""
    rows = fit_source(estimator, X)
    weights = row_values_source(sample_weight, ndim=1, what="sample_weight")
    responsibilities = row_values_source(responsibilities_init, ndim=2, what="responsibilities_init")
    check_responsibilities_shape(responsibilities, rows, estimator.n_components)
    check_counts(rows, weights, estimator.n_components)
    with (
        resident(rows) as kept_rows,
        resident(None if weights is None else weights.aligned(rows.chunk_rows)) as kept_weights,
        resident(
            None if responsibilities is None else responsibilities.aligned(rows.chunk_rows)
        ) as kept_responsibilities,
    ):
        yield _Sources(kept_rows, kept_weights, kept_responsibilities)


def _given(estimator: GaussianMixture, n_features: int) -> GivenParameters:
    K, structure = estimator.n_components, structure_named(estimator.covariance_type)
    weights, means, precisions = estimator.weights_init, estimator.means_init, estimator.precisions_init
    return GivenParameters(
        None if weights is None else check_weights(weights, K),
        None if means is None else check_means(means, K, n_features),
        None if precisions is None else check_precisions(precisions, structure, K, n_features),
    )


def _last_fit(estimator: GaussianMixture, n_features: int) -> GivenParameters:
    parameters = estimator.parameters_
    expected = (estimator.covariance_type, estimator.n_components, n_features)
    found = (parameters.covariance_type, parameters.n_components, parameters.n_features)
    if found != expected:
        raise InvalidDataError(
            f"warm_start: the last fit had (covariance_type, components, features) = {found}, this one "
            f"has {expected}. Set warm_start=False, or use a new estimator."
        )
    precisions = parameters.covariances, parameters.precisions_cholesky
    return GivenParameters(parameters.weights, parameters.means, precisions)


def _plan(estimator: GaussianMixture, policy: ActivityPolicy, seeds: Seeds, sources: _Sources) -> FitPlan:
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
    name, kind, parameters = describe_policy(plan.policy)
    names = getattr(estimator, "feature_names_in_", None)
    state = plain(estimator.random_state)
    return ConfigEntry.model_validate(
        {
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
            "random_state": state if isinstance(state, int) else None,
            "warm_start": bool(estimator.warm_start),
            "seeds": list(plan.seeds),
            "given": ParametersEntry(),
            "previous_bound": plan.previous_bound,
            "feature_names": None if names is None else [str(name) for name in names],
            "run_config": None if run_config is None else dict(run_config),
        }
    )


def fit_estimator(
    estimator: GaussianMixture,
    X: Any,
    sample_weight: Any,
    responsibilities_init: Any,
    *,
    run_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Fit an estimator and set its fitted attributes.

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
    checked_row_arrays(policy, estimator.n_components, estimator.max_iter)
    active_client()
    cache_limit()
    read_ahead_limit()
    check_portable("the policy", policy)
    observer = observer_for(estimator.verbose)
    try:
        with _sources(estimator, X, sample_weight, responsibilities_init) as sources:
            plan = _plan(estimator, policy, seeds, sources)
            with (
                single_threaded_blas(),
                _new_journal(estimator, plan, sources, run_config, overwrite, observer) as (journal, state),
            ):
                finished = _finish(estimator, plan, sources, state, journal, observer)
    finally:
        observer.close()
    _publish(estimator, finished)


@contextmanager
def _new_journal(
    estimator: GaussianMixture,
    plan: FitPlan,
    sources: _Sources,
    run_config: Mapping[str, Any] | None,
    overwrite: bool,
    observer: FitObserver,
) -> Iterator[tuple[Journal, FitState]]:
    rows = sources.rows
    fields = row_fields(rows, estimator.n_components, plan.policy, plan.settings.max_iter)
    if estimator.checkpoint is None:
        with temporary_journal(fields, len(rows.chunk_rows)) as temporary:
            yield temporary, _proved(temporary.objects, sources, FitState())
        return
    objects = object_store(estimator.checkpoint)
    check_startable(objects, overwrite=overwrite)
    objects.prepare()
    warn_unless_exclusive(objects)
    state = _proved(objects, sources, FitState())
    log = start_log(objects, overwrite=overwrite)
    config = _config(estimator, plan, rows.shape[1], run_config)
    journal = CheckpointJournal(log, config, plan.given, sources.entries(observer), fields)
    journal.save(state, commit=True)
    yield journal, state


def _proved(objects: ObjectStore | None, sources: _Sources, state: FitState) -> FitState:
    """Return the state with a note for what workers say, after they proved that they see everything."""
    notes = prove_access(objects, sources.named())
    for note in notes:
        warnings.warn(note, stacklevel=6)
    return replace(state, notes=(*state.notes, *notes))


def _finish(
    estimator: GaussianMixture,
    plan: FitPlan,
    sources: _Sources,
    state: FitState,
    journal: Journal,
    observer: FitObserver,
) -> FitState:
    structure = structure_named(estimator.covariance_type)
    problem = pose(sources.rows, sources.weights, estimator.n_components, structure, observer)
    with first_unusable_row_named(problem, observer), active_rows_cached(problem) as cached:
        return run_fit(cached, plan, state, journal, observer)


def _publish(estimator: GaussianMixture, finished: FitState) -> None:
    run = finished.current
    assert run is not None
    assert run.stop_reason is not None
    estimator._publish(run.parameters, replace(run.history, notes=finished.notes), run.stop_reason)


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
    config, given = saved.config, saved.given()
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
    state = saved.state()
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
    active_client()
    cache_limit()
    read_ahead_limit()
    check_portable("the policy", policy)
    state, given = saved.state(), saved.given()
    needed = responsibilities_init if state.current is None and state.best is None else None
    observer = observer_for(verbose)
    try:
        with (
            _sources(estimator, X, sample_weight, needed) as sources,
            single_threaded_blas(),
        ):
            _check_names(estimator, saved)
            prove_access(None, sources.named())
            _check_data(saved, sources, needed is None and state.current is not None, observer)
            finished = _resumed(estimator, policy, saved, state, given, sources, observer)
    finally:
        observer.close()
    _publish(estimator, finished)
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


def _check_data(saved: SavedFit, sources: _Sources, started: bool, observer: FitObserver) -> None:
    """Raise `CheckpointMismatchError` unless the data is what the run was begun with."""
    found = {name: fingerprint(source, name, observer) for name, source in sources.named().items()}
    manifest = saved.manifest
    check_same("X", fingerprint_of(manifest.data), found["X"])
    check_same("sample_weight", fingerprint_of(manifest.sample_weight), found.get("sample_weight"))
    if not started:
        check_same(
            "responsibilities_init",
            fingerprint_of(manifest.responsibilities_init),
            found.get("responsibilities_init"),
        )


def _resumed(
    estimator: GaussianMixture,
    policy: ActivityPolicy,
    saved: SavedFit,
    state: FitState,
    given: GivenParameters,
    sources: _Sources,
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
    state = _proved(objects, sources, _noted(saved, state))
    fields = row_fields(sources.rows, config.n_components, policy, config.max_iter)
    manifest = saved.manifest
    entries = {
        "data": manifest.data,
        "sample_weight": manifest.sample_weight,
        "responsibilities_init": manifest.responsibilities_init,
    }
    journal = CheckpointJournal(saved.log, config, given, entries, fields)
    journal.inherit(saved, state, given)
    return _finish(estimator, plan, sources, state, journal, observer)


def _noted(saved: SavedFit, state: FitState) -> FitState:
    """Return the state with notes of what is different now."""
    notes = [_passed_over(saved)] if saved.passed_over else []
    then, now = saved.manifest.environment, environment()
    if then != now:
        changes = ", ".join(
            f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]
        )
        note = (
            f"resumed in another environment ({changes}): the last bits may differ from an undisturbed run's."
        )
        warnings.warn(note, stacklevel=6)
        notes.append(note)
    return replace(state, notes=(*state.notes, *notes))
