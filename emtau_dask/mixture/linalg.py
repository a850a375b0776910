"""Array aliases, products of triangles, Cholesky factors; the only caller of BLAS and LAPACK.

NumPy multiplies by a triangle as by any matrix, which is twice the arithmetic, and copies what it factorises.
`scipy.linalg` has the routines, but no other thread of Python runs while one computes. What it offers to
Cython are the routines themselves, and ctypes lets go of the interpreter's lock while it calls one.

All matrices are float64. To a routine, a matrix whose rows lie one after the other is its transpose, whose
columns do; so the upper triangles here, of which rows lie so, are lower ones there. Rows of data may also
lie feature after feature, as `room_for_rows` makes them.

A covariance that was computed from rounded data is hardly ever *exactly* singular, so the success of a
Cholesky factorisation says little. Two limits decide here, both independent of units:

- a variance must exceed ``(8 ε |μ|)²``, which the rounding of the rows themselves can produce: below it, the
  rows are identical in float64;
- every pivot of the *correlation* matrix must exceed ``64 d ε``, the size of the rounding errors of the
  scatter that it was computed from.

Passes over a large (K, d, d) array cost as much as the memory that they read and write. Upper triangles are
half of it. Where the work goes strip by strip, all steps are done while a strip is in the cache.

Two costs of NumPy's products are avoided. OpenBLAS packs the factors of a product before it multiplies
them; where a factor has few rows, packing takes longer than the product. It does not pack where the product
has at most a million multiplications and, if the second factor is transposed, at most about a thousand
results. And NumPy's `matmul` keeps the interpreter lock, so that all other threads wait, while it computes
a result of at most 500 numbers, however long the factors are. A stack of results, one for each slice, has
more numbers. `dot` never keeps the lock, but copies factors that are not contiguous.

Making the views of the slices keeps the lock as well. Such a product is therefore returned as steps, calls of
NumPy whose arguments exist already, which every block of rows in the same buffers can `perform` again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cython_blas, cython_lapack, lapack

from emtau_dask.errors import SingularComponentError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]
Step = Callable[[], object]
"""A call whose arguments exist already."""
EPS = float(np.finfo(np.float64).eps)
SIDE = 128
"""Rows of the strips in which large matrices are worked on."""
FEW_FEATURES = 16
"""Up to so many features less one, loops over rows are faster than loops over the features of a row."""
Routine = Callable[..., None]
LOWER, LEFT, RIGHT, PLAIN, TRANSPOSED, ANY_DIAGONAL = b"L", b"L", b"R", b"N", b"T", b"N"
SPACING_FACTOR = 8.0
PIVOT_FACTOR = 64.0
INVERTED_AT_ONCE = 64
"""Most features for which LAPACK inverts a factor in one call; products of halves are faster beyond."""
UNPACKED, UNPACKED_RESULT = 10**6, 1000
"""Most multiplications, and most results with a transposed factor, for which OpenBLAS does not pack."""
LOCKED_RESULT = 500
"""Most results for which `matmul` keeps the lock."""
SHORTEST, NARROWEST = 128, 24
"""Rows of the shortest slices, and columns of the narrowest parts of a sum's result."""
SUMMED_ROWS = 1024
"""The most rows that are summed in float32."""


def squared_length(array: AnyArray) -> float:
    """Return the sum of the squares of all numbers of a C-ordered array, in its dtype, without a copy."""
    values = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))


def room_for_rows(n_rows: int, n_features: int) -> Floats:
    """Return an array (n_rows, n_features), not initialised, in the memory order in which work on it is fast.

    Few features lie one after another, each with all rows, so that loops of NumPy are long; many lie side by
    side. Calls take the long loops where all their arguments are transposed, the array's first axis last.
    """
    if n_features < FEW_FEATURES:
        return np.empty((n_features, n_rows)).T
    return np.empty((n_rows, n_features))


def read_only_copy(array: AnyArray | list[float]) -> Floats:
    """Return a read-only float64 C-ordered copy of ``array``."""
    values = np.array(array, dtype=np.float64, order="C")
    values.setflags(write=False)
    return values


def read_only(array: Floats) -> Floats:
    """Return ``array`` itself, read-only from now on; nothing else may refer to it."""
    array.setflags(write=False)
    return array


def symmetrised(matrices: Floats) -> Floats:
    """Return ``matrices`` (..., d, d) themselves, what is below the diagonal now equal to what is above.

    It goes by strips, since reading the columns of a large matrix is slow.
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
    dtrsm: Routine
    dsyrk: Routine
    dpotrf: Routine
    dtrtri: Routine


@cache
def _routines() -> _Routines:
    return _Routines(
        _routine(cython_blas, "dtrmm", 11),
        _routine(cython_blas, "dtrsm", 11),
        _routine(cython_blas, "dsyrk", 10),
        _routine(cython_lapack, "dpotrf", 5),
        _routine(cython_lapack, "dtrtri", 6),
    )


def _routine(module: Any, name: str, n_arguments: int) -> Routine:
    """Return a routine of a module of Cython's, all of whose arguments are pointers."""
    capsule, api = module.__pyx_capi__[name], ctypes.pythonapi
    signature_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", api))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", api)
    )
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * n_arguments)
    return prototype(address_of(capsule, signature_of(capsule)))


def _whole(number: int) -> Any:
    """Return a pointer to an integer that may be read as one of 32 bits or of 64."""
    return ctypes.byref(ctypes.c_int64(number))


def _real(number: float) -> Any:
    return ctypes.byref(ctypes.c_double(number))


def _stored(matrix: Floats) -> tuple[int, Any]:
    """Return pointers to the numbers of a matrix (m, n), and to how far its rows lie apart.

    What lies feature after feature is to be given transposed.
    """
    assert matrix.dtype == np.float64
    assert matrix.strides[1] == matrix.itemsize or matrix.shape[1] < 2
    return matrix.ctypes.data, _whole(max(1, matrix.shape[1], matrix.strides[0] // matrix.itemsize))


def _changed(matrix: Floats) -> tuple[int, Any]:
    """Return what `_stored` does of a matrix that a routine writes to."""
    assert matrix.flags.writeable
    return _stored(matrix)


def _by_features(rows: Floats) -> bool:
    return rows.strides[0] < rows.strides[1]


def upper_product(rows: Floats, upper: Floats, scale: float = 1.0) -> Step:
    """Return what turns ``rows`` (n, d) into ``scale * rows @ upper``, in place, with a triangle (d, d)."""
    return _by_triangle(_routines().dtrmm, rows, upper, scale)


def upper_solution(rows: Floats, upper: Floats, scale: float = 1.0) -> Step:
    """Return what turns ``rows`` (n, d) into ``scale * rows @ upper⁻¹``, in place, with a triangle (d, d)."""
    return _by_triangle(_routines().dtrsm, rows, upper, scale)


def _by_triangle(routine: Routine, rows: Floats, upper: Floats, scale: float) -> Step:
    n, d = map(_whole, rows.shape)
    if _by_features(rows):
        how, shape, stored = (RIGHT, LOWER, TRANSPOSED), (n, d), _changed(rows.T)
    else:
        how, shape, stored = (LEFT, LOWER, PLAIN), (d, n), _changed(rows)
    arguments = *how, ANY_DIAGONAL, *shape, _real(scale), *_stored(upper), *stored
    return partial(_call, partial(routine, *arguments), rows, upper)


def _call(routine: Step, *arrays: Floats) -> None:
    """Call what was told only where in memory the arrays are; they are there as long as the caller is."""
    routine()


def times_upper(rows: Floats, upper: Floats) -> None:
    """Turn ``rows`` (n, d) into ``rows @ upper``, in place, with a triangle (d, d)."""
    upper_product(rows, upper)()


def upper_times(upper: Floats, columns: Floats, scale: float = 1.0) -> None:
    """Turn ``columns`` (d, n) into ``scale * upper @ columns``, in place, with a triangle (d, d)."""
    d, n = map(_whole, columns.shape)
    how = RIGHT, LOWER, PLAIN, ANY_DIAGONAL
    _routines().dtrmm(*how, n, d, _real(scale), *_stored(upper), *_changed(columns))


def add_squares(rows: Floats, upper: Floats, kept: float = 1.0) -> None:
    """Turn the upper triangle of a matrix (d, d) into ``kept * matrix + rowsᵀ rows``, of rows (n, d).

    Where nothing is kept, what the matrix holds is not read.
    """
    n, d = map(_whole, rows.shape)
    how, stored = (TRANSPOSED, _stored(rows.T)) if _by_features(rows) else (PLAIN, _stored(rows))
    _routines().dsyrk(LOWER, how, d, n, _real(1.0), *stored, _real(kept), *_changed(upper))


def _changed_stack(matrices: Floats) -> tuple[list[int], Any]:
    """Return where each of matrices (K, m, n) is stored, and a pointer to how far their rows lie apart."""
    first, apart = _changed(matrices[0])
    return [first + k * matrices.strides[0] for k in range(len(matrices))], apart


def factorise(matrices: Floats) -> Ints:
    """Turn the upper triangles of matrices (K, d, d) into Cholesky factors U, ``matrix = Uᵀ U``, in place.

    Returns
    -------
    ndarray of int, shape (K,)
        The number of the first pivot that is not positive, counted from 1; 0 where all are. What is right
        of it and below it is of no use then.
    """
    routine, size = _routines().dpotrf, _whole(matrices.shape[1])
    places, apart = _changed_stack(matrices)
    failed = np.zeros((len(matrices), 2), dtype=np.int32)
    begin = failed.ctypes.data
    for k, place in enumerate(places):
        routine(LOWER, size, place, apart, begin + k * failed.strides[0])
    first: Ints = failed.sum(axis=1, dtype=np.intp)
    return first


def invert_small(uppers: Floats) -> None:
    """Invert upper triangles (K, d, d) in place, whose diagonals have no zero."""
    routine, size, ignored = _routines().dtrtri, _whole(uppers.shape[1]), _whole(0)
    places, apart = _changed_stack(uppers)
    for place in places:
        routine(LOWER, ANY_DIAGONAL, size, place, apart, ignored)


def check_variances(variances: Floats, means: Floats, weights: Floats, first: int = 0) -> None:
    """Refuse variances (K, m) that the rounding of the rows alone can produce.

    Means (K, m) are the magnitudes of the rows' coordinates. `SingularComponentError` is raised for the first
    such component, with its number, counted from ``first`` (-1 for a shared covariance), and its weight, of
    ``weights`` (K,).
    """
    floors = (SPACING_FACTOR * EPS * np.abs(means)) ** 2
    bad = ~(variances > floors)
    if bad.any():
        k, j = np.argwhere(bad)[0]
        raise SingularComponentError(
            first + int(k),
            float(weights[k]),
            f"the variance of feature {j} is {variances[k, j]:.3g}, not above {floors[k, j]:.3g}, "
            "what float64 can resolve there",
        )


def covariance_factors(covariances: Floats, precision_factors: Floats) -> Floats:
    """Return the upper-triangular U with ``Uᵀ U = covariance`` of each (K, d, d), whose inverse is known.

    Where a covariance is singular to working precision, U is the inverse of its precision factor.
    """
    factors = np.empty(covariances.shape)
    _copy_upper(covariances, factors)
    for k in np.flatnonzero(factorise(factors)):
        factors[k] = upper_inverse(precision_factors[k])
    return factors


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

    The other arguments are those of `check_variances`. `SingularComponentError` is raised where a covariance
    is singular to working precision.
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
    if d <= INVERTED_AT_ONCE:
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
    """Return the upper-triangular P with ``P Pᵀ = precision``, or None where there is none.

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


def strips_of(n_features: int) -> Iterator[slice]:
    """Yield the rows of each strip of a matrix of so many features."""
    for begin in range(0, n_features, SIDE):
        yield slice(begin, min(begin + SIDE, n_features))


def write_mirrored(strip: Floats, rows: slice, out: Floats) -> None:
    """Write a strip (m, d - begin) of a symmetric matrix (d, d), and its mirror image."""
    out[rows, rows.start :] = strip
    out[rows.stop :, rows] = strip[:, len(strip) :].T
    _mirror(out[rows, rows])


def mirror_squares(matrix: Floats) -> None:
    """Make the squares on the diagonal of a matrix (d, d) symmetric; each strip begins with one."""
    for rows in strips_of(len(matrix)):
        _mirror(matrix[rows, rows])


def _mirror(square: Floats) -> None:
    np.copyto(square, square.T, where=np.tri(len(square), k=-1, dtype=np.bool_))


@dataclass(frozen=True, eq=False)
class Triangles:
    """Symmetric matrices ``Σ_j parts_j + Σ_i weights_i · vectors_i vectors_iᵀ``, K of them.

    Attributes
    ----------
    parts : tuple of ndarray of shape (K, d, d)
        One or more, of which the strips count: what is right of their diagonals, and squares on them.
    weights : ndarray of shape (m, K)
    vectors : ndarray of shape (m, K, d)
        Outer products that are below the rounding of the parts are left out.
    """

    parts: tuple[Floats, ...]
    weights: Floats
    vectors: Floats

    @cached_property
    def _count(self) -> Bools:
        """Which outer products count, (m, K)."""
        diagonal = sum(np.einsum("kii->ki", part) for part in self.parts)
        squares = self.weights[:, :, np.newaxis] * self.vectors**2
        count: Bools = (np.abs(squares) > 0.25 * EPS * diagonal).any(axis=2)
        return count

    def write_strip(self, k: int, rows: slice, out: Floats) -> None:
        """Write a strip of matrix k, (m, d - begin)."""
        columns = slice(rows.start, None)
        first, *others = (part[k, rows, columns] for part in self.parts)
        if others:
            np.add(first, others[0], out=out)
        else:
            out[...] = first
        for other in others[1:]:
            out += other
        counting = self._count[:, k]
        if counting.any():
            vectors = self.vectors[counting, k]
            out += (self.weights[counting, k, np.newaxis] * vectors[:, rows]).T @ vectors[:, columns]

    @cached_property
    def upper(self) -> Floats:
        """Matrices (K, d, d) of which the strips are the sums; the rest does not count."""
        if len(self.parts) == 1 and not self._count.any():
            return self.parts[0]
        out = np.empty_like(self.parts[0])
        for k, matrix in enumerate(out):
            self._write_strips(k, matrix)
        return read_only(out)

    def whole(self) -> Floats:
        """Return the matrices, (K, d, d)."""
        out = np.empty_like(self.parts[0])
        for k, matrix in enumerate(out):
            self._write_strips(k, matrix)
            symmetrised(matrix)
        return out

    def _write_strips(self, k: int, out: Floats) -> None:
        for rows in strips_of(len(out)):
            self.write_strip(k, rows, out[rows, rows.start :])


def _slices(n_rows: int, longest: int) -> int:
    count = 1
    while count * longest < n_rows:
        count *= 2
    return count


def score_slices(n_rows: int, size: int) -> int:
    """Return the number of slices of `product`, a power of two, for ``size`` multiplications a row."""
    longest = UNPACKED // size
    return _slices(n_rows, longest) if longest >= SHORTEST else 1


def sum_slices(n_rows: int, size: int, *, single: bool = False) -> int:
    """Return the number of slices of sums over rows, a power of two, for ``size`` results."""
    longest = UNPACKED // size if size <= UNPACKED_RESULT else n_rows
    count = _slices(n_rows, min(longest, SUMMED_ROWS) if single else longest)
    while count * size <= LOCKED_RESULT and 2 * count * SHORTEST <= n_rows:
        count *= 2
    return count


def _stacked(matrix: AnyArray, count: int) -> AnyArray:
    """Return (rows, columns) as (count, rows, columns // count), without the columns left over."""
    rows, columns = matrix.shape
    length = columns // count
    return matrix[:, : count * length].reshape(rows, count, length).swapaxes(0, 1)


def perform(steps: Iterable[Step]) -> None:
    """Do one step after another."""
    for step in steps:
        step()


def product(a: AnyArray, b: AnyArray, out: AnyArray) -> Iterator[Step]:
    """Yield what writes ``a b`` of (K, F) and (F, n) into ``out`` (K, n), by slices of the n rows."""
    n = b.shape[1]
    count = score_slices(n, a.size)
    if count == 1:
        yield partial(np.matmul, a, b, out)
        return
    yield partial(np.matmul, a, _stacked(b, count), _stacked(out, count))
    if rest := n % count:
        yield partial(np.matmul, a, b[:, -rest:], out[:, -rest:])


def unpacked_parts(k: int, f: int) -> list[int]:
    """Return where parts of the f columns of a sum's result (k, f) begin and end, so that none is packed for.

    There is one part where they would be narrow.
    """
    widest = UNPACKED_RESULT // k
    parts = -(-f // widest) if widest >= NARROWEST else 1
    return [f * i // parts for i in range(parts + 1)]


def summed_product(a: AnyArray, b: AnyArray, out: Floats) -> Iterator[Step]:
    """Yield what writes ``a bᵀ`` of (K, n) and (F, n) into ``out`` (K, F), float64.

    It goes by slices of the n rows, and by `unpacked_parts` of the F. Where these would be narrow, the longer
    factor is the first, and is packed once.
    """
    k, f = out.shape
    parts = unpacked_parts(k, f)
    if len(parts) > 2 or k * f <= UNPACKED_RESULT:
        for begin, end in pairwise(parts):
            yield from _sum(a, b[begin:end], out[:, begin:end])
    elif k < f:
        yield from _sum(b, a, out.T)
    else:
        yield from _sum(a, b, out)


def squares(a: AnyArray, out: Floats) -> Iterator[Step]:
    """Yield what writes ``a aᵀ`` of (d, n) into ``out`` (d, d), float64, exactly symmetric, by slices."""
    return _sum(a, a, out)


def _sum(a: AnyArray, b: AnyArray, out: Floats) -> Iterator[Step]:
    n = b.shape[1]
    count = sum_slices(n, out.size, single=b.dtype == np.float32)
    if count > 1:
        sums = np.empty((count, *out.shape), dtype=b.dtype)
        yield partial(np.matmul, _stacked(a, count), _stacked(b, count).swapaxes(1, 2), sums)
        yield partial(np.add.reduce, sums, 0, np.float64, out)
        if rest := n % count:
            yield partial(_add_product, a[:, -rest:], b[:, -rest:].T, out)
    elif a.flags.forc and b.flags.forc:
        yield partial(_write_dot, a, b.T, out)
    else:
        yield partial(np.matmul, a, b.T, out)


def _add_product(a: AnyArray, b: AnyArray, out: Floats) -> None:
    out += np.matmul(a, b)


def _write_dot(a: AnyArray, b: AnyArray, out: Floats) -> None:
    out[...] = np.dot(a, b)
