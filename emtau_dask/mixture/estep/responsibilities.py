"""From scores to responsibilities and log-likelihoods."""

from __future__ import annotations

import numpy as np

from emtau_dask.mixture.numerics import Floats

LEAST_EXPONENT = {dtype: float(np.log(np.finfo(dtype).tiny)) + 8.0 for dtype in map(np.dtype, ("f4", "f8"))}
"""Below it exponentials are taken for 0, by dtype: 3,000 times the smallest normal number."""


def underflows(values: Floats) -> bool:
    """Return whether a value is so small that its exponential is next to the smallest numbers, or NaN."""
    return not np.minimum.reduce(values, axis=None, initial=0.0) >= LEAST_EXPONENT[values.dtype]


def exponentials(values: Floats, spare: Floats) -> None:
    """Replace ``values``, at most 0, by their exponentials; next to the smallest numbers that is 0.

    NumPy's takes 6 to 50 times as long where it underflows (`benchmarks/kernels.py`), and what is
    computed with the subnormal numbers that may come of it takes longer still. So the smallest are
    raised to one value, whose exponential is taken off all.

    Parameters
    ----------
    values : ndarray of shape (K, n)
    spare : ndarray of shape (n,)
        A buffer of the same dtype. (With a single number NumPy takes five times as long as with a row.)
    """
    if not underflows(values):
        np.exp(values, out=values)
        return
    spare.fill(LEAST_EXPONENT[values.dtype])
    np.maximum(values, spare, out=values)
    np.exp(values, out=values)
    np.exp(spare, out=spare)
    np.subtract(values, spare, out=values)


def normalise(scores: Floats, ceiling: float, peaks: Floats, sums: Floats) -> Floats:
    """Make scores responsibilities, and return the log-likelihoods of the rows.

    Where all scores are near enough to the ceiling for their exponentials, these are taken as they
    are; else relative to each row's largest.

    Parameters
    ----------
    scores : ndarray of shape (K, n), nats
        Weighted log-densities, less the ceiling.
    ceiling : float, nats
    peaks, sums : ndarray of shape (n,)
        Buffers of the same dtype.

    Returns
    -------
    ndarray of shape (n,), float64, nats
    """
    far = underflows(scores)
    if far:
        np.maximum.reduce(scores, axis=0, out=peaks)
        np.subtract(scores, peaks, out=scores)
        exponentials(scores, sums)
    else:
        np.exp(scores, out=scores)
    np.add.reduce(scores, axis=0, out=sums)
    np.divide(scores, sums, out=scores)
    np.log(sums, out=sums)
    log_likelihoods: Floats = np.add(sums, ceiling, dtype=np.float64)
    if far:
        log_likelihoods += peaks
    return log_likelihoods
