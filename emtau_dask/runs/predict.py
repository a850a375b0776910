"""Labels, responsibilities and log-likelihoods of any number of rows, streamed to a zarr group."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.em import LABELS, LOG_LIKELIHOODS, RESPONSIBILITIES, LoadedChunk, Scoring, score_chunk
from emtau_dask.estimator import checked_lazy
from emtau_dask.execution import interrupts_as_they_are, threads_side_by_side
from emtau_dask.io.output import RowWriter, new_group, rows_of_bytes
from emtau_dask.io.sources import ChunkPlace, ChunkReader, Source, places_of
from emtau_dask.mixture.estep import KernelPlan, plan_kernel

if TYPE_CHECKING:
    from emtau_dask.em import FitObserver
    from emtau_dask.estimator import GaussianMixture


def write_labels(
    model: GaussianMixture,
    rows: Source,
    path: Path,
    *,
    observer: FitObserver,
    probabilities: bool = False,
    scores: bool = False,
    workers: int | None = None,
    run: str | None = None,
    overwrite: bool = False,
) -> NDArray[np.int64]:
    """Label every row and write the labels, and more if asked, to a zarr v3 group.

    Parameters
    ----------
    model : GaussianMixture
        A fitted model.
    rows : Source
        An addressable source of shape (N, d).
    path : Path
        Where the group is written, with the arrays `labels` (N,) int32, `probabilities`
        (N, K) float64 and `scores` (N,) float64, in nats.
    observer : FitObserver
        Told of every chunk.
    probabilities, scores : bool
        Which of these to write beside the labels.
    workers : int or None
        Chunks worked on at a time, so many are held in memory; None: one for each core.
    run : str or None
        Id of the checkpointed run whose result this is, to be noted in the group.
    overwrite : bool
        Replace zarr data at `path`.

    Returns
    -------
    ndarray of shape (K,)
        Rows of each label.

    Raises
    ------
    InvalidDataError
        If the rows do not fit the model, or hold NaN or infinity.
    EmtauError
        If something at `path` may not be replaced.
    """
    checked_lazy(model, rows)
    k = len(model.weights_)
    outputs = {"labels": (LABELS, np.dtype(np.int32))}
    if probabilities:
        outputs["probabilities"] = (RESPONSIBILITIES, RESPONSIBILITIES.dtype)
    if scores:
        outputs["scores"] = (LOG_LIKELIHOODS, LOG_LIKELIHOODS.dtype)
    counts = np.zeros(k, dtype=np.int64)
    observer.stage("labels", len(rows.chunk_rows))
    scorings = [scoring for scoring, _ in outputs.values()]
    with (
        interrupts_as_they_are(),
        threads_side_by_side(),
        new_group(path, overwrite=overwrite) as group,
    ):
        scorer = _Scorer(rows.reader(), rows.chunk_rows, plan_kernel(model.parameters_), scorings)
        of_run = {} if run is None else {"run": run}
        group.attrs.update({"format": "emtau-labels", "version": 1, **of_run})
        writers = []
        for name, (scoring, dtype) in outputs.items():
            shape = scoring.row_shape(k)
            row_bytes = dtype.itemsize * int(np.prod(shape))
            chunk_rows = rows_of_bytes(row_bytes)
            writers.append(RowWriter(group, name, (rows.shape[0], *shape), dtype, chunk_rows=chunk_rows))
        for computed in _in_order(scorer, workers):
            for writer, values in zip(writers, computed, strict=True):
                writer.append(values)
            counts += np.bincount(computed[0], minlength=k)
            observer.chunks_done(1)
        for writer in writers:
            writer.flush()
    return counts


class _Scorer:
    """Computes the outputs of one chunk."""

    def __init__(
        self,
        reader: ChunkReader,
        chunk_rows: Sequence[int],
        plan: KernelPlan,
        scorings: Sequence[Scoring],
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._scorings = scorings
        self.places = list(places_of(chunk_rows).values())

    def __call__(self, place: ChunkPlace) -> list[NDArray[Any]]:
        rows, bytes_read = self._reader.load(place, [])
        loaded = LoadedChunk(rows, None, None, place.start, bytes_read, place.chunk)
        return score_chunk(loaded, self._plan, self._scorings)


def _in_order(scorer: _Scorer, workers: int | None) -> Iterator[list[NDArray[Any]]]:
    """Yield the results of all chunks in order, computing a few chunks at a time."""
    workers = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[list[NDArray[Any]]]] = deque()
        try:
            for place in scorer.places:
                if len(pending) == workers:
                    yield pending.popleft().result()
                pending.append(pool.submit(scorer, place))
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
