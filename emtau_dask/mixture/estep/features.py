"""Log-densities and statistics as matrix products with features of the rows.

The log-density of a Gaussian is linear in a few features of a row, such as
``[1, y, y_i y_j (i ≤ j)]``, so that the E-step of a block is one product
``W φ`` of K coefficient rows with the block's features, and its statistics are
another, ``R φᵀ``, with the responsibilities. The symmetry of ``y yᵀ`` is used
in both.

The price is cancellation: a squared distance is a difference of terms as large
as the squared distance from the origin of the coordinates. Rows are therefore
seen from a `Frame`, and `conditions` says how many digits a component loses
there; where that is too many, other forms do without features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from scipy.linalg import solve_triangular

from emtau_dask.mixture.estep.moments import Moments, MomentSums
from emtau_dask.mixture.model import MixtureParameters, SufficientStatistics, quotients
from emtau_dask.mixture.numerics import (
    AnyArray,
    Floats,
    Ints,
    Step,
    frozen,
    perform,
    precision_factors,
    product,
    squares,
    summed_product,
)

MOST_DISTANCES = 16
"""Coordinates up to which products of each distance are a call of their own."""


@dataclass(frozen=True, eq=False)
class Frame:
    """Coordinates ``y = Aᵀ (x − c)`` in which features are formed.

    Attributes
    ----------
    centre : ndarray of shape (d,)
        c.
    transform : ndarray of shape (d, d) or None
        A, upper-triangular; None for the identity.
    """

    centre: Floats
    transform: Floats | None

    def vectors(self, vectors: Floats) -> Floats:
        """Return ``Aᵀ v`` of each of ``vectors`` (m, d)."""
        return vectors if self.transform is None else vectors @ self.transform

    def vectors_back(self, vectors: Floats) -> Floats:
        """Return ``A⁻ᵀ v`` of each of ``vectors`` (m, d)."""
        if self.transform is None:
            return vectors
        solved: Floats = solve_triangular(self.transform, vectors.T, trans="T", check_finite=False).T
        return solved

    def forms(self, matrices: Floats) -> Floats:
        """Return ``Aᵀ M A`` of each of ``matrices`` (..., d, d)."""
        return matrices if self.transform is None else self.transform.T @ matrices @ self.transform

    def forms_back(self, matrices: Floats) -> Floats:
        """Return ``A⁻ᵀ M A⁻¹`` of each of ``matrices`` (..., d, d), exactly symmetric if M is."""
        if self.transform is None:
            return matrices
        flat = matrices.reshape(-1, *matrices.shape[-2:])
        back = np.stack([self.vectors_back(self.vectors_back(matrix).T) for matrix in flat])
        return (0.5 * (back + back.swapaxes(-1, -2))).reshape(matrices.shape)


@dataclass(frozen=True)
class FeatureForm:
    """Which features a covariance type needs, and what becomes of the products with them.

    Rows of the feature matrix φ (F, n): the constant 1, the d coordinates, the
    squares.

    Attributes
    ----------
    count : callable (d) -> int
        F.
    pairs : callable (d) -> (first, i, j)
        Square s is the sum of ``y_i y_j`` over the pairs from ``first[s]`` to ``first[s + 1]``.
    fill : callable (coordinates (d, n), squares (F − 1 − d, n)) -> iterator of Step
        What writes the squares.
    coefficients : callable (parameters, frame) -> (K, F)
        W, such that ``W φ`` are the weighted log-densities.
    moment_shapes : callable (K, d) -> tuple of shapes
    moments : callable (features (F, n), responsibilities (K, n), out Moments) -> iterator of Step
        What writes the moments of a block.
    statistics : callable (moments, frame) -> SufficientStatistics
    """

    count: Callable[[int], int]
    pairs: Callable[[int], tuple[Ints, Ints, Ints]]
    fill: Callable[[Floats, Floats], Iterator[Step]]
    coefficients: Callable[[MixtureParameters, Frame], Floats]
    moment_shapes: Callable[[int, int], tuple[tuple[int, int], ...]]
    moments: Callable[[Floats, Floats, Moments], Iterator[Step]]
    statistics: Callable[[Moments, Frame], SufficientStatistics]


def _product(features: Floats, responsibilities: Floats, out: Moments) -> Iterator[Step]:
    return summed_product(responsibilities, features, out[0])


def _pairs(d: int) -> tuple[Ints, Ints]:
    """Return i and j of the products of coordinates: every unordered pair once, by distance j − i mod d."""
    distance, i = np.divmod(np.arange(d * (d + 1) // 2), d)
    return i, (i + distance) % d


def _all_pairs(d: int) -> tuple[Ints, Ints, Ints]:
    i, j = _pairs(d)
    return np.arange(len(i) + 1), i, j


def _own_squares(d: int) -> tuple[Ints, Ints, Ints]:
    return np.arange(d + 1), np.arange(d), np.arange(d)


def _sum_of_squares(d: int) -> tuple[Ints, Ints, Ints]:
    return np.array([0, d]), np.arange(d), np.arange(d)


def _fill_full(coordinates: Floats, squares: Floats) -> Iterator[Step]:
    """Yield what writes the products of `_pairs`; in even d those of the last distance are half as many.

    A call for each distance, or, where these would be many and short, so that
    threads wait for each other's lock, one for all.
    """
    d, n = coordinates.shape
    distances, rest = divmod(len(squares), d)
    if d <= MOST_DISTANCES:
        yield partial(np.multiply, coordinates, coordinates, squares[:d])
        for distance in range(1, distances):
            out = squares[distance * d : (distance + 1) * d]
            yield partial(np.multiply, coordinates[distance:], coordinates[:-distance], out[:-distance])
            yield partial(np.multiply, coordinates[:distance], coordinates[-distance:], out[-distance:])
        if rest:
            yield partial(np.multiply, coordinates[rest:], coordinates[:rest], squares[-rest:])
        return
    turned = np.empty((d + d // 2, n), dtype=coordinates.dtype)
    yield partial(np.copyto, turned[:d], coordinates)
    yield partial(np.copyto, turned[d:], coordinates[: d // 2])
    step, one = turned.strides
    others: Floats = np.ndarray((distances, d, n), turned.dtype, turned, strides=(step, step, one))
    yield partial(np.multiply, others, coordinates, squares[: distances * d].reshape(distances, d, n))
    if rest:
        yield partial(np.multiply, turned[distances : distances + rest], coordinates[:rest], squares[-rest:])


def _means_in(parameters: MixtureParameters, frame: Frame) -> Floats:
    return frame.vectors(parameters.means - frame.centre)


def _coefficients_full(parameters: MixtureParameters, frame: Frame) -> Floats:
    factors = parameters.precisions_cholesky
    if frame.transform is not None:
        factors = np.stack([solve_triangular(frame.transform, f, check_finite=False) for f in factors])
    K, d = parameters.means.shape
    whitened = np.einsum("ki,kij->kj", _means_in(parameters, frame), factors)
    precisions = factors @ factors.swapaxes(-1, -2)
    i, j = _pairs(d)
    coefficients = np.empty((K, 1 + d + len(i)))
    coefficients[:, 0] = parameters.log_scales - 0.5 * (whitened**2).sum(axis=1)
    coefficients[:, 1 : 1 + d] = np.einsum("kij,kj->ki", factors, whitened)
    coefficients[:, 1 + d :] = np.where(i == j, -0.5, -1.0) * precisions[:, i, j]
    return coefficients


def _statistics_full(moments: Moments, frame: Frame) -> SufficientStatistics:
    (sums,) = moments
    d = len(frame.centre)
    weights, means = _weights_and_means(sums, frame)
    scatter = np.empty((len(sums), d, d))
    i, j = _pairs(d)
    scatter[:, i, j] = sums[:, 1 + d :]
    scatter[:, j, i] = sums[:, 1 + d :]
    scatter -= weights[:, np.newaxis, np.newaxis] * means[:, :, np.newaxis] * means[:, np.newaxis, :]
    return _in_place(weights, means, frame.forms_back(scatter), frame)


def _weights_and_means(sums: Floats, frame: Frame) -> tuple[Floats, Floats]:
    """Return weights (K,) and means (K, d) from the sums of the constant and the coordinates."""
    weights = sums[:, 0].copy()
    return weights, quotients(sums[:, 1 : 1 + len(frame.centre)], weights[:, np.newaxis])


def _in_place(weights: Floats, means: Floats, scatter: Floats, frame: Frame) -> SufficientStatistics:
    places = np.where(weights[:, np.newaxis] > 0, frame.centre + frame.vectors_back(means), 0.0)
    return SufficientStatistics(frozen(weights), frozen(places), frozen(scatter))


def _fill_sum_of_squares(coordinates: Floats, squares: Floats) -> Iterator[Step]:
    yield partial(np.einsum, "ij,ij->j", coordinates, coordinates, out=squares[0])


def _coefficients_tied(parameters: MixtureParameters, frame: Frame) -> Floats:
    K, d = parameters.means.shape
    means = _means_in(parameters, frame)
    coefficients = np.empty((K, d + 2))
    coefficients[:, 0] = parameters.log_scales - 0.5 * (means**2).sum(axis=1)
    coefficients[:, 1 : 1 + d] = means
    coefficients[:, 1 + d] = -0.5
    return coefficients


def _moments_tied(features: Floats, responsibilities: Floats, out: Moments) -> Iterator[Step]:
    coordinates = features[1:-1]
    roots, weighted = np.empty_like(features[0]), np.empty_like(coordinates)
    yield partial(np.add.reduce, responsibilities, 0, None, roots)
    yield partial(np.sqrt, roots, roots)
    yield partial(np.multiply, coordinates, roots, weighted)
    yield from summed_product(responsibilities, features[:-1], out[0])
    yield from squares(weighted, out[1])


def _statistics_tied(moments: Moments, frame: Frame) -> SufficientStatistics:
    sums, total = moments
    weights, means = _weights_and_means(sums, frame)
    scatter = total - (means * weights[:, np.newaxis]).T @ means
    return _in_place(weights, means, frame.forms_back(0.5 * (scatter + scatter.T)), frame)


def _fill_diag(coordinates: Floats, squares: Floats) -> Iterator[Step]:
    yield partial(np.multiply, coordinates, coordinates, squares)


def _coefficients_diag(parameters: MixtureParameters, frame: Frame) -> Floats:
    precisions = parameters.precisions_cholesky**2
    means = _means_in(parameters, frame)
    constants = parameters.log_scales - 0.5 * (precisions * means**2).sum(axis=1)
    return np.hstack([constants[:, np.newaxis], precisions * means, -0.5 * precisions])


def _statistics_diag(moments: Moments, frame: Frame) -> SufficientStatistics:
    (sums,) = moments
    d = len(frame.centre)
    weights, means = _weights_and_means(sums, frame)
    scatter = sums[:, 1 + d :] - weights[:, np.newaxis] * means**2
    return _in_place(weights, means, scatter, frame)


def _coefficients_spherical(parameters: MixtureParameters, frame: Frame) -> Floats:
    precisions = (parameters.precisions_cholesky**2)[:, np.newaxis]
    means = _means_in(parameters, frame)
    constants = parameters.log_scales - 0.5 * precisions[:, 0] * (means**2).sum(axis=1)
    return np.hstack([constants[:, np.newaxis], precisions * means, -0.5 * precisions])


def _statistics_spherical(moments: Moments, frame: Frame) -> SufficientStatistics:
    (sums,) = moments
    weights, means = _weights_and_means(sums, frame)
    scatter = sums[:, -1] - weights * (means**2).sum(axis=1)
    return _in_place(weights, means, scatter, frame)


FORMS: Mapping[str, FeatureForm] = MappingProxyType(
    {
        "full": FeatureForm(
            count=lambda d: 1 + d + d * (d + 1) // 2,
            pairs=_all_pairs,
            fill=_fill_full,
            coefficients=_coefficients_full,
            moment_shapes=lambda K, d: ((K, 1 + d + d * (d + 1) // 2),),
            moments=_product,
            statistics=_statistics_full,
        ),
        "tied": FeatureForm(
            count=lambda d: d + 2,
            pairs=_sum_of_squares,
            fill=_fill_sum_of_squares,
            coefficients=_coefficients_tied,
            moment_shapes=lambda K, d: ((K, d + 1), (d, d)),
            moments=_moments_tied,
            statistics=_statistics_tied,
        ),
        "diag": FeatureForm(
            count=lambda d: 2 * d + 1,
            pairs=_own_squares,
            fill=_fill_diag,
            coefficients=_coefficients_diag,
            moment_shapes=lambda K, d: ((K, 2 * d + 1),),
            moments=_product,
            statistics=_statistics_diag,
        ),
        "spherical": FeatureForm(
            count=lambda d: d + 2,
            pairs=_sum_of_squares,
            fill=_fill_sum_of_squares,
            coefficients=_coefficients_spherical,
            moment_shapes=lambda K, d: ((K, d + 2),),
            moments=_product,
            statistics=_statistics_spherical,
        ),
    }
)


@dataclass(frozen=True, eq=False)
class _Length:
    """What blocks of one length have in common.

    Attributes
    ----------
    rows : int
        n.
    differences : ndarray of shape (d, n)
        Where rows go, less the frame's centre.
    score, collect : tuple of Step
    """

    rows: int
    differences: Floats
    score: tuple[Step, ...]
    collect: tuple[Step, ...]


class FeatureProducts:
    """Log-densities and statistics of some components by their features; its buffers serve one task.

    Parameters
    ----------
    covariance_type : str
    coefficients : ndarray of shape (K', F)
        Of the K' components, in the frame and in the dtype of the products.
    frame : Frame
        Its centre is exact in that dtype.
    scores : ndarray of shape (K', n_rows)
        Where log-densities are written, and responsibilities found; of as many
        columns as the largest block has rows.
    """

    def __init__(self, covariance_type: str, coefficients: Floats, frame: Frame, scores: Floats) -> None:
        d, dtype = len(frame.centre), coefficients.dtype
        self._form = FORMS[covariance_type]
        self._frame = frame
        self._centre = frame.centre.astype(dtype)[:, np.newaxis]
        self._coefficients = coefficients
        self._scores = scores
        self._features: Floats = np.ones((self._form.count(d), scores.shape[1]), dtype=dtype)
        self._moments = MomentSums(self._form.moment_shapes(len(coefficients), d))
        self._length = _Length(0, self._centre, (), ())

    def _of_length(self, n: int) -> _Length:
        d, transform = len(self._centre), self._frame.transform
        features, scores = self._features[:, :n], self._scores[:, :n]
        coordinates = differences = features[1 : 1 + d]
        steps: list[Step] = []
        if transform is not None:
            differences = np.empty_like(coordinates)
            steps.append(partial(np.matmul, transform.T.astype(features.dtype), differences, coordinates))
        steps += self._form.fill(coordinates, features[1 + d :])
        steps += product(self._coefficients, features, scores)
        collect = tuple(self._form.moments(features, scores, self._moments.block))
        return _Length(n, differences, tuple(steps), collect)

    def score(self, rows: AnyArray) -> None:
        """Write the coefficients' products with rows (n, d) into the first n columns of the scores."""
        if len(rows) != self._length.rows:
            self._length = self._of_length(len(rows))
        np.subtract(rows.T, self._centre, out=self._length.differences)
        perform(self._length.score)

    def collect(self) -> None:
        """Add the moments of the block scored last, whose responsibilities are in the scores now."""
        perform(self._length.collect)
        self._moments.push(self._length.rows)

    def statistics(self) -> SufficientStatistics | None:
        """Return the statistics of all blocks collected, None where there were none."""
        moments = self._moments.total()
        return None if moments is None else self._form.statistics(moments, self._frame)


def frames_of(parameters: MixtureParameters) -> Iterator[Frame]:
    """Yield the frames worth trying, cheapest first: fixed functions of Θ.

    The origin is the mixture's mean. Full covariances may have in common what
    the pooled covariance ``Σ π_k Σ_k`` has; whitening by its factor takes that
    out. Tied ones are whitened by their own factor, which leaves the identity.
    """
    centre = frozen(parameters.weights @ parameters.means)
    if parameters.covariance_type == "tied":
        yield Frame(centre, parameters.precisions_cholesky)
        return
    yield Frame(centre, None)
    if parameters.covariance_type == "full":
        pooled = np.tensordot(parameters.weights, parameters.covariances, axes=1)
        nothing, one = np.zeros((1, len(centre))), np.ones(1)
        yield Frame(centre, frozen(precision_factors(pooled[np.newaxis], nothing, one, first=-1)[0]))


def conditions(parameters: MixtureParameters, frame: Frame) -> Floats:
    """Return ``g_k = κ(R_k) (1 + ρ_k)²``, shape (K,): what rounding is multiplied by.

    R_k is component k's correlation matrix in the frame, ρ_k the distance of
    its mean from the frame's origin in its own standard deviations. Errors of
    log-densities are about ``ε g_k``, and so are those of scatters, relative to
    the variances.
    """
    means = _means_in(parameters, frame)
    if parameters.covariance_type in ("full", "tied"):
        matrices = frame.forms(parameters.covariances).reshape(-1, *parameters.covariances.shape[-2:])
        variances = np.einsum("kii->ki", matrices)
        scale = np.sqrt(variances)
        spectra = np.linalg.eigvalsh(matrices / scale[:, :, np.newaxis] / scale[:, np.newaxis, :])
        kappa = spectra[:, -1] / np.maximum(spectra[:, 0], np.finfo(np.float64).tiny)
    else:
        variances = parameters.covariances.reshape(parameters.n_components, -1)
        kappa = np.ones(1)
    distances = np.sqrt((means**2 / variances).sum(axis=1))
    with np.errstate(over="ignore"):
        conditions: Floats = kappa * (1.0 + distances) ** 2
    return conditions
