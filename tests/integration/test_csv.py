"""CSV as a source: parsed anew in chunks of lines, in bounded memory, with the values that pandas reads."""

from pathlib import Path

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau
from fits import ROWS, assert_same_bits, mixture

from emtau_dask import GaussianMixture, InvalidDataError
from emtau_dask.data.opening import as_dask, open_source

TABLE = pd.DataFrame(ROWS, columns=["x", "y"])


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emtau_dask.data.csv.CHUNK_BYTES", 2**12)
    return tmp_path


def write(text, name="a.csv"):
    Path(name).write_bytes(text.encode())
    return name


def rows_of(*arguments, **options):
    return as_dask(open_source(*arguments, **options)).compute()


class TestValues:
    @pytest.mark.parametrize("ending", ["\n", "\r\n"])
    @pytest.mark.parametrize("last", [True, False])
    def test_are_those_that_pandas_wrote(self, ending, last):
        text = TABLE.to_csv(index=False, lineterminator=ending)
        write(text if last else text.rstrip())
        source = open_source("a.csv")
        assert len(source.chunk_rows) > 2
        assert source.names == ("x", "y")
        np.testing.assert_array_equal(rows_of("a.csv"), ROWS)

    def test_without_names(self):
        np.savetxt("a.csv", ROWS, delimiter=",", fmt="%.17e")
        assert open_source("a.csv").names is None
        np.testing.assert_array_equal(rows_of("a.csv"), ROWS)

    def test_between_tabs(self):
        write(TABLE.to_csv(index=False, sep="\t"), "a.tsv")
        np.testing.assert_array_equal(rows_of("a.tsv"), ROWS)

    def test_that_are_integers_quoted_or_not_there(self):
        write('\ufeff"a, b",c\n1,"2"\n,NA\n3,4e2\n\n\n')
        assert open_source("a.csv").names == ("a, b", "c")
        np.testing.assert_array_equal(rows_of("a.csv"), [[1, 2], [np.nan, np.nan], [3, 400]])

    def test_of_a_table_without_rows(self):
        assert open_source(write("x,y\n")).shape == (0, 2)


class TestColumns:
    def test_can_be_chosen_beside_text(self):
        TABLE.assign(name="some text")[["name", "x", "y"]].to_csv("a.csv", index=False)
        np.testing.assert_array_equal(rows_of("a.csv", columns=["y", "x"]), ROWS[:, ::-1])
        with pytest.raises(InvalidDataError, match=r"'name' of .*a\.csv holds text \('some text'\)"):
            open_source("a.csv")

    def test_that_are_not_there_are_named(self):
        TABLE.to_csv("a.csv", index=False)
        with pytest.raises(InvalidDataError, match="no column 'z'; its columns are x, y"):
            open_source("a.csv", columns=["z"])

    def test_the_index_of_a_data_frame_is_none_and_that_is_said(self):
        TABLE.to_csv("a.csv")
        TABLE.to_csv("b.csv")
        with pytest.warns(UserWarning, match=r"first column of .*a\.csv has no name.*left out") as said:
            source = open_source(["a.csv", "b.csv"])
        assert len(said) == 1
        assert source.names == ("x", "y")
        assert source.shape == (600, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,y\n1,2\n1,b\n", "column.*b"),
        ("x,y\n1,2\n1,2,3\n", "Expected 2 columns, got 3"),
        ('x,y\n1,"2\n"\n3,4\n', "Each line is a row"),
        ("x,y\n1,2\n\n3,4\n", "empty lines"),
        ("x;y\n1;2\n", r"by ';'.*pandas\.read_csv"),
        ("", "empty line"),
        ("x,y\n" + "1" * 5000 + ",2\n", "line of more than"),
        ("x,x\n1,2\n", "2 columns 'x'"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(text, words):
    with pytest.raises(InvalidDataError, match=words):
        rows_of(write(text))


def test_a_file_that_became_shorter_is_refused():
    write(TABLE.to_csv(index=False))
    source = open_source("a.csv")
    write("x,y\n1,2\n")
    with pytest.raises(InvalidDataError, match=r"a\.csv"):
        as_dask(source).compute()


class TestFits:
    def test_have_the_bits_of_an_array_in_the_same_chunks(self):
        TABLE.to_csv("a.csv", index=False)
        chunks = open_source("a.csv").chunk_rows
        expected = mixture(tol=1e-3).fit(da.from_array(ROWS, chunks=(chunks, 2)))
        found = mixture(tol=1e-3, checkpoint="run.zarr").fit("a.csv")
        assert_same_bits(found, expected)
        assert_same_bits(GaussianMixture.resume("run.zarr", "a.csv"), expected)
        labels = found.predict("a.csv")
        assert isinstance(labels, da.Array)
        np.testing.assert_array_equal(labels, expected.predict(ROWS))

    def test_name_the_column_of_a_value_that_is_missing(self):
        TABLE.assign(x=TABLE.x.where(TABLE.index != 7)).to_csv("a.csv", index=False)
        with pytest.raises(InvalidDataError, match=r"row 7 .*contains NaN \(feature 0, 'x'\)"):
            mixture(tol=1e-3).fit("a.csv")

    def test_on_the_command_line_with_weights_and_a_pattern(self):
        TABLE.assign(w=1.0)[:100].to_csv("a.csv", index=False)
        TABLE.assign(w=1.0)[100:].to_csv("b.csv", index=False)
        Path("run.yaml").write_text(
            "data: {path: '*.csv', weights: w}\nmodel: {n_components: 3}\nalgorithm: {name: em}\n"
            "stop: {tol: 1e-3}\noutput: {directory: out}\n"
        )
        result = emtau("fit", "run.yaml")
        assert result.exit_code == 0, result.output
        model = GaussianMixture.load("out/model.zarr")
        assert model.feature_names_in_.tolist() == ["x", "y"]
        result = emtau("predict", "out/model.zarr", "a.csv", "labels.zarr")
        assert result.exit_code == 0, result.output
        labels = zarr.open_group("labels.zarr", mode="r")["labels"][...]
        np.testing.assert_array_equal(labels, model.predict(TABLE[:100]))

    def test_without_names_are_scored_by_a_model_that_has_some(self):
        model = mixture(tol=1e-3).fit(TABLE)
        np.savetxt("a.csv", ROWS, delimiter=",", fmt="%.17e")
        np.testing.assert_array_equal(model.predict("a.csv"), model.predict(TABLE))
        model.save("model.zarr")
        result = emtau("predict", "model.zarr", "a.csv", "labels.zarr")
        assert result.exit_code == 0, result.output
