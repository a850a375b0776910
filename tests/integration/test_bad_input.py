"""Bad data is refused with an error of ours that names the value, the limit and the remedy."""

import ast
import math
import re

import dask.array as da
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
import zarr
from refusals import KINDS, ROWS, from_zarr, in_npy, in_numpy, in_zarr, mixture, refused

from emtau_dask import EmtauError, GaussianMixture, InvalidDataError, SingularComponentError
from emtau_dask.cli.options import names_in
from emtau_dask.data.opening import open_source


@pytest.fixture(scope="module")
def model():
    return mixture().fit(ROWS)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


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

    @pytest.mark.parametrize("X", [np.empty((60, 0)), da.zeros((60, 0))], ids=["numpy", "dask"])
    def test_no_features(self, X):
        refused(X, r"0 feature\(s\) \(shape=\(60, 0\)\) while a minimum of 1 is required")

    def test_chunks_without_any_row(self):
        refused(da.zeros((0, 2), chunks=((0, 0), 2)), r"0 sample\(s\)")

    def test_fewer_rows_than_components(self, kind, tmp_path):
        message = r"n_components = 70, n_samples = 60\. Lower n_components or give more rows"
        refused(kind(ROWS, tmp_path), message, settings={"n_components": 70})

    def test_fewer_rows_of_positive_weight_than_components(self):
        weights = np.zeros(60)
        weights[7] = 1
        refused(ROWS, r"n_components = 2, n_samples = 1 of positive weight", sample_weight=weights)

    @pytest.mark.parametrize("X", [None, "points.zarr", ..., {"a": 1}, [[1, 2], [3]]], ids=repr)
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
        place = r"row 30 \(chunk 1, its row 5\)" if chunked else "row 30"
        word = "NaN" if math.isnan(bad) else "infinity"
        refused(kind(rows, tmp_path), rf"{place} of X contains {word}.*(feature 1).*drop or impute the row")

    @pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
    def test_the_first_bad_row_is_named_though_a_start_draws_another(self, init):
        """Half of 2,000 rows are bad, row 100 is the first; a start that samples 128 rows rarely draws it."""
        rows = np.random.default_rng(0).normal(size=(2000, 1))
        rows[100] = rows[1000:] = np.nan
        X = da.from_array(rows, chunks=300)
        refused(X, "row 100 of X", settings={"init_params": init})

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

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_float32_values_are_compared_with_the_limit_of_float64(self):
        single, weights = ROWS.astype("float32"), np.full(60, 2, dtype="float32")
        assert np.isfinite(mixture().fit(single, sample_weight=weights).means_).all()
        weights[30] = np.inf
        refused(single, r"sample_weight is inf at row 30", sample_weight=weights)
        single[40, 1] = np.inf
        start = {"weights_init": [0.5, 0.5], "means_init": ROWS[:2], "precisions_init": [np.eye(2)] * 2}
        refused(single, r"row 40 .*infinity \(inf\) \(feature 1\)", settings=start)

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


CONVERT = r"\.astype\('float64'\)"
REMEDIES = {
    "complex": r"X\.real",
    "dates": r"\(X - X\.min\(\)\) / numpy\.timedelta64\(1, 's'\)",
    "records": r"structured_to_unstructured\(X\)",
}


class TestDtypes:
    @pytest.mark.parametrize("name", ["complex", "objects", "strings", "dates", "records"])
    def test_in_numpy(self, name):
        refused(NOT_REAL[name])

    @pytest.mark.parametrize("name", NOT_REAL)
    def test_in_dask(self, name):
        refused(da.from_array(NOT_REAL[name], chunks=25), f"X has dtype .*{REMEDIES.get(name, CONVERT)}")

    @pytest.mark.parametrize("name", ["complex", "strings", "dates"])
    @pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
    def test_in_zarr(self, name, tmp_path):
        refused(in_zarr(NOT_REAL[name], tmp_path), f"X has dtype .*{REMEDIES.get(name, CONVERT)}")

    def test_numbers_in_objects_are_taken_from_memory(self, model):
        """As scikit-learn does."""
        assert np.array_equal(mixture().fit(NOT_REAL["object"]).means_, model.means_)

    def test_an_npy_file_of_objects_is_refused_and_not_unpickled(self, tmp_path):
        np.save(tmp_path / "x.npy", NOT_REAL["objects"], allow_pickle=True)
        with pytest.raises(InvalidDataError, match=r"x\.npy cannot be read.*numpy\.save"):
            open_source(str(tmp_path / "x.npy"))

    @pytest.mark.parametrize(
        "values",
        [pa.array(["a"] * 60), pa.array([[1.0]] * 60), pa.array([b"x"] * 60), pa.array([None] * 60)],
        ids=lambda values: str(values.type),
    )
    def test_columns_of_parquet_that_are_no_numbers(self, values, tmp_path):
        pq.write_table(pa.table({"x": ROWS[:, 0], "name": values}), tmp_path / "x.parquet")
        with pytest.raises(InvalidDataError, match=r"'name' of .* holds .*Choose the numeric columns"):
            open_source(str(tmp_path / "x.parquet"))

    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_all_columns_of_text_are_named_and_those_of_numbers_offered(self, ending, tmp_path):
        table = {f"t{i}": ["a"] * 60 for i in range(7)} | {"x, m": ROWS[:, 0], "y": ROWS[:, 1]}
        frame, path = pd.DataFrame(table), tmp_path / f"x.{ending}"
        frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
        with pytest.raises(InvalidDataError) as caught:
            GaussianMixture(2).fit(str(path))
        message = str(caught.value)
        assert message.startswith("columns 't0', 't1', 't2', 't3', 't4' and 2 more of ")
        option = re.search(r"--columns '(.*?)', columns=", message)[1]
        columns = ast.literal_eval(re.search(r"columns=(\[.*?\])", message)[1])
        assert columns == ["x, m", "y"] == names_in(option)
        GaussianMixture(2, random_state=0).fit(str(path), columns=columns)

    def test_the_name_nearest_to_a_wrong_path_is_given(self, tmp_path):
        (tmp_path / "penguins.csv").write_text("a\n1\n")
        with pytest.raises(
            InvalidDataError, match=r"does not exist\. Did you mean 'penguins\.csv'\? .*netCDF"
        ):
            open_source(str(tmp_path / "penguin.csv"))
        with pytest.raises(InvalidDataError, match=r"does not exist\. Give"):
            open_source(str(tmp_path / "nowhere" / "penguin.csv"))

    def test_an_offer_of_many_columns_is_left_out(self, tmp_path):
        table = {"name": ["a"] * 60} | {f"feature number {i}": ROWS[:, 0] for i in range(100)}
        pd.DataFrame(table).to_parquet(tmp_path / "x.parquet")
        with pytest.raises(InvalidDataError, match=r"numeric columns \(columns=, --columns\);"):
            open_source(str(tmp_path / "x.parquet"))

    def test_timestamps_of_parquet(self, tmp_path):
        stamps = pa.array([0] * 60, pa.timestamp("s"))
        pq.write_table(pa.table({"x": ROWS[:, 0], "time": stamps}), tmp_path / "x.parquet")
        with pytest.raises(InvalidDataError, match=r"'time' of .* holds timestamp"):
            open_source(str(tmp_path / "x.parquet"))


class TestWhatCannotBeReadAgain:
    """Or is not dense: the error says what it is and how to make rows of it."""

    @pytest.mark.parametrize("make", [iter, lambda rows: (row for row in rows), lambda rows: map(list, rows)])
    def test_iterators(self, model, make):
        words = r"is a .* whose rows can be read only once.*numpy\.array\(list\(.*dask array"
        refused(make(ROWS), f"X {words}")
        refused(ROWS, f"sample_weight {words}", sample_weight=make(np.ones(60)))
        with pytest.raises(InvalidDataError, match=words):
            model.predict(make(ROWS))

    def test_lazy_frames_of_polars(self, model):
        lazy, words = polars.LazyFrame({"x": [1.0, 2.0]}), r"is a polars LazyFrame.*collect\(\).*sink_parquet"
        refused(lazy, f"X {words}")
        refused(ROWS, f"sample_weight {words}", sample_weight=lazy)
        with pytest.raises(InvalidDataError, match=words):
            model.predict(lazy)

    def test_sparse_blocks(self, model):
        blocks = da.from_array(ROWS, chunks=(25, 2)).map_blocks(scipy.sparse.csr_array, dtype=float)
        words = r"chunk \d of the dask array is sparse \(csr_array\).*map_blocks\(.*block\.toarray\(\)"
        refused(blocks, words)
        with pytest.raises(InvalidDataError, match=words):
            model.predict(blocks).compute()

    def test_masked_blocks(self, model):
        blocks = da.ma.masked_greater(da.from_array(ROWS, chunks=(25, 2)), 1.0)
        words = r"chunk \d of the dask array is masked; fill it"
        refused(blocks, words)
        with pytest.raises(InvalidDataError, match=words):
            model.predict(blocks).compute()


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
