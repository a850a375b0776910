"""Bad weights, responsibilities, settings and paths are refused with value, limit and remedy."""

import math

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from refusals import ROWS, in_dask, in_numpy, in_zarr, mixture, refused

from emtau_dask import ClusterError, ConfigError, EMTau, EmtauError, InvalidDataError
from emtau_dask.data.opening import open_source


@pytest.fixture(scope="module")
def model():
    return mixture().fit(ROWS)


class TestWeights:
    @pytest.mark.parametrize(("bad", "word"), [(-0.5, r"-0\.5"), (np.nan, "nan"), (np.inf, "inf")])
    @pytest.mark.parametrize("kind", [in_numpy, in_dask, in_zarr])
    def test_a_bad_weight_is_named_with_its_row(self, kind, tmp_path, bad, word):
        weights = np.ones(60)
        weights[30] = bad
        match = rf"sample_weight is {word} at row 30 \(chunk 0\); weights must be finite and at least 0"
        refused(ROWS, match, sample_weight=kind(weights, tmp_path))

    @pytest.mark.parametrize("kind", [in_numpy, in_dask])
    def test_all_zero(self, kind, tmp_path):
        message = refused(ROWS, "sample_weight", sample_weight=kind(np.zeros(60), tmp_path))
        assert "at least one row must have a positive weight" in message

    @pytest.mark.parametrize("n", [0, 59, 61])
    def test_one_for_each_row(self, n):
        refused(ROWS, rf"sample_weight has {n} values, X has 60 rows", sample_weight=np.ones(n))

    @pytest.mark.parametrize("weights", [np.ones((60, 1)), np.ones((60, 2)), 2.0], ids=np.shape)
    def test_wrong_axes(self, weights):
        refused(ROWS, "sample_weight", sample_weight=weights)

    @pytest.mark.parametrize("dtype", [complex, str, "datetime64[s]"])
    @pytest.mark.parametrize("kind", [in_numpy, in_dask])
    def test_wrong_dtypes(self, kind, tmp_path, dtype):
        weights = np.ones(60, dtype=int).astype(dtype)
        refused(ROWS, "sample_weight", sample_weight=kind(weights, tmp_path))

    def test_weights_whose_sum_overflows(self):
        refused(ROWS, error=EmtauError, sample_weight=np.full(60, 1e308))


class TestResponsibilities:
    @pytest.mark.parametrize("shape", [(60, 3), (59, 2), (60,), (60, 2, 1)], ids=str)
    def test_wrong_shape(self, shape):
        refused(ROWS, r"responsibilities_init", responsibilities_init=np.full(shape, 0.5))

    @pytest.mark.parametrize("row", [[0.5, 0.4], [1.5, -0.5], [np.nan, 0.5], [np.inf, 0.0]], ids=str)
    @pytest.mark.parametrize("kind", [in_numpy, in_dask])
    def test_a_bad_row_is_named(self, kind, tmp_path, row):
        responsibilities = np.full((60, 2), 0.5)
        responsibilities[30] = row
        match = "responsibilities_init of row 30 .*sum to 1 within 1e-6"
        refused(ROWS, match, responsibilities_init=kind(responsibilities, tmp_path))

    def test_sums_within_1e6_will_do(self):
        responsibilities = np.random.default_rng(0).dirichlet([1, 1], size=60) * (1 + 9e-7)
        assert mixture().fit(ROWS, responsibilities_init=responsibilities).converged_


IMPOSSIBLE = [
    ({"n_components": 0}, r"n_components is 0; it must be an integer of at least 1"),
    ({"n_components": 2.0}, r"n_components is 2\.0; .*integer"),
    ({"n_components": "two"}, r"n_components is 'two'; .*integer"),
    ({"n_components": True}, r"n_components is True; .*integer"),
    ({"covariance_type": "round"}, r"covariance_type is 'round'; .*'full', 'tied', 'diag', 'spherical'"),
    ({"covariance_type": "fulll"}, r"covariance_type is 'fulll'; .*; the nearest valid value is full\."),
    ({"algorithm": "emtau"}, r"algorithm is 'emtau'; .*'em', 'em-tau', 'em-star', 'em-lazy'"),
    ({"algorithm": EMTau(tau=0)}, r"tau=0.*at least 1"),
    ({"tol": -1e-3}, r"tol is -0\.001; .*at least 0"),
    ({"tol": math.nan}, r"tol is nan; .*finite"),
    ({"tol": None}, r"tol is None; .*number"),
    ({"reg_covar": -1}, r"reg_covar is -1; .*at least 0"),
    ({"reg_covar": math.inf}, r"reg_covar is inf; .*finite"),
    ({"max_iter": -1}, r"max_iter is -1; .*at least 0"),
    ({"max_iter": 10.5}, r"max_iter is 10\.5; .*integer"),
    ({"n_init": 0}, r"n_init is 0; .*at least 1"),
    ({"init_params": "k-mean"}, r"init_params is 'k-mean'; .*'kmeans', 'k-means\+\+', 'random'"),
    ({"checkpoint_every": 0}, r"checkpoint_every is 0; .*at least 1"),
]


class TestSettings:
    @pytest.mark.parametrize(("settings", "match"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
    def test_an_impossible_setting(self, settings, match):
        refused(ROWS, match, ConfigError, settings=settings)

    @pytest.mark.parametrize(
        "settings",
        [{"warm_start": "yes"}, {"verbose": "loud"}, {"random_state": "seed"}, {"random_state": -1}],
        ids=str,
    )
    def test_an_impossible_setting_of_scikit_learns(self, settings):
        refused(ROWS, f"{next(iter(settings))}", error=EmtauError, settings=settings)

    def test_settings_and_given_starts_are_refused_before_the_data_is_touched(self):
        def explode(block):
            raise AssertionError("the data was computed")

        X = da.from_array(ROWS, chunks=25).map_blocks(explode, dtype=float, meta=np.empty((0, 0)))
        refused(X, "max_iter", ConfigError, settings={"max_iter": -1})
        refused(X, "means_init|'means'", settings={"means_init": np.zeros((3, 3))})

    def test_warm_start_with_other_features_or_another_number_of_components(self):
        model = mixture(warm_start=True).fit(ROWS)
        with pytest.raises(InvalidDataError, match=r"warm_start: .*Set warm_start=False"):
            model.fit(np.ones((60, 3)) * ROWS[:, :1])
        with pytest.raises(InvalidDataError, match=r"warm_start: .*Set warm_start=False"):
            model.set_params(n_components=3).fit(ROWS)

    @pytest.mark.parametrize("n_samples", [0, -1, 2.5, "3"])
    def test_samples_that_cannot_be_drawn(self, model, n_samples):
        with pytest.raises(InvalidDataError, match=f"'n_samples': {n_samples!r}"):
            model.sample(n_samples)

    @pytest.mark.parametrize("setting", ["distributed", "dask.distributed"])
    def test_a_scheduler_without_a_client(self, setting):
        match = f"'{setting}', but there is no active client: create a Client"
        with dask.config.set(scheduler=setting), pytest.raises(ClusterError, match=match):
            mixture().fit(ROWS)


class TestPaths:
    def test_nothing_there(self, tmp_path):
        with pytest.raises(InvalidDataError, match=r"none\.zarr does not exist"):
            open_source(str(tmp_path / "none.zarr"))

    def test_no_zarr(self, tmp_path):
        (tmp_path / "x.zarr").mkdir()
        with pytest.raises(InvalidDataError, match="no zarr array or group"):
            open_source(str(tmp_path / "x.zarr"))

    @pytest.mark.parametrize("suffix", ["npy", "parquet"])
    def test_no_such_file(self, tmp_path, suffix):
        (tmp_path / f"x.{suffix}").write_bytes(b"nonsense")
        with pytest.raises(InvalidDataError, match=rf"x\.{suffix}"):
            open_source(str(tmp_path / f"x.{suffix}"))

    def test_a_group_that_does_not_say_which(self, tmp_path):
        group = zarr.create_group(tmp_path / "x.zarr")
        for name in ("a", "b"):
            group.create_array(name, data=ROWS)
        with pytest.raises(InvalidDataError, match=r"\['a', 'b'\]\. Name one"):
            open_source(str(tmp_path / "x.zarr"))

    def test_a_chunk_that_cannot_be_read(self, tmp_path):
        X = in_zarr(ROWS, tmp_path)
        (tmp_path / "x.zarr/c/1/0").write_bytes(b"nonsense")
        refused(X, r"rows 25 to 50 of the zarr array .*x\.zarr.* cannot be read")
