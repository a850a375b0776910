"""Data, explicit starting parameters and chunkings for the oracle tests; every draw is from a named seed."""

import dask.array as da
import numpy as np

from oracles.linear import inverse

SCIKIT_LEARN_TYPES = ("full", "tied", "diag", "spherical")
COVARIANCE_TYPES = (*SCIKIT_LEARN_TYPES, "tied_diag", "tied_spherical")
CHUNKINGS = ("one-chunk", "one-row-each", "zero-row-chunks", "ragged", "features-split")


def spd(rng, d, spread=0.4):
    """A random symmetric positive definite matrix near the identity."""
    a = rng.normal(size=(d, d)) * spread
    return a @ a.T + np.eye(d) * rng.uniform(0.6, 1.2)


def mixture(n, k, d, *, separation, seed):
    """n rows of k Gaussians of unequal shares, their means `separation` from the origin: X, labels."""
    rng = np.random.default_rng(seed)
    shares = np.linspace(1.0, 2.0, k)
    labels = rng.choice(k, size=n, p=shares / shares.sum())
    directions = rng.normal(size=(k, d))
    means = separation * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    roots = np.stack([np.linalg.cholesky(spd(rng, d)) for _ in range(k)])
    X = means[labels] + np.einsum("nij,nj->ni", roots[labels], rng.normal(size=(n, d)))
    return X, labels


def data(name):
    """The named data sets of the oracle tests: X, K."""
    make = {
        "overlapping": lambda: (mixture(360, 3, 3, separation=1.6, seed=7)[0], 3),
        "separated": lambda: (mixture(300, 4, 2, separation=6.0, seed=11)[0], 4),
        "small": lambda: (mixture(40, 2, 2, separation=1.8, seed=3)[0], 2),
        "tall": lambda: (mixture(9000, 3, 3, separation=3.0, seed=5)[0], 3),
        "wide": lambda: (mixture(700, 2, 45, separation=4.0, seed=13)[0], 2),
        "one-feature": lambda: (mixture(400, 2, 1, separation=1.5, seed=17)[0], 2),
        "far-out": lambda: (mixture(300, 3, 2, separation=9.5, seed=23)[0], 3),
        "one-component": lambda: (mixture(200, 1, 3, separation=2.0, seed=19)[0], 1),
    }
    return make[name]()


def start(X, k, covariance_type, *, seed=0):
    """weights_init, means_init and precisions_init in scikit-learn's shapes: uneven and well conditioned."""
    rng = np.random.default_rng([seed, k])
    d = X.shape[1]
    weights = rng.uniform(1, 2, size=k)
    means = X[rng.choice(len(X), size=k, replace=False)] + rng.normal(size=(k, d)) * 0.1 * X.std(axis=0)
    scale = np.mean(X.var(axis=0)) or 1.0
    precisions = np.array([inverse(spd(rng, d, spread=0.4 / np.sqrt(d)) * scale) for _ in range(k)])
    shapes = {
        "full": lambda: precisions,
        "tied": lambda: precisions[0],
        "diag": lambda: np.array([np.diag(matrix) for matrix in precisions]),
        "spherical": lambda: np.array([np.trace(matrix) / d for matrix in precisions]),
        "tied_diag": lambda: np.diag(precisions[0]).copy(),
        "tied_spherical": lambda: np.asarray(np.trace(precisions[0]) / d),
    }
    return {
        "weights_init": weights / weights.sum(),
        "means_init": means,
        "precisions_init": shapes[covariance_type](),
    }


def disturbed(given, *, seed, size=1e-12):
    """The start with every number moved by up to `size` of itself (symmetric matrices stay symmetric)."""
    rng = np.random.default_rng([seed, 99])
    if not isinstance(given, dict):  # responsibilities
        return given * (1 + rng.uniform(-size, size, size=given.shape))
    moved = {}
    for name, array in given.items():
        noise = rng.uniform(-size, size, size=array.shape)
        if name == "precisions_init" and array.ndim >= 2 and array.shape[-1] == array.shape[-2]:
            noise = (noise + np.swapaxes(noise, -1, -2)) / 2
        moved[name] = array * (1 + noise)
    return moved


def row_chunks(n, name):
    """Row counts of the chunks of a named chunking."""
    half, third = n // 2, n // 3
    return {
        "one-chunk": (n,),
        "one-row-each": (1,) * n,
        "zero-row-chunks": (0, third, 0, 0, n - third, 0),
        "ragged": (1, half, 2, n - half - 3 - 5, 5),
        "features-split": (third, third, n - 2 * third),
    }[name]


def chunked(X, name):
    """X as a dask array under a named chunking."""
    n, d = X.shape
    columns = (1, d - 1) if name == "features-split" and d > 1 else (d,)
    return da.from_array(X, chunks=(row_chunks(n, name), columns))
