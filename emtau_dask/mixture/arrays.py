"""Array aliases and the operations that every frozen record needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]

EPS = float(np.finfo(np.float64).eps)


def frozen(array: AnyArray | list[float]) -> Floats:
    """Return a read-only float64 C-ordered copy of ``array``."""
    values = np.array(array, dtype=np.float64, order="C")
    values.setflags(write=False)
    return values


def sealed(array: Floats) -> Floats:
    """Return ``array`` itself, read-only from now on: for one that nobody else holds."""
    array.setflags(write=False)
    return array


def symmetric(matrices: Floats) -> Floats:
    """Return ``matrices`` with the last two axes made exactly symmetric."""
    return 0.5 * (matrices + np.swapaxes(matrices, -1, -2))
