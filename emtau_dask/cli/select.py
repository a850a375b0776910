"""`emtau select`: a selection from the data and settings of a config, and its results."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emtau_dask.cli.cluster import computing
from emtau_dask.cli.config import RunConfig, checked_config, estimator_of
from emtau_dask.cli.fit import inputs_within_memory
from emtau_dask.cli.options import COMPONENTS, OUTPUT, TITLES, FitOption, name_of, values_of_data
from emtau_dask.cli.outputs import (
    RunResult,
    checked_outputs,
    result_values,
    write_outputs,
    write_text,
)
from emtau_dask.cli.resuming import override_keys
from emtau_dask.cli.verbosity import watching
from emtau_dask.cli.yaml import ENDINGS
from emtau_dask.errors import CheckpointCorruptError, ConfigError, EmtauError, counted, short
from emtau_dask.estimator.inputs import BY_DEFAULT
from emtau_dask.selection.checkpoint import SelectionCheckpoint, selection_checkpoint
from emtau_dask.selection.criteria import SelectionSettings, checked_settings
from emtau_dask.selection.select import select
from emtau_dask.selection.table import LEGEND, SELECTION, CandidateRecord, ComponentSelection
from emtau_dask.storage.urls import suffix_of

FOLDER = "selection"
"""Name of the selection's checkpoint in the folder of the results."""
REFUSED = {
    "model.n_components": "give --components",
    "model.covariance_type": "give --covariance",
    "model.init": "each candidate has starts of its own",
    "output.directory": "give -o",
}
"""Keys that ``--set`` may not change, and why."""
MAX_NUMBERS = 10_000
_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})(?::(\d{1,9}))?")


def numbers_of(text: str) -> list[int]:
    """Return the numbers in a text such as ``2:20``, ``2:20:3`` or ``2,4,8``, ends included.

    Raises `ConfigError`.
    """
    numbers: list[int] = []
    for part in text.split(","):
        within = _RANGE.fullmatch(part.strip())
        if within is not None:
            first, last, step = (int(number or 1) for number in within.groups())
            if step == 0 or last < first:
                raise ConfigError(
                    f"--components {short(text)}: {part} is empty; give the smaller number first"
                )
            if (last - first) // step >= MAX_NUMBERS:
                raise ConfigError(
                    f"--components {short(text)} are more than {MAX_NUMBERS:,} numbers; give fewer"
                )
            numbers += range(first, last + 1, step)
        elif re.fullmatch(r"\d{1,9}", part.strip()):
            numbers.append(int(part))
        else:
            raise ConfigError(
                f"--components is {short(text)}; give a range with both ends, such as 2:20 or 10:100:10, or "
                "numbers, such as 2,4,8"
            )
    return numbers


@dataclass(frozen=True, eq=False)
class SelectionResult:
    """A selection, the written results of its best model, and the file of the table."""

    selection: ComponentSelection
    run: RunResult
    place: Path


def config_of_largest(
    sources: Sequence[str],
    largest: int,
    given: Mapping[FitOption, str],
    overrides: Sequence[str],
) -> RunConfig:
    """Return the config of a fit of the largest candidate; its other settings are those of all candidates.

    Raises `ConfigError` for a value that is not allowed, and a key that candidates do not share.
    """
    for source in sources:
        if suffix_of(source).lower() in ENDINGS:
            raise ConfigError(f"{source} has the name of a config; give data to emtau select")
    for key in override_keys(overrides):
        for refused, why in REFUSED.items():
            if key == refused or key.startswith(f"{refused}."):
                raise ConfigError(f"--set {key} cannot be given to emtau select: {why}")
    given = {OUTPUT: f"runs/{name_of(sources[0])}-best", **given, COMPONENTS: str(largest)}
    return checked_config(values_of_data(sources, given, overrides), TITLES)


def settings_of(
    config: RunConfig,
    n_components: Sequence[int],
    covariance_types: Sequence[str],
    criterion: str,
    sample_rows: int | None,
    finalists: int,
) -> SelectionSettings:
    """Return the settings of a selection; raises as `select_components`."""
    template = estimator_of(config).set_params(checkpoint=None)
    try:
        return checked_settings(
            n_components, covariance_types, criterion, None, template, sample_rows, finalists
        )
    except ConfigError as error:
        message = str(error).replace("n_components", "--components")
        raise ConfigError(message.replace("covariance_types", "--covariance")) from error


def run_selection(config: RunConfig, settings: SelectionSettings, *, overwrite: bool) -> SelectionResult:
    """Run a selection, and write the best model, its labels and the table."""
    directory = Path(config.output.directory)
    checkpoint = selection_checkpoint(config.checkpoint.path or directory / FOLDER)
    assert checkpoint is not None
    if overwrite:
        _remove(checkpoint)
    run, place = _selection_id(checkpoint), directory / SELECTION
    outputs = checked_outputs(config, overwrite=overwrite, run=run)
    if place.exists() and not ((overwrite or run is not None) and place.is_file()):
        raise EmtauError(f"{place} already exists; use --overwrite to replace it, or another folder: -o")
    inputs, plan = inputs_within_memory(config, overwrite=False)
    with watching() as observer, computing(config.cluster, observer, plan.settings):
        data = {"X": inputs.data, "sample_weight": inputs.weights, "chosen": BY_DEFAULT}
        selection = select(settings, data, checkpoint=checkpoint, observer=observer)
    best = selection.best_estimator_
    chosen = {name: getattr(best, name) for name in ("n_components", "covariance_type")}
    model = config.model.model_copy(update=chosen)
    outputs = replace(outputs, config=config.model_copy(update={"model": model}))
    run, table = _selection_id(checkpoint), selection.table_
    written = write_outputs(outputs, best, inputs, run=run, selection=table)
    result = SelectionResult(selection, written, place)
    text = json.dumps(selection_values(result), indent=2, allow_nan=False)
    write_text(place, f"{text}\n", "the table")
    return result


def _selection_id(checkpoint: SelectionCheckpoint) -> str | None:
    entry = checkpoint.entry()
    return None if entry is None else entry.id


def _remove(checkpoint: SelectionCheckpoint) -> None:
    """Remove a stored selection, also a damaged one, and nothing else."""
    try:
        exists = checkpoint.entry() is not None
    except CheckpointCorruptError:
        exists = True
    if exists:
        checkpoint.remove()


def selection_values(result: SelectionResult) -> dict[str, Any]:
    """Return a selection as values for JSON; an unknown value is None.

    ``log_likelihood``, ``held_out`` and ``expected_loss`` are per row.
    """
    selection, best = result.selection, result.selection.best_estimator_
    passes = selection.passes_
    return {
        "n_components": selection.best_n_components_,
        "covariance_type": selection.best_covariance_type_,
        "criterion": selection.criterion_,
        "rows": selection.n_rows_,
        "sample_rows": selection.sample_rows_,
        "passes": {"sample": passes.sample, "scoring": passes.scoring, "fits": passes.fits},
        "converged": bool(best.converged_),
        "candidates": list(map(_plain, selection.table_)),
        "finalists": list(map(_plain, selection.finalists_)),
        "fit": result_values(result.run),
    }


def _plain(record: CandidateRecord) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(record).items()
    }


def summary_lines(result: SelectionResult) -> list[str]:
    """Return the candidates, the choice, the places of the results, and what to do next."""
    selection, outputs = result.selection, result.run.outputs
    sample = counted(selection.sample_rows_, "row")
    tables = [selection.table_.text(f"fits to a sample of {sample}:")]
    if selection.finalists_:
        tables.append(selection.finalists_.text("fits to all rows:"))
    places = {**outputs.places, "table": result.place}
    saved = [f"{what} saved in {path}" for what, path in places.items()]
    folder = shlex.quote(outputs.config.output.directory)
    next_ = [f"next: emtau inspect {folder}, or {outputs.prediction}"]
    lines = [*(line for table in tables for line in table.splitlines()), LEGEND, *selection_lines(selection)]
    return [*lines, *saved, *(next_ if "model" in outputs.places else ())]


def selection_lines(selection: ComponentSelection) -> list[str]:
    """Return the result of a selection in sentences."""
    passes = selection.passes_
    lines = [
        f"best by {selection.table_.criterion_title}: {counted(selection.best_n_components_, 'component')}, "
        f"{selection.best_covariance_type_} covariance",
        f"passes over {counted(selection.n_rows_, 'row')}: {passes.sample} for the sample, "
        f"{passes.scoring} for scores, {passes.fits:.3g} for fits",
    ]
    reasons = [record for record in selection.table_ if record.reason]
    if reasons:
        which = ", ".join(f"K = {each.n_components} ({each.covariance_type})" for each in reasons)
        lines.append(f"could not be fitted: {which}. The first: {reasons[0].reason}")
    split = [
        f"K = {each.n_components} ({each.covariance_type})" for each in selection.table_ if each.split_from
    ]
    if split:
        lines.append(
            f"fitted from a split of a smaller mixture, which was better at first: {', '.join(split)}"
        )
    numbers = {each.n_components for each in selection.table_}
    if len(numbers) > 1 and selection.best_n_components_ == (most := max(numbers)):
        lines.append(f"that is the largest number that was tried; try larger ones, too: -k {most}:{2 * most}")
    return lines
