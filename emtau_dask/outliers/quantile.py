"""A quantile of any number of values, exact, in bounded memory.

Two neighbouring order statistics are selected by leading bits (radix selection): a pass counts how many
values there are of each beginning, and the next one looks only at those that begin as the ones that are
sought. Counts add up, so that the result has the same bits under any chunking and any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from numpy.typing import NDArray

from emtau_dask.cluster import active_client, missing_workers_reported
from emtau_dask.errors import InvalidDataError
from emtau_dask.execution import compute_collections

Keys = NDArray[np.uint64]

MOST_KEPT = 2**20
"""Values that are kept as they are, 8 MiB of them; more are counted by their leading bits."""
SHIFTS = (40, 16, 0)
"""How many trailing bits of 64 are left out in the first, second and third pass that counts. The first leaves
the sign, the exponent and 12 bits: bins of 1/4096 of a power of 2."""
FAN_IN = 8
SIGN = np.uint64(2**63)


class _Window(NamedTuple):
    """The keys that a pass looks at, and how many of their trailing bits it leaves out where it counts."""

    low: int
    high: int
    shift: int


@dataclass(frozen=True, eq=False)
class _Summary:
    """How many keys of a window there are of each beginning; of few keys, the keys themselves."""

    bins: Keys  # ascending
    counts: NDArray[np.int64]
    shift: int  # 0: the bins are keys


def exact_quantile(values: Any, share: float) -> float:
    """Return ``numpy.quantile(values, share)``, by NumPy's default method "linear".

    Parameters
    ----------
    values : ndarray or lazy dask array of shape (n,), float64
        Without NaN. Lazy values are computed: once where there are at most 1,048,576, else twice; three or
        four times where more than these lie within 1/4096 of a power of 2 around the quantile.
    share : float
        From 0 to 1.

    Raises
    ------
    InvalidDataError
        There are no values.
    """
    shifts = iter(SHIFTS)
    window = _Window(0, 2**64 - 1, next(shifts))
    found = _summary(values, window)
    n = int(found.counts.sum())
    if n == 0:
        raise InvalidDataError("X has no rows; give at least one.")
    place = (n - 1) * share
    ranks = np.minimum([int(place), int(place) + 1], n - 1)
    while True:
        ends = np.cumsum(found.counts)
        low, high = np.searchsorted(ends, ranks, side="right")
        if found.shift == 0:
            neighbours = _values_of(found.bins[[low, high]])
            return float(np.quantile(neighbours, place - int(place)))
        ranks -= ends[low] - found.counts[low]
        first, last = int(found.bins[low]), int(found.bins[high])
        window = _Window(first << found.shift, ((last + 1) << found.shift) - 1, next(shifts))
        found = _summary(values, window)


def _summary(values: Any, window: _Window) -> _Summary:
    """Return the summary of the keys of all values in a window, from one pass."""
    if not isinstance(values, da.Array):
        return _summarised(np.asarray(values), window)
    parts = [dask.delayed(_summarised, pure=False)(block, window) for block in values.to_delayed().ravel()]
    while len(parts) > 1:
        groups = [parts[begin : begin + FAN_IN] for begin in range(0, len(parts), FAN_IN)]
        parts = [dask.delayed(_merged, pure=False)(group, window) for group in groups]
    with missing_workers_reported(active_client(), "the quantile of the scores"):
        (found,) = compute_collections(*parts)
    summary: _Summary = found
    return summary


def _summarised(values: NDArray[np.float64], window: _Window) -> _Summary:
    keys = _keys_of(values)
    inside = keys[(keys >= np.uint64(window.low)) & (keys <= np.uint64(window.high))]
    return _bounded(*np.unique(inside, return_counts=True), 0, window)


def _merged(parts: Sequence[_Summary], window: _Window) -> _Summary:
    """Return the summary of several parts together: of keys where all have them, else of beginnings."""
    shift = max(part.shift for part in parts)
    bins, places = np.unique(
        np.concatenate([part.bins >> np.uint64(shift - part.shift) for part in parts]), return_inverse=True
    )
    counts = np.zeros(len(bins), dtype=np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    return _bounded(bins, counts, shift, window)


def _bounded(bins: Keys, counts: NDArray[np.int64], shift: int, window: _Window) -> _Summary:
    """Return the summary by keys where they are few, else by beginnings."""
    if shift == 0 and window.shift > 0 and len(bins) > MOST_KEPT:
        return _merged([_Summary(bins >> np.uint64(window.shift), counts, window.shift)], window)
    return _Summary(bins, counts, shift)


def _keys_of(values: NDArray[np.float64]) -> Keys:
    """Return integers in the order of the values; 0.0 and -0.0 have one."""
    bits = (np.asarray(values, dtype=np.float64) + 0.0).view(np.uint64)
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _values_of(keys: Keys) -> NDArray[np.float64]:
    return np.where(keys & SIGN, keys ^ SIGN, ~keys).view(np.float64)
