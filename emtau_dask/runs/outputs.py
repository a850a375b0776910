"""Results of a run and of a prediction, written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import dask
import numpy as np
from numpy.typing import NDArray

from emtau_dask.config.schema import RunConfig
from emtau_dask.dask_config import read_settings
from emtau_dask.data.opening import columns_of_fit
from emtau_dask.data.source import Source
from emtau_dask.em.history import FitObserver
from emtau_dask.em.predict import (
    LABELS,
    LOG_LIKELIHOODS,
    RESPONSIBILITIES,
    inliers,
    kernels_to_score,
    score_rows,
)
from emtau_dask.em.settings import marginalises
from emtau_dask.errors import features_named
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import checked_lazy
from emtau_dask.estimator.outliers import check_contamination, score_quantile
from emtau_dask.estimator.resuming import mixture_in
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.workers import shared_source
from emtau_dask.interrupts import interruptible
from emtau_dask.plot.drawing import check_matplotlib
from emtau_dask.process import threads_side_by_side
from emtau_dask.progress import watching
from emtau_dask.runs.inputs import Inputs, data_path, open_rows
from emtau_dask.runs.report import report_of_fit
from emtau_dask.storage.commits import holds_run
from emtau_dask.storage.locations import paths_at
from emtau_dask.storage.publishing import (
    RowWriter,
    check_writable,
    mark_as_of,
    new_group,
    refuse_existing,
    refuse_existing_page,
    replacing,
    run_of_page,
    run_that_wrote,
    write_page,
)
from emtau_dask.storage.stores import object_store


@dataclass(frozen=True)
class LabelOptions:
    """What is written beside the labels, and how.

    With ``outliers``, this share of the rows is labelled as outliers: the least probable ones. With
    ``overwrite`` a group that emtau wrote is replaced.
    """

    probabilities: bool = False
    scores: bool = False
    overwrite: bool = False
    outliers: float | None = None


def run_predict(
    model: str,
    data: str,
    out: Path,
    options: LabelOptions,
    *,
    array: str | None,
    columns: Sequence[str] | None,
    workers: int | None,
    progress: TextIO,
) -> NDArray[np.int64]:
    """Label stored rows with a stored model; return the rows of each label, shape (K,).

    Parameters
    ----------
    model : str
        A saved model, the folder of a run that holds ``model.zarr``, or a checkpoint.
    data, array, columns
        As for `open_rows`; by default the columns that the model was fitted to.
    out : Path
        The zarr group to write; see `write_labels`.
    options : LabelOptions
    workers : int or None
        Threads; None for one for each core.
    progress : text stream

    Raises
    ------
    EmtauError
        The model or the data cannot be read or do not fit, or ``out`` may not be replaced.
    """
    if options.outliers is not None:
        check_contamination(options.outliers)
    refuse_existing(out, options.overwrite, inputs=[model, *paths_at(data)])
    check_writable(out)
    fitted = _model_in(model)
    names = getattr(fitted, "feature_names_in_", None)
    if columns is None:
        columns = columns_of_fit(data, names)
    threads = {} if workers is None else {"num_workers": workers}
    with (
        watching(progress) as observer,
        features_named(names),
        dask.config.set(scheduler="threads", **threads),
    ):
        rows = open_rows(data, array=array, columns=columns, observer=observer)
        return write_labels(fitted, rows, out, options, observer=observer)


def _model_in(place: str) -> GaussianMixture:
    """Return the model of a path or URL: a saved one, that of a run's folder, or that of a checkpoint."""
    if holds_run(object_store(place)):
        return mixture_in(GaussianMixture, place)
    inner = Path(place, "model.zarr")
    return GaussianMixture.load(str(inner) if inner.exists() else place)


def write_labels(
    model: GaussianMixture,
    rows: Source,
    path: Path,
    options: LabelOptions,
    *,
    observer: FitObserver,
    run: str | None = None,
) -> NDArray[np.int64]:
    """Write the label of every row, and more if asked, to a zarr group; return the rows of each label, (K,).

    Parameters
    ----------
    model : GaussianMixture
        Fitted.
    rows : Source
        An addressable source of shape (N, d).
    path : Path
        The group to write, with the arrays `labels` (N,) int32, `probabilities` (N, K) float64,
        `scores` (N,) float64, in nats, and `outliers` (N,) int8, -1 for outliers and 1 for other rows.
    options : LabelOptions
    observer : FitObserver
    run : str or None
        Id of the checkpointed run whose result this is; stored in the group.

    Raises
    ------
    InvalidDataError
        The rows do not fit the model, or hold NaN or infinity.
    EmtauError
        What is at ``path`` may not be replaced.
    """
    checked_lazy(model, rows)
    missing = marginalises(model.missing)
    k = len(model.weights_)
    scorings = {"labels": LABELS}
    if options.probabilities:
        scorings["probabilities"] = RESPONSIBILITIES
    if options.scores:
        scorings["scores"] = LOG_LIKELIHOODS
    of_outliers = {}
    if options.outliers is not None:
        observer.stage("threshold of outliers", 0)
        threshold = score_quantile(model.score_samples(rows), options.outliers)
        scorings["outliers"] = inliers(threshold)
        of_outliers = {"outliers": {"contamination": options.outliers, "threshold": threshold}}
    executor = choose_executor()
    rows = shared_source(executor.client, rows, "X")
    kernels = kernels_to_score(executor.client, model.parameters_, rows.shape[0], missing=missing)
    counts = np.zeros(k, dtype=np.int64)
    observer.stage("labels", len(rows.chunk_rows))
    new = new_group(path, overwrite=options.overwrite)
    with interruptible(), threads_side_by_side(), new as group, ThreadPoolExecutor(1) as beside:
        of_run = {} if run is None else {"run": run}
        group.attrs.update({"format": "emtau-labels", "version": 1, **of_run, **of_outliers})
        writers = []
        for name, scoring in scorings.items():
            dtype = np.dtype(np.int32) if scoring is LABELS else scoring.dtype
            writers.append(RowWriter(group, name, (rows.shape[0], *scoring.row_shape(k)), dtype))
        ahead = read_settings().read_ahead_bytes
        scored = score_rows(
            rows,
            kernels,
            list(scorings.values()),
            executor,
            observer,
            missing=missing,
            read_ahead=ahead,
        )
        written: Future[NDArray[np.int64]] | None = None
        for results in scored:
            if written is not None:
                counts += written.result()
            written = beside.submit(_append, writers, results, k)
        if written is not None:
            counts += written.result()
        for writer in writers:
            writer.flush()
    return counts


def _append(
    writers: Sequence[RowWriter], results: Iterable[list[NDArray[Any]]], n_components: int
) -> NDArray[np.int64]:
    """Write what was found for chunks, their labels first, and return how many rows have each label, (K,)."""
    counts = np.zeros(n_components, dtype=np.int64)
    for of_chunk in results:
        counts += np.bincount(of_chunk[0], minlength=n_components)
        for writer, values in zip(writers, of_chunk, strict=True):
            writer.append(values)
    return counts


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
