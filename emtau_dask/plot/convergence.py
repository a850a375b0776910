"""How a fit converged: its log-likelihood, what it could still gain, and the cost of each iteration."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from emtau_dask.em.history import FitHistory
from emtau_dask.errors import InvalidDataError, short
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.mixture.linalg import Floats
from emtau_dask.plot.drawing import FAINT, INK, PALETTE, dress, figure_of, legend, several_axes, with_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes


AGAINST = {"work": "rows scored (passes over the data)", "iteration": "iteration"}
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
WIDE = 30.0
"""Minimum ratio of shares of rows for a logarithmic axis."""
FALL = 1e-3
"""Minimum fall of the log-likelihood, as a part of all its changes, that shows another start."""
GROWTH = 1.5
"""Minimum ratio of the rows scored that shows a larger sample."""
_ACCEPTED, _ESTIMATE, _REFUSED, _OTHER = PALETTE[0], PALETTE[1], FAINT, "#b0b0b0"


class ConvergenceDisplay:
    """How a fit converged, in up to four panels.

    The log-likelihood per row, where the run that was kept is a line, and other starts are a point each; what
    the fit could still gain, with the distance of each accepted full pass from the best one; the rows that
    each iteration scored; and the bytes that it read. Panels that would be empty are left out. Use
    `from_estimator` or `from_history`.

    Parameters
    ----------
    history : FitHistory
        With at least one iteration.
    against : {"work", "iteration"}, default="work"
        The horizontal axes: the rows scored up to an iteration, in passes over all rows, or its number.

    Attributes
    ----------
    positions : ndarray of shape (n_iter,), float64
        Positions of the iterations on the horizontal axes.
    kept : ndarray of shape (n_iter,), bool
        Whether an iteration belongs to the run that was kept. Histories do not say it: a start begins where
        the log-likelihood on a sample falls, and the one that ends highest is kept.
    panels : tuple of str
        Those of "log-likelihood", "gain", "rows" and "bytes" that are drawn.
    axes_ : ndarray of matplotlib Axes
        One for each panel.
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
        bounds, full, accepted = (self._column(n) for n in ("lower_bound", "full_pass", "accepted"))
        self._bounds, self._full, self._accepted = bounds, full > 0, accepted > 0
        self._passes = self._column("active_rows") / self._column("rows")
        self.positions: Floats = np.cumsum(self._passes) if against == "work" else self._column("iteration")
        self._lines, self._others = _runs(bounds, self._full, self._accepted, self._passes)
        self.kept = np.ones(len(history), dtype=np.bool_)
        for start in self._others:
            self.kept[start] = False
        self._exact = self._full & self._accepted & self.kept
        self._gaps = np.where(self.kept, self._column("gap"), np.nan)
        best = bounds[self._exact].max(initial=-np.inf)
        self._below = np.where(self._exact, best - bounds, np.nan)
        drawn = {
            "log-likelihood": True,
            "gain": bool((self._gaps > 0).any() or (self._below > 0).any()),
            "rows": True,
            "bytes": bool(self._column("bytes_read").any()),
        }
        self.panels = tuple(name for name, some in drawn.items() if some)

    @classmethod
    def from_estimator(cls, estimator: GaussianMixture, *, against: str = "work", ax: Any = None) -> Self:
        """Draw how a fitted mixture converged.

        Parameters
        ----------
        estimator : GaussianMixture
            Fitted.
        against : {"work", "iteration"}, default="work"
        ax : matplotlib Axes or array of 4 of them, optional
            Single axes are divided, and axes that nothing is drawn on are switched off. By default a new
            figure is made.

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
        """Draw the panels; ``ax`` as for `from_estimator`."""
        count = len(self.panels)
        axes = several_axes(ax, count, 2, (9.0, 2.8 * ((count + 1) // 2)))
        for name, each in zip(self.panels, axes, strict=True):
            self._draw[name](self, each)
            low, high = min(0.0, self.positions[0]), self.positions[-1]
            each.set_xlim(low, high + 0.03 * (high - low))
        self.axes_ = np.array(axes, dtype=object)
        self.figure_ = figure_of(axes[0])
        return self

    def _column(self, name: str) -> Floats:
        return np.array([float(getattr(record, name)) for record in self.history])

    def _likelihood(self, ax: Axes) -> None:
        bounds, accepted = self._bounds, self._accepted
        for start in self._others:
            last = start[bounds[start].argmax()]
            ax.plot(self.positions[last], bounds[last], "D", color=_OTHER, markersize=3.5, zorder=1)
        for line in self._lines:
            style = "-" if self._full[line[0]] else ":"
            ax.plot(self.positions[line], bounds[line], style, color=INK, linewidth=1.2, zorder=2)
        marks: tuple[tuple[Any, str, dict[str, Any]], ...] = (
            (self._exact, "all rows", {"color": _ACCEPTED, "marker": "o"}),
            (
                accepted & self.kept & ~self._full,
                "some of the rows",
                {"edgecolor": _ESTIMATE, "c": "white", "marker": "o"},
            ),
            (~accepted & self.kept, "refused step", {"color": _REFUSED, "marker": "x"}),
        )
        for chosen, label, look in marks:
            if chosen.any():
                ax.scatter(self.positions[chosen], bounds[chosen], s=18, label=label, zorder=3, **look)
        if self._others:
            ax.plot(
                [], [], color=_OTHER, marker="D", markersize=3.5, linestyle="", label="end of another start"
            )
        seen = accepted & self.kept
        low, high = _without_outliers(bounds[seen] if seen.any() else bounds)
        ax.set_ylim(low, high)
        if below := int((bounds[self.kept] < low).sum()):
            note = f"{below} {'iteration' if below == 1 else 'iterations'} lower than this"
            ax.text(0.02, 0.03, note, transform=ax.transAxes, color=FAINT, fontsize=8)
        dress(ax, "Log-likelihood", (AGAINST[self.against], "log-likelihood per row"))
        with_grid(ax)
        legend(ax, loc="best")

    def _gain(self, ax: Axes) -> None:
        lines = (
            (self._gaps, "estimate", _ESTIMATE, "s", "-"),
            (self._below, "below the best pass over all rows", _ACCEPTED, "o", "--"),
        )
        for values, label, colour, marker, style in lines:
            look: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker, "label": label}
            for part in self._lines:
                some = part[values[part] > 0]
                if len(some):
                    ax.plot(self.positions[some], values[some], markersize=3.5, linewidth=1.2, **look)
                    look["label"] = None
        dress(ax, "Could still gain", (AGAINST[self.against], "log-likelihood per row"))
        with_grid(ax)
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        if high < 10 * low:  # else there might be no power of ten to label
            low, high = low / 4, high * 4
        ax.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
        ax.yaxis.set_major_formatter(lambda value, _: f"1e{np.log10(value):.0f}")
        ax.yaxis.set_minor_formatter(lambda value, _: "")
        legend(ax, loc="upper right")

    def _rows(self, ax: Axes) -> None:
        self._bars(ax, self._passes)
        if self._passes.max() > WIDE * self._passes[self._passes > 0].min(initial=np.inf):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        dress(ax, "Rows scored in each iteration", (AGAINST[self.against], "passes over the data"))
        with_grid(ax, "y")

    def _bytes(self, ax: Axes) -> None:
        read = self._column("bytes_read")
        unit, name = next((unit for unit in UNITS if read.max() >= unit[0]), UNITS[-1])
        self._bars(ax, read / unit)
        dress(ax, "Read in each iteration", (AGAINST[self.against], name))
        with_grid(ax, "y")

    def _bars(self, ax: Axes, values: Floats) -> None:
        """Draw each iteration as a bar that ends where the iteration ends; many as a line of steps."""
        width = 1.0 if self.against == "iteration" else np.diff(self.positions, prepend=0.0)
        left = self.positions - (0.5 if self.against == "iteration" else width)
        edge = 0.6 if len(values) <= 80 else 0.0
        ax.bar(
            left, values, width, align="edge", color=PALETTE[0], alpha=0.75, edgecolor="white", linewidth=edge
        )

    _draw = MappingProxyType({"log-likelihood": _likelihood, "gain": _gain, "rows": _rows, "bytes": _bytes})


def _runs(
    bounds: Floats, full: NDArray[np.bool_], accepted: NDArray[np.bool_], scored: Floats
) -> tuple[list[NDArray[np.intp]], list[NDArray[np.intp]]]:
    """Return the lines of the run that was kept, and the other starts, as places in the history.

    A line has accepted iterations whose log-likelihoods can be compared: on one sample, or over all rows.
    Before the first pass over all rows starts are tried on samples that grow; on each of these the start that
    ends highest is kept.
    """
    first_full = int(full.argmax()) if full.any() else len(full)
    before = np.maximum.accumulate(scored[:first_full])
    larger = np.flatnonzero(scored[1:first_full] > GROWTH * before[:-1]) + 1
    lines, others = [], []
    for sample in [*np.split(np.arange(first_full), larger), np.flatnonzero(full)]:
        starts = _starts(bounds, sample, accepted)
        ends = [bounds[start[accepted[start]]].max() for start in starts]
        best = int(np.argmax(ends)) if ends else 0
        lines += [start[accepted[start]] for start in starts[best : best + 1]]
        others += starts[:best] + starts[best + 1 :]
    later = np.flatnonzero(~full & accepted)
    later = later[later > first_full]
    lines += np.split(later, np.flatnonzero(np.diff(later) > 1) + 1) if len(later) else []
    return lines, others


def _starts(bounds: Floats, numbers: NDArray[np.intp], accepted: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Return iterations on one sample, or over all rows, in parts that begin where the accepted fall."""
    kept = numbers[accepted[numbers]]
    if not len(kept):
        return []
    falls = np.diff(bounds[kept]) < -FALL * float(np.ptp(bounds[kept]))
    return np.split(numbers, np.searchsorted(numbers, kept[1:][falls]))


def _without_outliers(bounds: Floats) -> tuple[float, float]:
    """Return limits that leave out the first bounds if these are far below all others."""
    high, low = bounds.max(), bounds.min()
    middle = np.median(bounds)
    if high - low > 20 * max(high - middle, 1e-300) and len(bounds) > 8:
        low = np.quantile(bounds, 0.1)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return float(low - margin), float(high + margin)
