"""A start with more components: components of a fitted mixture are split.

Verbeek, Vlassis and Kröse 2003, "Efficient greedy learning of Gaussian mixture models", grow a mixture like
that. Ueda et al. 2000, "SMEM algorithm for mixture models", use splits to leave a local optimum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.linalg import EPS, Bools, Floats
from emtau_dask.selection.passes import CountedRows

MAX_ROWS = 2**17
"""Maximum rows by which splits are found."""
TINY = float(np.finfo(np.float64).tiny)


class _Cut(NamedTuple):
    """The cut of a component through its mean: its gain in nats, and which rows are above it, (n,)."""

    gain: float
    above: Bools


def split_start(mixture: GaussianMixture, sample: CountedRows, n_components: int) -> dict[str, Any] | None:
    """Return starting parameters of ``n_components``, from a mixture of fewer that is fitted to the sample.

    One component after the other is cut through its mean, across one of its principal axes: always the
    component that gains most. The halves have its covariance, their rows' means, and weights in proportion.
    Rows with missing values are left out. None if the components have too few rows to be cut.
    """
    complete = np.flatnonzero(~np.isnan(sample.rows).any(axis=1))
    some = complete[:: max(1, -(-len(complete) // MAX_ROWS))]
    rows = sample.rows[some]
    counts = np.ones(len(rows)) if sample.counts is None else sample.counts[some]
    of_rows = list((mixture.predict_proba(rows) * counts[:, np.newaxis]).T)
    cuts = [_best_cut(rows, weights) for weights in of_rows]
    weights, means, origins = list(mixture.weights_), list(mixture.means_), list(range(len(of_rows)))
    while len(cuts) < n_components:
        k = max(range(len(cuts)), key=lambda number: cuts[number].gain)
        if cuts[k].gain == -math.inf:
            return None
        halves = [of_rows[k] * cuts[k].above, of_rows[k] * ~cuts[k].above]
        shares = [float(half.sum()) / float(of_rows[k].sum()) for half in halves]
        here = slice(k, k + 1)
        weights[here] = [weights[k] * share for share in shares]
        means[here] = [half @ rows / half.sum() for half in halves]
        origins[here] = [origins[k]] * 2
        of_rows[here] = halves
        cuts[here] = [_best_cut(rows, half) for half in halves]
    precisions = mixture.precisions_
    if not structure_named(mixture.covariance_type).shared:
        precisions = precisions[origins]
    return {
        "weights_init": np.array(weights) / math.fsum(weights),
        "means_init": np.array(means),
        "precisions_init": precisions,
    }


def _best_cut(rows: Floats, weights: Floats) -> _Cut:
    """Return the best cut of the component whose ``weights`` (n,) of the rows are given.

    Two normal densities replace one along an axis: smaller variances gain, and shares below 1 cost. With
    fewer than d + 1 rows in a half the gain is −inf.
    """
    total = weights.sum()
    centred = rows - weights @ rows / max(total, TINY)
    _, axes = np.linalg.eigh((centred * weights[:, np.newaxis]).T @ centred)
    along = centred @ axes
    gains, sides = np.zeros(along.shape[1]), (along > 0, along <= 0)
    for side in sides:
        rows_there = np.maximum(weights @ side, TINY)
        means = weights @ (along * side) / rows_there
        variances = weights @ (side * (along - means) ** 2) / rows_there
        ratios = np.maximum(variances / np.maximum(weights @ along**2 / max(total, TINY), TINY), EPS)
        gains += rows_there * (np.log(rows_there / max(total, TINY)) - 0.5 * np.log(ratios))
        gains[rows_there < along.shape[1] + 1] = -np.inf
    best = int(gains.argmax())
    return _Cut(float(gains[best]), sides[0][:, best])
