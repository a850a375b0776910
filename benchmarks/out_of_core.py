"""What a fit's iteration gets of the machine when the data are several times the memory it may use.

    python benchmarks/out_of_core.py                       # 600 MB allowed, 2.4 GB of data, 4 GB of disk
    python benchmarks/out_of_core.py --memory 100kB --chunk-rows 500 --repeats 1
    DASK_EMTAU__DIRECT_READS=never python benchmarks/out_of_core.py   # through the page cache

One iteration of EM over all rows, 16 components, full covariances, from parameters that are given; from
zarr without compression, from zarr with zstd (both also with nothing read ahead), and from memory, rows that
fit there. Each measurement is a process of its own, all kinds in turn; medians over the repeats. Before each
the files' pages are dropped from the page cache. Where a memory cgroup can be made, and the plan says that
the allowed memory suffices, fits from zarr run in one that allows no more, page cache included.

The rate from uncompressed zarr is compared with the lower of the rate in memory and that of reading the files
and nothing else; the rate from zstd with cores / (core-seconds of an iteration in memory + core-seconds of
reading and decoding all chunks), both CPU times of processes. Times in which the whole machine stood still
(`pauses.py`) are left out, where that can be seen: of seconds as they were, of CPU times by the same share,
which makes them rather too short and the limit too high.
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
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from dask.utils import format_bytes, parse_bytes
from pauses import Interval, Pauses
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import FullEM, GaussianMixture
from emtau_dask.dask_config import read_settings
from emtau_dask.data.opening import as_source, open_source
from emtau_dask.data.source import chunk_ranges
from emtau_dask.em.compiling import worth_compiling
from emtau_dask.em.memory import FitOutline, demand
from emtau_dask.em.settings import EmSettings
from emtau_dask.settings import Settings
from emtau_dask.storage.direct_reads import passes_cache, read_directly

PLAIN, ZSTD = "plain.zarr", "zstd.zarr"
KINDS = ("memory", "files", "decoding", "plain", "plain, nothing ahead", "zstd", "zstd, nothing ahead")
READ_AT_ONCE = 2**20
CGROUPS = {1: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), 2: ("/sys/fs/cgroup", "memory.max")}


@dataclass(frozen=True)
class Measured:
    """Medians over the repeats, by kind.

    Attributes
    ----------
    rows : dict of str to float
        Rows a second.
    core_seconds : dict of str to float
        CPU time of a row.
    cores : int
    """

    rows: dict[str, float]
    core_seconds: dict[str, float]
    cores: int

    @property
    def plain_limit(self) -> float:
        """Rows a second that uncompressed zarr could reach."""
        return min(self.rows["memory"], self.rows["files"])

    @property
    def zstd_limit(self) -> float:
        """Rows a second that zstd could reach."""
        return self.cores / (self.core_seconds["memory"] + self.core_seconds["decoding"])


def write(folder: Path, n_rows: int, options: argparse.Namespace) -> None:
    """Write the rows twice; they have the digits of float32, so that there is something to compress."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(options.components, options.features)) * 3
    shape, chunks = (n_rows, options.features), (options.chunk_rows, options.features)
    stored = [
        zarr.create_array(
            store=folder / name, shape=shape, chunks=chunks, dtype="f8", compressors=compressors
        )
        for name, compressors in ((PLAIN, None), (ZSTD, zarr.codecs.ZstdCodec(level=1)))
    ]
    for start in range(0, n_rows, options.chunk_rows):
        size = min(options.chunk_rows, n_rows - start)
        rows = (
            rng.normal(size=(size, options.features)) + centres[rng.integers(options.components, size=size)]
        )
        for array in stored:
            array[start : start + size] = rows.astype("f4")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def drop_pages(folder: Path) -> None:
    """Ask the kernel to forget what it keeps of the files."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(path: Path, whole: int) -> None:
    """Read a file as fits read it."""
    if passes_cache(whole) and read_directly(path) is not None:
        return
    with path.open("rb", buffering=0) as file:
        while file.read(READ_AT_ONCE):
            pass


def iterate(X: object, options: argparse.Namespace) -> Interval:
    """Return when the passes of one iteration began and ended."""
    rng = np.random.default_rng(1)
    K, d = options.components, options.features
    mixture = GaussianMixture(
        K,
        algorithm="em",
        max_iter=1,
        weights_init=np.full(K, 1 / K),
        means_init=rng.normal(size=(K, d)) * 3,
        precisions_init=np.tile(np.eye(d) / 4, (K, 1, 1)),
    )
    with warnings.catch_warnings(), dask.config.set(scheduler="threads", num_workers=options.threads):
        warnings.simplefilter("ignore", ConvergenceWarning)
        (iteration,) = mixture.fit(X).history_
        ended = time.monotonic()
        return ended - iteration.seconds, ended


def measure(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of one measurement in this process, when it began and ended, and its CPU time."""
    source = open_source(str(folder / (ZSTD if kind.startswith(("zstd", "decoding")) else PLAIN)))
    n_rows = source.shape[0]
    if kind == "memory":
        n_rows = min(n_rows, max(options.chunk_rows, n_rows // options.times // 2))
    compiled = worth_compiling(None, (n_rows, options.features), "full", options.components)
    with dask.config.set({"emtau.compiled": "always" if compiled else "never"}):  # loads code
        iterate(np.random.default_rng(2).normal(size=(2000, options.features)), options)
    if kind == "memory":
        held = as_source(source.ranges.read(0, n_rows)[0], ndim=2, what="X")
        X = held.aligned(even(n_rows, options.chunk_rows))
    drop_pages(folder)
    cpu, began = time.process_time(), time.monotonic()
    if kind == "files":
        found = files(folder / PLAIN)
        whole = sum(path.stat().st_size for path in found)
        with ThreadPoolExecutor(options.threads) as pool:
            list(pool.map(partial(read_through, whole=whole), found))
        when = began, time.monotonic()
    elif kind == "decoding":
        for chunk_range in chunk_ranges(source.chunk_rows).values():
            source.reader().load(chunk_range, [])
        when = began, time.monotonic()
    elif kind == "memory":
        when = iterate(X, options)
    else:
        ahead = 0 if kind.endswith("nothing ahead") else read_settings().read_ahead_bytes
        with dask.config.set({"emtau.read-ahead-bytes": ahead}):
            when = iterate(source, options)
    return {"rows": n_rows, "when": when, "cpu": time.process_time() - cpu}


def even(n_rows: int, size: int) -> tuple[int, ...]:
    return tuple(min(size, n_rows - start) for start in range(0, n_rows, size))


@contextmanager
def cgroup(limit: int) -> Iterator[Path | None]:
    """Give a memory cgroup of ``limit`` bytes; None where none can be made."""
    for version, (parent, name) in CGROUPS.items():
        place = Path(parent) / f"emtau-out-of-core-{os.getpid()}"
        if (version == 1) != (Path(parent) / name).exists():
            continue
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            try:
                (place / name).write_text(str(limit))
            except OSError:
                continue
            yield place
            return
        finally:
            place.rmdir()
    yield None


def entering(inside: Path | None) -> Callable[[], None]:
    """Return what a new process does to be in a cgroup; nothing without one."""

    def enter() -> None:
        if inside is not None:
            (inside / "cgroup.procs").write_text(str(os.getpid()))

    return enter


def run(kind: str, folder: Path, arguments: list[str], inside: Path | None) -> dict[str, Any]:
    """Measure in a process of its own, where one is given in a cgroup."""
    command = [sys.executable, __file__, "--measure", kind, "--folder", str(folder), *arguments]
    done = subprocess.run(command, preexec_fn=entering(inside), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def times(found: dict[str, Any], pauses: Pauses) -> dict[str, float]:
    """Return rows, seconds and core-seconds, without pauses."""
    began, ended = found["when"]
    seconds = pauses.seconds_without((began, ended))
    return {
        "rows": found["rows"],
        "seconds": seconds,
        "core_seconds": found["cpu"] * seconds / (ended - began),
    }


def needed(folder: Path, options: argparse.Namespace) -> int:
    outline = FitOutline(
        EmSettings(Settings(options.components), FullEM(), 0.0),
        fields=None,
        threads=options.threads,
        cache_limit=0,
        read_ahead_limit=read_settings().read_ahead_bytes,
    )
    return demand({"X": open_source(str(folder / ZSTD))}, outline).memory


def report(found: Measured) -> None:
    print("| rows in | million rows/s | core-seconds per million rows |")
    print("|---|---|---|")
    for kind in KINDS:
        print(f"| {kind} | {found.rows[kind] / 1e6:.3f} | {found.core_seconds[kind] * 1e6:.3f} |")
    for kind, limit, what in (
        ("plain", found.plain_limit, "the lower of memory and files"),
        ("zstd", found.zstd_limit, f"{found.cores} cores / (core-seconds in memory + decoding)"),
    ):
        without = found.rows[f"{kind}, nothing ahead"]
        print(
            f"{kind}: {found.rows[kind] / limit:.3f} of {what}, {limit / 1e6:.3f} million rows/s; "
            f"{without / limit:.3f} with nothing read ahead"
        )


def figures(found: Measured) -> dict[str, float]:
    """Return what is less where more is reached."""
    kinds = [kind for kind in KINDS if kind not in ("files", "decoding")]
    return {
        **{f"rows in {kind}, s per million": 1e6 / found.rows[kind] for kind in kinds},
        **{f"rows in {kind}, core-s per million": 1e6 * found.core_seconds[kind] for kind in kinds},
        "limit of plain / reached": found.plain_limit / found.rows["plain"],
        "limit of zstd / reached": found.zstd_limit / found.rows["zstd"],
    }


def main(arguments: list[str] | None = None) -> Measured | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="600MB", help="that a fit may use")
    parser.add_argument("--times", type=int, default=4, help="the data are so many times the memory")
    parser.add_argument("--chunk-rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the data are; by default a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--measure", choices=KINDS, help="one measurement in this process; for internal use")
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder, options)))
        return None
    memory = int(parse_bytes(options.memory))
    n_rows = options.times * memory // (8 * options.features)
    given = [
        text
        for name in ("times", "chunk_rows", "features", "components", "threads")
        for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
    ]
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary, Pauses() as pauses:
        folder = Path(temporary)
        write(folder, n_rows, options)
        predicted = needed(folder, options)
        with cgroup(memory) if predicted <= memory else nullcontext() as inside:
            print(
                f"{n_rows:,} x {options.features} rows, {format_bytes(8 * n_rows * options.features)}; "
                f"{format_bytes(memory)} allowed, at most {format_bytes(predicted)} predicted; "
                + ("held to it by a memory cgroup" if inside else "not held to it, page cache dropped only"),
                flush=True,
            )
            for _ in range(options.repeats):
                for kind in KINDS:
                    where = inside if kind != "memory" else None
                    results[kind].append(times(run(kind, folder, given, where), pauses))

    def median(of: str, per: str) -> dict[str, float]:
        return {
            kind: statistics.median(each[of] / each[per] for each in found) for kind, found in results.items()
        }

    found = Measured(
        median("rows", "seconds"),
        median("core_seconds", "rows"),
        min(options.threads, len(os.sched_getaffinity(0))),
    )
    report(found)
    if options.json:
        options.json.write_text(json.dumps(figures(found)))
    return found


if __name__ == "__main__":
    main()
