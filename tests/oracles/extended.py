"""Full EM in extended precision (np.longdouble), on the stored values exactly as they are.

A float64 minus a float64 shift of nearly its own size is exact, and every float64 is a longdouble, so nothing
is lost before the arithmetic begins, and the arithmetic loses about a thousandth of what float64 loses.
"""

import mpmath
import numpy as np

from oracles import naive

LONG = np.longdouble
EXTENDED = np.finfo(LONG).eps < 2e-19  # false where the platform's longdouble is only a double


def unshifted(X, shift):
    """X − shift, which must be exact; the caller's shift is of nearly the size of the values."""
    moved = X - shift
    if not np.array_equal(moved.astype(LONG), X.astype(LONG) - LONG(shift)):
        raise ValueError("the subtraction is not exact: choose values nearer to the shift")
    return moved


def fit(X, start, *, shift=0.0, **options):
    """`naive.fit` in extended precision on X − shift, from the same start moved by −shift."""
    if shift:
        X = unshifted(X, shift)
        if isinstance(start, dict):
            start = {**start, "means_init": unshifted(start["means_init"], shift)}
    return naive.fit(X, start, dtype=LONG, **options)


def mean_log_likelihood_mpmath(X, weights, means, covariances, digits=60):
    """Mean ln p(x_n) to `digits` decimal digits, the covariances full: judges the extended oracle itself."""
    with mpmath.workdps(digits):
        parts = []
        for weight, mean, covariance in zip(weights, means, covariances, strict=True):
            sigma = mpmath.matrix(np.asarray(covariance, dtype=float).tolist())
            parts.append(
                (mpmath.mpf(float(weight)), mean, sigma**-1, mpmath.sqrt(mpmath.det(2 * mpmath.pi * sigma)))
            )
        total = mpmath.mpf(0)
        for row in X:
            density = mpmath.mpf(0)
            for weight, mean, precision, norm in parts:
                diff = mpmath.matrix(
                    [mpmath.mpf(float(x)) - mpmath.mpf(float(m)) for x, m in zip(row, mean, strict=True)]
                )
                density += weight * mpmath.exp(-(diff.T * precision * diff)[0] / 2) / norm
            total += mpmath.log(density)
        return total / len(X)
