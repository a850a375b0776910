"""Labels of stored rows, and their probabilities, scores and outliers, written chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
from numpy.typing import NDArray

from emtau_dask.cli.inputs import open_rows_or_cube
from emtau_dask.cli.row_outputs import (
    OutputForm,
    RowContent,
    RowOutput,
    RowResult,
    form_at,
    form_of_cube,
    keeping,
)
from emtau_dask.cli.verbosity import watching
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
from emtau_dask.errors import features_named
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.inputs import checked_lazy
from emtau_dask.estimator.outliers import check_contamination, score_quantile
from emtau_dask.estimator.resuming import mixture_in
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.workers import shared_source
from emtau_dask.interrupts import interruptible
from emtau_dask.process import threads_side_by_side
from emtau_dask.settings import missing_values
from emtau_dask.storage.commits import holds_run
from emtau_dask.storage.locations import CHECKPOINT, MODEL, fit_in, paths_at
from emtau_dask.storage.publishing import check_writable
from emtau_dask.storage.stores import object_store
from emtau_dask.storage.urls import plain_path


@dataclass(frozen=True)
class LabelOptions:
    """Which results are written in addition to the labels, and how.

    With ``outliers``, this share of the rows is labelled as outliers: the least probable ones. With
    ``overwrite`` a result that emtau wrote is replaced. Tables ``keep`` these columns of the input.
    ``missing`` is what NaN means, by default as in the fit.
    """

    probabilities: bool = False
    scores: bool = False
    overwrite: bool = False
    outliers: float | None = None
    keep: Sequence[str] | None = None
    missing: str | None = None

    def results(self, n_components: int) -> tuple[RowResult, ...]:
        """Return the results to write for a mixture of ``n_components`` components."""
        results = [RowResult("labels", np.dtype(np.int32), ())]
        if self.probabilities:
            results.append(RowResult("probabilities", RESPONSIBILITIES.dtype, (n_components,)))
        if self.scores:
            results.append(RowResult("scores", LOG_LIKELIHOODS.dtype, ()))
        if self.outliers is not None:
            results.append(RowResult("outliers", np.dtype(np.int8), ()))
        return tuple(results)


def run_predict(
    model: str,
    data: str,
    out: Path,
    options: LabelOptions,
    *,
    array: str | None,
    columns: Sequence[str] | None,
    features: Sequence[str] | None,
    workers: int | None,
) -> tuple[int, NDArray[np.int64]]:
    """Label stored rows with a stored model; return the number of rows, and that of each label, (K,).

    ``model`` is a saved model, a checkpoint, or the folder of a run that holds one of these. Data are as
    for `open_rows_or_cube`, by default with the columns of the fit; ``workers`` is the number of threads.
    """
    if options.outliers is not None:
        check_contamination(options.outliers)
    form = form_at(out)
    form.refuse_existing(out, options.overwrite, inputs=[model, *paths_at(data)])
    check_writable(out)
    fitted = _model_in(model)
    if options.missing is not None:
        fitted.set_params(missing=options.missing)
    names = getattr(fitted, "feature_names_in_", None)
    if columns is None:
        columns = columns_of_fit(data, names)
    if options.keep:
        results = options.results(len(fitted.weights_))
        form = keeping(form, out, data, options.keep, columns, results)
    threads = {} if workers is None else {"num_workers": workers}
    with (
        watching() as observer,
        features_named(names),
        dask.config.set(scheduler="threads", **threads),
    ):
        rows, cube = open_rows_or_cube(
            data,
            array=array,
            columns=columns,
            fitted=fitted,
            observer=observer,
            features=features,
        )
        if cube is not None:
            form = form_of_cube(out, cube, fitted.missing)
        counts = write_labels(fitted, rows, out, options, observer=observer, form=form)
        return rows.shape[0], counts


def _model_in(place: str) -> GaussianMixture:
    """Return the model at a path or URL: a saved one, that in a checkpoint, or that in a run's folder."""
    is_run = holds_run(object_store(place))
    if not is_run:
        inner = Path(plain_path(place), "model.zarr")
        place = str(inner) if inner.exists() else fit_in(place, MODEL, CHECKPOINT)
        is_run = holds_run(object_store(place))
    return mixture_in(GaussianMixture, place) if is_run else GaussianMixture.load(place)


def write_labels(
    model: GaussianMixture,
    rows: Source,
    path: Path,
    options: LabelOptions,
    *,
    observer: FitObserver,
    run: str | None = None,
    form: OutputForm | None = None,
) -> NDArray[np.int64]:
    """Write the label of every row and further results; return the number of rows of each label, (K,).

    The results are `labels` (N,) int32, `probabilities` (N, K) float64, `scores` (N,) float64, in nats, and
    `outliers` (N,) int8, -1 for outliers and 1 for other rows. Rows that the model drops have -1, NaN and 0.
    ``rows`` is a source (N, d), ``run`` the id of the checkpointed run that the result belongs to. By default
    the ending of the path decides on the ``form``.
    """
    checked_lazy(model, rows)
    missing = missing_values(model.missing)
    k = len(model.weights_)
    results = options.results(k)
    scorings = {"labels": LABELS, "probabilities": RESPONSIBILITIES, "scores": LOG_LIKELIHOODS}
    attributes: dict[str, Any] = {"format": "emtau-labels", "version": 1}
    if run is not None:
        attributes["run"] = run
    if options.outliers is not None:
        observer.stage("threshold of outliers", 0)
        threshold = score_quantile(model.score_samples(rows), options.outliers)
        scorings["outliers"] = inliers(threshold)
        attributes["outliers"] = {"contamination": options.outliers, "threshold": threshold}
    executor = choose_executor()
    rows = shared_source(executor.client, rows, "X")
    kernels = kernels_to_score(executor.client, model.parameters_, rows.shape[0], missing=missing)
    counts = np.zeros(k, dtype=np.int64)
    observer.stage("labels", len(rows.chunk_rows))
    content = RowContent(results, rows.shape[0], attributes)
    new = (form or form_at(path)).opened(path, content, options.overwrite)
    with interruptible(), threads_side_by_side(), new as output, ThreadPoolExecutor(1) as writing:
        ahead = read_settings().read_ahead_bytes
        scored = score_rows(
            rows,
            kernels,
            [scorings[each.name] for each in results],
            executor,
            observer,
            missing=missing,
            read_ahead=ahead,
        )
        written: Future[NDArray[np.int64]] | None = None
        for chunks in scored:
            if written is not None:
                counts += written.result()
            written = writing.submit(_append, output, chunks, k)
        if written is not None:
            counts += written.result()
    return counts


def _append(output: RowOutput, chunks: Iterable[list[NDArray[Any]]], n_components: int) -> NDArray[np.int64]:
    """Write the results of chunks, labels first; return the number of rows of each label, (K,)."""
    counts = np.zeros(n_components, dtype=np.int64)
    for labels, *others in chunks:
        counts += np.bincount(labels[labels >= 0], minlength=n_components)
        output.append([labels, *others])
    return counts
