"""Log-densities and statistics as matrix products with features of the rows.

The log-density of a Gaussian is linear in a few features of a row, such as ``[1, y, y_i y_j (i ≤ j)]``. The
E-step of a block is therefore one product ``W φ`` of K coefficient rows with the block's features, and its
statistics are another, ``R φᵀ``, with the responsibilities. The symmetry of ``y yᵀ`` is used in both. Which
features a covariance type needs is in its record.

The price is cancellation: a squared distance is a difference of terms as large as the squared distance from
the origin of the coordinates. Coordinates are therefore those of a `Frame`, and `conditions` says how many
digits a component loses there. Where it loses too many, another form is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from emtau_dask.mixture.covariance import CovarianceStructure, Frame, Moments
from emtau_dask.mixture.estep.moments import MomentSums, RowSums, size_of, views_of
from emtau_dask.mixture.model import MixtureParameters, SufficientStatistics, quotients
from emtau_dask.mixture.numerics import (
    EPS,
    AnyArray,
    Floats,
    Step,
    perform,
    product,
    read_only,
    read_only_copy,
)


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
