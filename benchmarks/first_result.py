"""Seconds until something is there: an import, the first lines of `emtau`, a small fit, whole default fits.

    python benchmarks/first_result.py

Each is a process of its own, after one that is not counted; medians over the repeats. The default fits are
timed inside their process, without imports: one compiled, and one by NumPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np

import emtau_dask

DEFAULT_FIT = """
import time
import dask, numpy as np
from emtau_dask import GaussianMixture
X = np.load("rows.npy")
with dask.config.set({{"scheduler": "threads", "num_workers": 2, "emtau.compiled": {compiled!r}}}):
    GaussianMixture(8, random_state=0).fit(X[:4000])
    began = time.perf_counter()
    GaussianMixture(8, random_state=0).fit(X)
print(time.perf_counter() - began)
"""


def command() -> str:
    """Return a program that is `emtau`, of the package that is imported."""
    project = tomllib.loads(Path(emtau_dask.__file__).parents[1].joinpath("pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["emtau"].split(":")
    return f"import sys; from {module} import {function}; sys.exit({function}())"


def python(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def clocked(folder: Path, *arguments: str) -> float:
    began = time.perf_counter()
    python(folder, *arguments)
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000, help="of the default fits")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder, random = Path(place), np.random.default_rng(0)
        labels = random.integers(8, size=options.rows)
        rows = random.normal(size=(options.rows, 8)) + 2.0 * random.normal(size=(8, 8))[labels]
        np.save(folder / "rows.npy", rows)
        np.savetxt(folder / "few.csv", rows[:1000], delimiter=",", header="a,b,c,d,e,f,g,h", comments="")
        emtau, public = command(), "from emtau_dask import GaussianMixture"
        fit = "fit", "few.csv", "-k", "3", "-o", "out", "--overwrite"
        timed: dict[str, Callable[[], float]] = {
            "import of GaussianMixture, s": lambda: clocked(folder, public),
            "emtau --help, s": lambda: clocked(folder, emtau, "--help"),
            "emtau fit of 1,000 rows, s": lambda: clocked(folder, emtau, *fit),
            "default fit, compiled, s": lambda: float(python(folder, DEFAULT_FIT.format(compiled="always"))),
            "default fit, NumPy, s": lambda: float(python(folder, DEFAULT_FIT.format(compiled="never"))),
        }
        clocked(folder, public)
        found = {
            name: statistics.median(time() for _ in range(options.repeats)) for name, time in timed.items()
        }
    for name, seconds in found.items():
        print(f"{name}: {seconds:.2f}")
    if options.json:
        options.json.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
