"""What a covariance type is: a record of the few operations in which types differ.

All else in the package is written once, against `CovarianceStructure`.

Shapes: K components, d features, n rows of a block, F features of a row in `mixture.estep.features`.

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

from emtau_dask.mixture.covariance.squares import Squares
from emtau_dask.mixture.numerics import Floats, Step, summed_product

Moments = tuple[Floats, ...]
"""``Σ_n r_kn φ_n``, (K, F), and what a covariance type needs besides; adds up over blocks."""


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


def identity_alone(weights: Floats, covariances: Floats, factors: Floats) -> Iterator[Floats | None]:
    """Yield no transform but the identity."""
    yield None


def summed_features(features: Floats, responsibilities: Floats, out: Moments) -> Iterator[Step]:
    """Yield what writes the sums of all features, the only moments of most types."""
    return summed_product(responsibilities, features, out[0])


def unchanged(array: Floats, n_components: int) -> Floats:
    """Return ``array`` itself, where scikit-learn has the covariance type."""
    return array


@dataclass(frozen=True, kw_only=True)
class CovarianceStructure:
    """What one covariance type does differently.

    Attributes
    ----------
    name : str
        scikit-learn's name of the covariance type, where it has the type.
    shared : bool
        Whether all components have one covariance, whose scatter is summed over them. They are then
        scored all in the same form.
    own_factors : bool
        Whether each component has a triangular factor of its own. All of them can then whiten
        rows together, and squared distances can be broken off.
    shape : callable (K, d) -> tuple of int
        Shape of the covariances, of their scatter and of the precision factors.
    n_parameters : callable (K, d) -> int
        Free parameters of the covariances.
    covariances : callable (scatter, weights (K,), d, reg_covar) -> covariances
        Maximum-likelihood covariances plus ``reg_covar`` on the diagonal.
    factor : callable (covariances, means, weights, threads) -> precisions_cholesky
        By so many threads where that pays; raises `SingularComponentError`.
    log_det : callable (precisions_cholesky, K, d) -> (K,)
        ln |P_k|, half the log-determinant of the precision.
    precisions : callable (precisions_cholesky) -> precisions
    from_precisions : callable (precisions) -> (covariances, precisions_cholesky)
        Raises `InvalidDataError` where they are not positive definite.
    variances : callable (covariances, K, d) -> (K, d)
        Variance of each component in each feature.
    conditions : callable (covariances) -> (K,) or (1,)
        Condition numbers of the correlation matrices.
    draw : callable (normals (n, d), covariances, k) -> (n, d)
        Standard-normal draws given component k's covariance.
    scikit_learn_name : str
        The type in which scikit-learn has the same model.
    for_scikit_learn : callable (array, K) -> array
        Covariances, precisions or their factors, in the shape of that type.
    whiten : callable (differences (n, d), precisions_cholesky, k, out (n, d))
        Write rows relative to μ_k in units of component k's standard deviations.
    add_scatter : callable (scatter, k, tiles of roots (n, d)) -> None
        Add ``Σ_n roots_n roots_nᵀ`` to component k's part of ``scatter``, in
        place, which is zero before where it is k's alone; ``roots`` are rows
        about a centre, each times √weight, valid until the next tile is asked for.
    add_outer : callable (scatter, weights (m, K), vectors (m, K, d)) -> None
        Add ``Σ_i weights_ik · vectors_ik vectors_ikᵀ`` to ``scatter``, in place.
    distances : callable (scatter, precisions_cholesky) -> float
        ``Σ_k tr(Σ_k⁻¹ S_k)``.
    squares : Squares
        Which squares of coordinates are features.
    transforms : callable (weights, covariances, precisions_cholesky) -> iterator of (d, d) or None
        Of the frames worth trying, the cheapest first.
    coefficients : callable (log_scales (K,), means (K, d), precisions_cholesky, frame) -> (K, F)
        W, such that ``W φ`` are the weighted log-densities; ``means`` are in the frame.
    moment_shapes : callable (K, F) -> tuple of shapes
    moments : callable (features (F, n), responsibilities (K, n), out Moments) -> iterator of Step
        What writes the moments of a block.
    scatter : callable (moments, weights (K,), means (K, d), frame) -> scatter
        Of the rows that the moments are sums over; ``means`` are in the frame.
    """

    name: str
    shared: bool
    own_factors: bool = False
    shape: Callable[[int, int], tuple[int, ...]]
    n_parameters: Callable[[int, int], int]
    covariances: Callable[[Floats, Floats, int, float], Floats]
    factor: Callable[[Floats, Floats, Floats, int], Floats]
    log_det: Callable[[Floats, int, int], Floats]
    precisions: Callable[[Floats], Floats]
    from_precisions: Callable[[Floats], tuple[Floats, Floats]]
    variances: Callable[[Floats, int, int], Floats]
    conditions: Callable[[Floats], Floats]
    draw: Callable[[Floats, Floats, int], Floats]
    scikit_learn_name: str
    for_scikit_learn: Callable[[Floats, int], Floats] = unchanged
    whiten: Callable[[Floats, Floats, int, Floats], object]
    add_scatter: Callable[[Floats, int, Iterator[Floats]], None]
    add_outer: Callable[[Floats, Floats, Floats], None]
    distances: Callable[[Floats, Floats], float]
    squares: Squares
    transforms: Callable[[Floats, Floats, Floats], Iterator[Floats | None]] = identity_alone
    coefficients: Callable[[Floats, Floats, Floats, Frame], Floats]
    moment_shapes: Callable[[int, int], tuple[tuple[int, int], ...]] = lambda K, F: ((K, F),)
    moments: Callable[[Floats, Floats, Moments], Iterator[Step]] = summed_features
    scatter: Callable[[Moments, Floats, Floats, Frame], Floats]

    def n_row_features(self, n_features: int) -> int:
        """Return F: the constant 1, the d coordinates, and the squares."""
        return 1 + n_features + self.squares.count(n_features)
