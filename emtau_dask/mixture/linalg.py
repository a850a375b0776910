"""Array aliases, products with triangular matrices, and Cholesky factors; the only caller of BLAS and LAPACK.

NumPy multiplies by a triangular matrix as by any matrix, which is twice the arithmetic, and copies a matrix
to factorise it. `scipy.linalg` has the routines, but holds the interpreter's lock while one computes. Its
modules for Cython have the addresses of the routines, and ctypes releases the lock while it calls one.

All matrices are float64. The routines expect Fortran order, so a matrix in C order is its transpose to them,
and an upper triangle here is a lower one there. Rows of data may also be in Fortran order.

A covariance that was computed from rounded data is hardly ever *exactly* singular, so the success of a
Cholesky factorisation says little. Two limits decide here, both independent of units:

- a variance must exceed ``(8 ε |μ|)²``, which the rounding of the rows themselves can produce: below it, the
  rows are identical in float64;
- every pivot of the *correlation* matrix must exceed ``64 d ε``, the size of the rounding errors of the
  scatter that it was computed from.

"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cython_blas, cython_lapack, lapack

from emtau_dask.errors import REGULARISE, SingularComponentError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]
EPS = float(np.finfo(np.float64).eps)
SIDE = 128
"""Number of rows of the strips in which large matrices are processed."""
FEW_FEATURES = 16
"""Minimum features for which loops over the features of a row are faster than loops over rows."""
Routine = Callable[..., None]
LOWER, LEFT, RIGHT, PLAIN, TRANSPOSED, ANY_DIAGONAL = b"L", b"L", b"R", b"N", b"T", b"N"
FILL_VALUES = 1e15
"""Minimum magnitude of numbers that are likely to stand for missing values, such as netCDF's 9.97e36."""
NO_NUMBERS = (
    "Numbers that large often stand for missing values: replace them by NaN (and set missing='marginalise'), "
    "or remove their rows."
)
SPACING_FACTOR = 8.0
PIVOT_FACTOR = 64.0
MAX_INVERTED_FEATURES = 64
"""Maximum features for which LAPACK inverts a factor in one call; with more, inversion by halves is
faster."""


def squared_length(array: AnyArray) -> float:
    """Return the sum of the squares of all numbers of a C-ordered array, in its dtype, without a copy."""
    values = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))


def read_only_copy(array: AnyArray | list[float]) -> Floats:
    """Return a read-only float64 C-ordered copy of ``array``."""
    values = np.array(array, dtype=np.float64, order="C")
    values.setflags(write=False)
    return values


def read_only(array: Floats) -> Floats:
    """Return ``array`` itself, made read-only; nothing else may refer to it."""
    array.setflags(write=False)
    return array


def symmetrised(matrices: Floats) -> Floats:
    """Copy the upper triangles of ``matrices`` (..., d, d) to the lower ones, in place, and return them.

    It works in strips, because reading the columns of a large matrix is slow.
    """
    for begin in range(0, matrices.shape[-1], SIDE):
        end = begin + SIDE
        rows = slice(begin, end)
        tile = matrices[..., rows, rows]
        np.copyto(tile, np.swapaxes(tile, -1, -2), where=np.tri(tile.shape[-1], k=-1, dtype=np.bool_))
        matrices[..., end:, rows] = np.swapaxes(matrices[..., rows, end:], -1, -2)
    return matrices


class _Routines(NamedTuple):
    dtrmm: Routine
    dsyrk: Routine
    dpotrf: Routine
    dtrtri: Routine


@cache
def _routines() -> _Routines:
    return _Routines(
        _routine(cython_blas, "dtrmm", 11),
        _routine(cython_blas, "dsyrk", 10),
        _routine(cython_lapack, "dpotrf", 5),
        _routine(cython_lapack, "dtrtri", 6),
    )


def _routine(module: Any, name: str, n_arguments: int) -> Routine:
    """Return a routine of a Cython module, all of whose arguments are pointers."""
    capsule, api = module.__pyx_capi__[name], ctypes.pythonapi
    signature_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", api))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", api)
    )
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * n_arguments)
    return prototype(address_of(capsule, signature_of(capsule)))


def _whole(number: int) -> Any:
    """Return a pointer to an integer that can be read as 32 bits or as 64."""
    return ctypes.byref(ctypes.c_int64(number))


def _real(number: float) -> Any:
    return ctypes.byref(ctypes.c_double(number))


def _stored(matrix: Floats) -> tuple[int, Any]:
    """Return pointers to the values of a matrix (m, n) in C order, and to the stride of its rows.

    A matrix in Fortran order must be transposed first.
    """
    assert matrix.dtype == np.float64
    assert matrix.strides[1] == matrix.itemsize or matrix.shape[1] < 2
    return matrix.ctypes.data, _whole(max(1, matrix.shape[1], matrix.strides[0] // matrix.itemsize))


def _writable(matrix: Floats) -> tuple[int, Any]:
    """Return the pointers of `_stored` for a matrix that a routine writes to."""
    assert matrix.flags.writeable
    return _stored(matrix)


def _by_features(rows: Floats) -> bool:
    return rows.strides[0] < rows.strides[1]


def times_upper(rows: Floats, upper: Floats) -> None:
    """Turn ``rows`` (n, d) into ``rows @ upper``, in place, with a triangle (d, d)."""
    n, d = map(_whole, rows.shape)
    if _by_features(rows):
        how, shape, stored = (RIGHT, LOWER, TRANSPOSED), (n, d), _writable(rows.T)
    else:
        how, shape, stored = (LEFT, LOWER, PLAIN), (d, n), _writable(rows)
    _routines().dtrmm(*how, ANY_DIAGONAL, *shape, _real(1.0), *_stored(upper), *stored)


def upper_times(upper: Floats, columns: Floats, scale: float = 1.0) -> None:
    """Turn ``columns`` (d, n) into ``scale * upper @ columns``, in place, with a triangle (d, d)."""
    d, n = map(_whole, columns.shape)
    how = RIGHT, LOWER, PLAIN, ANY_DIAGONAL
    _routines().dtrmm(*how, n, d, _real(scale), *_stored(upper), *_writable(columns))


def add_squares(rows: Floats, upper: Floats, beta: float = 1.0) -> None:
    """Turn the upper triangle of a matrix (d, d) into ``beta * matrix + rowsᵀ rows``, of rows (n, d).

    With ``beta=0`` the old values of the matrix are not read.
    """
    n, d = map(_whole, rows.shape)
    how, stored = (TRANSPOSED, _stored(rows.T)) if _by_features(rows) else (PLAIN, _stored(rows))
    _routines().dsyrk(LOWER, how, d, n, _real(1.0), *stored, _real(beta), *_writable(upper))


def _writable_stack(matrices: Floats) -> tuple[list[int], Any]:
    """Return the address of each of matrices (K, m, n), and a pointer to the stride of their rows."""
    first, stride = _writable(matrices[0])
    return [first + k * matrices.strides[0] for k in range(len(matrices))], stride


def factorise(matrices: Floats) -> Ints:
    """Turn the upper triangles of matrices (K, d, d) into Cholesky factors U, ``matrix = Uᵀ U``, in place.

    Returns
    -------
    ndarray of int, shape (K,)
        The number of the first pivot that is not positive, counted from 1; 0 if all are positive. If there
        is one, the entries to the right of it and below it are undefined.
    """
    routine, size = _routines().dpotrf, _whole(matrices.shape[1])
    places, stride = _writable_stack(matrices)
    failed = np.zeros((len(matrices), 2), dtype=np.int32)
    begin = failed.ctypes.data
    for k, place in enumerate(places):
        routine(LOWER, size, place, stride, begin + k * failed.strides[0])
    first: Ints = failed.sum(axis=1, dtype=np.intp)
    return first


def invert_small(uppers: Floats) -> None:
    """Invert upper triangles (K, d, d) in place, whose diagonals have no zero."""
    routine, size, ignored = _routines().dtrtri, _whole(uppers.shape[1]), _whole(0)
    places, stride = _writable_stack(uppers)
    for place in places:
        routine(LOWER, ANY_DIAGONAL, size, place, stride, ignored)


def check_variances(variances: Floats, means: Floats, weights: Floats, first: int = 0) -> None:
    """Raise `SingularComponentError` for variances (K, m) that rounding of the rows can produce.

    Means (K, m) are the magnitudes of the rows' coordinates. The error names the first such component,
    numbered from ``first`` (-1 for a shared covariance), and its weight, one of ``weights`` (K,).
    """
    floors = (SPACING_FACTOR * EPS * np.abs(means)) ** 2
    bad = ~(variances > floors)
    if bad.any():
        k, j = np.argwhere(bad)[0]
        raise SingularComponentError(
            first + int(k),
            float(weights[k]),
            f"the variance of feature {j} is {variances[k, j]:.3g}, not above {floors[k, j]:.3g}, the "
            f"resolution of float64 at {means[k, j]:.6g}, where its rows are",
            NO_NUMBERS if abs(means[k, j]) >= FILL_VALUES else REGULARISE,
        )


def precision_factors(covariances: Floats, means: Floats, weights: Floats, first: int = 0) -> Floats:
    """Return for each of ``covariances`` (K, d, d) the upper-triangular P with ``P Pᵀ = covariance⁻¹``.

    Arguments and errors are those of `cholesky_factors`.
    """
    factors = np.empty(covariances.shape)
    cholesky_factors(covariances, means, weights, factors, first)
    invert_upper(factors)
    return factors


def cholesky_factors(
    covariances: Floats, means: Floats, weights: Floats, out: Floats, first: int = 0
) -> None:
    """Write the upper-triangular U with ``Uᵀ U = covariance`` into ``out`` (K, d, d).

    The other arguments are those of `check_variances`. Raises `SingularComponentError` if a covariance is
    singular to working precision.
    """
    _copy_upper(covariances, out)
    factorise_upper(out, means, weights, first)


def factorise_upper(matrices: Floats, means: Floats, weights: Floats, first: int = 0) -> None:
    """Turn the upper triangles of covariances (K, d, d) into their Cholesky factors, in place.

    Errors are those of `cholesky_factors`. A pivot of the correlation matrix is that of the covariance over
    the feature's variance, and rounding does not depend on the scale of features.
    """
    variances = np.einsum("kii->ki", matrices).copy()
    check_variances(variances, means, weights, first)
    failed = factorise(matrices)
    pivots = np.einsum("kii->ki", matrices) ** 2 / variances
    for some, number in zip(pivots, failed, strict=True):
        if number:
            some[number - 1 :] = np.inf
            some[number - 1] = 0.0
    limit = PIVOT_FACTOR * variances.shape[1] * EPS
    singular = ~(pivots > limit).all(axis=1)
    if singular.any():
        k = int(np.argmax(singular))
        raise SingularComponentError(
            first + k,
            float(weights[k]),
            f"feature {np.argmin(pivots[k])} is a linear combination of the features before it to within "
            f"{limit:.3g} of its variance, so the covariance is not positive definite",
        )


def _copy_upper(matrices: Floats, out: Floats) -> None:
    """Copy the upper triangles of matrices (K, d, d), and write zeros below."""
    for begin in range(0, matrices.shape[-1], SIDE):
        rows, columns = slice(begin, begin + SIDE), slice(begin, None)
        out[:, rows, :begin] = 0.0
        out[:, rows, columns] = matrices[:, rows, columns]
        tile = out[:, rows, rows]
        tile *= np.tri(tile.shape[-1]).T


def invert_upper(upper: Floats) -> None:
    """Invert upper-triangular matrices (K, d, d) in place, by halves."""
    d = upper.shape[-1]
    if d <= MAX_INVERTED_FEATURES:
        invert_small(upper)
        return
    half = d // 2
    first, corner, last = upper[:, :half, :half], upper[:, :half, half:], upper[:, half:, half:]
    invert_upper(first)
    invert_upper(last)
    for k in range(len(upper)):
        times_upper(corner[k], last[k])
        upper_times(first[k], corner[k], scale=-1.0)


def upper_inverse(upper: Floats) -> Floats:
    """Return the inverse of an upper-triangular matrix."""
    inverse: Floats = np.triu(upper)
    invert_upper(inverse[np.newaxis])
    return inverse


def factor_of_precision(precision: Floats) -> Floats | None:
    """Return the upper-triangular P with ``P Pᵀ = precision``, or None if there is none.

    Cholesky of the row- and column-reversed matrix, reversed back: a lower
    factor of the reversed matrix is an upper factor of the matrix itself.
    """
    scale = np.sqrt(np.diagonal(precision))
    flipped = (precision / scale / scale[:, np.newaxis])[::-1, ::-1]
    lower, info = lapack.dpotrf(np.asfortranarray(flipped), lower=1, clean=1)
    if info != 0:
        return None
    return np.ascontiguousarray(lower[::-1, ::-1]) * scale[:, np.newaxis]


def covariance_of_factor(factor: Floats) -> Floats:
    """Return ``(P Pᵀ)⁻¹`` for an upper-triangular factor P, exactly symmetric."""
    inverse = upper_inverse(factor)
    return read_only_copy(inverse.T @ inverse)
