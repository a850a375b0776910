"""The data of `benchmarks/passes.py`: rows, how many components are fitted, and where EM's fits begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters, free_parameters, m_step
from emtau_dask.mixture.statistics import block_statistics

START_ROWS = 20_000
LEAST_ROWS = 200
"""Fewest rows for each component that are drawn, whatever the scale."""


SINGULAR_START = 0.01
"""What is added to the variances of a singular start, in units of the features' mean variance."""


@dataclass(frozen=True, eq=False)
class Data:
    name: str
    note: str
    rows: np.ndarray
    components: int

    @property
    def free_parameters(self) -> int:
        return free_parameters(structure_named("full"), self.components, self.rows.shape[1])

    @property
    def sampling_gap(self) -> float:
        """p/2N: what sampling error costs in likelihood, nats per row."""
        return self.free_parameters / (2 * len(self.rows))

    def __str__(self) -> str:
        rows, features = self.rows.shape
        return f"{self.name}: {self.note}, {rows:,} × {features}, K {self.components}"


@dataclass(frozen=True)
class Mixture:
    """Normal components, or of Student's t, whose rows come in the order of the components.

    ``apart`` are the standard deviations of the means; a component's factor is ``noise`` times a random
    matrix plus ``alone`` times the identity. Fitted are ``times`` as many components as there are.
    """

    rows: int
    features: int
    components: int
    apart: float
    noise: float
    alone: float
    times: int = 1
    geometric: bool = False
    freedom: int | None = None
    shuffled: bool = False

    def drawn(self, scale: int) -> np.ndarray:
        K, d = self.components, self.features
        rows = max(self.rows // scale, min(self.rows, LEAST_ROWS * K * self.times))
        rng = np.random.default_rng(7)
        means = rng.normal(size=(K, d)) * self.apart
        if self.geometric:
            shares = 0.5 ** np.arange(K)
            labels = rng.choice(K, size=rows, p=shares / shares.sum())
        else:
            labels = rng.integers(0, K, rows)
        parts = []
        for mean, count in zip(means, np.bincount(labels, minlength=K), strict=True):
            factor = rng.normal(size=(d, d)) * self.noise / np.sqrt(d) + self.alone * np.eye(d)
            normal = rng.normal(size=(count, d)) @ factor
            if self.freedom is not None:
                normal *= np.sqrt(self.freedom / rng.chisquare(self.freedom, size=(count, 1)))
            parts.append(mean + normal)
        whole = np.concatenate(parts)
        if self.shuffled:
            whole = whole[np.random.default_rng(1).permutation(rows)]
        return whole / whole.std(axis=0) if self.apart >= 2 else whole


MIXTURES = {
    "A": ("clusters 2 apart", Mixture(300_000, 4, 8, 2.0, 1.0, 0.5, shuffled=True)),
    "B": ("1.2 apart, rows sorted", Mixture(400_000, 16, 16, 1.2, 0.3, 1.0)),
    "B'": ("as B, more rows", Mixture(2_000_000, 16, 16, 1.2, 0.3, 1.0)),
    "C": ("0.9 apart, overlapping, rows sorted", Mixture(4_000_000, 4, 8, 0.9, 0.3, 1.0)),
    "tails": ("Student's t, 3 degrees of freedom", Mixture(300_000, 4, 6, 2.0, 1.0, 0.5, freedom=3)),
    "K": ("twice as many components as clusters", Mixture(200_000, 4, 5, 2.0, 1.0, 0.5, times=2)),
    "weights": ("weights 1/2 to 1/512", Mixture(500_000, 6, 9, 2.0, 1.0, 0.5, geometric=True, shuffled=True)),
    "sorted": ("A, rows sorted", Mixture(300_000, 4, 8, 2.0, 1.0, 0.5)),
}


def _mixture(name: str, scale: int) -> Data:
    note, mixture = MIXTURES[name]
    return Data(name, note, mixture.drawn(scale), mixture.components * mixture.times)


def _digits(scale: int) -> Data:
    """scikit-learn's small images, by 20 principal components; they are few already."""
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA

    scores = PCA(20, svd_solver="full").fit_transform(load_digits().data)
    return Data("digits", "scikit-learn's digits", np.ascontiguousarray(scores / scores.std()), 5)


DATA: dict[str, Callable[[int], Data]] = {
    **{name: partial(_mixture, name) for name in MIXTURES},
    "digits": _digits,
}
NAMES = ["A", "B", "B'", "C", "D", "digits", "tails", "K", "weights", "sorted"]


def made(name: str, scale: int, mnist: Path | None) -> Data | None:
    """Return the rows; None for MNIST without its file."""
    if name != "D":
        return DATA[name](scale)
    if mnist is None:
        return None
    from emtau_dask.datasets import mnist_components

    rows, _ = mnist_components(str(mnist))
    return Data("D", "MNIST, digits 1, 2, 4, 5, 6", np.ascontiguousarray(rows[::scale]), 5)


def start(data: Data, seed: int, reg_covar: float) -> MixtureParameters:
    """Return the M-step of scikit-learn's k-means of 20,000 rows, regularised where it is singular."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(data.rows), min(START_ROWS, len(data.rows)), replace=False)
    rows = data.rows[np.sort(chosen)]
    labels = KMeans(data.components, n_init=1, random_state=seed).fit(rows).labels_
    responsibilities = (np.arange(data.components)[:, np.newaxis] == labels).astype(float)
    structure = structure_named("full")
    found = block_statistics(structure, rows, responsibilities)
    try:
        return m_step(found, structure, reg_covar)
    except SingularComponentError:
        return m_step(found, structure, SINGULAR_START * float(rows.var(axis=0).mean()))
