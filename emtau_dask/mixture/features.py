"""The E-step as NumPy products with features of the rows, for each component or for all jointly.

The log-density of a Gaussian is linear in a few features of a row, such as ``[1, y, y_i y_j (i ≤ j)]``. The
E-step of a block is therefore one product ``W φ`` of K coefficient rows with the block's features, and its
statistics are another, ``R φᵀ``, with the responsibilities. The symmetry of ``y yᵀ`` is used in both. Which
features a covariance type needs is in its record.

The price is cancellation: a squared distance is a difference of terms as large as the squared distance from
the origin of the coordinates. Coordinates are therefore those of a `Frame`, and `conditions` says how many
digits a component loses there. Where it loses too many, another form is used.

In the joint form rows are taken relative to one centre c. The triangular precision factors, side by side
with the whitened means, are one matrix, so that

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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Frame, Moments
from emtau_dask.mixture.covariance_types import add_outer_products
from emtau_dask.mixture.linalg import (
    EPS,
    AnyArray,
    Bools,
    Floats,
    Step,
    perform,
    product,
    read_only,
    read_only_copy,
    squares,
    summed_product,
)
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import (
    MomentSums,
    RowSums,
    SufficientStatistics,
    quotients,
    size_of,
    views_of,
)

MAX_PANELS, NARROWEST_PANEL = 8, 8
TOGETHER = 128
"""About how many numbers of a row, summed over components, are held at a time for scatters."""
ADDED_ROWS = 8192
"""Rows whose moments are added up block by block."""
NEGLIGIBLE = 2.0**-80
"""Largest responsibility that scatters leave out, relative to the component's largest in the block, or its
mean in a tile: 32,768 such rows, 64 standard deviations away, change a variance by one rounding."""


def _means_in(parameters: MixtureParameters, frame: Frame) -> Floats:
    return frame.vectors(parameters.means - frame.centre)


def coefficients(parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return W, (K, F), such that ``W φ`` are the weighted log-densities of rows in the frame."""
    return parameters.structure.coefficients(
        parameters.log_scales, _means_in(parameters, frame), parameters.precisions_cholesky, frame
    )


def upper_bounds(exact: Floats, parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return coefficients of upper bounds of the log-densities, (K, F), whatever digits products lose.

    ``exact`` are `coefficients`; numbers that are added to all scores may have been added to them.

    With y a row and m_k a mean in the frame, p_k² the trace of the precision and s_k the scale of component
    k, the products of `coefficients` are off by less than ``u (p_k² (‖y‖ + ‖m_k‖)² + |s_k|)``. Each of them
    rounds at most F + 4 d times, so u is so many times ε; where the frame transforms rows by T, at most
    ``‖T‖ ‖T⁻¹‖`` times as much (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.5).
    Twice ``‖y‖² + ‖m_k‖²`` is no less than the square of the sum, and ‖y‖² is a sum of features.
    """
    found, means, d = exact.copy(), _means_in(parameters, frame), parameters.n_features
    rounding = EPS * (found.shape[1] + 4 * d)
    if frame.transform is not None:
        rounding *= float(np.linalg.norm(frame.transform) * np.linalg.norm(np.linalg.inv(frame.transform)))
    first, i, j = parameters.structure.squares.pairs(d)
    own = 1 + d + np.flatnonzero((i == j)[first[:-1]])
    with np.errstate(over="ignore"):
        slack = -4.0 * rounding * found[:, own].sum(axis=1, keepdims=True)
        found[:, own] += slack
        found[:, :1] += slack * (means**2).sum(axis=1, keepdims=True)
        found[:, 0] += rounding * np.abs(parameters.log_scales)
    return found


def statistics_of_moments(
    structure: CovarianceStructure, frame: Frame, moments: Moments
) -> SufficientStatistics:
    """Return the statistics of the rows that ``moments`` in the frame are sums over."""
    sums = moments[0]
    weights = sums[:, 0].copy()
    means = quotients(sums[:, 1 : 1 + len(frame.centre)], weights[:, np.newaxis])
    scatter = structure.scatter(moments, weights, means, frame)
    places = np.where(weights[:, np.newaxis] > 0, frame.centre + frame.vectors_back(means), 0.0)
    return SufficientStatistics(read_only(weights), read_only(places), read_only_copy(scatter))


class _Length(NamedTuple):
    """What blocks of the same number of rows share."""

    n_rows: int
    differences: Floats  # rows less the centre, (d, n_rows)
    score: tuple[Step, ...]
    collect: tuple[Step, ...]


class FeatureProducts:
    """Log-densities and statistics of K' components by their features; its buffers serve one task at a time.

    Coefficients (K', F) are in the frame and have the dtype of the products, in which the frame's centre is
    exact. Scores (K', n_rows) have room for the largest block.
    """

    def __init__(
        self, structure: CovarianceStructure, coefficients: Floats, frame: Frame, scores: Floats
    ) -> None:
        (K, count), dtype = coefficients.shape, coefficients.dtype
        self._structure = structure
        self._transform = frame.transform
        self._centre = frame.centre.astype(dtype)[:, np.newaxis]
        self._coefficients = coefficients
        self._scores = scores
        self._features: Floats = np.ones((count, scores.shape[1]), dtype=dtype)
        shapes = structure.moment_shapes(K, count)
        self._moments = MomentSums(np.empty(size_of(shapes)))
        self._block = views_of(self._moments.block, shapes)
        self._length = _Length(0, self._centre, (), ())

    def _of_length(self, n: int) -> _Length:
        d, transform = len(self._centre), self._transform
        features, scores = self._features[:, :n], self._scores[:, :n]
        coordinates = differences = features[1 : 1 + d]
        steps: list[Step] = []
        if transform is not None:
            differences = np.empty_like(coordinates)
            steps.append(partial(np.matmul, transform.T.astype(features.dtype), differences, coordinates))
        steps += self._structure.squares.fill(coordinates, features[1 + d :])
        steps += product(self._coefficients, features, scores)
        collect = tuple(self._structure.moments(features, scores, self._block))
        return _Length(n, differences, tuple(steps), collect)

    def score(self, rows: AnyArray) -> None:
        """Write the coefficients' products with rows (n, d) into the first n columns of the scores."""
        if len(rows) != self._length.n_rows:
            self._length = self._of_length(len(rows))
        np.subtract(rows.T, self._centre, out=self._length.differences)
        perform(self._length.score)

    def collect(self) -> None:
        """Add the moments of the block scored last, whose responsibilities are in the scores now."""
        perform(self._length.collect)
        self._moments.push(self._length.n_rows)

    def sums(self) -> RowSums | None:
        """Return the sums over all blocks collected, None where there were none; then begin again."""
        moments = self._moments.total()
        return None if moments is None else RowSums(moments, None)


def about_mean(parameters: MixtureParameters) -> Frame:
    """Return the frame about the mixture's mean whose coordinates are the rows' own."""
    return Frame(read_only_copy(parameters.weights @ parameters.means), None)


def frames_of(parameters: MixtureParameters) -> Iterator[Frame]:
    """Yield the frames worth trying about the mixture's mean, cheapest first: fixed functions of Θ."""
    centre = about_mean(parameters).centre
    for transform in parameters.structure.transforms(
        parameters.weights, parameters.covariances, parameters.precisions_cholesky
    ):
        yield Frame(centre, transform)


def conditions(parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return ``g_k = κ(R_k) (1 + ρ_k)²``, shape (K,): the factor by which rounding errors grow.

    R_k is component k's correlation matrix in the frame, ρ_k the distance of its mean from the frame's
    origin in its own standard deviations. Log-densities and scatters (relative to the variances) have errors
    of about ``ε g_k``.
    """
    structure, means = parameters.structure, _means_in(parameters, frame)
    covariances = frame.forms(parameters.covariances)
    distances = np.sqrt((means**2 / structure.variances(covariances, *means.shape)).sum(axis=1))
    with np.errstate(over="ignore"):
        conditions: Floats = structure.conditions(covariances) * (1.0 + distances) ** 2
    return conditions


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


def joint_conditions(parameters: MixtureParameters, *centres: Floats) -> Floats:
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
