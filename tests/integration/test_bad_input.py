"""Bad input is refused with an error of ours that names the value, the limit and the remedy."""

import math

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import (
    ConfigError,
    EMTau,
    EmtauError,
    GaussianMixture,
    InvalidDataError,
    SingularComponentError,
)
from emtau_dask.storage import open_source

ROWS = np.random.default_rng(0).normal(size=(60, 2))
ROWS.setflags(write=False)


def in_numpy(array, tmp_path):
    return array


def in_dask(array, tmp_path):
    return da.from_array(array, chunks=25)


def in_zarr(array, tmp_path):
    return zarr.create_array(
        store=tmp_path / "x.zarr", data=array, chunks=tuple(min(25, n) for n in array.shape)
    )


def from_zarr(array, tmp_path):
    in_zarr(array, tmp_path)
    return da.from_zarr(str(tmp_path / "x.zarr"))


def in_npy(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    return open_source(str(tmp_path / "x.npy"))


KINDS = [in_numpy, in_dask, in_zarr, from_zarr, in_npy]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model():
    return mixture().fit(ROWS)


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


class TestShapes:
    def test_one_dimensional_data(self, kind, tmp_path):
        refused(
            kind(np.arange(60.0), tmp_path), r"(?s)(Expected 2D|shape \(60,\).*expected 2).*reshape\(-1, 1\)"
        )

    def test_three_dimensional_data(self, kind, tmp_path):
        refused(kind(np.zeros((4, 3, 2)), tmp_path), r"dim 3|shape \(4, 3, 2\) \(3 axes\); expected 2")

    @pytest.mark.parametrize("scalar", [np.float64(3), da.from_array(np.array(3.0)), 3.0], ids=repr)
    def test_a_scalar(self, scalar):
        refused(scalar, r"scalar array|shape \(\)")

    def test_no_rows(self, kind, tmp_path):
        if kind in (in_zarr, from_zarr):
            zarr.create_array(store=tmp_path / "e.zarr", shape=(0, 2), chunks=(5, 2), dtype="f8")
            X = zarr.open_array(tmp_path / "e.zarr")
            X = X if kind is in_zarr else da.from_zarr(str(tmp_path / "e.zarr"))
        else:
            X = kind(ROWS[:0], tmp_path)
        refused(X, r"0 sample\(s\) \(shape=\(0, 2\)\) while a minimum of 1 is required")

    def test_no_features(self):
        refused(np.empty((60, 0)), r"0 feature\(s\) \(shape=\(60, 0\)\) while a minimum of 1 is required")

    def test_no_features_in_dask(self):
        refused(da.zeros((60, 0)), r"0 feature\(s\) \(shape=\(60, 0\)\) while a minimum of 1 is required")

    def test_chunks_without_any_row(self):
        refused(da.zeros((0, 2), chunks=((0, 0), 2)), r"0 sample\(s\)")

    def test_fewer_rows_than_components(self, kind, tmp_path):
        message = r"n_components = 70, n_samples = 60\. Lower n_components or give more rows"
        refused(kind(ROWS, tmp_path), message, settings={"n_components": 70})

    def test_fewer_rows_of_positive_weight_than_components(self):
        weights = np.zeros(60)
        weights[7] = 1
        refused(ROWS, r"n_components = 2, n_samples = 1 of positive weight", sample_weight=weights)

    @pytest.mark.parametrize("X", [None, "points.zarr", object(), {"a": 1}, [[1, 2], [3]]], ids=repr)
    def test_what_is_no_array(self, X):
        refused(X)

    @pytest.mark.parametrize("method", ["predict", "predict_proba", "score_samples", "score", "bic", "aic"])
    def test_other_features_than_fitted(self, model, kind, tmp_path, method):
        with pytest.raises(InvalidDataError, match="X has 3 features, but GaussianMixture is expecting 2"):
            getattr(model, method)(kind(np.zeros((5, 3)), tmp_path))


class TestValues:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_value_that_is_not_finite_is_named_with_chunk_and_row(self, kind, tmp_path, bad):
        rows = ROWS.copy()
        rows[30, 1] = rows[57, 0] = bad
        chunked = kind not in (in_numpy, in_npy)
        place = r"row 30 \(chunk 1, its row 5\)" if chunked else r"row 30 \(chunk 0, its row 30\)"
        word = "NaN" if math.isnan(bad) else "infinity"
        refused(kind(rows, tmp_path), rf"{place} of X contains {word}.*(feature 1).*drop or impute the row")

    @pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
    def test_nan_is_found_by_every_start(self, init):
        rows = ROWS.copy()
        rows[30] = np.nan
        refused(rows, "row 30 .*NaN", settings={"init_params": init})

    @pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
    def test_the_first_bad_row_is_named_though_a_start_draws_another(self, init):
        """Half of 2,000 rows are bad, row 100 is the first; a start that samples 128 rows rarely draws it."""
        rows = np.random.default_rng(0).normal(size=(2000, 1))
        rows[100] = rows[1000:] = np.nan
        X = da.from_array(rows, chunks=300)
        refused(X, r"row 100 \(chunk 0, its row 100\)", settings={"init_params": init})

    def test_nan_is_found_from_given_parameters(self):
        rows = ROWS.copy()
        rows[30] = np.nan
        start = {"weights_init": [0.5, 0.5], "means_init": ROWS[:2], "precisions_init": [np.eye(2)] * 2}
        refused(rows, "row 30 .*NaN", settings=start)

    def test_nan_in_a_row_of_weight_zero_is_as_if_absent(self):
        rows = ROWS.copy()
        rows[30] = np.nan
        weights = np.ones(60)
        weights[30] = 0
        assert np.isfinite(mixture().fit(rows, sample_weight=weights).means_).all()

    @pytest.mark.parametrize("method", ["predict", "predict_proba", "score_samples"])
    def test_nan_is_named_by_predictions(self, model, kind, tmp_path, method):
        rows = ROWS.copy()
        rows[30] = np.nan
        with pytest.raises(InvalidDataError, match=r"row 30 .*NaN"):
            np.asarray(getattr(model, method)(kind(rows, tmp_path)))

    def test_rows_beyond_the_range_of_float64(self):
        rows = ROWS.copy()
        rows[30] = 1e200
        refused(rows, error=EmtauError)

    def test_identical_rows_name_component_weight_and_remedies(self):
        match = "increase reg_covar.*(component 0|shared)"
        refused(np.ones((60, 2)), match, SingularComponentError, settings={"n_components": 1, "reg_covar": 0})


NOT_REAL = {
    "complex": ROWS.astype(complex),
    "object": ROWS.astype(object),
    "objects": np.array([[None, "a"]] * 60, dtype=object),
    "strings": ROWS.astype(str),
    "bytes": ROWS.astype("S8"),
    "dates": np.zeros((60, 2), dtype="datetime64[s]"),
    "records": np.zeros((60, 2), dtype=[("a", float)]),
    "long double": ROWS.astype(np.longdouble),
}


class TestDtypes:
    @pytest.mark.parametrize("name", ["complex", "objects", "strings", "dates", "records"])
    def test_in_numpy(self, name):
        refused(NOT_REAL[name])

    @pytest.mark.parametrize("name", NOT_REAL)
    def test_in_dask(self, name):
        refused(da.from_array(NOT_REAL[name], chunks=25), r"X has dtype .*\.astype\('float64'\)")

    @pytest.mark.parametrize("name", ["complex", "strings", "dates"])
    @pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
    def test_in_zarr(self, name, tmp_path):
        refused(in_zarr(NOT_REAL[name], tmp_path), r"X has dtype .*\.astype\('float64'\)")

    def test_numbers_in_objects_are_taken_from_memory(self, model):
        """As scikit-learn does."""
        assert np.array_equal(mixture().fit(NOT_REAL["object"]).means_, model.means_)

    def test_an_npy_file_of_objects_is_refused_and_not_unpickled(self, tmp_path):
        np.save(tmp_path / "x.npy", NOT_REAL["objects"], allow_pickle=True)
        with pytest.raises(InvalidDataError, match=r"x\.npy cannot be memory-mapped.*numpy\.save"):
            open_source(str(tmp_path / "x.npy"))

    @pytest.mark.parametrize(
        "values",
        [pa.array(["a"] * 60), pa.array([[1.0]] * 60), pa.array([b"x"] * 60), pa.array([None] * 60)],
        ids=lambda values: str(values.type),
    )
    def test_columns_of_parquet_that_are_no_numbers(self, values, tmp_path):
        pq.write_table(pa.table({"x": ROWS[:, 0], "name": values}), tmp_path / "x.parquet")
        with pytest.raises(InvalidDataError, match="'name' of .* holds .*Choose the numeric columns"):
            open_source(str(tmp_path / "x.parquet"))

    def test_timestamps_of_parquet(self, tmp_path):
        stamps = pa.array([0] * 60, pa.timestamp("s"))
        pq.write_table(pa.table({"x": ROWS[:, 0], "time": stamps}), tmp_path / "x.parquet")
        with pytest.raises(InvalidDataError, match="'time' of .* holds timestamp"):
            open_source(str(tmp_path / "x.parquet"))

    def test_a_column_that_is_not_there(self, tmp_path):
        pq.write_table(pa.table({"x": ROWS[:, 0], "y": ROWS[:, 1]}), tmp_path / "x.parquet")
        with pytest.raises(InvalidDataError, match="has no column 'z'; its columns are x, y"):
            open_source(str(tmp_path / "x.parquet"), columns=["x", "z"])


class TestUnknownChunks:
    @staticmethod
    def unknown():
        array = da.from_array(ROWS, chunks=(25, 2))
        return array[array[:, 0] < 10]

    def test_they_work_with_a_note(self):
        with pytest.warns(UserWarning, match=r"X has unknown chunk sizes.*compute_chunk_sizes\(\) once"):
            fitted = mixture().fit(self.unknown())
        assert np.array_equal(fitted.means_, mixture().fit(da.from_array(ROWS, chunks=(25, 2))).means_)

    @pytest.mark.filterwarnings("ignore:X has unknown chunk sizes")
    def test_the_users_array_is_left_as_it_was(self):
        array = self.unknown()
        mixture().fit(array)
        assert math.isnan(array.shape[0])

    def test_predictions_need_no_sizes(self, model):
        assert np.array_equal(model.predict(self.unknown()).compute(), model.predict(ROWS))

    @pytest.mark.filterwarnings("ignore:X has unknown chunk sizes")
    def test_an_unknown_number_of_features_is_found(self):
        array = da.from_array(ROWS, chunks=(25, 1))
        fitted = mixture().fit(array[:, array[0] < 10])
        assert fitted.n_features_in_ == 2
        assert isinstance(fitted.n_features_in_, int)


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

    def test_settings_are_refused_before_the_data_is_touched(self):
        def explode(block):
            raise AssertionError("the data was computed")

        X = da.from_array(ROWS, chunks=25).map_blocks(explode, dtype=float, meta=np.empty((0, 0)))
        refused(X, "max_iter", ConfigError, settings={"max_iter": -1})

    def test_given_starts_are_refused_before_the_data_is_touched(self):
        def explode(block):
            raise AssertionError("the data was computed")

        X = da.from_array(ROWS, chunks=25).map_blocks(explode, dtype=float, meta=np.empty((0, 0)))
        refused(X, "means_init|'means'", settings={"means_init": np.zeros((3, 3))})

    def test_warm_start_with_another_number_of_components(self):
        model = mixture(warm_start=True).fit(ROWS)
        with pytest.raises(InvalidDataError, match="warm_start: .*Set warm_start=False"):
            model.set_params(n_components=3).fit(ROWS)

    def test_warm_start_with_other_features(self):
        model = mixture(warm_start=True).fit(ROWS)
        with pytest.raises(InvalidDataError, match="warm_start: .*Set warm_start=False"):
            model.fit(np.ones((60, 3)) * ROWS[:, :1])

    @pytest.mark.parametrize("n_samples", [0, -1, 2.5, "3"])
    def test_samples_that_cannot_be_drawn(self, model, n_samples):
        with pytest.raises(InvalidDataError, match=f"'n_samples': {n_samples!r}"):
            model.sample(n_samples)


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


def test_a_fit_that_fails_leaves_no_fitted_attributes():
    rows = ROWS.copy()
    rows[30] = np.nan
    model = mixture()
    with pytest.raises(InvalidDataError):
        model.fit(rows)
    assert not hasattr(model, "means_")


def test_a_failed_fit_leaves_the_last_one_in_place():
    model = mixture().fit(ROWS)
    before = model.means_.copy()
    with pytest.raises(EmtauError):
        model.set_params(max_iter=-1).fit(ROWS + 1)
    assert np.array_equal(model.means_, before)


def test_max_iter_is_a_warning_and_not_an_error():
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        mixture(max_iter=1).fit(ROWS)
