"""Which passes go on one thread: those over small chunks in memory, whose tasks wait for the interpreter."""

import threading
from typing import ClassVar

import dask
import dask.array as da
import numpy as np
import pytest
import zarr

from emtau_dask import FullEM, GaussianMixture
from emtau_dask.policies import RowArray

ROWS = np.random.default_rng(0).normal(size=(4000, 4))
MEANS = np.eye(2, 4)


class Watching(FullEM):
    """Notes the threads in which rows are updated."""

    threads: ClassVar[set[int]] = set()

    def row_arrays(self, n_components, max_iter):
        return (RowArray("nothing", 1),)

    def update(self, state, evidence):
        self.threads.add(threading.get_ident())
        return state, np.ones(len(evidence.labels), dtype=np.bool_)


def threads_of(X):
    Watching.threads.clear()
    model = GaussianMixture(
        2,
        algorithm=Watching(),
        means_init=MEANS,
        weights_init=[0.5, 0.5],
        precisions_init=np.array([np.eye(4)] * 2),
        max_iter=2,
        tol=0,
    )
    with dask.config.set(scheduler="threads", num_workers=2):
        model.fit(X)
    return set(Watching.threads), model


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_small_chunks_in_memory_go_on_the_calling_thread_and_others_do_not(tmp_path):
    zarr.create_array(str(tmp_path / "X.zarr"), data=ROWS, chunks=(100, 4))
    small, model = threads_of(da.from_array(ROWS, chunks=(100, 4)))
    stored, of_stored = threads_of(str(tmp_path / "X.zarr"))
    assert small == {threading.get_ident()}
    assert threading.get_ident() not in stored
    assert np.array_equal(model.means_, of_stored.means_)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_large_chunks_in_memory_go_on_several():
    rows = np.tile(ROWS, (200, 1))
    found, _ = threads_of(da.from_array(rows, chunks=(20_000, 4)))
    assert threading.get_ident() not in found
