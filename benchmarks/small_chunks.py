"""What an iteration takes over very many small chunks of an array in memory, with and without row state.

    python benchmarks/small_chunks.py                        # 10,000 chunks of 100 x 8, and 100,000
    python benchmarks/small_chunks.py --chunks 40 --many 80 --chunk-rows 20

EM, which keeps no row state; EM-Tau with every row active, whose row state goes to a temporary folder; and
EM-Tau with a checkpoint that is committed after each iteration. Over the larger number of chunks EM alone.
Each fit runs in a process of its own, after a small one that loads and compiles all code. Seconds are those
between two decisions of the policy, commits included, the first pass left out; those of the processor are of
all threads together. Objects are those of row state that an iteration writes to the checkpoint. Memory is the
most that the process has while it fits, less what it had before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import psutil
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, FullEM, GaussianMixture
from emtau_dask.policies import PassSummary, Schedule
from emtau_dask.storage.stores import LocalObjects

MARKS: list[tuple[float, float]] = []
"""The clocks, of the wall and of the processor, when the policy of the fit in this process decided."""


def mark() -> None:
    MARKS.append((time.perf_counter(), time.process_time()))


class TimedEM(FullEM):
    """EM that notes when an iteration ends."""

    def schedule(self, summary: PassSummary) -> Schedule:
        mark()
        return super().schedule(summary)


class TimedTau(EMTau):
    """EM-Tau that notes when an iteration ends."""

    def schedule(self, summary: PassSummary) -> Schedule:
        mark()
        return super().schedule(summary)


@dataclass(frozen=True)
class CountedObjects(LocalObjects):
    """A folder that counts the objects of row state written there."""

    written: list[str] = field(default_factory=list)

    def put(self, key: str, data: bytes) -> None:
        if "/rows/c." in key:
            self.written.append(key)
        super().put(key, data)


EM, TAU, CHECKPOINT = "em", "em-tau", "em-tau, checkpoint"


@dataclass(frozen=True)
class Cost:
    """What an iteration took: seconds, objects of row state, and bytes beside the data at most."""

    case: str
    chunks: int
    seconds: float
    processor: float
    objects: float
    peak: int


def drawn(chunks: int, options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return rows around some centres, and these."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(options.components, options.features)) * 3
    rows = np.empty((chunks * options.chunk_rows, options.features))
    for begin in range(0, len(rows), 2**14):  # without what a whole would need beside it
        part = rows[begin : begin + 2**14]
        part[...] = centres[rng.integers(len(centres), size=len(part))] + rng.normal(size=part.shape)
    return rows, centres


def fit(X: da.Array, centres: np.ndarray, case: str, checkpoint: CountedObjects, iterations: int) -> None:
    K, d = centres.shape
    GaussianMixture(
        K,
        algorithm=TimedEM() if case == EM else TimedTau(tau=100, revisit=None),
        tol=0,
        max_iter=iterations,
        weights_init=np.full(K, 1 / K),
        means_init=centres,
        precisions_init=np.array([np.eye(d)] * K),
        checkpoint=checkpoint if case == CHECKPOINT else None,
    ).fit(X)


def forget_peak() -> int:
    """Return the bytes that this process has, from which its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak() -> int:
    """Return the most bytes that this process has had since."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def cost(case: str, chunks: int, options: argparse.Namespace) -> Cost:
    """Fit in this process, which is a new one."""
    rows, centres = drawn(chunks, options)
    X = da.from_array(rows, chunks=(options.chunk_rows, options.features))
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as place,
        dask.config.set(
            {
                "scheduler": "threads",
                "num_workers": options.workers,
                "temporary-directory": place,
                "emtau.compiled": "always",
            }
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ConvergenceWarning)
        small = X[: options.chunk_rows * min(chunks, 100)]
        fit(small, centres, case, CountedObjects(str(Path(place, "small.zarr"))), 2)
        MARKS.clear()
        objects = CountedObjects(str(Path(place, "run.zarr")))
        before = forget_peak()
        fit(X, centres, case, objects, options.iterations + 1)
    (first, first_processor), (last, last_processor) = MARKS[0], MARKS[-1]
    return Cost(
        case,
        chunks,
        (last - first) / options.iterations,
        (last_processor - first_processor) / options.iterations,
        len(objects.written) / (options.iterations + 1),
        peak() - before,
    )


def main(arguments: list[str] | None = None) -> list[Cost]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--many", type=int, default=100_000, help="chunks of another fit by EM")
    parser.add_argument("--chunk-rows", type=int, default=100)
    parser.add_argument("--features", type=int, default=8)
    parser.add_argument("--components", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="threads")
    parser.add_argument("--iterations", type=int, default=4, help="of each fit, after the first")
    parser.add_argument("--folder", type=Path, help="where row state goes for as long as this runs")
    parser.add_argument("--case", choices=(EM, TAU, CHECKPOINT), help="this alone, here, as JSON")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.case:
        print(json.dumps(dataclasses.asdict(cost(options.case, options.chunks, options))))
        return []
    asked = [(case, options.chunks) for case in (EM, TAU, CHECKPOINT)] + [(EM, options.many)]
    found = []
    print("| algorithm | chunks | seconds | ms a chunk | of the processor | objects | peak, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for case, chunks in asked:
        alone = [sys.executable, __file__, *given, "--case", case, "--chunks", str(chunks)]
        each = Cost(**json.loads(subprocess.run(alone, check=True, stdout=subprocess.PIPE).stdout))
        print(
            f"| {case} | {chunks:,} | {each.seconds:.3f} | {1e3 * each.seconds / chunks:.3f} "
            f"| {1e3 * each.processor / chunks:.3f} | {each.objects:,.0f} | {each.peak / 1e6:,.0f} |",
            flush=True,
        )
        found.append(each)
    return found


if __name__ == "__main__":
    main()
