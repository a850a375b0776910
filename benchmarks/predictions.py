"""Labels of stored rows: their rate beside scikit-learn's and an E-step's, and the memory that they take.

    python benchmarks/predictions.py      # 10,000,000 x 16, K = 16: some minutes, 1.6 GB of disk
    python benchmarks/predictions.py --rows 20000 --repeats 1

scikit-learn labels rows that lie in memory, ours are read from zarr (without compression). Everything has
the same mixture and runs in a process of its own, all in turn; seconds are medians of the second of two
calls, the first of which also imports numba and loads what was compiled (or compiles it). An E-step is an
iteration of EM over the same zarr: a longer fit less a shorter one, over the iterations between. Memory is
the peak of the process less what it has before it labels; *quarter* has a quarter of the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr

ITERATIONS = 1, 4
CHUNK_ROWS = 2**17
CONTESTANTS = ("scikit-learn", "labels", "labels, quarter", "labels written", "all outputs written", "e-step")


def write_rows(folder: Path, rows: int, features: int, components: int) -> None:
    """Write rows of clusters with covariances of their own, chunk by chunk, and a quarter of as many."""
    rng = np.random.default_rng(0)
    means = 3 * rng.normal(size=(components, features))
    turns = rng.normal(size=(components, features, features)) / np.sqrt(features) + 0.5 * np.eye(features)
    chunk_rows = min(CHUNK_ROWS, max(1, rows // 8))
    for name, number in (("rows", rows), ("quarter", rows // 4)):
        array = zarr.create_array(
            store=folder / f"{name}.zarr",
            shape=(number, features),
            chunks=(chunk_rows, features),
            dtype="f8",
            compressors=None,
        )
        for begin in range(0, number, chunk_rows):
            labels = rng.integers(components, size=min(chunk_rows, number - begin))
            drawn = np.einsum("nd,nde->ne", rng.normal(size=(len(labels), features)), turns[labels])
            array[begin : begin + len(labels)] = drawn + means[labels]


def peak_bytes() -> int:
    """Return the largest size that this process has had; 0 where Linux does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def run_one(name: str, folder: Path, threads: int) -> dict[str, Any]:
    import dask

    from emtau_dask import GaussianMixture

    dask.config.set(scheduler="threads", num_workers=threads)
    model = GaussianMixture.load(str(folder / "model.zarr"))
    place = str(folder / ("quarter.zarr" if "quarter" in name else "rows.zarr"))
    if name == "e-step":
        return {"seconds": e_step(model, place), "first": 0.0, "bytes": 0}
    call = call_of(name, model, place, folder)
    before, seconds, counts = peak_bytes(), [], []
    for turn in range(2):
        began = time.perf_counter()
        counts.append(call(turn).tolist())
        seconds.append(time.perf_counter() - began)
    if counts[0] != counts[1]:
        raise SystemExit(f"{name}: two calls label {counts}")
    return {"first": seconds[0], "seconds": seconds[1], "bytes": peak_bytes() - before, "counts": counts[0]}


def call_of(name: str, model: Any, place: str, folder: Path) -> Callable[[int], np.ndarray]:
    """Return what labels the rows once, and returns how many have each label."""
    from emtau_dask.cli.predict import LabelOptions, write_labels
    from emtau_dask.data.opening import open_source
    from emtau_dask.em.history import SilentObserver

    if name == "scikit-learn":
        twin, rows = model.to_sklearn(), zarr.open_array(place)[:]
        return lambda turn: np.bincount(twin.predict(rows))
    if "written" in name:
        options = LabelOptions(probabilities="all" in name, scores="all" in name)
        source = open_source(place)
        return lambda turn: write_labels(
            model, source, folder / f"out-{os.getpid()}-{turn}.zarr", options, observer=SilentObserver()
        )
    return lambda turn: np.bincount(model.predict(place).compute())


def e_step(model: Any, place: str) -> float:
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    from emtau_dask import GaussianMixture

    warnings.simplefilter("ignore", ConvergenceWarning)
    start = {"weights_init": model.weights_, "means_init": model.means_, "precisions_init": model.precisions_}
    seconds = []
    for max_iter in ITERATIONS:
        began = time.perf_counter()
        GaussianMixture(len(model.weights_), algorithm="em", tol=0, max_iter=max_iter, **start).fit(place)
        seconds.append(time.perf_counter() - began)
    return (seconds[1] - seconds[0]) / (ITERATIONS[1] - ITERATIONS[0])


def in_its_own_process(name: str, folder: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--folder", str(folder), "--threads", str(threads)]
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    run = subprocess.run(command, env={**os.environ, **limits}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the rows go; a temporary one by default")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(run_one(options.one, options.folder, options.threads)))
        return {}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        write_rows(folder, options.rows, options.features, options.components)
        fit_model(folder, options.components)
        found = defaultdict(list)
        for repeat in range(options.repeats):
            for name in CONTESTANTS:
                found[name].append(in_its_own_process(name, folder, options.threads))
                print(
                    f"{repeat + 1}/{options.repeats} {name}: {found[name][-1]['seconds']:.2f} s",
                    file=sys.stderr,
                )
    print_table(found, options)
    return found


def fit_model(folder: Path, components: int) -> None:
    from emtau_dask import GaussianMixture

    rows = zarr.open_array(folder / "rows.zarr")[:200_000]
    GaussianMixture(components, algorithm="em", tol=1e-3, random_state=0).fit(rows).save(
        str(folder / "model.zarr")
    )


def print_table(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    seconds = {name: statistics.median(one["seconds"] for one in runs) for name, runs in found.items()}
    print(
        f"{options.rows:,} x {options.features}, K = {options.components}, full, {options.threads} threads, "
        f"medians of {options.repeats}\n"
    )
    columns = (
        "first call, s",
        "seconds",
        "million rows/s",
        "x scikit-learn's rate",
        "of the E-step's rate",
        "peak memory, MB",
    )
    print(f"| what | {' | '.join(columns)} |")
    print(f"|---{'|---' * len(columns)}|")
    for name, runs in found.items():
        rows = options.rows // 4 if "quarter" in name else options.rows
        rate, step = rows / seconds[name], options.rows / seconds["e-step"]
        peer = (options.rows / seconds["scikit-learn"]) ** -1 * rate
        memory = "-" if name == "e-step" else f"{max(one['bytes'] for one in runs) / 1e6:.0f}"
        first = "-" if name == "e-step" else f"{statistics.median(one['first'] for one in runs):.2f}"
        cells = f"{seconds[name]:.2f}", f"{rate / 1e6:.2f}", f"{peer:.1f}", f"{rate / step:.2f}", memory
        print(f"| {name} | {first} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
