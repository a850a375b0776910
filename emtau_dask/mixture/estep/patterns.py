"""The E-step over rows of which some values are NaN, which stand for missing ones.

Rows with the same features missing are scored together, under the mixture of the features that they have:
the missing ones are integrated over (Ghahramani and Jordan 1994, "Supervised learning from incomplete data
via an EM approach", section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from emtau_dask.mixture.estep.block_kernel import Accumulated, BlockKernel, MostProbable
from emtau_dask.mixture.estep.moments import RowSums, merge_sums
from emtau_dask.mixture.estep.plan import MAX_BLOCK_ROWS, KernelPlan, even_length, plan_kernel
from emtau_dask.mixture.model import (
    Conditioning,
    MixtureParameters,
    PairwiseMerger,
    merge,
    most_probable,
)
from emtau_dask.mixture.numerics import Bools, Floats, Ints, squared_length

PATTERNS_BYTES, LEAST_PATTERNS = 2**25, 8
"""What is kept of patterns that were met, for rows that have them too."""
LONGER = 4
"""By how much the blocks of incomplete rows are longer, so that more of their rows lack the same features."""


class Observed(NamedTuple):
    """Rows of a block with the same features missing, scored.

    Attributes
    ----------
    places : ndarray of shape (n,), or slice
        In the block.
    conditioning : Conditioning or None
        Its given features are those that the rows have; None where they have all.
    rows : ndarray of shape (n, g)
        Of these features.
    responsibilities : ndarray of shape (K, n)
        Valid until the next rows are scored.
    log_likelihoods : ndarray of shape (n,)
        Of what the rows have, nats; 0 for rows that have nothing.
    known_labels : ndarray of intp, shape (n,), or None
        Where they were found beside the responsibilities.
    """

    places: Ints | slice
    conditioning: Conditioning | None
    rows: Floats
    responsibilities: Floats
    log_likelihoods: Floats
    known_labels: Ints | None = None

    @property
    def labels(self) -> Ints:
        """The most probable component of each row, (n,); ties go to the lowest index."""
        if self.known_labels is not None:
            return self.known_labels
        return most_probable(self.responsibilities)[0].astype(np.intp)

    @property
    def total(self) -> float:
        """The sum of the log-likelihoods, nats; not finite where one of them is not."""
        return float(np.add.reduce(self.log_likelihoods))


class Patterns:
    """How rows are conditioned and scored, by what they lack; what was met is kept, for all threads."""

    def __init__(self, parameters: MixtureParameters) -> None:
        self._parameters = parameters
        K, d = parameters.means.shape
        self._most = max(LEAST_PATTERNS, PATTERNS_BYTES // (32 * K * d * d))
        self._met: dict[bytes, tuple[Conditioning, KernelPlan | None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without what was met."""
        return Patterns, (self._parameters,)

    def of(self, missing: Bools) -> tuple[Conditioning, KernelPlan | None]:
        """Return how rows that lack features are conditioned, and scored where they have any; (d,)."""
        name = missing.tobytes()
        found = self._met.get(name)
        if found is None:
            conditioning = Conditioning(self._parameters, np.flatnonzero(~missing))
            plan = None if missing.all() else plan_kernel(conditioning.marginal)
            if len(self._met) >= self._most:
                self._met.clear()
            found = self._met[name] = conditioning, plan
        return found


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
        conditioning, plan = self._patterns.of(missing)
        if plan is None:
            responsibilities = np.repeat(self._parameters.weights[:, np.newaxis], len(places), axis=1)
            return Observed(places, conditioning, rows[:, :0], responsibilities, np.zeros(len(places)))
        given = np.ascontiguousarray(rows[:, conditioning.given])
        scored = BlockKernel(plan, len(given)).score(given)
        return Observed(places, conditioning, given, scored.responsibilities, scored.log_likelihoods)

    def accumulate(
        self, rows: Floats, weights: Floats | None = None, seen: MostProbable | None = None
    ) -> Accumulated:
        """Do as `BlockKernel.accumulate`; the squares are those of the values that the rows have."""
        squared = squared_length(np.where(np.isnan(rows), 0.0, rows))
        if not math.isfinite(squared) and np.isinf(rows).any():
            return Accumulated.nothing(len(rows))
        log_likelihoods = np.empty(len(rows))
        for found in self.observed(rows):
            own = None if weights is None else weights[found.places]
            log_likelihoods[found.places] = found.log_likelihoods
            if seen is not None:
                labels, largest = most_probable(found.responsibilities)
                seen.labels[found.places], seen.largest[found.places] = labels, largest
            with np.errstate(over="ignore", invalid="ignore"):
                if found.conditioning is None:
                    self._complete.collect(own)
                    continue
                weighted = found.responsibilities if own is None else found.responsibilities * own
                self._merger.push(found.conditioning.statistics(found.rows, weighted))
        return Accumulated(log_likelihoods, float(log_likelihoods.sum()), squared)

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks, None where there were none; then begin again."""
        incomplete = self._merger.total()
        parts = self._complete.sums(), None if incomplete is None else RowSums(None, incomplete)
        return merge_sums(self._parameters.structure, parts)


class PatternKernels:
    """Makes the kernels of tasks under one plan of float64; see `mixture.compiled.Kernels`.

    Blocks are ``longer`` than those of other kernels by this factor.
    """

    by_tiles = False

    def __init__(self, plan: KernelPlan, *, longer: int = LONGER) -> None:
        self.plan = plan
        self._longer = longer
        self._patterns = Patterns(plan.parameters)

    def made(self, n_rows: int) -> PatternKernel:
        """Return a kernel for up to ``n_rows`` rows of all blocks together."""
        longest = min(MAX_BLOCK_ROWS, self._longer * self.plan.block_rows)
        return PatternKernel(self.plan, even_length(n_rows, longest), self._patterns)

    def finished(self, kernel: PatternKernel) -> RowSums | None:
        """Return the sums of a kernel of this plan, which is not to be used any more."""
        return kernel.sums()
