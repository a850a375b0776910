"""The port of covariance types: a record of the operations that depend on the type.

All other code in the package is written once, for `CovarianceStructure`. The log-density of a Gaussian is
linear in the squares that a type needs (`squares`), the coordinates, and the constant 1.

Shapes: K components, d features, n rows of a block, F features of a row in `mixture.features`.

============== ===================== =======================
type           covariances, scatter  precisions_cholesky
============== ===================== =======================
full           (K, d, d)             (K, d, d)
tied           (d, d)                (d, d)
diag           (K, d)                (K, d)
spherical      (K,)                  (K,)
tied_diag      (d,)                  (d,)
tied_spherical ()                    ()
============== ===================== =======================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from emtau_dask.mixture.linalg import Floats, Ints

Moments = tuple[Floats, ...]
"""``Σ_n r_kn φ_n``, (K, F), and other sums over rows that a covariance type needs."""


@dataclass(frozen=True)
class Squares:
    """Features that are products of two coordinates, or sums of such products."""

    # (d) -> S, the number of squares.
    count: Callable[[int], int]
    # (d) -> first, i, j: square s is the sum of ``y_i y_j`` over the pairs from ``first[s]`` to
    # ``first[s + 1]``.
    pairs: Callable[[int], tuple[Ints, Ints, Ints]]
    # (coordinates (d, n), squares (S, n)): write the squares.
    write: Callable[[Floats, Floats], object]


def pairs_by_distance(d: int) -> tuple[Ints, Ints]:
    """Return i and j of the products of coordinates: every unordered pair once, by distance j − i mod d."""
    distance, i = np.divmod(np.arange(d * (d + 1) // 2), d)
    return i, (i + distance) % d


def _write_all(coordinates: Floats, squares: Floats) -> None:
    """Write the products by distance; for even d the last distance has half as many."""
    d = len(coordinates)
    for distance in range(d // 2 + 1):
        out = squares[distance * d : (distance + 1) * d]
        first = min(len(out), d - distance)
        np.multiply(coordinates[distance : distance + first], coordinates[:first], out=out[:first])
        np.multiply(coordinates[: len(out) - first], coordinates[first : len(out)], out=out[first:])


ALL_PAIRS = Squares(
    count=lambda d: d * (d + 1) // 2,
    pairs=lambda d: (np.arange(d * (d + 1) // 2 + 1), *pairs_by_distance(d)),
    write=_write_all,
)
OWN_SQUARES = Squares(
    count=lambda d: d,
    pairs=lambda d: (np.arange(d + 1), np.arange(d), np.arange(d)),
    write=lambda y, squares: np.multiply(y, y, out=squares),
)
SUM_OF_SQUARES = Squares(
    count=lambda d: 1,
    pairs=lambda d: (np.array([0, d]), np.arange(d), np.arange(d)),
    write=lambda y, squares: np.einsum("ij,ij->j", y, y, out=squares[0]),
)


@dataclass(frozen=True, eq=False)
class Frame:
    """Coordinates ``y = Aᵀ (x − c)`` in which features are formed."""

    centre: Floats  # c, (d,)
    transform: Floats | None  # A, (d, d), upper-triangular; None for the identity

    def vectors(self, vectors: Floats) -> Floats:
        """Return ``Aᵀ v`` of each of ``vectors`` (m, d)."""
        return vectors if self.transform is None else vectors @ self.transform

    def vectors_back(self, vectors: Floats) -> Floats:
        """Return ``A⁻ᵀ v`` of each of ``vectors`` (m, d)."""
        if self.transform is None:
            return vectors
        solved: Floats = solve_triangular(self.transform, vectors.T, trans="T", check_finite=False).T
        return solved

    def factors(self, factors: Floats) -> Floats:
        """Return ``A⁻¹ P`` of each of ``factors`` (K, d, d)."""
        if self.transform is None:
            return factors
        return np.stack([solve_triangular(self.transform, f, check_finite=False) for f in factors])

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


@dataclass(frozen=True, eq=False)
class Split:
    """The covariances of given features, and the conditional covariances of the rest.

    Bishop 2006, "Pattern Recognition and Machine Learning", eq. 2.81 and 2.82: the mean of the rest is
    shifted by ``B (x − μ)`` of the given features, and its covariance does not depend on ``x``.

    Attributes
    ----------
    given_covariances, given_factors : ndarray
        Marginal covariances and factors of the given features, in the shapes of the covariance type.
    coefficients : ndarray of shape (K or 1, r, g), or None
        B, the regression of r features of the rest on g given ones; None if they are independent.
    rest_covariances, rest_factors : ndarray
        Conditional covariances and factors of the rest.
    """

    given_covariances: Floats
    given_factors: Floats
    coefficients: Floats | None
    rest_covariances: Floats
    rest_factors: Floats


def identity_alone(weights: Floats, covariances: Floats, factors: Floats) -> Iterator[Floats | None]:
    """Yield the identity (None) as the only transform."""
    yield None


def unchanged(array: Floats, n_components: int) -> Floats:
    """Return ``array`` itself, for types that scikit-learn has."""
    return array


@dataclass(frozen=True, kw_only=True)
class CovarianceStructure:
    """The operations of one covariance type; comments say what each field takes and returns.

    ``covariances``, ``scatter`` and ``factors`` (the precision factors) have the shape that ``shape`` says.
    """

    # scikit-learn's name of the covariance type, if it has the type.
    name: str
    # Whether all components have one covariance, whose scatter is summed over them.
    shared: bool
    # Whether each component has a triangular factor of its own.
    own_factors: bool = False
    # Whether the features of a component are independent of each other.
    independent: bool = False
    # (K, d) -> the shape of the covariances, of their scatter and of the precision factors.
    shape: Callable[[int, int], tuple[int, ...]]
    # (K, d) -> the number of free parameters of the covariances.
    n_parameters: Callable[[int, int], int]
    # (scatter, weights (K,), d, reg_covar) -> the maximum-likelihood covariances plus ``reg_covar`` on the
    # diagonal.
    covariances: Callable[[Floats, Floats, int, float], Floats]
    # (covariances, means, weights) -> factors; raises `SingularComponentError`.
    factor: Callable[[Floats, Floats, Floats], Floats]
    # (scatter, weights, means, reg_covar, threads) -> the same covariances and factors, by several threads;
    # None if they take too little time for that.
    by_threads: Callable[[Floats, Floats, Floats, float, int], tuple[Floats, Floats]] | None = None
    # (factors, K, d) -> ln |P_k|, half the log-determinant of the precision, (K,).
    log_det: Callable[[Floats, int, int], Floats]
    # (factors) -> precisions.
    precisions: Callable[[Floats], Floats]
    # (precisions) -> covariances and factors; raises `InvalidDataError` if precisions are not positive
    # definite.
    from_precisions: Callable[[Floats], tuple[Floats, Floats]]
    # (covariances, K, d) -> the variance of each component in each feature, (K, d).
    variances: Callable[[Floats, int, int], Floats]
    # (covariances, factors, features (g,), the rest of the features (r,)) -> the split of the rest under the
    # condition of the features.
    split: Callable[[Floats, Floats, Ints, Ints], Split]
    # (covariances) -> the condition numbers of the correlation matrices, (K,) or (1,).
    conditions: Callable[[Floats], Floats]
    # (standard-normal draws (n, d), covariances, k) -> draws with component k's covariance, (n, d).
    draw: Callable[[Floats, Floats, int], Floats]
    # The type in which scikit-learn has the same model.
    scikit_learn_name: str
    # (array, K) -> covariances, precisions or their factors, in the shape of that type.
    for_scikit_learn: Callable[[Floats, int], Floats] = unchanged
    # (differences (n, d), factors, k): turn differences of rows to μ_k into units of component k's standard
    # deviations, in place.
    whiten: Callable[[Floats, Floats, int], object]
    # (vectors (m, K, d), factors) -> the vectors of each k in units of its standard deviations; a result does
    # not depend on m.
    whitened: Callable[[Floats, Floats], Floats]
    # (scatter, k, tiles of roots (n, d)): write ``Σ_n roots_n roots_nᵀ`` to component k's part of
    # ``scatter``, or add it if components share that. ``roots`` are rows about a centre, each times
    # √weight; there is at least one tile, valid until the next is asked for.
    sum_scatter: Callable[[Floats, int, Iterator[Floats]], object]
    # (scatter, weights (m, K), vectors (m, K, d)): add ``Σ_i weights_ik · vectors_ik vectors_ikᵀ`` in place.
    add_outer: Callable[[Floats, Floats, Floats], None]
    # (scatter, factors) -> ``Σ_k tr(Σ_k⁻¹ S_k)``.
    distances: Callable[[Floats, Floats], float]
    # (m second moments about the means, weights (m, K), factors, d) -> by how much the moments exceed those
    # expected for the weights, in units of the standard deviations of one row of weight 1; (m, K, s), or
    # (m, 1, s) if components share a covariance. The sum of squares is the Fisher information's.
    standardised: Callable[[Floats, Floats, Floats, int], Floats]
    # Which squares of coordinates are features.
    squares: Squares
    # (weights, covariances, factors) -> the transforms (d, d) or None of the frames worth trying, the
    # cheapest first.
    transforms: Callable[[Floats, Floats, Floats], Iterator[Floats | None]] = identity_alone
    # (log_scales (K,), means (K, d) in the frame, factors, frame) -> W (K, F), such that ``W φ`` are the
    # weighted log-densities.
    coefficients: Callable[[Floats, Floats, Floats, Frame], Floats]
    # (K, F) -> the shapes of the moments: of the sums of the first features, (K, F'), and, if components
    # share a matrix, of the products of coordinates, summed over all of them, (d, d).
    moment_shapes: Callable[[int, int], tuple[tuple[int, int], ...]] = lambda K, F: ((K, F),)
    # (moments, weights (K,), means (K, d) in the frame, frame) -> the scatter of the rows that the moments
    # are sums over.
    scatter: Callable[[Moments, Floats, Floats, Frame], Floats]

    def n_row_features(self, n_features: int) -> int:
        """Return F: the constant 1, the d coordinates, and the squares."""
        return 1 + n_features + self.squares.count(n_features)
