"""Tables for people: names with texts, the components of a model, and how a fit went."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from emtau_dask.estimator import STOP_REASONS, GaussianMixture, gap_text

MAX_COMPONENTS = 40
MAX_VALUES = 3


def text_table(title: str, lines: Mapping[str, str]) -> Table:
    """Return a table of names and texts; title and texts are shown as they are, without markup."""
    table = Table(title=Text(title), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in lines.items():
        table.add_row(name, Text(text))
    return table


def component_table(model: GaussianMixture, label_counts: NDArray[np.int64] | None) -> Table:
    """Return a table of a fitted model's components; of more than 40 the heaviest, in descending order.

    ``label_counts`` (K,) are the rows that each component labels; without them that column is left out.
    """
    weights, means, parameters = model.weights_, model.means_, model.parameters_
    deviations = np.sqrt(parameters.structure.variances(parameters.covariances, *means.shape))
    k, features = means.shape
    few = features <= MAX_VALUES
    table = Table(title=f"{k} components, {parameters.covariance_type} covariance, {features} features")
    suffix = "" if few else " (min / median / max)"
    rows = [] if label_counts is None else ["rows"]
    for heading in ("#", "weight", *rows, f"mean{suffix}", f"standard deviation{suffix}"):
        table.add_column(heading, justify="right")
    shown = range(k) if k <= MAX_COMPONENTS else np.argsort(-weights, kind="stable")[:MAX_COMPONENTS]
    for i in shown:
        cells = [str(i), f"{weights[i]:.4f}"]
        if label_counts is not None:
            cells.append(f"{label_counts[i]:,}")
        table.add_row(*cells, _summary(means[i], few), _summary(deviations[i], few))
    if k > MAX_COMPONENTS:
        table.caption = f"the {MAX_COMPONENTS} heaviest of {k}"
    return table


def fit_table(model: GaussianMixture, rows: int) -> Table:
    """Return a table of how the fit of a model went; ``rows`` is N."""
    history = model.history_
    seconds = sum(record.seconds for record in history)
    read = sum(record.bytes_read for record in history)
    table = Table.grid(padding=(0, 2))
    table.add_row("stopped", STOP_REASONS.get(model.stop_reason_, model.stop_reason_))
    table.add_row("iterations", f"{model.n_iter_:,}")
    table.add_row("work", f"{history.work:.4g} passes over {rows:,} rows")
    table.add_row("lower bound", f"{model.lower_bound_:.9g} nats per row")
    table.add_row("estimated gap", gap_text(model.gap_))
    table.add_row("iterating took", f"{seconds:.3g} s, {read / 1e6:,.1f} MB read")
    return table


def _summary(values: NDArray[np.float64], few: bool) -> str:
    if few:
        return ", ".join(f"{value:.4g}" for value in values)
    return f"{values.min():.3g} / {np.median(values):.3g} / {values.max():.3g}"
