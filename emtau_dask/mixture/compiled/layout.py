"""How tiles lie in memory: rows in whole cache lines."""

from __future__ import annotations

from typing import Any

import numpy as np

from emtau_dask.mixture.numerics import AnyArray

LINE_BYTES, LINES_AT_ONCE = 64, 3
"""Products take so many cache lines of each feature at a time (`mixture.compiled.products`)."""
TILE_BYTES, LEAST_TILE_LINES, MOST_TILE_LINES = 2**19 + 2**16, 9, 27
"""Bytes of a tile's features (or coordinates), and cache lines of each feature: with more, sums over rows are
longer; with up to 27, the responsibilities of 16 components stay in the nearest cache."""


def rows_of_tile(n_features: int, itemsize: int) -> int:
    """Return the rows of a tile: an odd number of lines of each feature, which spreads them over a cache."""
    fitting = min(MOST_TILE_LINES, TILE_BYTES // (n_features * LINE_BYTES))
    threes = max(LEAST_TILE_LINES, fitting) // LINES_AT_ONCE
    return LINE_BYTES // itemsize * LINES_AT_ONCE * (threes - 1 + threes % 2)


def odd_lines(n_numbers: int, itemsize: int) -> int:
    """Return the least number, ``n_numbers`` or more, whose numbers fill an odd number of cache lines."""
    whole = -(-n_numbers * itemsize // LINE_BYTES)
    return LINE_BYTES // itemsize * (whole + 1 - whole % 2)


def lines(n_rows: int, tile: int, dtype: np.dtype[Any]) -> AnyArray:
    """Return ones of shape (n_rows, tile); each row begins a cache line where ``tile`` fills whole lines."""
    size, spare = n_rows * tile, LINE_BYTES // dtype.itemsize
    numbers = np.ones(size + spare, dtype)
    begin = -numbers.ctypes.data % LINE_BYTES // dtype.itemsize
    return numbers[begin : begin + size].reshape(n_rows, tile)
