"""Draws the pictures of `docs/pictures.md` and of the paper's Example 1, by the Displays of the package.

Run it after a change of `emtau_dask/plot`; it takes a minute and writes `docs/pictures/*.png`:

    python docs/draw_pictures.py
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
from PIL import Image

from emtau_dask import GaussianMixture
from emtau_dask.config.schema import MixtureOptions
from emtau_dask.datasets import make_dataset
from emtau_dask.em.history import SilentObserver
from emtau_dask.plot import ComponentsDisplay, ConvergenceDisplay, SelectionDisplay, UncertaintyDisplay

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


def main() -> None:
    """Draw all pictures."""
    matplotlib.use("Agg")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.zarr"
        options = MixtureOptions(dataset="mixture", rows=200_000, features=4, components=4)
        make_dataset(options, path, overwrite=False, observer=SilentObserver())
        gm = GaussianMixture(4, random_state=0).fit(str(path))
        save(ConvergenceDisplay.from_estimator(gm), "convergence")
        save(ComponentsDisplay.from_estimator(gm, str(path)), "components")
        save(ComponentsDisplay.from_estimator(gm, str(path), features=[0]), "feature")
        save(UncertaintyDisplay.from_estimator(gm, str(path)), "uncertainty")
        save(SelectionDisplay.from_selection(selection(path)), "selection")
    runpy.run_path(str(EXAMPLE))["main"](str(FOLDER / "example1.png"))
    shrink(FOLDER / "example1.png")


if __name__ == "__main__":
    main()
