"""The outputs of commands: model, labels and report of a run, its values for JSON, and config files."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.cli.config import RESULTS, RunConfig
from emtau_dask.cli.inputs import Inputs
from emtau_dask.cli.predict import LabelOptions, write_labels
from emtau_dask.cli.report import report_of_fit
from emtau_dask.cli.resuming import portable
from emtau_dask.cli.row_outputs import check_cube_name, form_at, form_of_cube
from emtau_dask.cli.verbosity import watching
from emtau_dask.cli.yaml import ENDINGS, to_yaml
from emtau_dask.errors import ConfigError, EmtauError, PathTakenError, masked_values
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.plot.drawing import check_matplotlib
from emtau_dask.selection.table import SelectionTable
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.locations import paths_at
from emtau_dask.storage.publishing import (
    check_writable,
    mark_as_of,
    refuse_existing,
    refuse_existing_page,
    replacing,
    run_of_page,
    run_that_wrote,
    write_page,
)

REFUSALS = {"model": refuse_existing, "report": refuse_existing_page}
"""The checks of the places of results whose format does not depend on the name."""


@dataclass(frozen=True)
class Outputs:
    """The places of the results of a run to write, by ``"model"``, ``"labels"`` and ``"report"``."""

    config: RunConfig
    places: Mapping[str, Path]
    overwrite: bool

    @property
    def prediction(self) -> str:
        """The command that labels other rows by the model, for people."""
        model = self.places["model"]
        place = model.parent if model.name == "model.zarr" else model
        return f"emtau predict {shlex.quote(str(place))} DATA labels.zarr"

    def replaceable(self, name: str, run: str | None) -> bool:
        """Return whether the data at a result's place may be replaced; an earlier result of this run may."""
        if self.overwrite or run is None:
            return self.overwrite
        place = self.places[name]
        if name == "labels":
            return form_at(place).run_that_wrote(place) == run
        return (run_of_page if name == "report" else run_that_wrote)(place) == run


@dataclass(frozen=True, eq=False)
class RunResult:
    """The fitted model of a run, its data, and the places of its results.

    ``label_counts`` (K,) are the numbers of rows of each label; None if no labels were written.
    """

    model: GaussianMixture
    inputs: Inputs
    outputs: Outputs
    label_counts: NDArray[np.int64] | None


def checked_outputs(config: RunConfig, *, overwrite: bool, run: str | None = None) -> Outputs:
    """Return the places of a config's results; raises `EmtauError` if one may not or cannot be written.

    ``run`` is the id of a checkpointed run.
    """
    data = config.data
    outputs = Outputs(config, config.output.places, overwrite)
    read = [*paths_at(config.place), *filter(None, (data.weights, data.labels, config.checkpoint.path))]
    for name, place in outputs.places.items():
        if name == "report":
            check_matplotlib()
        if name == "labels" and data.features is not None:
            check_cube_name(place)
        refuse = REFUSALS.get(name) or form_at(place).refuse_existing
        try:
            refuse(place, outputs.replaceable(name, run), inputs=read)
        except PathTakenError as error:
            raise PathTakenError(f"{error} (-o FOLDER, or --set output.directory=FOLDER)") from error
        check_writable(place)
        read.append(str(place))
    return outputs


def write_outputs(
    outputs: Outputs,
    model: GaussianMixture,
    inputs: Inputs,
    *,
    run: str | None,
    selection: SelectionTable | None = None,
) -> RunResult:
    """Write the results; they store ``run``, the id of a checkpointed run.

    The report also shows a ``selection``. Labels are computed with the scheduler that `computing` set.
    """
    config, counts = outputs.config, None
    for name, place in outputs.places.items():
        overwrite = outputs.replaceable(name, run)
        if name == "model":
            with replacing(place, overwrite=overwrite) as private:
                model.save(str(private))
                mark_as_of(private, run, portable(config))
            continue
        with watching() as observer:
            if name == "labels":
                options = LabelOptions(config.output.probabilities, config.output.scores, overwrite)
                cube, missing = inputs.cube, config.model.missing
                form = None if cube is None else form_of_cube(place, cube, missing)
                rows = inputs.rows
                counts = write_labels(model, rows, place, options, run=run, observer=observer, form=form)
            else:
                page = report_of_fit(config, model, inputs, run=run, selection=selection, observer=observer)
                write_page(place, page, overwrite=overwrite)
    return RunResult(model, inputs, outputs, counts)


def result_values(result: RunResult) -> dict[str, Any]:
    """Return a result as values for JSON; a value that is unknown or was not written is None.

    ``lower_bound`` (the log-likelihood) and ``gap`` (what could still be gained) are nats per row, ``work``
    passes over the rows. ``left_out`` are the rows that take no part.
    """
    model, outputs = result.model, result.outputs
    rows, features = result.inputs.rows.shape
    numbers = {"lower_bound": model.lower_bound_, "gap": model.gap_, "work": model.history_.work}
    finite = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
    places = {name: outputs.places.get(name) for name in RESULTS}
    return {
        "components": outputs.config.model.n_components,
        "rows": rows,
        "features": features,
        "left_out": rows - model.history_[-1].rows if model.history_ else 0,
        **finite,
        "converged": bool(model.converged_),
        "stop_reason": model.stop_reason_,
        "iterations": model.n_iter_,
        "rows_by_label": None if result.label_counts is None else result.label_counts.tolist(),
        **{name: None if place is None else str(place) for name, place in places.items()},
    }


def save_config(content: Mapping[str, Any], path: Path, *, overwrite: bool) -> None:
    """Write the values of a config to a YAML file; an existing file may have the same contents.

    Raises `ConfigError` for a name without a config's ending, and for values with the secrets of a URL;
    `EmtauError` if another file exists and ``overwrite`` is not set.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(
            f"{path} must end in {' or '.join(ENDINGS)}, so that emtau fit reads it as a config"
        )
    if masked_values(content) != content:
        raise ConfigError(
            f"{path} would hold a secret: the user, password or query of a URL. Give credentials by the "
            "environment, or save no config"
        )
    text = to_yaml(content)
    with writing_errors("the config", path):
        if path.exists() and not overwrite and path.read_bytes() != text.encode():
            raise EmtauError(f"{path} already exists; use --overwrite to replace it, or choose another name")
    write_text(path, text, "the config")


def write_text(path: Path, text: str, what: str) -> None:
    """Write or replace a text file atomically; ``what`` is its name in an `EmtauError`."""
    with writing_errors(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".emtau-", dir=path.parent) as folder:
            private = Path(folder) / path.name
            private.write_text(text, encoding="utf-8")
            private.replace(path)
