"""How a fit converged: its bound, the estimated gap, and the cost of each iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from emtau_dask.em.history import FitHistory
from emtau_dask.errors import InvalidDataError, short
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.mixture.linalg import Floats
from emtau_dask.plot.drawing import FAINT, PALETTE, dress, figure_of, legend, several_axes, with_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes


AGAINST = {"work": "work (passes over all rows)", "iteration": "iteration"}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
WIDE = 30.0
"""Minimum ratio of shares of rows for a logarithmic axis."""
_ACCEPTED, _ESTIMATE, _REFUSED = PALETTE[0], PALETTE[1], FAINT


class ConvergenceDisplay:
    """How a fit converged, in four pictures.

    The lower bound; the estimated gap, with the distance of each accepted full pass from the best one; the
    share of the rows that each iteration scored; and the bytes that it read. Use `from_estimator` or
    `from_history`.

    Parameters
    ----------
    history : FitHistory
        With at least one iteration.
    against : {"work", "iteration"}, default="work"
        The horizontal axes: the work up to an iteration, in passes over all rows, or its number.

    Attributes
    ----------
    positions : ndarray of shape (n_iter,), float64
        Positions of the iterations on the horizontal axes.
    axes_ : ndarray of 4 matplotlib Axes
        Of bound, gap, share and bytes.
    figure_ : matplotlib Figure

    Examples
    --------
    >>> import numpy as np
    >>> from emtau_dask import GaussianMixture
    >>> from emtau_dask.plot import ConvergenceDisplay
    >>> X = np.random.default_rng(0).normal(size=(500, 2))
    >>> gm = GaussianMixture(2, random_state=0).fit(X)
    >>> display = ConvergenceDisplay.from_estimator(gm)  # doctest: +SKIP
    """

    def __init__(self, history: FitHistory, *, against: str = "work") -> None:
        if against not in AGAINST:
            raise InvalidDataError(f"against is {short(against)}; it must be 'work' or 'iteration'.")
        if not len(history):
            raise InvalidDataError("The fit had no iteration (max_iter=0), so there is nothing to draw.")
        self.history = history
        self.against = against
        shares = np.array([record.active_rows / record.rows for record in history])
        numbers = np.array([float(record.iteration) for record in history])
        self.positions: Floats = np.cumsum(shares) if against == "work" else numbers

    @classmethod
    def from_estimator(cls, estimator: GaussianMixture, *, against: str = "work", ax: Any = None) -> Self:
        """Draw how a fitted mixture converged.

        Parameters
        ----------
        estimator : GaussianMixture
            Fitted.
        against : {"work", "iteration"}, default="work"
        ax : matplotlib Axes or array of 4 of them, optional
            Single axes are divided into four. By default a new figure is made.

        Returns
        -------
        ConvergenceDisplay

        Raises
        ------
        InvalidDataError
            The fit had no iteration, or an argument cannot be used.
        MissingPackageError
            matplotlib is not installed.
        """
        check_is_fitted(estimator)
        return cls.from_history(estimator.history_, against=against, ax=ax)

    @classmethod
    def from_history(cls, history: FitHistory, *, against: str = "work", ax: Any = None) -> Self:
        """Draw a history, such as ``history_`` of an estimator; see `from_estimator`."""
        return cls(history, against=against).plot(ax)

    def plot(self, ax: Any = None) -> Self:
        """Draw the pictures; ``ax`` as for `from_estimator`."""
        axes = several_axes(ax, 2, 2, (9.0, 5.6))
        self._bound(axes[0])
        self._gap(axes[1])
        self._shares(axes[2])
        self._bytes(axes[3])
        for each in axes:
            low, high = min(0.0, self.positions[0]), self.positions[-1]
            each.set_xlim(low, high + 0.03 * (high - low))
        self.axes_ = np.array(axes, dtype=object)
        self.figure_ = figure_of(axes[0])
        return self

    def _column(self, name: str) -> Floats:
        return np.array([float(getattr(record, name)) for record in self.history])

    def _bound(self, ax: Axes) -> None:
        bounds, full, accepted_column = (self._column(n) for n in ("lower_bound", "full_pass", "accepted"))
        accepted, exact = accepted_column > 0, full > 0
        for part in _rising_parts(bounds, accepted):
            ax.plot(self.positions[part], bounds[part], color="#9a9a9a", linewidth=1.2, zorder=1)
        marks: tuple[tuple[Any, str, dict[str, Any]], ...] = (
            (accepted & exact, "of all rows", {"color": _ACCEPTED, "marker": "o"}),
            (
                accepted & ~exact,
                "estimate from a sample",
                {"edgecolor": _ESTIMATE, "c": "white", "marker": "o"},
            ),
            (~accepted, "refused step", {"color": _REFUSED, "marker": "x"}),
        )
        for chosen, label, look in marks:
            if chosen.any():
                ax.scatter(self.positions[chosen], bounds[chosen], s=18, label=label, zorder=2, **look)
        low, high = _without_outliers(bounds[accepted] if accepted.any() else bounds)
        ax.set_ylim(low, high)
        if below := int((bounds < low).sum()):
            note = f"{below} {'iteration' if below == 1 else 'iterations'} lower than this"
            ax.text(0.02, 0.03, note, transform=ax.transAxes, color=FAINT, fontsize=8)
        dress(ax, "Lower bound", (AGAINST[self.against], "nats per row"))
        with_grid(ax)
        legend(ax, loc="lower right")

    def _gap(self, ax: Axes) -> None:
        bounds, gaps = self._column("lower_bound"), self._column("gap")
        exact = (self._column("full_pass") > 0) & (self._column("accepted") > 0)
        below = np.where(exact, bounds[exact].max(initial=-np.inf) - bounds, np.nan)
        lines = (
            (gaps, "estimated gap to where the fit would end", _ESTIMATE, "s", "-"),
            (below, "below the best bound of all rows", _ACCEPTED, "o", "--"),
        )
        for values, label, colour, marker, style in lines:
            look: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker, "label": label}
            for part in _rising_parts(bounds, np.isfinite(values) & (values > 0)):
                ax.plot(self.positions[part], values[part], markersize=3.5, linewidth=1.2, **look)
                look["label"] = None
        dress(ax, "Gap", (AGAINST[self.against], "nats per row"))
        with_grid(ax)
        if ax.lines:
            ax.set_yscale("log")
            low, high = ax.get_ylim()
            if high < 10 * low:  # else there might be no power of ten to label
                low, high = low / 4, high * 4
            ax.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
            ax.yaxis.set_major_formatter(lambda value, _: f"1e{np.log10(value):.0f}")
            ax.yaxis.set_minor_formatter(lambda value, _: "")
            legend(ax, loc="upper right")
        else:
            _write_text(ax, "no estimate of the gap")

    def _shares(self, ax: Axes) -> None:
        shares = 100 * self._column("active_rows") / self._column("rows")
        self._bars(ax, shares)
        if shares.max() > WIDE * shares[shares > 0].min(initial=np.inf):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        dress(ax, "Rows scored in each iteration", (AGAINST[self.against], "% of all rows"))
        with_grid(ax, "y")

    def _bytes(self, ax: Axes) -> None:
        read = self._column("bytes_read")
        unit, name = next((unit for unit in UNITS if read.max() >= unit[0]), UNITS[-1])
        self._bars(ax, read / unit)
        dress(ax, "Read in each iteration", (AGAINST[self.against], name))
        with_grid(ax, "y")
        if not read.any():
            ax.set_yticks([0])
            _write_text(ax, "nothing was read: rows were in memory")

    def _bars(self, ax: Axes, values: Floats) -> None:
        """Draw each iteration as a bar that ends where the iteration ends; many as a line of steps."""
        width = 1.0 if self.against == "iteration" else np.diff(self.positions, prepend=0.0)
        left = self.positions - (0.5 if self.against == "iteration" else width)
        edge = 0.6 if len(values) <= 80 else 0.0
        ax.bar(
            left, values, width, align="edge", color=PALETTE[0], alpha=0.75, edgecolor="white", linewidth=edge
        )


FALL = 1e-3
"""Minimum fall of the bound, as a part of all its changes, that shows another start or sample."""


def _rising_parts(bounds: Floats, chosen: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Return the chosen iterations in parts, each of one start on one sample, judged by the bounds."""
    numbers = np.flatnonzero(chosen)
    if not len(numbers):
        return []
    span = float(np.ptp(bounds))
    falls = np.diff(bounds[numbers]) < -FALL * span
    return list(np.split(numbers, np.flatnonzero(falls) + 1))


def _without_outliers(bounds: Floats) -> tuple[float, float]:
    """Return limits that leave out the first bounds if these are far below all others."""
    high, low = bounds.max(), bounds.min()
    middle = np.median(bounds)
    if high - low > 20 * max(high - middle, 1e-300) and len(bounds) > 8:
        low = np.quantile(bounds, 0.1)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return float(low - margin), float(high + margin)


def _write_text(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=FAINT, fontsize=9)
