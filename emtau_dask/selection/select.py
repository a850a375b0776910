"""`select_components`: candidates fitted to one sample, scored in one pass, the best fitted to all rows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import cache, partial
from typing import Any, Literal
from uuid import uuid4

from emtau_dask.checkpoint.fingerprints import fingerprint, sampled_digests
from emtau_dask.data.row_random import Samples
from emtau_dask.em.fit import FitSources, open_context
from emtau_dask.em.history import FitObserver
from emtau_dask.em.problem import Problem, make_problem
from emtau_dask.em.settings import policy_before_data
from emtau_dask.errors import (
    InvalidDataError,
    SingularComponentError,
    counted,
    features_named,
    shown,
    shutdown_named,
)
from emtau_dask.estimator.fitting import fit_session
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import FeatureChoice, Seeds
from emtau_dask.execution.workers import verify_access
from emtau_dask.interrupts import interrupt_with_text
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.policies.registry import as_policy, describe_policy
from emtau_dask.selection.checkpoint import SelectionCheckpoint, SelectionEntry, selection_checkpoint
from emtau_dask.selection.criteria import (
    Score,
    SelectionSettings,
    Standing,
    challenger,
    checked_settings,
    leader,
    sample_share,
    standing,
)
from emtau_dask.selection.fits import fit_candidates, fit_to_all_rows
from emtau_dask.selection.passes import count_rows, draw_sample, score_all
from emtau_dask.selection.table import ComponentSelection, result_of
from emtau_dask.settings import AUTO, Settings, check, missing_values
from emtau_dask.storage.stores import NotExclusiveWarning

OF_A_FIT = {"n_components", "covariance_type", "algorithm", "warm_start"}
"""Settings of the estimator that are not those of a selection, or are stored in another form."""


def select_components(  # noqa: PLR0913
    X: Any,
    n_components: Any,
    *,
    covariance_types: Any = ("full",),
    criterion: Literal["bic", "aic", "icl", "held-out"] = "bic",
    random_state: Any = None,
    estimator: GaussianMixture | None = None,
    sample_rows: int | None = None,
    finalists: int = 2,
    columns: Any = None,
    features: Any = None,
    checkpoint: Any = None,
    sample_weight: Any = None,
    verbose: int | None = None,
) -> ComponentSelection:
    """Choose the number of components, and the covariance type, of a mixture; fit the best one to all rows.

    Every candidate is fitted to one sample of the rows, which takes one reading of the data. One more pass
    over all rows scores all candidates: each chunk is read once. The best one is then fitted to all rows,
    from its fit to the sample.

    Parameters
    ----------
    X : dask array, zarr array or array-like of shape (n_samples, n_features), or str
        As for `GaussianMixture.fit`.
    n_components : iterable of int
        The numbers to choose from, such as ``range(2, 21)``.
    covariance_types : iterable of str, default=("full",)
        The types to choose from; each is combined with every number.
    criterion : {"bic", "aic", "icl", "held-out"}, default="bic"
        The criterion of the choice; the table has all four, see `Score`. ``"bic"``: for the number of
        components of the density. ``"icl"``: for the number of clusters; it also charges for components that
        overlap. ``"aic"`` and ``"held-out"``: for prediction.
    random_state : int, RandomState, Generator or None
        Of the sample and of all fits; by default that of ``estimator``.
    estimator : GaussianMixture, optional
        Settings of all fits, except the number of components and the covariance type.
    sample_rows : int, optional
        Approximate rows of the sample. By default N / ln N: then the errors of fits to it cost no more than
        BIC's penalty. At least 131,072 and 10 for each parameter of the largest candidate; at most 256 MiB,
        and four fifths of all rows.
    finalists : int, default=2
        Maximum candidates that are fitted to all rows: the best one, and those that may overtake it by their
        expected gain. With 1 only the best one is fitted.
    columns : sequence of str, optional
    features : str or sequence of str, optional
        See `GaussianMixture.fit`.
    checkpoint : str, Path or zarr store, optional
        A folder or URL that keeps what is done; see `GaussianMixture`. The same call with the same place goes
        on where a killed one stopped, with identical results; a finished one gives its result again.
    sample_weight : dask array, zarr array or array-like of shape (n_samples,), optional
        Number of equal rows of each row: whole numbers, by default 1. A row of weight 3 is three rows, some
        of which may be in the sample; N in the penalties is the sum of the weights.
    verbose : int, optional
        1 prints which candidate is fitted, and the progress of the fits to all rows, as
        `GaussianMixture` does; by default as ``estimator`` says.

    Returns
    -------
    ComponentSelection
        ``best_estimator_``, ``best_n_components_``, ``best_covariance_type_``, ``table_`` (a record for each
        candidate), ``finalists_`` and ``passes_``.

    Raises
    ------
    ConfigError
        A setting is impossible.
    InvalidDataError
        The data cannot be used, the sample has fewer rows than components, or no candidate could be fitted.
    CheckpointError
        The checkpoint's place has something else, cannot be used, has other data or settings
        (`CheckpointMismatchError`), or another process continues there (`CheckpointTakenError`).
    ClusterError
        The dask cluster cannot be used, or failed.

    Warns
    -----
    ConvergenceWarning
        The fit to all rows has not converged.

    Notes
    -----
    On all N rows a fit to n of them is worse than a fit to all, by ``p (N/n − 1) / 2`` nats in expectation
    for p parameters, so the choice leans towards fewer components. By BIC a component is found if it gains
    more than about ``(1/n + ln N / N) / 2`` nats per row for each of its parameters. The expected loss is not
    added back, since it varies nearly as much as it is. Instead, candidates that may overtake the best one
    are fitted to all rows too (``finalists``).

    Examples
    --------
    >>> import numpy as np
    >>> from emtau_dask import select_components
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(3000, 2)) + 8 * rng.integers(3, size=3000)[:, None]
    >>> select_components(X, range(1, 6), random_state=0).best_n_components_
    3
    """
    settings = checked_settings(
        n_components, covariance_types, criterion, random_state, estimator, sample_rows, finalists
    )
    if verbose is not None:
        check("verbose", verbose)
        settings.template.set_params(verbose=verbose)
    data = {"X": X, "sample_weight": sample_weight, "chosen": FeatureChoice(columns, features)}
    return select(settings, data, checkpoint=selection_checkpoint(checkpoint))


def select(
    settings: SelectionSettings,
    data: Mapping[str, Any],
    *,
    checkpoint: SelectionCheckpoint | None,
    observer: FitObserver | None = None,
) -> ComponentSelection:
    """Run a selection from ``X``, ``sample_weight`` and ``chosen`` features; see `select_components`.

    By default its observer is one that suits standard output.
    """
    try:
        with shutdown_named():
            return _run_selection(settings, data, checkpoint, observer)
    except KeyboardInterrupt:  # In place of what one of the fits says of itself.
        raise interrupt_with_text(_interrupt_text(checkpoint)) from None


def _interrupt_text(checkpoint: SelectionCheckpoint | None) -> str:
    if checkpoint is None:
        return "The selection was interrupted. With checkpoint=PATH its progress would have been kept."
    return shown(
        f"The selection was interrupted. The same call continues from its progress in {checkpoint.location}."
    )


class Unclosed:
    """Passes everything on to an observer, except the end of one of several fits.

    With a ``name`` all parts of the fit have it.
    """

    def __init__(self, observer: FitObserver, name: str | None = None) -> None:
        self.stage, self.chunks_done = observer.stage, observer.chunks_done
        self.iteration, self.note, self.left_out = observer.iteration, observer.note, observer.left_out
        self._part, self._name = observer.part, name

    def part(self, name: str, compared: str = "") -> None:
        """Pass on a part."""
        self._part(self._name or name, "" if self._name else compared)

    def close(self, *, done: bool) -> None:
        """Ignore."""


def _run_selection(
    settings: SelectionSettings,
    data: Mapping[str, Any],
    checkpoint: SelectionCheckpoint | None,
    observer: FitObserver | None,
) -> ComponentSelection:
    policy = policy_before_data(Settings.of(settings.template))
    shaped = settings.estimator(settings.largest, None)
    with (
        fit_session(
            shaped,
            policy,
            data["X"],
            data["sample_weight"],
            None,
            chosen=data["chosen"],
            observer=observer,
        ) as (executor, fit_observer, sources),
        features_named(getattr(shaped, "feature_names_in_", None)),
        open_context(executor, Unclosed(fit_observer)) as context,
    ):
        # Neither the sample nor scores depend on the number of components and the covariance type.
        structure = structure_named(settings.largest.covariance_type)
        problem = make_problem(
            sources.rows,
            sources.weights,
            1,
            structure,
            executor,
            context,
            compiled=False,
            missing=missing_values(settings.template.missing),
        )
        entry, problem = _begin(settings, sources, problem, checkpoint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotExclusiveWarning)  # Of this the selection has warned.
            return _compute(settings, data, entry, problem, checkpoint)


def _begin(
    settings: SelectionSettings,
    sources: FitSources,
    problem: Problem,
    checkpoint: SelectionCheckpoint | None,
) -> tuple[SelectionEntry, Problem]:
    """Return the entry of the selection, from the checkpoint if there is one, and the problem."""
    n_rows, n_features = count_rows(problem), problem.n_features
    p = max(candidate.n_parameters(n_features) for candidate in settings.candidates)
    seeds, named = Seeds(settings.template.random_state), sources.named()
    entries = {name: fingerprint(source) for name, source in named.items()}
    entry = SelectionEntry(
        uuid4().hex,
        {},
        (seeds.draw(), seeds.draw()),
        sample_share(n_rows, n_features, p, settings.sample_rows),
        entries["X"],
        entries.get("sample_weight"),
    )
    if checkpoint is None:
        return entry, problem
    checkpoint.prepare()
    executor, observer = problem.executor, problem.context.observer
    verify_access(executor.client, checkpoint.objects, named)  # The fits say in what workers differ.
    results = [
        one for name, source in named.items() for one in sampled_digests(source, name, executor, observer)
    ]
    samples = tuple((one.source, one.made_on, one.chunk, one.digest.hex()) for one in results)
    entry = checkpoint.begin(replace(entry, settings=_stored_settings(settings), samples=samples))
    verifier = entry.verifier()
    verifier.compare(results, problem.chunk_ranges)
    return entry, replace(problem, context=replace(problem.context, verifier=verifier))


def _stored_settings(settings: SelectionSettings) -> dict[str, Any]:
    """Return the settings of a selection as JSON has them; raises `ConfigError` if it cannot."""
    requested = Settings.of(settings.template)
    values = {name: value for name, value in requested.stored.items() if name not in OF_A_FIT}
    values |= {
        "candidates": [(each.n_components, each.covariance_type) for each in settings.candidates],
        "sample_rows": settings.sample_rows,
        "algorithm": AUTO
        if requested.automatic
        else astuple(describe_policy(as_policy(requested.algorithm))),
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _compute(
    settings: SelectionSettings,
    data: Mapping[str, Any],
    entry: SelectionEntry,
    problem: Problem,
    checkpoint: SelectionCheckpoint | None,
) -> ComponentSelection:
    samples = Samples(entry.seeds[0], (entry.share,))
    sample = cache(partial(draw_sample, problem, samples, settings.largest.n_components))
    found = fit_candidates(settings, entry, sample, checkpoint, problem)
    fits, collapsed = found.fits, found.reasons
    scores = _scores(fits, entry.scores, problem, samples)
    entry = _store_results(checkpoint, entry, scores=scores, reasons=collapsed)
    finals, reasons = _fit_finalists(settings, fits, scores, data, checkpoint, problem.context.observer)
    reasons |= {name: reason for name, reason in collapsed.items() if name not in fits}
    if not finals:
        first = next(each for each in settings.candidates if each.name in reasons)
        raise InvalidDataError(
            f"none of {counted(len(settings.candidates), 'candidate')} could be fitted. {first}: "
            f"{reasons[first.name]} Give fewer components, another covariance type, or an estimator with a "
            "larger reg_covar."
        )
    final_scores: dict[str, Score] = {}
    if len(finals) > 1:
        final_scores = _scores(finals, entry.finalists, problem, samples)
        _store_results(checkpoint, entry, finalists=final_scores)
    return result_of(settings, found, scores, reasons, finals, final_scores)


def _scores(
    mixtures: Mapping[str, GaussianMixture], known: Mapping[str, Score], problem: Problem, samples: Samples
) -> dict[str, Score]:
    """Return the scores of mixtures, from a pass unless all are known."""
    if known.keys() == mixtures.keys():
        return {name: known[name] for name in mixtures}
    parameters = [mixture.parameters_ for mixture in mixtures.values()]
    return dict(zip(mixtures, score_all(problem, samples, parameters), strict=True))


def _store_results(
    checkpoint: SelectionCheckpoint | None, entry: SelectionEntry, **results: Any
) -> SelectionEntry:
    """Store the entry with new results, and return it."""
    changed = replace(entry, **results)
    if checkpoint is not None and changed != entry:
        checkpoint.keep(changed)
    return changed


def _fit_finalists(
    settings: SelectionSettings,
    fits: Mapping[str, GaussianMixture],
    scores: Mapping[str, Score],
    data: Mapping[str, Any],
    checkpoint: SelectionCheckpoint | None,
    observer: FitObserver,
) -> tuple[dict[str, GaussianMixture], dict[str, str]]:
    """Return the finalists, fitted to all rows, and the reasons of collapsed ones."""
    candidates = {candidate.name: candidate for candidate in settings.candidates}
    finals: dict[str, GaussianMixture] = {}
    standings: dict[str, Standing] = {}
    reasons: dict[str, str] = {}
    while len(finals) < settings.finalists:
        if finals:
            name = challenger(settings.criterion, scores, standings, reasons)
        else:
            name = leader(settings.criterion, scores, reasons)
        if name is None:
            break
        estimator = settings.estimator(candidates[name], settings.template.random_state)
        place = None if checkpoint is None else checkpoint.run("fits", name)
        try:
            named = Unclosed(observer, f"{candidates[name]}, all rows")
            finals[name] = fit_to_all_rows(estimator, fits[name], data, place, named)
        except SingularComponentError as error:
            reasons[name] = str(error)
        else:
            standings[name] = standing(settings.criterion, scores[name], finals[name].lower_bound_)
    return finals, reasons
