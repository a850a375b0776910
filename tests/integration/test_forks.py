"""Forked processes fit and predict as their parent, after a fit of it.

In a process of their own, which is forked before any other test has made threads.
"""

import json
import subprocess
import sys

import pytest

COMMON = """
import faulthandler, json, multiprocessing, queue as queues, sys, tempfile
from pathlib import Path
import dask.array as da
import numpy as np
from threadpoolctl import threadpool_info
from emtau_dask import EMTau, FullEM, GaussianMixture
from emtau_dask.data import source
from emtau_dask.data.opening import open_source

source.CHUNK_BYTES = 2**21  # Several chunks of a fit that takes a moment.
GUARD = 100
fork = multiprocessing.get_context("fork")
_random = np.random.default_rng(0)
X = np.concatenate([_random.normal(c, 1, (50_000, 4)) for c in (-2, 2)])
_random.shuffle(X)

def stored(kind):
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    if kind == "array":
        return X
    if kind == "dask":
        return da.from_array(X, chunks=(10_000, 4))
    if kind == "graph":
        return (da.from_array(X, chunks=(20_000, 4)) + 0).rechunk((10_000, 4))
    if kind == "zarr":
        da.from_array(X, chunks=(10_000, 4)).to_zarr(str(folder / "points.zarr"))
        return str(folder / "points.zarr")
    if kind == "parquet":
        import pyarrow as pa, pyarrow.parquet as pq
        table = pa.table({f"x{i}": X[:, i] for i in range(4)})
        pq.write_table(table, folder / "points.parquet", row_group_size=10_000)
        return str(folder / "points.parquet")

def model(algorithm):
    return GaussianMixture(3, algorithm=algorithm, random_state=0, max_iter=5, tol=0.0)

def work(rows, algorithm=FullEM()):
    rows = open_source(rows) if isinstance(rows, str) else rows
    fitted = model(algorithm).fit(rows)
    labels = np.asarray(fitted.predict(X))
    blas = sorted({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"})
    return fitted.means_.tobytes().hex(), int(labels.sum()), blas, sys.getswitchinterval()

def into(queue, *arguments):
    faulthandler.dump_traceback_later(GUARD - 10)  # where a child that hangs is
    queue.put(work(*arguments))

def in_a_fork(*arguments):
    queue = fork.Queue()
    child = fork.Process(target=into, args=(queue, *arguments), daemon=True)
    child.start()
    try:
        return queue.get(timeout=GUARD)
    except queues.Empty:
        raise SystemExit("a forked child hangs")
    finally:
        child.kill()
        child.join()
"""

AFTER = """
found = []
for case in sys.argv[2:]:
    kind, name = case.split()
    rows, algorithm = stored(kind), {"em": FullEM(), "emtau": EMTau(tau=2)}[name]
    here = work(rows, algorithm)
    found.append([here, in_a_fork(rows, algorithm), in_a_fork(rows, algorithm)])
print(json.dumps(found))
"""
OTHERS = ("array emtau", "dask em", "graph em", "zarr emtau")


@pytest.mark.parametrize(
    "cases",
    [("array em", "parquet em"), *(pytest.param((case,), marks=pytest.mark.exhaustive) for case in OTHERS)],
    ids=", ".join,
)
def test_a_fork_after_a_fit_fits_and_predicts_as_its_parent(tmp_path, cases):
    command = [sys.executable, "-W", "ignore", "-c", COMMON + AFTER, str(tmp_path), *cases]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=480)
    assert run.returncode == 0, run.stderr
    for (here, *forked), case in zip(json.loads(run.stdout), cases, strict=True):
        assert forked == [here, here], case
