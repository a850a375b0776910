"""How all pictures look: colours that colour-blind people tell apart, thin axes, text without markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emtau_dask.errors import InvalidDataError, MissingPackageError
from emtau_dask.messages import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#4477AA", "#332288", "#882255")
"""After Okabe and Ito 2008 and Tol 2021; all have a contrast of 3 to white at least."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
INK, FAINT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
DENSITY = "Greys"
LONGEST = 32
"""Characters of a feature's name that are drawn."""


def check_matplotlib() -> None:
    """Raise `MissingPackageError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "pictures need matplotlib, the extra plot: pip install 'emtau_dask[plot]'."
        ) from error


def single_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return axes to draw on: the given ones, or those of a new figure of so many inches."""
    check_matplotlib()
    if ax is None:
        from matplotlib import pyplot as plt

        _, ax = plt.subplots(figsize=size, layout="constrained")
    return ax


def several_axes(ax: Any, count: int, columns: int, size: tuple[float, float]) -> list[Axes]:
    """Return so many axes: those given, parts of the place of a single one given, or new ones.

    Raises
    ------
    InvalidDataError
        Another number of axes is given.
    """
    check_matplotlib()
    rows = -(-count // columns)
    if ax is None:
        from matplotlib import pyplot as plt

        _, made = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        return [*made.ravel()[:count]]
    given = np.asarray(ax, dtype=object).ravel()
    if given.size == count:
        return [*given]
    if given.size != 1:
        raise InvalidDataError(f"ax holds {given.size} axes, but {count} are drawn; give one, or {count}.")
    (whole,) = given
    place = whole.get_subplotspec()
    if place is None:
        raise InvalidDataError(
            f"ax has no place in a grid that could be divided; give {count} axes, or one of plt.subplots()."
        )
    whole.set_axis_off()
    grid = place.subgridspec(rows, columns)
    return [whole.figure.add_subplot(grid[i // columns, i % columns]) for i in range(count)]


def plain(text: object, longest: int = 10**4) -> str:
    """Return a text from data as it may be drawn: without control characters, and not longer than that."""
    text = one_line(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def dress(ax: Axes, title: str, labels: Sequence[str], below: str = "") -> None:
    """Give axes the look of all pictures, and their texts, which are drawn as they are.

    ``labels`` are those of the two axes. ``below`` is what the reader has to know of the data; it stands
    below the title.
    """
    heading = ax.set_title(title, loc="left", pad=19 if below else 6)
    for text in (heading, ax.set_xlabel(labels[0]), ax.set_ylabel(labels[1])):
        text.set(parse_math=False, color=INK, fontsize=9)
    heading.set(fontsize=9.5, fontweight="bold")
    if below:
        look: dict[str, Any] = {"fontsize": 8, "color": FAINT, "parse_math": False, "va": "bottom"}
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate(below, (0, 1), xytext=(0, 5), **place, **look)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(labelcolor=INK, labelsize=8.5, length=3, color=FAINT)
    ax.set_axisbelow(True)


def with_grid(ax: Axes, axis: Any = "both") -> None:
    """Draw a faint grid below all else."""
    ax.grid(visible=True, axis=axis, which="major", color=GRID, linewidth=0.8)


def colours(name: str) -> Colormap:
    """Return a colour map without its palest colours, which paper swallows."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    return ListedColormap(mpl.colormaps[name](np.linspace(0.1, 1.0, 256)), name)


def legend(ax: Axes, **options: Any) -> None:
    """Draw a legend whose texts are drawn as they are."""
    made = ax.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize=8, **options)
    for text in made.get_texts():
        text.set_parse_math(False)


def figure_of(axes: Sequence[Axes]) -> Figure:
    """Return the figure that the first of some axes belongs to."""
    from matplotlib.figure import SubFigure

    figure = axes[0].get_figure()
    while isinstance(figure, SubFigure):
        figure = figure.figure
    assert figure is not None
    return figure
