"""What the tests of bad input share: good rows in every kind of array, and how a refusal looks."""

import dask.array as da
import numpy as np
import pytest
import zarr

from emtau_dask import EmtauError, GaussianMixture, InvalidDataError
from emtau_dask.data.opening import open_source

ROWS = np.random.default_rng(0).normal(size=(60, 2))
ROWS.setflags(write=False)


def in_numpy(array, tmp_path):
    return array


def in_dask(array, tmp_path):
    return da.from_array(array, chunks=25)


def in_zarr(array, tmp_path):
    chunks = tuple(min(25, n) for n in array.shape)
    return zarr.create_array(store=tmp_path / "x.zarr", data=array, chunks=chunks)


def from_zarr(array, tmp_path):
    in_zarr(array, tmp_path)
    return da.from_zarr(str(tmp_path / "x.zarr"))


def in_npy(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    return open_source(str(tmp_path / "x.npy"))


KINDS = [in_numpy, in_dask, in_zarr, from_zarr, in_npy]


def mixture(**settings):
    return GaussianMixture(
        **({"n_components": 2, "random_state": 0, "algorithm": "em", "tol": 1e-3} | settings)
    )


def refused(X, match=None, error=InvalidDataError, *, settings=None, **fit_options):
    """Fitting raises `error` (an EmtauError, and what users of scikit-learn catch) with these words."""
    with pytest.raises(error, match=match) as caught:
        GaussianMixture(**({"n_components": 2, "random_state": 0} | (settings or {}))).fit(X, **fit_options)
    assert isinstance(caught.value, EmtauError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)
