"""The results of a run: where its `output` wants them, and what is written there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from emtau_dask.config import RunConfig
from emtau_dask.estimator import GaussianMixture, watching
from emtau_dask.io.output import (
    check_writable,
    mark_as_of,
    refuse_existing,
    refuse_existing_page,
    replacing,
    run_of_page,
    run_that_wrote,
    write_page,
)
from emtau_dask.io.sources import paths_at
from emtau_dask.plot import check_matplotlib
from emtau_dask.runs.inputs import Inputs, data_path
from emtau_dask.runs.predict import LabelOptions, write_labels
from emtau_dask.runs.report import report_of_fit


@dataclass(frozen=True)
class Outputs:
    """Where the results of a run go: None for a result that is not wanted."""

    config: RunConfig
    model: Path | None
    labels: Path | None
    report: Path | None
    overwrite: bool

    def replaceable(self, path: Path, run: str | None) -> bool:
        """Return whether results at a path may be replaced; those of the run itself always may."""
        wrote = run_of_page if path == self.report else run_that_wrote
        return self.overwrite or (run is not None and wrote(path) == run)


@dataclass(frozen=True, eq=False)
class RunResult:
    """The fitted model of a run, its data, and where its results are.

    ``label_counts``, of shape (K,), has the rows of each label, where labels were written.
    """

    model: GaussianMixture
    inputs: Inputs
    outputs: Outputs
    label_counts: NDArray[np.int64] | None


def checked_outputs(config: RunConfig, *, overwrite: bool, run: str | None = None) -> Outputs:
    """Return where the results of a config go; ``run`` is the id of a checkpointed run.

    Raises
    ------
    EmtauError
        One of them may not or cannot be written.
    """
    output, data = config.output, config.data
    model = output.place(output.model) if output.model else None
    labels = output.place(output.labels) if output.labels else None
    report = output.place(output.report) if output.report else None
    outputs = Outputs(config, model, labels, report, overwrite)
    beside = (data.weights, data.labels, config.checkpoint.path)
    read = [*paths_at(data_path(config)), *(name for name in beside if name)]
    for path in (model, labels):
        if path is not None:
            refuse_existing(path, outputs.replaceable(path, run), inputs=read)
            check_writable(path)
    if report is not None:
        check_matplotlib()
        others = [path for path in (model, labels) if path is not None]
        refuse_existing_page(report, outputs.replaceable(report, run), inputs=[*read, *others])
        check_writable(report)
    if model is not None and labels is not None:
        refuse_existing(labels, outputs.replaceable(labels, run), inputs=[model])
    return outputs


def write_outputs(
    outputs: Outputs, model: GaussianMixture, inputs: Inputs, *, run: str | None, progress: TextIO
) -> RunResult:
    """Write the results that are wanted; they store ``run``, the id of a checkpointed run.

    Labels are computed where dask computes; see `computing`.
    """
    if outputs.model is not None:
        with replacing(outputs.model, overwrite=outputs.replaceable(outputs.model, run)) as private:
            model.save(str(private))
            mark_as_of(private, run)
    counts = None
    if outputs.labels is not None:
        output = outputs.config.output
        overwrite = outputs.replaceable(outputs.labels, run)
        options = LabelOptions(output.probabilities, output.scores, overwrite)
        with watching(progress) as observer:
            counts = write_labels(model, inputs.rows, outputs.labels, options, run=run, observer=observer)
    if outputs.report is not None:
        with watching(progress) as observer:
            page = report_of_fit(outputs.config, model, inputs, run=run, observer=observer)
        write_page(outputs.report, page, overwrite=outputs.replaceable(outputs.report, run))
    return RunResult(model, inputs, outputs, counts)


def result_values(result: RunResult) -> dict[str, Any]:
    """Return a result as plain values, for programs: None for what is not known and what was not written.

    ``lower_bound`` and ``gap`` are in nats per row, ``work`` in passes over the rows.
    """
    model, outputs = result.model, result.outputs
    rows, features = result.inputs.rows.shape
    numbers = {"lower_bound": model.lower_bound_, "gap": model.gap_, "work": model.history_.work}
    known = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
    places = {"model": outputs.model, "labels": outputs.labels, "report": outputs.report}
    return {
        "components": outputs.config.model.n_components,
        "rows": rows,
        "features": features,
        **known,
        "converged": bool(model.converged_),
        "stop_reason": model.stop_reason_,
        "iterations": model.n_iter_,
        **{name: None if place is None else str(place) for name, place in places.items()},
    }
