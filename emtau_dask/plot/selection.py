"""Criteria against the number of components, as curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from emtau_dask.errors import InvalidDataError, short
from emtau_dask.plot.drawing import (
    INK,
    LINES,
    MARKERS,
    PALETTE,
    dress,
    figure_of,
    legend,
    plain,
    single_axes,
    with_grid,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Candidate(Protocol):
    """A mixture that was tried; unknown criteria are None or NaN."""

    @property
    def n_components(self) -> int:
        """Components K."""

    @property
    def covariance_type(self) -> str:
        """The covariance type."""


class Selection(Protocol):
    """A selection: the mixtures that were tried."""

    @property
    def table_(self) -> Sequence[Candidate]:
        """One record for each."""


@dataclass(frozen=True)
class Criterion:
    """A column of a selection's table: the label of its axis, and whether higher is better."""

    label: str
    higher: bool


CRITERIA = {
    "bic": Criterion("BIC (lower is better)", higher=False),
    "aic": Criterion("AIC (lower is better)", higher=False),
    "icl": Criterion("ICL (lower is better)", higher=False),
    "held_out": Criterion("held-out log-likelihood per row (higher is better)", higher=True),
}


class SelectionDisplay:
    """A criterion against the number of components, with a line for each covariance type.

    Parameters
    ----------
    table : sequence of Candidate
        Mixtures that were tried.
    criterion : {"bic", "aic", "icl", "held_out"}
        ``"held-out"`` is the same as ``"held_out"``.

    Attributes
    ----------
    chosen_ : Candidate
        The best by the criterion, which is marked.
    lines_ : dict of str to matplotlib Line2D
        By covariance type.
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure
    """

    def __init__(self, table: Sequence[Candidate], criterion: str) -> None:
        criterion = criterion.replace("-", "_")
        if criterion not in CRITERIA:
            raise InvalidDataError(
                f"criterion is {short(criterion)}; it must be one of {', '.join(CRITERIA)}."
            )
        self.criterion = criterion
        self.known = [
            (candidate, value) for candidate in table if math.isfinite(value := _value(candidate, criterion))
        ]
        if not self.known:
            raise InvalidDataError(
                f"No mixture of the selection has a value of {criterion}; choose another criterion: "
                f"{', '.join(CRITERIA)}."
            )
        sign = -1.0 if CRITERIA[criterion].higher else 1.0
        self.chosen_ = min(self.known, key=lambda each: sign * each[1])[0]

    @classmethod
    def from_selection(
        cls, selection: Selection, criterion: str | None = None, *, ax: Axes | None = None
    ) -> Self:
        """Draw the result of a selection, such as that of ``select_components``.

        Parameters
        ----------
        selection : Selection
            Its ``table_`` has a record for each mixture that was tried, with ``n_components``,
            ``covariance_type`` and the criteria.
        criterion : {"bic", "aic", "icl", "held_out"}, optional
            By default the selection's own (``criterion``) if it has one, else ``"bic"``.
        ax : matplotlib Axes, optional
            By default a new figure is made.

        Raises
        ------
        InvalidDataError
            There is no such criterion, or no record has a value of it.
        MissingPackageError
            matplotlib is not installed.
        """
        own = getattr(selection, "criterion", None)
        default = own if isinstance(own, str) and own.replace("-", "_") in CRITERIA else "bic"
        return cls(selection.table_, criterion or default).plot(ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the curves; ``ax`` as for `from_selection`."""
        from matplotlib.ticker import MaxNLocator

        ax = single_axes(ax, (5.4, 3.8))
        criterion = CRITERIA[self.criterion]
        dress(ax, "Number of components", ("components", criterion.label))
        self.lines_ = {}
        by_type: dict[str, list[tuple[int, float]]] = {}
        for candidate, value in self.known:
            by_type.setdefault(candidate.covariance_type, []).append((candidate.n_components, value))
        for number, (name, points) in enumerate(sorted(by_type.items(), key=str)):
            best = min if not criterion.higher else max
            curve = {k: best(value for other, value in points if other == k) for k, _ in points}
            (self.lines_[name],) = ax.plot(
                sorted(curve),
                [curve[k] for k in sorted(curve)],
                color=PALETTE[number % len(PALETTE)],
                linestyle=LINES[number % len(LINES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4.5,
                linewidth=1.5,
                label=plain(name, 24),
            )
        chosen, value = next(each for each in self.known if each[0] is self.chosen_)
        ax.plot(
            [chosen.n_components],
            [value],
            marker="o",
            markersize=13,
            markerfacecolor="none",
            markeredgecolor=INK,
            markeredgewidth=1.5,
            linestyle="none",
            label=f"best: {chosen.n_components}, {plain(chosen.covariance_type, 24)}",
        )
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        with_grid(ax)
        legend(ax, loc="best")
        self.ax_ = ax
        self.figure_ = figure_of(ax)
        return self


def _value(candidate: Any, criterion: str) -> float:
    value = getattr(candidate, criterion, None)
    return math.nan if value is None else float(value)
