"""A quantile of any number of scores, in bounded memory."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError
from emtau_dask.execution import compute_collections

MOST_KEPT = 2**23
"""Scores that are kept, 64 MiB of them; more are counted."""
BITS = 16
"""Of a score's 64 bits, those that one pass tells apart; its counts take 512 KiB."""
FAN_IN = 8
SIGN = np.uint64(2**63)


def score_quantile(scores: Any, share: float) -> float:
    """Return a quantile of scores.

    Lazy scores are computed once where there are at most 8,388,608: then it is ``numpy.quantile(scores,
    share)``. Where there are more, or it is not known how many, they are computed twice, and counted by their
    leading 32 bits. Then it is the order statistic of rank ``floor((n - 1) share)``, counted from 0, rounded
    down by less than a millionth of its size: rows below it are at most this share. Counts add up, so that
    the bits do not depend on threads and chunks.

    Parameters
    ----------
    scores : ndarray or dask array of shape (n,), float64
        Without NaN.
    share : float
        From 0 to 1.

    Raises
    ------
    InvalidDataError
        There are no scores.
    """
    if not isinstance(scores, da.Array):
        kept = np.asarray(scores)
    elif scores.shape[0] <= MOST_KEPT:
        (kept,) = compute_collections("the quantile of the scores", scores)
    else:
        return _counted_quantile(scores, share)
    _check_any(len(kept))
    return float(np.quantile(kept, share))


def _counted_quantile(scores: da.Array, share: float) -> float:
    """Find the leading bits of an order statistic by counting, `BITS` of them in each of two passes."""
    rank, beginning = 0, np.uint64(0)
    for known in (0, BITS):
        counts = _counts(scores, beginning, known)
        if not known:
            _check_any(int(counts.sum()))
            rank = int((int(counts.sum()) - 1) * share)
        found = int(np.searchsorted(np.cumsum(counts), rank, side="right"))
        rank -= int(counts[:found].sum())
        beginning = (beginning << np.uint64(BITS)) | np.uint64(found)
    key = beginning << np.uint64(64 - 2 * BITS)
    return float(np.where(key & SIGN, key ^ SIGN, ~key).view(np.float64))


def _counts(scores: da.Array, beginning: np.uint64, known: int) -> NDArray[np.int64]:
    """Count the scores that begin with ``known`` bits by the next `BITS`; shape (2^`BITS`,)."""
    shape = ((1,) * scores.numblocks[0], (2**BITS,))
    each = scores.map_blocks(_count, beginning, known, dtype=np.int64, new_axis=1, chunks=shape)
    (counts,) = compute_collections("the quantile of the scores", each.sum(axis=0, split_every=FAN_IN))
    return np.asarray(counts)


def _count(scores: NDArray[np.float64], beginning: np.uint64, known: int) -> NDArray[np.int64]:
    keys = _keys(scores)
    if known:
        keys = keys[keys >> np.uint64(64 - known) == beginning]
    bits = (keys >> np.uint64(64 - known - BITS)) & np.uint64(2**BITS - 1)
    return np.bincount(bits.astype(np.intp), minlength=2**BITS)[None]


def _keys(scores: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return integers in the order of the scores; 0.0 and -0.0 have one."""
    bits = (np.asarray(scores, dtype=np.float64) + 0.0).view(np.uint64)
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _check_any(n: int) -> None:
    if n == 0:
        raise InvalidDataError("X has no rows; give at least one.")
