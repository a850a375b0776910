"""Components over the density of the data: as ellipses in a plane, or as curves over one feature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.predict import LABELS
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.row_sample import DrawnRows
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.plot.drawing import (
    DENSITY,
    FEW_ROWS,
    INK,
    MAX_ROWS,
    Plane,
    cells_of,
    counted,
    dress,
    figure_of,
    legend,
    look_of,
    number,
    plane_of,
    rows_to_show,
    single_axes,
    with_grid,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DEVIATIONS, WIDTHS = (1.0, 2.0), (2.0, 1.3)
MAX_COMPONENTS, MAX_NUMBERS = 60, 40
"""Maximum components that are drawn, and that have a number; the heaviest are chosen."""
CURVE_POINTS = 400
MAX_NAMED = 8
"""Maximum curves that a legend names."""
BAR = "#cfcfcf"
TITLE = "Components over the data"


class ComponentsDisplay:
    """The components of a mixture over the density of a sample of the data.

    In a plane each component is drawn as two ellipses, of 1 and 2 standard deviations; they contain 39 % and
    86 % of a normal distribution. On one feature it is drawn as a curve, its share of the density. Up to
    1,000 rows are drawn as points in the colour of their component.

    Parameters
    ----------
    drawn : DrawnRows
        The rows to show.
    plane : Plane
        The plane, or line, of the picture.
    weights : ndarray of shape (K,)
    means : ndarray of shape (K, m)
        In the plane; m is 1 or 2.
    covariances : ndarray of shape (K, m, m)
        In the plane.
    labels : ndarray of shape (n,), intp
        The most probable component of each drawn row.

    Attributes
    ----------
    shown : ndarray of int
        The components that are drawn: all, or the 60 heaviest.
    ax_ : matplotlib Axes
    figure_ : matplotlib Figure
    ellipses_ : list of matplotlib Ellipse
        Two for each drawn component, of 1 and 2 standard deviations. Empty on one feature.
    curves_ : list of matplotlib Line2D
        One for each component, and one for the mixture at the end. Empty in a plane.
    density_ : ndarray
        The histogram's density, whose integral is 1; of shape (bins, bins), or (bins,) on one feature.
        None if rows are drawn as points.
    edges_ : tuple of ndarray
        The edges of its bins, for each axis.
    """

    def __init__(
        self,
        drawn: DrawnRows,
        plane: Plane,
        weights: Floats,
        means: Floats,
        covariances: Floats,
        labels: NDArray[np.intp],
    ) -> None:
        self.drawn = drawn
        self.plane = plane
        self.weights = weights
        self.means = means
        self.covariances = covariances
        self.labels = labels
        self.shown = np.sort(np.argsort(-weights, kind="stable")[:MAX_COMPONENTS])

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
        ax: Axes | None = None,
    ) -> Self:
        """Draw the components of a fitted mixture over data of any size.

        Parameters
        ----------
        estimator : GaussianMixture
            Fitted.
        X, sample_weight, columns
            As for `GaussianMixture.fit`; by default the columns of the fit. Rows are drawn at random, and
            each chunk is read at most once.
        features : int, str, or a sequence of one or two of these, optional
            By default all of one or two features, else the plane in which the components differ most: the
            first two linear discriminants of the mixture, in standard deviations within components. Two
            components have one discriminant, and one has none; a principal axis of the covariance within
            components takes the place of each that is missing. The label of an axis has its two largest
            loadings, for features in these standard deviations and a direction of length 1.
        max_rows : int, default=20_000
            Maximum rows that are shown; the picture says how many. With more than 419 features there are
            fewer, so that they take at most 64 MiB.
        random_state : int, RandomState, Generator or None, default=0
        ax : matplotlib Axes, optional
            By default a new figure is made.

        Returns
        -------
        ComponentsDisplay

        Raises
        ------
        InvalidDataError
            The data cannot be used, or there are no such features.
        MissingPackageError
            matplotlib is not installed.
        """
        drawn = rows_to_show(estimator, X, max_rows, random_state, sample_weight, columns)
        plane, parameters = plane_of(estimator, features), estimator.parameters_
        return cls(drawn, plane, *seen_in(plane, parameters), labels_of(drawn, parameters)).plot(ax)

    def plot(self, ax: Axes | None = None) -> Self:
        """Draw the picture; ``ax`` as for `from_estimator`."""
        ax = single_axes(ax, (5.4, 4.6))
        dress(ax, TITLE, (*self.plane.labels, "density")[:2], self.description)
        self.draw(ax)
        legend(ax, handles=self.legend_lines, loc="best")
        if self.plane.flat:
            with_grid(ax, "y")
        return self

    def draw(self, ax: Axes) -> None:
        """Draw components and rows alone, without texts, for a picture of several."""
        self.ellipses_: list[Any] = []
        self.curves_: list[Any] = []
        self.density_: Floats | None = None
        self.edges_: tuple[Floats, ...] = ()
        points = self.plane.points(self.drawn.rows)
        low, high = _limits(points, self.means[self.shown], self.covariances[self.shown])
        if self.plane.flat:
            self._on_a_line(ax, points[:, 0], low[0], high[0])
        else:
            self._in_a_plane(ax, points, low, high)
        ax.set_xlim(low[0], high[0])
        if not self.plane.flat and len(self.shown) <= MAX_NUMBERS:
            number(ax, [*map(int, self.shown)], self.means[self.shown])
        self.ax_ = ax
        self.figure_ = figure_of(ax)

    @property
    def description(self) -> str:
        """How many components and rows are drawn, as text."""
        k, few = len(self.weights), len(self.shown)
        which = f"{k} components" if k == few else f"the {few} heaviest of {k} components"
        return f"{which if k > 1 else '1 component'}; {counted(self.drawn)}"

    @property
    def legend_lines(self) -> list[Any]:
        """What the lines of the picture mean, for a legend."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        if not self.plane.flat:
            texts = ("1 standard deviation", "2 standard deviations")
            return [
                Line2D([], [], color=INK, linewidth=w, label=t) for w, t in zip(WIDTHS, texts, strict=True)
            ]
        some = self.curves_ if len(self.shown) <= MAX_NAMED else self.curves_[-1:]
        return [Patch(color=BAR, label="data"), *some]

    def _in_a_plane(self, ax: Axes, points: Floats, low: Floats, high: Floats) -> None:
        if len(points) <= FEW_ROWS:
            for k in np.unique(self.labels):
                own, (colour, _, marker) = points[self.labels == k], look_of(int(k))
                look: dict[str, Any] = {"color": colour, "marker": marker, "s": 11, "linewidths": 0}
                ax.scatter(own[:, 0], own[:, 1], alpha=0.6, rasterized=True, **look)
        else:
            self._density(ax, points, low, high)
        for k in self.shown:
            self._ellipses(ax, int(k))
        ax.set_ylim(low[1], high[1])

    def _density(self, ax: Axes, points: Floats, low: Floats, high: Floats) -> None:
        from matplotlib.colors import LogNorm

        bins = cells_of(len(points))
        edges = [np.linspace(low[i], high[i], bins + 1) for i in (0, 1)]
        density, _ = np.histogramdd(points, edges, weights=self.drawn.weights, density=True)
        seen = density[density > 0]
        norm = LogNorm(vmin=seen.min() * 0.4, vmax=seen.max() * 12)
        image = np.ma.masked_equal(density.T, 0.0)
        ax.pcolormesh(edges[0], edges[1], image, norm=norm, cmap=DENSITY, rasterized=True, zorder=0)
        self.density_, self.edges_ = density, tuple(edges)

    def _ellipses(self, ax: Axes, k: int) -> None:
        from matplotlib.patches import Ellipse

        colour, style, _ = look_of(k)
        variances, vectors = np.linalg.eigh(self.covariances[k])
        angle = float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])))
        for deviations, width in zip(DEVIATIONS, WIDTHS, strict=True):
            height, length = 2 * deviations * np.sqrt(np.maximum(variances, 0.0))
            shape = {"xy": tuple(self.means[k]), "width": length, "height": height, "angle": angle}
            look: dict[str, Any] = {"edgecolor": colour, "linestyle": style, "linewidth": width}
            ellipse = Ellipse(**shape, fill=False, path_effects=_halo(width), zorder=3, **look)
            ax.add_patch(ellipse)
            self.ellipses_.append(ellipse)

    def _on_a_line(self, ax: Axes, points: Floats, low: float, high: float) -> None:
        bins = int(np.clip(1.2 * np.sqrt(len(points)), 12, 100))
        edges = np.linspace(low, high, bins + 1)
        density, _ = np.histogram(points, edges, weights=self.drawn.weights, density=True)
        ax.stairs(density, edges, fill=True, color=BAR)
        x = np.linspace(low, high, CURVE_POINTS)
        deviations = np.sqrt(self.covariances[:, 0, 0])
        z = (x - self.means[:, :1]) / deviations[:, np.newaxis]
        scales = self.weights / (deviations * np.sqrt(2 * np.pi))
        curves = scales[:, np.newaxis] * np.exp(-0.5 * z**2)
        mixture = ax.plot(x, curves.sum(axis=0), color="#808080", linewidth=3.5, label="mixture")
        for k in self.shown:
            colour, style, _ = look_of(int(k))
            self.curves_ += ax.plot(x, curves[k], style, color=colour, linewidth=1.6, label=f"component {k}")
        self.curves_ += mixture
        ax.set_ylim(bottom=0)
        self.density_, self.edges_ = density, (edges,)


def labels_of(drawn: DrawnRows, parameters: MixtureParameters) -> NDArray[np.intp]:
    """Return the most probable component of each drawn row."""
    labels: NDArray[np.intp] = LABELS(drawn.rows, scoring_kernels(parameters, compiled=False))
    return labels


def seen_in(plane: Plane, parameters: MixtureParameters) -> tuple[Floats, Floats, Floats]:
    """Return the weights of components, and their means and covariances in a plane."""
    covariances = [plane.covariance(parameters, k) for k in range(parameters.n_components)]
    return np.array(parameters.weights), plane.points(parameters.means), np.array(covariances)


def _halo(width: float) -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=width + 1.6, foreground="white", alpha=0.85)]


def _limits(points: Floats, means: Floats, covariances: Floats) -> tuple[Floats, Floats]:
    """Return the corners of the picture: all points, and the ellipses unless they are far larger."""
    low, high = points.min(axis=0), points.max(axis=0)
    extent = 2.1 * np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    span = np.maximum(high - low, 0.01 * extent.max(axis=0))  # also of rows that coincide
    low = np.minimum(low, np.maximum((means - extent).min(axis=0), low - 0.5 * span))
    high = np.maximum(high, np.minimum((means + extent).max(axis=0), high + 0.5 * span))
    return low - 0.03 * span, high + 0.03 * span
