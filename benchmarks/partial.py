"""What a partial iteration costs: a full one against one with a random tenth of the rows active.

    python benchmarks/partial.py                       # 1,000,000 x 16 in 8 chunks, 128 MB of disk
    python benchmarks/partial.py --rows 100000 --repeats 1

Rows from a zarr array and from memory, 16 components, full covariances. The active rows are a
different random tenth of every chunk after every full iteration; partial iterations take them from
the cache of active rows where there is one (`DASK_EMTAU__CACHE_BYTES=0` shows what they cost without).
Seconds and bytes are medians; the first iteration, which also loads code, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import GaussianMixture
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import RangeSource
from emtau_dask.policies.policy import Evidence, NextPass, PassSummary, RowArray, RowState, Schedule

PARTIAL = 3
"""Partial iterations between two full ones."""


@dataclass(frozen=True)
class Tenth:
    """A policy: after each full iteration a random tenth of the rows stays active for `PARTIAL` more."""

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...]:
        return ()

    def update(self, state: RowState, evidence: Evidence) -> tuple[RowState, np.ndarray]:
        n = len(evidence.labels)
        if (evidence.iteration - 1) % (1 + PARTIAL):
            return state, np.ones(n, dtype=bool)
        return state, np.random.default_rng([evidence.iteration, n]).random(n) < 0.1

    def schedule(self, summary: PassSummary) -> Schedule:
        full = summary.iteration % (1 + PARTIAL) == 0
        return Schedule(NextPass.ALL if full else NextPass.ACTIVE, test_tol=False)


@dataclass(frozen=True)
class Cost:
    """Of iterations of one kind: medians."""

    rows_in: str
    iterations: str
    active: float
    seconds: float
    megabytes: float


def draw(options: argparse.Namespace) -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(options.components, options.features)) * 3
    return (
        rng.normal(size=(options.rows, options.features))
        + centres[rng.integers(options.components, size=options.rows)]
    )


def costs(X: RangeSource, rows_in: str, options: argparse.Namespace) -> list[Cost]:
    def records(algorithm: Any, iterations: int) -> list[Any]:
        mixture = GaussianMixture(
            options.components,
            algorithm=algorithm,
            init_params="random_from_data",
            random_state=0,
            tol=0,
            max_iter=iterations,
        )
        with warnings.catch_warnings(), dask.config.set(scheduler="threads", num_workers=options.threads):
            warnings.simplefilter("ignore", ConvergenceWarning)
            return list(mixture.fit(X).history_)[1:]

    partial = records(Tenth(), options.repeats * (1 + PARTIAL) + 1)
    kinds = {
        "full, EM": records("em", options.repeats + 1),
        "full, then a tenth stays active": [record for record in partial if record.full_pass],
        "a tenth active": [record for record in partial if not record.full_pass],
    }
    return [
        Cost(
            rows_in,
            name,
            statistics.median(record.active_rows / record.rows for record in found),
            statistics.median(record.seconds for record in found),
            statistics.median(record.bytes_read for record in found) / 1e6,
        )
        for name, found in kinds.items()
    ]


def main(arguments: list[str] | None = None) -> list[Cost]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--chunks", type=int, default=8, help="by default of 16 MB, as arrays in memory are cut"
    )
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--components", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="full iterations of each kind")
    options = parser.parse_args(arguments)
    rows, chunk_rows = draw(options), -(-options.rows // options.chunks)
    with tempfile.TemporaryDirectory() as folder:
        stored = zarr.create_array(
            store=Path(folder) / "rows.zarr", data=rows, chunks=(chunk_rows, options.features)
        )
        in_zarr = as_source(stored, ndim=2, what="X")
        in_memory = as_source(rows, ndim=2, what="X").aligned(in_zarr.chunk_rows)
        found = [*costs(in_zarr, "zarr", options), *costs(in_memory, "memory", options)]
    print("| rows in | iteration | active | seconds | of EM's | MB read | of EM's |")
    print("|---|---|---|---|---|---|---|")
    for cost in found:
        full = next(other for other in found if other.rows_in == cost.rows_in)
        print(
            f"| {cost.rows_in} | {cost.iterations} | {cost.active:.3f} "
            f"| {cost.seconds:.3f} | {cost.seconds / full.seconds:.3f} "
            f"| {cost.megabytes:.1f} | {cost.megabytes / full.megabytes:.3f} |"
        )
    return found


if __name__ == "__main__":
    main()
