"""Intervals that hold a median."""

from __future__ import annotations

from scipy.stats import binom


def interval(values: list[float]) -> tuple[float, float]:
    """Return order statistics between which the median is with a probability of at least 95%.

    Of fewer than six values no two are: then the least and the greatest.
    """
    ordered, below = sorted(values), int(binom.ppf(0.025, len(values), 0.5))
    place = max(below - 1, 0)
    return ordered[place], ordered[-1 - place]
