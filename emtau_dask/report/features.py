"""Features and components as tables: which features tell components apart, and what the data are like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em import LABELS, RESPONSIBILITIES
from emtau_dask.estimator import DrawnRows
from emtau_dask.mixture.compiled import scoring_kernels
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.mixture.numerics import Floats
from emtau_dask.report.subject import Subject

SHOWN_FEATURES, MOST_FEATURES, MOST_COMPONENTS = 6, 200, 40
"""Features of the first tables, and of all; and components. What is left out is said."""
SURE = 0.9


@dataclass(frozen=True)
class Cells:
    """A table: its headings and its rows of texts, of which the first names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a mixture and its data.

    Attributes
    ----------
    components : Cells
        Weights, and means of the features that tell most.
    means : Cells or None
        A row for each feature, and a column for each component; None where the first table has all.
    data : Cells or None
        A row for each feature; None without data.
    order : tuple of str
        Features, those that tell components apart best first.
    left_out : tuple of str
        What the tables do not hold.
    """

    components: Cells
    means: Cells | None
    data: Cells | None
    order: tuple[str, ...]
    left_out: tuple[str, ...]


def tables_of(subject: Subject) -> Tables:
    """Return the tables of a fitted mixture."""
    parameters, names = subject.model.parameters_, subject.names
    k, d = parameters.means.shape
    variances = parameters.structure.variances(parameters.covariances, k, d)
    told = told_apart(parameters.weights, parameters.means, variances)
    by_telling = np.argsort(-told, kind="stable")
    order = by_telling if d > SHOWN_FEATURES else np.arange(d)
    shown = np.sort(np.argsort(-parameters.weights, kind="stable")[:MOST_COMPONENTS])
    left_out = []
    if k > MOST_COMPONENTS:
        left_out.append(f"The {MOST_COMPONENTS} heaviest of {k:,} components are shown.")
    if d > MOST_FEATURES:
        left_out.append(f"Tables hold the {MOST_FEATURES} of {d:,} features that tell components apart best.")
    cells = [
        [_mean(parameters.means[i, j], variances[i, j]) for j in order[:MOST_FEATURES]] for i in range(k)
    ]
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
            ("feature", "told apart", *(f"component {i}" for i in shown)),
            tuple(
                (names[j], f"{told[j]:.0%}", *(cells[i][place] for i in shown))
                for place, j in enumerate(order[:MOST_FEATURES])
            ),
        )
    data = None if subject.drawn is None else _profile(subject.drawn, names, order[:MOST_FEATURES])
    return Tables(components, means, data, tuple(names[j] for j in by_telling), tuple(left_out))


def told_apart(weights: Floats, means: Floats, variances: Floats) -> Floats:
    """Return which part of each feature's variance in the mixture lies between components, (d,).

    Parameters
    ----------
    weights : ndarray of shape (K,)
    means, variances : ndarray of shape (K, d)
    """
    between: Floats = weights @ (means - weights @ means) ** 2
    within: Floats = weights @ variances
    total = between + within
    return np.divide(between, total, out=np.zeros_like(total), where=total > 0)


def _mean(mean: float, variance: float) -> str:
    return f"{mean:.4g} ± {np.sqrt(variance):.3g}"


def _labelled(drawn: DrawnRows | None, parameters: MixtureParameters) -> Cells:
    """Return, for each component, which rows of the sample it labels, and how sure it is of them."""
    k = parameters.n_components
    if drawn is None:
        return Cells((), ((),) * k)
    kernels = scoring_kernels(parameters, compiled=False)
    labels: NDArray[np.intp] = LABELS(drawn.rows, kernels)
    sure = RESPONSIBILITIES(drawn.rows, kernels).max(axis=1) >= SURE
    counts = np.bincount(labels, drawn.weights, minlength=k)
    certain = np.bincount(labels, drawn.weights * sure, minlength=k)
    return Cells(
        ("rows labelled", "sure"),
        tuple(
            (f"{counts[i] / counts.sum():.1%}", f"{certain[i] / counts[i]:.1%}" if counts[i] else "–")
            for i in range(k)
        ),
    )


def _profile(drawn: DrawnRows, names: Sequence[str], order: Sequence[int] | NDArray[np.intp]) -> Cells:
    """Return what the drawn rows are like; quartiles are of rows, without their weights."""
    share = drawn.weights / drawn.weights.sum()
    rows = []
    for j in order:
        column = drawn.rows[:, j]
        mean = float(share @ column)
        deviation = float(np.sqrt(share @ (column - mean) ** 2))
        quantiles = np.quantile(column, [0.0, 0.25, 0.5, 0.75, 1.0])
        rows.append((names[j], *(f"{value:.4g}" for value in (mean, deviation, *quantiles))))
    headings = ("feature", "mean", "deviation", "least", "25 %", "median", "75 %", "greatest")
    return Cells(headings, tuple(rows))
