"""Cubes of xarray as rows × features: against scikit-learn on the same cells, stacked by NumPy."""

import itertools
import json
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from commands import emtau
from oracles import starts
from processes import KILLED_IN_ITERATION_3
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SklearnMixture

from emtau_dask import CheckpointMismatchError, GaussianMixture, InvalidDataError, select_components
from emtau_dask.data.cubes import cube_of
from emtau_dask.errors import InvalidDtypeError

pytestmark = pytest.mark.filterwarnings(f"ignore::{ConvergenceWarning.__module__}.ConvergenceWarning")

K, D = 3, 3
TIMES, LATS, LONS = 4, 6, 10
SHAPE = (TIMES, LATS, LONS)
ROWS, _ = starts.mixture(TIMES * LATS * LONS, K, D, separation=6.0, seed=12)
START = starts.start(ROWS, K, "full", seed=3)
NAMES = ["temperature", "salinity", "oxygen"]
COORDS = {
    "band": NAMES,
    "time": np.datetime64("2020-01-01", "ns") + np.arange(TIMES) * np.timedelta64(1, "D"),
    "lat": ("lat", np.linspace(-60, 60, LATS), {"units": "degrees_north"}),
    "area": (("lat", "lon"), np.arange(LATS * LONS).reshape(LATS, LONS)),
    "season": ("time", list("abab")),
    "height": 2.0,
    "centre": ("band", [0.4, 0.5, 0.6]),
    "by_band_and_lat": (("band", "lat"), np.zeros((D, LATS))),
}
CUBE = xr.DataArray(
    ROWS.reshape(*SHAPE, D), dims=("time", "lat", "lon", "band"), coords=COORDS, attrs={"units": "K"}
)
CHUNKS = {"time": 2, "lat": (4, 2), "lon": 5, "band": 2}
SET = CUBE.drop_vars(["centre", "by_band_and_lat"]).to_dataset("band")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Duplicate dimension names")
    TWICE = xr.DataArray(np.zeros((2, 2, D)), dims=("lat", "lat", "band"))
LAZY = da.from_array(ROWS, chunks=(80, D))
UNKNOWN = xr.DataArray(LAZY[LAZY[:, 0] > 0], dims=("cell", "band"), coords={"band": NAMES})
ORDERS = list(itertools.permutations(CUBE.dims))


def mixture(**settings):
    fixed = {"algorithm": "em", "max_iter": 5, "tol": 0, "random_state": 0}
    return GaussianMixture(K, **fixed | START | settings)


def assert_alike(found, expected, rtol=1e-9):
    for name in ("weights_", "means_", "covariances_"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=rtol, atol=rtol)


@pytest.fixture(scope="module")
def theirs():
    return SklearnMixture(K, max_iter=5, tol=0, **START).fit(ROWS)


@pytest.fixture(scope="module")
def fitted():
    return mixture().fit(CUBE.chunk(CHUNKS), features="band")


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "cube.zarr"
    SET.chunk({"time": 2, "lat": 3, "lon": 5}).to_zarr(path)
    return path


class TestAFitIsScikitLearns:
    @pytest.mark.parametrize("order", ORDERS, ids="-".join)
    def test_in_every_order_of_dimensions(self, order, theirs):
        cube = CUBE.transpose(*order)
        assert_alike(mixture().fit(cube, features="band"), theirs)
        found = mixture().fit(cube.chunk(CHUNKS), features="band")
        assert_alike(found, theirs)
        labels = found.predict(cube.chunk(CHUNKS), features="band")
        assert labels.dims == tuple(dim for dim in order if dim != "band")
        expected = theirs.predict(ROWS).reshape(SHAPE)
        np.testing.assert_array_equal(labels.transpose("time", "lat", "lon").values, expected)

    def test_of_variables(self, theirs):
        for data in (SET, SET.chunk({"time": 1, "lat": 4}), SET.astype("f4").astype("f8").chunk(2)):
            found = mixture().fit(data, features=NAMES)
            assert_alike(found, theirs, rtol=1e-5 if data.chunks.get("lon") == (2,) * 5 else 1e-9)
            assert found.feature_names_in_.tolist() == NAMES

    def test_of_variables_in_other_orders_chunks_and_dtypes(self):
        counts = np.rint(SET.salinity * 100).astype("i2")
        data = xr.Dataset(
            {
                "temperature": SET.temperature.transpose("lon", "time", "lat").chunk({"lon": 3}),
                "salinity": counts.chunk({"time": 1, "lat": 5}),
                "oxygen": SET.oxygen.astype("f4"),
            }
        )
        rows = np.stack([data[name].transpose("time", "lat", "lon").values.ravel() for name in NAMES], axis=1)
        start = starts.start(rows, K, "full", seed=3)
        found = mixture(**start).fit(data, features=NAMES)
        assert_alike(found, SklearnMixture(K, max_iter=5, tol=0, **start).fit(rows), rtol=1e-7)
        labels = found.predict(data)
        assert labels.dims == ("lon", "time", "lat")  # of the first variable
        np.testing.assert_array_equal(
            labels.transpose("time", "lat", "lon").values.ravel(), found.predict(rows)
        )

    def test_a_variable_without_a_dimension_is_the_same_along_it(self):
        data = SET[["temperature", "salinity"]].chunk({"time": 1, "lon": 4})
        data["depth"] = ("lat", np.linspace(0, 9, LATS))
        whole = np.broadcast_to(data.depth.values[:, np.newaxis], SHAPE)
        rows = np.stack([data.temperature.values, data.salinity.values, whole], axis=-1).reshape(-1, 3)
        start = starts.start(rows, K, "full", seed=3)
        expected = SklearnMixture(K, max_iter=5, tol=0, **start).fit(rows)
        assert_alike(mixture(**start).fit(data, features=["temperature", "salinity", "depth"]), expected)
        renamed = data.assign_coords(lat=data.depth.values)  # and so is a coordinate
        found = mixture(**start).fit(renamed, features=["temperature", "salinity", "lat"])
        assert_alike(found, expected)

    def test_with_rows_along_one_dimension(self, theirs):
        rows = xr.DataArray(ROWS, dims=("cell", "band"), coords={"band": NAMES})
        for data in (rows, rows.chunk({"cell": 70}), rows.T.chunk({"cell": 70, "band": 1})):
            found = mixture().fit(data, features="band", sample_weight=np.ones(len(ROWS)))
            assert_alike(found, theirs)
            np.testing.assert_array_equal(found.predict(data, features="band"), theirs.predict(ROWS))

    def test_with_weights_over_some_dimensions(self):
        weights = np.cos(np.deg2rad(CUBE.lat))
        found = mixture().fit(CUBE.chunk(CHUNKS), features="band", sample_weight=weights)
        spread = weights.broadcast_like(CUBE.isel(band=0)).transpose("time", "lat", "lon")
        assert_alike(found, mixture().fit(ROWS, sample_weight=spread.values.ravel()))
        several = (weights * xr.DataArray(np.arange(1, 11), dims="lon")).chunk(3)
        found = mixture().fit(CUBE.chunk(CHUNKS), features="band", sample_weight=several)
        spread = several.broadcast_like(CUBE.isel(band=0)).transpose("time", "lat", "lon")
        assert_alike(found, mixture().fit(ROWS, sample_weight=spread.values.ravel()))

    def test_criteria(self, fitted, theirs):
        for cube in (CUBE, CUBE.chunk(CHUNKS)):
            assert fitted.score(cube, features="band") == pytest.approx(theirs.score(ROWS))
            assert fitted.bic(cube) == pytest.approx(theirs.bic(ROWS))
            assert fitted.aic(cube) == pytest.approx(theirs.aic(ROWS))


class TestStored:
    def test_by_zarr(self, stored, theirs):
        for options in ({}, {"chunks": None}):
            found = mixture().fit(xr.open_zarr(stored, **options), features=NAMES)
            assert_alike(found, theirs)
            assert found.history_[0].chunks_processed > 1 or options

    @pytest.mark.parametrize(
        ("chunk_bytes", "chunks"),
        [
            (1, ((2, 2), (3, 3), (5, 5))),
            (3 * 8 * 60, ((2, 2), (3, 3), (10,))),
            (3 * 8 * 120, ((2, 2), (6,), (10,))),
            (2**24, ((4,), (6,), (10,))),
        ],
    )
    def test_without_dask_whole_chunks_are_read(self, chunk_bytes, chunks, stored, monkeypatch):
        monkeypatch.setattr("emtau_dask.data.cubes.CHUNK_BYTES", chunk_bytes)
        data = xr.open_zarr(stored, chunks=None)
        assert mixture().fit(data, features=NAMES).predict(data).chunks == chunks

    @pytest.mark.parametrize("engine", ["h5netcdf", "scipy"])
    def test_by_netcdf(self, engine, tmp_path, theirs):
        SET.to_netcdf(tmp_path / "cube.nc", engine=engine)
        for options in ({}, {"chunks": {"time": 1}}):
            with xr.open_dataset(tmp_path / "cube.nc", engine=engine, **options) as data:
                found = mixture().fit(data, features=NAMES)
                assert_alike(found, theirs)
                labels = found.predict(data)
                assert isinstance(labels.data, da.Array)
                np.testing.assert_array_equal(labels.values.ravel(), theirs.predict(ROWS))

    @pytest.mark.parametrize("name", ["cube.zarr", "cube.nc"])
    def test_by_path(self, name, stored, theirs):
        path = stored.with_name(name)
        SET.to_netcdf(stored.with_name("cube.nc"))
        found = mixture().fit(path, features=NAMES)
        assert_alike(found, theirs)
        for labels in (found.predict(str(path), features=NAMES), found.predict(path)):
            assert isinstance(labels.data, da.Array)
            assert labels.dims == ("time", "lat", "lon")
            np.testing.assert_array_equal(labels.values.ravel(), theirs.predict(ROWS))
        for method in ("predict_proba", "score_samples"):
            values = getattr(found, method)(path, features=NAMES).values
            expected = getattr(theirs, method)(ROWS)
            np.testing.assert_allclose(values.reshape(expected.shape), expected, rtol=1e-7, atol=1e-9)
        chosen = select_components(path, [1, 2], features=NAMES, random_state=0)
        assert chosen.best_estimator_.feature_names_in_.tolist() == NAMES

    def test_by_path_along_a_dimension(self, tmp_path, theirs):
        CUBE.drop_vars("by_band_and_lat").to_dataset(name="sea").assign(land=CUBE.lat * 0.5).to_netcdf(
            tmp_path / "c.nc"
        )
        assert_alike(mixture().fit(tmp_path / "c.nc", features="band"), theirs)

    def test_packed_numbers_are_those_that_xarray_decodes(self, tmp_path):
        packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -32768}
        data = SET.where(SET.area > 7).chunk({"time": 2})
        data.to_zarr(tmp_path / "packed.zarr", encoding=dict.fromkeys(NAMES, packed))
        opened = xr.open_zarr(tmp_path / "packed.zarr")
        rows = np.stack([opened[name].values.ravel() for name in NAMES], axis=1)
        complete = rows[~np.isnan(rows).any(axis=1)]
        assert 0 < len(complete) < len(rows)
        found = mixture(missing="drop").fit(opened, features=NAMES)
        assert_alike(found, SklearnMixture(K, max_iter=5, tol=0, **START).fit(complete), rtol=1e-5)

    @pytest.mark.parametrize("chunks", [None, {"b": 1000}])
    def test_variables_that_share_no_dimension_have_small_chunks(self, chunks):
        data = xr.Dataset({"c": ("a", np.arange(3000.0)), "d": ("b", np.arange(3000.0))})
        data["d"] = data.d if chunks is None else data.d.chunk(chunks)
        rows = cube_of(data, ["c", "d"], None).rows
        assert rows.shape == (3000**2, 2)
        assert max(rows.chunks[0]) * 2 * 8 <= 2**24

    def test_no_more_than_some_chunks_are_held_at_a_time(self):
        held, most, loads = Counter(), [], []

        def load(block_info=None):
            place, shape = block_info[None]["chunk-location"], block_info[None]["chunk-shape"]
            cells = np.random.default_rng(place).normal(size=shape)
            loads.append(place)
            held[place] += 1
            weakref.finalize(cells, held.subtract, [place])
            most.append(held.total())
            return cells

        cells = da.map_blocks(
            load, chunks=((10,) * 40, (20,), (1,) * D), dtype=float, meta=np.empty((0, 0, 0))
        )
        cube = xr.DataArray(cells, dims=("time", "cell", "band"))
        with dask.config.set(scheduler="threads", num_workers=2):
            model = GaussianMixture(
                K, algorithm="em", max_iter=2, tol=0, init_params="random", random_state=0
            )
            model.fit(cube, features="band")
        blocks = Counter(loads)
        assert len(blocks) == 40 * D
        assert len(set(blocks.values())) == 1  # each block is loaded as often as there are passes
        assert max(most) <= 10 * D

    def test_a_lazy_cube_without_chunks_is_not_loaded_whole(self, tmp_path):
        values = np.random.default_rng(0).normal(size=(3, 400, 1000, 2))
        names = dict(zip("ab", np.moveaxis(values, -1, 0), strict=True))
        xr.Dataset({name: (("t", "y", "x"), each) for name, each in names.items()}).to_netcdf(
            tmp_path / "cube.nc", engine="scipy"
        )
        with xr.open_dataset(tmp_path / "cube.nc", engine="scipy") as data:
            found = GaussianMixture(2, algorithm="em", max_iter=2, random_state=0).fit(
                data, features=["a", "b"]
            )
            assert found.history_[0].chunks_processed >= 2
            assert not data.a.variable._in_memory


class TestPredictions:
    @pytest.mark.parametrize(
        "data", [CUBE.chunk(CHUNKS), SET.chunk({"time": 2, "lat": (4, 2)})], ids=["array", "set"]
    )
    @pytest.mark.parametrize(
        ("method", "name"),
        [("predict", "labels"), ("predict_proba", "probabilities"), ("score_samples", "scores")],
    )
    def test_are_lazy_with_what_the_rows_have(self, data, method, name, fitted, theirs):
        found = getattr(fitted, method)(data)
        inner = ("component",) if method == "predict_proba" else ()
        assert (found.name, found.dims) == (name, ("time", "lat", "lon", *inner))
        assert isinstance(found.data, da.Array)
        rows = data.isel(band=0) if "band" in data.dims else data.temperature
        assert found.chunks[:3] == rows.chunks
        assert set(found.coords) == {"time", "lat", "area", "season", "height"}
        for coord in found.coords:
            xr.testing.assert_identical(found.coords[coord].variable, CUBE.coords[coord].variable)
        assert found.lat.attrs == {"units": "degrees_north"}
        expected = getattr(theirs, method)(ROWS).reshape(*SHAPE, *([K] if inner else []))
        np.testing.assert_allclose(found.values, expected, rtol=1e-7, atol=1e-9)

    @pytest.mark.parametrize("method", ["predict", "predict_proba", "score_samples"])
    def test_of_a_cube_in_memory_are_in_memory(self, method, fitted):
        found = getattr(fitted, method)(CUBE)
        assert isinstance(found.data, np.ndarray)
        xr.testing.assert_allclose(found, getattr(fitted, method)(CUBE.chunk(CHUNKS)).compute())

    def test_are_written_and_read_again(self, fitted, tmp_path):
        labels = fitted.predict(CUBE.chunk(CHUNKS | {"lat": 3}))
        labels.to_zarr(tmp_path / "labels.zarr")
        with xr.open_zarr(tmp_path / "labels.zarr") as again:
            xr.testing.assert_identical(again.labels.compute(), labels.compute())

    def test_of_missing_rows(self, theirs, tmp_path):
        land = CUBE.where((CUBE.area > 7) | (CUBE.band != "salinity"))
        sea = ~np.isnan(land.values).any(axis=-1)
        found = mixture(missing="drop").fit(land.chunk({"time": 2}), features="band")
        expected = SklearnMixture(K, max_iter=5, tol=0, **START).fit(land.values[sea])
        assert_alike(found, expected)
        for cube in (land, land.chunk({"time": 2, "lat": 3})):
            labels = found.predict(cube)
            np.testing.assert_array_equal(np.isnan(labels.values), ~sea)
            np.testing.assert_array_equal(labels.values[sea], expected.predict(land.values[sea]))
            np.testing.assert_array_equal(np.isnan(found.score_samples(cube).values), ~sea)
            np.testing.assert_array_equal(np.isnan(found.predict_proba(cube).values[..., 0]), ~sea)
            labels.to_zarr(tmp_path / "labels.zarr", mode="w")
            stored = xr.open_zarr(tmp_path / "labels.zarr", mask_and_scale=False).labels
            assert stored.dtype == np.int32
            np.testing.assert_array_equal(stored.values[~sea], -1)
            xr.testing.assert_equal(xr.open_zarr(tmp_path / "labels.zarr").labels.compute(), labels.compute())
            labels.to_netcdf(tmp_path / "labels.nc", engine="scipy")
            with xr.open_dataset(tmp_path / "labels.nc", engine="scipy") as again:
                np.testing.assert_array_equal(again.labels.values, labels.values)

    def test_imputed_values(self):
        lacking = CUBE.where((CUBE.area > 7) | (CUBE.band != "salinity")).chunk(CHUNKS)
        model = mixture(missing="marginalise").fit(CUBE, features="band")
        found = model.impute(lacking)
        assert found.dims == ("time", "lat", "lon", "band")
        xr.testing.assert_identical(found.band.variable, CUBE.band.variable)
        of_set = model.impute(lacking.drop_vars(["centre", "by_band_and_lat"]).to_dataset("band"))
        assert of_set.feature.values.tolist() == NAMES
        np.testing.assert_allclose(
            found.values.reshape(-1, D), model.impute(lacking.values.reshape(-1, D)), rtol=1e-9
        )

    @pytest.mark.parametrize("data", [CUBE.sel(band=NAMES[:1]).chunk(CHUNKS), SET], ids=["array", "set"])
    def test_expected_features_have_their_names(self, data, fitted):
        found = fitted.conditional_mean(data, NAMES[:1])
        assert found.dims == ("time", "lat", "lon", "feature")
        assert found.feature.values.tolist() == NAMES[1:]
        xr.testing.assert_identical(found.lat.variable, CUBE.lat.variable)
        expected = fitted.conditional_mean(ROWS[:, :1], [0])
        np.testing.assert_allclose(found.values.reshape(-1, D - 1), expected, rtol=1e-9)

    def test_find_the_features_of_the_fit_by_their_names(self, fitted):
        expected = fitted.predict(CUBE, features="band")
        xr.testing.assert_equal(fitted.predict(CUBE), expected)
        xr.testing.assert_equal(fitted.predict(SET), expected)
        more = SET.assign(more=SET.oxygen * 0)
        xr.testing.assert_equal(fitted.predict(more[["more", *reversed(NAMES)]]), expected)

    def test_of_unnamed_features(self, theirs):
        cube = CUBE.drop_vars("band").chunk(CHUNKS)
        found = mixture().fit(cube, features="band")
        assert found.feature_names_in_.tolist() == ["band[0]", "band[1]", "band[2]"]
        np.testing.assert_array_equal(found.predict(cube).values.ravel(), theirs.predict(ROWS))

    def test_fit_predict(self, theirs):
        labels = mixture().fit_predict(CUBE.chunk(CHUNKS), features="band")
        np.testing.assert_array_equal(labels.values.ravel(), theirs.predict(ROWS))

    def test_keep_an_index_of_several_levels(self, fitted):
        stacked = CUBE.stack(cell=("time", "lat"))
        found = fitted.predict(stacked.chunk({"cell": 7}), features="band")
        assert found.dims == ("lon", "cell")
        assert found.indexes["cell"].equals(stacked.indexes["cell"])
        expected = fitted.predict(CUBE).stack(cell=("time", "lat"))
        np.testing.assert_array_equal(found.values, expected.values)


KILLED = (
    KILLED_IN_ITERATION_3
    + """
import xarray as xr
from emtau_dask import GaussianMixture
model = GaussianMixture(3, algorithm="em-tau", random_state=0, tol=1e-9, checkpoint=sys.argv[2])
model.fit(xr.open_zarr(sys.argv[1]), features=["temperature", "salinity", "oxygen"])
"""
)


class TestResuming:
    @pytest.mark.kills
    def test_a_killed_fit(self, stored, tmp_path):
        run = tmp_path / "run.zarr"
        killed = subprocess.run([sys.executable, "-c", KILLED, stored, run], capture_output=True, check=False)
        assert killed.returncode == -9, killed.stderr
        data = xr.open_zarr(stored)
        found = GaussianMixture.resume(run, data)
        expected = GaussianMixture(K, algorithm="em-tau", random_state=0, tol=1e-9).fit(data, features=NAMES)
        assert found.n_iter_ > 3
        assert found.means_.tobytes() == expected.means_.tobytes()

    def test_needs_the_same_chunks_and_features(self, stored, tmp_path):
        run = tmp_path / "run.zarr"
        mixture(checkpoint=run).fit(xr.open_zarr(stored), features=NAMES)
        with pytest.raises(CheckpointMismatchError, match="chunks"):
            GaussianMixture.resume(run, xr.open_zarr(stored).chunk({"time": 1}))
        with pytest.raises(CheckpointMismatchError, match="features"):
            GaussianMixture.resume(run, xr.open_zarr(stored), features=NAMES[::-1])
        found = GaussianMixture.resume(run, xr.open_zarr(stored), max_iter=6)
        assert found.n_iter_ == 6
        assert found.feature_names_in_.tolist() == NAMES


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "features", "said"),
        [
            (CUBE, None, r"dimensions 'time', 'lat', 'lon', 'band'\. Say which one .*features='band'"),
            (CUBE, "bands", r"no dimension 'bands'; it has 'time', .* Did you mean 'band'\?"),
            (CUBE, ["band"], "DataArray: give one of its dimensions"),
            (SET, None, r"Dataset: say which .*salinity \('time', 'lat', 'lon'\)"),
            (SET, "lon", r"'lon' is a dimension of X, which is a Dataset\. Give one of its variables"),
            (SET, ["temprature"], r"no variable 'temprature'\. Did you mean 'temperature'\?"),
            (SET, ["oxygen", "oxygen"], "must be a list of different variables"),
            (SET, [], "must be a list of different variables"),
            (SET, set(NAMES), "must be a list of different variables"),
            (SET, 3, "must be a list of different variables"),
            (SET, ["lat"], r"only dimensions of X\..* give X\['temperature'\] with features='lat'"),
            (SET, ["lat", "lon"], r"\['lat', 'lon'\] are only dimensions of X\."),
            (SET[["temperature"]].isel(time=0, lat=0, lon=0), ["temperature"], "X has no rows"),
            (CUBE[0, 0, 0], "band", r"X has no rows.*expand_dims"),
            (TWICE, "lat", "dimension twice: 'lat', 'lat', 'band'"),
            (TWICE, "band", "dimension twice: 'lat', 'lat', 'band'"),
            (UNKNOWN, "band", r"X\.data\.compute_chunk_sizes\(\)"),
            (ROWS, "band", "X is of the type ndarray"),
            (da.from_array(ROWS), ["a"], "X is of the type Array"),
        ],
    )  # fmt: skip
    def test_of_features(self, data, features, said):
        with pytest.raises(InvalidDataError, match=said):
            mixture().fit(data, features=features)

    @pytest.mark.parametrize(
        ("dtype", "said"),
        [
            ("M8[ns]", "timedelta64"),
            ("O", "astype"),
            ("U5", "astype"),
            ("c16", "real"),
            ("m8[ns]", "timedelta64"),
        ],
    )
    def test_of_other_values_before_anything_is_read(self, dtype, said):
        def fail(block):
            raise AssertionError("read")

        lazy = da.zeros(SHAPE, chunks=2).map_blocks(fail, dtype=dtype, meta=np.empty((0, 0, 0), dtype))
        data = SET.assign(when=(("time", "lat", "lon"), lazy))
        with pytest.raises(InvalidDtypeError, match=rf"X\['when'\] has dtype .*{said}"):
            mixture().fit(data, features=["temperature", "when"])
        with pytest.raises(InvalidDtypeError, match=f"X has dtype .*{said}"):
            mixture().fit(data.when, features="lat")

    @pytest.mark.parametrize(
        ("weights", "said"),
        [
            (np.ones(len(ROWS)), "the rows of X lie in the dimensions 'time', 'lat', 'lon'"),
            (xr.DataArray(np.ones(5), dims="depth"), "'depth' differ"),
            (xr.DataArray(np.ones(5), dims="lat"), "'lat' differ"),
            (xr.DataArray(np.ones(LATS), {"lat": np.arange(LATS)}, "lat"), "other labels than X"),
        ],
    )  # fmt: skip
    def test_of_weights(self, weights, said):
        with pytest.raises(InvalidDataError, match=said):
            mixture().fit(CUBE, features="band", sample_weight=weights)

    def test_of_responsibilities(self):
        with pytest.raises(InvalidDataError, match="responsibilities_init needs an order of the rows"):
            mixture().fit(CUBE, features="band", responsibilities_init=np.full((len(ROWS), K), 1 / K))

    def test_of_other_names_than_those_of_the_fit(self, fitted):
        with pytest.raises(InvalidDataError, match="no variable 'oxygen'"):
            fitted.predict(SET[["temperature", "salinity"]])
        with pytest.raises(
            InvalidDataError, match=r"none of them with the names of the fit, \['temperature'"
        ):
            fitted.predict(CUBE.drop_vars("band"))
        with pytest.raises(InvalidDataError, match="the fit had"):
            fitted.predict(SET, features=NAMES[::-1])

    def test_a_set_whose_variable_has_the_features_of_the_fit_along_a_dimension(self, fitted):
        data = CUBE.drop_vars("by_band_and_lat").to_dataset(name="sea").assign(land=CUBE.lat * 0.5)
        with pytest.raises(InvalidDataError, match=r"along 'band': give X\['sea'\] with features='band'"):
            fitted.predict(data)

    @pytest.mark.parametrize("data", [CUBE, CUBE[0, 0], CUBE[0, 0].chunk()])
    def test_of_labels_in_another_order_than_in_the_fit(self, fitted, data):
        with pytest.raises(InvalidDataError, match=r"'oxygen', 'salinity', 'temperature'.*the fit had"):
            fitted.predict(data.sel(band=NAMES[::-1]))

    def test_of_more_labels_than_in_the_fit_says_how_to_select_them(self):
        levels = CUBE.assign_coords(band=[0.0, 25.0, 50.5])
        found = mixture(means_init=None, precisions_init=None, weights_init=None)
        found.fit(levels.isel(band=[2, 0]), features="band")
        with pytest.raises(InvalidDataError, match=r"Select them: X\.sel\(band=\[50\.5, 0\.0\]\)"):
            found.predict(levels, features="band")

    def test_of_a_dimension_that_is_the_result_s(self, fitted):
        with pytest.raises(InvalidDataError, match=r"rename\(component='of_x'\)"):
            fitted.predict_proba(CUBE.rename(lon="component"))

    def test_a_bad_value_is_named_by_its_feature(self):
        bad = CUBE.copy(deep=True)
        bad[1, 2, 3, 1] = np.nan
        with pytest.raises(InvalidDataError, match="feature 1, 'salinity'"):
            mixture().fit(bad.chunk(CHUNKS), features="band")

    @pytest.mark.parametrize(
        ("name", "features", "said"),
        [
            ("c.nc", None, "features=.'A', 'B'. in Python"),
            ("c.nc", "lat", "must be one dimension of one variable"),
            ("c.nc", {"oxygen"}, "list of one or more different names"),
            ("x.npy", ["a"], "x.npy is none"),
            ("c.zarr", None, "Of a cube name the features.*Name one of the arrays"),
        ],
    )
    def test_of_paths(self, name, features, said, tmp_path):
        SET.to_netcdf(tmp_path / "c.nc")
        SET.to_zarr(tmp_path / "c.zarr")
        np.save(tmp_path / "x.npy", ROWS)
        with pytest.raises(InvalidDataError, match=said):
            mixture().fit(tmp_path / name, features=features)

    def test_variables_of_most_dimensions_are_proposed(self):
        data = xr.Dataset({"crs": 0, "depth": ("lat", np.zeros(LATS))}).merge(SET)
        with pytest.raises(InvalidDataError, match=r"such as features=\['temperature', 'salinity'\]"):
            mixture().fit(data)


@pytest.mark.parametrize("attribute", ["_FillValue", "missing_value", "scale_factor", "add_offset"])
def test_numbers_that_are_not_decoded_are_warned_of(attribute):
    warned = rf"has the attributes '{attribute}', which were not applied.*xarray\.decode_cf"
    with pytest.warns(UserWarning, match=f"X {warned}"):
        mixture().fit(CUBE.assign_attrs({attribute: 2}), features="band")
    data = SET.assign(oxygen=SET.oxygen.assign_attrs({attribute: 2}))
    with pytest.warns(UserWarning, match=rf"X\['oxygen'\] {warned}"):
        mixture().fit(data, features=NAMES)


def test_labels_that_are_whole_numbers_are_called_alike_as_integers_and_as_floats(theirs):
    found = mixture().fit(CUBE.assign_coords(band=[0, 25, 100]), features="band")
    assert_alike(found, theirs)
    labels = found.predict(CUBE.assign_coords(band=[0.0, 25.0, 100.0]))
    np.testing.assert_array_equal(labels.values.ravel(), theirs.predict(ROWS))


def test_on_a_cluster_it_is_the_same(fitted):
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        found = mixture().fit(CUBE.chunk(CHUNKS), features="band")
        labels = found.predict(CUBE.chunk(CHUNKS)).compute()
    assert found.means_.tobytes() == fitted.means_.tobytes()
    xr.testing.assert_equal(labels, fitted.predict(CUBE))


def command(*arguments, code=0):
    ended = emtau(*arguments)
    assert ended.exit_code == code, ended.output
    return ended


class TestTheCommandLine:
    QUICK = ("-k", K, "--algorithm", "em", "--tol", "1e-6")
    VARIABLES = ("--features", ",".join(NAMES))

    @pytest.fixture(autouse=True)
    def place(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("kind", ["2", "2-consolidated", "3", "3-consolidated", "h5netcdf", "scipy"])
    def test_fits_and_labels_any_file(self, kind):
        data, (first, *rest) = SET.chunk({"time": 2, "lat": 4}), kind.split("-")
        name = f"cube.{'zarr' if first in '23' else 'nc'}"
        if first in "23":
            data.to_zarr(name, zarr_format=int(first), consolidated=bool(rest))
        else:
            data.to_netcdf(name, engine=first)
        command("fit", name, *self.VARIABLES, *self.QUICK, "-o", "out")
        model = GaussianMixture.load("out/model.zarr")
        assert model.feature_names_in_.tolist() == NAMES
        with xr.open_zarr("out/labels.zarr") as labels:
            assert labels.attrs["format"] == "emtau-labels"
            assert labels.labels.dtype == np.int32
            np.testing.assert_array_equal(labels.labels, model.predict(SET))
            for coord in ("time", "lat", "area", "season", "height"):
                xr.testing.assert_identical(
                    labels.coords[coord].variable.compute(), SET.coords[coord].variable
                )
        command("predict", "out", name, "again.zarr", "--proba", "--scores", "--outliers", "0.1")
        again = xr.open_zarr("again.zarr")
        np.testing.assert_allclose(again.probabilities, model.predict_proba(SET))
        np.testing.assert_allclose(again.scores, model.score_samples(SET))
        assert (again.outliers == -1).sum() == 24
        model.save("saved.zarr")
        command("report", "saved.zarr", "page.html", "--data", name)
        assert self.VARIABLES[1] in Path("page.html").read_text(encoding="utf-8")

    def test_fits_along_a_dimension(self):
        CUBE.drop_vars("by_band_and_lat").to_dataset(name="sea").assign(land=CUBE.lat * 0.5).to_netcdf("c.nc")
        for name, options in (("one", ()), ("two", ("--array", "sea"))):
            command("fit", "c.nc", "--features", "band", *options, *self.QUICK, "-o", name)
            model = GaussianMixture.load(f"{name}/model.zarr")
            np.testing.assert_array_equal(xr.open_zarr(f"{name}/labels.zarr").labels, model.predict(CUBE))
        two = SET.assign(other=SET.oxygen).to_dataarray("band").to_dataset(name="sea")
        two.isel(band=slice(0, D)).assign(sky=two.sea[:D]).to_netcdf("two.nc")
        command("predict", "one", "two.nc", "named.zarr", "--features", "band", "--array", "sea")
        np.testing.assert_array_equal(xr.open_zarr("named.zarr").labels, model.predict(CUBE))
        command("report", "one", "page.html", "--data", "two.nc", "--features", "band", "--array", "sky")
        command("predict", "one", "c.nc", "again.zarr")
        np.testing.assert_array_equal(xr.open_zarr("again.zarr").labels, model.predict(CUBE))

    @pytest.mark.parametrize("kind", ["nc", "zarr"])
    def test_takes_the_variable_of_the_fit_or_says_that_there_is_none(self, kind):
        sea = CUBE.reset_coords(drop=True)
        both = xr.Dataset({"other": sea * 0.5, "sea": sea})
        for name, data in (("both", both), ("other", both[["other"]])):
            data.to_netcdf(f"{name}.nc") if kind == "nc" else data.to_zarr(f"{name}.zarr")
        command("fit", f"both.{kind}", "--features", "band", "--array", "sea", *self.QUICK, "-o", "out")
        model = GaussianMixture.load("out/model.zarr")
        command("predict", "out", f"both.{kind}", "again.zarr")
        labels = model.predict(both.sea)
        np.testing.assert_array_equal(xr.open_zarr("again.zarr").labels, labels)
        np.testing.assert_array_equal(model.predict(f"both.{kind}"), labels)
        lacking = "no variable 'sea', to which the mixture was fitted; it has the variables other"
        with pytest.raises(InvalidDataError, match=lacking):
            model.predict(f"other.{kind}")
        assert lacking in command("predict", "out", f"other.{kind}", "l.zarr", code=1).stderr
        command("predict", "out", f"other.{kind}", "l.zarr", "--array", "other")
        zarr.open_group("g.zarr", mode="w").create_array("X", data=ROWS)
        command("predict", "out", "g.zarr", "rows.zarr")

    @pytest.mark.parametrize("name", ["c.nc", "c.zarr"])
    def test_says_how_to_give_the_features_of_the_fit_again(self, fitted, name):
        sea = CUBE.reset_coords(drop=True)
        data = xr.Dataset({"cell": sea[:, :, 0, 0] * 0.5, "sea": sea, "levels": sea[0, 0, 0]})
        data.to_netcdf(name) if name == "c.nc" else data.to_zarr(name)
        fitted.save("m.zarr")
        said = command("predict", "m.zarr", name, "l.zarr", code=1).stderr
        assert "read with --features band --array sea or --features band --array levels." in said
        command("predict", "m.zarr", name, "l.zarr", "--features", "band", "--array", "sea")

    def test_is_what_a_config_says_and_resumed(self):
        holes = SET.where(SET.area > 7).assign(share=np.cos(np.deg2rad(SET.lat)))
        holes.to_netcdf("c.nc")
        options = ("--missing", "drop", "--set", "data.weights=share", "--set", "checkpoint.path=run.zarr")
        command("fit", "c.nc", *self.VARIABLES, *self.QUICK, *options, "--max-iter", 2, "-o", "out", code=3)
        command("resume", "run.zarr", "--set", "stop.max_iter=500")
        found = GaussianMixture.load("out/model.zarr")
        settings = {"algorithm": "em", "tol": 1e-6, "missing": "drop", "random_state": 0}
        expected = GaussianMixture(K, **settings)
        expected.fit(xr.open_dataset("c.nc"), features=NAMES, sample_weight=holes.share)
        assert found.means_.tobytes() == expected.means_.tobytes()
        labels = xr.open_zarr("out/labels.zarr").labels
        np.testing.assert_array_equal(labels, expected.predict(holes))
        assert labels.encoding["_FillValue"] == -1
        values = {"data": {"path": "c.nc", "features": NAMES, "weights": "share"}}
        values |= {"model": {"n_components": K, "missing": "drop"}, "algorithm": {"name": "em"}}
        values |= {"stop": {"tol": 1e-6}, "output": {"directory": "other"}}
        Path("c.yaml").write_text(json.dumps(values), encoding="utf-8")
        command("fit", "c.yaml")
        assert GaussianMixture.load("other/model.zarr").means_.tobytes() == expected.means_.tobytes()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("c.nc",), "c.nc has the variables temperature (time, lat, lon), salinity"),
            (("c.nc", "--features", "temperatur"), "no variable 'temperatur'. Did you mean 'temperature'?"),
            (("c.nc", "--features", "lat"), "Name the variable: --array NAME"),
            (("c.nc", "--features", "lat", "--array", "x"), "has no variable 'x'"),
            (("c.nc", "--features", "lat", "--columns", "a"), "without dataset and columns"),
            (("t.csv", "--features", "a"), "t.csv is none; leave them out"),
            (("c.nc", *VARIABLES, "--set", "data.weights=w"), "data.weights = 'w' is not a variable of c.nc"),
            (("c.nc", *VARIABLES, "--set", "output.labels=l.csv"), "a name such as out/l.zarr"),
            (("bad.nc", *VARIABLES), "bad.nc is no netCDF or HDF5 file"),
            (("g.zarr", *VARIABLES), "g.zarr has arrays without names of dimensions"),
            (("none.nc", *VARIABLES), "none.nc does not exist"),
        ],
    )
    def test_refusals(self, arguments, said):
        SET.to_netcdf("c.nc")
        Path("t.csv").write_text("a,b\n1,2\n", encoding="utf-8")
        Path("bad.nc").write_bytes(b"no netCDF")
        zarr.open_group("g.zarr", mode="w").create_array("X", data=ROWS)
        ended = emtau("fit", *arguments, *self.QUICK, "-o", "out")
        assert ended.exit_code in (1, 2)
        assert said in " ".join(ended.stderr.split())
        assert not Path("out/model.zarr").exists()

    def test_groups_that_xarray_did_not_write_are_labelled_as_ever(self):
        mixture().fit(CUBE, features="band").save("model.zarr")
        zarr.open_group("g.zarr", mode="w").create_array("X", data=ROWS)
        command("predict", "model.zarr", "g.zarr", "out.zarr")
        labels = zarr.open_group("out.zarr", mode="r")["labels"][:]
        np.testing.assert_array_equal(labels, mixture().fit(ROWS).predict(ROWS))

    @pytest.mark.parametrize("cells", [CUBE, CUBE[0, 0]])
    @pytest.mark.parametrize("name", ["c.nc", "c.zarr"])
    def test_labels_in_another_order_than_in_the_fit_are_refused(self, fitted, name, cells):
        swapped = cells.sel(band=NAMES[::-1]).reset_coords(drop=True).to_dataset(name="x")
        swapped.to_netcdf(name) if name == "c.nc" else swapped.to_zarr(name)
        fitted.save("m.zarr")
        assert "the fit had ['temperature'" in command("predict", "m.zarr", name, "l.zarr", code=1).stderr

    @pytest.mark.parametrize(
        "taken",
        [
            SET.rename(lon="component"),
            SET.assign_coords(component=SET.lat),
            SET.assign_coords(scores=SET.lat),
            SET.rename(time="labels"),
        ],
    )
    def test_names_of_the_results_are_refused_in_the_data(self, fitted, taken):
        fitted.save("m.zarr")
        taken.to_netcdf("c.nc")
        ended = command("predict", "m.zarr", "c.nc", "l.zarr", "--proba", "--scores", code=1)
        assert "a dimension or a coordinate" in ended.stderr
        assert not Path("l.zarr").exists()

    def test_says_which_extra_is_missing(self, monkeypatch):
        SET.to_netcdf("c.nc")
        monkeypatch.setitem(sys.modules, "xarray", None)
        ended = emtau("fit", "c.nc", *self.VARIABLES, *self.QUICK)
        assert ended.exit_code == 1
        assert "needs xarray; install it with: pip install 'emtau_dask[xarray]'" in ended.stderr


def test_the_number_of_components_is_chosen_on_a_cube():
    chosen = select_components(SET, [1, 2], features=NAMES, random_state=0)
    assert chosen.best_estimator_.feature_names_in_.tolist() == NAMES
    assert [record.n_components for record in chosen.table_] == [1, 2]


def test_attributes_that_change_no_number_are_not_warned_about():
    """rioxarray leaves them where it decodes."""
    array = xr.DataArray(np.random.default_rng(0).normal(size=(40, 3)), dims=("row", "band"))
    array.attrs |= {"scale_factor": 1.0, "add_offset": 0.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*were not applied")
        GaussianMixture(1).fit(array, features="band")
