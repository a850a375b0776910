"""How often a default fit reads its data when they are several times the memory it may use.

    python benchmarks/out_of_core_passes.py                  # 64,000,000 x 4 rows, 2 GB of disk, minutes
    python benchmarks/out_of_core_passes.py --rows 400000 --memory 600MB

The data are C of `passes.py` (overlapping clusters, rows sorted), with so many rows, as zarr without
compression. The fit runs in a process of its own; where a memory cgroup can be made, in one that allows no
more than ``--memory``, page cache included. Of that, ``--cache`` is for rows that stay in memory between
passes: sampled rows take a tenth of the data. The start counts too: its samples, k-means, and all E-steps.

It prints, in units of the bytes of the data, what was read of the chunks themselves, start included;
what the iterations read, files of cached rows included; what the process read in all (``rchar`` of ``/proc``,
less what it had read when the fit began). Beside them are the number of full passes and the greatest memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import zarr
from dask.utils import format_bytes, parse_bytes
from out_of_core import cgroup, entering
from passes_data import MIXTURES

from emtau_dask import GaussianMixture
from emtau_dask.data.chunk import ChunkLoader, LoadedChunk


@dataclass(frozen=True)
class Reading:
    """What a fit read, in units of the bytes of the data, and what it made of it."""

    chunks: float
    iterations: float
    process: float
    full_passes: int
    work: float
    seconds: float
    resident: int

    @property
    def allowed(self) -> int:
        """The passes over the chunks that a fit should need at most: its full passes and two more."""
        return self.full_passes + 2


def read_so_far() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@contextmanager
def chunk_bytes() -> Iterator[list[int]]:
    """Yield the bytes of each chunk that is read meanwhile, not of rows that are cached in files."""
    load, found = ChunkLoader.load, []

    @wraps(load)
    def noted(*arguments: Any) -> LoadedChunk:
        loaded = load(*arguments)
        found.append(loaded.bytes_read)
        return loaded

    with patch.object(ChunkLoader, "load", noted):
        yield found


def fit(stored: str, threads: int, cache: str) -> dict[str, Any]:
    array = zarr.open_array(stored, mode="r")
    size = array.nbytes
    before, began = read_so_far(), time.perf_counter()
    settings = {"scheduler": "threads", "num_workers": threads, "emtau.cache-bytes": cache}
    with dask.config.set(settings), chunk_bytes() as of_chunks:
        model = GaussianMixture(MIXTURES["C"][1].components, random_state=0).fit(array)
    found = Reading(
        sum(of_chunks) / size,
        sum(record.bytes_read for record in model.history_) / size,
        (read_so_far() - before) / size,
        sum(record.full_pass for record in model.history_),
        model.history_.work,
        time.perf_counter() - began,
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    return {**found.__dict__}


def main(arguments: list[str] | None = None) -> Reading | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64_000_000)
    parser.add_argument("--memory", default="512MB", help="that the fit may use")
    parser.add_argument("--cache", default="auto", help="of it, for sampled and active rows")
    parser.add_argument("--chunk-rows", type=int, default=250_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the data are; by default a temporary folder")
    parser.add_argument("--fit", help="fit this array in this process; for internal use")
    options = parser.parse_args(arguments)
    if options.fit:
        print(json.dumps(fit(options.fit, options.threads, options.cache)))
        return None
    memory = int(parse_bytes(options.memory))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stored = str(Path(folder) / "C.zarr")
        rows = replace(MIXTURES["C"][1], rows=options.rows).drawn(1)
        chunks = (options.chunk_rows, rows.shape[1])
        array = zarr.create_array(store=stored, shape=rows.shape, chunks=chunks, dtype="f8", compressors=None)
        array[:] = rows
        del rows
        with cgroup(memory) if array.nbytes > memory else nullcontext() as inside:
            print(
                f"{array.shape[0]:,} x {array.shape[1]} rows, {format_bytes(array.nbytes)}; "
                f"{format_bytes(memory)} allowed, "
                + ("held to it by a memory cgroup" if inside else "not held to it"),
                flush=True,
            )
            command = [sys.executable, __file__, "--fit", stored, "--threads", str(options.threads)]
            command += ["--cache", options.cache]
            done = subprocess.run(
                command, preexec_fn=entering(inside), capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise SystemExit(done.stderr)
        found = Reading(**json.loads(done.stdout))
    print(
        f"{found.full_passes} full passes, work {found.work:.1f}, {found.seconds:.0f} s, "
        f"{format_bytes(found.resident)} resident at most\n"
        f"chunks: read {found.chunks:.2f} times (at most {found.allowed} wanted)\n"
        f"with files of cached rows: read {found.iterations:.2f} times the data in iterations, "
        f"{found.process:.2f} times by the process"
    )
    return found


if __name__ == "__main__":
    main()
