"""The page: template, pictures as SVG, every text escaped."""

from __future__ import annotations

import inspect
import io
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from emtau_dask.errors import shown
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.summary import gap_text
from emtau_dask.plot.components import ComponentsDisplay
from emtau_dask.plot.convergence import ConvergenceDisplay
from emtau_dask.plot.drawing import check_matplotlib, figure_of
from emtau_dask.plot.uncertainty import UncertaintyDisplay
from emtau_dask.process import OWN, software
from emtau_dask.report.content import (
    SHOWN_FEATURES,
    SURE,
    Subject,
    ending,
    gap_meaning,
    n_parameters,
    state,
    tables_of,
    warnings_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
SMALL, LARGE = (4.2, 2.9), (4.2, 3.7)
"""Inches; text of 8 points stays readable where a picture is as wide as a telephone."""
LAST_ITERATIONS = 20
_NOT_SETTINGS = ("verbose", "checkpoint", "checkpoint_every")


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


def report_page(subject: Subject) -> str:
    """Return the report of a fit as one HTML document.

    Raises
    ------
    MissingPackageError
        matplotlib is not installed.
    """
    check_matplotlib()
    model, tables = subject.model, tables_of(subject)
    history = model.history_
    k, d = model.means_.shape
    page: str = _template().render(
        subject=subject,
        generator=f"{OWN} {software()[OWN]}",
        style=Markup(_read("page.css")),
        ending=ending(subject),
        converged=subject.finished and model.converged_,
        state=state(subject),
        lead=_lead(subject),
        gap_meaning=gap_meaning(subject),
        warnings=warnings_of(subject),
        facts=_facts(subject),
        settings=_settings(model),
        figures=_figures(subject),
        fit_pictures=convergence_pictures(subject),
        data_pictures=data_pictures(subject),
        tables=tables,
        telling=tables.order[:SHOWN_FEATURES],
        many=d > SHOWN_FEATURES,
        iterations=history[-LAST_ITERATIONS:],
        iterations_in_all=len(history),
        python=python_lines(model, subject.data),
        seeded=model.random_state is not None,
        here={**software(), "python": platform.python_version(), "numpy": np.__version__},
        k=k,
        sure=SURE,
    )
    return page


def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_plain
    )
    return environment.from_string(_read("page.html.j2"))


def _plain(value: Any) -> Any:
    """Return what may be shown of a text: neither secrets nor control characters."""
    return value if isinstance(value, Markup) else shown(value)


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _lead(subject: Subject) -> str:
    model = subject.model
    k, d = model.means_.shape
    work = f"{model.history_.work:.3g} passes over {subject.rows:,} rows" if subject.rows else "no iteration"
    kind = model.parameters_.covariance_type
    return f"{k:,} components with {kind} covariance, {d:,} features; work: {work}."


def _facts(subject: Subject) -> dict[str, str]:
    model = subject.model
    k, d = model.means_.shape
    rows = f"{subject.rows:,} rows of {d:,} features" if subject.rows else f"{d:,} features"
    facts = {
        "Data": rows if subject.data is None else f"{subject.data}: {rows}",
        "Mixture": f"{k:,} components, {model.parameters_.covariance_type} covariance, "
        f"{n_parameters(model):,} free parameters",
        "Read from": subject.place,
    }
    if subject.written is not None:
        facts["Last commit"] = subject.written
    if subject.run is not None:
        facts["Run"] = subject.run
    return facts


def _settings(model: GaussianMixture) -> dict[str, str]:
    return {
        name: repr(value)
        for name, value in model.get_params(deep=False).items()
        if name not in _NOT_SETTINGS and not isinstance(value, np.ndarray)
    }


def _figures(subject: Subject) -> dict[str, str]:
    model, history = subject.model, subject.model.history_
    seconds = sum(record.seconds for record in history)
    read = sum(record.bytes_read for record in history)
    return {
        "Iterations": f"{model.n_iter_:,}",
        "Work": f"{history.work:.4g} passes over the rows",
        "Lower bound": f"{model.lower_bound_:.9g} nats per row",
        "Estimated gap": gap_text(model.gap_),
        "Iterating took": f"{seconds:.3g} s",
        "Read": f"{read / 1e6:,.1f} MB",
    }


def python_lines(model: GaussianMixture, data: str | None) -> str:
    """Return the lines of Python that repeat a fit, as far as its settings say."""
    defaults = inspect.signature(GaussianMixture).parameters
    given = [str(len(model.weights_))]
    for name, value in model.get_params(deep=False).items():
        if name in (*_NOT_SETTINGS, "n_components") or isinstance(value, np.ndarray):
            continue
        if repr(value) != repr(defaults[name].default):
            given.append(f"{name}={value!r}")
    names = ["GaussianMixture"]
    policy = type(model.algorithm)
    if not isinstance(model.algorithm, str) and policy.__module__.startswith(f"{OWN}."):
        names.insert(0, policy.__name__)
    rows = repr(data) if data is not None else "X"
    return f"from {OWN} import {', '.join(names)}\n\nGaussianMixture({', '.join(given)}).fit({rows})"
