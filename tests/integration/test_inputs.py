"""The same fit from every kind of input and memory layout."""

import dask.array as da
import numpy as np
import pytest
import zarr
from fits import CHUNKS, ROWS, START, assert_same_bits, mixture

from emtau_dask import EMTau, FullEM
from emtau_dask.data.opening import as_source
from emtau_dask.mixture import plan


class TestInputs:
    @pytest.mark.parametrize("algorithm", [FullEM(), EMTau(tau=3)], ids=repr)
    @pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "float16", ">f8"])
    def test_values_are_taken_exactly_whatever_their_type(self, monkeypatch, dtype, algorithm):
        monkeypatch.setattr(plan, "SINGLE_LIMIT", 0.0)  # float32 has products of its own elsewhere
        rows = (ROWS * 10).astype(dtype)
        settings = {"algorithm": algorithm, "tol": 1e-3, "init_params": "random"}
        expected = mixture(**settings).fit(rows.astype(float))
        for X in (rows, da.from_array(rows, chunks=300), zarr.array(rows, chunks=(300, 2))):
            assert_same_bits(mixture(**settings).fit(X), expected)

    def test_memory_layout_changes_no_bits_and_lists_are_rows(self):
        expected = mixture(tol=1e-3).fit(ROWS)
        for rows in (np.asfortranarray(ROWS), np.repeat(ROWS, 2, axis=1)[:, ::2], ROWS.tolist()):
            assert_same_bits(mixture(tol=1e-3).fit(rows), expected)

    def test_the_same_chunks_have_the_same_bits_from_any_source(self, tmp_path):
        stored = zarr.create_array(store=tmp_path / "x.zarr", data=ROWS, chunks=(100, 1))
        chunks = (100, 100, 100)
        expected = mixture(tol=1e-3).fit(stored)
        for X in (
            da.from_array(ROWS, chunks=(chunks, 2)),
            da.from_array(ROWS, chunks=(chunks, 1)),
            da.from_zarr(str(tmp_path / "x.zarr")),
            as_source(ROWS, ndim=2, what="X").aligned(chunks),
        ):
            assert_same_bits(mixture(tol=1e-3).fit(X), expected)

    @pytest.mark.parametrize("wrap", [list, da.from_array, zarr.array], ids=["list", "dask", "zarr"])
    def test_weights_of_any_kind_and_chunking(self, wrap):
        weights = np.random.default_rng(0).uniform(0, 2, size=300).round(1)
        X = da.from_array(ROWS, chunks=(CHUNKS, 2))
        expected = mixture(tol=1e-3, **START).fit(X, sample_weight=weights)
        assert_same_bits(mixture(tol=1e-3, **START).fit(X, sample_weight=wrap(weights)), expected)

    def test_no_input_is_changed(self):
        X, weights = ROWS.copy(), np.ones(300)
        mixture(tol=1e-2).fit(X, sample_weight=weights)
        assert np.array_equal(X, ROWS)
        assert np.array_equal(weights, np.ones(300))
