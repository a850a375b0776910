"""A fitted mixture for people: its components, and how its fit ended, in a terminal and in a notebook."""

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

MOST_COMPONENTS = 40
"""Maximum components of a table; it says what is left out."""
MOST_CHARACTERS, BETWEEN = 56, 3
"""Maximum width of all features, so that a line of 80 has room for the rest; characters between columns."""
DIGITS = 2
"""Of the median deviation of a feature, which all its means are shown to."""
MOST_DECIMALS, LARGEST = 6, 1e7
"""Maximum decimals and magnitude of numbers without an exponent."""
NOISE = 1e-12
"""A mean this many times smaller than its feature's other means and deviations is what rounding left of 0."""
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
    """What `GaussianMixture.summary` returns; shown as a table.

    Attributes
    ----------
    components : tuple of ComponentSummary
    covariance_type : str
    feature_names : tuple of str or None
    converged : bool
    stop_reason : {"tol", "no-active-rows", "max-iter"}
    n_iter : int
    lower_bound, gap : float
        Nats per row; see `GaussianMixture`. The gap is NaN where it is not known.
    work : float
        Passes over the data that the scored rows amount to.
    rows : int
        Rows of weight above 0 that were fitted; 0 where the fit had no iteration.
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
        shown = shown_components(self)
        rows = [("#", *shown.headings), *((str(number), *texts) for number, texts in shown.texts.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([*self._sentences(shown), "", *lines, *filter(None, [shown.left_out])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = shown_components(self)
        caption = "; ".join([*self._sentences(shown), *filter(None, [shown.left_out])])
        rows = ((str(number), *texts) for number, texts in shown.texts.items())
        return html_table(caption, ("#", *shown.headings), rows)

    def _sentences(self, shown: ShownComponents) -> list[str]:
        named = [
            shown.title,
            f"{stop_text(self.stop_reason)}; {self.n_iter:,} iterations",
            f"work: {self.work:.4g} passes over {self.rows:,} rows",
            f"lower bound: {self.lower_bound:.9g} nats per row",
            f"estimated gap: {gap_text(self.gap)}",
        ]
        return [*named, *(f"note: {one_line(note)}" for note in self.notes)]


@dataclass(frozen=True)
class ShownComponents:
    """The components of a fit as texts, for a table of any kind.

    Attributes
    ----------
    title : str
    headings : tuple of str
        "weight", and the names of features.
    texts : mapping of int to tuple of str
        Under the number of a component, what stands below the headings: its weight, and for each feature
        "mean ± standard deviation". Of more than 40 components the heaviest are there, in descending order.
    left_out : str or None
        What is not shown, and how the rest was chosen.
    """

    title: str
    headings: tuple[str, ...]
    texts: Mapping[int, tuple[str, ...]]
    left_out: str | None


def shown_components(summary: FitSummary) -> ShownComponents:
    """Return the components of a summary as texts; means that are rounding noise are 0.

    Where not all features fit on a line of 80, those are shown that separate the components best.
    """
    components = summary.components
    weights = np.array([component.weight for component in components])
    deviations = np.array([component.standard_deviations for component in components])
    means = np.array([component.mean for component in components])
    scale = np.maximum(np.abs(means), deviations).max(axis=0)
    means = np.where(np.abs(means) < NOISE * scale, 0.0, means)
    k, features = means.shape
    numbers = range(k) if k <= MOST_COMPONENTS else np.argsort(-weights, kind="stable")[:MOST_COMPONENTS]
    names = [one_line(name) for name in summary.feature_names or (f"feature {j}" for j in range(features))]
    columns = [_mean_texts(means[:, j], deviations[:, j]) for j in range(features)]
    between = share_between_components(weights, means, deviations**2)
    shown = _that_fit(
        [max(map(len, [name, *column])) for name, column in zip(names, columns, strict=True)], between
    )
    left_out = []
    if k > MOST_COMPONENTS:
        left_out.append(f"the {MOST_COMPONENTS} heaviest of {k} components")
    if len(shown) < features:
        left_out.append(f"the {len(shown)} of {features} features that separate the components best")
    return ShownComponents(
        f"{k} components, {summary.covariance_type} covariance, {features} features",
        ("weight", *(names[j] for j in shown)),
        {int(i): (f"{weights[i]:.4f}", *(columns[j][i] for j in shown)) for i in numbers},
        "; ".join(left_out) or None,
    )


def _that_fit(widths: Sequence[int], between: NDArray[np.float64]) -> Sequence[int]:
    """Return the features whose columns fit on a line: all, or of those that separate components best."""
    if sum(widths) + BETWEEN * len(widths) <= MOST_CHARACTERS:
        return range(len(widths))
    best = [int(j) for j in np.argsort(-between, kind="stable")]
    ends = accumulate(widths[j] + BETWEEN for j in best)
    return sorted(best[: max(1, sum(end <= MOST_CHARACTERS for end in ends))])


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
    """Return "mean ± deviation" of a feature in each component, to the same decimals where that is short."""
    typical, largest = float(np.median(deviations)), float(np.abs(means).max() + deviations.max())
    decimals = DIGITS - 1 - math.floor(math.log10(typical)) if typical > 0 else 0
    if decimals > MOST_DECIMALS or not largest < LARGEST:
        return [f"{mean:.4g} ± {deviation:.2g}" for mean, deviation in zip(means, deviations, strict=True)]
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
    return f"{gap:.2g} nats per row to where it would end"
