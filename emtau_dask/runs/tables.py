"""Tables that end a run: the components of a model, and how the fit went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

if TYPE_CHECKING:
    from emtau_dask.estimator import GaussianMixture

MAX_COMPONENTS = 40
MAX_VALUES = 3

_STOP_REASONS = {
    "tol": "converged: the bound changed by less than tol",
    "no-active-rows": "no active rows are left",
    "max-iter": "max_iter reached without converging",
}


def component_table(model: GaussianMixture, label_counts: NDArray[np.int64] | None) -> Table:
    """Return a table of a fitted model's components, the heaviest first where there are many.

    Parameters
    ----------
    model : GaussianMixture
        Fitted.
    label_counts : ndarray of shape (K,) or None
        Rows that each component labels; the column is left out where None.

    Returns
    -------
    rich.table.Table
    """
    weights, means = model.weights_, model.means_
    deviations = _standard_deviations(model)
    few = means.shape[1] <= MAX_VALUES
    k = len(weights)
    table = Table(
        title=f"{k} components, {model.parameters_.covariance_type} covariance, {means.shape[1]} features"
    )
    table.add_column("#", justify="right")
    table.add_column("weight", justify="right")
    if label_counts is not None:
        table.add_column("rows", justify="right")
    suffix = "" if few else " (min / median / max)"
    table.add_column(f"mean{suffix}", justify="right")
    table.add_column(f"standard deviation{suffix}", justify="right")
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
    """Return a table of how a fit went.

    Parameters
    ----------
    model : GaussianMixture
        Fitted.
    rows : int
        Rows of the data.

    Returns
    -------
    rich.table.Table
    """
    history = model.history_
    seconds = sum(record.seconds for record in history)
    read = sum(record.bytes_read for record in history)
    table = Table.grid(padding=(0, 2))
    table.add_row("stopped", _STOP_REASONS.get(model.stop_reason_, model.stop_reason_))
    table.add_row("iterations", f"{model.n_iter_:,}")
    table.add_row("work", f"{history.work:.4g} passes over {rows:,} rows")
    table.add_row("lower bound", f"{model.lower_bound_:.9g} nats per row")
    table.add_row("iterating took", f"{seconds:.3g} s, {read / 1e6:,.1f} MB read")
    return table


def _standard_deviations(model: GaussianMixture) -> NDArray[np.float64]:
    """Return the standard deviation of each component in each feature, shape (K, d)."""
    parameters = model.parameters_
    return np.sqrt(parameters.structure.variances(parameters.covariances, *parameters.means.shape))


def _summary(values: NDArray[np.float64], few: bool) -> str:
    if few:
        return ", ".join(f"{value:.4g}" for value in values)
    return f"{values.min():.3g} / {np.median(values):.3g} / {values.max():.3g}"
