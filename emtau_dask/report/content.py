"""The content of a report: subject, features, the course of the fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em.predict import LABELS, RESPONSIBILITIES
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.row_sample import DrawnRows
from emtau_dask.estimator.summary import share_between_components
from emtau_dask.kernels.dispatch import scoring_kernels
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters
from emtau_dask.plot.uncertainty import CERTAIN

MAX_NAME_LENGTH = 48
SHOWN_FEATURES, MAX_FEATURES, MAX_COMPONENTS = 6, 200, 40
"""Maximum features of the first table, and of all tables; maximum components. The page says what is
omitted."""
STOPPED = MappingProxyType(
    {
        "tol": "The fit converged. It stopped by its tolerance: more iterations would change little.",
        "no-active-rows": "The fit ended because no row was active any more: each had stayed in its "
        "component. The likelihood is not necessarily at a maximum.",
        "max-iter": "The fit did not converge. It stopped at the greatest number of iterations.",
    }
)
STATES = MappingProxyType(
    {"tol": "Converged", "no-active-rows": "Ended without active rows", "max-iter": "Not converged"}
)
FLOOR_RATIO = 1.5
"""Minimum ratio of a variance to ``reg_covar``; a smaller variance mostly consists of ``reg_covar``."""
ROWS_PER_FEATURE = 2
MAX_NAMED = 5
MAX_RATIO = 1e5


@dataclass(frozen=True, eq=False)
class Subject:
    """A fitted mixture, and information on its fit.

    Texts may contain anything: the page escapes them, and removes secrets of URLs.

    Attributes
    ----------
    model : GaussianMixture
        Fitted.
    name : str
        Its name.
    place : str
        The path or URL from which it was read, or to which it was written.
    data : str or None
        The path or URL of its rows; None if unknown.
    drawn : DrawnRows or None
        Rows to show; None without data.
    config : str or None
        The run's config as YAML.
    command : str or None
        The command that repeats the fit.
    finished : bool
        Whether the run has ended.
    written : str or None
        When its last commit was written.
    environment : mapping of str to str
        Versions and CPU of the fit; empty if unknown.
    notes : tuple of str
        Earlier remarks.
    run : str or None
        The id of a checkpointed run.
    """

    model: GaussianMixture
    name: str
    place: str
    data: str | None = None
    drawn: DrawnRows | None = None
    config: str | None = None
    command: str | None = None
    finished: bool = True
    written: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run: str | None = None

    @property
    def rows(self) -> int:
        """Rows of weight above 0 that were fitted; 0 without iterations."""
        history = self.model.history_
        return history[-1].rows if len(history) else 0

    @property
    def names(self) -> list[str]:
        """Names of the features, cut at 48 characters."""
        names = getattr(self.model, "feature_names_in_", None)
        if names is None:
            return [f"feature {i}" for i in range(self.model.n_features_in_)]
        return [
            text if len(text := str(name)) <= MAX_NAME_LENGTH else f"{text[: MAX_NAME_LENGTH - 1]}…"
            for name in names
        ]


@dataclass(frozen=True)
class Cells:
    """A table: headings, and rows of texts; the first text names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a mixture.

    Attributes
    ----------
    components : Cells
        Weights, and means of the features that separate components best.
    means : Cells or None
        A row for each feature, and a column for each component; None if the first table has all.
    order : tuple of str
        Features, those that separate components best first.
    omitted : tuple of str
        Sentences on components and features that are not in the tables.
    """

    components: Cells
    means: Cells | None
    order: tuple[str, ...]
    omitted: tuple[str, ...]


def tables_of(subject: Subject) -> Tables:
    """Return the tables of a fitted mixture."""
    parameters, names = subject.model.parameters_, subject.names
    k, d = parameters.means.shape
    variances = parameters.structure.variances(parameters.covariances, k, d)
    between = share_between_components(parameters.weights, parameters.means, variances)
    by_separation = np.argsort(-between, kind="stable")
    order = by_separation if d > SHOWN_FEATURES else np.arange(d)
    shown = np.sort(np.argsort(-parameters.weights, kind="stable")[:MAX_COMPONENTS])
    omitted = []
    if k > MAX_COMPONENTS:
        omitted.append(f"The {MAX_COMPONENTS} heaviest of {k:,} components are shown.")
    if d > MAX_FEATURES:
        omitted.append(f"Tables have the {MAX_FEATURES} of {d:,} features that separate components best.")
    cells = [[_mean(parameters.means[i, j], variances[i, j]) for j in order[:MAX_FEATURES]] for i in range(k)]
    first = order[:SHOWN_FEATURES]
    counted = _labelled(subject.drawn, parameters)
    components = Cells(
        ("component", "weight", *counted.headings, *(names[j] for j in first)),
        tuple(
            (str(i), f"{parameters.weights[i]:.4f}", *counted.rows[i], *cells[i][: len(first)]) for i in shown
        ),
    )
    means = None
    if d > SHOWN_FEATURES:
        means = Cells(
            ("feature", "between components", *(f"component {i}" for i in shown)),
            tuple(
                (names[j], f"{between[j]:.0%}", *(cells[i][place] for i in shown))
                for place, j in enumerate(order[:MAX_FEATURES])
            ),
        )
    return Tables(components, means, tuple(names[j] for j in by_separation), tuple(omitted))


def _mean(mean: float, variance: float) -> str:
    return f"{mean:.4g} ± {np.sqrt(variance):.3g}"


def _labelled(drawn: DrawnRows | None, parameters: MixtureParameters) -> Cells:
    """Return, for each component, its share of the sample's labels, and the share of certain ones."""
    k = parameters.n_components
    if drawn is None:
        return Cells((), ((),) * k)
    kernels = scoring_kernels(parameters, compiled=False)
    labels: NDArray[np.intp] = LABELS(drawn.rows, kernels)
    certain_rows = RESPONSIBILITIES(drawn.rows, kernels).max(axis=1) >= CERTAIN
    counts = np.bincount(labels, drawn.weights, minlength=k)
    certain = np.bincount(labels, drawn.weights * certain_rows, minlength=k)
    return Cells(
        ("rows labelled", "certain"),
        tuple(
            (f"{counts[i] / counts.sum():.1%}", f"{certain[i] / counts[i]:.1%}" if counts[i] else "–")
            for i in range(k)
        ),
    )


def state(subject: Subject) -> str:
    """Return how a fit ended, in one or two words."""
    if not subject.finished:
        return "Not finished"
    return STATES[subject.model.stop_reason_]


def ending(subject: Subject) -> str:
    """Return why a fit stopped."""
    if not subject.finished:
        return (
            f"The run has not ended. This is its state after {subject.model.n_iter_:,} iterations; "
            "it can be resumed."
        )
    return STOPPED[subject.model.stop_reason_]


def gap_meaning(subject: Subject) -> str:
    """Return the meaning of the estimated gap, compared with sampling error."""
    gap, rows = subject.model.gap_, subject.rows
    if not math.isfinite(gap) or not rows:
        return (
            "There is no estimate of how far the bound is from its optimum. Traditional EM has one after "
            "three passes, quasi-Newton steps after one."
        )
    error = n_parameters(subject.model) / (2 * rows)
    return (
        f"The lower bound is estimated to be {gap:.2g} nats per row below the optimum of this fit. The "
        "estimate is from the last steps; another start may find a better optimum. For "
        f"comparison: a sample of {rows:,} rows itself leaves about {error:.2g} nats per row open "
        f"(p/2N), {compared(error, gap)}."
    )


def compared(error: float, gap: float) -> str:
    """Return the ratio of sampling error to the gap, as text."""
    if gap <= 0 or error / gap >= MAX_RATIO:
        return "far more than the gap"
    if error >= gap:
        return (
            f"{error / gap:,.2g} times the gap" if error < 10 * gap else f"{error / gap:,.0f} times the gap"
        )
    return f"less than the gap, by a factor of {min(gap / error, MAX_RATIO):,.3g}"


def n_parameters(model: GaussianMixture) -> int:
    """Return the number of free parameters."""
    return free_parameters(model.parameters_.structure, *model.means_.shape)


def warnings_of(subject: Subject) -> list[str]:
    """Return warnings for the reader; empty if there are none."""
    model, rows = subject.model, subject.rows
    warnings = [*_of_the_end(subject), *subject.notes, *model.history_.notes]
    parameters = model.parameters_
    d = parameters.n_features
    own = parameters.weights * rows
    small = np.flatnonzero(own < ROWS_PER_FEATURE * (d + 1)) if rows else np.empty(0, dtype=np.intp)
    if len(small):
        named = ", ".join(f"{k} ({own[k]:.3g} rows)" for k in small[:MAX_NAMED])
        warnings.append(
            f"{_counted(len(small), 'component')} with very few rows for {d:,} features: {named}"
            f"{_more(len(small))}. Covariances of so few rows are uncertain; fewer components or a simpler "
            "covariance type may be better."
        )
    variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
    at_floor = (
        np.flatnonzero((variances < FLOOR_RATIO * model.reg_covar).any(axis=1)) if model.reg_covar else ()
    )
    if len(at_floor):
        named = ", ".join(str(k) for k in at_floor[:MAX_NAMED])
        warnings.append(
            f"{_counted(len(at_floor), 'component')} with a variance that is hardly more than reg_covar = "
            f"{model.reg_covar:g}: {named}{_more(len(at_floor))}. Rows there are nearly equal in a feature; "
            "the variance is that of reg_covar, not of the data."
        )
    return list(dict.fromkeys(warnings))


def _of_the_end(subject: Subject) -> list[str]:
    model = subject.model
    if not subject.finished:
        return ["The run has not ended."]
    if model.stop_reason_ != "max-iter":
        return []
    change = model.history_.last_change
    last = f" The bound last changed by {change:.2g} nats per row." if math.isfinite(change) else ""
    return [f"The fit reached max_iter = {model.max_iter:,} before it converged.{last}"]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _more(count: int) -> str:
    return f" and {count - MAX_NAMED:,} more" if count > MAX_NAMED else ""
