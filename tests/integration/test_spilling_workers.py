"""Fits on workers that are at their memory limit, and write what they hold to disk."""

import dask
import dask.array as da
import pytest
from distributed import Client, LocalCluster, wait
from fits import assert_same_bits, mixture, quietly

from emtau_dask import EMTau

pytestmark = pytest.mark.cluster
LIMIT = 640_000_000
CHUNKS, CHUNK_ROWS, FEATURES = 120, 32_768, 16
"""500 MB of rows: with what a worker takes by itself, more than its limit."""


def rows():
    random = da.random.default_rng(5)
    return random.normal(size=(CHUNKS * CHUNK_ROWS, FEATURES), chunks=(CHUNK_ROWS, FEATURES))


def fit(X):
    settings = {"algorithm": EMTau(tau=2, revisit=3), "tol": 0, "max_iter": 6, "init_params": "random"}
    return quietly(mixture(**settings), X)


def spilled(dask_worker):
    return dask_worker.data.spilled_total.disk


@pytest.mark.soak
def test_a_worker_that_spills_rows_to_disk_changes_no_bit():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit=LIMIT, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        (before,) = cluster.workers.values()
        X = rows().persist()
        wait(X)
        assert min(client.run(spilled).values()) > LIMIT // 10, "nothing was spilled"
        found = fit(X)
        assert min(client.run(spilled).values()) > LIMIT // 10
        assert before.process.is_alive(), "the worker was ended for its memory"
    with dask.config.set(scheduler="threads"):
        assert_same_bits(found, fit(rows()))
