"""The page: what a template makes of a fit's texts, tables and pictures; every text is escaped."""

from __future__ import annotations

import inspect
import platform
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from emtau_dask.estimator import GaussianMixture, gap_text
from emtau_dask.messages import shown
from emtau_dask.plot import check_matplotlib
from emtau_dask.report.features import SHOWN_FEATURES, SURE, tables_of
from emtau_dask.report.pictures import convergence_pictures, data_pictures
from emtau_dask.report.subject import Subject
from emtau_dask.report.words import ending, gap_meaning, n_parameters, state, warnings_of
from emtau_dask.versions import OWN, software

LAST_ITERATIONS = 20
_NOT_SETTINGS = ("verbose", "checkpoint", "checkpoint_every")


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
