"""A fitted mixture for people: its components, and how its fit ended, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.messages import html_table
from emtau_dask.mixture.numerics import read_only_copy

MOST_COMPONENTS = 40
MOST_VALUES = 3
"""Of a mean: with more features their least, middle and largest value are shown."""
ROUNDING = 1e-12
"""A mean that is nearer to 0 than this many standard deviations is shown as 0."""
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

    def __str__(self) -> str:
        headings, cells = self._table()
        columns = list(zip(headings, *cells, strict=True))
        widths = [max(map(len, column)) for column in columns]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in (headings, *cells)]
        return "\n".join([*self._sentences(), "", *lines, *self._left_out()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table("; ".join([*self._sentences(), *self._left_out()]), *self._table())

    def _sentences(self) -> list[str]:
        features = len(self.components[0].mean)
        named = [
            f"{len(self.components)} components, {self.covariance_type} covariance, {features} features",
            f"{STOP_REASONS.get(self.stop_reason, self.stop_reason)}; {self.n_iter:,} iterations",
            f"work: {self.work:.4g} passes over {self.rows:,} rows",
            f"lower bound: {self.lower_bound:.9g} nats per row",
            f"estimated gap: {gap_text(self.gap)}",
        ]
        if self.feature_names is not None and features <= MOST_VALUES:
            named.append(f"features: {', '.join(self.feature_names)}")
        return named

    def _table(self) -> tuple[list[str], list[list[str]]]:
        few = len(self.components[0].mean) <= MOST_VALUES
        suffix = "" if few else " (min / median / max)"
        cells = []
        for number in self._heaviest():
            component = self.components[number]
            negligible = np.abs(component.mean) < ROUNDING * component.standard_deviations
            mean = np.where(negligible, 0.0, component.mean)
            texts = (_text(mean, few), _text(component.standard_deviations, few))
            cells.append([str(number), f"{component.weight:.4f}", *texts])
        return ["#", "weight", f"mean{suffix}", f"deviation{suffix}"], cells

    def _heaviest(self) -> Sequence[int]:
        """Return the numbers of all components, or of more than 40 the heaviest in descending order."""
        weights = [component.weight for component in self.components]
        if len(weights) <= MOST_COMPONENTS:
            return range(len(weights))
        return [int(number) for number in np.argsort(np.negative(weights), kind="stable")[:MOST_COMPONENTS]]

    def _left_out(self) -> list[str]:
        rest = len(self.components) - MOST_COMPONENTS
        return [f"the {MOST_COMPONENTS} heaviest; {rest} more"] if rest > 0 else []


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
    )


def gap_text(gap: float | None) -> str:
    """Return an estimated gap for people."""
    if gap is None or not np.isfinite(gap):
        return "not known"
    return f"{gap:.2g} nats per row to where it would end"


def _text(values: NDArray[np.float64], few: bool) -> str:
    if few:
        return ", ".join(f"{value:.4g}" for value in values)
    return f"{values.min():.3g} / {np.median(values):.3g} / {values.max():.3g}"
