"""The page: template, pictures as SVG, every text escaped."""

from __future__ import annotations

import inspect
import io
import platform
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from dask.utils import format_bytes
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from emtau_dask.errors import counted, shown
from emtau_dask.estimator.findings import CERTAIN
from emtau_dask.estimator.fitting import FITTED_TO
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.summary import FitSummary, gain_text
from emtau_dask.plot.components import ComponentsDisplay
from emtau_dask.plot.convergence import ConvergenceDisplay
from emtau_dask.plot.drawing import check_matplotlib, figure_of
from emtau_dask.plot.selection import SelectionDisplay
from emtau_dask.plot.uncertainty import UncertaintyDisplay
from emtau_dask.process import OWN, software
from emtau_dask.report.content import (
    Subject,
    candidates_of,
    state,
    summary_of_rows,
    tables_of,
    warnings_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
SMALL, LARGE = (4.2, 2.9), (4.2, 3.7)
"""Sizes of pictures (inches); text of 8 points stays readable on the width of a telephone."""
LAST_ITERATIONS = 20
_NOT_SETTINGS = ("verbose", "checkpoint", "checkpoint_every")


OF_THE_FIT = {
    "log-likelihood": (
        "Log-likelihood",
        "The log-likelihood per row. The line is the run that was kept; where more rows are scored it begins "
        "again.",
    ),
    "gain": (
        "Could still gain",
        "What the fit could still gain in log-likelihood per row, on a logarithmic axis.",
    ),
    "rows": ("Rows scored", "The rows that each iteration scored, in passes over the data."),
    "bytes": ("Bytes read", "The bytes that each iteration read."),
}
OF_COMPONENTS = ("Components", "The components as ellipses, or as curves, over the rows.")
OF_LABELS = {
    "certainty": (
        "Certainty",
        "The share of each component's rows that are uncertain, by their largest responsibility.",
    ),
    "place": ("Uncertainty", "Where rows are that may belong to several components."),
}
OF_CANDIDATES = ("Candidates", "The criterion of each candidate's fit to a sample. The circle is the best.")
"""The pictures by panels of Displays: their titles, and what they show."""


class Picture(NamedTuple):
    """An SVG element, and a sentence that describes it."""

    svg: str
    description: str


def convergence_pictures(subject: Subject) -> list[Picture]:
    """Return the pictures of how a fit converged; none without iterations."""
    history = subject.model.history_
    if not len(history):
        return []
    with _drawing():
        display = ConvergenceDisplay(history)
        axes = [_new_axes(SMALL) for _ in display.panels]
        display.plot(axes)
        return _pictures("fit", [OF_THE_FIT[panel] for panel in display.panels], axes)


def data_pictures(subject: Subject) -> list[Picture]:
    """Return the pictures of components and of certainty, over the drawn rows; none without rows."""
    model, drawn = subject.model, subject.drawn
    if drawn is None:
        return []
    with _drawing():
        axes, texts = [_new_axes(LARGE)], [OF_COMPONENTS]
        ComponentsDisplay.from_estimator(model, drawn, ax=axes[0])
        if len(model.weights_) > 1:
            of_labels = [_new_axes(LARGE) for _ in OF_LABELS]
            panels = UncertaintyDisplay.from_estimator(model, drawn, ax=of_labels).panels
            axes += of_labels[: len(panels)]
            texts += [OF_LABELS[panel] for panel in panels]
        return _pictures("data", texts, axes)


def selection_pictures(subject: Subject) -> list[Picture]:
    """Return the picture of the candidates; none if the mixture was not chosen of several."""
    if (table := subject.selection) is None:
        return []
    with _drawing():
        ax = _new_axes(LARGE)
        SelectionDisplay(table, table.criterion).plot(ax)
        return _pictures("selection", [OF_CANDIDATES], [ax])


@contextmanager
def _drawing() -> Iterator[None]:
    """Keep text as text in the SVG, so that the reader's fonts draw glyphs that are missing here."""
    import matplotlib as mpl

    settings: Any = {"svg.fonttype": "none", "font.family": ["sans-serif"], "axes.unicode_minus": True}
    with warnings.catch_warnings(), mpl.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def _new_axes(size: tuple[float, float]) -> Axes:
    """Return the axes of a figure without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").add_subplot()


def _pictures(prefix: str, texts: Sequence[tuple[str, str]], axes: Sequence[Axes]) -> list[Picture]:
    named = [(f"{prefix}{i}", *each) for i, each in enumerate(texts)]
    return [Picture(_svg_of(ax, *each), each[-1]) for ax, each in zip(axes, named, strict=True)]


def _svg_of(ax: Axes, name: str, title: str, description: str) -> str:
    """Return a picture as an element of a page, with ids and a style of its own.

    The salt makes the referenced ids of different pictures differ. Ids of groups would be equal; nothing
    refers to them, and they are removed.
    """
    import matplotlib as mpl

    written = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure_of(ax).savefig(written, format="svg", dpi=110, metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    for parent in list(root.iter()):
        if parent.tag == f"{{{SVG}}}g":
            parent.attrib.pop("id", None)
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for key in ("width", "height"):
        del root.attrib[key]
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(place, element)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def report_page(subject: Subject) -> str:
    """Return the report of a fit as one HTML document.

    Raises
    ------
    MissingPackageError
        matplotlib is not installed.
    """
    check_matplotlib()
    model, summary = subject.model, summary_of_rows(subject)
    tables, history = tables_of(subject, summary), model.history_
    k, d = model.means_.shape
    page: str = _template().render(
        subject=subject,
        summary=summary,
        generator=f"{OWN} {software()[OWN]}",
        style=Markup(_read("page.css")),
        converged=subject.finished and model.converged_,
        state=state(subject),
        lead=_lead(summary, d),
        warnings=warnings_of(subject),
        facts=_facts(subject, summary),
        settings=_settings(model),
        trust=_trust(subject, summary),
        course=_course(summary),
        fit_pictures=convergence_pictures(subject),
        data_pictures=data_pictures(subject),
        candidates=None if subject.selection is None else candidates_of(subject.selection),
        selection_pictures=selection_pictures(subject),
        tables=tables,
        iterations=history[-LAST_ITERATIONS:],
        iterations_in_all=len(history),
        with_data=_command_with_data(subject),
        python=python_lines(model, subject.arguments),
        seeded=model.random_state is not None,
        here={**software(), "python": platform.python_version(), "numpy": np.__version__},
        components=counted(k, "component"),
        sure=CERTAIN,
    )
    return page


def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_plain
    )
    return environment.from_string(_read("page.html.j2"))


def _plain(value: Any) -> Any:
    """Return a text without secrets and control characters."""
    return value if isinstance(value, Markup) else shown(value)


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _lead(summary: FitSummary, d: int) -> str:
    rows = f"{counted(summary.rows, 'row')} of " if summary.rows else ""
    return f"{counted(len(summary.components), 'component')} in {rows}{counted(d, 'feature')}"


def _facts(subject: Subject, summary: FitSummary) -> dict[str, str]:
    chosen = [note.removeprefix(FITTED_TO) for note in summary.notes if note.startswith(FITTED_TO)]
    facts = {
        "Data": "not recorded" if subject.data is None else subject.data,
        **({"Fitted to": chosen[0]} if chosen else {}),
        "Covariance": f"{summary.covariance_type}; {summary.n_parameters:,} free parameters",
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


def _command_with_data(subject: Subject) -> str:
    """Return the command that writes the report anew, with the data."""
    data = "DATA" if subject.data is None else shlex.quote(subject.data)
    return f"emtau report {shlex.quote(subject.place)} OUT.html --data {data}"


def _trust(subject: Subject, summary: FitSummary) -> dict[str, str]:
    """Return the facts by which a reader judges whether a fit can be trusted."""
    facts = {
        "End": summary.ending if subject.finished else "the run has not ended",
        "Log-likelihood per row": f"{summary.lower_bound:.9g} (natural logarithm)",
        "Could still gain": gain_text(summary.gap),
    }
    return facts | ({"Sampling error (p/2N)": summary.sampling_text} if summary.rows else {})


def _course(summary: FitSummary) -> dict[str, str]:
    return {
        "Iterations": f"{summary.n_iter:,}",
        "Rows scored": f"{summary.work:.4g} passes over the data",
        "Iterating took": f"{summary.seconds:.3g} s",
        "Read": format_bytes(summary.bytes_read),
    }


def python_lines(model: GaussianMixture, arguments: str | None) -> str:
    """Return the lines of Python that repeat a fit, from its settings and the ``arguments`` of `fit`."""
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
    arguments = arguments or "X"
    opened = arguments.partition(".")[0]
    more = f"import {opened}\n\n" if opened in ("xarray", "zarr") else ""
    imports = f"{more}from {OWN} import {', '.join(names)}\n\n"
    return f"{imports}GaussianMixture({', '.join(given)}).fit({arguments})"
