"""The result of a selection: a row for each candidate, and the best fit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

from emtau_dask.em.history import frame_of
from emtau_dask.errors import InvalidDataError, counted, html_table, one_line, plain_table
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.selection.criteria import Score, SelectionSettings, expected_loss
from emtau_dask.selection.fits import SampleFits

SELECTION = "selection.json"
"""Name of the candidates of a selection in the folder of its results."""
CRITERIA = {"bic": "BIC", "aic": "AIC", "icl": "ICL"}
"""Criteria that a table shows as differences from the lowest one, and their names for people."""
HEADINGS = ("", "K", "type", "p", "log-lik./row", *(f"+{name}" for name in CRITERIA.values()), "held out")
LEGEND = "+BIC, +AIC, +ICL: above the lowest; *: chosen; !: could not be fitted"


@dataclass(frozen=True)
class CandidateRecord:
    """One candidate: a fit to the sample, judged on all rows.

    Attributes
    ----------
    n_components : int
    covariance_type : str
    parameters : int
        p, the free parameters.
    log_likelihood : float
        Per row, of all rows. NaN, as all other values, for a candidate that could not be fitted.
    bic, aic, icl : float
        In scikit-learn's scale: lower is better. The penalties count all N rows.
    held_out : float
        Log-likelihood per row of the rows outside the sample. NaN in the table of fits to all rows.
    expected_loss : float
        By how much the log-likelihood per row of the sample's fit is expected to be below that of a fit to
        all rows.
    converged : bool
        Whether the fit stopped by tol.
    seconds : float
        Of the iterations of the fit to the sample; wall-clock time.
    reason : str
        Why it could not be fitted; "" if it was.
    split_from : int
        Components of the smaller candidate whose split the fit to the sample began with, since other starts
        ended below that candidate's likelihood; 0 if it began otherwise.
    """

    n_components: int
    covariance_type: str
    parameters: int
    log_likelihood: float = math.nan
    bic: float = math.nan
    aic: float = math.nan
    icl: float = math.nan
    held_out: float = math.nan
    expected_loss: float = math.nan
    converged: bool = False
    seconds: float = 0.0
    reason: str = ""
    split_from: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):  # One object for all, so that records without values can be equal.
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):
                object.__setattr__(self, field.name, math.nan)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def note(self) -> str:
        """What a table says of the fit, if anything."""
        if self.reason:
            return "not fitted"
        if not self.converged:
            return "not converged"
        return f"split of K={self.split_from}" if self.split_from else ""


@dataclass(frozen=True, repr=False)
class SelectionTable(Sequence[CandidateRecord]):
    """The records of a selection, in the order of the candidates.

    Attributes
    ----------
    records : tuple of CandidateRecord
    criterion : str
        The name of the criterion that chose.
    best : int
        The index of the chosen record; 0 if there are none.
    """

    records: tuple[CandidateRecord, ...]
    criterion: str
    best: int

    @overload
    def __getitem__(self, index: int) -> CandidateRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CandidateRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> CandidateRecord | tuple[CandidateRecord, ...]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[CandidateRecord]:
        return iter(self.records)

    @property
    def criterion_title(self) -> str:
        """The name of the criterion for people."""
        return CRITERIA.get(self.criterion, "the likelihood of held-out rows")

    def __repr__(self) -> str:
        if not self.records:
            return "SelectionTable(0 candidates)"
        best = self.records[self.best]
        count, chosen = counted(len(self), "candidate"), f"K = {best.n_components} ({best.covariance_type})"
        return f"SelectionTable({count}, best by {self.criterion}: {chosen})"

    def __str__(self) -> str:
        return f"{self.text(repr(self))}\n{LEGEND}"

    def text(self, caption: str) -> str:
        """Return the table as lines of at most 80 characters; ``*`` is the best, ``!`` could not be fitted.

        BIC, AIC and ICL are differences from the lowest one.
        """
        return plain_table(caption, HEADINGS, self.cells(), " ")

    def to_frame(self) -> Any:
        """Return the records as a pandas DataFrame: a row for each candidate.

        Raises
        ------
        MissingPackageError
            pandas is not installed.
        """
        return frame_of(CandidateRecord, self.records, "table_")

    def _repr_html_(self) -> str:
        rows = [[*row, record.note] for row, record in zip(self.cells(), self, strict=True)]
        return html_table(repr(self), (*HEADINGS, ""), rows)

    def cells(self) -> list[list[str]]:
        """Return the texts of the records, in the order of ``HEADINGS``."""
        fitted = [record for record in self if math.isfinite(record.bic)]
        least = {name: min((getattr(record, name) for record in fitted), default=0.0) for name in CRITERIA}
        rows = []
        for number, record in enumerate(self):
            mark = "*" if number == self.best else "!" if record.reason else ""
            above = (_above(getattr(record, name) - least[name]) for name in CRITERIA)
            likelihoods = [_known(value) for value in (record.log_likelihood, record.held_out)]
            begin = [mark, f"{record.n_components}", record.covariance_type, f"{record.parameters:,}"]
            rows.append([*begin, likelihoods[0], *above, likelihoods[1]])
        return rows


def _known(value: float) -> str:
    """Return a likelihood in six digits, with the zeros at its end."""
    return f"{value:#.6g}".rstrip(".") if math.isfinite(value) else "-"


def _above(value: float) -> str:
    """Return a difference of criteria in at most nine characters."""
    if not math.isfinite(value):
        return "-"
    if value < 999_999:
        return f"{value:,.1f}"
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2e}"


def stored_selection(folder: Path) -> tuple[dict[str, Any], SelectionTable] | None:
    """Return what `emtau select` wrote to a folder: all values, and the candidates; None if nothing.

    Raises `InvalidDataError` if it is damaged.
    """
    path = folder / SELECTION
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        table = _table_of_values(values)
        table.cells()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidDataError(f"{path} is not the table of a selection ({one_line(error)}).") from error
    return values, table


def _table_of_values(values: Mapping[str, Any]) -> SelectionTable:
    known: list[dict[str, Any]] = [
        {name: math.nan if value is None else value for name, value in each.items()}
        for each in values["candidates"]
    ]
    records = tuple(CandidateRecord(**each) for each in known)
    chosen = values["n_components"], values["covariance_type"]
    best = [(record.n_components, record.covariance_type) for record in records].index(chosen)
    return SelectionTable(records, values["criterion"], best)


@dataclass(frozen=True)
class SelectionPasses:
    """Passes over all rows that a selection took.

    Attributes
    ----------
    sample : int
        Readings for the sample: one.
    scoring : int
        Readings for scores: one for all candidates, and one for the finalists if there were several.
    fits : float
        Work of the fits to all rows, ``history_.work`` of all finalists together.
    """

    sample: int
    scoring: int
    fits: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.sample + self.scoring + self.fits


@dataclass(frozen=True, eq=False, repr=False)
class ComponentSelection:
    """The result of `select_components`.

    Attributes
    ----------
    best_estimator_ : GaussianMixture
        The best candidate, fitted to all rows.
    table_ : SelectionTable
        All candidates, by their fits to the sample.
    finalists_ : SelectionTable
        The candidates that were fitted to all rows, by these fits; empty if there was only one.
    passes_ : SelectionPasses
    n_rows_, sample_rows_ : int
        Rows of the data, and of the sample; a row of weight 3 counts as three.
    """

    best_estimator_: GaussianMixture
    table_: SelectionTable
    finalists_: SelectionTable
    passes_: SelectionPasses
    n_rows_: int
    sample_rows_: int

    @property
    def best_n_components_(self) -> int:
        """K of the best candidate."""
        return int(self.best_estimator_.n_components)

    @property
    def best_covariance_type_(self) -> str:
        """The covariance type of the best candidate."""
        return str(self.best_estimator_.covariance_type)

    @property
    def criterion_(self) -> str:
        """The name of the criterion that chose."""
        return self.table_.criterion

    def __repr__(self) -> str:
        chosen = f"{counted(self.best_n_components_, 'component')}, {self.best_covariance_type_}"
        candidates = counted(len(self.table_), "candidate")
        text = f"ComponentSelection({chosen}, by {self.criterion_} of {candidates}; "
        return f"{text}{self.passes_.total:.3g} passes over {counted(self.n_rows_, 'row')})"

    def _repr_html_(self) -> str:
        return self.table_._repr_html_()


def result_of(
    settings: SelectionSettings,
    found: SampleFits,
    scores: Mapping[str, Score],
    reasons: Mapping[str, str],
    finals: Mapping[str, GaussianMixture],
    final_scores: Mapping[str, Score],
) -> ComponentSelection:
    """Return the result of a selection; the first of equal finalists is best.

    All mappings are by the names of candidates. ``found`` are the fits to the sample, ``finals`` those to all
    rows, without scores if there is only one. ``reasons`` say why others collapsed, on either.
    """
    best = next(iter(finals))
    if final_scores:
        best = min(final_scores, key=lambda name: settings.criterion.value(final_scores[name]))
    n_rows, n_features = scores[best].rows, finals[best].means_.shape[1]
    sample_rows = n_rows - scores[best].held_out_rows
    records, final_records = {}, {}
    for candidate in settings.candidates:
        name, p = candidate.name, candidate.n_parameters(n_features)
        record = CandidateRecord(
            candidate.n_components, candidate.covariance_type, p, reason=reasons.get(name, "")
        )
        if name in found.fits:
            record = replace(
                _scored(record, found.fits[name], scores[name]),
                expected_loss=expected_loss(p, sample_rows, n_rows),
                split_from=found.split_from.get(name, 0),
            )
        records[name] = record
    for name, score in final_scores.items():
        record = _scored(records[name], finals[name], score)
        final_records[name] = replace(record, held_out=math.nan, expected_loss=0.0)

    def table(of: Mapping[str, CandidateRecord]) -> SelectionTable:
        return SelectionTable(tuple(of.values()), settings.criterion.name, list(of).index(best) if of else 0)

    return ComponentSelection(
        finals[best],
        table(records),
        table(final_records),
        SelectionPasses(1, 1 + bool(final_scores), sum(each.history_.work for each in finals.values())),
        n_rows,
        sample_rows,
    )


def _scored(record: CandidateRecord, mixture: GaussianMixture, score: Score) -> CandidateRecord:
    return replace(
        record,
        log_likelihood=score.mean,
        bic=score.bic,
        aic=score.aic,
        icl=score.icl,
        held_out=score.held_out,
        converged=bool(mixture.converged_),
        seconds=sum(each.seconds for each in mixture.history_),
    )
