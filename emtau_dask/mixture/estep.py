"""The E-step over a block of rows by NumPy, and its sufficient statistics.

In the centred form the differences to μ_k are whitened by the triangular precision factor, squared and
summed. No digit is lost however far the rows are from the origin, and nothing is required of the covariances.
In the form by features all components are scored by one product, and moments summed by another. A block whose
products overflow uses the centred form.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from emtau_dask.mixture.linalg import AnyArray, Floats, squared_length
from emtau_dask.mixture.parameters import most_probable
from emtau_dask.mixture.plan import KernelPlan, pending_rows
from emtau_dask.mixture.statistics import (
    MomentSums,
    PairwiseMerger,
    RowSums,
    block_statistics,
    merge,
    size_of,
    views_of,
)

MIN_EXPONENT = {dtype: float(np.log(np.finfo(dtype).tiny)) + 8.0 for dtype in map(np.dtype, ("f4", "f8"))}
"""Minimum exponent by dtype; exponentials of smaller numbers count as 0. The exponential of the minimum is
3,000 times the smallest normal number."""


def exponentials(values: Floats, spare: Floats) -> None:
    """Replace ``values`` (K, n), at most 0, by their exponentials; by 0 below `MIN_EXPONENT`.

    NumPy's ``exp`` takes 6 to 50 times as long if it underflows (`benchmarks/kernels.py`), and arithmetic
    with subnormal numbers takes longer still. So smaller values are raised to the minimum exponent, and its
    exponential is subtracted from all results. The minimum fills the buffer ``spare`` (n,), because NumPy
    takes three times as long with a scalar as with a row.
    """
    spare.fill(MIN_EXPONENT[values.dtype])
    np.maximum(values, spare, out=values)
    np.exp(values, out=values)
    np.exp(spare, out=spare)
    np.subtract(values, spare, out=values)


def normalise(scores: Floats, peaks: Floats, sums: Floats) -> Floats:
    """Turn weighted log-densities (K, n) into responsibilities; return the log-likelihoods of the rows, (n,).

    ``peaks`` and ``sums`` (n,) are buffers.
    """
    np.maximum.reduce(scores, axis=0, out=peaks)
    np.subtract(scores, peaks, out=scores)
    exponentials(scores, sums)
    np.add.reduce(scores, axis=0, out=sums)
    np.divide(scores, sums, out=scores)
    np.log(sums, out=sums)
    log_likelihoods: Floats = np.add(sums, peaks)
    return log_likelihoods


class ScoredBlock(NamedTuple):
    """Responsibilities and log-likelihoods of a block of rows under a mixture.

    Attributes
    ----------
    responsibilities : ndarray of shape (K, n)
        Paper, section 2, equation for ``w_k(x_n, Θ)``.
    log_likelihoods : ndarray of shape (n,), nats
        ``ln p(x_n | Θ)``; not finite if a row is beyond the range of float64.
    total : float, nats
        The sum of the log-likelihoods; not finite if one of them is not.
    """

    responsibilities: Floats
    log_likelihoods: Floats
    total: float


class Accumulated(NamedTuple):
    """Log-likelihoods, and their total, of a block of rows whose statistics were added; see `ScoredBlock`.

    Attributes
    ----------
    squared : float
        The sum of the squares of all values of the rows, in their dtype. Not finite if it overflows, or if a
        value is not finite; in the latter case no statistics were added.
    """

    log_likelihoods: Floats
    total: float
    squared: float

    @classmethod
    def nothing(cls, n_rows: int) -> Accumulated:
        """Return the result, all NaN, for rows with a value that is not finite."""
        return cls(np.full(n_rows, np.nan), math.nan, math.nan)


class MostProbable(NamedTuple):
    """Output arrays for the label of each row of a block, and for the responsibility of the label."""

    labels: AnyArray  # (n,), of an unsigned integer; ties go to the lowest index
    largest: Floats  # (n,)


class FeatureProducts:
    """Scores blocks of at most ``n_rows`` rows by products with features, and sums their ``moments``."""

    def __init__(self, plan: KernelPlan, n_rows: int) -> None:
        assert plan.frame is not None
        self._frame, self._coefficients = plan.frame, plan.coefficients
        self._features = np.ones((self._coefficients.shape[1], n_rows))
        self._write_squares = plan.parameters.structure.squares.write
        self.moments = MomentSums(np.empty(size_of(plan.moment_shapes)))
        self._sums, *self._pooled = views_of(self.moments.block, plan.moment_shapes)

    def score(self, columns: Floats, scores: Floats) -> None:
        """Write weighted log-densities of rows (d, n), minus the plan's ceiling, into ``scores`` (K, n)."""
        (d, n), transform = columns.shape, self._frame.transform
        features, centre = self._features[:, :n], self._frame.centre[:, np.newaxis]
        coordinates = features[1 : 1 + d]
        if transform is None:
            np.subtract(columns, centre, out=coordinates)
        else:
            np.matmul(transform.T, columns - centre, out=coordinates)
        self._write_squares(coordinates, features[1 + d :])
        np.matmul(self._coefficients, features, out=scores)

    def collect(self, responsibilities: Floats) -> None:
        """Add the moments of the block that was scored last, with responsibilities (K, n)."""
        n = responsibilities.shape[1]
        features = self._features[:, :n]
        np.dot(responsibilities, features[: self._sums.shape[1]].T, out=self._sums)
        for squares in self._pooled:
            coordinates = features[1 : 1 + len(squares)]
            np.dot(coordinates * responsibilities.sum(axis=0), coordinates.T, out=squares)
        self.moments.push(n)


class BlockKernel:
    """Scores blocks of at most ``n_rows`` rows and sums their statistics, for one task at a time."""

    def __init__(self, plan: KernelPlan, n_rows: int) -> None:
        K, d = plan.parameters.means.shape
        self.n_rows, self.plan = n_rows, plan
        self._scores, self._row_buffers = np.empty((K, n_rows)), np.empty((2, n_rows))
        self._columns, self._differences = np.empty((2, d, n_rows))
        self._products = None if plan.frame is None else FeatureProducts(plan, n_rows)
        self._centred = PairwiseMerger(partial(merge, plan.parameters.structure))
        self._pending: list[tuple[Floats, Floats]] = []
        self._n, self._by_products = 0, False

    def score(self, rows: AnyArray) -> ScoredBlock:
        """Return responsibilities and log-likelihoods of a block of rows (n, d).

        The responsibilities are valid until the next call; the caller may change them.
        """
        self._n = len(rows)
        self._columns[:, : self._n] = rows.T
        with np.errstate(over="ignore", invalid="ignore"):
            self._by_products = self._products is not None
            scored = self._scored()
            if self._by_products and not math.isfinite(scored.total):
                self._by_products = False
                scored = self._scored()
        return scored

    def _scored(self) -> ScoredBlock:
        n = self._n
        scores = self._scores[:, :n]
        if self._products is not None and self._by_products:
            self._products.score(self._columns[:, :n], scores)
        else:
            self._write_centred(scores)
        log_likelihoods = normalise(scores, *self._row_buffers[:, :n])
        log_likelihoods += self.plan.ceiling
        return ScoredBlock(scores, log_likelihoods, float(np.add.reduce(log_likelihoods)))

    def _write_centred(self, scores: Floats) -> None:
        """Write weighted log-densities, minus the plan's ceiling, into ``scores`` (K, n)."""
        parameters = self.plan.parameters
        whiten, factors = parameters.structure.whiten, parameters.precisions_cholesky
        columns, differences = self._columns[:, : self._n], self._differences[:, : self._n]
        for k, (mean, log_scale) in enumerate(zip(parameters.means, self.plan.log_scales, strict=True)):
            np.subtract(columns, mean[:, np.newaxis], out=differences)
            whiten(differences.T, factors, k)
            np.einsum("ij,ij->j", differences, differences, out=scores[k])
            scores[k] *= -0.5
            scores[k] += log_scale

    def collect(self, weights: Floats | None = None) -> None:
        """Add the statistics of the block that was scored last.

        Responsibilities are multiplied in place by the weights of the rows (n,), None if each weighs 1.
        """
        responsibilities = self._scores[:, : self._n]
        if weights is not None:
            responsibilities *= weights
        if self._products is not None and self._by_products:
            self._products.collect(responsibilities)
        else:
            self._pending.append((self._columns[:, : self._n].copy(), responsibilities.copy()))
            structure, shape = self.plan.parameters.structure, self.plan.parameters.means.shape
            if sum(columns.shape[1] for columns, _ in self._pending) >= pending_rows(structure, *shape):
                self._sum_pending()

    def _sum_pending(self) -> None:
        columns, responsibilities = (
            np.concatenate(parts, axis=1) for parts in zip(*self._pending, strict=True)
        )
        self._pending.clear()
        self._centred.push(block_statistics(self.plan.parameters.structure, columns.T, responsibilities))

    def accumulate(
        self, rows: AnyArray, weights: Floats | None = None, out: MostProbable | None = None
    ) -> Accumulated:
        """Score a block of rows (n, d) with weights (n,), add its statistics, and write labels to ``out``."""
        squared = squared_length(rows)
        if not math.isfinite(squared) and not np.isfinite(rows).all():
            return Accumulated.nothing(len(rows))
        scored = self.score(rows)
        if out is not None:
            out.labels[...], out.largest[...] = most_probable(scored.responsibilities)
        with np.errstate(over="ignore", invalid="ignore"):
            self.collect(weights)
        return Accumulated(scored.log_likelihoods, scored.total, squared)

    def sums(self) -> RowSums | None:
        """Return the sums over all collected blocks, None without any, and reset them."""
        moments = None if self._products is None else self._products.moments.total()
        if self._pending:
            self._sum_pending()
        centred = self._centred.total()
        return None if moments is None and centred is None else RowSums(moments, centred)
