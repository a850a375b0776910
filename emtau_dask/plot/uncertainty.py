"""The uncertainty of labels: largest responsibilities, by component and by place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.predict import RESPONSIBILITIES
from emtau_dask.estimator.findings import CERTAIN
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.row_sample import DrawnRows
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.linalg import Floats
from emtau_dask.plot.drawing import (
    FAINT,
    FEW_ROWS,
    INK,
    MAX_ROWS,
    PALETTE,
    Plane,
    cells_of,
    colours,
    counted,
    dress,
    figure_of,
    plane_of,
    rows_to_show,
    several_axes,
    with_grid,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BINS = 20

MAX_COMPONENTS = 40
"""Maximum components that are drawn; those that label the most rows are taken."""
COLOURS, UNCERTAINTY_COLOURS = "Blues", "YlOrBr"
TITLE, UNCERTAINTY = "Where rows are between components", "1 − largest responsibility"


class UncertaintyDisplay:
    """The uncertainty of the labels of a sample of the rows.

    Left: for each component, the distribution of the largest responsibility of its rows. Right: the mean of
    one minus the largest responsibility, in each cell of the plane.

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
    histogram_ : ndarray of shape (shown, bins)
        For each component, the share of its rows in each bin; 0 if it labels none.
    edges_ : ndarray of shape (bins + 1,)
        From 1/K to 1.
    axes_ : ndarray of 2 matplotlib Axes
    figure_ : matplotlib Figure
    """

    def __init__(self, drawn: DrawnRows, plane: Plane, responsibilities: Floats) -> None:
        self.drawn = drawn
        self.plane = plane
        k = responsibilities.shape[1]
        self.labels: NDArray[np.intp] = responsibilities.argmax(axis=1)
        self.largest: Floats = responsibilities.max(axis=1)
        self.sure_ = float(drawn.weights @ (self.largest >= CERTAIN) / drawn.weights.sum())
        counts = np.bincount(self.labels, weights=drawn.weights, minlength=k)
        self.shown = np.sort(np.argsort(-counts, kind="stable")[:MAX_COMPONENTS])
        self.edges_: Floats = np.linspace(1 / k, 1.0, BINS + 1) if k > 1 else np.linspace(0.0, 1.0, BINS + 1)
        cells = np.clip(np.searchsorted(self.edges_, self.largest, side="right") - 1, 0, BINS - 1)
        joint = np.zeros((k, BINS))
        np.add.at(joint, (self.labels, cells), drawn.weights)
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
            Single axes are divided into two. By default a new figure is made.

        Returns
        -------
        UncertaintyDisplay
        """
        drawn = rows_to_show(estimator, X, max_rows, random_state, sample_weight, columns)
        plane = plane_of(estimator, drawn, features)
        kernels = scoring_kernels(estimator.parameters_, compiled=False)
        return cls(drawn, plane, RESPONSIBILITIES(drawn.rows, kernels)).plot(ax)

    def plot(self, ax: Any = None) -> Self:
        """Draw both pictures; ``ax`` as for `from_estimator`."""
        left, right = axes = several_axes(ax, 1, 2, (9.4, 4.2))
        self._by_component(left)
        draw = self._on_a_line if self.plane.flat else self._in_a_plane
        draw(right)
        self.axes_ = np.array(axes, dtype=object)
        self.figure_ = figure_of(left)
        return self

    def _by_component(self, ax: Axes) -> None:
        from matplotlib.colors import LogNorm

        lines = np.arange(len(self.shown) + 1) - 0.5
        shares = np.ma.masked_equal(100 * self.histogram_, 0.0)
        norm = LogNorm(vmin=0.1, vmax=100, clip=True)
        look: dict[str, Any] = {"cmap": colours(COLOURS), "norm": norm, "rasterized": True}
        image = ax.pcolormesh(self.edges_, lines, shares, **look)
        below = f"{self.sure_:.1%} of the rows are at {CERTAIN} or above"
        dress(ax, "How sure rows are of their component", ("largest responsibility", "component"), below)
        every = max(1, len(self.shown) // 20)
        ax.set_yticks(range(0, len(self.shown), every), [str(k) for k in self.shown[::every]])
        ax.set_ylim(len(self.shown) - 0.5, -0.5)
        for line in lines[1:-1]:
            ax.axhline(line, color="white", linewidth=1.0)
        _bar(ax, image, "% of the component's rows", format=lambda value, _: f"{value:g}")

    def _in_a_plane(self, ax: Axes) -> None:
        points, uncertainty = self.plane.points(self.drawn.rows), 1 - self.largest
        look: dict[str, Any] = {"cmap": colours(UNCERTAINTY_COLOURS), "vmin": 0, "vmax": 1 - self.edges_[0]}
        look["rasterized"] = True
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

    def _on_a_line(self, ax: Axes) -> None:
        points, uncertainty = self.plane.points(self.drawn.rows)[:, 0], 1 - self.largest
        ax.scatter(points, uncertainty, s=6, color=PALETTE[1], alpha=0.4, linewidths=0, rasterized=True)
        dress(ax, TITLE, (self.plane.labels[0], UNCERTAINTY), counted(self.drawn))
        ax.set_ylim(bottom=0)
        with_grid(ax)


def _bar(ax: Axes, image: Any, label: str, **options: Any) -> None:
    figure = ax.get_figure()
    assert figure is not None
    bar = figure.colorbar(image, ax=ax, fraction=0.05, pad=0.02, aspect=25, **options)
    bar.set_label(label, fontsize=8.5, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2, color=FAINT, labelcolor=INK)
