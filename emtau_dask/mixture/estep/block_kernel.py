"""The E-step over blocks of rows, and the statistics that it leaves, by calls of NumPy."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import numpy as np

from emtau_dask.mixture.estep.centred import CentredScores, CentredStatistics
from emtau_dask.mixture.estep.moments import RowSums, merge_sums
from emtau_dask.mixture.estep.plan import KernelPlan
from emtau_dask.mixture.estep.responsibilities import normalise
from emtau_dask.mixture.model import chosen, most_probable, spread_out
from emtau_dask.mixture.numerics import AnyArray, Floats, squared_length


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
