"""Marginal mixtures of some features, conditional mixtures of the rest, and scores of incomplete rows.

Bishop 2006, "Pattern Recognition and Machine Learning": section 2.3.1 for a component, and eq. 2.81 and 2.82
for its conditional mean and covariance. The weights of the conditional mixture are the responsibilities under
the mixture of the given features.

Rows with the same features missing are scored together, under the marginal mixture of the features that they
have: the missing ones are integrated over (Ghahramani and Jordan 1994, "Supervised learning from incomplete
data via an EM approach", section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from emtau_dask.mixture.covariance import Split
from emtau_dask.mixture.estep import Accumulated, BlockKernel, MostProbable
from emtau_dask.mixture.linalg import Bools, Floats, Ints, read_only, read_only_copy, squared_length
from emtau_dask.mixture.parameters import MixtureParameters, most_probable
from emtau_dask.mixture.plan import MAX_BLOCK_ROWS, KernelPlan, even_length, plan_kernel
from emtau_dask.mixture.statistics import PairwiseMerger, RowSums, SufficientStatistics, merge, merge_sums

PATTERNS_BYTES, MIN_PATTERNS = 2**25, 8
"""Maximum bytes and minimum number of cached patterns."""
LONGER = 4
"""Factor by which blocks of incomplete rows are longer, so that more of their rows lack the same features."""


@dataclass(frozen=True, eq=False)
class Conditioning:
    """A mixture, split into given features and the rest.

    Attributes
    ----------
    parameters : MixtureParameters
        The mixture of all d features.
    given : ndarray of shape (g,)
        The numbers of the given features, in the order of their values.
    """

    parameters: MixtureParameters
    given: Ints

    @cached_property
    def rest(self) -> Ints:
        """The numbers of the other features, ascending, (r,)."""
        return np.setdiff1d(np.arange(self.parameters.n_features), self.given)

    @cached_property
    def _split(self) -> Split:
        whole = self.parameters
        return whole.structure.split(whole.covariances, whole.precisions_cholesky, self.given, self.rest)

    @property
    def marginal(self) -> MixtureParameters:
        """The marginal mixture of the given features."""
        return MixtureParameters(
            self.parameters.covariance_type,
            self.parameters.weights,
            read_only_copy(self.parameters.means[:, self.given]),
            read_only_copy(self._split.given_covariances),
            read_only_copy(self._split.given_factors),
        )

    def component_means(self, rows: Floats, k: int) -> Floats:
        """Return component k's means of the rest, given the features ``rows`` (n, g); (n, r)."""
        means, coefficients = self.parameters.means[k], self._split.coefficients
        if coefficients is None:
            return np.broadcast_to(means[self.rest], (len(rows), len(self.rest)))
        own = coefficients[k if len(coefficients) > 1 else 0]
        shifted: Floats = (rows - means[self.given]) @ own.T
        shifted += means[self.rest]
        return shifted

    def means(self, rows: Floats, responsibilities: Floats) -> Floats:
        """Return the expected values of the rest, given the features ``rows`` (n, g); (n, r).

        Responsibilities (K, n) are those of the rows under `marginal`.
        """
        means = np.zeros((len(rows), len(self.rest)))
        for k, of_component in enumerate(responsibilities):
            means += of_component[:, np.newaxis] * self.component_means(rows, k)
        return means

    @cached_property
    def _unexplained(self) -> Floats:
        """Vectors (r, K, d), whose outer products sum to the covariances of the rest."""
        K, d, r = self.parameters.n_components, self.parameters.n_features, len(self.rest)
        vectors = np.zeros((r, K, d))
        draw, covariances = self.parameters.structure.draw, self._split.rest_covariances
        for k in range(K):
            vectors[:, k, self.rest] = draw(np.eye(r), covariances, k)
        return vectors

    def statistics(self, rows: Floats, responsibilities: Floats) -> SufficientStatistics:
        """Return the expected statistics of all features, given ``rows`` (n, g) of some.

        Responsibilities (K, n) may include weights of rows. With x̂ the rows completed by `component_means`,
        the scatter of component k is that of x̂ plus ``Σ_n r_kn C_k``, where C is the covariance of the rest,
        given these features (Ghahramani and Jordan 1994, "Supervised learning from incomplete data via an EM
        approach", section 3).
        """
        structure, n = self.parameters.structure, len(rows)
        K, d = self.parameters.means.shape
        weights = responsibilities.sum(axis=1)
        means, scatter = np.zeros((K, d)), np.zeros(structure.shape(K, d))
        completed = np.empty((n, d))
        completed[:, self.given] = rows
        for k in range(K):
            if not weights[k] > 0:
                continue
            completed[:, self.rest] = self.component_means(rows, k)
            centre = self.parameters.means[k]
            means[k] = centre + (responsibilities[k] / weights[k]) @ (completed - centre)
            roots = np.sqrt(responsibilities[k])[:, np.newaxis] * (completed - means[k])
            structure.sum_scatter(scatter, k, iter([roots]))
        structure.add_outer(scatter, np.tile(weights, (len(self.rest), 1)), self._unexplained)
        return SufficientStatistics(read_only(weights), read_only(means), read_only(scatter))

    def at(self, row: Floats, responsibilities: Floats) -> MixtureParameters:
        """Return the conditional mixture of the rest, given the features ``row`` (g,).

        Its weights are the responsibilities (K,) of the row under `marginal`. A responsibility that is 0 in
        float64 becomes the smallest normal number, because weights must be above 0.
        """
        K = self.parameters.n_components
        weights = np.maximum(responsibilities, np.finfo(np.float64).tiny)
        means = np.concatenate([self.component_means(row[np.newaxis], k) for k in range(K)])
        return MixtureParameters(
            self.parameters.covariance_type,
            read_only(weights / weights.sum()),
            read_only(means),
            read_only_copy(self._split.rest_covariances),
            read_only_copy(self._split.rest_factors),
        )


class Observed(NamedTuple):
    """Rows of a block with the same features missing, and their scores.

    Attributes
    ----------
    places : ndarray of shape (n,), or slice
        Positions in the block.
    conditioning : Conditioning or None
        Its given features are those that the rows have; None if they have all.
    rows : ndarray of shape (n, g)
        The values of these features.
    responsibilities : ndarray of shape (K, n)
        Valid until the next rows are scored.
    log_likelihoods : ndarray of shape (n,)
        Log-likelihoods of the values that the rows have, nats; 0 for rows without any.
    given_labels : ndarray of intp, shape (n,), or None
        The labels, if they were computed with the responsibilities.
    """

    places: Ints | slice
    conditioning: Conditioning | None
    rows: Floats
    responsibilities: Floats
    log_likelihoods: Floats
    given_labels: Ints | None = None

    @property
    def labels(self) -> Ints:
        """The most probable component of each row, (n,); ties go to the lowest index."""
        if self.given_labels is not None:
            return self.given_labels
        return most_probable(self.responsibilities)[0].astype(np.intp)

    @property
    def total(self) -> float:
        """The sum of the log-likelihoods, nats; not finite if one of them is not."""
        return float(np.add.reduce(self.log_likelihoods))


class Patterns:
    """A cache of conditionings and plans by the features that rows lack; threads share it."""

    def __init__(self, parameters: MixtureParameters) -> None:
        self._parameters = parameters
        K, d = parameters.means.shape
        self._max_patterns = max(MIN_PATTERNS, PATTERNS_BYTES // (32 * K * d * d))
        self._cache: dict[bytes, tuple[Conditioning, KernelPlan | None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the cache."""
        return Patterns, (self._parameters,)

    def for_missing(self, missing: Bools) -> tuple[Conditioning, KernelPlan | None]:
        """Return the conditioning and the plan of rows that lack features ``missing`` (d,).

        The plan is None if they lack all.
        """
        key = missing.tobytes()
        cached = self._cache.get(key)
        if cached is None:
            conditioning = Conditioning(self._parameters, np.flatnonzero(~missing))
            plan = None if missing.all() else plan_kernel(conditioning.marginal)
            if len(self._cache) >= self._max_patterns:
                self._cache.clear()
            cached = self._cache[key] = conditioning, plan
        return cached


class PatternKernel:
    """Scores blocks of at most ``n_rows`` rows of float64, and sums their expected statistics."""

    def __init__(self, plan: KernelPlan, n_rows: int, patterns: Patterns) -> None:
        parameters = plan.parameters
        self.n_rows = n_rows
        self._parameters = parameters
        self._complete = BlockKernel(plan, n_rows)
        self._patterns = patterns
        self._merger = PairwiseMerger(partial(merge, parameters.structure))

    def score(self, rows: Floats, *, responsibilities: bool) -> tuple[float, Iterator[Observed]]:
        """Return the sum of the squares of all values of a block (n, d), and what `observed` yields."""
        return squared_length(rows), self.observed(rows)

    def observed(self, rows: Floats) -> Iterator[Observed]:
        """Yield the rows (n, d) of a block, scored, those with the same features missing together."""
        missing = np.isnan(rows)
        if not missing.any():
            yield self._scored_complete(slice(None), rows)
            return
        packed = np.packbits(missing, axis=1)
        _, first, which = np.unique(packed, axis=0, return_index=True, return_inverse=True)
        which = which.reshape(-1)
        for number, row in enumerate(first):
            places = np.flatnonzero(which == number)
            if missing[row].any():
                yield self._scored(places, rows[places], missing[row])
            else:
                yield self._scored_complete(places, rows[places])

    def _scored_complete(self, places: Ints | slice, rows: Floats) -> Observed:
        scored = self._complete.score(rows)
        return Observed(places, None, rows, scored.responsibilities, scored.log_likelihoods)

    def _scored(self, places: Ints, rows: Floats, missing: Bools) -> Observed:
        conditioning, plan = self._patterns.for_missing(missing)
        if plan is None:
            responsibilities = np.repeat(self._parameters.weights[:, np.newaxis], len(places), axis=1)
            return Observed(places, conditioning, rows[:, :0], responsibilities, np.zeros(len(places)))
        given = np.ascontiguousarray(rows[:, conditioning.given])
        scored = BlockKernel(plan, len(given)).score(given)
        return Observed(places, conditioning, given, scored.responsibilities, scored.log_likelihoods)

    def accumulate(
        self, rows: Floats, weights: Floats | None = None, out: MostProbable | None = None
    ) -> Accumulated:
        """Return what `BlockKernel.accumulate` returns; the squares are of the values that the rows have."""
        squared = squared_length(np.where(np.isnan(rows), 0.0, rows))
        if not math.isfinite(squared) and np.isinf(rows).any():
            return Accumulated.nothing(len(rows))
        log_likelihoods = np.empty(len(rows))
        for part in self.observed(rows):
            part_weights = None if weights is None else weights[part.places]
            log_likelihoods[part.places] = part.log_likelihoods
            if out is not None:
                labels, largest = most_probable(part.responsibilities)
                out.labels[part.places], out.largest[part.places] = labels, largest
            with np.errstate(over="ignore", invalid="ignore"):
                if part.conditioning is None:
                    self._complete.collect(part_weights)
                    continue
                responsibilities = part.responsibilities
                if part_weights is not None:
                    responsibilities = responsibilities * part_weights
                self._merger.push(part.conditioning.statistics(part.rows, responsibilities))
        return Accumulated(log_likelihoods, float(log_likelihoods.sum()), squared)

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks, None without any, and reset them."""
        incomplete = self._merger.total()
        parts = self._complete.sums(), None if incomplete is None else RowSums(None, incomplete)
        return merge_sums(self._parameters.structure, parts)


class PatternKernels:
    """Creates the kernels of tasks under one plan of float64; see `kernels.dispatch.Kernels`.

    Blocks are ``longer`` times as long as those of other kernels.
    """

    by_tiles = False

    def __init__(self, plan: KernelPlan, *, longer: int = LONGER) -> None:
        self.plan = plan
        self._longer = longer
        self._patterns = Patterns(plan.parameters)

    def acquire(self, n_rows: int) -> PatternKernel:
        """Return a kernel for at most ``n_rows`` rows in all blocks together."""
        longest = min(MAX_BLOCK_ROWS, self._longer * self.plan.block_rows)
        return PatternKernel(self.plan, even_length(n_rows, longest), self._patterns)

    def release(self, kernel: PatternKernel) -> RowSums | None:
        """Return the sums of a kernel of this plan, which must not be used any more."""
        return kernel.sums()
