"""Random numbers that depend on seed, purpose and row number alone, not on the chunks.

They are drawn from the counter-based generator Philox (Salmon et al. 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESPONSIBILITY, PRIORITY = 1, 2
_DRAWS_PER_COUNT = 4


def row_uniforms(seed: int, purpose: int, start: int, stop: int, width: int) -> NDArray[np.float64]:
    """Return the uniform numbers of rows ``start`` to ``stop``.

    Parameters
    ----------
    seed : int
        Non-negative, below 2**64.
    purpose : int
        `RESPONSIBILITY` or `PRIORITY`; each is a stream of its own.
    start, stop : int
    width : int
        How many numbers a row has.

    Returns
    -------
    ndarray of shape (stop - start, width), float64 in [0, 1)
    """
    counts = -(-width // _DRAWS_PER_COUNT)
    generator = np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64))
    generator.advance(start * counts)
    values = np.random.Generator(generator).random((stop - start, counts * _DRAWS_PER_COUNT))
    return np.ascontiguousarray(values[:, :width])
