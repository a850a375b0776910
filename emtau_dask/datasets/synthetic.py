"""A synthetic Gaussian mixture of any size, drawn block by block.

The content of a block depends only on the seed, the parameters' shape and the
block's number: neither on the chunks it is stored in nor on the rows after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK_ROWS = 32_768
_PARAMETERS, _ROWS = 0, 1


@dataclass(frozen=True)
class MixtureTruth:
    """Parameters that rows are drawn from.

    Attributes
    ----------
    weights : ndarray of shape (K,)
        Positive, summing to 1.
    means : ndarray of shape (K, d)
    factors : ndarray of shape (K, d, d)
        A factor L of each covariance, ``L @ L.T``.
    """

    weights: Floats
    means: Floats
    factors: Floats

    @property
    def covariances(self) -> Floats:
        """Covariances, shape (K, d, d)."""
        return self.factors @ self.factors.transpose(0, 2, 1)


def mixture_parameters(components: int, features: int, seed: int) -> MixtureTruth:
    """Draw the parameters of a mixture whose neighbouring components overlap a little.

    Standard deviations along the principal axes are between 0.5 and 1.5; two means are
    about 5.7 apart, whatever the number of features. The same seed gives the same parameters.
    """
    rng = _generator(seed, _PARAMETERS, 0)
    weights = rng.dirichlet(np.full(components, 10.0))
    means = 4.0 / np.sqrt(features) * rng.standard_normal((components, features))
    rotations, _ = np.linalg.qr(rng.standard_normal((components, features, features)))
    scales = rng.uniform(0.5, 1.5, size=(components, 1, features))
    return MixtureTruth(weights, means, rotations * scales)


def mixture_blocks(truth: MixtureTruth, rows: int, seed: int) -> Iterator[tuple[Floats, NDArray[np.int32]]]:
    """Yield rows and the component each was drawn from, `BLOCK_ROWS` at a time.

    The same seed gives the same rows; a longer dataset begins with a shorter one.

    Yields
    ------
    rows : ndarray of shape (n, d)
    labels : ndarray of shape (n,)
    """
    edges = np.cumsum(truth.weights)[:-1]
    for block in range(-(-rows // BLOCK_ROWS)):
        rng = _generator(seed, _ROWS, block)
        labels = np.searchsorted(edges, rng.random(BLOCK_ROWS), side="right").astype(np.int32)
        values = rng.standard_normal((BLOCK_ROWS, truth.means.shape[1]))
        for k, (mean, factor) in enumerate(zip(truth.means, truth.factors, strict=True)):
            members = labels == k
            values[members] = values[members] @ factor.T + mean
        keep = min(BLOCK_ROWS, rows - block * BLOCK_ROWS)
        yield values[:keep], labels[:keep]


def _generator(seed: int, purpose: int, block: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, block)))
