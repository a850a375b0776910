"""Matrix products over the rows of a block, in slices of the rows.

OpenBLAS packs the factors of a product before it multiplies them, unless the
product has at most a million multiplications; where a factor has few rows,
packing takes longer than the product. And NumPy's `matmul` keeps the
interpreter lock, and with it all other threads, while it computes a result of at
most 500 numbers, however long the factors are; a stack of results, one of each
slice, is longer.
"""

from __future__ import annotations

import numpy as np

from emtau_dask.mixture.arrays import AnyArray, Floats

__all__ = ["SUMMED_ROWS", "product", "slices_of", "summed_product"]

SMALL_PRODUCT, SHORTEST_SMALL = 10**6, 1024
"""Multiplications that are not packed for, and rows below which slices that small gain nothing."""
LOCKED_RESULT, SHORTEST_SLICE = 500, 64
"""Numbers of a result that `matmul` keeps the lock for, and rows of the shortest slices that avoid it."""
SUMMED_ROWS = 1024
"""The most rows that are summed in float32."""


def slices_of(n_rows: int, size: int, *, longest: int | None = None, results: bool = False) -> int:
    """Return the number of slices, a power of two, in which a product over ``n_rows`` rows is formed.

    Parameters
    ----------
    n_rows : int
    size : int
        Multiplications for each row.
    longest : int, optional
        The most rows of a slice.
    results : bool
        Whether each slice has a result of ``size`` numbers, to be added up.
    """
    small = SMALL_PRODUCT // size
    most = min(small if small >= SHORTEST_SMALL else n_rows, longest or n_rows)
    count = 1
    while count * most < n_rows:
        count *= 2
    while results and count * size <= LOCKED_RESULT and 2 * count * SHORTEST_SLICE <= n_rows:
        count *= 2
    return count


def _stacked(matrix: AnyArray, count: int) -> AnyArray:
    """Return (rows, columns) as (count, rows, columns // count), without the columns left over."""
    rows, columns = matrix.shape
    length = columns // count
    return matrix[:, : count * length].reshape(rows, count, length).swapaxes(0, 1)


def product(a: AnyArray, b: AnyArray, out: AnyArray) -> None:
    """Write ``a b`` of (K, F) and (F, n) into ``out`` (K, n), by slices of the n rows."""
    n = b.shape[1]
    count = slices_of(n, a.size)
    if count > 1:
        np.matmul(a, _stacked(b, count), out=_stacked(out, count))
        if rest := n % count:
            np.matmul(a, b[:, -rest:], out=out[:, -rest:])
    else:
        np.matmul(a, b, out=out)


def summed_product(a: AnyArray, b: AnyArray, out: Floats) -> None:
    """Write ``a bᵀ`` of (K, n) and (F, n) into ``out`` (K, F), float64, summed over slices of the n rows."""
    n = b.shape[1]
    longest = SUMMED_ROWS if b.dtype == np.float32 else None
    count = slices_of(n, len(a) * len(b), longest=longest, results=True)
    if count > 1:
        np.matmul(_stacked(a, count), _stacked(b, count).swapaxes(1, 2)).sum(
            axis=0, dtype=np.float64, out=out
        )
        if rest := n % count:
            out += np.matmul(a[:, -rest:], b[:, -rest:].T)
    else:
        np.matmul(a, b.T, out=out)
