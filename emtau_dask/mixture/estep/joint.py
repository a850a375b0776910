"""Log-densities of all components by one product, and scatters about the means that they had.

Rows are taken relative to one centre c. The triangular precision factors, side by side with the whitened
means, are one matrix, so that

    ``[1, x − c] [(c − μ_1)ᵀ P_1 … ; P_1 …]``

are the rows whitened by every component at once: a few long calls, where the centred form needs several
for each component. A panel of a factor's columns needs only the features up to its end; this leaves most of
the zeros out. Scatters are summed about the means of the iteration before, which are near the new ones, and
moved at the end.

A whitened row is a difference of whitened rows and means. It loses the digits that `conditions` says: the
root of what features lose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from emtau_dask.mixture.covariance import add_outer_products
from emtau_dask.mixture.estep.moments import MomentSums, RowSums, size_of, views_of
from emtau_dask.mixture.model import MixtureParameters, SufficientStatistics, quotients
from emtau_dask.mixture.numerics import (
    AnyArray,
    Bools,
    Floats,
    perform,
    read_only,
    squares,
    summed_product,
)

MAX_PANELS, NARROWEST_PANEL = 8, 8
TOGETHER = 128
"""About how many numbers of a row, summed over components, are held at a time for scatters."""
ADDED_ROWS = 8192
"""Rows whose moments are added up block by block."""
NEGLIGIBLE = 2.0**-80
"""Largest responsibility that scatters leave out, relative to the component's largest in the block, or its
mean in a tile: 32,768 such rows, 64 standard deviations away, change a variance by one rounding."""


@dataclass(frozen=True, eq=False)
class JointFactors:
    """Components as the joint form needs them."""

    centre: Floats  # c, (d,)
    means: Floats  # μ_k − c, (K, d)
    log_scales: Floats  # (K, 1), nats
    factors: Floats  # P_k, (K, d, d)

    @cached_property
    def whitening(self) -> Floats:
        """``[−P_kᵀ (μ_k − c), P_kᵀ]``, (K, d, 1 + d)."""
        K, d = self.means.shape
        found = np.empty((K, d, 1 + d))
        found[:, :, 0] = -np.einsum("ki,kij->kj", self.means, self.factors)
        found[:, :, 1:] = self.factors.swapaxes(1, 2)
        return read_only(found)

    @cached_property
    def panels(self) -> tuple[Floats, ...]:
        """For each panel of w features that ends at feature e, its part of the whitening, (K w, 1 + e)."""
        edges = pairwise(panel_edges(self.means.shape[1]))
        return tuple(self.whitening[:, begin:end, : 1 + end].reshape(-1, 1 + end) for begin, end in edges)


def panel_edges(n_features: int) -> tuple[int, ...]:
    """Return where the panels of columns of a factor begin and end."""
    count = max(1, min(MAX_PANELS, n_features // NARROWEST_PANEL))
    return tuple(n_features * i // count for i in range(count + 1))


def buffer_rows(n_components: int, n_features: int) -> int:
    """Return how many numbers the buffer of `JointProducts` has for each row."""
    widest = max(end - begin for begin, end in pairwise(panel_edges(n_features)))
    return max(n_components * widest, n_features * together(n_components, n_features))


def together(n_components: int, n_features: int) -> int:
    """Return for how many components the rows about their means are held at a time."""
    return max(1, min(n_components, TOGETHER // n_features))


class JointProducts:
    """Log-densities and statistics of K' components by the joint form; its buffers serve one task at a time.

    Scores (K', n_rows) have room for the largest block.
    """

    def __init__(self, factors: JointFactors, scores: Floats) -> None:
        (K, d), n_rows = factors.means.shape, scores.shape[1]
        self._factors = factors
        self._scores = scores
        self._coordinates: Floats = np.ones((1 + d, n_rows))
        self._buffer: Floats = np.empty(buffer_rows(K, d) * n_rows)
        self._shapes = (K, 1 + d), (K, d, d)
        self._moments = MomentSums(np.empty(size_of(self._shapes)), ADDED_ROWS)
        self._rows: Floats = np.empty((0, d))

    def _buffered(self, *shape: int) -> Floats:
        return self._buffer[: math.prod(shape)].reshape(shape)

    def score(self, rows: AnyArray) -> None:
        """Write log-densities of rows (n, d), with the factors' scales, into the first n scores of each."""
        factors, n = self._factors, len(rows)
        self._rows, out = rows, self._scores[:, :n]
        coordinates = self._coordinates[:, :n]
        np.subtract(rows.T, factors.centre[:, np.newaxis], out=coordinates[1:])
        out[...] = 0.0
        for panel in factors.panels:
            height, width = panel.shape
            whitened = self._buffered(height, n)
            np.matmul(panel, coordinates[:width], out=whitened)
            whitened = whitened.reshape(len(out), -1, n)
            out += np.einsum("kwn,kwn->kn", whitened, whitened)
        out *= -0.5
        out += factors.log_scales

    def collect(self) -> None:
        """Add the moments of the block scored last, whose responsibilities are in the scores now."""
        responsibilities = self._scores[:, : len(self._rows)]
        sums, scatter = views_of(self._moments.block, self._shapes)
        perform(summed_product(responsibilities, self._coordinates[:, : len(self._rows)], sums))
        present = responsibilities > NEGLIGIBLE * responsibilities.max(axis=1, keepdims=True)
        if 2 * np.count_nonzero(present) > present.size:
            self._scatter_of_all(np.sqrt(responsibilities), scatter)
        else:
            self._scatter_of_present(responsibilities, present, scatter)
        self._moments.push(len(self._rows))

    def _scatter_of_all(self, roots: Floats, scatter: Floats) -> None:
        K, d, _ = scatter.shape
        coordinates, means = self._coordinates[1:, : len(self._rows)], self._factors.means
        step = together(K, d)
        for begin in range(0, K, step):
            some = slice(begin, min(begin + step, K))
            residuals = self._buffered(some.stop - begin, d, len(self._rows))
            np.subtract(coordinates, means[some, :, np.newaxis], out=residuals)
            np.multiply(residuals, roots[some, np.newaxis, :], out=residuals)
            np.matmul(residuals, residuals.swapaxes(1, 2), out=scatter[some])

    def _scatter_of_present(self, responsibilities: Floats, present: Bools, scatter: Floats) -> None:
        """Leave out rows of negligible weight, the majority in many dimensions."""
        factors = self._factors
        ends = np.cumsum(np.count_nonzero(present, axis=1))
        fitting = len(self._buffer) // len(factors.centre)
        begin = 0
        while begin < len(ends):
            before = ends[begin - 1] if begin else 0
            stop = int(np.searchsorted(ends, before + fitting, side="right"))
            components, which = np.nonzero(present[begin:stop])
            residuals = self._buffered(len(which), len(factors.centre))
            np.take(self._rows, which, axis=0, out=residuals, mode="clip")
            residuals -= factors.centre
            residuals -= np.take(factors.means[begin:stop], components, axis=0, mode="clip")
            residuals *= np.sqrt(responsibilities[begin:stop][components, which])[:, np.newaxis]
            for k in range(begin, stop):
                own = residuals[(ends[k - 1] if k else 0) - before : ends[k] - before]
                perform(squares(own.T, scatter[k]))
            begin = stop

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks collected, None where there were none; then begin again."""
        moments = self._moments.total()
        if moments is None:
            return None
        return RowSums(None, statistics_of_joint(self._factors, *views_of(moments, self._shapes)))


def statistics_of_joint(factors: JointFactors, sums: Floats, scatter: Floats) -> SufficientStatistics:
    """Return statistics from ``Σ_n w_nk [1, x_n − c]`` and the scatter of rows about the factors' means."""
    weights = sums[:, 0].copy()
    means = quotients(sums[:, 1:], weights[:, np.newaxis])
    moved = scatter.copy()
    add_outer_products(moved, -weights[np.newaxis], (means - factors.means)[np.newaxis])
    places = np.where(weights[:, np.newaxis] > 0, factors.centre + means, 0.0)
    return SufficientStatistics(read_only(weights), read_only(places), read_only(moved))


def _whitened_size(parameters: MixtureParameters, lengths: Floats) -> Floats:
    """Return ``‖diag(l_k) P_k‖_F`` of lengths (K, d), shape (K,)."""
    products = lengths[:, :, np.newaxis] * parameters.precisions_cholesky
    size: Floats = np.sqrt(np.einsum("kij,kij->k", products, products))
    return size


def _deviations(parameters: MixtureParameters) -> Floats:
    variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
    return np.sqrt(variances)


def conditions(parameters: MixtureParameters, *centres: Floats) -> Floats:
    """Return ``h_k = 2 ‖diag(σ_k + Σ_c 2 |μ_k − c|) P_k‖_F``, shape (K,): what rounding is multiplied by.

    σ_k are the standard deviations of the features; the sum is over ``centres``, (d,) or (K, d), relative
    to which rows are taken. The rounding of rows grows with their length relative to a centre: whitened rows,
    log-densities and scatters (relative to the variances) are off by ``ε h_k / 2``. The centred form has
    ``‖diag(σ_k) P_k‖_F``, which correlation makes large.
    """
    lengths = _deviations(parameters)
    for centre in centres:
        lengths = lengths + 2.0 * np.abs(parameters.means - centre)
    return 2.0 * _whitened_size(parameters, lengths)


def shifts(parameters: MixtureParameters, means: Floats) -> Floats:
    """Return the rounding error of scatters about ``means`` (K, d), relative to that about their own, (K,).

    Relative to the variances, the error is ``ε ‖diag(σ_k + |shift_k|) P_k‖_F²``.
    """
    deviations = _deviations(parameters)
    own = _whitened_size(parameters, deviations)
    away = _whitened_size(parameters, deviations + np.abs(parameters.means - means))
    return (away / own) ** 2
