"""What scores rows under a plan: compiled loops where numba is, NumPy elsewhere.

Compiled loops are worth a dependency because their products need no packing and because they hold no lock.
Threads that call NumPy wait for the interpreter's lock between any two calls, so that two threads are far
from twice as fast as one. `docs/decisions/0009-compiled-tiles.md` has the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np

from emtau_dask.kernels.tiling import Tiling, compiled_loops, tiling_of
from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.estep import Accumulated, BlockKernel, MostProbable
from emtau_dask.mixture.linalg import AnyArray, Floats
from emtau_dask.mixture.missing import LONGER, Observed, PatternKernels
from emtau_dask.mixture.parameters import MixtureParameters, m_step
from emtau_dask.mixture.plan import (
    BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    KernelPlan,
    even_length,
    fits_tiles,
    near_rows,
    plan_kernel,
    plan_tiles,
)
from emtau_dask.mixture.statistics import RowSums, merge_sums, zero
from emtau_dask.process import of_process

OVERFLOWING_ROWS = 512
"""Rows of a block that NumPy scores after all, with buffers beside those of the tiles."""
FAR = 100.0
"""From one mean to the next, in standard deviations, in each feature."""


class Accumulator(Protocol):
    """Sums the statistics of a stream of blocks of rows."""

    @property
    def n_rows(self) -> int:
        """Rows of the largest block."""
        ...

    def accumulate(self, rows: Floats, weights: Floats | None, seen: MostProbable | None) -> Accumulated:
        """Score a block of rows (n, d) with weights (n,), add its statistics, and write ``seen`` if given."""
        ...

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks, None if there were none; then begin again."""
        ...


class Scorer(Protocol):
    """Scores a stream of blocks of rows of float64, and sums nothing."""

    @property
    def n_rows(self) -> int:
        """Rows of the largest block."""
        ...

    def score(self, rows: Floats, *, responsibilities: bool) -> tuple[float, Iterable[Observed]]:
        """Return the sum of the squares of all values of a block (n, d), and its rows, scored.

        Without ``responsibilities`` those may be left out: (0, n). Where a value is not finite, the sum is
        not either; then the rows are not to be used.
        """
        ...


class RowKernels(Protocol):
    """Makes what scores rows in tasks, under one plan."""

    @property
    def plan(self) -> KernelPlan:
        """How rows are scored."""
        ...

    @property
    def by_tiles(self) -> bool:
        """Whether compiled loops score them."""
        ...

    def made(self, n_rows: int) -> Any:
        """Return an `Accumulator`, or a `Scorer`, for up to ``n_rows`` rows of all blocks together."""
        ...

    def finished(self, kernel: Any) -> RowSums | None:
        """Return the sums of one that is not to be used any more."""
        ...


def why_not_compiled() -> str | None:
    """Return why nothing can be compiled in this process; None if it can."""
    found = compiled_loops()
    return found if isinstance(found, str) else None


def tiled(plan: KernelPlan) -> bool:
    """Return whether tiles can score rows under ``plan``.

    The centred form of tiles is for factors of the components' own.
    """
    structure, d = plan.parameters.structure, plan.parameters.n_features
    return fits_tiles(structure, d) and (plan.frame is not None or structure.own_factors)


def _read_only(array: AnyArray) -> AnyArray:
    """Return a read-only view, since numba would compile once more for a writable one."""
    view = array.view()
    view.setflags(write=False)
    return view


class TileKernel:
    """Accumulates blocks of at most ``n_rows`` rows by compiled loops, under a plan that is `tiled`.

    No other kernel may use the tiling until this one is finished.
    """

    def __init__(self, plan: KernelPlan, n_rows: int, tiling: Tiling) -> None:
        self.n_rows, self.tiling = n_rows, tiling
        self.plan = plan
        self._labels, self._nothing = np.empty(n_rows, np.intp), np.empty(0)
        self._sums = tiling.sums
        self._others: BlockKernel | None = None

    def accumulate(
        self, rows: Floats, weights: Floats | None = None, seen: MostProbable | None = None
    ) -> Accumulated:
        """Do as `BlockKernel.accumulate`, for rows of the plan's dtype in C order."""
        n, tiling = len(rows), self.tiling
        self._check(rows, weights, seen)
        results = tiling.blocks.Results(
            np.empty(n),
            self._labels[: 0 if seen is None else n],
            self._nothing if seen is None else seen.largest,
            self._sums.moments,
            self._sums.numbers,
        )
        given = self._nothing if weights is None else np.ascontiguousarray(weights)
        squared, total = tiling.loops.accumulate(
            _read_only(rows), _read_only(given), tiling.constants, tiling.buffers, results
        )
        if not math.isfinite(total):
            if not self._finite_again(rows):
                return Accumulated.nothing(n)
            return self._accumulate_by_blocks(rows, weights, seen)
        self._sums.push(n)
        if seen is not None:
            seen.labels[...] = results.labels
        return Accumulated(results.log_likelihoods, total, squared)

    def _check(self, rows: Floats, weights: Floats | None = None, seen: MostProbable | None = None) -> None:
        """Raise ValueError for rows, or what is of them, that would lead compiled code beyond its buffers."""
        n = len(rows)
        if (
            n > self.n_rows
            or rows.shape[1] != self.plan.parameters.n_features
            or rows.dtype != self.plan.dtype
            or (weights is not None and len(weights) != n)
            or (seen is not None and not len(seen.labels) == len(seen.largest) == n)
        ):
            raise ValueError(f"{rows.shape} rows of {rows.dtype}, or what is of them, do not fit this kernel")

    def _finite_again(self, rows: Floats) -> bool:
        """Make the buffers finite again, after some that were not; return whether the rows are."""
        for buffer in self.tiling.finite:
            buffer.fill(1.0)
        return bool(np.isfinite(rows).all())

    def _in_blocks(self, rows: Floats) -> Iterator[tuple[slice, BlockKernel]]:
        """Yield the blocks of rows in which products, or sums of squares, overflow, and what NumPy does."""
        if self._others is None:
            self._others = BlockKernel(self.plan.centred, min(self.n_rows, OVERFLOWING_ROWS))
        for begin in range(0, len(rows), self._others.n_rows):
            yield slice(begin, begin + self._others.n_rows), self._others

    def score(self, rows: Floats, *, responsibilities: bool) -> tuple[float, Iterable[Observed]]:
        """See `Scorer`; for rows of the plan's dtype in C order."""
        n, tiling = len(rows), self.tiling
        self._check(rows)
        wanted = len(tiling.buffers.scores) if responsibilities else 0
        results = tiling.blocks.Observations(
            np.empty(n), np.empty(n, np.intp), np.empty((wanted, n), self.plan.dtype)
        )
        squared, total = tiling.loops.observe(_read_only(rows), tiling.constants, tiling.buffers, results)
        if not math.isfinite(total):
            if not self._finite_again(rows):
                return math.nan, ()
            return squared, self._scored_by_blocks(rows)
        found = results.responsibilities, results.log_likelihoods, results.labels
        return squared, (Observed(slice(None), None, rows, *found),)

    def _scored_by_blocks(self, rows: Floats) -> Iterator[Observed]:
        for where, others in self._in_blocks(rows):
            scored = others.score(rows[where])
            yield Observed(where, None, rows[where], scored.responsibilities, scored.log_likelihoods)

    def _accumulate_by_blocks(
        self, rows: Floats, weights: Floats | None, seen: MostProbable | None
    ) -> Accumulated:
        """Accumulate by NumPy a block in which something overflows for some row."""
        parts = []
        for where, others in self._in_blocks(rows):
            part_weights = None if weights is None else weights[where]
            part_seen = None if seen is None else MostProbable(seen.labels[where], seen.largest[where])
            parts.append(others.accumulate(rows[where], part_weights, part_seen))
        return Accumulated(
            np.concatenate([part.log_likelihoods for part in parts]),
            sum(part.total for part in parts),
            sum(part.squared for part in parts),
        )

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks, None if there were none; then begin again."""
        found = self._sums.sums()
        if self._others is None:
            return found
        return merge_sums(self.plan.parameters.structure, (found, self._others.sums()))


def _spare() -> WeakValueDictionary[str, deque[BlockKernel | Tiling]]:
    """Make the table of what no task uses, by the name of `Kernels`, for as long as there are such."""
    return WeakValueDictionary()


class Kernels:
    """Makes the kernels of tasks under one plan; later kernels reuse the buffers of finished ones.

    All copies that a process unpickles share its buffers: they have the ``name`` of the original. Rows are
    scored by tiles (``by_tiles``) where ``compiled`` is True and the plan is `tiled`.
    """

    def __init__(self, plan: KernelPlan, *, compiled: bool, name: str | None = None) -> None:
        self.plan: KernelPlan = plan
        self.by_tiles: bool = compiled and tiled(plan)
        self._block_rows = _block_rows(plan) if self.by_tiles else plan.block_rows
        self._name = uuid4().hex if name is None else name
        self._spare = of_process(_spare).setdefault(self._name, deque())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the buffers."""
        return partial(Kernels, compiled=self.by_tiles, name=self._name), (self.plan,)

    def made(self, n_rows: int) -> Accumulator:
        """Return a kernel for up to ``n_rows`` rows of all blocks together.

        Raises
        ------
        RuntimeError
            Tiles are to score the rows, and nothing can be compiled here (`why_not_compiled`).
        """
        length = even_length(n_rows, self._block_rows)
        try:
            spare: BlockKernel | Tiling | None = self._spare.pop()
        except IndexError:
            spare = None
        if not self.by_tiles:
            if isinstance(spare, BlockKernel) and spare.n_rows == length:
                return spare
            return BlockKernel(self.plan, length)
        return TileKernel(self.plan, length, spare if isinstance(spare, Tiling) else self._tiling())

    def _tiling(self) -> Tiling:
        loops = compiled_loops()
        if isinstance(loops, str):
            raise RuntimeError(loops)
        return tiling_of(self.plan, loops)

    def finished(self, kernel: Accumulator) -> RowSums | None:
        """Return the sums of a kernel of this plan, which is not to be used any more."""
        found = kernel.sums()
        if isinstance(kernel, TileKernel):
            self._spare.append(kernel.tiling)
        elif isinstance(kernel, BlockKernel):
            self._spare.append(kernel)
        return found


def _block_rows(plan: KernelPlan) -> int:
    """Return about how many rows a block of tiles has; only a copy, and what is seen of rows, grow."""
    d = plan.parameters.n_features
    return min(MAX_BLOCK_ROWS, BLOCK_BYTES // (8 * (d + 8))) if plan.reach is None else near_rows(d)


def scoring_kernels(parameters: MixtureParameters, *, compiled: bool, missing: bool = False) -> RowKernels:
    """Return what makes a `Scorer` for rows of float64.

    It goes by tiles where ``compiled`` is True, they can score under the parameters, and NaN does not stand
    for a ``missing`` value.
    """
    if missing or not compiled:
        return PatternKernels(plan_kernel(parameters), longer=LONGER if missing else 1)
    kernels = Kernels(plan_tiles(parameters), compiled=True)
    return kernels if kernels.by_tiles else PatternKernels(kernels.plan, longer=1)


def compile_loops(
    structure: CovarianceStructure,
    n_components: int,
    n_features: int,
    dtype: np.dtype[Any],
    chunk_rows: float,
    begins: Callable[[], None],
) -> None:
    """Compile the loops for rows of a shape and dtype, or load what was compiled before.

    They are compiled for the form in which well-conditioned components are scored, and for that in which far
    ones are left out, where the shape is one of those for which that may pay. Where a fit needs another form,
    that is compiled in its first pass.

    Parameters
    ----------
    structure : CovarianceStructure
    n_components, n_features : int
    dtype : dtype
        Of the rows.
    chunk_rows : float
        Rows of a chunk, on average.
    begins : callable () -> None
        Called once if something has to be compiled, when that begins.
    """
    from numba.core.event import Event, Listener, install_listener

    class Begins(Listener):  # type: ignore[misc]
        told = False

        def on_start(self, event: Event) -> None:
            """Tell of the first function of this package."""
            if not self.told and event.data["dispatcher"].py_func.__module__.startswith(__package__):
                self.told = True
                begins()

        def on_end(self, event: Event) -> None:
            """Ignore."""

    def use(apart: float) -> None:
        """Score a row of components of variance 1, whose means are so far apart in each feature."""
        means = np.repeat(apart * np.arange(float(n_components))[:, np.newaxis], n_features, axis=1)
        weights = np.ones(n_components)
        statistics = replace(zero(structure, n_components, n_features), weights=weights, means=means)
        plan = plan_tiles(m_step(statistics, structure, reg_covar=1.0), dtype, chunk_rows)
        kernels = Kernels(plan, compiled=True)
        if kernels.by_tiles and (apart == 0 or plan.reach is not None):
            kernel = kernels.made(1)
            kernel.accumulate(np.zeros((1, n_features), plan.dtype), None, None)
            kernels.finished(kernel)

    with install_listener("numba:compile", Begins()):
        use(0.0)
        use(FAR)
