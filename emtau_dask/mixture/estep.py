"""The E-step over a block of rows by NumPy, and the statistics that it leaves.

In the centred form the differences to μ_k are whitened by a triangle, squared and summed: by the precision
factor, or with many features by solving with the covariance's. No digit is lost however far the rows are
from the origin, and nothing is required of the covariances.

In many dimensions a row is often so far from most components that their responsibility for it is 0 in
float64. With a triangular factor, a squared distance is a sum of terms of which each needs only the features
up to its own. The sum is broken off where the outcome is certain, which changes no responsibility and no
log-likelihood.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure
from emtau_dask.mixture.linalg import (
    AnyArray,
    Bools,
    Floats,
    Ints,
    Step,
    room_for_rows,
    squared_length,
    times_upper,
    upper_solution,
)
from emtau_dask.mixture.parameters import MixtureParameters, most_probable
from emtau_dask.mixture.plan import KernelPlan, stretch_rows
from emtau_dask.mixture.statistics import (
    PairwiseMerger,
    RowSums,
    SufficientStatistics,
    block_statistics,
    chosen,
    merge,
    merge_sums,
    spread_out,
)

REACH = 750.0
"""So many nats below a row's largest log-density, a responsibility is 0, as exp(-745.2) is."""
LEAST_EXPONENT = {dtype: float(np.log(np.finfo(dtype).tiny)) + 8.0 for dtype in map(np.dtype, ("f4", "f8"))}
"""By dtype, the exponent below which exponentials are taken for 0: theirs is 3,000 times the smallest normal
number."""
LEAST_PEAK = {dtype: max(least / 8.0, least + 75.0) for dtype, least in LEAST_EXPONENT.items()}
"""By dtype, the least score of a row's largest beside which exponentials taken for 0 do not count: they are
less than exp(-75) of it."""


class CentredStatistics:
    """Statistics of a stream of blocks, computed over long stretches of it.

    The statistics of each stretch cost a merge of K matrices (d, d). For short blocks of many features that
    would be far more than the products of the block.
    """

    def __init__(
        self, structure: CovarianceStructure, n_components: int, n_features: int, block_rows: int
    ) -> None:
        self._structure = structure
        self._most_rows = stretch_rows(structure, n_components, n_features, block_rows)
        self._rows: Floats = np.empty((block_rows, n_features))
        self._responsibilities: Floats = np.empty((n_components, block_rows))
        self._components: Bools = np.ones(n_components, dtype=np.bool_)
        self._gathered = 0
        self._merger = PairwiseMerger(partial(merge, structure))

    def push(self, rows: Floats, responsibilities: Floats, components: Bools) -> None:
        """Add a block of rows (n, d), with responsibilities (K, n) of which those of ``components`` count."""
        some, counted = responsibilities, np.arange(0)
        fewer = not components.all()
        if fewer:
            some = responsibilities[components]
            counted = np.flatnonzero(np.add.reduce(some, axis=0) != 0.0)
            fewer = 2 * len(counted) <= len(rows)
        end = self._gathered + (len(counted) if fewer else len(rows))
        if end > self._most_rows or not np.array_equal(components, self._components):
            end -= self._gathered
            self._flush()
        if end > len(self._rows):
            self._grow(end)
        self._components = components
        block = slice(self._gathered, end)
        if fewer:
            np.take(rows, counted, axis=0, out=self._rows[block], mode="clip")
            self._responsibilities[: len(some), block] = np.take(some, counted, axis=1)
        else:
            self._rows[block] = rows
            self._responsibilities[: len(some), block] = some
        self._gathered = end

    def _grow(self, needed: int) -> None:
        """Make room: most chunks are shorter than a stretch, and malloc keeps little for each thread."""
        n_rows = min(self._most_rows, max(needed, 2 * len(self._rows)))
        rows, responsibilities, kept = self._rows, self._responsibilities, slice(0, self._gathered)
        self._rows = np.empty((n_rows, rows.shape[1]))
        self._responsibilities = np.empty((len(responsibilities), n_rows))
        self._rows[kept], self._responsibilities[:, kept] = rows[kept], responsibilities[:, kept]

    def _flush(self) -> None:
        if self._gathered:
            rows = self._rows[: self._gathered]
            some = self._responsibilities[: np.count_nonzero(self._components), : self._gathered]
            found = block_statistics(self._structure, rows, some)
            self._merger.push(spread_out(found, self._components))
            self._gathered = 0

    def total(self) -> SufficientStatistics | None:
        """Return the statistics of all blocks so far, None where there were none; then begin again."""
        self._flush()
        return self._merger.total()


class _Length(NamedTuple):
    """What blocks of the same number of rows share."""

    n_rows: int
    differences: Floats  # (n_rows, d)
    halves: Floats  # of squared distances, (n_rows,)
    whitening: tuple[Step, ...]  # of each component


class CentredScores:
    """Log-densities of some components, one after the other; its buffers serve one task at a time.

    ``log_scales`` (K, 1) are those of the parameters, perhaps less a number.
    """

    def __init__(
        self, parameters: MixtureParameters, log_scales: Floats, components: Ints, n_rows: int
    ) -> None:
        self.components = components
        self._parameters = parameters
        self._log_scales = log_scales
        self._means = parameters.means[:, :, np.newaxis]
        self._buffer = room_for_rows(n_rows, parameters.n_features)
        self._halves: Floats = np.empty(n_rows)
        self._length = _Length(0, self._buffer[:0], self._halves[:0], ())
        everything = len(components) == parameters.n_components
        solving = parameters.structure.solving_for(parameters.n_features)
        self._breaks_off = everything and solving is not None

    def _whitening(self, differences: Floats, k: int) -> Step:
        parameters, solving = self._parameters, self._parameters.structure.solving
        if parameters.covariance_factors is not None and solving is not None:
            return solving.whitening(differences, parameters.covariance_factors, k, math.sqrt(0.5))
        return parameters.structure.whitening(differences, parameters.precisions_cholesky, k, math.sqrt(0.5))

    def _of_length(self, n: int) -> _Length:
        differences = self._buffer[:n]
        steps = (self._whitening(differences, k) for k in self.components)
        return _Length(n, differences, self._halves[:n], tuple(steps))

    def write(self, rows: Floats, out: Floats) -> None:
        """Write ``ln π_k N(x_n | μ_k, Σ_k)``, nats, for the components and rows (n, d) into ``out`` (K, n).

        Where a responsibility is certain to be 0, an upper bound may be written from which it is 0 as well.
        All arrays are float64.
        """
        if self._breaks_off and _broken_off(rows, self._parameters, self._log_scales, self._buffer, out):
            return
        for position in range(len(self.components)):
            self._write_one(position, rows, out)

    def _write_one(self, position: int, rows: Floats, out: Floats) -> None:
        if len(rows) != self._length.n_rows:
            self._length = self._of_length(len(rows))
        _, differences, halves, whitening = self._length
        k = self.components[position]
        np.subtract(rows.T, self._means[k], out=differences.T)
        whitening[position]()
        np.einsum("ij,ij->i", differences, differences, out=halves)
        np.subtract(self._log_scales[k], halves, out=out[k])

    def write_near(self, rows: Floats, out: Floats, largest: Floats) -> None:
        """Write as `write` does, where ``out`` (K, n) holds upper bounds of what is to be written.

        ``largest`` (n,) is the largest log-density of each row among those of other components. A bound that
        is further below it than `REACH` may stay.
        """
        floor = largest - REACH
        for position, k in enumerate(self.components):
            near = np.flatnonzero(~(out[k] <= floor))
            if 2 * len(near) > len(rows):
                self._write_one(position, rows, out)
                continue
            differences = self._buffer[: len(near)]
            np.subtract(rows[near].T, self._means[k], out=differences.T)
            self._whitening(differences, k)()
            out[k, near] = self._log_scales[k] - np.einsum("ij,ij->i", differences, differences)


def _whiten_first(differences: Floats, parameters: MixtureParameters, k: int) -> None:
    """Whiten the first features of differences to μ_k, (n, m), or all, in place."""
    m = differences.shape[1]
    if parameters.covariance_factors is None:
        times_upper(differences, parameters.precisions_cholesky[k, :m, :m])
    else:
        upper_solution(differences, parameters.covariance_factors[k, :m, :m])()


def _differences(rows: Floats, which: Ints, mean: Floats, features: slice) -> Floats:
    """Return differences of some rows to a mean in some features, C-ordered."""
    some = rows[which, features]
    return np.subtract(some, mean[features], out=np.empty(some.shape))


def _next_whitened(
    rows: Floats, which: Ints, whitened: Floats, end: int, parameters: MixtureParameters, k: int
) -> Floats:
    """Return features of some rows, whitened: up to ``end``, after those that are already, (m, begin)."""
    begin, mean = whitened.shape[1], parameters.means[k]
    if parameters.covariance_factors is None:
        differences = _differences(rows, which, mean, slice(end))
        found: Floats = np.matmul(differences, parameters.precisions_cholesky[k, :end, begin:end])
        return found
    factor = parameters.covariance_factors[k]
    found = _differences(rows, which, mean, slice(begin, end))
    found -= np.matmul(whitened, factor[:begin, begin:end])
    upper_solution(found, factor[begin:end, begin:end])()
    return found


def _broken_off(
    rows: Floats, parameters: MixtureParameters, log_scales: Floats, buffer: Floats, out: Floats
) -> bool:
    """Write log-densities, or bounds of them, and return True; False where few would be broken off.

    The first eighth of the features predicts which component is nearest to a row and how far the others
    are, as if all features were like these: distances are taken eight times, scales are of all features.
    The log-density of the nearest is computed in full; those of the others as long as they are within
    `REACH` of it.
    """
    d, means = parameters.n_features, parameters.means
    first, *rest = (d * eighths // 8 for eighths in (1, 2, 4, 6, 8))
    few = buffer.reshape(-1)[: len(rows) * first].reshape(-1, first)
    for k in range(len(out)):
        np.subtract(rows[:, :first], means[k, :first], out=few)
        _whiten_first(few, parameters, k)
        out[k] = log_scales[k] - _half_lengths(few)
    foreseen = log_scales + d / first * (out - log_scales)
    if 2 * np.count_nonzero(foreseen > foreseen.max(axis=0) - REACH) > out.size:
        return False
    nearest = foreseen.argmax(axis=0)
    for k in range(len(out)):
        which = np.flatnonzero(nearest == k)
        differences = np.take(rows, which, axis=0, out=buffer[: len(which)], mode="clip")
        differences -= means[k]
        _whiten_first(differences, parameters, k)
        out[k, which] = log_scales[k] - _half_lengths(differences)
    floor = out[nearest, np.arange(len(rows))] - REACH
    for k in range(len(out)):
        which = np.flatnonzero((nearest != k) & (out[k] > floor))
        if not len(which):
            continue
        whitened = _differences(rows, which, means[k], slice(first))
        _whiten_first(whitened, parameters, k)
        for end in rest:
            if not len(which):
                break
            part = _next_whitened(rows, which, whitened, end, parameters, k)
            out[k, which] -= _half_lengths(part)
            left = out[k, which] > floor[which]
            which, whitened = which[left], np.hstack([whitened[left], part[left]])
    return True


def _half_lengths(vectors: Floats) -> Floats:
    """Return half the squared lengths of vectors (n, m)."""
    halves: Floats = 0.5 * np.einsum("ij,ij->i", vectors, vectors)
    return halves


def underflows(values: Floats) -> bool:
    """Return whether a value is below `LEAST_EXPONENT` or NaN."""
    return not np.minimum.reduce(values, axis=None, initial=0.0) >= LEAST_EXPONENT[values.dtype]


def exponentials(values: Floats, spare: Floats) -> None:
    """Replace ``values`` (K, n), at most 0, by their exponentials, or 0 below `LEAST_EXPONENT`.

    ``spare`` (n,) is a buffer of the same dtype.
    """
    if underflows(values):
        _raised_exponentials(values, spare)
    else:
        np.exp(values, out=values)


def _raised_exponentials(values: Floats, spare: Floats) -> None:
    """Do as `exponentials` where some underflow.

    NumPy's ``exp`` takes 6 to 50 times as long where it underflows (`benchmarks/kernels.py`), and arithmetic
    with subnormal results takes longer still. So the smallest values are raised to one value, whose
    exponential is subtracted from all. That value fills ``spare``, since NumPy takes five times as long with
    a single number as with a row.
    """
    spare.fill(LEAST_EXPONENT[values.dtype])
    np.maximum(values, spare, out=values)
    np.exp(values, out=values)
    np.exp(spare, out=spare)
    np.subtract(values, spare, out=values)


def normalise(scores: Floats, ceiling: float, peaks: Floats, sums: Floats) -> Floats:
    """Turn scores (K, n) into responsibilities, and return the log-likelihoods of the rows, (n,), float64.

    Scores are weighted log-densities less the ceiling, in nats. Their exponentials are taken relative to
    each row's largest only where the largest of some row is below `LEAST_PEAK`. ``peaks`` and ``sums`` (n,)
    are buffers of the same dtype.
    """
    far = underflows(scores)
    relative = far and not np.maximum.reduce(scores, axis=0, out=peaks).min() >= LEAST_PEAK[scores.dtype]
    if relative:
        np.subtract(scores, peaks, out=scores)
        exponentials(scores, sums)
    elif far:
        _raised_exponentials(scores, sums)
    else:
        np.exp(scores, out=scores)
    np.add.reduce(scores, axis=0, out=sums)
    np.divide(scores, sums, out=scores)
    np.log(sums, out=sums)
    log_likelihoods: Floats = np.add(sums, ceiling, dtype=np.float64)
    if relative:
        log_likelihoods += peaks
    return log_likelihoods


class ScoredBlock(NamedTuple):
    """Responsibilities and log-likelihoods of a block of rows under a mixture.

    Attributes
    ----------
    responsibilities : ndarray of shape (K, n)
        Of the plan's dtype; float64 for a block that products cannot score.
        Paper, section 2, equation for ``w_k(x_n, Θ)``.
    log_likelihoods : ndarray of shape (n,), nats
        ``ln p(x_n | Θ)``; not finite where a row is beyond the range of float64.
    total : float, nats
        The sum of the log-likelihoods; not finite where one of them is not.
    """

    responsibilities: Floats
    log_likelihoods: Floats
    total: float


class Accumulated(NamedTuple):
    """Log-likelihoods, and their total, of a block of rows whose statistics were added; see `ScoredBlock`.

    Attributes
    ----------
    squared : float
        The sum of the squares of all values of the rows, in their dtype. Not finite where it overflows and
        where a value is not finite; in the latter case nothing was added.
    """

    log_likelihoods: Floats
    total: float
    squared: float

    @classmethod
    def nothing(cls, n_rows: int) -> Accumulated:
        """Return the result for rows of which some value is not finite: NaN throughout."""
        return cls(np.full(n_rows, np.nan), math.nan, math.nan)


class MostProbable(NamedTuple):
    """Arrays for the label of each row of a block, and for the responsibility of the label."""

    labels: AnyArray  # (n,), of an unsigned integer; ties go to the lowest index
    largest: Floats  # (n,)


class BlockKernel:
    """Scores blocks of at most ``n_rows`` rows, and sums their statistics, for one task after the other."""

    def __init__(self, plan: KernelPlan, n_rows: int) -> None:
        parameters = plan.parameters
        self.n_rows = n_rows
        self.plan = plan
        self._scores: Floats = np.empty((parameters.n_components, n_rows), dtype=plan.dtype)
        self._of_rows: Floats = np.empty((2, n_rows), dtype=plan.dtype)
        self._some: Floats = self._scores
        if not plan.produced.all():
            self._some = np.empty((np.count_nonzero(plan.produced), n_rows))
        self._products = plan.products(self._some)
        self._alone: CentredScores | None = None
        self._centred: CentredStatistics | None = None
        self._rows: Floats = np.empty((0, parameters.n_features))
        self._responsibilities: Floats = self._scores[:, :0]
        self._together = plan.together

    def score(self, rows: Floats) -> ScoredBlock:
        """Return responsibilities and log-likelihoods of a block of rows (n, d) of the plan's dtype.

        The responsibilities are valid until the next call; the caller may change them.
        """
        self._rows = rows
        self._together = self.plan.together
        with np.errstate(over="ignore", invalid="ignore"):
            log_likelihoods = self._scored(rows)
            total = float(np.add.reduce(log_likelihoods))
            if self._together.any() and not math.isfinite(total):
                self._together = np.zeros_like(self._together)
                log_likelihoods = self._scored(rows)
                total = float(np.add.reduce(log_likelihoods))
        return ScoredBlock(self._responsibilities, log_likelihoods, total)

    def _scored(self, rows: Floats) -> Floats:
        together, n = self._together, len(rows)
        scores, of_rows = self._scores[:, :n], self._of_rows[:, :n]
        if self.plan.single and not together.any():
            rows, scores = rows.astype(np.float64), np.empty(scores.shape)
            of_rows = np.empty(of_rows.shape)
        if self._products is not None and together.any():
            self._products.score(rows)
            if self._some is not self._scores:
                scores[self.plan.produced] = self._some[:, :n]
        if not together.all():
            components = np.flatnonzero(~together)
            if self._alone is None or len(self._alone.components) != len(components):
                plan = self.plan
                self._alone = CentredScores(plan.parameters, plan.log_scales, components, self.n_rows)
            if together.any() and self.plan.bounds_others:
                largest = reduce(np.maximum, (scores[k] for k in np.flatnonzero(together)))
                self._alone.write_near(rows, scores, largest)
            else:
                self._alone.write(rows, scores)
        self._responsibilities = scores
        return normalise(scores, self.plan.ceiling, *of_rows)

    def collect(self, weights: Floats | None = None) -> None:
        """Add the statistics of the block that was scored last.

        Responsibilities are multiplied in place by the weights of the rows (n,), None where each weighs 1.
        """
        together, responsibilities = self._together, self._responsibilities
        if weights is not None:
            responsibilities *= weights
        if self._products is not None and together.any():
            if self._some is not self._scores:
                self._some[:, : len(self._rows)] = responsibilities[self.plan.produced]
            self._products.collect()
        if not together.all():
            if self._centred is None:
                parameters = self.plan.parameters
                shape = parameters.n_components, parameters.n_features
                self._centred = CentredStatistics(parameters.structure, *shape, self.n_rows)
            self._centred.push(self._rows, responsibilities, ~together)

    def accumulate(
        self, rows: Floats, weights: Floats | None = None, seen: MostProbable | None = None
    ) -> Accumulated:
        """Score a block of rows (n, d) with weights (n,), add its statistics, and write ``seen`` if given."""
        squared = squared_length(rows)
        if not math.isfinite(squared) and not np.isfinite(rows).all():
            return Accumulated.nothing(len(rows))
        scored = self.score(rows)
        if seen is not None:
            seen.labels[...], seen.largest[...] = most_probable(scored.responsibilities)
        with np.errstate(over="ignore", invalid="ignore"):
            self.collect(weights)
        return Accumulated(scored.log_likelihoods, scored.total, squared)

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks collected, None where there were none; then begin again."""
        produced = None if self._products is None else self._products.sums()
        centred = None if self._centred is None else self._centred.total()
        parts = self._of_together(produced), None if centred is None else RowSums(None, centred)
        return merge_sums(self.plan.parameters.structure, parts)

    def _of_together(self, produced: RowSums | None) -> RowSums | None:
        """Return the sums of the components scored together, of all for which there are products."""
        if produced is None:
            return None
        (moments, statistics), together = produced, self.plan.together
        kept = together[self.plan.produced]
        if moments is not None and not kept.all():
            moments = moments.reshape(len(kept), -1)[kept].ravel()
        if statistics is not None:
            statistics = spread_out(chosen(statistics, kept), together)
        return RowSums(moments, statistics)
