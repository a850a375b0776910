"""The common look of all pictures, and the rows and the plane that they show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.linalg import cholesky, eigh, solve_triangular, svd
from sklearn.utils.validation import check_is_fitted

from emtau_dask.constraints import integer
from emtau_dask.errors import InvalidDataError, MissingPackageError, listed, one_line, short
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import Seeds
from emtau_dask.estimator.row_sample import DrawnRows, drawn_rows
from emtau_dask.mixture.linalg import Floats
from emtau_dask.mixture.parameters import MixtureParameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#4477AA", "#332288", "#882255")
"""Colours after Okabe and Ito 2008 and Tol 2021; their contrast to white is at least 3."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
INK, FAINT, GRID = "#222222", "#767676", "#e4e4e4"
"""The faint ink has a contrast of at least 4.5 to white and to black, the grounds of style sheets."""
LABEL_POINTS = 12
"""Width of the number of a component (points)."""
DENSITY = "Greys"
MAX_NAME_LENGTH = 32
"""Maximum characters of a feature's name in a picture."""
MAX_TERMS, MIN_LOADING, MAX_TERM_LENGTH = 2, 0.2, 17
"""Maximum features in the label of an axis, the least loading of one as a part of the largest, and the
maximum characters of its name."""
NEGLIGIBLE = 1e-3
"""Maximum standard deviation of means, in those within components, at which they are drawn as equal."""
LONG_LABEL = 45
"""Minimum characters of a label in a smaller font."""
MAX_ROWS = 20_000
FEW_ROWS = 1_000
"""Maximum rows that are drawn as points; more are drawn as a density."""


def check_matplotlib() -> None:
    """Raise `MissingPackageError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "pictures need matplotlib, the extra plot: pip install 'emtau_dask[plot]'."
        ) from error


def single_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return axes to draw on: the given ones, or those of a new figure of this size (inches)."""
    check_matplotlib()
    return _new_axes(1, 1, size)[0] if ax is None else ax


def several_axes(ax: Any, count: int, columns: int, size: tuple[float, float]) -> list[Axes]:
    """Return axes of a grid: the first of given ones, parts of single given axes, or new ones.

    Those that are left are switched off.

    Raises
    ------
    InvalidDataError
        Too few axes are given.
    """
    check_matplotlib()
    rows = -(-count // columns)
    given = _new_axes(rows, columns, size) if ax is None else [*np.asarray(ax, dtype=object).ravel()]
    if len(given) == 1 and count > 1:
        (whole,) = given
        if (place := whole.get_subplotspec()) is None:
            raise InvalidDataError(
                f"ax has no place in a grid to divide; give {count} axes, or one of plt.subplots()."
            )
        whole.set_axis_off()
        grid = place.subgridspec(rows, columns)
        given = [whole.figure.add_subplot(grid[i]) for i in range(count)]
    if len(given) < count:
        raise InvalidDataError(f"ax holds {len(given)} axes, but {count} are drawn; give one, or {count}.")
    for surplus in given[count:]:
        surplus.set_axis_off()
    return given[:count]


def _new_axes(rows: int, columns: int, size: tuple[float, float]) -> list[Axes]:
    from matplotlib import pyplot as plt

    _, made = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return [*made.ravel()]


def plain(text: object, longest: int = 10**4) -> str:
    """Return a text from data without control characters, and not longer than ``longest``."""
    text = one_line(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def dress(ax: Axes, title: str, labels: Sequence[str], below: str = "") -> None:
    """Give axes the look of all pictures, and their texts, which are drawn literally.

    The inside is white; texts outside have the colours of the style sheet in use. ``labels`` are those of the
    two axes. ``below`` describes the data, below the title.
    """
    heading = ax.set_title(title, loc="left", pad=19 if below else 6)
    for text in (heading, ax.set_xlabel(labels[0]), ax.set_ylabel(labels[1])):
        text.set(parse_math=False, fontsize=9 if len(text.get_text()) < LONG_LABEL else 8)
    heading.set(fontsize=9.5, fontweight="bold")
    if below:
        look: dict[str, Any] = {"fontsize": 8, "color": FAINT, "parse_math": False, "va": "bottom"}
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate(below, (0, 1), xytext=(0, 5), in_layout=False, **place, **look)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(labelsize=8.5, length=3, color=FAINT)
    ax.set_axisbelow(True)
    ax.set_facecolor("white")


def with_grid(ax: Axes, axis: Any = "both") -> None:
    """Draw a faint grid behind everything."""
    ax.grid(visible=True, axis=axis, which="major", color=GRID, linewidth=0.8)


def colours(name: str) -> Colormap:
    """Return a colour map without its palest colours, which are invisible on paper."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    return ListedColormap(mpl.colormaps[name](np.linspace(0.1, 1.0, 256)), name)


def legend(ax: Axes, **options: Any) -> None:
    """Draw a legend with literal texts, without mathematical notation."""
    look: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "labelcolor": INK, "fontsize": 8}
    box = ax.legend(frameon=True, framealpha=0.85, title_fontsize=8, **look, **options)
    box.get_title().set_color(INK)
    for text in box.get_texts():
        text.set_parse_math(False)


def look_of(component: int) -> tuple[str, str, str]:
    """Return the colour, line style and marker of a component; these differ for the first 32."""
    k, turn = component % len(PALETTE), component // len(PALETTE)
    return PALETTE[k], LINES[(k + turn) % len(LINES)], MARKERS[(k + turn) % len(MARKERS)]


def number(ax: Axes, components: Sequence[int], places: Floats) -> None:
    """Write the numbers of components at places (K, 2) in their colours; near ones share a black label."""
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
    look: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "bbox": box, "ha": "center", "va": "center"}
    ax.autoscale_view()
    seen = ax.transData.transform(places) * 72 / figure_of(ax).dpi
    labels: list[list[int]] = []
    for i in range(len(components)):
        near = (each for each in labels if np.abs(seen[i] - seen[each[0]]).max() < LABEL_POINTS)
        if (label := next(near, None)) is None:
            labels.append([i])
        else:
            label.append(i)
    for label in labels:
        text, place = listed(f"{components[i]}" for i in label), places[label].mean(axis=0)
        colour = look_of(components[label[0]])[0] if len(label) == 1 else INK
        ax.annotate(text, place, annotation_clip=True, zorder=4, color=colour, **look)


def figure_of(ax: Axes) -> Figure:
    """Return the figure of axes, also of axes in a subfigure."""
    return ax.figure.figure


@dataclass(frozen=True, eq=False)
class Plane:
    """One or two directions in the space of the features.

    Attributes
    ----------
    centre : ndarray of shape (d,)
        The point that is drawn at 0.
    directions : ndarray of shape (d, m)
        m is 1 or 2.
    labels : tuple of str
        Labels of the axes.
    """

    centre: Floats
    directions: Floats
    labels: tuple[str, ...]

    @property
    def flat(self) -> bool:
        """Whether there is only one direction."""
        return len(self.labels) == 1

    def points(self, rows: Floats) -> Floats:
        """Return the coordinates of rows (n, d) in the plane, (n, m)."""
        points: Floats = (rows - self.centre) @ self.directions
        return points

    def covariance(self, parameters: MixtureParameters, component: int) -> Floats:
        """Return a component's covariance along the directions, (m, m)."""
        along = _factor(parameters, component) @ self.directions
        covariance: Floats = along.T @ along
        return covariance


def _factor(parameters: MixtureParameters, component: int) -> Floats:
    """Return F with a component's covariance ``FᵀF``: draws are linear, and these are of unit vectors."""
    return parameters.structure.draw(np.eye(parameters.n_features), parameters.covariances, component)


def plane_of(estimator: GaussianMixture, features: Any) -> Plane:
    """Return the plane of the named features; for None, of up to two features, else of the discriminants.

    Parameters
    ----------
    estimator : GaussianMixture
        Fitted.
    features : None, int, str, or a sequence of one or two of these

    Raises
    ------
    InvalidDataError
        There is no such feature, or more than two are named.
    """
    d = int(estimator.n_features_in_)
    names = names_of(estimator)
    if features is None and d > 2:
        return _discriminant_plane(estimator.parameters_, names)
    return plane_of_features(names, range(d) if features is None else numbers_of(estimator, features, 2))


def plane_of_features(names: Sequence[str], numbers: Sequence[int]) -> Plane:
    """Return the space of some features, of all that have ``names``."""
    labels = tuple(plain(names[i], MAX_NAME_LENGTH) for i in numbers)
    return Plane(np.zeros(len(names)), np.eye(len(names))[:, list(numbers)], labels)


def names_of(estimator: GaussianMixture) -> list[str]:
    """Return the names of the features; "feature 0" and so on if they have none."""
    given = getattr(estimator, "feature_names_in_", None)
    return [f"feature {i}" for i in range(estimator.n_features_in_)] if given is None else [*map(str, given)]


def numbers_of(estimator: GaussianMixture, features: Any, most: int) -> list[int]:
    """Return the numbers of different features, at most ``most``, given by number or name."""
    names, d = [*map(str, getattr(estimator, "feature_names_in_", ()))], int(estimator.n_features_in_)
    given = [features] if isinstance(features, str) or not isinstance(features, Iterable) else [*features]
    if not 1 <= len(given) <= most or len(set(given)) < len(given):
        raise InvalidDataError(
            f"features is {short(features)}; it must be from one to {most} different features. None leaves "
            "the choice to the picture."
        )
    numbers = [names.index(each) if isinstance(each, str) and each in names else each for each in given]
    for number in numbers:
        if not integer(0, d - 1).holds(number):
            known = f", or a name: {short(list(names))}" if names else ""
            raise InvalidDataError(
                f"features: there is no feature {short(number)}. Give a number from 0 to {d - 1}{known}."
            )
    return [int(number) for number in numbers]


def _discriminant_plane(parameters: MixtureParameters, names: Sequence[str]) -> Plane:
    """Return the plane in which the components of a mixture of three features or more differ most.

    Its axes are linear discriminants (Fisher 1936): the directions v of the largest ratios ``vᵀBv / vᵀWv`` of
    the variance between components to the mean variance within them. Where the means do not differ in two
    directions, principal axes of W for standardised features follow, among the directions that are
    uncorrelated under W to the discriminant. A unit of an axis is one standard deviation within components.
    Each direction has a positive largest entry, in standard deviations of the features.
    """
    weights, centre, d = parameters.weights, parameters.weights @ parameters.means, parameters.n_features
    within = np.zeros((d, d))
    for k, weight in enumerate(weights):
        factor = _factor(parameters, k)
        within += weight * (factor.T @ factor)
    deviations = np.sqrt(np.diagonal(within))
    within /= np.outer(deviations, deviations)
    lower = cholesky(within, lower=True)
    away = np.sqrt(weights)[:, np.newaxis] * (parameters.means - centre) / deviations
    whitened, roots, _ = svd(solve_triangular(lower, away.T, lower=True), full_matrices=False)
    n = int((roots[:2] > NEGLIGIBLE).sum())
    directions = solve_triangular(lower, whitened[:, :n], lower=True, trans="T")
    if n < 2:
        aside = np.linalg.qr(within @ directions)[0]
        across = np.eye(d) - aside @ aside.T
        spread, axes = eigh(across @ within @ across, subset_by_index=(d - 2 + n, d - 1))
        directions = np.hstack([directions, (axes / np.sqrt(spread))[:, ::-1]])
    largest = directions[np.abs(directions).argmax(axis=0), [0, 1]]
    directions *= np.where(largest < 0, -1.0, 1.0)
    kinds = ["discriminant axis"] * n + ["principal axis"] * (2 - n)
    labels = tuple(f"{kind} {i + 1}{_terms(directions[:, i], names)}" for i, kind in enumerate(kinds))
    return Plane(centre, directions / deviations[:, np.newaxis], labels)


def _terms(direction: Floats, names: Sequence[str]) -> str:
    """Return the features that an axis is mostly made of, as the second line of its label.

    These are the two of the largest loadings, which are for a direction of length 1.
    """
    loadings = direction / np.linalg.norm(direction)
    order = np.argsort(-np.abs(loadings), kind="stable")
    said = [j for j in order[:MAX_TERMS] if abs(loadings[j]) >= MIN_LOADING * abs(loadings[order[0]])]
    terms = [
        f"{'−' if loadings[j] < 0 else '+'} {abs(loadings[j]):.1f} × {plain(names[j], MAX_TERM_LENGTH)}"
        for j in said
    ]
    more = len(loadings) > len(said) and abs(loadings[order[len(said)]]) >= 0.05
    shown = f" ({len(said)} of {len(loadings):,} features shown)" if more else ""
    return f"{shown}\n{' '.join(terms).removeprefix('+ ')}"


def rows_to_show(
    estimator: GaussianMixture, X: Any, max_rows: Any, random_state: Any, sample_weight: Any, columns: Any
) -> DrawnRows:
    """Return at most ``max_rows`` rows; ``X`` may be rows that were drawn already.

    Raises `InvalidDataError` as `drawn_rows`, and if ``max_rows`` is not an integer of at least 1.
    """
    check_is_fitted(estimator)
    allowed = integer(1)
    if not allowed.holds(max_rows):
        raise InvalidDataError(f"max_rows is {short(max_rows)}; it must be {allowed.words}.")
    if isinstance(X, DrawnRows):
        return DrawnRows(X.rows[: int(max_rows)], X.weights[: int(max_rows)], X.total, X.imputed)
    return drawn_rows(
        estimator,
        X,
        size=int(max_rows),
        seed=Seeds(random_state).draw(),
        sample_weight=sample_weight,
        columns=columns,
    )


def counted(drawn: DrawnRows) -> str:
    """Return the text with the number of shown rows, and of all rows."""
    shown = len(drawn.rows)
    imputed = f"; {drawn.imputed:.1%} of the values were missing" if drawn.imputed else ""
    if shown == drawn.total:
        return f"all {shown:,} rows{imputed}"
    return f"{shown:,} of {drawn.total:,} rows, drawn at random{imputed}"


def cells_of(rows: int) -> int:
    """Return the number of cells of each axis for the density of ``rows`` rows."""
    return max(24, min(72, int(rows**0.5 / 2.5)))
