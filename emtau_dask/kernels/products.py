"""Products of few rows with a tile that is in the core's own cache, in vectors of the machine's width.

A BLAS packs its factors before it multiplies them, which takes as long as multiplying them by few rows.
A tile needs no packing: its rows are whole vectors, and they are in the cache. The sums for four rows of one
factor by three vectors, or rows, of the other stay in registers during one loop along the dimension
that both share (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", section 4).
So do the squares of such sums, and rows while they are transposed.
Functions raise ValueError if shapes do not fit.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit

from emtau_dask.kernels.vectors import (
    COLUMNS,
    ROWS,
    SIDE,
    VECTOR_BYTES,
    four_by_three,
    multiply_four,
    multiply_one,
    multiply_three,
    multiply_two,
    one_by_one,
    one_by_three,
    scatter_own,
    scatter_some,
    square_one,
    square_three,
    square_two,
    subtract_four,
    subtract_one,
    subtract_three,
    subtract_two,
    three_by_three,
    transpose_four,
    two_by_three,
)

OPTIONS: dict[str, Any] = {
    "nogil": True,
    "_nrt": False,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "fastmath": {"contract"},
}


def _digest() -> str:
    """Return a digest of the modules of compiled loops; "" if they are not files."""
    found = sha256()
    with suppress(OSError):
        for path in sorted(Path(__file__).parent.glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


VERSION = _digest()
"""Part of the names under which numba caches compiled code: it checks only a function's own file, and cannot
read cached code with types that no longer exist."""


def loop(function: Any, **options: Any) -> Any:
    """Compile a function at its first call, and cache the result on disk if numba can."""
    function.__qualname__ += f"-{VERSION}"
    try:
        return njit(**OPTIONS | options, cache=True)(function)
    except RuntimeError:
        return njit(**OPTIONS | options)(function)


inlined = partial(loop, inline="always")
"""Compiles a function only as a part of its callers; numba would also optimise it by itself."""
internal = partial(loop, no_cpython_wrapper=True)
"""Compiles a function that only compiled code calls; numba would also write code to call it from Python."""
sum_loop = partial(loop, fastmath={"contract", "reassoc"})
"""Compiles a function that adds in any order."""


def side_of(n_features: int, itemsize: int) -> int:
    """Return the minimum side for the features that is a multiple of whole vectors and of four."""
    step = max(ROWS, VECTOR_BYTES // itemsize)
    return -(-n_features // step) * step


@loop
def subtract_transposed(rows: Any, origin: Any, out: Any) -> None:
    """Write ``(rows - origin).T``, of rows (n, d) and (1, d), into ``out[:d, :n]``."""
    n, d = rows.shape
    m, whole = n - n % SIDE, d - d % SIDE
    if origin.shape[0] != 1 or origin.shape[1] != d or d > len(out) or n > out.shape[1]:
        raise ValueError("rows, origin and result do not fit each other")
    for t in range(0, m, SIDE):
        for f in range(0, whole, SIDE):
            transpose_four(rows, origin, out, t, f, f, 0)
    for f in range(d):
        of_feature, middle = out[f], origin[0, f]
        for t in range(m if f < whole else 0, n):
            of_feature[t] = rows[t, f] - middle


@loop
def multiply(left: Any, right: Any, out: Any) -> None:
    """Write ``left @ right``, of (m, F) and (F, T), into ``out`` (m, T).

    T numbers fill a multiple of `COLUMNS` cache lines.
    """
    m, depth, step = len(left), len(right), COLUMNS * VECTOR_BYTES // right.itemsize
    if left.shape[1] != depth or len(out) != m or right.shape[1] != out.shape[1] or right.shape[1] % step:
        raise ValueError("factors and result do not fit each other, or vectors do not fit them")
    remainder = m % ROWS
    k = m - remainder
    for t in range(0, right.shape[1], step):
        for row in range(0, k, ROWS):
            multiply_four(left, right, out, row, t, row, depth)
        if remainder == 1:
            multiply_one(left, right, out, k, t, k, depth)
        elif remainder == 2:
            multiply_two(left, right, out, k, t, k, depth)
        elif remainder == 3:
            multiply_three(left, right, out, k, t, k, depth)


@loop
def subtract_half_squares(left: Any, right: Any, first: Any, out: Any) -> None:
    """Subtract from ``out[first]`` half the squared lengths of the columns of ``left[:m] @ (right - p)``.

    The column p is ``left[m]``. They are of shapes (m + 1, m), (m, T) and (K, T); T numbers fill a multiple
    of `COLUMNS` cache lines. The first m rows of ``left`` are 0 above their diagonal, and not read there.
    """
    m, step = len(right), COLUMNS * VECTOR_BYTES // right.itemsize
    remainder = m % ROWS
    k = m - remainder
    if left.shape[1] != m or len(left) != m + 1 or right.shape[1] % step:
        raise ValueError("the factors do not fit each other, or vectors do not fit them")
    if first < 0 or first >= len(out) or out.shape[1] != right.shape[1]:
        raise ValueError("the result does not fit the factors")
    for t in range(0, right.shape[1], step):
        for row in range(0, k, ROWS):
            subtract_four(left, right, out, row, t, first, row + ROWS)
        if remainder == 1:
            subtract_one(left, right, out, k, t, first, m)
        elif remainder == 2:
            subtract_two(left, right, out, k, t, first, m)
        elif remainder == 3:
            subtract_three(left, right, out, k, t, first, m)


@loop
def multiply_transposed(left: Any, right: Any, out: Any) -> None:
    """Write ``left @ right[:n].T``, of (m, T) and at least (n, T), into ``out`` (m, n).

    T numbers fill a multiple of cache lines. The last columns may overlap those before; results are equal.
    """
    (m, n), depth = out.shape, left.shape[1]
    if len(left) != m or right.shape[1] != depth or depth % (VECTOR_BYTES // right.itemsize):
        raise ValueError("factors and result do not fit each other, or vectors do not fit them")
    if n > len(right):
        raise ValueError("the second factor has too few rows")
    remainder = m % ROWS
    k = m - remainder
    for i in range(0, n if n >= COLUMNS else 0, COLUMNS):
        column = i if i + COLUMNS <= n else n - COLUMNS
        for row in range(0, k, ROWS):
            four_by_three(left, right, out, row, column, column, depth)
        if remainder == 1:
            one_by_three(left, right, out, k, column, column, depth)
        elif remainder == 2:
            two_by_three(left, right, out, k, column, column, depth)
        elif remainder == 3:
            three_by_three(left, right, out, k, column, column, depth)
    for i in range(0, n if n < COLUMNS else 0):
        for row in range(m):
            one_by_one(left, right, out, row, i, i, depth)


@loop
def scatter(weights: Any, k: Any, coordinates: Any, mean: Any, d: Any, out: Any) -> None:
    """Write ``Σ_t weights[k, t] (x_i - m_i) (x_j - m_j)`` into ``out[i, j]``, for i <= j < d.

    Without the last factor, it is written into ``out[i, d]``. Weights are (K, T), coordinates x at least
    (d + 3, T), the mean m (1, at least d + 3), and the result has at least d + 3 rows and columns; its other
    entries are undefined. T numbers fill a multiple of cache lines.
    """
    least, tile = d + COLUMNS, coordinates.shape[1]
    if k < 0 or k >= len(weights) or weights.shape[1] != tile or tile % (VECTOR_BYTES // weights.itemsize):
        raise ValueError("weights and coordinates do not fit each other, or vectors do not fit them")
    if d < 1 or min(len(coordinates), mean.shape[1], len(out), out.shape[1]) < least or len(mean) != 1:
        raise ValueError("coordinates, mean or result have too few rows or columns")
    for i in range(0, d, ROWS):
        for j in range(i + ROWS, d, COLUMNS):
            scatter_some(weights, coordinates, mean, out, k, i, j, tile)
        scatter_own(weights, coordinates, mean, out, k, i, d, tile)


@loop
def add_upper_squares(vectors: Any, depth: Any, out: Any) -> None:
    """Add ``vectors[:depth, :side].T @ vectors[:depth, :side]`` to ``out``, on and above its diagonal.

    Entries below the diagonal are left undefined. ``out`` is of shape (side, side), with a side from
    `side_of`; ``vectors`` have at least as many columns. An odd number of cache lines from one to the next
    spreads them over the nearest cache.
    """
    side, lanes = len(out), VECTOR_BYTES // vectors.itemsize
    if out.shape[1] != side or vectors.shape[1] < side or side % lanes or side % ROWS:
        raise ValueError("vectors and result do not fit each other, or the machine's vectors do not fit them")
    if depth < 0 or depth > len(vectors):
        raise ValueError("there are fewer vectors than the depth")
    step = COLUMNS * lanes
    for i in range(0, side, ROWS):
        first = i - i % lanes
        remainder = (side - first) % step
        for t in range(first, side - remainder, step):
            square_three(vectors, vectors, out, i, t, i, depth)
        if remainder == 2 * lanes:
            square_two(vectors, vectors, out, i, side - remainder, i, depth)
        elif remainder == lanes:
            square_one(vectors, vectors, out, i, side - remainder, i, depth)
