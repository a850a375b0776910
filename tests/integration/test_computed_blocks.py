"""How often a fit computes the blocks of a dask array, counted in the user's own function."""

import itertools

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from counting import Reads
from dask import delayed
from fits import quietly
from zarr.storage import LocalStore

from emtau_dask import EMSampled, EMTau, FullEM, GaussianMixture

CHUNKS, ROWS = 8, 5000
RNG = np.random.default_rng(0)
BLOCKS = RNG.normal(size=(CHUNKS, ROWS, 4)) + 6 * RNG.integers(3, size=(CHUNKS, ROWS, 1))


@pytest.fixture
def counted():
    """A dask array, and a function that returns how often its blocks were computed, in passes."""
    calls = itertools.count()

    def block(number):
        next(calls)
        return BLOCKS[number]

    parts = [da.from_delayed(delayed(block)(i), (ROWS, 4), dtype=float) for i in range(CHUNKS)]
    return da.concatenate(parts), lambda: next(calls) / CHUNKS


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize("algorithm", ["auto", FullEM(), EMSampled(share=0.1)], ids=["auto", "em", "sampled"])
def test_blocks_are_computed_for_the_passes_that_read_them(counted, scheduler, algorithm):
    """Those of `history_`, and before them one for the sample of all starts, or two for one start."""
    X, computed = counted
    with dask.config.set({"scheduler": scheduler, "num_workers": 2}):
        model = GaussianMixture(3, algorithm=algorithm, random_state=0, tol=1e-6).fit(X)
    read = sum(record.bytes_read for record in model.history_) / X.nbytes
    assert computed() == pytest.approx(read + (1 if algorithm == "auto" else 2))


def test_stored_rows_beside_computed_weights_are_read_once_a_pass(tmp_path):
    """Whether the weights' blocks are needed is known before the rows are read."""
    zarr.create_array(tmp_path / "x.zarr", data=np.concatenate(BLOCKS), chunks=(ROWS, 4))
    store = Reads(LocalStore(tmp_path / "x.zarr", read_only=True))
    X = zarr.open_array(store, mode="r")
    weights = da.ones(CHUNKS * ROWS, chunks=ROWS) + 1
    settings = {"algorithm": EMTau(tau=2), "max_iter": 4, "tol": 0, "means_init": BLOCKS[0][:3]}
    settings |= {"weights_init": np.full(3, 1 / 3), "precisions_init": [np.eye(4)] * 3}
    with dask.config.set(scheduler="synchronous"):
        model = quietly(GaussianMixture(3, **settings), X, sample_weight=weights)
    passes = sum(record.bytes_read > 0 for record in model.history_)
    assert len(store.chunks) <= passes * CHUNKS


def test_results_are_those_of_rows_in_memory(counted):
    X, _ = counted
    with dask.config.set(scheduler="threads"):
        lazy = GaussianMixture(3, random_state=0).fit(X)
    stored = GaussianMixture(3, random_state=0).fit(da.from_array(np.concatenate(BLOCKS), chunks=(ROWS, 4)))
    assert np.array_equal(lazy.means_, stored.means_)
    assert np.array_equal(lazy.covariances_, stored.covariances_)
