"""The choice of what scores rows under a plan: compiled loops if numba is installed, else NumPy.

Compiled loops are worth a dependency because their products need no packing and because they hold no lock.
Threads that call NumPy wait for the interpreter's lock between any two calls, so two threads are far less
than twice as fast as one. `docs/decisions/0009-compiled-tiles.md` has the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from emtau_dask.mixture.missing import LONGER, Observed, PatternKernel, PatternKernels, Patterns
from emtau_dask.mixture.parameters import MixtureParameters, m_step
from emtau_dask.mixture.plan import (
    BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    KernelPlan,
    even_length,
    fits_tiles,
    near_rows,
    plan_incomplete,
    plan_kernel,
    plan_tiles,
)
from emtau_dask.mixture.statistics import RowSums, merge_sums, zero
from emtau_dask.process import of_process

MAX_OVERFLOWING_ROWS = 512
"""Maximum rows of a block that NumPy scores because tiles overflow, with buffers of its own."""


class Accumulator(Protocol):
    """Sums the statistics of a stream of blocks of rows."""

    @property
    def n_rows(self) -> int:
        """Rows of the largest block."""
        ...

    def accumulate(self, rows: Floats, weights: Floats | None, out: MostProbable | None) -> Accumulated:
        """Score a block of rows (n, d) with weights (n,), add its statistics, and write labels to ``out``."""
        ...

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks, None without any, and reset them."""
        ...


class Scorer(Protocol):
    """Scores a stream of blocks of rows of float64, without sums."""

    @property
    def n_rows(self) -> int:
        """Rows of the largest block."""
        ...

    def score(self, rows: Floats, *, responsibilities: bool) -> tuple[float, Iterable[Observed]]:
        """Return the sum of the squares of all values of a block (n, d), and the scores of its rows.

        Without ``responsibilities`` those may be of shape (0, n). If a value is not finite, the sum is not
        finite either; then the scores must not be used.
        """
        ...


class RowKernels(Protocol):
    """Creates the kernels that score rows in tasks, under one plan."""

    @property
    def plan(self) -> KernelPlan:
        """The plan by which rows are scored."""
        ...

    @property
    def by_tiles(self) -> bool:
        """Whether compiled loops score the rows."""
        ...

    def acquire(self, n_rows: int) -> Any:
        """Return an `Accumulator`, or a `Scorer`, for at most ``n_rows`` rows in all blocks together."""
        ...

    def release(self, kernel: Any) -> RowSums | None:
        """Return the sums of a kernel that must not be used any more."""
        ...


def why_not_compiled() -> str | None:
    """Return why nothing can be compiled in this process; None if it can."""
    loops_or_reason = compiled_loops()
    return loops_or_reason if isinstance(loops_or_reason, str) else None


def tiled(plan: KernelPlan) -> bool:
    """Return whether tiles can score rows under ``plan``.

    The centred form of tiles requires that each component has its own factor, except for missing values.
    """
    structure, d = plan.parameters.structure, plan.parameters.n_features
    return fits_tiles(structure, d) and (plan.frame is not None or structure.own_factors or plan.incomplete)


def _read_only(array: AnyArray) -> AnyArray:
    """Return a read-only view; numba would compile again for a writable one."""
    view = array.view()
    view.setflags(write=False)
    return view


class TileKernel:
    """Accumulates blocks of at most ``n_rows`` rows by compiled loops, under a plan that is `tiled`.

    No other kernel may use the tiling until this one is released.
    """

    def __init__(self, plan: KernelPlan, n_rows: int, tiling: Tiling) -> None:
        self.n_rows, self.tiling = n_rows, tiling
        self.plan = plan
        self._labels, self._nothing = np.empty(n_rows, np.intp), np.empty(0)
        self._sums = tiling.sums
        self._numpy_kernel: BlockKernel | PatternKernel | None = None

    def accumulate(
        self, rows: Floats, weights: Floats | None = None, out: MostProbable | None = None
    ) -> Accumulated:
        """Return what `BlockKernel.accumulate` returns, for rows of the plan's dtype in C order."""
        n, tiling = len(rows), self.tiling
        self._check(rows, weights, out)
        results = tiling.blocks.Results(
            np.empty(n),
            self._labels[: 0 if out is None else n],
            self._nothing if out is None else out.largest,
            self._sums.moments,
            self._sums.numbers,
        )
        row_weights = self._nothing if weights is None else np.ascontiguousarray(weights)
        squared, total = tiling.loops.accumulate(
            _read_only(rows), _read_only(row_weights), tiling.constants, tiling.buffers, results
        )
        if not math.isfinite(total):
            if not self._restore_finite(rows):
                return Accumulated.nothing(n)
            return self._accumulate_by_blocks(rows, weights, out)
        self._sums.push(n)
        if out is not None:
            out.labels[...] = results.labels
        return Accumulated(results.log_likelihoods, total, squared)

    def _check(self, rows: Floats, weights: Floats | None = None, out: MostProbable | None = None) -> None:
        """Raise ValueError for rows, weights or outputs with which compiled code would exceed its buffers."""
        n = len(rows)
        if (
            n > self.n_rows
            or rows.shape[1] != self.plan.parameters.n_features
            or rows.dtype != self.plan.dtype
            or (weights is not None and len(weights) != n)
            or (out is not None and not len(out.labels) == len(out.largest) == n)
        ):
            raise ValueError(f"{rows.shape} rows of {rows.dtype}, weights or outputs do not fit this kernel")

    def _restore_finite(self, rows: Floats) -> bool:
        """Make all buffers finite again; return whether the rows are finite."""
        for buffer in self.tiling.finite:
            buffer.fill(1.0)
        return not np.isinf(rows).any() if self.plan.incomplete else bool(np.isfinite(rows).all())

    def _in_blocks(self, rows: Floats) -> Iterator[tuple[slice, Any]]:
        """Yield blocks of rows for which tiles overflow, and the NumPy kernel that scores them."""
        if self._numpy_kernel is None:
            plan, n_rows = self.plan.centred, min(self.n_rows, MAX_OVERFLOWING_ROWS)
            if self.plan.incomplete:
                self._numpy_kernel = PatternKernel(plan, n_rows, Patterns(plan.parameters))
            else:
                self._numpy_kernel = BlockKernel(plan, n_rows)
        for begin in range(0, len(rows), self._numpy_kernel.n_rows):
            yield slice(begin, begin + self._numpy_kernel.n_rows), self._numpy_kernel

    def score(self, rows: Floats, *, responsibilities: bool) -> tuple[float, Iterable[Observed]]:
        """Return the scores of rows of the plan's dtype in C order; see `Scorer`."""
        n, tiling = len(rows), self.tiling
        self._check(rows)
        height = len(tiling.buffers.scores) if responsibilities else 0
        results = tiling.blocks.Observations(
            np.empty(n), np.empty(n, np.intp), np.empty((height, n), self.plan.dtype)
        )
        squared, total = tiling.loops.observe(_read_only(rows), tiling.constants, tiling.buffers, results)
        if not math.isfinite(total):
            if not self._restore_finite(rows):
                return math.nan, ()
            return squared, self._scored_by_blocks(rows)
        scored = results.responsibilities, results.log_likelihoods, results.labels
        return squared, (Observed(slice(None), None, rows, *scored),)

    def _scored_by_blocks(self, rows: Floats) -> Iterator[Observed]:
        for where, kernel in self._in_blocks(rows):
            scored = kernel.score(rows[where])
            yield Observed(where, None, rows[where], scored.responsibilities, scored.log_likelihoods)

    def _accumulate_by_blocks(
        self, rows: Floats, weights: Floats | None, out: MostProbable | None
    ) -> Accumulated:
        """Accumulate by NumPy a block in which a computation overflows for some row."""
        parts = []
        for where, kernel in self._in_blocks(rows):
            part_weights = None if weights is None else weights[where]
            part_out = None if out is None else MostProbable(out.labels[where], out.largest[where])
            parts.append(kernel.accumulate(rows[where], part_weights, part_out))
        return Accumulated(
            np.concatenate([part.log_likelihoods for part in parts]),
            sum(part.total for part in parts),
            sum(part.squared for part in parts),
        )

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks, None without any, and reset them."""
        sums = self._sums.sums()
        if self._numpy_kernel is None:
            return sums
        return merge_sums(self.plan.parameters.structure, (sums, self._numpy_kernel.sums()))


def _spare() -> WeakValueDictionary[str, deque[BlockKernel | Tiling]]:
    """Return the table of unused buffers, by the name of their `Kernels`; entries live as long as these."""
    return WeakValueDictionary()


class Kernels:
    """Creates the kernels of tasks under one plan; later kernels reuse the buffers of released ones.

    All copies that a process unpickles share buffers: they have the ``name`` of the original. Rows are scored
    by tiles (``by_tiles``) if ``compiled`` is True and the plan is `tiled`.
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

    def acquire(self, n_rows: int) -> Accumulator:
        """Return a kernel for at most ``n_rows`` rows in all blocks together.

        Raises
        ------
        RuntimeError
            Tiles must score the rows, but nothing can be compiled in this process (`why_not_compiled`).
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

    def release(self, kernel: Accumulator) -> RowSums | None:
        """Return the sums of a kernel of this plan, which must not be used any more."""
        sums = kernel.sums()
        if isinstance(kernel, TileKernel):
            self._spare.append(kernel.tiling)
        elif isinstance(kernel, BlockKernel):
            self._spare.append(kernel)
        return sums


def _block_rows(plan: KernelPlan) -> int:
    """Return the approximate rows of a block of tiles; only the copy and the outputs grow with it."""
    d = plan.parameters.n_features
    return min(MAX_BLOCK_ROWS, BLOCK_BYTES // (8 * (d + 8))) if plan.cutoffs is None else near_rows(d)


def scoring_kernels(parameters: MixtureParameters, *, compiled: bool, missing: bool = False) -> RowKernels:
    """Return kernels that are `Scorer` for rows of float64.

    They use tiles if ``compiled`` is True and tiles can score under the parameters. NaN may be a ``missing``
    value.
    """
    plan = plan_kernel(parameters)
    if compiled:
        plan = plan_incomplete(parameters) if missing else plan_tiles(parameters)
        if tiled(plan) and plan.incomplete == missing:
            return Kernels(plan, compiled=True)
    return PatternKernels(plan, longer=LONGER if missing else 1)


@contextmanager
def compilation_noted(begins: Callable[[], None]) -> Iterator[None]:
    """Call ``begins`` once in the context: when numba begins to compile loops of this package, if it does."""
    from numba.core.event import Event, Listener, install_listener

    class Begins(Listener):  # type: ignore[misc]
        notified = False

        def on_start(self, event: Event) -> None:
            """Notify of the first compiled function of this package."""
            if not self.notified and event.data["dispatcher"].py_func.__module__.startswith(__package__):
                self.notified = True
                begins()

        def on_end(self, event: Event) -> None:
            """Ignore."""

    with install_listener("numba:compile", Begins()):
        yield


def compile_loops(
    structure: CovarianceStructure, n_components: int, n_features: int, dtype: np.dtype[Any], *, missing: bool
) -> None:
    """Compile the loops for rows of a shape and dtype, or load compiled ones from numba's cache.

    They are compiled for the form that scores well-conditioned components, of rows with ``missing`` values if
    there are any. If a fit needs another form, its first pass compiles it.
    """
    weights, means = np.ones(n_components), np.zeros((n_components, n_features))
    statistics = replace(zero(structure, n_components, n_features), weights=weights, means=means)
    parameters = m_step(statistics, structure, reg_covar=1.0)
    plan = plan_incomplete(parameters) if missing else plan_tiles(parameters, dtype)
    kernels = Kernels(plan, compiled=True)
    if kernels.by_tiles:
        kernel = kernels.acquire(1)
        kernel.accumulate(np.zeros((1, n_features), plan.dtype), None, None)
        kernels.release(kernel)
