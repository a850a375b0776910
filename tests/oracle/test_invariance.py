"""Any chunking gives the same fit to 1e-10, any number of threads the same bits."""

import dask
import numpy as np
import pytest
import zarr
from oracles import agree, cases, starts
from tiers import exhaustive_but_each_value_once

BITS = ("weights_", "means_", "covariances_", "precisions_cholesky_", "lower_bounds_")


CASES = [("small", case, chunking, "full") for case in cases.BUT_STAR for chunking in starts.CHUNKINGS[1:]]
CASES += [
    ("small", cases.TAU[1], chunking, covariance_type)
    for chunking in ("zero-row-chunks", "ragged", "features-split")
    for covariance_type in starts.COVARIANCE_TYPES[1:]
]
CASES += [("tall", case, "ragged", "full") for case in (cases.FULL, cases.TAU[1], cases.LAZY[0])]


@pytest.mark.parametrize(
    "which", exhaustive_but_each_value_once(CASES), ids=lambda which: "-".join(map(str, which))
)
def test_chunking_changes_nothing(fit, which):
    """Small data under any chunking, in every structure; and many blocks."""
    data, case, chunking, covariance_type = which
    X, k = starts.data(data)
    given = starts.start(X, k, covariance_type)
    options = {"covariance_type": covariance_type, "max_iter": 12}
    agree.oracle_run(X, given, case, **options)  # a stable case
    whole, split = (fit(starts.chunked(X, name), given, case, **options) for name in ("one-chunk", chunking))
    counts = [[record.active_rows for record in model.history_] for model in (whole, split)]
    assert counts[0] == counts[1]
    for array in ("weights_", "means_", "covariances_", "lower_bounds_"):
        assert agree.worst(getattr(split, array), getattr(whole, array)) <= 1e-10, array


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
