"""Routines of BLAS and LAPACK that NumPy does not offer: on triangles, and in place.

NumPy multiplies by a triangle as by any matrix, which is twice the arithmetic, and copies what it factorises.
`scipy.linalg` has the routines, but no other thread of Python runs while one computes. What it offers to
Cython are the routines themselves, and ctypes lets go of the interpreter's lock while it calls one.

All matrices are float64. To a routine, a matrix whose rows lie one after the other is its transpose, whose
columns do; so the upper triangles here, of which rows lie so, are lower ones there. Rows of data may also
lie feature after feature, as `room_for_rows` makes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

from emtau_dask.mixture.numerics.arrays import Floats, Ints, Step

Routine = Callable[..., None]
LOWER, LEFT, RIGHT, PLAIN, TRANSPOSED, ANY_DIAGONAL = b"L", b"L", b"R", b"N", b"T", b"N"


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
