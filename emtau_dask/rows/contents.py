"""Digests of what chunks held when they were first read, by which a resume recognises the data.

Of every chunk evenly spread strips are digested, in less than a hundredth of the time of a pass. The
few chunks that `fingerprint` samples are also digested whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import CheckpointMismatchError
from emtau_dask.io.sources import ChunkRange
from emtau_dask.mixture.numerics import Floats

LINE, LINES, STRIPS = 64, 16, 32
"""Words of 8 bytes in a line, lines in a strip of 8 KiB, and of how many strips one is digested."""
STRIP_BYTES = 8 * LINE * LINES
PERIOD_BYTES = STRIPS * STRIP_BYTES
HALF_BYTES = 16
CONTENTS_BYTES = 2 * HALF_BYTES


def strips_digest(values: NDArray[Any]) -> bytes:
    """Return 16 bytes that depend on one strip in 32 of an array of any dtype and memory order.

    The array's bytes in C order are divided into periods of 256 KiB. The first 8 KiB of each period are
    16 lines of 64 little-endian words of 8 bytes; the lines are added modulo 2⁶⁴, which takes a tenth of
    the time of a hash and is the same on any machine. Returned is the beginning of the SHA-256 of these
    sums, of the first 8 KiB of the last, shorter period, and of the number of bytes.
    """
    periods = values.nbytes // PERIOD_BYTES
    if values.flags.c_contiguous:
        flat = values.reshape(-1).view(np.uint8)
        strips = flat[: periods * PERIOD_BYTES].reshape(periods, PERIOD_BYTES)[:, :STRIP_BYTES]
        rest = flat[periods * PERIOD_BYTES :][:STRIP_BYTES]
    else:
        strips = np.empty((periods, STRIP_BYTES), np.uint8)
        for period in range(periods):
            strips[period] = _bytes_at(values, period * PERIOD_BYTES)
        rest = _bytes_at(values, periods * PERIOD_BYTES)
    sums = np.add.reduce(strips.view("<u8").reshape(periods, LINES, LINE), axis=1, dtype="<u8")
    found = sha256(sums.tobytes())
    found.update(rest.tobytes())
    found.update(str(values.nbytes).encode())
    return found.digest()[:HALF_BYTES]


def _bytes_at(values: NDArray[Any], begin: int) -> NDArray[np.uint8]:
    """Return the strip at byte ``begin`` of ``values`` in C order."""
    row_bytes = max(1, values.nbytes // max(1, len(values)))
    first, end = begin // row_bytes, -(-(begin + STRIP_BYTES) // row_bytes)
    found = np.ascontiguousarray(values[first:end]).reshape(-1).view(np.uint8)
    return found[begin - first * row_bytes :][:STRIP_BYTES]


def chunk_contents(rows: NDArray[Any], weights: Floats | None) -> bytes:
    """Return the `strips_digest` of a chunk's rows, and that of its weights, or zeros."""
    return strips_digest(rows) + (bytes(HALF_BYTES) if weights is None else strips_digest(weights))


def check_contents(chunk: ChunkRange, found: bytes, known: bytes) -> None:
    """Raise `CheckpointMismatchError` where a chunk no longer holds what it held; names it."""
    if found == known:
        return
    what, half = "sample_weight", slice(HALF_BYTES, None)
    if found[:HALF_BYTES] != known[:HALF_BYTES]:
        what, half = "X", slice(HALF_BYTES)
    raise CheckpointMismatchError(
        f"{what} holds other values than in the checkpointed run: chunk {chunk.chunk} (rows {chunk.start} to "
        f"{chunk.stop}) has the digest {found[half].hex()[:12]}…, then {known[half].hex()[:12]}…. Give the "
        "same data, or begin a new run with this."
    )


class ReadContents:
    """The `chunk_contents` in ``known``, by chunk: those of earlier processes of the run, and of this one.

    A new chunk makes ``known`` another object.
    """

    def __init__(self, known: Mapping[int, bytes]) -> None:
        self.known = known
        self._looked_at: set[int] = set()

    def to_compare(self) -> dict[int, bytes]:
        """Return the known contents of chunks that this process has not compared yet, by chunk."""
        return {chunk: told for chunk, told in self.known.items() if chunk not in self._looked_at}

    def found(self, contents: Mapping[int, bytes]) -> None:
        """Take note of contents that have been compared."""
        self._looked_at |= contents.keys()
        new = {chunk: told for chunk, told in contents.items() if chunk not in self.known}
        if new:
            self.known = {**self.known, **new}
