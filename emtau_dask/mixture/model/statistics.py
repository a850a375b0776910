"""Sufficient statistics of a mixture: zero, of a block, merged.

What the M-step needs of any set of rows are the sums of
``s_n w_nk · (1, x, x xᵀ)``. They are held centred, as (weight, mean, scatter
about the mean), and merged pairwise (Chan, Golub and LeVeque 1983, "Algorithms
for computing the sample variance", eq. 2.1), because ``E[x²] − μ²`` loses all
its digits on data far from the origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.numerics import (
    Bools,
    Floats,
    Ints,
    perform,
    read_only,
    read_only_copy,
    summed_product,
)

T = TypeVar("T")
TILE_BYTES, MIN_TILE_ROWS = 2**20, 1024


@dataclass(frozen=True, eq=False)
class SufficientStatistics:
    """Sums over rows, per component, in centred form; float64, read-only.

    Attributes
    ----------
    weights : ndarray of shape (K,)
        ``Σ_n s_n w_nk``, in weighted rows.
    means : ndarray of shape (K, d)
        Weighted means; zero where the weight is.
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
    """Return ``part / whole``, zero where ``whole`` is."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


class Merger:
    """Merge a stream of parts in one go, holding the sum of their scatters.

    Beside that sum, all that is needed of the parts are weights and means:
    with ``μ = Σ W_i μ_i / W``, the scatter of all is
    ``Σ_i S_i + W_i (μ_i − μ)(μ_i − μ)ᵀ``.
    """

    def __init__(self, structure: CovarianceStructure) -> None:
        self._structure = structure
        self._weights: list[Floats] = []
        self._means: list[Floats] = []
        self._scatter: Floats = np.empty(0)

    def push(self, part: SufficientStatistics) -> None:
        """Add the next part."""
        if not self._weights:
            self._scatter = part.scatter
        elif len(self._weights) == 1:
            # A plain sum of arrays without axes would be a number, which nothing can be added to in place.
            self._scatter = np.add(self._scatter, part.scatter, out=np.empty_like(part.scatter))
        else:
            self._scatter += part.scatter
        self._weights.append(part.weights)
        self._means.append(part.means)

    def total(self) -> SufficientStatistics | None:
        """Return all parts merged, None where there were none; to be called once, after the last."""
        weights, means, scatter = self._weights, self._means, self._scatter
        if not weights:
            return None
        if len(weights) == 1:
            return SufficientStatistics(weights[0], means[0], scatter)
        whole = np.sum(weights, axis=0)
        mean = means[0].copy()
        for part_weights, part_means in zip(weights[1:], means[1:], strict=True):
            mean += quotients(part_weights, whole)[:, np.newaxis] * (part_means - means[0])
        self._structure.add_outer(scatter, np.array(weights), np.array(means) - mean)
        return SufficientStatistics(read_only(whole), read_only(mean), read_only(scatter))


def merged(structure: CovarianceStructure, parts: Iterable[SufficientStatistics]) -> SufficientStatistics:
    """Return the statistics of all rows of ``parts``, at least one, together.

    Associative and commutative to rounding; merged with `zero`, statistics keep
    their bits.
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


def spread_out(
    structure: CovarianceStructure, statistics: SufficientStatistics, components: Bools
) -> SufficientStatistics:
    """Return statistics of all K components from those of some, the others' zero.

    Parameters
    ----------
    structure : CovarianceStructure
        Not one that all components share, unless all are there.
    statistics : SufficientStatistics
    components : ndarray of bool, shape (K,)
        Which they are of.
    """
    if components.all():
        return statistics
    whole = zero(structure, len(components), statistics.means.shape[1])
    arrays = []
    for everyone, some in (
        (whole.weights, statistics.weights),
        (whole.means, statistics.means),
        (whole.scatter, statistics.scatter),
    ):
        spread = everyone.copy()
        spread[components] = some
        arrays.append(read_only(spread))
    return SufficientStatistics(*arrays)


def block_statistics(
    structure: CovarianceStructure, rows: Floats, responsibilities: Floats
) -> SufficientStatistics:
    """Return the statistics of some rows.

    Two passes over them (means, then scatter about them), the second of
    which also corrects the means for the rounding of the first (Chan et al.
    1983, eq. 1.7), so that neither the distance from the origin nor a collapse
    onto identical rows costs digits.

    Parameters
    ----------
    structure : CovarianceStructure
    rows : ndarray of shape (n, d), float64
    responsibilities : ndarray of shape (K, n), float64
        Times the row weights.
    """
    weights = responsibilities.sum(axis=1)
    sums = np.empty((len(weights), rows.shape[1]))
    perform(summed_product(responsibilities, rows.T, sums))
    means = quotients(sums, weights[:, np.newaxis])
    parts = ((int(k), *_present(rows, responsibilities[k])) for k in np.flatnonzero(weights > 0))
    return _about(structure, weights, means, parts)


def _present(rows: Floats, row_weights: Floats) -> tuple[Floats, Floats]:
    """Leave out rows that weigh nothing, where they are most: in many dimensions nearly all do."""
    present = np.flatnonzero(row_weights)
    if 2 * len(present) > len(rows):
        return rows, row_weights
    return rows[present], row_weights[present]


def group_statistics(
    structure: CovarianceStructure, rows: Floats, groups: Ints, weights: Floats | None, n_components: int
) -> SufficientStatistics:
    """Return the statistics of one block of rows that belong to one component each.

    As `block_statistics`, but each component sees its own rows alone.

    Parameters
    ----------
    structure : CovarianceStructure
    rows : ndarray of shape (n, d), float64
    groups : ndarray of shape (n,), integers
        Each row's component.
    weights : ndarray of shape (n,) or None
        None where every row weighs 1.
    n_components : int
    """
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=n_components))
    sorted_rows = rows[order]
    sorted_weights = np.ones(len(rows)) if weights is None else weights[order]
    spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    totals = np.array([sorted_weights[span].sum() for span in spans])
    sums = np.array([sorted_weights[span] @ sorted_rows[span] for span in spans])
    parts = ((k, sorted_rows[span], sorted_weights[span]) for k, span in enumerate(spans) if totals[k] > 0)
    return _about(structure, totals, quotients(sums, totals[:, np.newaxis]), parts)


def tile_rows(n_features: int) -> int:
    """Return how many rows' residuals are held at a time: a fixed function of the number of features.

    Enough for adding a (d, d) product to be little of its cost, and no fewer
    than half a core's L2 cache holds: the longer the calls, the less threads
    wait for each other between them.
    """
    return max(MIN_TILE_ROWS, TILE_BYTES // (8 * n_features))


def _about(
    structure: CovarianceStructure,
    weights: Floats,
    means: Floats,
    parts: Iterable[tuple[int, Floats, Floats]],
) -> SufficientStatistics:
    """Return statistics from first means, and the rows and weights that make each component up."""
    scatter = np.zeros(structure.shape(*means.shape))
    corrections = np.zeros_like(means)
    height = tile_rows(means.shape[1])
    buffer = np.empty((height, means.shape[1]))

    def roots_of(k: int, rows: Floats, row_weights: Floats) -> Iterator[Floats]:
        roots = np.sqrt(row_weights)[:, np.newaxis]
        for begin in range(0, len(rows), height):
            tile = slice(begin, begin + height)
            residuals = np.subtract(rows[tile], means[k], out=buffer[: len(rows[tile])])
            corrections[k] += row_weights[tile] @ residuals
            residuals *= roots[tile]
            yield residuals

    for k, rows, row_weights in parts:
        structure.add_scatter(scatter, k, roots_of(k, rows, row_weights))
    corrections = quotients(corrections, weights[:, np.newaxis])
    structure.add_outer(scatter, -weights[np.newaxis], corrections[np.newaxis])
    return SufficientStatistics(read_only_copy(weights), read_only(means + corrections), read_only(scatter))


class PairwiseMerger(Generic[T]):
    """Merge a stream of parts as a balanced tree, holding log₂ of their number.

    Merging one after another would add a rounding for every block; a balanced
    tree adds one for every level.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self._levels: list[T | None] = []

    def push(self, part: T) -> None:
        """Add the next part."""
        carry = part
        for level, before in enumerate(self._levels):
            if before is None:
                self._levels[level] = carry
                return
            carry = self._merge(before, carry)
            self._levels[level] = None
        self._levels.append(carry)

    def total(self) -> T | None:
        """Return all parts so far merged, None where there were none."""
        result: T | None = None
        for part in self._levels:
            if part is not None:
                result = part if result is None else self._merge(part, result)
        return result
