"""`select_components`: candidates fitted to one sample, scored in one pass, the best fitted to all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emtau_dask.em.history import FitObserver
from emtau_dask.errors import InvalidDataError, SingularComponentError, features_named, shown, shutdown_named
from emtau_dask.estimator.fitting import fit_session, is_automatic
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import opened_path, opened_sources
from emtau_dask.interrupts import interrupt_saying
from emtau_dask.policies.registry import as_policy
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.selection.checkpoint import SelectionCheckpoint, selection_checkpoint
from emtau_dask.selection.criteria import (
    Candidate,
    Score,
    SelectionSettings,
    Standing,
    challenger,
    checked_settings,
    leader,
    standing,
)
from emtau_dask.selection.fits import CandidateFit, Unclosed, fit_candidates, fit_to_all_rows
from emtau_dask.selection.passes import SelectionPass, begin_passes
from emtau_dask.selection.table import ComponentSelection, Finals, result_of


def select_components(  # noqa: PLR0913
    X: Any,
    n_components: Any,
    *,
    covariance_types: Any = ("full",),
    criterion: str = "bic",
    random_state: Any = None,
    estimator: GaussianMixture | None = None,
    sample_rows: int | None = None,
    finalists: int = 2,
    columns: Any = None,
    checkpoint: Any = None,
    sample_weight: Any = None,
) -> ComponentSelection:
    """Choose the number of components, and the covariance type, of a mixture; fit the best one to all rows.

    Every candidate is fitted to one sample of the rows, which is drawn in one reading. One more pass over all
    rows scores all candidates together: each chunk is read once. The best one is then fitted to all rows,
    from where its fit to the sample ended.

    Parameters
    ----------
    X : dask array, zarr array or array-like of shape (n_samples, n_features), or str
        As for `GaussianMixture.fit`.
    n_components : iterable of int
        The numbers to choose from, such as ``range(2, 21)``.
    covariance_types : iterable of str, default=("full",)
        The types to choose from; each goes with every number.
    criterion : {"bic", "aic", "icl", "held-out"}, default="bic"
        What chooses; the table has all four, see `Score`. ``"bic"``: for the number of components of the
        density. ``"icl"``: for the number of clusters; it also charges for components that overlap.
        ``"aic"`` and ``"held-out"``: for prediction.
    random_state : int, RandomState, Generator or None
        Of the sample and of all fits; by default that of ``estimator``.
    estimator : GaussianMixture, optional
        Its settings are those of all fits, but for the number of components and the covariance type.
    sample_rows : int, optional
        About how many rows the sample holds. By default N / ln N: then what the errors of fits to it cost
        on all rows is no more than what BIC charges. At least 131,072 and 10 for each parameter of the
        largest candidate, and no more than 256 MiB hold; four fifths of all rows at most.
    finalists : int, default=2
        At most so many candidates are fitted to all rows: the best one and, where a larger likelihood on all
        rows than on the sample may let others overtake it, those. With 1 nothing is fitted but the best one.
    columns : sequence of str, optional
        See `GaussianMixture.fit`.
    checkpoint : str, Path or zarr store, optional
        A folder or URL that keeps what is done; see `GaussianMixture`. The same call with the same place goes
        on where a killed one stopped, and gives the same bits; a finished one gives its result again.
    sample_weight : dask array, zarr array or array-like of shape (n_samples,), optional
        How many equal rows each row stands for: whole numbers, by default 1. A row of weight 3 is three rows,
        of which the sample may hold some; N in the penalties is the sum of the weights.

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
        The checkpoint's place holds something else, cannot be used, is of other data or settings
        (`CheckpointMismatchError`), or another process goes on there (`CheckpointTakenError`).
    ClusterError
        The dask cluster cannot be used, or failed.

    Warns
    -----
    ConvergenceWarning
        The fit to all rows has not converged.

    Notes
    -----
    A candidate is judged by parameters that are best on n of N rows, so that its log-likelihood on all rows
    is below its own maximum, by ``p (N/n − 1) / 2`` nats in expectation for p parameters. Larger candidates
    lose more: the choice leans towards fewer components. By BIC a component is found if it gains more than
    about ``(1/n + ln N / N) / 2`` nats per row for each of its parameters. Where ``n >= N / ln N`` that is at
    most twice what BIC asks of it after fits to all rows. The expected loss is not added back: the loss
    by superfluous parameters varies nearly as much as it is, so that chance would choose. Instead, candidates
    that may overtake the best one are fitted to all rows too (``finalists``), and compared by these fits.

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
    data = {"X": X, "sample_weight": sample_weight, "columns": columns}
    return select(settings, data, checkpoint=selection_checkpoint(checkpoint))


def select(
    settings: SelectionSettings,
    data: Mapping[str, Any],
    *,
    checkpoint: SelectionCheckpoint | None,
    observer: FitObserver | None = None,
) -> ComponentSelection:
    """Run a selection; see `select_components`, also for what is raised.

    Parameters
    ----------
    settings : SelectionSettings
    data : mapping
        ``X``, ``sample_weight`` and ``columns``.
    checkpoint : SelectionCheckpoint or None
    observer : FitObserver, optional
        By default one that suits standard output.
    """
    try:
        with shutdown_named():
            return _selected(settings, data, checkpoint, observer)
    except KeyboardInterrupt:  # In place of what one of the fits says of itself.
        raise interrupt_saying(_going_on(checkpoint)) from None


def _going_on(checkpoint: SelectionCheckpoint | None) -> str:
    if checkpoint is None:
        return "The selection was interrupted; with checkpoint=PATH what is done would have been kept."
    return shown(
        f"The selection was interrupted. The same call goes on from what is done, in {checkpoint.location}."
    )


def _selected(
    settings: SelectionSettings,
    data: Mapping[str, Any],
    checkpoint: SelectionCheckpoint | None,
    observer: FitObserver | None,
) -> ComponentSelection:
    template = settings.template
    policy = EMSampled() if is_automatic(template.algorithm) else as_policy(template.algorithm)
    shaped = settings.estimator(settings.largest, None)
    with (
        fit_session(policy, template.verbose, observer) as (executor, watched),
        opened_sources(
            executor.client,
            shaped,
            opened_path(data["X"], data["columns"], None, watched),
            data["sample_weight"],
            None,
        ) as sources,
        features_named(getattr(shaped, "feature_names_in_", None)),
    ):
        unclosed = Unclosed(watched)
        passes = begin_passes(settings, sources, checkpoint, executor, unclosed)
        fits = fit_candidates(settings, passes.fit_seed, passes.sample, checkpoint, executor, unclosed)
        scores = passes.scores("scores", {each: fit.parameters for each, fit in fits.items()})
        finals = _finals(settings, fits, scores, passes, data)
    return result_of(settings, fits, scores, finals, passes.n_rows, sources.rows.shape[1])


def _finals(
    settings: SelectionSettings,
    fits: Mapping[Candidate, CandidateFit],
    scores: Mapping[Candidate, Score],
    passes: SelectionPass,
    data: Mapping[str, Any],
) -> Finals:
    """Return the finalists, fitted to all rows, and why others collapsed there.

    Raises
    ------
    InvalidDataError
        No candidate could be fitted.
    """
    mixtures: dict[Candidate, GaussianMixture] = {}
    standings: dict[Candidate, Standing] = {}
    reasons: dict[Candidate, str] = {}
    while len(mixtures) < settings.finalists:
        if mixtures:
            chosen = challenger(settings.criterion, scores, standings, list(reasons))
        else:
            chosen = leader(settings.criterion, scores, list(reasons))
        if chosen is None:
            break
        start = fits[chosen].parameters
        assert start is not None
        try:
            mixture = fit_to_all_rows(settings, chosen, start, data, passes.checkpoint, passes.observer)
        except SingularComponentError as error:
            reasons[chosen] = str(error)
            continue
        mixtures[chosen] = mixture
        standings[chosen] = standing(settings.criterion, scores[chosen], mixture.lower_bound_)
    if not mixtures:
        raise InvalidDataError(_none_fitted(fits, reasons))
    final_scores = {}
    if len(mixtures) > 1:
        final_scores = passes.scores(
            "finalists", {each: mixture.parameters_ for each, mixture in mixtures.items()}
        )
    return Finals(mixtures, final_scores, reasons)


def _none_fitted(fits: Mapping[Candidate, CandidateFit], reasons: Mapping[Candidate, str]) -> str:
    collapsed = {each: fit.reason for each, fit in fits.items() if fit.reason} | dict(reasons)
    first, reason = next(iter(collapsed.items()))
    return (
        f"none of the {len(fits)} candidates could be fitted. {first}: {reason} Give fewer components, "
        "another covariance type, or an estimator with a larger reg_covar."
    )
