"""Array aliases and the operations that every frozen record needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
