"""The digest by which values are known again: XXH3 (128 bits) of their dtype, shape and bytes in C order.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

DIGEST_BYTES = 16
STEP_BYTES = 2**16
"""Taken at a time: for more, xxhash lets go of the interpreter's lock, and has to wait for it again."""
COPIED_BYTES = 2**20
"""Of values in another memory order, which are copied piece by piece."""


class GrowingDigest:
    """The digest of an array, fed with its rows from the first on while they are in the cache for other work.

    Parameters
    ----------
    values : ndarray
        Of any dtype and memory order.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        self._values, self._fed = values, 0
        self._hash = xxh3_128(f"{values.dtype.str} {values.shape}".encode())

    def feed(self, begin: int, rows: NDArray[Any]) -> None:
        """Take the rows from number ``begin`` on, of the array's dtype, where they are the next ones."""
        if begin == self._fed:
            self._take(np.ascontiguousarray(rows))
            self._fed += len(rows)

    def digest(self) -> bytes:
        """Return the 16 bytes of all values, those included that it was not fed with."""
        values, fed = self._values, self._fed
        if values.flags.c_contiguous and fed < len(values):
            self._take(values[fed:])
        elif fed < len(values):
            step = max(1, COPIED_BYTES * len(values) // max(1, values.nbytes))
            for begin in range(fed, len(values), step):
                self._take(np.ascontiguousarray(values[begin : begin + step]))
        self._fed = len(values)
        return self._hash.digest()

    def _take(self, rows: NDArray[Any]) -> None:
        if rows.nbytes <= STEP_BYTES:
            self._hash.update(rows.data)
            return
        data, update = rows.reshape(-1).view(np.uint8).data, self._hash.update
        for begin in range(0, len(data), STEP_BYTES):
            update(data[begin : begin + STEP_BYTES])


def values_digest(values: NDArray[Any]) -> bytes:
    """Return the 16 bytes of the digest of an array of any dtype and memory order."""
    return GrowingDigest(values).digest()
