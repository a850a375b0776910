"""The constants, buffers and sums of compiled tiles under a plan, for each form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.cutoff import Cutoffs
from emtau_dask.mixture.estep import MIN_EXPONENT
from emtau_dask.mixture.features import about_mean
from emtau_dask.mixture.linalg import AnyArray, Bools, Floats, read_only
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import (
    MAX_BLOCK_ROWS,
    MERGED_ROWS,
    KernelPlan,
    group_rows,
    longest_block,
    near_rows,
)
from emtau_dask.mixture.statistics import (
    MomentSums,
    PairwiseMerger,
    RowSums,
    SufficientStatistics,
    size_of,
    views_of,
)

LINE_BYTES, LINES_AT_ONCE = 64, 3
"""Size of a cache line (bytes), and cache lines of each feature that products use at once
(`kernels.products`)."""
TILE_BYTES, MIN_TILE_LINES, MAX_TILE_LINES = 2**19 + 2**16, 9, 27
"""Maximum bytes of a tile's features (or coordinates), and minimum and maximum cache lines of each feature:
more make sums over rows longer; up to 27 keep the responsibilities of 16 components in the nearest cache."""
MAX_SUMMED_FEATURES, NONE_GATHERED, ALL_GATHERED = 12, 8, 32
"""Maximum features d for which the centred form always sums all rows of a tile. With more, a component's rows
are gathered if they are at most (d - 8) / (32 - 8) of a tile: the relative cost of gathering falls with the
number of features, and from 32 on it costs no more than summing."""
NEAR_TILE, SORTED_TILE = 24, 96
"""Number of rows near one component that are scored at a time (a multiple of three vectors of any width), and
of rows whose component is guessed at a time."""
NEGLIGIBLE = 2.0**-80
"""Maximum responsibility that groups skip, relative to the component's mean in a tile: 32,768 such rows, 64
standard deviations away, change a variance by one rounding."""
DOUBLE = np.dtype(np.float64)
Shapes = tuple[tuple[int, ...], ...]


def rows_of_tile(n_features: int, itemsize: int) -> int:
    """Return the rows of a tile: an odd number of cache lines of a feature, to spread them over a cache."""
    fitting = min(MAX_TILE_LINES, TILE_BYTES // (n_features * LINE_BYTES))
    threes = max(MIN_TILE_LINES, fitting) // LINES_AT_ONCE
    return LINE_BYTES // itemsize * LINES_AT_ONCE * (threes - 1 + threes % 2)


def odd_lines(n_numbers: int, itemsize: int) -> int:
    """Return the minimum size, at least ``n_numbers``, that fills an odd number of cache lines."""
    whole = -(-n_numbers * itemsize // LINE_BYTES)
    return LINE_BYTES // itemsize * (whole + 1 - whole % 2)


def lines(n_rows: int, tile: int, dtype: np.dtype[Any]) -> AnyArray:
    """Return ones of shape (n_rows, tile); each row begins a cache line if ``tile`` fills whole lines."""
    size, spare = n_rows * tile, LINE_BYTES // dtype.itemsize
    numbers = np.ones(size + spare, dtype)
    begin = -numbers.ctypes.data % LINE_BYTES // dtype.itemsize
    return numbers[begin : begin + size].reshape(n_rows, tile)


class Loops(NamedTuple):
    """The modules of compiled loops."""

    blocks: ModuleType
    features: ModuleType
    centred: ModuleType
    near: ModuleType
    missing: ModuleType
    products: ModuleType


@cache
def compiled_loops() -> Loops | str:
    """Return the compiled loops, or why there are none.

    Everything that numba imports for its first compilation is imported here. A later import could cause a
    deadlock: it loads a library (by dlopen) while it holds the interpreter's lock, and threadpoolctl in
    another thread lists the loaded libraries (by dl_iterate_phdr) while it holds the loader's lock.
    """
    try:
        from numba import config
        from numba.core.registry import cpu_target

        from emtau_dask.kernels import centred, features, loop, missing, near, products
    except Exception as error:  # numba raises any error if it does not fit the installed packages
        return f"{type(error).__name__}: {error}"
    if config.DISABLE_JIT:
        return "numba is configured to compile nothing (NUMBA_DISABLE_JIT)"
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    return Loops(loop, features, centred, near, missing, products)


class BlockSums(Protocol):
    """Sums the moments of one stream of blocks after another; its arrays are reused."""

    @property
    def moments(self) -> Any:
        """The named tuple of the form into which the moments of a block are written."""
        ...

    @property
    def numbers(self) -> Floats:
        """All values of these moments, (m,)."""
        ...

    def push(self, n_rows: int) -> None:
        """Add the written moments, of a block of ``n_rows`` rows."""
        ...

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks so far, None without any, and reset them."""
        ...


@dataclass(frozen=True, eq=False)
class Tiling:
    """The loops, constants and buffers of compiled tiles under one plan."""

    blocks: ModuleType  # `kernels.loop`
    loops: Any  # its `BlockLoops`, of the form
    constants: Any  # a named tuple of the form
    buffers: Any  # a named tuple of the form
    finite: tuple[AnyArray, ...]  # the buffers that must be finite when a block begins
    sums: BlockSums


class _FeatureSums:
    """Sums moments of features about the centre of a frame; they are written into ``numbers``."""

    def __init__(self, kind: Any, shapes: Shapes) -> None:
        self.numbers = np.empty(size_of(shapes))
        self.moments = kind(*views_of(self.numbers, shapes))
        self._sums = MomentSums(self.numbers)

    def push(self, n_rows: int) -> None:
        self._sums.push(n_rows)

    def sums(self) -> RowSums | None:
        moments = self._sums.total()
        return None if moments is None else RowSums(moments, None)


class _CentredSums:
    """Merges moments of components about means, which are written into ``numbers``, pairwise."""

    def __init__(self, loops: ModuleType, shapes: Shapes, structure: CovarianceStructure) -> None:
        self.numbers, self._structure = np.empty(size_of(shapes)), structure
        self.moments = loops.CentredMoments(*views_of(self.numbers, shapes))
        self._loops, self._shapes = loops, shapes
        self._upper: Bools = np.tri(shapes[0][1] - 1, dtype=np.bool_).T
        self._merged, self._rows = self._nothing(), 0
        self._merger: PairwiseMerger[Any] = PairwiseMerger(self._joined)

    def _nothing(self) -> Any:
        return self._loops.CentredMoments(*map(np.zeros, self._shapes))

    def _joined(self, before: Any, later: Any) -> Any:
        self._loops.combine(later, before)
        return before

    def push(self, n_rows: int) -> None:
        self._loops.combine(self.moments, self._merged)
        self._rows += n_rows
        if self._rows >= MERGED_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._merger.push(self._merged)
            self._merged, self._rows = self._nothing(), 0

    def sums(self) -> RowSums | None:
        self._flush()
        merged = self._merger.total()
        if merged is None:
            return None
        sums, scatter = merged
        d = len(self._upper)
        upper = scatter[:, :d, :d]
        whole = np.where(self._upper, upper, upper.swapaxes(1, 2))
        whole = whole.sum(axis=0) if self._structure.shared else whole
        statistics = SufficientStatistics(
            read_only(sums[:, 0].copy()), read_only(sums[:, 1:].copy()), read_only(whole)
        )
        return RowSums(None, statistics)


def _feature_parts(
    plan: KernelPlan, loops: ModuleType, scores: AnyArray, extra: AnyArray
) -> tuple[Any, Any, tuple[AnyArray, ...]]:
    """Return constants and buffers of the form by features, and the buffers that must be finite.

    ``scores`` are (K, T); ``extra`` are two more buffers (2, T).
    """
    assert plan.frame is not None
    structure, transform, d = plan.parameters.structure, plan.frame.transform, plan.parameters.n_features
    tile, dtype = scores.shape[1], plan.dtype
    count = plan.coefficients.shape[1]
    features = lines(count, tile, dtype)
    differences = features[1 : 1 + d] if transform is None else lines(d, tile, dtype)
    constants = loops.FeatureConstants(
        plan.frame.centre.astype(dtype).reshape(1, d),
        np.empty((0, 0), dtype) if transform is None else np.array(transform.T, dtype, order="C"),
        *structure.squares.pairs(d),
        np.array(plan.coefficients, dtype, order="C"),
        dtype.type(MIN_EXPONENT[dtype]),
        float(plan.ceiling),
    )
    shapes = plan.moment_shapes
    over_all = len(shapes) - 1
    buffers = loops.FeatureBuffers(
        differences,
        features,
        scores,
        *extra,
        np.empty(shapes[0], dtype),
        lines(d * over_all, tile, dtype),
        np.empty((d * over_all, d * over_all), dtype),
    )
    return constants, buffers, (differences, features)


def _whitening(parameters: MixtureParameters) -> Floats:
    """Return the transposed precision factors, and the means below them, (K, d + 1, d)."""
    K, d = parameters.means.shape
    whitening = np.empty((K, d + 1, d))
    whitening[:, :d] = parameters.precisions_cholesky.swapaxes(-1, -2)
    whitening[:, d] = parameters.means
    return whitening


def _centred_parts(
    plan: KernelPlan, loops: ModuleType, side: int, scores: Floats, extra: Floats
) -> tuple[Any, Any, tuple[AnyArray, ...]]:
    """Return constants, buffers, and finite buffers of the centred form."""
    parameters, (K, tile), d = plan.parameters, scores.shape, plan.parameters.n_features
    gathers = (d > MAX_SUMMED_FEATURES and not plan.incomplete) or plan.cutoffs is not None
    constants = loops.CentredConstants(
        np.zeros((1, d)),
        plan.log_scales,
        _whitening(parameters),
        MIN_EXPONENT[DOUBLE],
        float(plan.ceiling),
        NEGLIGIBLE / MAX_BLOCK_ROWS,
        (d - NONE_GATHERED) * tile // (ALL_GATHERED - NONE_GATHERED) if gathers else 0,
    )
    rows, room = group_rows(K, d) if gathers else 0, odd_lines(side, DOUBLE.itemsize)
    groups = lines(K * (rows + 1) if gathers else 0, room, DOUBLE).reshape(-1, rows + 1, room)
    groups.fill(0.0)
    wide = d + LINES_AT_ONCE
    coordinates = lines(wide, tile, DOUBLE)
    sums, peaks = extra
    buffers = loops.CentredBuffers(
        coordinates=coordinates,
        scores=scores,
        sums=sums,
        peaks=peaks,
        groups=groups,
        weights=np.empty((K, rows)),
        counts=np.zeros(K, np.intp),
        totals=np.zeros(K),
        least=np.zeros(K),
        n_significant=np.zeros(K, np.intp),
        about=loops.AboutMean(np.empty((1, d)), np.zeros((1, wide)), np.empty((wide, wide)), np.empty(d)),
        mean=np.empty(d),
        correction=np.empty(d),
    )
    return constants, buffers, (coordinates,)


def _near_parts(plan: KernelPlan, loops: Loops, side: int, cutoffs: Cutoffs) -> tuple[Any, Any]:
    """Return constants and buffers of tiles of rows near one component."""
    (K, d), narrow = plan.parameters.means.shape, np.dtype(np.float32)
    constants, buffers, _ = _centred_parts(
        plan, loops.centred, side, lines(K, NEAR_TILE, DOUBLE), lines(2, NEAR_TILE, DOUBLE)
    )
    of_components, of_tile = partial(np.zeros, (K,), np.intp), partial(np.empty, (NEAR_TILE,))
    n = longest_block(2 * near_rows(d), near_rows(d))
    factors = np.ascontiguousarray(plan.parameters.precisions_cholesky)
    shared = cutoffs.centre, cutoffs.discriminants, factors, cutoffs.distances, cutoffs.margins
    centre, discriminants, factors, distances, margins = (read_only(array.view()) for array in shared)
    return loops.near.NearConstants(
        constants,
        centre,
        np.zeros((1, d), narrow),
        discriminants,
        factors,
        distances,
        margins,
        np.exp(-margins),
    ), loops.near.NearBuffers(
        centred=buffers._replace(coordinates=lines(d, NEAR_TILE, DOUBLE)),
        narrow=np.empty((SORTED_TILE, d), narrow),
        coordinates=lines(d + 1, SORTED_TILE, narrow),
        discriminants=lines(K, SORTED_TILE, narrow),
        largest=np.empty(SORTED_TILE, narrow),
        guesses=np.zeros(n, np.int32),
        order=np.zeros(n, np.intp),
        ends=np.zeros(K + 1, np.intp),
        rows=np.empty((NEAR_TILE, d)),
        differences=lines(d + 1, NEAR_TILE, DOUBLE),
        own=of_tile(),
        directions=np.empty((K, d + 1)),
        along=lines(K, NEAR_TILE, DOUBLE),
        whitened=np.empty(d),
        of_directions=of_components(),
        has_direction=of_components(),
        may_count=of_components(),
        near=of_components(),
        labels=of_tile(dtype=np.intp),
        values=of_tile(),
    )


def _missing_parts(
    plan: KernelPlan, loops: Loops, side: int, scores: Floats, extra: Floats
) -> tuple[Any, Any, tuple[AnyArray, ...]]:
    """Return constants, buffers, and finite buffers for rows with missing values."""
    parameters, (K, tile), form = plan.parameters, scores.shape, loops.missing
    constants, buffers, finite = _centred_parts(plan, loops.centred, side, scores, extra)
    d, centre, padded = parameters.n_features, about_mean(parameters).centre, K + -K % form.LANES
    inverted = np.broadcast_to(parameters.structure.precisions(parameters.precisions_cholesky), (K, d, d))
    precisions, slopes = np.zeros((d, d, padded)), np.zeros((d, padded))
    precisions[...] = np.eye(d)[:, :, np.newaxis]
    precisions[..., :K] = inverted.transpose(1, 2, 0)
    slopes[:, :K] = -np.einsum("kij,kj->ik", inverted, parameters.means - centre)
    of_lanes = form.LaneConstants(precisions, slopes, np.full((1, padded), -1.0), np.zeros((1, padded)))
    of_mixture = constants.log_scales, constants.whitening, constants.least, constants.ceiling
    values, count = (tile * d, padded), partial(np.zeros, dtype=np.intp)
    lanes = form.LaneBuffers(
        filled=np.empty((tile, d)),
        gradients=lines(d, padded, DOUBLE),
        expected=lines(*values, DOUBLE),
        pivots=lines(*values, DOUBLE),
        inverses=lines(form.KEPT * tile + d * d, padded, DOUBLE),
    )
    places = form.Places(
        *(count(size) for size in (tile, tile, d + 2, 1, tile * d + 1, tile * d + 1, tile * d + 1)),
        centres=np.empty(tile * d),
        completed=np.empty(values[::-1]),
        logs=np.empty(values[::-1]),
    )
    return (
        form.MissingConstants(
            constants.origin, *of_mixture, np.tile(centre, tile), np.zeros((1, tile)), of_lanes
        ),
        form.MissingBuffers(
            *buffers[:4], buffers.about, places, np.zeros((tile, padded)), np.zeros((d * d, padded)), lanes
        ),
        finite,
    )


def tiling_of(plan: KernelPlan, loops: Loops) -> Tiling:
    """Return the loops, constants and buffers of compiled tiles under a plan that is `tiled`."""
    structure, (K, d), dtype = plan.parameters.structure, plan.parameters.means.shape, plan.dtype
    side = loops.products.side_of(d, DOUBLE.itemsize)
    about_means = partial(_CentredSums, loops.centred, ((K, 1 + d), (K, side, side)), structure)
    if plan.cutoffs is not None:
        near = _near_parts(plan, loops, side, plan.cutoffs)
        return Tiling(loops.blocks, loops.near.loops, *near, (), about_means())
    by_features = plan.frame is not None
    tile = rows_of_tile(plan.coefficients.shape[1] if by_features else 2 * (1 + d), dtype.itemsize)
    scores, extra = lines(K, tile, dtype), lines(2, tile, dtype)
    if plan.incomplete and not by_features:
        parts = _missing_parts(plan, loops, side, scores, extra)
        return Tiling(loops.blocks, loops.missing.loops, *parts, about_means())
    if not by_features:
        parts = _centred_parts(plan, loops.centred, side, scores, extra)
        return Tiling(loops.blocks, loops.centred.loops, *parts, about_means())
    pools = len(plan.moment_shapes) > 1
    form = loops.features
    sums = _FeatureSums(form.PooledMoments if pools else form.FeatureMoments, plan.moment_shapes)
    parts = _feature_parts(plan, form, scores, extra)
    complete_loops = form.pooled_loops if pools else form.loops
    return Tiling(loops.blocks, form.incomplete_loops if plan.incomplete else complete_loops, *parts, sums)
