"""Resuming a checkpointed run, and the estimator that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from emtau_dask.checkpoint.fingerprints import check_same
from emtau_dask.checkpoint.reader import SavedFit, read_newest
from emtau_dask.checkpoint.writer import CheckpointStateStore
from emtau_dask.em.fit import FitSources
from emtau_dask.em.history import FitObserver
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import FitState
from emtau_dask.em.state_store import row_fields
from emtau_dask.em.verification import DataVerifier
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    InvalidDataError,
    warn_user,
)
from emtau_dask.estimator.fitting import (
    compare_samples,
    compiled_here,
    fingerprints,
    fit_session,
    publish,
    restored_on_failure,
    run_fit,
    verified_access,
)
from emtau_dask.estimator.inputs import BY_DEFAULT, FeatureChoice, settings_of
from emtau_dask.estimator.model_file import check_names
from emtau_dask.estimator.prediction import FittedMixture
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.workers import verify_access
from emtau_dask.policies.policy import checked_row_arrays
from emtau_dask.policies.registry import DescribedPolicy, as_policy, matching_policy
from emtau_dask.process import numerical_environment
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.stores import object_store, warn_unless_exclusive

M = TypeVar("M", bound=FittedMixture)


def open_saved(checkpoint: Any) -> SavedFit:
    """Return the newest undamaged commit of a run; warns if newer ones are damaged.

    Raises
    ------
    CheckpointError
        There is no run, it is of another version, or every commit is damaged.
    """
    saved = read_newest(open_log(object_store(checkpoint)))
    if saved.passed_over:
        warn_user(_damaged_commits_text(saved))
    return saved


def _damaged_commits_text(saved: SavedFit) -> str:
    return f"commit {saved.number} is used, because newer ones are damaged: {' '.join(saved.passed_over)}"


def saved_estimator(
    cls: type[M], saved: SavedFit, checkpoint: Any, algorithm: Any = None, **changes: Any
) -> M:
    """Return the unfitted estimator of a checkpointed run.

    Parameters
    ----------
    cls : type
        `GaussianMixture`, or a class derived from it.
    saved : SavedFit
    checkpoint : str, Path or zarr store
    algorithm : policy, optional
        The user's own policy, if the run has one.
    **changes
        Settings that replace those of the run, unless they are None.

    Raises
    ------
    CheckpointMismatchError
        A user's own policy was not given again, or differs.
    CheckpointCorruptError
        Its settings are impossible.
    """
    requested, policy = saved.config.requested, matching_policy(algorithm, saved.config.policy)
    with _corrupt_settings_named(saved):
        checked_row_arrays(policy, requested.n_components, requested.max_iter)
    estimator = _estimator(cls, saved, checkpoint)
    changes["algorithm"] = policy if algorithm is not None else requested.algorithm or policy
    estimator.set_params(**{name: value for name, value in changes.items() if value is not None})
    return estimator


def _estimator(cls: type[M], saved: SavedFit, checkpoint: Any) -> M:
    """Return the unfitted estimator of a run; a policy of the user's own is a `DescribedPolicy`."""
    config, requested = saved.config, saved.config.requested
    given, precisions = GivenParameters() if requested.warm_start else config.given, None
    with _corrupt_settings_named(saved):
        check_names(saved.manifest.feature_names, saved.manifest.data.shape[1])
        if given.precisions is not None:
            precisions = config.structure.precisions(given.precisions[1])
    starts = {"weights_init": given.weights, "means_init": given.means, "precisions_init": precisions}
    algorithm = requested.algorithm or config.policy
    return cls(**requested.stored | starts | {"algorithm": algorithm, "checkpoint": checkpoint})


@contextmanager
def _corrupt_settings_named(saved: SavedFit) -> Iterator[None]:
    """Raise errors about impossible settings in the block as `CheckpointCorruptError`."""
    try:
        yield
    except (ConfigError, InvalidDataError) as error:
        raise CheckpointCorruptError(
            f"the settings in {saved.log.objects.location} are impossible: {error}"
        ) from error


def mixture_in(cls: type[M], checkpoint: Any) -> M:
    """Return the mixture of a run's last commit; warns if the run has not ended.

    Raises
    ------
    CheckpointError
        There is no run, every commit is damaged, or it has no parameters yet.
    """
    saved = open_saved(checkpoint)
    state = saved.state
    run = state.current or state.best
    if run is None:
        raise CheckpointError(
            f"the run in {saved.log.objects.location} is still computing its start and has no model yet; "
            "resume it first."
        )
    estimator = _estimator(cls, saved, checkpoint)
    if not state.finished:
        warn_user(
            f"the run in {saved.log.objects.location} has not ended: its parameters are those after "
            f"iteration {run.iteration}."
        )
    history, names = replace(run.history, notes=state.notes), saved.manifest.feature_names
    estimator._publish(run.parameters, history, run.stop_reason or "max-iter", names)
    return estimator


def resume_estimator(
    estimator: FittedMixture,
    saved: SavedFit,
    X: Any,
    *,
    sample_weight: Any,
    responsibilities_init: Any,
    chosen: FeatureChoice = BY_DEFAULT,
    observer: FitObserver | None = None,
) -> None:
    """Resume a checkpointed run and set the estimator's fitted attributes.

    Parameters
    ----------
    estimator : GaussianMixture
        The estimator of the run (`saved_estimator`); its settings may have been changed.
    saved : SavedFit
    X, sample_weight, responsibilities_init, chosen
        As for `GaussianMixture.resume`, and so are the errors.
    observer : FitObserver, optional
        By default the progress display that suits standard output.
    """
    requested, state, policy = settings_of(estimator), saved.state, saved.config.policy
    if isinstance(policy, DescribedPolicy):
        policy = as_policy(requested.algorithm)
    needed = responsibilities_init if state.current is None and state.best is None else None
    checked_row_arrays(policy, requested.n_components, requested.max_iter)
    names = saved.manifest.feature_names
    with (
        restored_on_failure(estimator),
        fit_session(
            estimator,
            policy,
            X,
            sample_weight,
            needed,
            chosen=chosen,
            names=names,
            observer=observer,
        ) as (executor, observer, sources),
    ):
        _check_names(estimator, saved)
        verify_access(executor.client, None, sources.named())
        verifier = DataVerifier(saved.digests)
        _check_same(saved, sources, needed is None and state.current is not None)
        compare_samples(sources, verifier, executor, observer)
        reopened = _reopened(state, requested.max_iter)
        if reopened.finished:
            publish(estimator, _with_verification_notes(reopened, verifier))
            return
        compiled = compiled_here(requested, sources, executor)
        settings = replace(saved.config, requested=requested, policy=policy, compiled=compiled)
        how = f"resumed after iteration {0 if reopened.current is None else reopened.current.iteration}"
        opening = _state_store(saved, reopened, settings, sources, verifier, executor)
        finished, _ = run_fit(how, estimator, settings, sources, executor, observer, opening)
    publish(estimator, _with_verification_notes(finished, verifier))


def _check_names(estimator: FittedMixture, saved: SavedFit) -> None:
    names, stored = getattr(estimator, "feature_names_in_", None), saved.manifest.feature_names
    if names is not None and stored is not None and tuple(names) != stored:
        raise CheckpointMismatchError(
            f"X has the features {list(names)}; the checkpointed run had {list(stored)}. Give the same ones "
            "in the same order."
        )
    if stored is not None:
        estimator.feature_names_in_ = np.asarray(stored, dtype=object)


def _check_same(saved: SavedFit, sources: FitSources, started: bool) -> None:
    """Raise `CheckpointMismatchError` unless the data have the fingerprints that the run began with."""
    stored = saved.manifest.sources
    for name, found in fingerprints(sources).items():
        if name != "responsibilities_init" or not started:
            check_same("X" if name == "data" else name, stored[name], found)


def _with_verification_notes(state: FitState, verifier: DataVerifier) -> FitState:
    """Return the state of an ended run with the verifier's notes, and one of the chunks not compared."""
    not_compared = verifier.not_read_again()
    new = [note for note in verifier.notes if note not in state.notes]
    return replace(state, notes=(*state.notes, *new, *([] if not_compared is None else [not_compared])))


def _reopened(state: FitState, max_iter: int) -> FitState:
    """Return the state; it is no longer finished if the run ended at a smaller ``max_iter``."""
    run = state.current
    if not state.finished or run is None or run.stop_reason != "max-iter" or run.iteration >= max_iter:
        return state
    return replace(state, current=replace(run, stop_reason=None), finished=False)


@contextmanager
def _state_store(
    saved: SavedFit,
    state: FitState,
    settings: EmSettings,
    sources: FitSources,
    verifier: DataVerifier,
    executor: Executor,
) -> Iterator[CheckpointStateStore]:
    """Open the state store that continues the run's commits."""
    warn_unless_exclusive(saved.log.objects)
    environment = numerical_environment(compiled=settings.compiled)
    state = verified_access(
        executor, saved.log.objects, sources, _with_differences(saved, state, environment)
    )
    requested, manifest = settings.requested, replace(saved.manifest, config=settings)
    fields = row_fields(sources.rows, requested.n_components, settings.policy, requested.max_iter)
    state_store = CheckpointStateStore(saved.log, manifest, fields, verifier)
    state_store.inherit(saved, state)
    yield state_store


def _with_differences(saved: SavedFit, state: FitState, now: dict[str, str]) -> FitState:
    """Return the state with notes of damaged commits and of a changed environment."""
    notes = [_damaged_commits_text(saved)] if saved.passed_over else []
    then = saved.manifest.environment
    if then != now:
        changes = ", ".join(
            f"{name} {then.get(name, 'not used')} -> {now.get(name, 'not used')}"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        )
        note = (
            f"resumed in another environment ({changes}): the last digits may differ from an unbroken run's."
        )
        warn_user(note)
        notes.append(note)
    return replace(state, notes=(*state.notes, *notes))
