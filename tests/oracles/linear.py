"""The little linear algebra that the oracles need, for any float dtype (NumPy's own stops at float64)."""

import numpy as np


class NotPositiveDefiniteError(Exception):
    """A pivot of the Cholesky factorisation is zero, negative or NaN."""


def cholesky(matrix):
    """Lower triangular L with L Lᵀ = matrix, by the textbook loop, in the matrix's own dtype."""
    d = len(matrix)
    lower = np.zeros_like(matrix)
    for j in range(d):
        pivot = matrix[j, j] - np.sum(lower[j, :j] ** 2)
        if not pivot > 0:
            raise NotPositiveDefiniteError(f"pivot {j} is {pivot}")
        lower[j, j] = np.sqrt(pivot)
        for i in range(j + 1, d):
            lower[i, j] = (matrix[i, j] - np.sum(lower[i, :j] * lower[j, :j])) / lower[j, j]
    return lower


def solve_lower(lower, right):
    """Solve L y = right for columns of `right` (d × anything) by forward substitution."""
    y = np.zeros_like(right)
    for i in range(len(lower)):
        y[i] = (right[i] - lower[i, :i] @ y[:i]) / lower[i, i]
    return y


def inverse(matrix):
    """Inverse of a symmetric positive definite matrix, exactly symmetric."""
    root = solve_lower(cholesky(matrix), np.eye(len(matrix), dtype=matrix.dtype))
    return root.T @ root


def log_normal(X, mean, covariance):
    """ln N(x_n | mean, covariance) for every row of X (N × d): an array of N."""
    lower = cholesky(covariance)
    white = solve_lower(lower, (X - mean).T)
    log_two_pi = np.log(8 * np.arctan(X.dtype.type(1)))
    log_det = 2 * np.sum(np.log(np.diag(lower)))
    return -(X.shape[1] * log_two_pi + log_det + np.sum(white**2, axis=0)) / 2
