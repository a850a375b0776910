"""What sums the statistics of rows under a plan: compiled loops over tiles, or blocks by calls of NumPy.

Compiled loops are worth a dependency because their products need no packing and because they hold no lock.
Threads that call NumPy wait for the interpreter's lock between any two calls, so that two threads are far
from twice as fast as one. `docs/decisions/0009-compiled-tiles.md` has the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np

from emtau_dask.mixture.covariance import Moments
from emtau_dask.mixture.estep import (
    BLOCK_BYTES,
    LEAST_EXPONENT,
    MAX_BLOCK_ROWS,
    NEGLIGIBLE,
    Accumulated,
    BlockKernel,
    Form,
    KernelPlan,
    MomentSums,
    MostProbable,
    even_length,
    statistics_of_moments,
)
from emtau_dask.mixture.model import SufficientStatistics, merge
from emtau_dask.mixture.numerics import AnyArray, Floats, read_only
from emtau_dask.process import of_process

LINE_BYTES, LINES_AT_ONCE = 64, 3
"""Products take so many cache lines of each feature at a time (`mixture.compiled.products`)."""
TILE_BYTES, LEAST_TILE_LINES, MOST_TILE_LINES = 2**19 + 2**16, 9, 27
"""Bytes of a tile's features (or coordinates), and cache lines of each feature: with more, sums over rows are
longer; with up to 27, the responsibilities of 16 components stay in the nearest cache."""
ROWS_OF_SQUARES = 64
"""Rows whose squares are summed at a time: for each, a vector of one factor and three of the other stay in
the nearest cache."""
OVERFLOWING_ROWS = 512
"""Rows of a block that NumPy scores after all, with buffers beside those of the tiles."""


class Accumulator(Protocol):
    """Sums the statistics of a stream of blocks of rows."""

    @property
    def n_rows(self) -> int:
        """Rows of the largest block."""
        ...

    def accumulate(self, rows: Floats, weights: Floats | None, seen: MostProbable | None) -> Accumulated:
        """Score a block of rows (n, d) with weights (n,), add its statistics, and write ``seen`` if given."""
        ...

    def statistics(self) -> SufficientStatistics | None:
        """Return the statistics of all blocks, None where there were none."""
        ...


class RowKernels(Protocol):
    """Makes what sums the statistics of rows in tasks, under one plan."""

    @property
    def plan(self) -> KernelPlan:
        """How rows are scored."""
        ...

    @property
    def by_tiles(self) -> bool:
        """Whether compiled loops score them."""
        ...

    def made(self, n_rows: int) -> Any:
        """Return an `Accumulator` for up to ``n_rows`` rows of all blocks together."""
        ...

    def finished(self, kernel: Any) -> SufficientStatistics | None:
        """Return the statistics of one that is not to be used any more."""
        ...


class _Loops(NamedTuple):
    """The modules of compiled loops."""

    blocks: ModuleType
    features: ModuleType
    joint: ModuleType
    products: ModuleType


@cache
def _compiled() -> _Loops | str:
    """Return the compiled loops, or why there are none."""
    try:
        from numba import config

        from emtau_dask.mixture.compiled import features, joint, loop, products
    except Exception as error:  # numba raises all kinds where it does not fit what else is installed
        return f"{type(error).__name__}: {error}"
    if config.DISABLE_JIT:
        return "numba is told to compile nothing (NUMBA_DISABLE_JIT)"
    return _Loops(loop, features, joint, products)


def why_not_compiled() -> str | None:
    """Return why nothing can be compiled in this process; None where it can."""
    found = _compiled()
    return found if isinstance(found, str) else None


def tiled(plan: KernelPlan) -> bool:
    """Return whether tiles can score rows under ``plan``: where all components are scored together."""
    return plan.form in (Form.FEATURES, Form.JOINT) and bool(plan.together.all())


def rows_of_tile(n_features: int, itemsize: int) -> int:
    """Return the rows of a tile: an odd number of lines of each feature, which spreads them over a cache."""
    fitting = min(MOST_TILE_LINES, TILE_BYTES // (n_features * LINE_BYTES))
    threes = max(LEAST_TILE_LINES, fitting) // LINES_AT_ONCE
    return LINE_BYTES // itemsize * LINES_AT_ONCE * (threes - 1 + threes % 2)


def _odd_lines(n_numbers: int, itemsize: int) -> int:
    """Return the least number, ``n_numbers`` or more, whose numbers fill an odd number of cache lines."""
    whole = -(-n_numbers * itemsize // LINE_BYTES)
    return LINE_BYTES // itemsize * (whole + 1 - whole % 2)


def lines(n_rows: int, tile: int, dtype: np.dtype[Any]) -> AnyArray:
    """Return ones of shape (n_rows, tile); each row begins a cache line where ``tile`` fills whole lines."""
    size, spare = n_rows * tile, LINE_BYTES // dtype.itemsize
    numbers = np.ones(size + spare, dtype)
    begin = -numbers.ctypes.data % LINE_BYTES // dtype.itemsize
    return numbers[begin : begin + size].reshape(n_rows, tile)


def _read_only(array: AnyArray) -> AnyArray:
    """Return a read-only view, since numba would compile once more for a writable one."""
    view = array.view()
    view.setflags(write=False)
    return view


@dataclass(frozen=True, eq=False)
class _Tiling:
    """What depends on the form of the tiles."""

    loops: ModuleType  # `mixture.compiled.loop`
    constants: Any  # a named tuple of the form
    buffers: Any  # a named tuple of the form
    finite: tuple[AnyArray, ...]  # the buffers that must be finite where a block begins
    shapes: tuple[tuple[int, ...], ...]  # of the form's moments
    statistics: Callable[[Moments], SufficientStatistics]


def _by_features(plan: KernelPlan, compiled: _Loops) -> _Tiling:
    loops = compiled.features
    structure, transform = plan.parameters.structure, plan.frame.transform
    K, d, dtype = plan.parameters.n_components, plan.parameters.n_features, plan.dtype
    count = structure.n_row_features(d)
    shapes = structure.moment_shapes(K, count)
    tile = rows_of_tile(count, dtype.itemsize)
    features = lines(count, tile, dtype)
    differences = features[1 : 1 + d] if transform is None else lines(d, tile, dtype)
    constants = loops.FeatureConstants(
        plan.frame.centre.astype(dtype),
        np.empty((0, 0), dtype) if transform is None else np.array(transform.T, dtype, order="C"),
        *structure.squares.pairs(d),
        np.array(plan.coefficients, order="C"),
        dtype.type(LEAST_EXPONENT[dtype]),
        float(plan.ceiling),
    )
    over_all = len(shapes) - 1
    buffers = loops.FeatureBuffers(
        differences,
        features,
        lines(K, tile, dtype),
        *lines(2, tile, dtype),
        np.empty(shapes[0], dtype),
        lines(d * over_all, tile, dtype),
        np.empty((d * over_all, d * over_all), dtype),
    )
    statistics = partial(statistics_of_moments, structure, plan.frame)
    return _Tiling(compiled.blocks, constants, buffers, (differences, features), shapes, statistics)


def _jointly(plan: KernelPlan, compiled: _Loops) -> _Tiling:
    loops = compiled.joint
    K, d, dtype = plan.parameters.n_components, plan.parameters.n_features, plan.dtype
    side = compiled.products.side_of(d, dtype.itemsize)
    residuals = lines(ROWS_OF_SQUARES, _odd_lines(side, dtype.itemsize), dtype)
    residuals.fill(0.0)
    tile = rows_of_tile(1 + d, dtype.itemsize)
    coordinates = lines(1 + d, tile, dtype)
    factors = plan.factors
    constants = loops.JointConstants(
        factors.centre,
        factors.means,
        factors.log_scales.ravel(),
        factors.whitening,
        LEAST_EXPONENT[dtype],
        float(plan.ceiling),
        NEGLIGIBLE,
    )
    buffers = loops.JointBuffers(
        coordinates, lines(K, tile, dtype), *lines(2, tile, dtype), np.empty((K, 1 + d)), residuals
    )

    def statistics(moments: Moments) -> SufficientStatistics:
        weights, means, scatter = np.empty(K), np.empty((K, d)), np.empty((K, d, d))
        loops.conclude(constants, *moments, weights, means, scatter)
        return SufficientStatistics(read_only(weights), read_only(means), read_only(scatter))

    return _Tiling(
        compiled.blocks, constants, buffers, (coordinates,), ((K, 1 + d), (K, side, side)), statistics
    )


class TileKernel:
    """Accumulates blocks of at most ``n_rows`` rows by compiled loops, under a plan that is `tiled`.

    No other kernel may use the tiling until this one is finished.
    """

    def __init__(self, plan: KernelPlan, n_rows: int, tiling: _Tiling) -> None:
        self.n_rows, self.tiling = n_rows, tiling
        self._plan = plan
        self._labels = np.empty(n_rows, np.intp)
        self._moments = MomentSums(tiling.shapes)
        self._squares = self._moments.block[1] if len(tiling.shapes) > 1 else np.empty((0, 0))
        self._others: BlockKernel | None = None

    def accumulate(
        self, rows: Floats, weights: Floats | None = None, seen: MostProbable | None = None
    ) -> Accumulated:
        """Do as `BlockKernel.accumulate`, for rows of the plan's dtype in C order."""
        n, tiling = len(rows), self.tiling
        beside = (*(seen or ()), *(() if weights is None else (weights,)))
        if (
            n > self.n_rows
            or rows.shape[1] != self._plan.parameters.n_features
            or rows.dtype != self._plan.dtype
            or any(len(of_rows) != n for of_rows in beside)
        ):
            raise ValueError(f"{rows.shape} rows of {rows.dtype}, or what is of them, do not fit this kernel")
        results = tiling.loops.Results(
            np.empty(n),
            self._labels[: 0 if seen is None else n],
            np.empty(0) if seen is None else seen.largest,
            self._moments.block[0],
            self._squares,
        )
        given = np.empty(0) if weights is None else np.ascontiguousarray(weights)
        squared, total = tiling.loops.accumulate(
            _read_only(rows), _read_only(given), tiling.constants, tiling.buffers, results
        )
        if not math.isfinite(total):
            for buffer in tiling.finite:
                buffer.fill(1.0)
            if not np.isfinite(rows).all():
                return Accumulated.nothing(n)
            return self._accumulate_by_blocks(rows, weights, seen)
        self._moments.push(n)
        if seen is not None:
            seen.labels[...] = results.labels
        return Accumulated(results.log_likelihoods, total, squared)

    def _accumulate_by_blocks(
        self, rows: Floats, weights: Floats | None, seen: MostProbable | None
    ) -> Accumulated:
        """Accumulate by NumPy a block in which products, or sums of squares, overflow for some row."""
        if self._others is None:
            self._others = BlockKernel(self._plan, min(self.n_rows, OVERFLOWING_ROWS))
        parts = []
        for begin in range(0, len(rows), self._others.n_rows):
            where = slice(begin, begin + self._others.n_rows)
            part_weights = None if weights is None else weights[where]
            part_seen = None if seen is None else MostProbable(seen.labels[where], seen.largest[where])
            parts.append(self._others.accumulate(rows[where], part_weights, part_seen))
        return Accumulated(
            np.concatenate([part.log_likelihoods for part in parts]),
            sum(part.total for part in parts),
            sum(part.squared for part in parts),
        )

    def statistics(self) -> SufficientStatistics | None:
        """Return the statistics of all blocks, None where there were none."""
        moments = self._moments.total()
        others = None if self._others is None else self._others.statistics()
        if moments is None:
            return others
        found = self.tiling.statistics(moments)
        return found if others is None else merge(self._plan.parameters.structure, found, others)


def _spare() -> WeakValueDictionary[str, deque[_Tiling]]:
    """Make the table of tiles that no task uses, by the name of `Kernels`, for as long as there are such."""
    return WeakValueDictionary()


class Kernels:
    """Makes the kernels of tasks under one plan; later kernels reuse the tiles of finished ones.

    All copies that a process unpickles share its tiles: they have the ``name`` of the original. Rows are
    scored by tiles (``by_tiles``) where ``compiled`` is True and the plan is `tiled`.
    """

    def __init__(self, plan: KernelPlan, *, compiled: bool, name: str | None = None) -> None:
        self.plan: KernelPlan = plan
        self.by_tiles: bool = compiled and tiled(plan)
        self._name = uuid4().hex if name is None else name
        self._spare = of_process(_spare).setdefault(self._name, deque())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tiles."""
        return partial(Kernels, compiled=self.by_tiles, name=self._name), (self.plan,)

    def made(self, n_rows: int) -> Accumulator:
        """Return a kernel for up to ``n_rows`` rows of all blocks together.

        Raises
        ------
        RuntimeError
            Tiles are to score the rows, and nothing can be compiled here (`why_not_compiled`).
        """
        if not self.by_tiles:
            return BlockKernel(self.plan, even_length(n_rows, self.plan.block_rows))
        try:
            tiling = self._spare.pop()
        except IndexError:
            loops = _compiled()
            if isinstance(loops, str):
                raise RuntimeError(loops) from None
            make = _jointly if self.plan.form is Form.JOINT else _by_features
            tiling = make(self.plan, loops)
        # With the length of a block, only a copy of its rows and what is seen of them grow.
        longest = min(MAX_BLOCK_ROWS, BLOCK_BYTES // (8 * (self.plan.parameters.n_features + 8)))
        return TileKernel(self.plan, even_length(n_rows, longest), tiling)

    def finished(self, kernel: Accumulator) -> SufficientStatistics | None:
        """Return the statistics of a kernel of this plan, which is not to be used any more."""
        found = kernel.statistics()
        if isinstance(kernel, TileKernel):
            self._spare.append(kernel.tiling)
        return found
