"""Sufficient statistics: zero, of a block, merged; and the running sums that become them.

The M-step needs the sums of ``s_n w_nk · (1, x, x xᵀ)`` over rows. They are kept centred, as (weight, mean,
scatter about the mean), and merged pairwise (Chan, Golub and LeVeque 1983, "Algorithms for computing the
sample variance", eq. 2.1), because ``E[x²] − μ²`` loses all its digits on data far from the origin.

Moments of features in a frame are plain sums: those of chunks add up, and what they say of means and scatters
is worked out once for all rows. That loses no more digits than doing it for each chunk, since the frame is
the same for all (`features.conditions`). What is summed about means of its own is statistics at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Moments
from emtau_dask.mixture.linalg import Bools, Floats, Ints, Triangles, read_only, room_for_rows, strips_of

T = TypeVar("T")
TILE_BYTES, MIN_TILE_ROWS = 2**20, 1024
LEAST_LEFT = 2.0**-4
"""Least share of a component's weight, and of its scatter in each feature, that `remainder` may leave."""
ADDED_ROWS = 1024
"""Rows whose moments are added up block by block, where blocks are shorter."""


@dataclass(frozen=True, eq=False)
class SufficientStatistics:
    """Sums over rows, per component, in centred form; float64, read-only.

    Attributes
    ----------
    weights : ndarray of shape (K,)
        ``Σ_n s_n w_nk``, in weighted rows.
    means : ndarray of shape (K, d)
        Weighted means; zero where the weight is.
    given_scatter : ndarray or Triangles
        Weighted scatter about the means, in the shape of the covariances: summed over the
        components that share a covariance, and over the features that share a variance. It may be
        `Triangles` where passes whiten rows by solving.
    """

    weights: Floats
    means: Floats
    given_scatter: Floats | Triangles

    @cached_property
    def scatter(self) -> Floats:
        """The scatter, in the shape of the covariances."""
        given = self.given_scatter
        return read_only(given.whole()) if isinstance(given, Triangles) else given

    @property
    def triangles(self) -> Triangles:
        """The scatter of matrices (K, d, d) as triangles."""
        given = self.given_scatter
        return given if isinstance(given, Triangles) else as_triangles(given)

    def summed(self) -> SufficientStatistics:
        """Return the same with the scatter alone, not what it is the sum of: to be kept, or sent."""
        return SufficientStatistics(self.weights, self.means, self.scatter)

    def __reduce__(self) -> tuple[Any, ...]:
        return SufficientStatistics, (self.weights, self.means, self.scatter)


def as_triangles(part: Floats, weights: Floats | None = None, vectors: Floats | None = None) -> Triangles:
    """Return triangles of one part, and of ``Σ_i weights_i · vectors_i vectors_iᵀ`` if these are given."""
    K, d, _ = part.shape
    if weights is None or vectors is None:
        weights, vectors = np.empty((0, K)), np.empty((0, K, d))
    return Triangles((part,), weights, vectors)


def zero(structure: CovarianceStructure, n_components: int, n_features: int) -> SufficientStatistics:
    """Return the statistics of no rows: the identity of `merge`."""
    return SufficientStatistics(
        read_only(np.zeros(n_components)),
        read_only(np.zeros((n_components, n_features))),
        read_only(np.zeros(structure.shape(n_components, n_features))),
    )


def quotients(part: Floats, whole: Floats) -> Floats:
    """Return ``part / whole``, zero where ``whole`` is."""
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)


class Merger:
    """Merges a stream of parts at once, from the sum of their scatters, their weights and their means.

    With ``μ = Σ W_i μ_i / W``, the scatter of all is ``Σ_i S_i + W_i (μ_i − μ)(μ_i − μ)ᵀ``.
    """

    def __init__(self, structure: CovarianceStructure) -> None:
        self._structure = structure
        self._weights: list[Floats] = []
        self._means: list[Floats] = []
        self._first: SufficientStatistics | None = None
        self._sum: _ScatterSum | _TriangleSum | None = None

    def push(self, part: SufficientStatistics) -> None:
        """Add the next part."""
        if not self._weights:
            self._first = part
        else:
            self._sum = self._sum or self._begun()
            self._sum.push(part)
        self._weights.append(part.weights)
        self._means.append(part.means)

    def _begun(self) -> _ScatterSum | _TriangleSum:
        """Return the sum of the first part, which is not held beside it."""
        first, self._first = self._first, None
        assert first is not None
        solving = self._structure.solving_for(first.means.shape[1])
        begun = _ScatterSum(self._structure) if solving is None else _TriangleSum()
        begun.push(first)
        return begun

    def total(self) -> SufficientStatistics | None:
        """Return all parts merged, None where there were none. To be called once, after the last part."""
        weights, means = self._weights, self._means
        if self._sum is None:
            return self._first
        whole = np.sum(weights, axis=0)
        mean = means[0].copy()
        for part_weights, part_means in zip(weights[1:], means[1:], strict=True):
            mean += quotients(part_weights, whole)[:, np.newaxis] * (part_means - means[0])
        scatter = self._sum.total(np.array(weights), np.array(means) - mean)
        return SufficientStatistics(read_only(whole), read_only(mean), scatter)


class _ScatterSum:
    """The sum of two scatters or more."""

    def __init__(self, structure: CovarianceStructure) -> None:
        self._structure = structure
        self._parts = 0
        self._scatter: Floats = np.empty(0)

    def push(self, part: SufficientStatistics) -> None:
        if self._parts == 0:
            self._scatter = part.scatter
        elif self._parts == 1:
            # The plain sum of two arrays without axes is a number, which cannot be added to in place.
            self._scatter = np.add(self._scatter, part.scatter, out=np.empty_like(part.scatter))
        else:
            self._scatter += part.scatter
        self._parts += 1

    def total(self, weights: Floats, vectors: Floats) -> Floats:
        """Return the sum, with ``Σ_i weights_i · vectors_i vectors_iᵀ`` added."""
        self._structure.add_outer(self._scatter, weights, vectors)
        return read_only(self._scatter)


class _TriangleSum:
    """The sum of two scatters or more, of which upper triangles are added; the last part is left apart."""

    def __init__(self) -> None:
        self._parts: tuple[Floats, ...] = ()
        self._own = False

    def push(self, part: SufficientStatistics) -> None:
        if len(self._parts) == 2:
            before, last = self._parts
            out = before if self._own else np.empty_like(before)
            for rows in strips_of(out.shape[-1]):
                columns = slice(rows.start, None)
                np.add(before[:, rows, columns], last[:, rows, columns], out=out[:, rows, columns])
            self._parts, self._own = (out,), True
        self._parts = (*self._parts, part.triangles.upper)

    def total(self, weights: Floats, vectors: Floats) -> Triangles:
        """Return the sum, with ``Σ_i weights_i · vectors_i vectors_iᵀ`` added."""
        return Triangles(tuple(map(read_only, self._parts)), weights, vectors)


def merged(structure: CovarianceStructure, parts: Iterable[SufficientStatistics]) -> SufficientStatistics:
    """Return the statistics of all rows of ``parts`` together; there must be at least one part.

    Associative and commutative to rounding; statistics merged with `zero` keep their bits.
    """
    merger = Merger(structure)
    for part in parts:
        merger.push(part)
    total = merger.total()
    assert total is not None
    return total


def merge(
    structure: CovarianceStructure, a: SufficientStatistics, b: SufficientStatistics
) -> SufficientStatistics:
    """Return the statistics of the rows of ``a`` and ``b`` together; see `merged`."""
    return merged(structure, (a, b))


def remainder(
    structure: CovarianceStructure,
    whole: SufficientStatistics,
    part: SufficientStatistics,
    negligible: Floats,
) -> SufficientStatistics | None:
    """Return the statistics of the rows of ``whole`` that are not among those of ``part``.

    The inverse of `merge`. Of each component, `LEAST_LEFT` of the weight and of the scatter must be left, so
    that rounding errors, relative to what is left, are at most so much larger than those of the whole. Of
    components whose whole weight is ``negligible`` (K,) or less, nothing is left.

    Returns
    -------
    SufficientStatistics or None
        None where less is left of a component.
    """
    counts = whole.weights > negligible
    left = np.where(counts, whole.weights - part.weights, 0.0)
    if (left < LEAST_LEFT * whole.weights)[counts].any():
        return None
    growth = quotients(part.weights, left)
    moved = np.where(counts[:, np.newaxis], part.means - whole.means, 0.0)
    means = np.where(counts[:, np.newaxis], whole.means - growth[:, np.newaxis] * moved, 0.0)
    # Without axes, the difference of two arrays is a number, which cannot be added to in place.
    scatter = np.subtract(whole.scatter, part.scatter, out=np.empty_like(whole.scatter))
    structure.add_outer(scatter, -(growth * whole.weights)[np.newaxis], moved[np.newaxis])
    if not structure.shared:
        scatter[~counts] = 0.0
    before, after = (structure.variances(each, *means.shape) for each in (whole.scatter, scatter))
    if (after < LEAST_LEFT * before)[counts].any():
        return None
    return SufficientStatistics(read_only(left), read_only(means), read_only(scatter))


def spread_out(statistics: SufficientStatistics, components: Bools) -> SufficientStatistics:
    """Return statistics of all K components from those of some, (K,) bool; the others' are zero.

    Where components share a covariance, all must be there.
    """
    if components.all():
        return statistics

    def spread(some: Floats) -> Floats:
        whole = np.zeros((len(components), *some.shape[1:]))
        whole[components] = some
        return read_only(whole)

    return SufficientStatistics(
        spread(statistics.weights), spread(statistics.means), spread(statistics.scatter)
    )


def chosen(statistics: SufficientStatistics, components: Bools) -> SufficientStatistics:
    """Return the statistics of some of the components, (K,) bool: the inverse of `spread_out`.

    Where components share a covariance, all must be chosen.
    """
    if components.all():
        return statistics
    parts = statistics.weights, statistics.means, statistics.scatter
    return SufficientStatistics(*(read_only(part[components]) for part in parts))


def block_statistics(
    structure: CovarianceStructure, rows: Floats, responsibilities: Floats
) -> SufficientStatistics:
    """Return the statistics of rows (n, d) with responsibilities (K, n), times the row weights; float64.

    The first pass over the rows computes means, the second the scatter about them. The second also corrects
    the means for the rounding of the first (Chan et al. 1983, eq. 1.7). So neither the distance from the
    origin nor a collapse onto identical rows costs digits.
    """
    fewer: Floats = np.empty((len(rows) // 2, rows.shape[1]))
    parts = (_present(rows, own, fewer) for own in responsibilities)
    return _summed(structure, (len(responsibilities), *rows.shape), parts)


def _present(rows: Floats, row_weights: Floats, fewer: Floats) -> tuple[Floats, Floats]:
    """Leave out rows without weight where they are the majority, as in many dimensions; into ``fewer``."""
    present = np.flatnonzero(row_weights != 0.0)
    if len(present) > len(fewer):
        return rows, row_weights
    return np.take(rows, present, axis=0, out=fewer[: len(present)], mode="clip"), row_weights[present]


def group_statistics(
    structure: CovarianceStructure, rows: Floats, groups: Ints, weights: Floats | None, n_components: int
) -> SufficientStatistics:
    """Return the statistics of rows that belong to one component each, as `block_statistics` does.

    Rows are (n, d), float64; groups (n,) are the component of each; weights are (n,), None where every row
    weighs 1.
    """
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=n_components))
    sorted_rows = rows[order]
    sorted_weights = np.ones(len(rows)) if weights is None else weights[order]
    spans = (slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True))
    parts = ((sorted_rows[span], sorted_weights[span]) for span in spans)
    return _summed(structure, (n_components, *rows.shape), parts)


def tile_rows(n_features: int) -> int:
    """Return how many rows' residuals are held at a time: a fixed function of the number of features.

    They are so many that a (d, d) product costs far more than adding it, and at least what fills half of
    a core's L2 cache: the longer the calls, the less threads wait for each other between them.
    """
    return max(MIN_TILE_ROWS, TILE_BYTES // (8 * n_features))


def _summed(
    structure: CovarianceStructure, shape: tuple[int, int, int], parts: Iterable[tuple[Floats, Floats]]
) -> SufficientStatistics:
    """Return statistics from the rows of each component, and their weights; shape is (K, n, d)."""
    K, n, d = shape
    height = tile_rows(d)
    buffer = room_for_rows(min(height, n), d)
    weights, means, corrections = np.zeros(K), np.zeros((K, d)), np.zeros((K, d))
    scatter = (np.zeros if structure.shared else np.empty)(structure.shape(K, d))
    solving = structure.solving_for(d)
    sum_scatter = (solving or structure).sum_scatter

    def roots_of(k: int, rows: Floats, row_weights: Floats) -> Iterator[Floats]:
        roots = np.sqrt(row_weights)
        weighted = bool((roots != 1.0).any())
        for begin in range(0, len(rows), height):
            tile = slice(begin, begin + height)
            residuals = buffer[: len(rows[tile])]
            np.subtract(rows[tile].T, means[k][:, np.newaxis], out=residuals.T)
            corrections[k] += row_weights[tile] @ residuals
            if weighted:
                np.multiply(residuals.T, roots[tile], out=residuals.T)
            yield residuals

    for k, (rows, row_weights) in enumerate(parts):
        weights[k] = row_weights.sum()
        if weights[k] > 0:
            means[k] = row_weights @ rows / weights[k]
            sum_scatter(scatter, k, roots_of(k, rows, row_weights))
        elif not structure.shared:
            scatter[k] = 0.0
    corrections = quotients(corrections, weights[:, np.newaxis])
    outer = -weights[np.newaxis], corrections[np.newaxis]
    if solving is None:
        structure.add_outer(scatter, *outer)
        found: Floats | Triangles = read_only(scatter)
    else:
        found = as_triangles(read_only(scatter), *outer)
    return SufficientStatistics(read_only(weights), read_only(means + corrections), found)


class PairwiseMerger(Generic[T]):
    """Merges a stream of n parts as a balanced tree, of which it holds at most log₂ n + 1 results.

    Merging one after another would add a rounding for every part; a balanced tree adds one for every level.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self._levels: list[T | None] = []

    def push(self, part: T) -> None:
        """Add the next part."""
        for level, before in enumerate(self._levels):
            if before is None:
                self._levels[level] = part
                return
            part = self._merge(before, part)
            self._levels[level] = None
        self._levels.append(part)

    def total(self) -> T | None:
        """Return all parts so far merged, None where there were none; the next part begins a new stream."""
        parts = [part for part in self._levels if part is not None]
        self._levels = []
        return reduce(lambda later, earlier: self._merge(earlier, later), parts) if parts else None


class RowSums(NamedTuple):
    """What is summed over some rows under one plan; either is None where nothing is summed so, but not both.

    Attributes
    ----------
    moments : ndarray of shape (m,) or None
        Of the components scored together, by features: their arrays, one after the other.
    statistics : SufficientStatistics or None
        Of all K components, zero where it is for the moments.
    """

    moments: Floats | None
    statistics: SufficientStatistics | None


class SumsMerger:
    """Merges the sums of parts of the rows, in the order in which they come."""

    def __init__(self, structure: CovarianceStructure) -> None:
        self._moments: list[Floats] = []
        self._merger = Merger(structure)

    def push(self, part: RowSums | None) -> None:
        """Add the next part; None stands for no rows."""
        if part is None:
            return
        if part.moments is not None:
            self._moments.append(part.moments)
        if part.statistics is not None:
            self._merger.push(part.statistics)

    def total(self) -> RowSums | None:
        """Return all parts merged, None where there were no rows. To be called once, after the last part."""
        moments, statistics = _sum(self._moments), self._merger.total()
        return None if moments is None and statistics is None else RowSums(moments, statistics)


def _sum(parts: list[Floats]) -> Floats | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def merge_sums(structure: CovarianceStructure, parts: Iterable[RowSums | None]) -> RowSums | None:
    """Return the sums of all rows of ``parts`` together; None stands for no rows."""
    merger = SumsMerger(structure)
    for part in parts:
        merger.push(part)
    return merger.total()


def size_of(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return how many numbers arrays of these shapes have."""
    return sum(map(math.prod, shapes))


def views_of(numbers: Floats, shapes: tuple[tuple[int, ...], ...]) -> Moments:
    """Return arrays of these shapes that lie one after the other in ``numbers``."""
    ends = list(accumulate(map(math.prod, shapes)))
    return tuple(
        numbers[begin:end].reshape(shape) for begin, end, shape in zip([0, *ends], ends, shapes, strict=False)
    )


class MomentSums:
    """Moments of a stream of blocks, in float64; those of each are to be written into ``block``, (m,).

    Blocks are added up in place until they have ``added_rows`` rows, as many as one product would sum anyway.
    These sums are merged pairwise.
    """

    def __init__(self, block: Floats, added_rows: int = ADDED_ROWS) -> None:
        self.block = block
        self._sum: Floats | None = None
        self._rows, self._added_rows = 0, added_rows
        self._merger: PairwiseMerger[Floats] = PairwiseMerger(operator.add)

    def push(self, n_rows: int) -> None:
        """Add the moments that were written into `block`, of a block of ``n_rows`` rows."""
        if self._sum is None:
            self._sum = self.block.copy()
        else:
            self._sum += self.block
        self._rows += n_rows
        if self._rows >= self._added_rows:
            self._flush()

    def _flush(self) -> None:
        if self._sum is not None:
            self._merger.push(self._sum)
            self._sum, self._rows = None, 0

    def total(self) -> Floats | None:
        """Return the moments of all blocks so far, (m,), None where there were none; then begin again."""
        self._flush()
        return self._merger.total()
