"""Components in every pair of some features, and the densities of each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from emtau_dask.estimator.findings import share_between_components, shown_features
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.plot.components import ComponentsDisplay, labels_of, seen_in
from emtau_dask.plot.drawing import (
    MAX_ROWS,
    Plane,
    dress,
    figure_of,
    legend,
    names_of,
    numbers_of,
    plane_of_features,
    rows_to_show,
    several_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DEFAULT_FEATURES, MAX_FEATURES = 5, 10
INCHES = 1.9
"""Width and height of one panel."""
TITLE = "Components in pairs of features"


class PairsDisplay:
    """A mixture in every pair of some features, as a triangle of panels.

    On the diagonal the density of the data and of the mixture in one feature; below it the components as
    ellipses over the rows, as `ComponentsDisplay` draws them.

    Parameters
    ----------
    panels : mapping of (int, int) to ComponentsDisplay
        By row and column, for each row and each column up to it.
    labels : sequence of str
        Of the m features.
    choice : str
        Which features these are, if not all; begins the caption.

    Attributes
    ----------
    axes_ : ndarray of shape (m, m) of matplotlib Axes
        Those above the diagonal are switched off.
    figure_ : matplotlib Figure
    """

    def __init__(
        self,
        panels: dict[tuple[int, int], ComponentsDisplay],
        labels: tuple[str, ...],
        choice: str = "",
    ) -> None:
        self.panels = panels
        self.labels = labels
        self.choice = choice

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
        """Draw a fitted mixture over data of any size, in every pair of some features.

        Parameters
        ----------
        estimator, X, max_rows, sample_weight, columns, random_state
            As for `ComponentsDisplay.from_estimator`, which raises the same errors.
        features : int, str, or a sequence of at most 10 of these, optional
            By default all of up to five features, else the five that separate components best: those with the
            largest share of their variance between components. The picture says so.
        ax : matplotlib Axes or array of m x m of them, optional
            Single axes are divided. By default a new figure is made.

        Returns
        -------
        PairsDisplay
        """
        drawn = rows_to_show(estimator, X, max_rows, random_state, sample_weight, columns)
        parameters = estimator.parameters_
        labels_of_rows, choice = labels_of(drawn, parameters), ""
        if features is None:
            variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
            between = share_between_components(parameters.weights, parameters.means, variances)
            numbers = sorted(map(int, np.argsort(-between, kind="stable")[:DEFAULT_FEATURES]))
            if (d := parameters.n_features) > DEFAULT_FEATURES:
                choice = f"{shown_features(DEFAULT_FEATURES, d, parameters.n_components)}; "
        else:
            numbers = numbers_of(estimator, features, MAX_FEATURES)
        space = plane_of_features(names_of(estimator), numbers)
        weights, means, covariances = seen_in(space, parameters)
        drawn, m = replace(drawn, rows=space.points(drawn.rows)), len(numbers)
        panels = {}
        for row in range(m):
            for column in range(row + 1):
                some = [row] if row == column else [column, row]
                plane = Plane(np.zeros(m), np.eye(m)[:, some], tuple(space.labels[i] for i in some))
                inside = covariances[:, some][:, :, some]
                panels[row, column] = ComponentsDisplay(
                    drawn, plane, weights, means[:, some], inside, labels_of_rows
                )
        return cls(panels, space.labels, choice).plot(ax)

    def plot(self, ax: Any = None) -> Self:
        """Draw the panels; ``ax`` as for `from_estimator`."""
        m = len(self.labels)
        size = INCHES * m + 0.9
        grid = several_axes(ax, m * m, m, (size, size))
        for i, each in enumerate(grid):
            row, column = divmod(i, m)
            if column > row:
                each.set_axis_off()
                continue
            self.panels[row, column].draw(each)
            self._dress(each, row, column)
        self.axes_ = np.array(grid, dtype=object).reshape(m, m)
        self.figure_ = figure_of(grid[0])
        lines = self.panels[0, 0].legend_lines
        if m > 1:
            lines += self.panels[1, 0].legend_lines
        legend(grid[m - 1], handles=lines, loc="upper right")
        return self

    def _dress(self, ax: Axes, row: int, column: int) -> None:
        """Give a panel its look, with labels at the left and at the bottom of the triangle only."""
        first, last, on_diagonal = column == 0 and row > 0, row == len(self.labels) - 1, row == column
        texts = (TITLE, self.choice + self.panels[0, 0].description) if row == 0 else ("", "")
        labels = self.labels[column] if last else "", self.labels[row] if first else ""
        dress(ax, texts[0], labels, texts[1])
        ax.tick_params(labelsize=7.5, length=2, labelbottom=last, labelleft=first)
        if on_diagonal:
            ax.set_yticks([])
