"""The uncertainty of labels: largest responsibilities, by component and by place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.predict import RESPONSIBILITIES
from emtau_dask.estimator.findings import CERTAIN
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.row_sample import DrawnRows
from emtau_dask.estimator.summary import share_text
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.linalg import Floats
from emtau_dask.plot.drawing import (
    FAINT,
    FEW_ROWS,
    INK,
    MAX_ROWS,
    Plane,
    cells_of,
    colours,
    counted,
    dress,
    figure_of,
    legend,
    look_of,
    number,
    plane_of,
    rows_to_show,
    several_axes,
    with_grid,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LEVELS = (0.5, 0.7, CERTAIN)
"""Largest responsibilities that part uncertain rows by how uncertain they are, and from certain ones."""
TINTS = (1.0, 0.6, 0.3)
MAX_COMPONENTS = 40
"""Maximum components that are drawn; those that label the most rows are taken."""
UNCERTAINTY_COLOURS = "YlOrBr"
TITLE, UNCERTAINTY = "Where rows are between components", "1 − largest responsibility"


class UncertaintyDisplay:
    """The uncertainty of the labels of a sample of the rows.

    Left: for each component, the share of its rows whose largest responsibility is below 0.9, in three parts:
    below 0.5, below 0.7, and the rest. Right: the mean of one minus the largest responsibility, in each cell
    of the plane; left out if all rows are certain.

    Parameters
    ----------
    drawn : DrawnRows
        The rows to show.
    plane : Plane
        The plane of the right picture.
    responsibilities : ndarray of shape (m, K)

    Attributes
    ----------
    labels : ndarray of shape (m,), intp
        The most probable component of each row.
    largest : ndarray of shape (m,), float64
        Its responsibility.
    sure_ : float
        The weighted share of rows whose largest responsibility is at least 0.9.
    shown : ndarray of int
        The components that are drawn, in the order of the left picture's lines.
    histogram_ : ndarray of shape (shown, 4)
        For each component, the shares of its rows between the edges; 0 if it labels none.
    edges_ : ndarray of shape (5,)
        Largest responsibilities: 0, 0.5, 0.7, 0.9 and 1.
    panels : tuple of str
        "certainty", and "place" if some rows are not certain.
    axes_ : ndarray of matplotlib Axes
        One for each panel.
    figure_ : matplotlib Figure
    """

    def __init__(self, drawn: DrawnRows, plane: Plane, responsibilities: Floats) -> None:
        self.drawn = drawn
        self.plane = plane
        k = responsibilities.shape[1]
        self.labels: NDArray[np.intp] = responsibilities.argmax(axis=1)
        self.largest: Floats = responsibilities.max(axis=1)
        self.sure_ = float(drawn.weights @ (self.largest >= CERTAIN) / drawn.weights.sum())
        self.panels = ("certainty", "place") if (self.largest < CERTAIN).any() else ("certainty",)
        counts = np.bincount(self.labels, weights=drawn.weights, minlength=k)
        self.shown = np.sort(np.argsort(-counts, kind="stable")[:MAX_COMPONENTS])
        self.edges_: Floats = np.array([0.0, *LEVELS, 1.0])
        parts = np.searchsorted(LEVELS, self.largest, side="right")
        joint = np.zeros((k, len(LEVELS) + 1))
        np.add.at(joint, (self.labels, parts), drawn.weights)
        totals = counts[:, np.newaxis]
        self.histogram_: Floats = np.divide(joint, totals, out=np.zeros_like(joint), where=totals > 0)
        self.histogram_ = self.histogram_[self.shown]

    @classmethod
    def from_estimator(
        cls,
        estimator: GaussianMixture,
        X: Any,
        *,
        features: Any = None,
        max_rows: int = MAX_ROWS,
        sample_weight: Any = None,
        columns: Any = None,
        random_state: Any = 0,
        ax: Any = None,
    ) -> Self:
        """Draw the uncertainty of a fitted mixture on data of any size.

        Parameters
        ----------
        estimator, X, features, max_rows, sample_weight, columns, random_state
            As for `ComponentsDisplay.from_estimator`, which raises the same errors.
        ax : matplotlib Axes or array of 2 of them, optional
            Single axes are divided, and axes that nothing is drawn on are switched off. By default a new
            figure is made.

        Returns
        -------
        UncertaintyDisplay
        """
        drawn = rows_to_show(estimator, X, max_rows, random_state, sample_weight, columns)
        plane = plane_of(estimator, features)
        kernels = scoring_kernels(estimator.parameters_, compiled=False)
        return cls(drawn, plane, RESPONSIBILITIES(drawn.rows, kernels)).plot(ax)

    def plot(self, ax: Any = None) -> Self:
        """Draw the panels; ``ax`` as for `from_estimator`."""
        count = len(self.panels)
        axes = several_axes(ax, count, count, (4.7 * count, 4.2))
        self._by_component(axes[0])
        if count > 1:
            draw = self._on_a_line if self.plane.flat else self._in_a_plane
            draw(axes[1])
        else:
            look: dict[str, Any] = {"color": FAINT, "fontsize": 9, "ha": "center", "va": "center"}
            said = f"every row shown is at least {CERTAIN:.0%} certain"
            axes[0].text(0.5, 0.5, said, transform=axes[0].transAxes, **look)
        self.axes_ = np.array(axes, dtype=object)
        self.figure_ = figure_of(axes[0])
        return self

    def _by_component(self, ax: Axes) -> None:
        """Draw a bar for each component, of its uncertain rows, the least certain first."""
        from matplotlib.patches import Patch

        k = len(self.shown)
        places, left = np.arange(k), np.zeros(k)
        colours = [look_of(int(each))[0] for each in self.shown]
        handles = []
        for shares, tint, low, high in zip(self.histogram_.T, TINTS, self.edges_, LEVELS, strict=False):
            ax.barh(places, shares, 0.7, left, color=colours, alpha=tint)
            left += shares
            text = f"{low} to {high}" if low else f"under {high}"
            handles.append(Patch(color=INK, alpha=tint, linewidth=0, label=text))
        labels = ("share of the component's rows", "component")
        dress(ax, "Uncertain rows of each component", labels, counted(self.drawn))
        with_grid(ax, "x")
        ax.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        ax.set_xlim(0, 1.02 * max(left.max(), 0.01))
        ax.locator_params(axis="x", nbins=5)
        ax.set_ylim(k - 0.4, -0.6 - 0.2 * k)
        some = places[:: -(-k // 25)]
        ax.set_yticks(some, map(str, self.shown[some]))
        right = ax.secondary_yaxis("right")
        certain = np.where(self.histogram_.any(axis=1), self.histogram_[:, -1], np.nan)
        right.set_yticks(some, [f"{share_text(share)} certain" for share in certain[some]])
        right.tick_params(labelsize=8, length=0)
        right.spines["right"].set_visible(False)
        look: dict[str, Any] = {"ncols": 3, "handlelength": 1.0, "columnspacing": 1.2, "loc": "upper left"}
        legend(ax, handles=handles, title="largest responsibility (certain: 0.9 or more)", **look)

    def _in_a_plane(self, ax: Axes) -> None:
        points, uncertainty = self.plane.points(self.drawn.rows), 1 - self.largest
        look: dict[str, Any] = {"cmap": colours(UNCERTAINTY_COLOURS), "vmin": 0, "rasterized": True}
        dress(ax, TITLE, self.plane.labels, counted(self.drawn))
        if len(points) <= FEW_ROWS:
            order = np.argsort(uncertainty)
            look |= {"linewidths": 0.5, "edgecolors": FAINT, "s": 14, "c": uncertainty[order]}
            image: Any = ax.scatter(points[order, 0], points[order, 1], **look)
        else:
            bins, weights = [cells_of(len(points))] * 2, self.drawn.weights
            total, edges = np.histogramdd(points, bins, weights=weights)
            uncertain, _ = np.histogramdd(points, edges, weights=weights * uncertainty)
            mean = np.ma.masked_where(total == 0, uncertain / np.where(total == 0, 1.0, total))
            image = ax.pcolormesh(edges[0], edges[1], mean.T, **look)
        _bar(ax, image, UNCERTAINTY)
        own = [int(k) for k in self.shown if (self.labels == k).any()]
        number(ax, own, np.reshape([points[self.labels == k].mean(axis=0) for k in own], (-1, 2)))

    def _on_a_line(self, ax: Axes) -> None:
        points, uncertainty = self.plane.points(self.drawn.rows)[:, 0], 1 - self.largest
        labels = [*map(int, np.unique(self.labels))]
        for k in labels:
            own, (colour, _, marker) = self.labels == k, look_of(k)
            look: dict[str, Any] = {"color": colour, "marker": marker, "s": 6, "linewidths": 0}
            ax.scatter(points[own], uncertainty[own], alpha=0.4, rasterized=True, **look)
        dress(ax, TITLE, (self.plane.labels[0], UNCERTAINTY), counted(self.drawn))
        ax.set_ylim(bottom=0)
        number(ax, labels, np.array([(points[self.labels == k].mean(), 0.0) for k in labels]))
        with_grid(ax)


def _bar(ax: Axes, image: Any, label: str, **options: Any) -> None:
    figure = ax.get_figure()
    assert figure is not None
    bar = figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02, aspect=25, **options)
    bar.set_label(label, fontsize=8.5)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2, color=FAINT)
