"""The Displays as SVG that can stand in a page: named for those who hear it, without names in common."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from emtau_dask.plot import ComponentsDisplay, ConvergenceDisplay, UncertaintyDisplay, figure_of
from emtau_dask.report.subject import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
SMALL, LARGE = (4.2, 2.9), (4.2, 3.7)
"""Inches; text of 8 points stays readable where a picture is as wide as a telephone."""


@dataclass(frozen=True)
class Picture:
    """An SVG element, and what it shows: in a few words, and in a sentence."""

    svg: str
    title: str
    description: str


def convergence_pictures(subject: Subject) -> list[Picture]:
    """Return the four pictures of how a fit converged; none where it had no iteration."""
    history = subject.model.history_
    if not len(history):
        return []
    said = (
        (
            "Lower bound",
            "The lower bound of the log-likelihood against the work so far. A line that begins anew is "
            "another start, or goes on with more rows.",
        ),
        ("Gap", "The estimated gap to where the fit would end, on a logarithmic axis, against the work."),
        ("Rows scored", "The share of all rows that each iteration scored: how the work fell."),
        ("Bytes read", "How much each iteration read."),
    )
    with _drawing():
        axes = [_new_axes(SMALL) for _ in said]
        ConvergenceDisplay.from_history(history, ax=axes)
        return [
            Picture(_svg_of(ax, f"fit{i}", *texts), *texts)
            for i, (ax, texts) in enumerate(zip(axes, said, strict=True))
        ]


def data_pictures(subject: Subject) -> list[Picture]:
    """Return the pictures of components and of doubt, over the drawn rows; none without them."""
    model, drawn = subject.model, subject.drawn
    if drawn is None:
        return []
    said = (
        ("Components", "The components as ellipses, or as curves, over the density of the rows."),
        ("Certainty", "For each component, how large the largest responsibility of its rows is."),
        ("Doubt", "Where rows lie that may belong to several components."),
    )
    with _drawing():
        axes = [_new_axes(LARGE) for _ in said]
        ComponentsDisplay.from_estimator(model, drawn, ax=axes[0])
        UncertaintyDisplay.from_estimator(model, drawn, ax=axes[1:])
        return [
            Picture(_svg_of(ax, f"data{i}", *texts), *texts)
            for i, (ax, texts) in enumerate(zip(axes, said, strict=True))
        ]


def _new_axes(size: tuple[float, float]) -> Axes:
    """Return the axes of a figure that no window knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").add_subplot()


@contextmanager
def _drawing() -> Iterator[None]:
    """Let text stay text; names that the fonts here have no glyphs for are drawn by the reader's own."""
    import matplotlib as mpl

    settings: Any = {"svg.fonttype": "none", "font.family": ["sans-serif"], "axes.unicode_minus": True}
    with warnings.catch_warnings(), mpl.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def _svg_of(ax: Axes, prefix: str, title: str, description: str) -> str:
    import matplotlib as mpl

    written = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": prefix}):
        figure_of([ax]).savefig(written, format="svg", dpi=110, metadata={"Date": None})
    return inlined(written.getvalue(), prefix, title, description)


def inlined(svg: bytes, prefix: str, title: str, description: str) -> str:
    """Return an SVG document as an element of a page.

    Names begin with a prefix, so that two pictures have none in common; it has a title and a description,
    and no style that would hold for the whole page.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    named = f"{prefix}-{{}}".format
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            element.set(key, _renamed(key, value, named))
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    root.set("role", "img")
    root.set("aria-labelledby", f"{named('title')} {named('desc')}")
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": named(tag)})
        element.text = text
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


def _renamed(key: str, value: str, named: Callable[[str], str]) -> str:
    if key == "id":
        return named(value)
    if key in ("href", f"{{{XLINK}}}href") and value.startswith("#"):
        return f"#{named(value[1:])}"
    return _REFERENCE.sub(lambda found: f"url(#{named(found[1])})", value)
