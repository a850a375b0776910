"""A synthetic Gaussian mixture of any size, drawn block by block.

A block depends on the seed, the shape of the parameters and its number alone: neither on the chunks in
which it is stored nor on the number of all rows.
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
    """Weights (K,), means (K, d), and a factor L (d, d) of each covariance ``L @ L.T``, (K, d, d)."""

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
    """Yield rows (n, d) and the component of each, (n,), `BLOCK_ROWS` at a time.

    The same seed gives the same rows; a longer dataset begins with a shorter one.
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
