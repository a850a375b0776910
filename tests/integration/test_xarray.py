"""A DataArray of xarray whose values are a dask array is taken as that array, chunk by chunk."""

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from fits import ROWS, START, assert_same_bits, mixture

from emtau_dask import GaussianMixture

LAZY = da.from_array(ROWS, chunks=(100, 2)).map_blocks(np.copy)
CHUNKED = xr.DataArray(LAZY, dims=("time", "columns"), coords={"columns": ["x", "y"]})
METHODS = ["predict", "predict_proba", "score_samples"]


@pytest.fixture(scope="module")
def fitted():
    return mixture(tol=1e-3, **START).fit(LAZY)


class TestAChunkedDataArray:
    def test_is_fitted_chunk_by_chunk(self, fitted):
        found = mixture(tol=1e-3, **START).fit(CHUNKED)
        assert found.history_[0].chunks_processed == 3
        assert not hasattr(found, "feature_names_in_")
        assert_same_bits(found, fitted)

    def test_stored_by_zarr_is_fitted_chunk_by_chunk(self, fitted, tmp_path):
        xr.Dataset({"rows": CHUNKED}).to_zarr(tmp_path / "x.zarr")
        stored = xr.open_zarr(tmp_path / "x.zarr").rows
        assert_same_bits(mixture(tol=1e-3, **START).fit(stored), fitted)

    @pytest.mark.parametrize("method", METHODS)
    def test_has_lazy_predictions_in_its_chunks(self, fitted, method):
        found, expected = getattr(fitted, method)(CHUNKED), getattr(fitted, method)(LAZY)
        assert isinstance(found, da.Array)
        assert found.chunks == expected.chunks
        np.testing.assert_array_equal(found, expected)

    def test_can_be_weights_and_responsibilities(self):
        weights = np.random.default_rng(0).uniform(0, 2, size=300)
        responsibilities = np.random.default_rng(1).dirichlet(np.ones(3), size=300)
        found = mixture(tol=1e-3).fit(
            CHUNKED,
            sample_weight=xr.DataArray(weights).chunk(50),
            responsibilities_init=xr.DataArray(responsibilities).chunk(50),
        )
        expected = mixture(tol=1e-3).fit(LAZY, sample_weight=weights, responsibilities_init=responsibilities)
        assert_same_bits(found, expected)

    def test_is_resumed(self, fitted, tmp_path):
        run = str(tmp_path / "run.zarr")
        mixture(tol=1e-3, **START, checkpoint=run).fit(CHUNKED)
        assert_same_bits(GaussianMixture.resume(run, CHUNKED), fitted)


@pytest.mark.parametrize("method", METHODS)
def test_a_data_array_in_memory_is_an_array_in_memory(fitted, method):
    found = getattr(fitted, method)(xr.DataArray(ROWS, dims=("time", "feature")))
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, getattr(fitted, method)(ROWS))
