"""The command `emtau report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from emtau_dask.cli.options import debug_option, overwrite_option
from emtau_dask.cli.printing import echo


@click.command()
@click.argument("run_or_model")
@click.argument("out", metavar="OUT.html", type=click.Path(path_type=Path))
@click.option("--data", metavar="DATA", help="Also show the mixture over these rows (a sample of them).")
@click.option(
    "--recorded-data",
    "recorded",
    is_flag=True,
    help="Also show it over the rows that the run names, where they are local files.",
)
@click.option("--array", help="Member of DATA, where it is a zarr group.")
@click.option("--columns", help="Columns of DATA, separated by commas, where it is parquet or CSV.")
@overwrite_option("Replace a report at OUT.html.")
@debug_option
def report(run_or_model: str, out: Path, columns: str | None, **options: Any) -> None:
    """Write a report of RUN_OR_MODEL to OUT.html: what was fitted, how it converged, the components.

    RUN_OR_MODEL is a saved model, the folder of a run that saved one as model.zarr, or a checkpoint. The
    report is one page, with its pictures, that loads nothing; data are read only where they are asked for.
    """
    from emtau_dask.runs import ReportOptions, run_report

    chosen = ReportOptions(columns=columns.split(",") if columns else None, **options)
    run_report(run_or_model, out, chosen, progress=sys.stderr)
    echo(f"report written to {out}")
