"""Which columns of a table are features: not the index of a DataFrame, and those that are asked for."""

import re
import warnings

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import emtau
from refusals import mixture

from emtau_dask import GaussianMixture, InvalidDataError
from emtau_dask.data.opening import open_source

TABLE = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=["a", "b", "c"])
LEFT_OUT = r"is the index of the DataFrame .*left out"


def by_pandas(path):
    TABLE[TABLE.a > -9].sample(frac=1, random_state=0).to_parquet(path)
    return "__index_level_0__", TABLE.sample(frac=1, random_state=0)


def by_dask(path):
    dd.from_pandas(TABLE, npartitions=2).to_parquet(path)
    return "__null_dask_index__", TABLE


def by_pandas_with_a_name(path):
    TABLE.rename_axis("time").sort_values("b").to_parquet(path)
    return "time", TABLE.sort_values("b")


WRITERS = [by_pandas, by_dask, by_pandas_with_a_name]


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "f.parquet")


class TestTheIndexOfADataFrame:
    @pytest.mark.parametrize("write", WRITERS)
    def test_is_no_feature_and_that_is_said(self, place, write):
        index, table = write(place)
        with pytest.warns(UserWarning, match=f"'{index}' {LEFT_OUT}") as said:
            fitted = mixture().fit(place)
        assert len(said) == 1
        assert fitted.feature_names_in_.tolist() == ["a", "b", "c"]
        np.testing.assert_allclose(fitted.means_, mixture().fit(table.to_numpy()).means_)

    def test_is_one_where_it_is_asked_for(self, place):
        by_dask(place)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            source = open_source(place, columns=["a", "__null_dask_index__"])
        assert source.names == ("a", "__null_dask_index__")

    def test_that_is_a_range_is_no_column(self, place):
        TABLE.to_parquet(place)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert open_source(place).names == ("a", "b", "c")

    def test_alone_is_no_data(self, place):
        TABLE[["a"]].set_index("a").to_parquet(place)
        with pytest.raises(InvalidDataError, match="no columns but the index 'a'"):
            open_source(place)

    @pytest.mark.parametrize(
        "metadata", [b"{", b"[]", b'{"index_columns": 3}', b'{"index_columns": [{}, 4]}']
    )
    def test_that_metadata_do_not_name_is_not_there(self, place, metadata):
        table = pa.table({"a": TABLE.a}).replace_schema_metadata({b"pandas": metadata})
        pq.write_table(table, place)
        assert open_source(place).names == ("a",)

    def test_is_left_out_by_the_command_line_too(self, tmp_path, place, monkeypatch):
        monkeypatch.chdir(tmp_path)
        by_pandas(place)
        said = emtau("fit", "f.parquet", "-k", 2, "--algorithm", "em", "--tol", "1e-3", "-o", "out").stderr
        assert len(re.findall(f"emtau: warning: .*{LEFT_OUT}", said)) == 1
        assert GaussianMixture.load("out/model.zarr").feature_names_in_.tolist() == ["a", "b", "c"]


class TestColumns:
    @pytest.fixture
    def fitted(self, place):
        TABLE.to_parquet(place)
        return mixture().fit(place, columns=["c", "a"])

    def test_are_the_features_in_their_order(self, fitted):
        assert fitted.feature_names_in_.tolist() == ["c", "a"]
        np.testing.assert_array_equal(fitted.means_, mixture().fit(TABLE[["c", "a"]]).means_)

    def test_of_the_fit_are_found_again_by_name(self, fitted, place):
        expected = fitted.predict(TABLE[["c", "a"]])
        np.testing.assert_array_equal(fitted.predict(place), expected)
        np.testing.assert_array_equal(fitted.predict(place, columns=["c", "a"]), expected)

    @pytest.mark.parametrize("method", ["predict", "predict_proba", "score_samples", "score", "bic", "aic"])
    def test_can_be_chosen_wherever_rows_are_scored(self, place, method):
        TABLE.to_parquet(place)
        model = mixture().fit(TABLE[["c", "a"]].to_numpy())
        found = getattr(model, method)(place, columns=["c", "a"])
        expected = getattr(model, method)(da.from_array(TABLE[["c", "a"]].to_numpy()))
        np.testing.assert_allclose(*da.compute(found, expected))

    def test_can_be_chosen_by_fit_predict_and_resume(self, place, tmp_path):
        TABLE.to_parquet(place)
        run = str(tmp_path / "run.zarr")
        labels = mixture(checkpoint=run).fit_predict(place, columns=["c", "a"])
        for options in ({}, {"columns": ["c", "a"]}):
            resumed = GaussianMixture.resume(run, place, **options)
            np.testing.assert_array_equal(resumed.predict(place), labels)

    def test_other_than_the_fits_are_refused(self, fitted, place):
        with pytest.raises(InvalidDataError, match="the fit had"):
            fitted.predict(place, columns=["a", "b"])

    @pytest.mark.parametrize("columns", ["ab", [], ["a", "a"], [0], 3])
    def test_are_a_list_of_names(self, place, columns):
        TABLE.to_parquet(place)
        with pytest.raises(InvalidDataError, match=r"columns = .*list of .*names"):
            mixture().fit(place, columns=columns)

    def test_that_are_not_there_are_named_with_those_that_are(self, place):
        TABLE.to_parquet(place)
        with pytest.raises(InvalidDataError, match=r"no column 'z'\. Its columns are a, b, c"):
            mixture().fit(place, columns=["a", "z"])


def stored(table, place):
    table.to_parquet(place)
    return place


KINDS = {
    "DataFrame": lambda table, place: table,
    "dask DataFrame": lambda table, place: dd.from_pandas(table, npartitions=1),
    "parquet": stored,
}


class TestTheNameOfAColumn:
    """It is in the error for a value that cannot be used."""

    BAD = TABLE.assign(b=TABLE.b.where(TABLE.index != 7))
    WORDS = r"row 7 .*contains NaN \(feature 1, 'b'\)"

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.filterwarnings("ignore:X has unknown chunk sizes")
    def test_when_it_is_fitted(self, kind, place):
        with pytest.raises(InvalidDataError, match=self.WORDS):
            mixture().fit(KINDS[kind](self.BAD, place))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", ["predict", "predict_proba", "score_samples"])
    def test_when_it_is_scored(self, kind, method, place):
        values = getattr(mixture().fit(TABLE), method)
        with pytest.raises(InvalidDataError, match=r"contains NaN \(feature 1, 'b'\)"):
            np.asarray(values(KINDS[kind](self.BAD, place)))

    def test_on_the_command_line(self, tmp_path, place, monkeypatch):
        monkeypatch.chdir(tmp_path)
        mixture().fit(stored(TABLE, place)).save("model.zarr")
        stored(self.BAD, place)
        said = emtau("predict", "model.zarr", "f.parquet", "labels.zarr").stderr
        assert "contains NaN (feature 1, 'b')" in said

    def test_is_not_there_where_the_data_have_none(self):
        with pytest.raises(InvalidDataError, match=r"contains NaN \(feature 1\)"):
            mixture().fit(self.BAD.to_numpy())
