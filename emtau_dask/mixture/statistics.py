"""Sufficient statistics: their zero, those of a block, their merging, and running sums of moments.

The M-step needs the sums of ``s_n w_nk · (1, x, x xᵀ)`` over rows. They are kept centred, as (weight, mean,
scatter about the mean), and merged pairwise (Chan, Golub and LeVeque 1983, "Algorithms for computing the
sample variance", eq. 2.1), because ``E[x²] − μ²`` loses all its digits on data far from the origin.

Moments of features in a frame are plain sums: those of chunks are added, and means and scatters are computed
once for all rows. That loses no more digits than computing them for each chunk, because the frame is the same
for all (`features.conditions`). Sums about the means of their own rows are statistics immediately.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Moments
from emtau_dask.mixture.linalg import FEW_FEATURES, Floats, Ints, read_only

T = TypeVar("T")
TILE_BYTES, MIN_TILE_ROWS = 2**20, 1024
MIN_LEFT = 2.0**-4
"""Minimum share of a component's weight, and of its scatter in each feature, that `remainder` may leave."""
ADDED_ROWS = 1024
"""Number of rows whose moments are added block by block if blocks are shorter."""


@dataclass(frozen=True, eq=False)
class SufficientStatistics:
    """Sums over rows, per component, in centred form; float64, read-only.

    Attributes
    ----------
    weights : ndarray of shape (K,)
        ``Σ_n s_n w_nk``, in weighted rows.
    means : ndarray of shape (K, d)
        Weighted means; zero if the weight is zero.
    scatter : ndarray
        Weighted scatter about the means, in the shape of the covariances: summed over the
        components that share a covariance, and over the features that share a variance.
    """

    weights: Floats
    means: Floats
    scatter: Floats


def zero(structure: CovarianceStructure, n_components: int, n_features: int) -> SufficientStatistics:
    """Return the statistics of no rows: the identity of `merge`."""
    return SufficientStatistics(
        read_only(np.zeros(n_components)),
        read_only(np.zeros((n_components, n_features))),
        read_only(np.zeros(structure.shape(n_components, n_features))),
    )


def quotients(part: Floats, whole: Floats) -> Floats:
    """Return ``part / whole``; zero if ``whole`` is zero."""
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)


class RowSums(NamedTuple):
    """The sums over some rows under one plan; moments or statistics may be None, but not both.

    Attributes
    ----------
    moments : ndarray of shape (m,) or None
        Moments of features: their arrays, one after the other.
    statistics : SufficientStatistics or None
        Statistics of rows that were summed in the centred form.
    log_likelihood : float
        ``Σ s_n ln p(x_n)``, nats; 0 until the task that scored the rows sets it.
    """

    moments: Floats | None
    statistics: SufficientStatistics | None
    log_likelihood: float = 0.0


class Merger:
    """Merges the sums of parts of the rows, in the order in which they come.

    Statistics are merged at once, from the sum of their scatters, their weights and their means. With
    ``μ = Σ W_i μ_i / W``, the scatter of all is ``Σ_i S_i + W_i (μ_i − μ)(μ_i − μ)ᵀ``.
    """

    def __init__(self, structure: CovarianceStructure) -> None:
        self._structure = structure
        self._moments: list[Floats] = []
        self._weights: list[Floats] = []
        self._means: list[Floats] = []
        self._first: SufficientStatistics | None = None
        self._scatter: Floats | None = None
        self._log_likelihood = 0.0

    def push(self, part: RowSums) -> None:
        """Add the next part."""
        statistics = part.statistics
        self._log_likelihood += part.log_likelihood
        if part.moments is not None:
            self._moments.append(part.moments)
        if statistics is None:
            return
        if not self._weights:
            self._first = statistics
        elif self._first is not None:
            # The sum of two arrays without axes is a scalar, which cannot be added to in place.
            out = np.empty_like(statistics.scatter)
            self._scatter = np.add(self._first.scatter, statistics.scatter, out=out)
            self._first = None
        else:
            assert self._scatter is not None
            self._scatter += statistics.scatter
        self._weights.append(statistics.weights)
        self._means.append(statistics.means)

    def total(self) -> RowSums | None:
        """Return all parts merged, None if there were none; call it once, after the last part."""
        if not self._moments and not self._weights:
            return None
        moments = self._moments[0] if self._moments else None
        if len(self._moments) > 1:
            moments = self._moments[0] + self._moments[1]
            for part in self._moments[2:]:
                moments += part
        statistics = self._first if self._scatter is None else self._merged(self._scatter)
        return RowSums(moments, statistics, self._log_likelihood)

    def _merged(self, scatter: Floats) -> SufficientStatistics:
        weights, means = self._weights, self._means
        whole = np.sum(weights, axis=0)
        mean = means[0].copy()
        for part_weights, part_means in zip(weights[1:], means[1:], strict=True):
            mean += quotients(part_weights, whole)[:, np.newaxis] * (part_means - means[0])
        self._structure.add_outer(scatter, np.array(weights), np.array(means) - mean)
        return SufficientStatistics(read_only(whole), read_only(mean), read_only(scatter))


def merge_sums(structure: CovarianceStructure, parts: Iterable[RowSums | None]) -> RowSums | None:
    """Return the sums of all rows of ``parts`` together; None means no rows."""
    merger = Merger(structure)
    for part in parts:
        if part is not None:
            merger.push(part)
    return merger.total()


def merged(structure: CovarianceStructure, parts: Iterable[SufficientStatistics]) -> SufficientStatistics:
    """Return the statistics of all rows of ``parts`` together; there must be at least one part.

    Associative and commutative to rounding; statistics merged with `zero` keep their bits.
    """
    sums = merge_sums(structure, (RowSums(None, part) for part in parts))
    assert sums is not None
    assert sums.statistics is not None
    return sums.statistics


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

    The inverse of `merge`. At least the share `MIN_LEFT` of the weight and of the scatter of each component
    must be left, which bounds the growth of relative rounding errors. A component whose whole weight is at
    most ``negligible`` (K,) is set to zero.

    Returns
    -------
    SufficientStatistics or None
        None if less is left of a component.
    """
    counts = whole.weights > negligible
    left = np.where(counts, whole.weights - part.weights, 0.0)
    if (left < MIN_LEFT * whole.weights)[counts].any():
        return None
    growth = quotients(part.weights, left)
    moved = np.where(counts[:, np.newaxis], part.means - whole.means, 0.0)
    means = np.where(counts[:, np.newaxis], whole.means - growth[:, np.newaxis] * moved, 0.0)
    # The difference of two arrays without axes is a scalar, which cannot be added to in place.
    scatter = np.subtract(whole.scatter, part.scatter, out=np.empty_like(whole.scatter))
    structure.add_outer(scatter, -(growth * whole.weights)[np.newaxis], moved[np.newaxis])
    if not structure.shared:
        scatter[~counts] = 0.0
    before, after = (structure.variances(each, *means.shape) for each in (whole.scatter, scatter))
    if (after < MIN_LEFT * before)[counts].any():
        return None
    return SufficientStatistics(read_only(left), read_only(means), read_only(scatter))


def block_statistics(
    structure: CovarianceStructure, rows: Floats, responsibilities: Floats
) -> SufficientStatistics:
    """Return the statistics of rows (n, d) with responsibilities (K, n), times the row weights; float64.

    The first pass over the rows computes means, the second the scatter about them. The second also corrects
    the means for the rounding of the first (Chan et al. 1983, eq. 1.7). So neither the distance from the
    origin nor a collapse onto identical rows costs digits. Rows in Fortran order are fastest.
    """
    by_features = rows.strides[0] < rows.strides[1]
    buffer = np.empty(len(rows) // 2 * rows.shape[1])
    parts = (_rows_with_weight(rows, row_weights, buffer) for row_weights in responsibilities)
    return _summed(structure, (len(responsibilities), *rows.shape), parts, by_features=by_features)


def _rows_with_weight(rows: Floats, row_weights: Floats, buffer: Floats) -> tuple[Floats, Floats]:
    """Return rows and weights; if most weights are 0, only the others, copied to ``buffer``."""
    weighted, d = np.flatnonzero(row_weights != 0.0), rows.shape[1]
    if 2 * len(weighted) > len(rows):
        return rows, row_weights
    out = buffer[: len(weighted) * d]
    if rows.strides[0] < rows.strides[1]:
        some = np.take(rows.T, weighted, axis=1, out=out.reshape(d, len(weighted)), mode="clip").T
    else:
        some = np.take(rows, weighted, axis=0, out=out.reshape(len(weighted), d), mode="clip")
    return some, row_weights[weighted]


def group_statistics(
    structure: CovarianceStructure, rows: Floats, groups: Ints, weights: Floats | None, n_components: int
) -> SufficientStatistics:
    """Return the statistics of rows that belong to one component each, by the method of `block_statistics`.

    Rows are (n, d), float64; groups (n,) are the components of the rows; weights are (n,), None if every row
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
    """Return the number of rows whose residuals are computed at a time: a function of the number of features.

    It is so large that a (d, d) product costs far more than adding it, and fills at least half of a core's L2
    cache: with longer calls, threads wait less for each other.
    """
    return max(MIN_TILE_ROWS, TILE_BYTES // (8 * n_features))


def _summed(
    structure: CovarianceStructure,
    shape: tuple[int, int, int],
    parts: Iterable[tuple[Floats, Floats]],
    *,
    by_features: bool = False,
) -> SufficientStatistics:
    """Return statistics from the rows of each component and their weights; shape is (K, n, d).

    Residuals are in Fortran order if rows are, or if features are few, so that NumPy's loops are long.
    """
    K, n, d = shape
    height = tile_rows(d)
    buffer = np.empty((min(height, n), d), order="F" if by_features or d < FEW_FEATURES else "C")
    weights, means, corrections = np.zeros(K), np.zeros((K, d)), np.zeros((K, d))
    scatter = (np.zeros if structure.shared else np.empty)(structure.shape(K, d))

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
            structure.sum_scatter(scatter, k, roots_of(k, rows, row_weights))
        elif not structure.shared:
            scatter[k] = 0.0
    corrections = quotients(corrections, weights[:, np.newaxis])
    structure.add_outer(scatter, -weights[np.newaxis], corrections[np.newaxis])
    return SufficientStatistics(read_only(weights), read_only(means + corrections), read_only(scatter))


class PairwiseMerger(Generic[T]):
    """Merges a stream of n parts as a balanced tree, and keeps at most log₂ n + 1 results.

    Merging one part after another would add a rounding error for every part; a balanced tree adds one for
    every level.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self._results: list[tuple[int, T]] = []  # each with its number of parts, powers of 2 that fall

    def push(self, part: T) -> None:
        """Add the next part."""
        size = 1
        while self._results and self._results[-1][0] == size:
            part = self._merge(self._results.pop()[1], part)
            size *= 2
        self._results.append((size, part))

    def total(self, last: T | None = None) -> T | None:
        """Return all parts so far, and the ``last`` one if given, merged; None without any. Then reset."""
        while self._results:
            _, before = self._results.pop()
            last = before if last is None else self._merge(before, last)
        return last


def size_of(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of values of arrays of these shapes."""
    return sum(map(math.prod, shapes))


def views_of(numbers: Floats, shapes: tuple[tuple[int, ...], ...]) -> Moments:
    """Return views of ``numbers`` as consecutive arrays of these shapes."""
    ends = list(accumulate(map(math.prod, shapes)))
    return tuple(
        numbers[begin:end].reshape(shape) for begin, end, shape in zip([0, *ends], ends, shapes, strict=False)
    )


class MomentSums:
    """Sums of moments of blocks, float64; the caller writes those of each block to ``block`` (m,).

    Blocks are added in place until they have `ADDED_ROWS` rows, as many as one product may sum. These sums
    are merged pairwise.
    """

    def __init__(self, block: Floats) -> None:
        self.block = block
        self._sum: Floats | None = None
        self._rows = 0
        self._merger: PairwiseMerger[Floats] = PairwiseMerger(operator.add)

    def push(self, n_rows: int) -> None:
        """Add the moments that were written into `block`, of a block of ``n_rows`` rows."""
        if self._sum is None:
            self._sum = self.block.copy()
        else:
            self._sum += self.block
        self._rows += n_rows
        if self._rows >= ADDED_ROWS:
            self._merger.push(self._sum)
            self._sum, self._rows = None, 0

    def total(self) -> Floats | None:
        """Return the moments of all blocks so far, (m,), None without any, and reset them."""
        last, self._sum, self._rows = self._sum, None, 0
        return self._merger.total(last)
