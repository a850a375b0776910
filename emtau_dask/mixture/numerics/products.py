"""Matrix products over the rows of a block, in slices of the rows.

Two costs are avoided. OpenBLAS packs the factors of a product before it multiplies them; where
a factor has few rows, packing takes longer than the product. It does not pack where the product has at most a
million multiplications and, if the second factor is transposed, at most about a thousand results. And NumPy's
`matmul` keeps the interpreter lock, so that all other threads wait, while it computes a result of at most 500
numbers, however long the factors are. A stack of results, one for each slice, has more numbers. `dot` never
keeps the lock, but copies factors that are not contiguous.

Making the views of the slices keeps the lock as well. Such a product is therefore returned as steps, calls of
NumPy whose arguments exist already, which every block of rows in the same buffers can `perform` again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from emtau_dask.mixture.numerics.arrays import AnyArray, Floats, Step

UNPACKED, UNPACKED_RESULT = 10**6, 1000
"""Most multiplications, and most results with a transposed factor, for which OpenBLAS does not pack."""
LOCKED_RESULT = 500
"""Most results for which `matmul` keeps the lock."""
SHORTEST, NARROWEST = 128, 24
"""Rows of the shortest slices, and columns of the narrowest parts of a sum's result."""
SUMMED_ROWS = 1024
"""The most rows that are summed in float32."""


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
