"""Labels, responsibilities and log-likelihoods of any number of rows, streamed to a zarr group."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError
from emtau_dask.face.zarr_rows import RowWriter, new_group, rows_of_bytes
from emtau_dask.storage import ChunkReader, Source
from emtau_dask.storage.arrays import describe_bad_value

if TYPE_CHECKING:
    from emtau_dask.engine.observer import FitObserver
    from emtau_dask.face.estimator import GaussianMixture

__all__ = ["write_labels"]

BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Output:
    """One array of the group: its name, how to compute it, and its values for a row."""

    name: str
    compute: Callable[[NDArray[Any]], NDArray[Any]]
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.row_shape))


def write_labels(
    model: GaussianMixture,
    rows: Source,
    path: Path,
    *,
    observer: FitObserver,
    probabilities: bool = False,
    scores: bool = False,
    workers: int | None = None,
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
    _check_features(model, rows)
    k = len(model.weights_)
    outputs = [_Output("labels", model.predict, np.dtype(np.int32))]
    if probabilities:
        outputs.append(_Output("probabilities", model.predict_proba, np.dtype(np.float64), (k,)))
    if scores:
        outputs.append(_Output("scores", model.score_samples, np.dtype(np.float64)))
    counts = np.zeros(k, dtype=np.int64)
    observer.stage("labels", len(rows.chunk_rows))
    with new_group(path, overwrite=overwrite) as group:
        writers = [
            RowWriter(
                group,
                output.name,
                (rows.shape[0], *output.row_shape),
                output.dtype,
                chunk_rows=rows_of_bytes(output.row_bytes),
            )
            for output in outputs
        ]
        for computed in _in_order(_Scorer(rows.reader(), rows.chunk_rows, outputs), workers):
            for writer, values in zip(writers, computed, strict=True):
                writer.append(values)
            counts += np.bincount(computed[0], minlength=k)
            observer.chunk_done()
        for writer in writers:
            writer.flush()
    return counts


def _check_features(model: GaussianMixture, rows: Source) -> None:
    if len(rows.shape) != 2 or rows.shape[1] != model.n_features_in_:
        raise InvalidDataError(
            f"the data has shape {rows.shape}, but the model was fitted to rows of {model.n_features_in_} "
            "features; give data with the same features"
        )


class _Scorer:
    """Computes the outputs of one chunk, some rows at a time."""

    def __init__(self, reader: ChunkReader, chunk_rows: Sequence[int], outputs: Sequence[_Output]) -> None:
        self._reader = reader
        self._outputs = outputs
        self._starts = (0, *accumulate(chunk_rows))
        self.chunks = len(chunk_rows)

    def __call__(self, chunk: int) -> list[NDArray[Any]]:
        rows, _ = self._reader.load(chunk, [])
        step = rows_of_bytes(rows.shape[1] * 8, BLOCK_BYTES)
        results = [np.empty((len(rows), *output.row_shape), output.dtype) for output in self._outputs]
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            self._check_finite(chunk, start, block)
            for output, result in zip(self._outputs, results, strict=True):
                result[start : start + step] = output.compute(block)
        return results

    def _check_finite(self, chunk: int, start: int, block: NDArray[Any]) -> None:
        if np.isfinite(block).all():
            return
        first = self._starts[chunk] + start
        row, value = describe_bad_value(block, np.arange(first, first + len(block)))
        raise InvalidDataError(
            f"row {row} (chunk {chunk}, its row {row - self._starts[chunk]}) of the data contains {value}. "
            "Every value must be finite: drop or impute the row."
        )


def _in_order(scorer: _Scorer, workers: int | None) -> Iterator[list[NDArray[Any]]]:
    """Yield the results of all chunks in order, computing a few chunks at a time."""
    workers = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[list[NDArray[Any]]]] = deque()
        try:
            for chunk in range(scorer.chunks):
                if len(pending) == workers:
                    yield pending.popleft().result()
                pending.append(pool.submit(scorer, chunk))
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
