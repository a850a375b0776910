"""From fits and scores to what `select_components` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emtau_dask.estimator import GaussianMixture
from emtau_dask.selection.criteria import Score, expected_loss
from emtau_dask.selection.fits import CandidateFit
from emtau_dask.selection.settings import Candidate, SelectionSettings
from emtau_dask.selection.table import (
    CandidateRecord,
    ComponentSelection,
    SelectionPasses,
    SelectionTable,
)


@dataclass(frozen=True, eq=False)
class Finals:
    """The candidates that were fitted to all rows.

    Attributes
    ----------
    mixtures : mapping
        Fitted.
    scores : mapping
        Their scores, where there are several; else empty.
    reasons : mapping
        Why others collapsed on all rows.
    """

    mixtures: Mapping[Candidate, GaussianMixture]
    scores: Mapping[Candidate, Score]
    reasons: Mapping[Candidate, str]


def result_of(
    settings: SelectionSettings,
    fits: Mapping[Candidate, CandidateFit],
    scores: Mapping[Candidate, Score],
    finals: Finals,
    n_rows: int,
    n_features: int,
) -> ComponentSelection:
    """Return the result of a selection from N rows; the first of equal finalists is best."""
    first = next(iter(finals.mixtures))
    best = first
    if finals.scores:
        best = min(finals.scores, key=lambda each: settings.criterion.value(finals.scores[each]))
    sample_rows = n_rows - scores[first].held_out_rows
    work = sum(mixture.history_.work for mixture in finals.mixtures.values())
    name, candidates = settings.criterion.name, list(settings.candidates)

    def record(candidate: Candidate) -> CandidateRecord:
        fit = fits[candidate]
        reason = fit.reason or finals.reasons.get(candidate, "")
        empty = CandidateRecord(
            candidate.n_components,
            candidate.covariance_type,
            candidate.n_parameters(n_features),
            converged=fit.converged,
            seconds=fit.seconds,
            reason=reason,
        )
        if candidate not in scores:
            return empty
        loss = expected_loss(empty.parameters, sample_rows, n_rows)
        return replace(_scored(empty, scores[candidate]), expected_loss=loss)

    def final(candidate: Candidate) -> CandidateRecord:
        mixture = finals.mixtures[candidate]
        scored = _scored(record(candidate), finals.scores[candidate])
        return replace(
            scored,
            held_out=float("nan"),
            expected_loss=0.0,
            converged=mixture.converged_,
            seconds=sum(each.seconds for each in mixture.history_),
        )

    finalists = list(finals.scores)
    return ComponentSelection(
        finals.mixtures[best],
        SelectionTable(tuple(map(record, candidates)), name, candidates.index(best)),
        SelectionTable(tuple(map(final, finalists)), name, finalists.index(best) if finalists else 0),
        SelectionPasses(1, 1 + bool(finalists), work),
        n_rows,
        sample_rows,
    )


def _scored(record: CandidateRecord, score: Score) -> CandidateRecord:
    return replace(
        record,
        log_likelihood=score.mean,
        bic=score.bic,
        aic=score.aic,
        icl=score.icl,
        held_out=score.held_out,
    )
