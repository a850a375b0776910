"""The contours of the paper's Example 1: the mean log-likelihood over the two means, at the end of each fit.

1000 points of 0.3 N(-2, 1) + 0.7 N(2, 1). Each contour has weights and variances of one fit (first: the true
ones), and shows the log-likelihood of the points, nats per row, for any two means; a cross marks the means of
the fit. Below, the components of EM and of EM-Tau over the data.

python examples/example1.py                # writes example1.png
python examples/example1.py contours.svg
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import norm

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.datasets import make_dataset
from emtau_dask.em.history import SilentObserver
from emtau_dask.plot import ComponentsDisplay

WEIGHTS, MEANS, DEVIATIONS = np.array([0.3, 0.7]), np.array([-2.0, 2.0]), np.array([1.0, 1.0])
TAUS = (10, 20, 30, 40, 50, 60)
GRID = np.linspace(-5, 5, 81)
COLOURS = colormaps["viridis"](np.linspace(0.85, 0.05, 14))


def points(folder: Path) -> np.ndarray:
    """Return the rows that `emtau dataset example1` writes, (1000, 1)."""
    import zarr

    path = folder / "example1.zarr"
    make_dataset("example1", path, observer=SilentObserver())
    return np.asarray(zarr.open_group(path, mode="r")["X"])


def surface(x: np.ndarray, weights: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """Return the mean log-likelihood of x for the first mean along columns, the second along rows."""
    first, second = (
        np.log(weight) + norm.logpdf(x, GRID[:, np.newaxis], deviation)
        for weight, deviation in zip(weights, deviations, strict=True)
    )
    joint = np.stack(np.broadcast_arrays(first[np.newaxis], second[:, np.newaxis]))
    return logsumexp(joint, axis=0).mean(axis=-1)


def contours(ax, x, title, weights, means, deviations) -> None:
    heights = surface(x, weights, deviations)
    levels = heights.max() - np.geomspace(0.01, heights.max() - heights.min(), 14)[::-1]
    ax.contour(GRID, GRID, heights, levels=levels, colors=COLOURS, linewidths=0.9)
    ax.plot(*means, marker="+", markersize=11, markeredgewidth=2, color="#D55E00")
    ax.set_title(title, fontsize=10)
    ax.set_aspect("equal")
    ax.set_xticks((-4, -2, 0, 2, 4))
    ax.set_yticks((-4, -2, 0, 2, 4))
    ax.tick_params(labelsize=8)


def main(out: str = "example1.png") -> None:
    with tempfile.TemporaryDirectory() as folder:
        X = points(Path(folder))
    start = np.random.default_rng(0).dirichlet(np.ones(2), len(X))  # that of configs/example1.yaml
    algorithms = {"traditional EM": "em"} | {f"EM-Tau, τ = {tau}": EMTau(tau, revisit=None) for tau in TAUS}
    fits = {
        name: GaussianMixture(2, algorithm=algorithm, tol=1e-10, reg_covar=0.0, max_iter=2000).fit(
            X, responsibilities_init=start
        )
        for name, algorithm in algorithms.items()
    }
    figure = Figure(figsize=(11, 8.6), layout="constrained")
    grid = figure.add_gridspec(3, 4, height_ratios=(1, 1, 1.05))
    panels = [figure.add_subplot(grid[i // 4, i % 4]) for i in range(8)]
    contours(panels[0], X[:, 0], "true parameters", WEIGHTS, MEANS, DEVIATIONS)
    for ax, (name, fit) in zip(panels[1:], fits.items(), strict=True):
        order = np.argsort(fit.means_[:, 0])
        deviations = np.sqrt(fit.covariances_[order, 0, 0])
        title = f"{name}\n{fit.n_iter_} iterations, {fit.history_.work:.1f} passes"
        contours(ax, X[:, 0], title, fit.weights_[order], fit.means_[order, 0], deviations)
    for i, name in enumerate(("traditional EM", "EM-Tau, τ = 10")):
        ax = figure.add_subplot(grid[2, 2 * i : 2 * i + 2])
        ComponentsDisplay.from_estimator(fits[name], X, ax=ax)
        ax.set_title(f"Components of {name}\n", loc="left", fontsize=9.5, fontweight="bold")
    for ax in panels[4:]:
        ax.set_xlabel("mean of the first component", fontsize=8)
    for ax in panels[::4]:
        ax.set_ylabel("mean of the second", fontsize=8)
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
