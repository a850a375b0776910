"""The problem: the rows, their weights, the shape of the mixture, and passes over the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.cache import RowCache
from emtau_dask.data.chunk import (
    LARGEST,
    WEIGHTS,
    ChunkDigest,
    ChunkLoader,
    LoadedChunk,
    Positions,
    chunk_digest,
    loaded_bytes,
)
from emtau_dask.data.source import (
    ChunkRange,
    ChunkReader,
    Loaded,
    Source,
    chunk_ranges,
    is_in_memory,
    is_stored,
)
from emtau_dask.em.history import FitObserver, SilentObserver
from emtau_dask.em.verification import ChunkTask, DataVerifier, DigestingTask
from emtau_dask.errors import AbsentFeatureError, InvalidDataError, UnusableRowError, counted
from emtau_dask.execution.executor import NO_SOURCE, AheadBudget, ChunkInput, Executor, MapReduce
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.linalg import Floats, Ints
from emtau_dask.settings import DROP, RAISE

T = TypeVar("T")
SCAN_ROWS = 2**12
"""Rows of a block that are checked at a time."""
MAX_INTERPRETED = 2**18
"""Maximum products of features and coefficients of a chunk that take less time than Python's own work for the
chunk, during which the interpreter's lock is held (`benchmarks/small_chunks.py`)."""
MAX_ALONE = 2**24
"""The same for a pass over a single chunk, which no other thread could shorten. They take milliseconds, for
which an interrupt waits."""


def chunk_costs(source: Source) -> dict[int, float]:
    """Return the number of values of each chunk with rows, by chunk."""
    width = math.prod(source.shape[1:])
    return {chunk: float(rows * width) for chunk, rows in enumerate(source.chunk_rows) if rows}


def ignore_sample(rows: Floats, numbers: Ints) -> None:
    """Do nothing with the rows of a random sample."""


@dataclass(frozen=True, eq=False)
class Context:
    """The resources of a process during a fit, see `em.fit.open_context`; ``read_ahead`` is in bytes.

    ``sampled`` gets the rows (m, d) and the row numbers (m,) of each random sample of all rows.
    """

    observer: FitObserver = field(default_factory=SilentObserver)
    cache: RowCache | None = None
    read_ahead: int = 0
    positions: Positions = field(default_factory=Positions)
    verifier: DataVerifier = field(default_factory=DataVerifier)
    sampled: Callable[[Floats, Ints], None] = ignore_sample


@dataclass(frozen=True)
class Problem:
    """The data and the shape of the mixture; counts are of rows that take part.

    Attributes
    ----------
    rows : Source
        (N, d).
    weights : Source or None
        (N,), in the same chunks.
    n_components : int
    structure : CovarianceStructure
    n_rows : int
        Number of rows that take part: of positive weight, and without NaN if ``missing`` is ``"drop"``.
    total_weight : float
        ``Σ s_n``.
    executor : Executor
        Runs the passes over the rows.
    context : Context
    compiled : bool
        Whether the compiled loops are used where they can be.
    missing : {"raise", "drop", "marginalise"}
    """

    rows: Source
    weights: Source | None
    n_components: int
    structure: CovarianceStructure
    n_rows: int
    total_weight: float
    executor: Executor
    context: Context
    compiled: bool = False
    missing: str = RAISE

    @property
    def n_features(self) -> int:
        """Number of features d."""
        return self.rows.shape[1]

    @property
    def notes(self) -> tuple[str, ...]:
        """How many rows take no part, and why; () if all do."""
        n_all = self.rows.shape[0]
        if n_all == self.n_rows:
            return ()
        why = {"missing values": self.missing == DROP, "weight 0": self.weights is not None}
        named = " or ".join(reason for reason, possible in why.items() if possible)
        return (f"{n_all - self.n_rows:,} of {counted(n_all, 'row')} left out: {named}",)

    @cached_property
    def chunk_ranges(self) -> dict[int, ChunkRange]:
        """The ranges of the chunks with rows, by chunk."""
        return chunk_ranges(self.rows.chunk_rows)

    @property
    def chunks(self) -> list[int]:
        """The numbers of the chunks with rows."""
        return list(self.chunk_ranges)

    @cached_property
    def costs(self) -> dict[int, float]:
        """See `chunk_costs`."""
        return chunk_costs(self.rows)

    @property
    def sources(self) -> list[Source]:
        """The sources that a pass reads."""
        return [self.rows] if self.weights is None else [self.rows, self.weights]

    @cached_property
    def ahead(self) -> AheadBudget | None:
        """The budget of a pass for reading ahead; None if rows are not stored, or if no bytes are allowed."""
        if not self.context.read_ahead or not is_stored(self.rows):
            return None
        return AheadBudget(self.context.read_ahead, loaded_bytes(self.sources, self.rows.chunk_rows))

    @property
    def loader(self) -> ChunkLoader:
        """The loader of chunks in tasks, with a cache of active rows unless all rows are in memory."""
        return ChunkLoader(
            self.rows.reader(),
            None if self.weights is None else self.weights.reader(),
            self.context.cache if is_stored(self.rows) or self.rows.computed_again else None,
            self.context.cache,
            self.context.positions,
            with_digests=True,
            missing=self.missing,
        )

    def is_interpreted(self, costs: Mapping[int, float]) -> bool:
        """Return whether chunks are in memory, and so small that the calling thread alone is faster."""
        if not costs or not all(map(is_in_memory, self.sources)):
            return False
        rows = math.fsum(costs.values()) / (len(costs) * self.n_features)
        products = rows * self.n_components * self.structure.n_row_features(self.n_features)
        return products < (MAX_ALONE if len(costs) == 1 else MAX_INTERPRETED)

    def map_reduce(
        self,
        task: DigestingTask[Any, T],
        merge: Callable[[Iterable[T]], T],
        *,
        name: str,
        stage: str,
        items: Mapping[int, Any] | None = None,
        costs: Mapping[int, float] | None = None,
        extra: ChunkInput | None = None,
    ) -> T | None:
        """Run a pass over the rows, see `MapReduce`; return the merged result, None without items.

        By default ``items`` are `chunk_ranges`, and ``costs`` are `Problem.costs`. A task gets the blocks of
        the ``extra`` source (if given), of the rows, and of the weights. With one nothing is read ahead.

        Raises
        ------
        InvalidDataError, CheckpointMismatchError
            A chunk has other values than before; see `DataVerifier.compare`.
        """
        sources = self.sources if extra is None else [extra, *self.sources]
        costs = self.costs if costs is None else costs
        work = MapReduce(
            task,
            merge,
            sources,
            self.chunk_ranges if items is None else items,
            name,
            stage,
            costs,
            self.ahead if extra in (None, NO_SOURCE) else None,
            self.is_interpreted(costs),
        )
        return self.context.verifier.run(self.executor, work, self.context.observer, self.chunk_ranges)


class _WeightTotals(NamedTuple):
    weight: float
    n_rows: int
    first_bad: str | None


def _merge_weights(a: _WeightTotals, b: _WeightTotals) -> _WeightTotals:
    return _WeightTotals(a.weight + b.weight, a.n_rows + b.n_rows, a.first_bad or b.first_bad)


def _weight_totals(chunk_range: ChunkRange, weights: NDArray[Any]) -> _WeightTotals:
    good = (weights >= 0) & (weights <= LARGEST)
    if not good.all():
        position = int(np.argmin(good))
        where = f"row {chunk_range.start + position} (chunk {chunk_range.chunk})"
        return _WeightTotals(0.0, 0, f"sample_weight is {weights[position]} at {where}")
    return _WeightTotals(math.fsum(weights), int(np.count_nonzero(weights > 0)), None)


@dataclass(frozen=True)
class WeightsTask(DigestingTask[Loaded, T]):
    """A task on the weights of a chunk alone: ``function`` of its range and its weights is the result."""

    reader: ChunkReader
    function: Callable[[ChunkRange, NDArray[Any]], T]

    def read(self, item: ChunkRange, *blocks: Sequence[NDArray[Any]]) -> Loaded:
        """Return the weights."""
        return self.reader.load(item, *blocks)

    def compute(self, item: ChunkRange, found: Loaded) -> T:
        """Return the function's result."""
        return self.function(item, found.values)

    def digests(self, item: ChunkRange, found: Loaded) -> tuple[ChunkDigest, ...]:
        """Return their digest."""
        return (chunk_digest(WEIGHTS, item.chunk, found),)


def check_counts(rows: Source, weights: Source | None, n_components: int) -> None:
    """Raise `InvalidDataError` for no rows, fewer rows than components, or another number of weights."""
    n_rows = rows.shape[0]
    if n_rows == 0:
        raise InvalidDataError(
            f"Found array with 0 sample(s) (shape={rows.shape}) while a minimum of 1 is required."
        )
    if n_rows < n_components:
        raise _too_few_rows(n_components, n_rows, "")
    if weights is not None and weights.shape[0] != n_rows:
        raise InvalidDataError(
            f"sample_weight has {counted(weights.shape[0], 'value')}, X has {counted(n_rows, 'row')}; give "
            "one for each row."
        )


def make_problem(
    rows: Source,
    weights: Source | None,
    n_components: int,
    structure: CovarianceStructure,
    executor: Executor,
    context: Context,
    *,
    compiled: bool,
    missing: str = RAISE,
) -> Problem:
    """Return the problem after checking it; reads the weights, if there are any.

    If rows with NaN are dropped, one pass over the rows counts the others.

    Raises
    ------
    InvalidDataError
        No rows, fewer rows that take part than components, or weights that
        are negative, not finite, all zero, or not one for each row.
    """
    check_counts(rows, weights, n_components)
    n_rows, total_weight = rows.shape[0], float(rows.shape[0])
    if weights is not None:
        weights = weights.aligned(rows.chunk_rows)
        ranges = chunk_ranges(rows.chunk_rows)
        work = MapReduce(
            WeightsTask(weights.reader(), _weight_totals),
            partial(reduce, _merge_weights),
            [weights],
            ranges,
            name="weights",
            stage="weights",
            costs=chunk_costs(weights),
        )
        totals = context.verifier.run(executor, work, context.observer, ranges)
        assert totals is not None
        total_weight, n_rows, first_bad = totals
        if first_bad is not None:
            raise InvalidDataError(
                f"{first_bad}; weights must be finite and at least 0 (and at most {LARGEST:g}). Where they "
                "are missing give 0, as by .fillna(0): rows of weight 0 take no part."
            )
        if n_rows == 0:
            raise InvalidDataError(
                "every sample_weight is zero; at least one row must have a positive weight."
            )
    problem = Problem(
        rows, weights, n_components, structure, n_rows, total_weight, executor, context, compiled, missing
    )
    if missing == DROP:
        problem = _without_incomplete(problem)
    if problem.n_rows < n_components:
        which = " of positive weight" if missing != DROP else " without missing values"
        raise _too_few_rows(n_components, problem.n_rows, which)
    return problem


class _RowTotals(NamedTuple):
    """Of the rows that take part: their number and weight; of all: how many lack each feature, (d,)."""

    present: int
    weight: float
    lacking: Ints


def _merge_rows(a: _RowTotals, b: _RowTotals) -> _RowTotals:
    return _RowTotals(a.present + b.present, a.weight + b.weight, a.lacking + b.lacking)


@dataclass(frozen=True)
class _CountTask(ChunkTask[_RowTotals]):
    loader: ChunkLoader

    def compute(self, item: ChunkRange, found: LoadedChunk) -> _RowTotals:
        positions = found.positions()
        weights = found.weights_at(positions)
        weight = float(len(positions)) if weights is None else math.fsum(weights)
        lacking = np.zeros(found.rows.shape[1], np.intp)
        if len(positions) < item.n_rows:
            for begin in range(0, item.n_rows, SCAN_ROWS):
                lacking += np.isnan(found.rows[begin : begin + SCAN_ROWS]).sum(axis=0)
        return _RowTotals(len(positions), weight, lacking)


def _without_incomplete(problem: Problem) -> Problem:
    """Return the problem with the counts of the rows that have no NaN; raises where there is none."""
    totals = problem.map_reduce(
        _CountTask(problem.loader),
        partial(reduce, _merge_rows),
        name="count",
        stage="counting complete rows",
    )
    assert totals is not None
    if not totals.present:
        rarest = int(totals.lacking.argmax())
        if totals.lacking.min() == problem.rows.shape[0]:
            raise AbsentFeatureError(
                "every row lacks every feature, so that missing='drop' leaves none. Give data with values: a "
                "cube, for instance, that is not land alone."
            )
        share = totals.lacking[rarest] / problem.rows.shape[0]
        raise AbsentFeatureError(
            f"no row is complete, so that missing='drop' leaves none; feature {rarest} is missing in "
            f"{share:.1%} of the rows. Leave such features out, or set missing='marginalise'."
        )
    return replace(problem, n_rows=totals.present, total_weight=totals.weight)


def _too_few_rows(n_components: int, n_rows: int, counted: str) -> InvalidDataError:
    return InvalidDataError(
        f"Expected n_samples >= n_components but got n_components = {n_components}, "
        f"n_samples = {n_rows}{counted}. Lower n_components or give more rows."
    )


def _earlier(a: UnusableRowError | None, b: UnusableRowError | None) -> UnusableRowError | None:
    return a or b


@dataclass(frozen=True)
class _ScanTask(ChunkTask[UnusableRowError | None]):
    loader: ChunkLoader

    def compute(self, item: ChunkRange, found: LoadedChunk) -> UnusableRowError | None:
        positions = found.positions()
        try:
            for _ in found.blocks(positions, SCAN_ROWS):
                pass
        except UnusableRowError as error:
            return error
        return None


@contextmanager
def first_unusable_row_named(problem: Problem) -> Iterator[None]:
    """Replace an `UnusableRowError` of the block by that of the first unusable row of all.

    Tasks run in parallel, so a pass may find a later row first; a second pass then checks all rows. If a
    chunk has other values than before, that error is raised.
    """
    try:
        yield
    except UnusableRowError as error:
        first = problem.map_reduce(
            _ScanTask(problem.loader),
            partial(reduce, _earlier),
            name="scan",
            stage="looking for the first unusable row",
        )
        raise (first or error) from None
