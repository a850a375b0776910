"""The summary of a fitted mixture: its components, whether to trust the fit, how it ran; as text and HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, chain
from textwrap import wrap
from types import MappingProxyType
from typing import Any

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from emtau_dask.em.settings import tolerances
from emtau_dask.errors import counted, html_table, one_line, plain_table, shown
from emtau_dask.estimator.findings import (
    CERTAIN,
    expected_certainty,
    remarks_on,
    share_between_components,
    shown_features,
)
from emtau_dask.mixture.linalg import Floats, read_only_copy
from emtau_dask.mixture.parameters import free_parameters
from emtau_dask.settings import AUTO, Settings

MAX_COMPONENTS = 40
"""Maximum number of components in a table; a line below it says which ones are omitted."""
LINE, COLUMN_SPACE = 80, 2
"""Maximum width of the table, and the space between columns (characters)."""
DIGITS = 2
"""Significant digits of the median deviation of a feature; its means have the same decimals."""
MAX_DECIMALS, LARGEST = 6, 1e7
"""Maximum decimals and magnitude of numbers without an exponent."""
NOISE = 1e-12
"""A mean below this share of its feature's largest mean or deviation is treated as rounding noise of 0."""
MAX_RATIO = 1e5
STOP_REASONS = MappingProxyType(
    {
        "tol": "converged (tol)",
        "no-active-rows": "ended without active rows: each had stayed in its component, so the likelihood is "
        "not necessarily at a maximum",
        "max-iter": "not converged: stopped at max_iter",
    }
)
DRAWN = "expected from the parameters"


@dataclass(frozen=True, eq=False)
class ComponentSummary:
    """A component: its weight, its mean and standard deviations, and its rows.

    Attributes
    ----------
    weight : float
    mean, standard_deviations : ndarray of shape (n_features,)
    rows : float
        Weight times the rows that were fitted; 0 if unknown.
    certain : float
        Share of its rows whose responsibility is at least 0.9; NaN if unknown.
    """

    weight: float
    mean: NDArray[np.float64]
    standard_deviations: NDArray[np.float64]
    rows: float
    certain: float


@dataclass(frozen=True, eq=False, repr=False)
class FitSummary:
    """The result of `GaussianMixture.summary`, displayed as a table.

    Attributes
    ----------
    components : tuple of ComponentSummary
    remarks : tuple of str
        What is suspicious: components of few rows, with a constant feature, or nearly equal to another.
    covariance_type : str
    feature_names : tuple of str or None
    converged : bool
    stop_reason : {"tol", "no-active-rows", "max-iter"}
    ending : str
        The stop reason for people, with the rule that ended the fit.
    n_iter : int
    lower_bound, gap : float
        Nats per row; see `GaussianMixture`. The gap is NaN if it is not known.
    n_parameters : int
        Free parameters.
    work : float
        Number of scored rows, in passes over the data.
    seconds : float
        Wall-clock time of the iterations.
    bytes_read : int
    rows : int
        Rows of weight above 0 that were fitted; 0 if the fit had no iteration.
    certain_in : str
        In which rows ``certain`` of components was counted.
    notes : tuple of str
        See `FitHistory`.
    """

    components: tuple[ComponentSummary, ...]
    remarks: tuple[str, ...]
    covariance_type: str
    feature_names: tuple[str, ...] | None
    converged: bool
    stop_reason: str
    ending: str
    n_iter: int
    lower_bound: float
    gap: float
    n_parameters: int
    work: float
    seconds: float
    bytes_read: int
    rows: int
    certain_in: str = DRAWN
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        table = component_texts(self)
        chosen = table.on_a_line
        headings = filter(any, zip(*map(_in_two, ("#", *table.headings(chosen))), strict=True))
        lines = [*headings, *table.rows(chosen)]
        aligned = plain_table(f"{table.title}\n", lines[0], lines[1:], " " * COLUMN_SPACE)
        below = (wrap(text, LINE, subsequent_indent="  ") for text in self._below(table, chosen))
        about_fit = [*self.trust_lines, *self._course_lines]
        return "\n".join([aligned, *chain.from_iterable(below), "", *about_fit])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = component_texts(self)
        chosen = table.on_a_line
        below = self._below(table, chosen), self.trust_lines, self._course_lines
        texts = ("<br/>".join(escape(shown(line)) for line in lines) for lines in below if lines)
        paragraphs = "".join(f"<p>{text}</p>" for text in texts)
        return html_table(table.title, ("#", *table.headings(chosen)), table.rows(chosen)) + paragraphs

    def _below(self, table: ComponentTexts, chosen: Sequence[int]) -> list[str]:
        """Return what is omitted in a table with the chosen features, what its columns mean, and remarks."""
        k, d = len(self.components), len(table.names)
        omitted = []
        if len(table.shown) < k:
            omitted.append(f"the {len(table.shown)} heaviest of {k} components")
        if len(chosen) < d:
            omitted.append(shown_features(len(chosen), d, k))
        meaning = (
            "rows: weight × rows of the data; certain: share of a component's rows whose responsibility is "
            f"at least {CERTAIN}, {self.certain_in}"
        )
        known = [meaning] if "certain" in table.before else []
        return [
            *filter(None, ["; ".join(omitted)]),
            *known,
            *(f"suspicious: {each}" for each in self.remarks),
        ]

    @property
    def trust_lines(self) -> list[str]:
        """Texts that say whether the fit can be trusted: how it ended, and what it could still gain."""
        return [
            self.ending,
            f"log-likelihood per row: {self.lower_bound:.9g} (natural logarithm)",
            f"could still gain: {gain_text(self.gap)}",
            *([f"sampling error (p/2N): {self.sampling_text}"] if self.rows else []),
        ]

    @property
    def sampling_text(self) -> str:
        """The sampling error of the log-likelihood per row as text, compared with the gain."""
        error = self.n_parameters / (2 * self.rows)
        compared = f", {ratio_text(error, self.gap)}" if math.isfinite(self.gap) else ""
        return f"about {error:.2g} per row{compared}"

    @property
    def _course_lines(self) -> list[str]:
        course = f"{counted(self.n_iter, 'iteration')}, {self.work:.4g} passes over {self.rows:,} rows"
        return [
            f"ran: {course}, {self.seconds:.3g} s, {format_bytes(self.bytes_read)} read",
            *(f"note: {one_line(note)}" for note in self.notes),
        ]


@dataclass(frozen=True, eq=False)
class ComponentTexts:
    """The components of a fit as texts, for a table of any kind.

    Attributes
    ----------
    title : str
    before : mapping of str to list of str
        Columns of all components before the features: "weight", "rows" and "certain" where these are known.
    names : tuple of str
        Of the features.
    columns : tuple of list of str
        For each feature, "mean ± standard deviation" of all components.
    between : ndarray of shape (n_features,)
        The share of each feature's variance that is between components.
    shown : tuple of int
        The components of the table: all, or the 40 heaviest in descending order of weight.
    """

    title: str
    before: Mapping[str, list[str]]
    names: tuple[str, ...]
    columns: tuple[list[str], ...]
    between: Floats
    shown: tuple[int, ...]

    def headings(self, chosen: Sequence[int]) -> tuple[str, ...]:
        """Return the headings of a table with the chosen features, without that of the component."""
        return (*self.before, *(self.names[j] for j in chosen))

    def rows(self, chosen: Sequence[int]) -> list[tuple[str, ...]]:
        """Return the rows of a table with the chosen features; the first text is the component's number."""
        columns = [*self.before.values(), *(self.columns[j] for j in chosen)]
        return [(str(i), *(column[i] for column in columns)) for i in self.shown]

    @property
    def order(self) -> list[int]:
        """The features, those that separate components best first."""
        return [int(j) for j in np.argsort(-self.between, kind="stable")]

    @property
    def on_a_line(self) -> list[int]:
        """The features that fit on a line of 80: all, or those that separate components best."""
        taken = len(f"{max(self.shown)}") + sum(_width(name, each) for name, each in self.before.items())
        widths = [_width(*each) for each in zip(self.names, self.columns, strict=True)]
        if taken + sum(widths) <= LINE:
            return [*range(len(widths))]
        ends = accumulate(widths[j] for j in self.order)
        return sorted(self.order[: max(1, sum(taken + end <= LINE for end in ends))])


def component_texts(summary: FitSummary) -> ComponentTexts:
    """Return the components of a summary as texts; means that are rounding noise are 0."""
    components = summary.components
    weights = np.array([component.weight for component in components])
    deviations = np.array([component.standard_deviations for component in components])
    means = np.array([component.mean for component in components])
    scale = np.maximum(np.abs(means), deviations).max(axis=0)
    means = np.where(np.abs(means) < NOISE * scale, 0.0, means)
    k, d = means.shape
    before = {"weight": [f"{weight:.4f}" for weight in weights]}
    if summary.rows:
        before["rows"] = [f"{component.rows:,.0f}" for component in components]
    if k > 1 and any(math.isfinite(component.certain) for component in components):
        before["certain"] = [share_text(component.certain) for component in components]
    rows = f" in {summary.rows:,} rows" if summary.rows else ""
    numbers = range(k) if k <= MAX_COMPONENTS else np.argsort(-weights, kind="stable")[:MAX_COMPONENTS]
    return ComponentTexts(
        f"{counted(k, 'component')}{rows}, {counted(d, 'feature')}, {summary.covariance_type} covariance",
        before,
        tuple(one_line(name) for name in summary.feature_names or (f"feature {j}" for j in range(d))),
        tuple(_mean_texts(means[:, j], deviations[:, j]) for j in range(d)),
        share_between_components(weights, means, deviations**2),
        tuple(map(int, numbers)),
    )


def share_text(share: float) -> str:
    """Return a share in whole percent, where only all rows are 100% and none 0%; a dash for NaN."""
    if not math.isfinite(share):
        return "-"
    if 0 < share < 1:
        return "<1%" if share < 0.005 else ">99%" if share >= 0.995 else f"{share:.0%}"
    return f"{share:.0%}"


def _in_two(name: str) -> tuple[str, str]:
    """Return a heading in two lines, parted where the longer is shortest; the first may be empty."""
    ends = [found.end() for found in re.finditer(r"[ _]|-(?!\d)", name[:-1])]  # not within a number
    end = min(ends, key=lambda i: max(i, len(name) - i), default=0)
    return name[:end].rstrip(), name[end:]


def _width(heading: str, texts: Sequence[str]) -> int:
    """Return the width of a column and the space before it, with its heading in two lines."""
    return COLUMN_SPACE + max(map(len, [*_in_two(heading), *texts]))


def _mean_texts(means: NDArray[np.float64], deviations: NDArray[np.float64]) -> list[str]:
    """Return "mean ± deviation" of a feature in each component, with the same decimals if that is short."""
    typical, largest = float(np.median(deviations)), float(np.abs(means).max() + deviations.max())
    decimals = DIGITS - 1 - math.floor(math.log10(typical)) if typical > 0 else 0
    if decimals > MAX_DECIMALS or not largest < LARGEST:
        digits = min(15, max(4, decimals + 1 + math.floor(math.log10(largest)))) if typical > 0 else 4
        return [
            f"{mean:z.{digits}g} ± {deviation:.2g}" for mean, deviation in zip(means, deviations, strict=True)
        ]
    decimals = max(decimals, 0)
    texts = []
    for mean, deviation in zip(means, deviations, strict=True):
        spread = f"{deviation:.{decimals}f}" if deviation >= 10.0**-decimals else f"{deviation:.1g}"
        texts.append(f"{mean:z.{decimals}f} ± {spread}")
    return texts


def summary_of(estimator: Any) -> FitSummary:
    """Return the summary of a fitted mixture."""
    parameters, history = estimator.parameters_, estimator.history_
    k, d = parameters.means.shape
    variances = parameters.structure.variances(parameters.covariances, k, d)
    rows, n_parameters = history[-1].rows if history else 0, free_parameters(parameters.structure, k, d)
    columns = zip(
        parameters.weights, parameters.means, np.sqrt(variances), expected_certainty(parameters), strict=True
    )
    names = getattr(estimator, "feature_names_in_", None)
    names = None if names is None else tuple(map(str, names))
    return FitSummary(
        components=tuple(
            ComponentSummary(
                float(weight),
                read_only_copy(mean),
                read_only_copy(deviations),
                float(weight * rows),
                float(certain),
            )
            for weight, mean, deviations, certain in columns
        ),
        remarks=remarks_on(
            parameters, rows, estimator.reg_covar, names or [f"feature {j}" for j in range(d)]
        ),
        covariance_type=parameters.covariance_type,
        feature_names=names,
        converged=estimator.converged_,
        stop_reason=estimator.stop_reason_,
        ending=_ending(estimator, rows, n_parameters),
        n_iter=estimator.n_iter_,
        lower_bound=estimator.lower_bound_,
        gap=estimator.gap_,
        n_parameters=n_parameters,
        work=history.work,
        seconds=sum(record.seconds for record in history),
        bytes_read=sum(record.bytes_read for record in history),
        rows=rows,
        notes=history.notes,
    )


def _ending(estimator: Any, rows: int, p: int) -> str:
    """Return how a fit of N rows and p free parameters ended, for people."""
    if estimator.stop_reason_ != "tol" or not rows:
        return STOP_REASONS[estimator.stop_reason_]
    settings = Settings.of(estimator)
    statistical = settings.tol == "statistical"
    tol, _ = tolerances(
        AUTO if statistical else settings.tol, rows, p, auto=statistical or settings.automatic
    )
    if tol:
        return f"converged: the log-likelihood per row changed by less than tol = {tol:g}"
    return "converged: what it could still gain is small beside sampling error"


def gain_text(gap: float | None) -> str:
    """Return for people what a fit could still gain."""
    return f"about {gap:.2g} per row" if gap is not None and math.isfinite(gap) else "not known"


def ratio_text(error: float, gap: float) -> str:
    """Return the ratio of the sampling error to what the fit could still gain, for people, in two digits."""
    if gap <= 0 or error / gap >= MAX_RATIO:
        return "far more than it could still gain"
    return f"{float(f'{error / gap:.2g}'):,g} times as much"
