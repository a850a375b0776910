"""How the result of a fit is shown."""

from __future__ import annotations

import math
import shlex
import sys
from typing import TYPE_CHECKING

import click

from emtau_dask.cli.exits import NOT_CONVERGED
from emtau_dask.cli.printing import echo, echo_json

if TYPE_CHECKING:
    from emtau_dask.runs import RunResult


def show_result(ctx: click.Context, result: RunResult, *, as_json: bool) -> None:
    """Print tables and paths, or one JSON object; end the command where the fit has not converged."""
    from emtau_dask.runs import result_values

    if as_json:
        echo_json(result_values(result))
    else:
        _print_tables(result)
    if result.model.stop_reason_ == "max-iter":
        echo(f"emtau: {_not_converged(result)}", err=True)
        ctx.exit(NOT_CONVERGED)


def _print_tables(result: RunResult) -> None:
    from emtau_dask.cli.console import console_on
    from emtau_dask.runs import component_table, fit_table

    console = console_on(sys.stdout)
    console.print(component_table(result.model, result.label_counts))
    console.print(fit_table(result.model, result.inputs.rows.shape[0]))
    outputs = result.outputs
    for what, path in (("model", outputs.model), ("labels", outputs.labels), ("report", outputs.report)):
        if path is not None:
            echo(f"{what} saved in {path}")


def _not_converged(result: RunResult) -> str:
    """Return how far a fit is that stopped at max_iter, and how it goes on."""
    stop, run = result.outputs.config.stop, result.outputs.config.checkpoint.path
    change = result.model.history_.last_change
    far = f", after a change of the bound by {change:.2g} nats per row" if math.isfinite(change) else ""
    how = "Raise one of them for a converged fit."
    if run is not None:
        how = f"To go on: emtau resume {shlex.quote(run)} --set stop.max_iter={2 * stop.max_iter}"
    return (
        f"stopped at stop.max_iter = {stop.max_iter} without converging to stop.tol = {stop.tol}{far}; "
        f"the results are written. {how}"
    )
