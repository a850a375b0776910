"""Fit a mixture to a zarr array chunk by chunk, look at how the work fell, and label every row.

python examples/out_of_core.py                # 400,000 rows in a temporary folder
python examples/out_of_core.py 4000000
python examples/out_of_core.py 400000 work.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import zarr

from emtau_dask import EMTau, GaussianMixture

FEATURES, CLUSTERS, CHUNK_ROWS = 6, 5, 50_000


def write_points(path: Path, rows: int) -> None:
    """Write points around random centres, one chunk at a time."""
    points = zarr.create_array(path, shape=(rows, FEATURES), chunks=(CHUNK_ROWS, FEATURES), dtype="f4")
    random = np.random.default_rng(0)
    centres = random.normal(scale=1.5, size=(CLUSTERS, FEATURES))
    for start in range(0, rows, CHUNK_ROWS):
        size = min(CHUNK_ROWS, rows - start)
        noise = random.normal(size=(size, FEATURES))
        points[start : start + size] = centres[random.integers(CLUSTERS, size=size)] + noise


def main(rows: int = 400_000) -> GaussianMixture:
    with tempfile.TemporaryDirectory() as folder:
        write_points(Path(folder) / "points.zarr", rows)
        X = da.from_zarr(str(Path(folder) / "points.zarr"))
        model = GaussianMixture(CLUSTERS, algorithm=EMTau(tau=4), random_state=0).fit(X)
        for record in model.history_:
            print(
                f"{record.iteration:>3}: bound {record.lower_bound:.6f}, "
                f"{record.active_rows:>9,} rows scored, {record.bytes_read / 1e6:.1f} MB read"
            )
        work = model.history_.work
        print(f"{model.stop_reason_} after {model.n_iter_} iterations, {work:.1f} passes over the data")
        labels = model.predict(X)
        print("rows of each component:", da.bincount(labels, minlength=CLUSTERS).compute().tolist())
    return model


def picture(model: GaussianMixture) -> Any:
    """Draw how many rows each iteration scored, and what it read for them."""
    import matplotlib.pyplot as plt

    records = list(model.history_)
    iterations = [record.iteration for record in records]
    figure, (scored, read) = plt.subplots(2, 1, sharex=True, figsize=(6.4, 4), layout="constrained")
    scored.bar(iterations, [record.active_rows for record in records])
    scored.set_ylabel("rows scored")
    read.bar(iterations, [record.bytes_read / 1e6 for record in records], color="tab:orange")
    read.set_ylabel("MB read")
    read.set_xlabel("iteration")
    return figure


if __name__ == "__main__":
    fitted = main(*map(int, sys.argv[1:2]))
    if len(sys.argv) > 2:
        picture(fitted).savefig(sys.argv[2])
