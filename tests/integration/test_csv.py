"""CSV as a source: read once into scratch, with the values that pandas reads."""

import gc
import pickle
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau
from fits import ROWS, assert_same_bits, mixture
from passes import Recorder
from processes import process_of

from emtau_dask import GaussianMixture, InvalidDataError, StorageError
from emtau_dask.data.opening import as_dask, open_source

TABLE = pd.DataFrame(ROWS, columns=["x", "y"])


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emtau_dask.data.csv.BLOCK_BYTES", 2**12)
    monkeypatch.setattr("emtau_dask.data.source.CHUNK_BYTES", 2**10)
    with dask.config.set({"emtau.scratch": str(tmp_path / "scratch")}):
        yield tmp_path


def left():
    """What of scratch is there."""
    return list(Path("scratch").rglob("rows"))


OPENED = """
import os, sys, dask
from emtau_dask.data.opening import open_source

dask.config.set({"emtau.scratch": "scratch"})
source = open_source("a.csv")
if int(sys.argv[1]):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


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

    def test_between_line_breaks_in_quotes_and_empty_lines(self):
        write('x,"a\nname",t\n1,2,"one\ntwo"\n\n3,"4",c\n')
        assert open_source("a.csv", columns=["x", "a\nname"]).names == ("x", "a\nname")
        np.testing.assert_array_equal(rows_of("a.csv", columns=["x", "a\nname"]), [[1, 2], [3, 4]])
        expected = pd.read_csv("a.csv")[["x", "a\nname"]]
        np.testing.assert_array_equal(rows_of("a.csv", columns=["x", "a\nname"]), expected)

    def test_are_the_nearest_floats(self):
        values = np.random.default_rng(0).integers(0, 2**63, 3000).view(np.float64)
        values = values[np.isfinite(values)]
        write("x\n" + "\n".join(map(repr, values.tolist())) + "\n")
        np.testing.assert_array_equal(rows_of("a.csv")[:, 0], values)

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
        with pytest.raises(InvalidDataError, match=r"no column 'z'\. Its columns are x, y"):
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
        ("x,y\n1,2\n1,b\n", r"column 'y' of .*a\.csv holds text \('b'\)"),
        ("1,2\n1,b\n", r"column number 1 of .*a\.csv holds text \('b'\)"),
        ("x,y\n1,2\n1,2,3\n", "Expected 2 columns, got 3"),
        ('x,y\n1,"2\n"\n3,4\n', r"column 'y' of .*a\.csv holds text"),
        ("x;y\n1;2\n", r"by ';'.*pandas\.read_csv"),
        ("", "empty line"),
        ("x,y\n" + "1" * 20_000 + ",2\n", "rows of at most 4,096 bytes"),
        ("x,x\n1,2\n", "2 columns 'x'"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(text, words):
    with pytest.raises(InvalidDataError, match=words):
        rows_of(write(text))

    assert left() == []


def test_tables_of_other_numbers_of_columns_are_refused():
    write("1,2\n")
    with pytest.raises(InvalidDataError, match=r"b\.csv and .*a\.csv differ in .*, 3 and 2\."):
        open_source(["a.csv", write("1,2,3\n", "b.csv")])


class TestScratch:
    def test_goes_with_the_source_and_the_lazy_arrays_that_read_it(self):
        TABLE.to_csv("a.csv", index=False)
        rows = as_dask(open_source("a.csv"))
        assert len(left()) == 1
        Path("a.csv").unlink()
        lazy = da.sqrt(rows.T)
        del rows
        np.testing.assert_array_equal(lazy.compute(scheduler="synchronous").T, np.sqrt(ROWS))
        del lazy
        gc.collect()
        assert left() == []

    def test_of_a_prediction_lives_as_long_as_that(self):
        TABLE.to_csv("a.csv", index=False)
        model = mixture(tol=1e-3).fit(TABLE)
        labels = model.predict("a.csv")
        gc.collect()
        np.testing.assert_array_equal(labels, model.predict(TABLE))
        copy = pickle.loads(pickle.dumps(labels))
        del copy
        gc.collect()
        assert len(left()) == 1

    def test_is_gone_when_the_process_ends_and_after_a_kill_when_another_needs_it(self):
        TABLE.to_csv("a.csv", index=False)
        for number, ended in ((0, 0), (signal.SIGKILL, 1)):
            with process_of(OPENED, number) as process:
                process.wait()
            assert len(left()) == ended
        source = open_source("a.csv")
        assert left() == [Path(source.ranges.path).relative_to(Path.cwd())]

    def test_without_room_is_refused_before_anything_is_read(self, monkeypatch):
        TABLE.to_csv("a.csv", index=False)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4000))
        words = r"a\.csv take about .*iB as float64, but .*scratch has .* free.*emtau\.scratch"
        with pytest.raises(StorageError, match=words):
            open_source("a.csv")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
        open_source("a.csv")

    def test_on_a_disk_that_becomes_full_is_removed(self):
        TABLE.to_csv("a.csv", index=False)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(StorageError, match=r"rows of .*a\.csv cannot be written to .*scratch.*limit"):
                open_source("a.csv")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert left() == []

    def test_that_is_not_seen_is_named_with_what_to_do(self):
        TABLE.to_csv("a.csv", index=False)
        reader = open_source("a.csv").ranges
        Path(reader.path).unlink()
        with pytest.raises(InvalidDataError, match=r"a\.csv were read into .*emtau\.scratch .*every worker"):
            reader.identity()

    def test_holds_many_tables_in_one_file_and_says_how_far_they_are(self):
        TABLE[:200].to_csv("a.csv", index=False)
        TABLE[200:].to_csv("b.csv", index=False)
        observer = Recorder()
        source = open_source(["a.csv", "b.csv"], observer=observer)
        assert len(left()) == 1
        assert source.chunk_rows == (64, 64, 64, 8, 64, 36)
        np.testing.assert_array_equal(as_dask(source), ROWS)
        ((name, blocks),) = observer.stages
        assert name.startswith("reading /")
        assert abs(sum(observer.done) - blocks) <= 2 < blocks


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
