"""Any chunking gives the same fit to 1e-10, any number of threads the same bits."""

import dask
import numpy as np
import pytest
import zarr
from oracles import agree, cases, starts

ODD = pytest.mark.parametrize("chunking", starts.CHUNKINGS[1:])
BITS = ("weights_", "means_", "covariances_", "precisions_cholesky_", "lower_bounds_")


def assert_same_fit(fit, data, case, chunking, covariance_type):
    X, k = starts.data(data)
    given = starts.start(X, k, covariance_type)
    options = {"covariance_type": covariance_type, "max_iter": 12}
    agree.oracle_run(X, given, case, **options)  # a stable case
    whole, split = (fit(starts.chunked(X, name), given, case, **options) for name in ("one-chunk", chunking))
    counts = [[record.active_rows for record in model.history_] for model in (whole, split)]
    assert counts[0] == counts[1]
    for array in ("weights_", "means_", "covariances_", "lower_bounds_"):
        assert agree.worst(getattr(split, array), getattr(whole, array)) <= 1e-10, array


@ODD
@pytest.mark.parametrize("case", cases.BUT_STAR, ids=str)
def test_chunking_changes_nothing(fit, case, chunking):
    assert_same_fit(fit, "small", case, chunking, "full")


@pytest.mark.parametrize("chunking", ["zero-row-chunks", "ragged", "features-split"])
@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES[1:])
def test_chunking_changes_nothing_in_other_structures(fit, covariance_type, chunking):
    assert_same_fit(fit, "small", cases.TAU[1], chunking, covariance_type)


@pytest.mark.parametrize("case", [cases.FULL, cases.TAU[1], cases.LAZY[0]], ids=str)
def test_chunking_changes_nothing_with_many_blocks(fit, case):
    assert_same_fit(fit, "tall", case, "ragged", "full")


@pytest.mark.parametrize("source", ["dask", "zarr"])
@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_threads_change_no_bit(fit, tmp_path, case, source):
    X, k = starts.data("tall")
    given = starts.start(X, k, "full")
    chunked = starts.da.from_array(X, chunks=(1500, 3))
    if source == "zarr":
        chunked = zarr.create_array(tmp_path / "X.zarr", data=X, chunks=(1500, 3))
    models = []
    for settings in (
        {"scheduler": "synchronous"},
        *({"scheduler": "threads", "num_workers": workers} for workers in (1, 2, 4)),
    ):
        with dask.config.set(settings):
            models.append(fit(chunked, given, case, max_iter=6))
    for name in BITS:
        for model in models[1:]:
            np.testing.assert_array_equal(getattr(model, name), getattr(models[0], name), err_msg=name)
