"""Rows per second and peak resident memory of a fit from each kind of data, on the same rows.

    python benchmarks/sources.py                                  # 2 GB in each kind, 16 GB of disk
    python benchmarks/sources.py --rows 400000 --only zarr csv

Each fit is a process of its own: three iterations of EM from given means, with two threads. The time is that
of `fit`, imports aside; of CSV it includes the one reading. The peak is Linux's `VmHWM`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, COMPONENTS, ITERATIONS = 16, 8, 3
KINDS = ("npy", "zarr", "zarr-zstd", "zarr-packed", "parquet", "parquet-folder", "csv", "dask", "dataframe")
KINDS += ("cube", "netcdf", "pandas", "polars")
MEMORY = ("pandas", "polars")
"""Kinds that lie in memory, whose peak has the rows in it."""


def write(kind: str, folder: Path, rows: int, chunk_rows: int) -> None:
    """Write the rows as this kind of data has them, a chunk at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zarr

    def chunks() -> Any:
        rng = np.random.default_rng(0)
        centres = rng.normal(scale=3, size=(COMPONENTS, FEATURES))
        for begin in range(0, rows, chunk_rows):
            n = min(chunk_rows, rows - begin)
            yield begin, n, centres[rng.integers(COMPONENTS, size=n)] + rng.normal(size=(n, FEATURES))

    names = [f"f{j}" for j in range(FEATURES)]
    shape, chunk = (rows, FEATURES), (chunk_rows, FEATURES)
    if kind == "npy":
        target = np.lib.format.open_memmap(folder / "a.npy", mode="w+", dtype="f8", shape=shape)
        for begin, n, values in chunks():
            target[begin : begin + n] = values
        return
    if kind in ("zarr", "dask", "zarr-zstd"):
        codec = {"compressors": None} if kind != "zarr-zstd" else {}
        array = zarr.create_array(folder / "a.zarr", shape=shape, chunks=chunk, dtype="f8", **codec)
        for begin, n, values in chunks():
            array[begin : begin + n] = values
        return
    if kind == "zarr-packed":
        array = zarr.create_array(folder / "a.zarr", shape=shape, chunks=chunk, dtype="i2", compressors=None)
        array.attrs.update({"scale_factor": 0.001, "add_offset": 0.0, "_FillValue": -32768})
        for begin, n, values in chunks():
            array[begin : begin + n] = np.clip(values * 1000, -32767, 32767)
        return
    if kind in ("parquet", "pandas", "polars", "dataframe"):
        with pq.ParquetWriter(
            folder / "a.parquet", pa.schema([(name, pa.float64()) for name in names])
        ) as file:
            for _, _, values in chunks():
                file.write_table(pa.table(dict(zip(names, values.T, strict=True))), row_group_size=chunk_rows)
        return
    if kind == "parquet-folder":
        (folder / "a").mkdir()
        for begin, _, values in chunks():
            place = folder / "a" / f"part.{begin // chunk_rows}.parquet"
            pq.write_table(pa.table(dict(zip(names, values.T, strict=True))), place)
        return
    if kind == "csv":
        import pyarrow.csv

        with pyarrow.csv.CSVWriter(
            folder / "a.csv", pa.schema([(name, pa.float64()) for name in names])
        ) as file:
            for _, _, values in chunks():
                file.write_table(pa.table(dict(zip(names, values.T, strict=True))))
        return
    import xarray as xr

    for begin, _, values in chunks():
        cube = xr.Dataset({name: ("row", values[:, j]) for j, name in enumerate(names)})
        if kind == "cube":
            mode = {"mode": "w"} if begin == 0 else {"append_dim": "row"}
            encoding = {name: {"chunks": (chunk_rows,)} for name in names} if begin == 0 else None
            cube.to_zarr(folder / "a.zarr", encoding=encoding, consolidated=False, **mode)
    if kind == "netcdf":
        import h5netcdf

        with h5netcdf.File(folder / "a.nc", "w") as file:
            file.dimensions = {"row": rows}
            variables = [
                file.create_variable(name, ("row",), "f8", chunks=(min(chunk_rows, rows),)) for name in names
            ]
            for begin, n, values in chunks():
                for j, variable in enumerate(variables):
                    variable[begin : begin + n] = values[:, j]


def opened(kind: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return what a user passes to `fit`, and the options."""
    paths = {"npy": "a.npy", "zarr": "a.zarr", "zarr-zstd": "a.zarr", "zarr-packed": "a.zarr"}
    paths |= {"parquet": "a.parquet", "parquet-folder": "a", "csv": "a.csv"}
    if kind in paths:
        return str(folder / paths[kind]), {}
    if kind == "dask":
        import dask.array as da

        return da.from_zarr(str(folder / "a.zarr")) + 0.0, {}
    if kind == "dataframe":
        import dask.dataframe as dd

        return dd.read_parquet(folder / "a.parquet", split_row_groups=True), {}
    if kind == "pandas":
        import pandas as pd

        return pd.read_parquet(folder / "a.parquet"), {}
    if kind == "polars":
        import polars as pl

        return pl.read_parquet(folder / "a.parquet"), {}
    import xarray as xr

    features = {"features": [f"f{j}" for j in range(FEATURES)]}
    if kind == "cube":
        return xr.open_zarr(folder / "a.zarr", consolidated=False), features
    return xr.open_dataset(folder / "a.nc", chunks={}), features


def fit(kind: str, folder: Path) -> None:
    """Fit in this process, and print the seconds and the peak."""
    import warnings

    import dask

    from emtau_dask import FullEM, GaussianMixture

    warnings.simplefilter("ignore")
    means = np.random.default_rng(0).normal(scale=3, size=(COMPONENTS, FEATURES))
    with dask.config.set(scheduler="threads", num_workers=2):
        data, options = opened(kind, folder)
        model = GaussianMixture(
            COMPONENTS,
            algorithm=FullEM(),
            tol=0,
            max_iter=ITERATIONS,
            means_init=means,
            n_init=1,
            random_state=0,
        )
        began = time.perf_counter()
        model.fit(data, **options)
        seconds = time.perf_counter() - began
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e3
    of_iterations = sum(record.seconds for record in model.history_)
    print(
        json.dumps(
            {"seconds": seconds, "iterations": of_iterations, "peak": peak, "rows": model.history_[-1].rows}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=15_625_000, help="of 128 bytes")
    parser.add_argument("--chunk-rows", type=int, default=131_072)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--folder", type=Path, help="where the data go; by default a temporary folder")
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fit:
        fit(options.fit, options.folder)
        return
    print("| data | rows/s in an iteration | seconds of the fit | peak, MB |\n|---|---|---|---|", flush=True)
    for kind in options.only:
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            write(kind, Path(temporary), options.rows, options.chunk_rows)
            command = [sys.executable, __file__, "--fit", kind, "--folder", temporary]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {kind} | failed: {done.stderr.strip().splitlines()[-1]} | | |", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rate = ITERATIONS * found["rows"] / found["iterations"]
        note = ", the rows in it" if kind in MEMORY else ""
        print(
            f"| {kind} | {rate / 1e6:.2f} M | {found['seconds']:.1f} | {found['peak']:,.0f}{note} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
