"""Scoring rows with a fitted mixture, block by block: labels, responsibilities, log-likelihoods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from emtau_dask.data.chunk import ChunkLoader, LoadedChunk, complete_rows, loaded_bytes
from emtau_dask.data.dask_arrays import check_dense
from emtau_dask.data.source import ChunkRange, Source, chunk_ranges, is_stored
from emtau_dask.em.compiling import check_compiler, worth_compiling_once
from emtau_dask.em.history import FitObserver, SilentObserver
from emtau_dask.em.problem import chunk_costs
from emtau_dask.errors import UnusableRowError, features_named
from emtau_dask.execution.executor import AheadBudget, Executor, MapReduce, PassObserver, ReadingTask
from emtau_dask.kernels.dispatch import RowKernels, Scorer, scoring_kernels
from emtau_dask.mixture.missing import Conditioning, Observed
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.settings import DROP, MARGINALISE, RAISE

RESULT_BYTES, MAX_RESULT_BYTES = 2**26, 2**30
"""Default and maximum size (bytes) of the results of one pass of `score_rows`. A pass has more than the
default if there would be fewer chunks than workers."""


@dataclass(frozen=True)
class Scoring:
    """One thing to compute for every row.

    Attributes
    ----------
    name : str
    pick : callable (Observed) -> ndarray
        Of n rows.
    dtype : dtype
    row_shape : callable (K) -> tuple of int
        The shape of one row's values.
    of_responsibilities : bool
        Whether ``pick`` needs them.
    absent : float
        The value of rows that are dropped.
    by_pattern : bool
        Whether ``pick`` needs rows that lack the same features together.
    """

    name: str
    pick: Callable[[Observed], NDArray[Any]]
    dtype: np.dtype[Any]
    row_shape: Callable[[int], tuple[int, ...]]
    of_responsibilities: bool = True
    absent: float = math.nan
    by_pattern: bool = False

    @property
    def __name__(self) -> str:
        """The name of dask's tasks."""
        return f"emtau-{self.name}"

    def __call__(
        self,
        rows: NDArray[Any],
        kernels: RowKernels,
        names: Sequence[str] | None = None,
        missing: str = RAISE,
        place: tuple[int, int | None] = (0, 0),
    ) -> NDArray[Any]:
        """Return the values for ``rows`` (n, d), see `score_chunk`; ``missing`` says what NaN means.

        For messages: the ``names`` of the features, and the ``place`` of the rows, which is their chunk and
        the global number of the first row, None if it is not known.
        """
        chunk, start = place
        check_dense(rows, chunk)
        complete = complete_rows(rows) if missing == DROP else None
        present = None if complete is None else np.flatnonzero(complete)
        marginalises = missing == MARGINALISE
        loaded = LoadedChunk(rows, None, present, start, rows.nbytes, chunk, missing=marginalises)
        with features_named(names):
            return score_every_row(loaded, kernels, [self])[0]


def score_chunk(loaded: LoadedChunk, kernels: RowKernels, scorings: Sequence[Scoring]) -> list[NDArray[Any]]:
    """Return an array (n,) or (n, K) for each of ``scorings``, from one pass; see `scoring_kernels`.

    The n rows are those of the chunk that take part.

    Raises
    ------
    UnusableRowError
        A row holds NaN, infinity or a number too large to be squared, or is
        too far from every component.
    ClusterError
        The rows are scored by compiled loops, and this worker cannot compile.
    """
    if kernels.by_tiles:
        check_compiler()
    n_components, positions = kernels.plan.parameters.n_components, loaded.positions()
    results = [np.empty((len(positions), *each.row_shape(n_components)), each.dtype) for each in scorings]
    wanted = any(scoring.of_responsibilities for scoring in scorings)
    kernel: Scorer = kernels.acquire(len(positions))
    for where, rows in loaded.unchecked_blocks(positions, kernel.n_rows):
        squared, scored = kernel.score(rows, responsibilities=wanted)
        loaded.check_values(positions[where], rows, squared)
        for found in scored:
            loaded.check_log_likelihoods(positions[where][found.places], found)
            for scoring, result in zip(scorings, results, strict=True):
                result[where][found.places] = scoring.pick(found)
    kernels.release(kernel)
    return results


def score_every_row(
    loaded: LoadedChunk, kernels: RowKernels, scorings: Sequence[Scoring]
) -> list[NDArray[Any]]:
    """Return what `score_chunk` does, with `Scoring.absent` for rows of the chunk that take no part."""
    results, positions, n_rows = score_chunk(loaded, kernels, scorings), loaded.positions(), len(loaded.rows)
    if len(positions) == n_rows:
        return results
    spread = []
    for scoring, result in zip(scorings, results, strict=True):
        values = np.full((n_rows, *result.shape[1:]), scoring.absent, scoring.dtype)
        values[positions] = result
        spread.append(values)
    return spread


def kernels_to_score(
    client: Any,
    parameters: MixtureParameters,
    n_rows: float,
    *,
    missing: str = RAISE,
    by_pattern: bool = False,
) -> RowKernels:
    """Return the kernels to score ``n_rows`` rows once, NaN if unknown; see `worth_compiling_once`."""
    shape = n_rows, parameters.n_features, parameters.covariance_type, parameters.n_components
    lacking = missing == MARGINALISE
    compiled = not by_pattern and worth_compiling_once(client, *shape, missing=lacking)
    return scoring_kernels(parameters, compiled=compiled, missing=lacking)


ChunkResults = list[NDArray[Any]] | UnusableRowError
"""The results of a chunk, or its first unusable row."""


@dataclass(frozen=True, eq=False)
class _ScoringTask(ReadingTask[LoadedChunk, list[ChunkResults]]):
    loader: ChunkLoader
    kernels: RowKernels
    scorings: tuple[Scoring, ...]

    def read(self, item: ChunkRange, *blocks: Sequence[NDArray[Any]]) -> LoadedChunk:
        return self.loader.load(item, *blocks)

    def compute(self, item: ChunkRange, found: LoadedChunk) -> list[ChunkResults]:
        try:
            return [score_every_row(found, self.kernels, self.scorings)]
        except UnusableRowError as error:
            return [error]


def _concatenated(parts: Iterable[list[ChunkResults]]) -> list[ChunkResults]:
    return list(chain.from_iterable(parts))


@dataclass(frozen=True)
class _ChunkObserver:
    """Reports the chunks of several passes as those of one."""

    observer: PassObserver

    def stage(self, name: str, chunks: int) -> None:
        """Ignore."""

    def chunks_done(self, count: int) -> None:
        self.observer.chunks_done(count)


def score_rows(
    rows: Source,
    kernels: RowKernels,
    scorings: Sequence[Scoring],
    executor: Executor,
    observer: FitObserver | None = None,
    *,
    missing: str = RAISE,
    read_ahead: int = 0,
) -> Iterator[list[list[NDArray[Any]]]]:
    """Yield the results of `score_every_row` for all chunks in order, those of a pass together.

    A pass scores chunks in parallel: as many as have results of `RESULT_BYTES`, or one for each worker if
    these have at most `MAX_RESULT_BYTES`. Each row is read once.

    Parameters
    ----------
    rows : Source
        (N, d).
    kernels : RowKernels
        See `kernels_to_score`.
    scorings : sequence of Scoring
    executor : Executor
    observer : FitObserver, optional
    missing : {"raise", "drop", "marginalise"}
    read_ahead : int, default=0
        Bytes.

    Raises
    ------
    UnusableRowError
        As `score_chunk`, for the first of such rows.
    """
    chunk_observer = _ChunkObserver(observer or SilentObserver())
    ranges, costs = chunk_ranges(rows.chunk_rows), chunk_costs(rows)
    loader = ChunkLoader(rows.reader(), None, missing=missing)
    task = _ScoringTask(loader, kernels, tuple(scorings))
    ahead = None
    if read_ahead and is_stored(rows):
        ahead = AheadBudget(read_ahead, loaded_bytes([rows], rows.chunk_rows))
    n_components = kernels.plan.parameters.n_components
    width = sum(math.prod(each.row_shape(n_components)) * each.dtype.itemsize for each in scorings)
    for chunks in _parts(list(ranges), rows.chunk_rows, width, executor.workers):
        work = MapReduce(
            task,
            _concatenated,
            [rows],
            {chunk: ranges[chunk] for chunk in chunks},
            "labels",
            "labels",
            costs,
            ahead,
        )
        results = []
        for found in executor.map_reduce(work, chunk_observer) or []:
            if isinstance(found, UnusableRowError):
                raise found
            results.append(found)
        yield results


def _parts(
    chunks: Sequence[int], chunk_rows: Sequence[int], width: int, least: int
) -> Iterator[Sequence[int]]:
    """Yield the chunks of each pass; ``width`` are the bytes of a row's results."""
    begin = size = 0
    for end, chunk in enumerate(chunks):
        added, most = chunk_rows[chunk] * width, RESULT_BYTES if end - begin >= least else MAX_RESULT_BYTES
        if end > begin and size + added > most:
            yield chunks[begin:end]
            begin, size = end, 0
        size += added
    yield chunks[begin:]


def _one_value(n_components: int) -> tuple[int, ...]:
    return ()


def _one_each(n_components: int) -> tuple[int, ...]:
    return (n_components,)


def _labels(found: Observed) -> NDArray[Any]:
    return found.labels


def _responsibilities(found: Observed) -> NDArray[Any]:
    return found.responsibilities.T


def _log_likelihoods(found: Observed) -> NDArray[Any]:
    return found.log_likelihoods


def _entropies(found: Observed) -> NDArray[Any]:
    entropies: NDArray[Any] = entr(found.responsibilities).sum(axis=0)
    return entropies


def _imputed(found: Observed) -> NDArray[Any]:
    """Return the rows with expected values instead of missing ones."""
    if found.conditioning is None:
        return found.rows
    completed = np.empty((len(found.rows), found.conditioning.parameters.n_features))
    completed[:, found.conditioning.given] = found.rows
    completed[:, found.conditioning.rest] = found.conditioning.means(found.rows, found.responsibilities)
    return completed


@dataclass(frozen=True)
class _ConditionalMeans:
    """The expected values of the features that are not given; see `Conditioning.means`."""

    conditioning: Conditioning

    def __call__(self, found: Observed) -> NDArray[Any]:
        return self.conditioning.means(found.rows, found.responsibilities)

    def row_shape(self, n_components: int) -> tuple[int, ...]:
        return self.conditioning.rest.shape


@dataclass(frozen=True)
class _Inliers:
    """-1 for rows whose log-likelihood is below a threshold, else 1."""

    threshold: float

    def __call__(self, found: Observed) -> NDArray[Any]:
        return np.where(found.log_likelihoods < self.threshold, -1, 1)


def inliers(threshold: float) -> Scoring:
    """Return the scoring of rows as outliers: -1 if their log-likelihood is below a threshold, else 1.

    Dropped rows get 0.
    """
    pick = _Inliers(threshold)
    return Scoring("inliers", pick, np.dtype(np.int8), _one_value, of_responsibilities=False, absent=0)


def conditional_means(conditioning: Conditioning) -> Scoring:
    """Return the scoring of rows by the expected values of the features that are not given, (n, r)."""
    pick = _ConditionalMeans(conditioning)
    return Scoring("conditional-means", pick, np.dtype(np.float64), pick.row_shape)


def imputation(n_features: int) -> Scoring:
    """Return the scoring of rows by themselves, with expected values instead of missing ones, (n, d)."""
    return Scoring("imputed", _imputed, np.dtype(np.float64), partial(_row_of, n_features), by_pattern=True)


def _row_of(n_features: int, n_components: int) -> tuple[int, ...]:
    return (n_features,)


LABELS = Scoring("labels", _labels, np.dtype(np.intp), _one_value, of_responsibilities=False, absent=-1)
RESPONSIBILITIES = Scoring("responsibilities", _responsibilities, np.dtype(np.float64), _one_each)
ENTROPIES = Scoring("entropies", _entropies, np.dtype(np.float64), _one_value)
LOG_LIKELIHOODS = Scoring(
    "log-likelihoods", _log_likelihoods, np.dtype(np.float64), _one_value, of_responsibilities=False
)
