"""The content of a report: subject, components, warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from emtau_dask.estimator.findings import certain_shares, shown_features
from emtau_dask.estimator.fitting import FITTED_TO
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.row_sample import DrawnRows
from emtau_dask.estimator.summary import FitSummary, component_texts
from emtau_dask.plot.drawing import counted
from emtau_dask.selection.table import HEADINGS, SelectionTable

MAX_NAME_LENGTH = 48
SHOWN_FEATURES, MAX_FEATURES = 6, 200
"""Maximum features of the first table, and of all tables; the page says what is omitted."""
STATES = MappingProxyType(
    {"tol": "Converged", "no-active-rows": "Ended without active rows", "max-iter": "Not converged"}
)


@dataclass(frozen=True, eq=False)
class Subject:
    """A fitted mixture, and information on its fit.

    Texts may contain anything: the page escapes them, and removes secrets of URLs.

    Attributes
    ----------
    model : GaussianMixture
        Fitted.
    name : str
        Its name.
    place : str
        The path or URL from which it was read, or to which it was written.
    data : str or None
        The path or URL of its rows; None if unknown.
    arguments : str or None
        The arguments of `GaussianMixture.fit` for these rows, in Python; None if unknown.
    drawn : DrawnRows or None
        Rows to show; None without data.
    config : str or None
        The run's config as YAML.
    command : str or None
        The command that repeats the fit.
    finished : bool
        Whether the run has ended.
    written : str or None
        When its last commit was written.
    environment : mapping of str to str
        Versions and CPU of the fit; empty if unknown.
    notes : tuple of str
        Earlier remarks.
    run : str or None
        The id of a checkpointed run.
    selection : SelectionTable or None
        The candidates of which the mixture was chosen, if it was.
    """

    model: GaussianMixture
    name: str
    place: str
    data: str | None = None
    arguments: str | None = None
    drawn: DrawnRows | None = None
    config: str | None = None
    command: str | None = None
    finished: bool = True
    written: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run: str | None = None
    selection: SelectionTable | None = None

    @property
    def rows(self) -> int:
        """Rows of weight above 0 that were fitted; 0 without iterations."""
        history = self.model.history_
        return history[-1].rows if len(history) else 0

    @property
    def names(self) -> list[str]:
        """Names of the features, cut at 48 characters."""
        names = getattr(self.model, "feature_names_in_", None)
        if names is None:
            return [f"feature {i}" for i in range(self.model.n_features_in_)]
        return [
            text if len(text := str(name)) <= MAX_NAME_LENGTH else f"{text[: MAX_NAME_LENGTH - 1]}…"
            for name in names
        ]


@dataclass(frozen=True)
class Cells:
    """A table: headings, and rows of texts; the first text names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a mixture.

    Attributes
    ----------
    components : Cells
        Weights, rows, certain ones, and means of the features that separate components best.
    means : Cells or None
        A row for each feature, and a column for each component; None if the first table has all.
    omitted : tuple of str
        Sentences that say which components and features are in the tables, if not all.
    """

    components: Cells
    means: Cells | None
    omitted: tuple[str, ...]


def summary_of_rows(subject: Subject) -> FitSummary:
    """Return the summary of a fit; if rows were drawn, with the certainty of their labels."""
    summary, drawn = subject.model.summary(), subject.drawn
    if drawn is None:
        return summary
    certain = certain_shares(drawn.rows, drawn.weights, subject.model.parameters_)
    pairs = zip(summary.components, certain.tolist(), strict=True)
    components = tuple(replace(each, certain=share) for each, share in pairs)
    return replace(summary, components=components, certain_in=f"counted in {counted(drawn)}")


def tables_of(subject: Subject, summary: FitSummary) -> Tables:
    """Return the tables of a fitted mixture."""
    texts = component_texts(replace(summary, feature_names=tuple(subject.names)))
    k, d = len(summary.components), len(texts.names)
    omitted = []
    if len(texts.shown) < k:
        omitted.append(f"The {len(texts.shown)} heaviest of {k:,} components are shown.")
    first = texts.order[:SHOWN_FEATURES] if d > SHOWN_FEATURES else range(d)
    if d > SHOWN_FEATURES:
        named = ", ".join(texts.names[j] for j in first)
        omitted.append(f"The table has {shown_features(SHOWN_FEATURES, d, k)}: {named}.")
    if d > MAX_FEATURES:
        omitted.append(f"Tables have {shown_features(MAX_FEATURES, d, k)}.")
    components = Cells(("component", *texts.headings(first)), tuple(texts.rows(first)))
    between = {"between components": texts.between} if k > 1 else {}
    means = Cells(
        ("feature", *between, *(f"component {i}" for i in texts.shown)),
        tuple(
            (
                texts.names[j],
                *(f"{shares[j]:.0%}" for shares in between.values()),
                *(texts.columns[j][i] for i in texts.shown),
            )
            for j in texts.order[:MAX_FEATURES]
        ),
    )
    return Tables(components, means if d > SHOWN_FEATURES else None, tuple(omitted))


def candidates_of(table: SelectionTable) -> Cells:
    """Return the candidates of a selection, and which of them was chosen."""
    rows = []
    for (mark, k, covariance_type, *values), record in zip(table.cells(), table, strict=True):
        rows.append((f"{k}, {covariance_type}", *values, "chosen" if mark == "*" else record.note))
    return Cells(("components", *HEADINGS[3:], "remark"), tuple(rows))


def state(subject: Subject) -> str:
    """Return how a fit ended, in one or two words."""
    if not subject.finished:
        return "Not finished"
    return STATES[subject.model.stop_reason_]


def warnings_of(subject: Subject) -> list[str]:
    """Return warnings on the fit as a whole for the reader; empty if there are none."""
    notes = [note for note in subject.model.history_.notes if not note.startswith(FITTED_TO)]
    return list(dict.fromkeys([*_of_the_end(subject), *subject.notes, *notes]))


def _of_the_end(subject: Subject) -> list[str]:
    model = subject.model
    if not subject.finished:
        return [
            f"The run has not ended. This is its state after {model.n_iter_:,} iterations; it can be resumed."
        ]
    if model.stop_reason_ != "max-iter":
        return []
    change = model.history_.last_change
    last = f" The log-likelihood last changed by {change:.2g} per row." if math.isfinite(change) else ""
    return [f"The fit reached max_iter = {model.max_iter:,} before it converged.{last}"]
