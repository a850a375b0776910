"""Tables for people: names with texts, the components of a model, and how a fit went."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from emtau_dask.estimator import GaussianMixture, gap_text, shown_components, stop_text


def text_table(title: str, lines: Mapping[str, str]) -> Table:
    """Return a table of names and texts, for a console without markup."""
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def component_table(model: GaussianMixture, label_counts: NDArray[np.int64] | None) -> Table:
    """Return a table of a fitted model's components; of more than 40 the heaviest, in descending order.

    ``label_counts`` (K,) are the rows that each component labels; without them that column is left out.
    """
    shown = shown_components(model.summary())
    weight, *values = shown.headings
    counted = [] if label_counts is None else ["rows"]
    table = Table(title=shown.title, caption=shown.left_out)
    for heading in ("#", weight, *counted, *values):
        table.add_column(heading, justify="right")
    for number, (weight, *values) in shown.texts.items():
        counted = [] if label_counts is None else [f"{label_counts[number]:,}"]
        table.add_row(str(number), weight, *counted, *values)
    return table


def fit_table(model: GaussianMixture, rows: int) -> Table:
    """Return a table of how the fit of a model went; ``rows`` is N."""
    history = model.history_
    seconds = sum(record.seconds for record in history)
    read = sum(record.bytes_read for record in history)
    table = Table.grid(padding=(0, 2))
    table.add_row("stopped", stop_text(model.stop_reason_))
    table.add_row("iterations", f"{model.n_iter_:,}")
    table.add_row("work", f"{history.work:.4g} passes over {rows:,} rows")
    table.add_row("lower bound", f"{model.lower_bound_:.9g} nats per row")
    table.add_row("estimated gap", gap_text(model.gap_))
    table.add_row("iterating took", f"{seconds:.3g} s, {read / 1e6:,.1f} MB read")
    return table
