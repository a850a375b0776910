"""From scores to responsibilities and log-likelihoods."""

from __future__ import annotations

import numpy as np

from emtau_dask.mixture.numerics import Floats

LEAST_EXPONENT = {dtype: float(np.log(np.finfo(dtype).tiny)) + 8.0 for dtype in map(np.dtype, ("f4", "f8"))}
"""By dtype, the exponent below which exponentials are taken for 0: theirs is 3,000 times the smallest normal
number."""
LEAST_PEAK = {dtype: max(least / 8.0, least + 75.0) for dtype, least in LEAST_EXPONENT.items()}
"""By dtype, the least score of a row's largest beside which exponentials taken for 0 do not count: they are
less than exp(-75) of it."""


def underflows(values: Floats) -> bool:
    """Return whether a value is below `LEAST_EXPONENT` or NaN."""
    return not np.minimum.reduce(values, axis=None, initial=0.0) >= LEAST_EXPONENT[values.dtype]


def exponentials(values: Floats, spare: Floats) -> None:
    """Replace ``values`` (K, n), at most 0, by their exponentials, or 0 below `LEAST_EXPONENT`.

    ``spare`` (n,) is a buffer of the same dtype.
    """
    if underflows(values):
        _raised_exponentials(values, spare)
    else:
        np.exp(values, out=values)


def _raised_exponentials(values: Floats, spare: Floats) -> None:
    """Do as `exponentials` where some underflow.

    NumPy's ``exp`` takes 6 to 50 times as long where it underflows (`benchmarks/kernels.py`), and arithmetic
    with subnormal results takes longer still. So the smallest values are raised to one value, whose
    exponential is subtracted from all. That value fills ``spare``, since NumPy takes five times as long with
    a single number as with a row.
    """
    spare.fill(LEAST_EXPONENT[values.dtype])
    np.maximum(values, spare, out=values)
    np.exp(values, out=values)
    np.exp(spare, out=spare)
    np.subtract(values, spare, out=values)


def normalise(scores: Floats, ceiling: float, peaks: Floats, sums: Floats) -> Floats:
    """Turn scores (K, n) into responsibilities, and return the log-likelihoods of the rows, (n,), float64.

    Scores are weighted log-densities less the ceiling, in nats. Their exponentials are taken relative to
    each row's largest only where the largest of some row is below `LEAST_PEAK`. ``peaks`` and ``sums`` (n,)
    are buffers of the same dtype.
    """
    far = underflows(scores)
    relative = far and not np.maximum.reduce(scores, axis=0, out=peaks).min() >= LEAST_PEAK[scores.dtype]
    if relative:
        np.subtract(scores, peaks, out=scores)
        exponentials(scores, sums)
    elif far:
        _raised_exponentials(scores, sums)
    else:
        np.exp(scores, out=scores)
    np.add.reduce(scores, axis=0, out=sums)
    np.divide(scores, sums, out=scores)
    np.log(sums, out=sums)
    log_likelihoods: Floats = np.add(sums, ceiling, dtype=np.float64)
    if relative:
        log_likelihoods += peaks
    return log_likelihoods
