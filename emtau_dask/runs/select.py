"""`emtau select`: from a config's data and settings to a selection and its results."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from emtau_dask.config.schema import RunConfig
from emtau_dask.errors import CheckpointCorruptError, EmtauError
from emtau_dask.progress import watching
from emtau_dask.runs.fit import affordable_inputs
from emtau_dask.runs.inputs import computing, estimator_of
from emtau_dask.runs.outputs import RunResult, checked_outputs, result_values, write_outputs
from emtau_dask.selection.checkpoint import SelectionCheckpoint, selection_checkpoint
from emtau_dask.selection.criteria import checked_settings
from emtau_dask.selection.select import select
from emtau_dask.selection.table import CandidateRecord, ComponentSelection, SelectionTable
from emtau_dask.storage.errors import writing_errors

FOLDER, RESULT = "selection", "selection.json"
"""Below the folder of the results: what is kept while a selection runs, and what it found."""


@dataclass(frozen=True)
class SelectionRequest:
    """What is selected; see `select_components`. ``written`` says whether there are results in files."""

    n_components: Sequence[int]
    covariance_types: Sequence[str]
    criterion: str
    sample_rows: int | None
    finalists: int
    written: bool


@dataclass(frozen=True, eq=False)
class SelectionResult:
    """A selection; its best model's results, and the file that holds the table, where they were written."""

    selection: ComponentSelection
    run: RunResult | None
    place: Path | None


def run_selection(
    config: RunConfig, request: SelectionRequest, *, overwrite: bool, progress: TextIO
) -> SelectionResult:
    """Select, and write the best model, its labels and the table to the folder of the results, if wanted.

    Raises
    ------
    EmtauError
        Results exist and may not be replaced, or the data or the settings cannot be used.
    """
    settings = checked_settings(
        request.n_components,
        request.covariance_types,
        request.criterion,
        None,
        estimator_of(config).set_params(checkpoint=None),
        request.sample_rows,
        request.finalists,
    )
    directory = Path(config.output.directory)
    beside = directory / FOLDER if request.written else None
    checkpoint = selection_checkpoint(config.checkpoint.path or beside)
    if checkpoint is not None and overwrite:
        _remove(checkpoint)
    known = None if checkpoint is None else checkpoint.entry()
    outputs = None
    if request.written:
        outputs = checked_outputs(config, overwrite=overwrite, run=None if known is None else known.id)
        _check_replaceable(directory / RESULT, overwrite=overwrite or known is not None)
    inputs, plan = affordable_inputs(config, overwrite=False, progress=progress)
    with watching(progress) as observer, computing(config, observer, plan.settings):
        data = {"X": inputs.rows, "sample_weight": inputs.weights, "columns": None}
        found = select(settings, data, checkpoint=checkpoint, observer=observer)
    if outputs is None:
        return SelectionResult(found, None, None)
    entry = None if checkpoint is None else checkpoint.entry()
    run = None if entry is None else entry.id
    written = write_outputs(outputs, found.best_estimator_, inputs, run=run, progress=progress)
    place = directory / RESULT
    result = SelectionResult(found, written, place)
    _write(place, selection_values(result))
    return result


def _remove(checkpoint: SelectionCheckpoint) -> None:
    """Remove a selection that is kept, also a damaged one; anything else is left alone."""
    try:
        known = checkpoint.entry() is not None
    except CheckpointCorruptError:
        known = True
    if known:
        checkpoint.remove()


def _check_replaceable(place: Path, *, overwrite: bool) -> None:
    if place.exists() and not (overwrite and place.is_file()):
        raise EmtauError(f"{place} already exists; use --overwrite to replace it, or choose another folder")


def _write(place: Path, values: dict[str, Any]) -> None:
    with (
        writing_errors("the table", place),
        tempfile.TemporaryDirectory(prefix=".emtau-", dir=place.parent) as private,
    ):
        made = Path(private) / place.name
        made.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        made.replace(place)


def selection_values(result: SelectionResult) -> dict[str, Any]:
    """Return a selection as plain values, for programs: None for what is not known.

    ``log_likelihood``, ``held_out`` and ``expected_loss`` are in nats per row.
    """
    found = result.selection
    passes = found.passes_
    best = found.best_estimator_
    return {
        "n_components": found.best_n_components_,
        "covariance_type": found.best_covariance_type_,
        "criterion": found.criterion_,
        "rows": found.n_rows_,
        "sample_rows": found.sample_rows_,
        "passes": {"sample": passes.sample, "scoring": passes.scoring, "fits": passes.fits},
        "converged": bool(best.converged_),
        "candidates": list(map(_plain, found.table_)),
        "finalists": list(map(_plain, found.finalists_)),
        "fit": None if result.run is None else _fit_values(result.run),
    }


def _fit_values(run: RunResult) -> dict[str, Any]:
    """Return the values of the fit to all rows but K, which the config does not know."""
    return {name: value for name, value in result_values(run).items() if name != "components"}


def _plain(record: CandidateRecord) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


COLUMNS = {"bic": "BIC", "aic": "AIC", "icl": "ICL"}


def selection_table(table: SelectionTable, title: str) -> Table:
    """Return a table of candidates, ``*`` at the best one; criteria are shown above the least of each."""
    made = Table(title=title, box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    made.add_column("")
    for heading in (
        "K",
        "type",
        "p",
        "log-lik.",
        *(f"+{name}" for name in COLUMNS.values()),
        "held out",
    ):
        made.add_column(heading, justify="left" if heading == "type" else "right", no_wrap=True)
    fitted = [record for record in table if math.isfinite(record.bic)]
    least = {name: min((getattr(record, name) for record in fitted), default=0.0) for name in COLUMNS}
    for number, record in enumerate(table):
        mark = "*" if number == table.best else "!" if record.reason else ""
        shape = str(record.n_components), record.covariance_type, f"{record.parameters:,}"
        values = ["-"] * (len(COLUMNS) + 2)
        if math.isfinite(record.bic):
            above = (_above(getattr(record, name) - least[name]) for name in COLUMNS)
            held_out = f"{record.held_out:.6g}" if math.isfinite(record.held_out) else "-"
            values = [f"{record.log_likelihood:.6g}", *above, held_out]
        made.add_row(mark, *shape, *values)
    return made


def _above(value: float) -> str:
    """Return a difference of criteria in at most nine characters."""
    if value < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2e}"


def selection_lines(found: ComponentSelection) -> list[str]:
    """Return what a selection found, in sentences."""
    passes = found.passes_
    name = COLUMNS.get(found.criterion_, "the likelihood of held-out rows")
    lines = [
        f"best by {name}: {found.best_n_components_} components, {found.best_covariance_type_}",
        f"passes over {found.n_rows_:,} rows: {passes.sample} for the sample, {passes.scoring} for scores, "
        f"{passes.fits:.3g} for fits",
    ]
    reasons = [record for record in found.table_ if record.reason]
    if reasons:
        which = ", ".join(f"{each.n_components} {each.covariance_type}" for each in reasons)
        lines.append(f"could not be fitted: {which}. The first: {reasons[0].reason}")
    edge = {each.n_components for each in found.table_}
    if len(edge) > 1 and found.best_n_components_ == max(edge):
        lines.append("the best is the largest number that was tried: try larger ones too")
    return lines
