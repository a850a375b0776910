"""Draws the pictures of the documentation, most of them by the Displays of the package.

Run it after a change of `emtau_dask/plot`; it takes a minute and writes `docs/pictures/*.png`:

    python docs/draw_pictures.py
"""

from __future__ import annotations

import runpy
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.array as da
import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, GaussianMixture, open_run
from emtau_dask.datasets import make_dataset
from emtau_dask.em.history import SilentObserver
from emtau_dask.plot import (
    ComponentsDisplay,
    ConvergenceDisplay,
    PairsDisplay,
    SelectionDisplay,
    UncertaintyDisplay,
)

FOLDER = Path(__file__).parent / "pictures"
EXAMPLE = Path(__file__).parents[1] / "examples" / "example1.py"
COLOURS = 255


def shrink(path: Path) -> None:
    """Write a PNG again with few colours, which makes it several times smaller."""
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def save(display: Any, name: str) -> None:
    """Write the picture of a display."""
    display.figure_.savefig(FOLDER / f"{name}.png", dpi=84)
    shrink(FOLDER / f"{name}.png")


def selection(path: Path) -> SimpleNamespace:
    """Return mixtures of several sizes and types, fitted one after another, as a selection's table."""
    table = []
    for covariance_type in ("full", "diag", "spherical"):
        for k in range(1, 9):
            gm = GaussianMixture(k, covariance_type=covariance_type, random_state=0).fit(str(path))
            bic = gm.bic(str(path))
            table.append(SimpleNamespace(n_components=k, covariance_type=covariance_type, bic=bic))
    return SimpleNamespace(table_=table)


def drifting_rows() -> da.Array:
    """Return rows in 40 chunks, in which the shares of five components change from chunk to chunk."""
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [4, 0], [4, 4], [0, 4], [2, 2]])
    shares = np.exp(-2 * (np.linspace(0, 4, 40)[:, None] - np.arange(5)) ** 2)
    drawn = [rng.choice(5, size=5000, p=share / share.sum()) for share in shares]
    rows = centres[np.concatenate(drawn)] + rng.normal(size=(200_000, 2))
    return da.from_array(rows, chunks=(5000, 2))


def active_shares(run: str) -> NDArray[np.float64]:
    """Return the share of active rows after each iteration of EM-Tau, by chunk: iterations x chunks."""
    X, found = drifting_rows(), []
    start = {"init_params": "random_from_data", "random_state": 1, "tol": 0}
    algorithm = EMTau(tau=10, revisit=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        GaussianMixture(5, algorithm=algorithm, max_iter=1, checkpoint=run, **start).fit(X)
        while (opened := open_run(run)).stop_reason == "max-iter":
            found.append(opened.active.reshape(40, 5000).mean(axis=1).compute())
            GaussianMixture.resume(run, X, max_iter=opened.iteration + 1)
    return np.array(found)


def settling(shares: NDArray[np.float64]) -> SimpleNamespace:
    """Draw the shares of active rows by chunk and iteration."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="white", under="white")
    drawn = axes.pcolormesh(
        np.arange(shares.shape[0] + 1) + 0.5,
        np.arange(shares.shape[1] + 1),
        shares.T,
        norm=LogNorm(1e-3, 1),
        cmap=colours,
    )
    axes.set(xlabel="iteration", ylabel="chunk", title="Rows that stay active (white: under 1 in 1,000)")
    figure.colorbar(drawn, label="share of the chunk's rows")
    return SimpleNamespace(figure_=figure)


def main() -> None:
    """Draw all pictures."""
    matplotlib.use("Agg")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.zarr"
        options = {"rows": 200_000, "features": 4, "components": 4}
        make_dataset("mixture", path, observer=SilentObserver(), **options)
        gm = GaussianMixture(4, random_state=0).fit(str(path))
        save(ConvergenceDisplay.from_estimator(gm), "convergence")
        save(ComponentsDisplay.from_estimator(gm, str(path)), "components")
        save(ComponentsDisplay.from_estimator(gm, str(path), features=[0]), "feature")
        save(PairsDisplay.from_estimator(gm, str(path)), "pairs")
        save(UncertaintyDisplay.from_estimator(gm, str(path)), "uncertainty")
        save(SelectionDisplay.from_selection(selection(path)), "selection")
        save(settling(active_shares(f"{folder}/run.zarr")), "settling")
    runpy.run_path(str(EXAMPLE))["main"](str(FOLDER / "example1.png"))
    shrink(FOLDER / "example1.png")


if __name__ == "__main__":
    main()
