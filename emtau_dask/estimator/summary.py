"""The summary of a fitted mixture: its components and how its fit ended, as text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import html_table, one_line
from emtau_dask.mixture.linalg import read_only_copy

MAX_COMPONENTS = 40
"""Maximum number of components in a table; a line below it says which ones are omitted."""
MAX_CHARACTERS, COLUMN_SPACE = 56, 3
"""Maximum width of the columns of features in a line of 80, and the space between columns (characters)."""
DIGITS = 2
"""Significant digits of the median deviation of a feature; its means have the same decimals."""
MAX_DECIMALS, LARGEST = 6, 1e7
"""Maximum decimals and magnitude of numbers without an exponent."""
NOISE = 1e-12
"""A mean below this share of its feature's largest mean or deviation is treated as rounding noise of 0."""
STOP_REASONS = MappingProxyType(
    {
        "tol": "converged: the bound changed by less than tol",
        "no-active-rows": "no active rows are left",
        "max-iter": "max_iter reached without converging",
    }
)


@dataclass(frozen=True, eq=False)
class ComponentSummary:
    """A component: its weight, and its mean and standard deviations, each of shape (n_features,)."""

    weight: float
    mean: NDArray[np.float64]
    standard_deviations: NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class FitSummary:
    """The result of `GaussianMixture.summary`, displayed as a table.

    Attributes
    ----------
    components : tuple of ComponentSummary
    covariance_type : str
    feature_names : tuple of str or None
    converged : bool
    stop_reason : {"tol", "no-active-rows", "max-iter"}
    n_iter : int
    lower_bound, gap : float
        Nats per row; see `GaussianMixture`. The gap is NaN if it is not known.
    work : float
        Number of scored rows, in passes over the data.
    rows : int
        Rows of weight above 0 that were fitted; 0 if the fit had no iteration.
    notes : tuple of str
        See `FitHistory`.
    """

    components: tuple[ComponentSummary, ...]
    covariance_type: str
    feature_names: tuple[str, ...] | None
    converged: bool
    stop_reason: str
    n_iter: int
    lower_bound: float
    gap: float
    work: float
    rows: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        table = component_texts(self)
        rows = [("#", *table.headings), *((str(number), *texts) for number, texts in table.texts.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([*self._sentences(table), "", *lines, *filter(None, [table.omitted])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = component_texts(self)
        caption = "; ".join([*self._sentences(table), *filter(None, [table.omitted])])
        rows = ((str(number), *texts) for number, texts in table.texts.items())
        return html_table(caption, ("#", *table.headings), rows)

    def _sentences(self, table: ComponentTexts) -> list[str]:
        named = [
            table.title,
            f"{stop_text(self.stop_reason)}; {self.n_iter:,} iterations",
            f"work: {self.work:.4g} passes over {self.rows:,} rows",
            f"lower bound: {self.lower_bound:.9g} nats per row",
            f"estimated gap: {gap_text(self.gap)}",
        ]
        return [*named, *(f"note: {one_line(note)}" for note in self.notes)]


@dataclass(frozen=True)
class ComponentTexts:
    """The components of a fit as texts, for a table of any kind.

    Attributes
    ----------
    title : str
    headings : tuple of str
        "weight", then the names of features.
    texts : mapping of int to tuple of str
        The row of a component by its number: its weight, and for each feature "mean ± standard deviation".
        If there are more than 40 components, the 40 heaviest in descending order of weight.
    omitted : str or None
        A text that says which components and features are in the table, if not all.
    """

    title: str
    headings: tuple[str, ...]
    texts: Mapping[int, tuple[str, ...]]
    omitted: str | None


def component_texts(summary: FitSummary) -> ComponentTexts:
    """Return the components of a summary as texts; means that are rounding noise are 0.

    If not all features fit on a line of 80, the table has those that separate the components best.
    """
    components = summary.components
    weights = np.array([component.weight for component in components])
    deviations = np.array([component.standard_deviations for component in components])
    means = np.array([component.mean for component in components])
    scale = np.maximum(np.abs(means), deviations).max(axis=0)
    means = np.where(np.abs(means) < NOISE * scale, 0.0, means)
    k, features = means.shape
    numbers = range(k) if k <= MAX_COMPONENTS else np.argsort(-weights, kind="stable")[:MAX_COMPONENTS]
    names = [one_line(name) for name in summary.feature_names or (f"feature {j}" for j in range(features))]
    columns = [_mean_texts(means[:, j], deviations[:, j]) for j in range(features)]
    between = share_between_components(weights, means, deviations**2)
    chosen = _features_on_a_line(
        [max(map(len, [name, *column])) for name, column in zip(names, columns, strict=True)], between
    )
    omitted = []
    if k > MAX_COMPONENTS:
        omitted.append(f"the {MAX_COMPONENTS} heaviest of {k} components")
    if len(chosen) < features:
        omitted.append(f"the {len(chosen)} of {features} features that separate the components best")
    return ComponentTexts(
        f"{k} components, {summary.covariance_type} covariance, {features} features",
        ("weight", *(names[j] for j in chosen)),
        {int(i): (f"{weights[i]:.4f}", *(columns[j][i] for j in chosen)) for i in numbers},
        "; ".join(omitted) or None,
    )


def _features_on_a_line(widths: Sequence[int], between: NDArray[np.float64]) -> Sequence[int]:
    """Return the features whose columns fit on a line: all, or those that separate components best."""
    if sum(widths) + COLUMN_SPACE * len(widths) <= MAX_CHARACTERS:
        return range(len(widths))
    best = [int(j) for j in np.argsort(-between, kind="stable")]
    ends = accumulate(widths[j] + COLUMN_SPACE for j in best)
    return sorted(best[: max(1, sum(end <= MAX_CHARACTERS for end in ends))])


def share_between_components(
    weights: NDArray[np.float64], means: NDArray[np.float64], variances: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of each feature's variance in the mixture that is between components, (d,).

    Parameters
    ----------
    weights : ndarray of shape (K,)
    means, variances : ndarray of shape (K, d)
    """
    between: NDArray[np.float64] = weights @ (means - weights @ means) ** 2
    within: NDArray[np.float64] = weights @ variances
    total = between + within
    return np.divide(between, total, out=np.zeros_like(total), where=total > 0)


def _mean_texts(means: NDArray[np.float64], deviations: NDArray[np.float64]) -> list[str]:
    """Return "mean ± deviation" of a feature in each component, with the same decimals if that is short."""
    typical, largest = float(np.median(deviations)), float(np.abs(means).max() + deviations.max())
    decimals = DIGITS - 1 - math.floor(math.log10(typical)) if typical > 0 else 0
    if decimals > MAX_DECIMALS or not largest < LARGEST:
        digits = min(15, max(4, decimals + 1 + math.floor(math.log10(largest)))) if typical > 0 else 4
        return [
            f"{mean:.{digits}g} ± {deviation:.2g}" for mean, deviation in zip(means, deviations, strict=True)
        ]
    decimals = max(decimals, 0)
    texts = []
    for mean, deviation in zip(means, deviations, strict=True):
        spread = f"{deviation:.{decimals}f}" if deviation >= 10.0**-decimals else f"{deviation:.1g}"
        texts.append(f"{mean:.{decimals}f} ± {spread}")
    return texts


def summary_of(estimator: Any) -> FitSummary:
    """Return the summary of a fitted mixture."""
    parameters, history = estimator.parameters_, estimator.history_
    variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
    columns = zip(parameters.weights, parameters.means, np.sqrt(variances), strict=True)
    names = getattr(estimator, "feature_names_in_", None)
    return FitSummary(
        components=tuple(
            ComponentSummary(float(weight), read_only_copy(mean), read_only_copy(deviations))
            for weight, mean, deviations in columns
        ),
        covariance_type=parameters.covariance_type,
        feature_names=None if names is None else tuple(map(str, names)),
        converged=estimator.converged_,
        stop_reason=estimator.stop_reason_,
        n_iter=estimator.n_iter_,
        lower_bound=estimator.lower_bound_,
        gap=estimator.gap_,
        work=history.work,
        rows=history[-1].rows if history else 0,
        notes=history.notes,
    )


def stop_text(reason: str) -> str:
    """Return why a fit stopped, for people."""
    return STOP_REASONS[reason]


def gap_text(gap: float | None) -> str:
    """Return an estimated gap for people."""
    if gap is None or not np.isfinite(gap):
        return "not known"
    return f"{gap:.2g} nats per row below its final value"
