"""Peak resident memory of `emtau fit`, at two sizes of the same data, beside what `--plan` predicts.

    python benchmarks/memory.py                       # 5,000,000 and 20,000,000 rows, 2.6 GB of disk
    python benchmarks/memory.py --rows 200000 800000 --chunk-rows 50000

Each fit is a process of its own, which prints its peak when it ends: Linux's `VmHWM`, the most that
was ever resident since the program began. (`ru_maxrss` would not do: a process inherits its parent's.)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import dask

from emtau_dask.cli.config import load_config
from emtau_dask.cli.fit import run_plan

CONFIG = """
data: {{path: {data}}}
model: {{n_components: {components}, covariance_type: full, init_params: {init}, random_state: 0}}
algorithm: {{name: {algorithm}}}
stop: {{tol: 0.0, max_iter: {iterations}}}
output: {{directory: {output}}}
"""
PROGRAM = """
from pathlib import Path
from emtau_dask.cli.main import main
try:
    main()
finally:
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
NOT_CONVERGED = 3


@dataclass(frozen=True)
class Peak:
    rows: int
    megabytes: float
    predicted: float
    seconds: float


def run(
    arguments: list[str], allowed: tuple[int, ...] = (0,), settings: dict[str, str] | None = None
) -> tuple[float, float]:
    """Run `emtau` and return its peak resident memory (MB) and its time (s)."""
    began = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | (settings or {}),
        check=False,
    )
    if process.returncode not in allowed:
        raise SystemExit(process.stdout)
    return 1024 * int(process.stdout.split()[-1]) / 1e6, time.perf_counter() - began


def measure(folder: Path, rows: int, options: argparse.Namespace) -> Peak:
    data = folder / f"rows-{rows}.zarr"
    if not data.exists():
        size = ["--rows", str(rows), "--chunk-rows", str(options.chunk_rows)]
        shape = ["--features", str(options.features), "--components", str(options.components)]
        run(["dataset", "mixture", str(data), *size, *shape])
    output = folder / "run"
    config = folder / "config.yaml"
    config.write_text(
        CONFIG.format(
            data=data,
            output=output,
            components=options.components,
            init=options.init,
            algorithm=options.algorithm,
            iterations=options.iterations,
        )
    )
    limits = {"cache-bytes": options.cache_bytes, "read-ahead-bytes": options.read_ahead_bytes}
    with dask.config.set({f"emtau.{name}": limit for name, limit in limits.items()}):
        plan = run_plan(load_config(config, ["cluster.workers=2"]), overwrite=False)
    command = ["fit", str(config), "--workers", "2", "--overwrite"]
    settings = {f"DASK_EMTAU__{name.upper().replace('-', '_')}": limit for name, limit in limits.items()}
    megabytes, seconds = run(command, (0, NOT_CONVERGED), settings)
    shutil.rmtree(output)
    return Peak(rows, megabytes, plan.demand.memory / 1e6, seconds)


def main(arguments: list[str] | None = None) -> list[Peak]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs=2, default=[5_000_000, 20_000_000])
    parser.add_argument("--chunk-rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument(
        "--algorithm", default="em-tau, tau: 2", help="as in a config; the default has partial passes"
    )
    parser.add_argument("--init", default="kmeans")
    parser.add_argument(
        "--cache-bytes", default="32 MiB", help="active rows and state kept in memory between passes"
    )
    parser.add_argument("--read-ahead-bytes", default="64 MiB", help="chunks that may be held read ahead")
    parser.add_argument("--folder", type=Path, help="keep the data here; by default a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        peaks = [measure(folder, rows, options) for rows in options.rows]
    for peak in peaks:
        print(
            f"{peak.rows:>12,} rows: peak {peak.megabytes:7.0f} MB resident, predicted at most"
            f" {peak.predicted:7.0f} MB, {peak.seconds:7.1f} s"
        )
    if options.json:
        found = {
            f"{peak.rows:,} rows, {what}": value
            for peak in peaks
            for what, value in (("MB", peak.megabytes), ("predicted MB", peak.predicted), ("s", peak.seconds))
        }
        options.json.write_text(json.dumps(found))
    print(f"ratio {peaks[1].megabytes / peaks[0].megabytes:.3f}")
    return peaks


if __name__ == "__main__":
    main()
