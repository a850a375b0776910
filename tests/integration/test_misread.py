"""Data that could be read as other numbers than they mean: read right, or refused or warned of by name."""

import html
import os
import subprocess
import sys
import warnings
from pathlib import Path

import dask.array as da
import dask.dataframe as dd
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
import xarray as xr
import zarr
from commands import emtau
from fits import ROWS
from numpy.lib.recfunctions import structured_to_unstructured

from emtau_dask import GaussianMixture, InvalidDataError, open_run
from emtau_dask.data.opening import as_dask, as_source, open_source
from emtau_dask.errors import InvalidDtypeError, SingularComponentError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def values(*arguments, **options):
    return as_dask(open_source(*arguments, **options)).compute()


class TestFirstLineOfNumbers:
    """pandas writes 0,1,… above columns without names, and years may name columns."""

    @pytest.mark.parametrize("names", [[0, 1], [2019, 2020]])
    def test_is_a_header_above_other_numbers(self, names):
        pd.DataFrame(ROWS, columns=names).to_csv("a.csv", index=False)
        with pytest.warns(UserWarning, match="it is read as the header"):
            source = open_source("a.csv")
        assert source.names == tuple(map(str, names))
        np.testing.assert_array_equal(values("a.csv", columns=source.names), ROWS)

    @pytest.mark.parametrize(
        "text",
        ["0,1\n5,4\n3,2\n", "2019,2020\n3.5,4\n5.5,6\n", "1,2\n3.5,4\n5,\n", "0\n.5\n.7\n", "0, 1\n.5,3\n"],
    )
    def test_is_refused_where_it_may_be_a_row(self, text):
        Path("a.csv").write_text(text)
        with pytest.raises(
            InvalidDataError, match=r"It may be a row, or the names.*give them.*put a line of names"
        ):
            open_source("a.csv")
        names = [name.lstrip() for name in text.splitlines()[0].split(",")]
        if " " not in text:
            wanted = pd.read_csv("a.csv")
            np.testing.assert_array_equal(values("a.csv", columns=names), wanted)

    @pytest.mark.parametrize(
        "text", ["3,4\n5,6\n", "0\n1\n1\n", "3\n.5\n", "0,0\n1.5,2.5\n", "1.0,2\n3.5,4.5\n"]
    )
    def test_is_a_row_otherwise(self, text):
        Path("a.csv").write_text(text)
        assert open_source("a.csv").names is None
        np.testing.assert_array_equal(values("a.csv"), pd.read_csv("a.csv", header=None).to_numpy(float))

    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("text", ["2019,2020\n1.5,3\n2.5,4\n", "2019,2020\n"])
    def test_that_the_fit_had_is_a_header_whatever_is_below(self, text):
        pd.DataFrame(ROWS, columns=[2019, 2020]).to_csv("a.csv", index=False)
        gm = GaussianMixture(2, random_state=0).fit("a.csv")
        Path("b.csv").write_text(text)
        assert len(gm.predict("b.csv").compute()) == len(text.splitlines()) - 1

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_of_several_tables_is_read_alike(self):
        Path("a.csv").write_text("2019,2020\n1.5,3.5\n")
        Path("b.csv").write_text("2019,2020\n2.5,4\n")
        Path("c.csv").write_text("7.5,8.5\n")
        np.testing.assert_array_equal(values(["a.csv", "b.csv"]), [[1.5, 3.5], [2.5, 4]])
        with pytest.raises(
            InvalidDataError, match=r"a\.csv names its columns, but that of .*c\.csv is a row"
        ):
            open_source(["c.csv", "a.csv"])

    @pytest.mark.parametrize(
        "data",
        [
            b"x,name\n1,\xe9\n2,a\n",
            b"x,name\n1," + b"a" * 200_000 + b"\n2,a\n",
            b"x,name\n" + b"".join(b"%d," % n + b"\xc3\xa9" * 10_000 + b"\n" for n in (1, 2) * 30),
        ],
        ids=["Latin-1", "a long text", "a character at the end of a block"],
    )
    def test_of_letters_needs_no_other_line(self, data):
        Path("a.csv").write_bytes(data)
        assert set(values("a.csv", columns=["x"])[:, 0]) == {1, 2}


EMTAU = Path(sys.executable).with_name("emtau")
DATES = pd.date_range("2020", periods=60)
NO_NUMBERS = {
    "dates": (DATES, "Datetime", "total_seconds"),
    "dates with NaT": (DATES.where(DATES[3] != DATES), "Datetime", "total_seconds"),
    "zoned dates": (DATES.tz_localize("UTC"), "Datetime", "total_seconds"),
    "durations": (DATES - DATES[0], "Duration", "total_seconds"),
    "text": (["u"] * 60, "String", "Remove it"),
    "numeric text": (["1"] * 60, "String", "Remove it"),
    "categories": (pd.Categorical([1, 2] * 30), "Categorical", "Remove it"),
}
CONTAINERS = {
    "pandas": lambda frame: frame,
    "polars": pl.from_pandas,
    "pyarrow": pa.Table.from_pandas,
    "dask": lambda frame: dd.from_pandas(frame, npartitions=2),
}


class TestColumnsOfNoNumbers:
    """Refused by dtype, whatever holds them: the column, the first such row and a remedy are named."""

    @pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside numbers"])
    @pytest.mark.parametrize("kind", NO_NUMBERS)
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_are_refused_in_frames(self, container, kind, alone):
        values, words, remedy = NO_NUMBERS[kind]
        frame = pd.DataFrame({} if alone else {"a": ROWS[:60, 0]}).assign(when=values)
        if (container, kind) == ("polars", "categories"):
            frame["when"] = (
                frame["when"].astype(str).astype("category")
            )  # Polars has categories of text only.
        with pytest.raises(InvalidDtypeError, match=f"column 'when' of X holds {words}.*{remedy}") as refused:
            GaussianMixture(1, algorithm="em", missing="marginalise").fit(CONTAINERS[container](frame))
        assert container == "dask" or "row 0" in str(refused.value)

    @pytest.mark.parametrize("made", [pd.Series, np.asarray, pl.Series], ids=["pandas", "numpy", "polars"])
    @pytest.mark.parametrize(
        "values",
        [["1"] * 60, list(DATES), list((DATES - DATES[0]).to_pytimedelta())],
        ids=["text", "dates", "durations"],
    )
    def test_are_refused_as_weights(self, made, values):
        with pytest.raises(InvalidDtypeError, match=r"sample_weight (holds|has)"):
            GaussianMixture(1).fit(ROWS[:60], sample_weight=made(values))

    def test_among_objects_the_first_is_named(self):
        objects = ROWS[:60].astype(object)
        objects[7, 1] = "12"
        with pytest.raises(InvalidDtypeError, match="X has '12' in row 7, column 1"):
            GaussianMixture(1).fit(objects)
        with pytest.raises(InvalidDtypeError, match=r"column 'y' of X holds Object .row 7: '12'"):
            GaussianMixture(1).fit(pd.DataFrame(objects, columns=["x", "y"]))

    def test_of_records_the_remedy_works(self):
        records = np.zeros(9, [("a", float), ("b", float)])
        with pytest.raises(InvalidDtypeError, match=r"lib\.recfunctions\.structured_to_unstructured\(X\)"):
            GaussianMixture(1).fit(records)
        assert structured_to_unstructured(records).shape == (9, 2)


class AsArray:
    """Something that NumPy can convert, and nothing else is known of."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


UNNAMED = {
    "an index": DATES,
    "a zoned index": DATES.tz_localize("UTC"),
    "an extension array": pd.array(["1"] * 60, "string"),
    "categories": pd.Categorical([1, 2] * 30),
    "arrow": pa.array(["1"] * 60),
    "arrow dates": pa.array(DATES),
    "what is like an array": AsArray(["1"] * 60),
}


class TestOthers:
    @pytest.mark.parametrize("kind", UNNAMED)
    def test_are_refused_as_weights_by_what_they_hold(self, kind):
        with pytest.raises(InvalidDtypeError, match=r"sample_weight (holds|has)"):
            GaussianMixture(1).fit(ROWS[:60], sample_weight=UNNAMED[kind])

    def test_are_refused_as_rows_by_what_they_hold(self):
        with pytest.raises(InvalidDtypeError, match="X has dtype"):
            GaussianMixture(1).fit(AsArray([["1", "2"]] * 60))

    def test_with_the_name_of_an_attribute_of_frames_are_columns(self):
        frame = pd.DataFrame({"_meta": ROWS[:60, 0], "s": ["1"] * 60})
        with pytest.raises(InvalidDtypeError, match="column 's' of X holds String"):
            GaussianMixture(1).fit(frame)

    def test_whose_names_repeat_are_refused_in_arrow(self):
        table = pa.Table.from_arrays([pa.array(ROWS[:, 0]), pa.array(ROWS[:, 1])], names=["a", "a"])
        with pytest.raises(InvalidDataError, match="X has several columns 'a'"):
            GaussianMixture(1).fit(table)

    def test_a_series_of_dask_is_no_table(self):
        with pytest.raises(InvalidDataError, match="X has shape"):
            GaussianMixture(1).fit(dd.from_pandas(pd.Series(ROWS[:, 0]), npartitions=2))


class TestColumnsOfNumbers:
    def test_of_objects_are_read(self):
        wanted = GaussianMixture(2, random_state=0).fit(ROWS).means_
        np.testing.assert_array_equal(
            GaussianMixture(2, random_state=0).fit(ROWS.astype(object)).means_, wanted
        )

    def test_of_booleans_beside_floats_are_read_by_dask_as_by_pandas(self):
        frame = pd.DataFrame(ROWS, columns=["x", "y"]).assign(right=ROWS[:, 0] > 0)
        wanted = GaussianMixture(2, random_state=0).fit(frame.to_numpy(float)).means_
        chunked = dd.from_pandas(frame, npartitions=1)
        with pytest.warns(UserWarning, match="unknown chunk sizes"):
            got = GaussianMixture(2, random_state=0).fit(chunked).means_
        np.testing.assert_array_equal(got, wanted)

    @pytest.mark.filterwarnings("ignore:X has unknown chunk sizes")
    @pytest.mark.parametrize(
        "kinds",
        [
            {"x": "Float64"},
            {"x": "double[pyarrow]"},
            {"x": "float32", "n": "Int64"},
            {"x": "Float64", "n": "Int64", "flag": "boolean"},
            {"x": "float64", "n": "int8", "flag": "bool"},
        ],
        ids=str,
    )
    def test_of_pandas_own_types_are_read_by_dask_as_by_pandas(self, kinds):
        frame = pd.DataFrame({"x": ROWS[:, 0], "n": np.arange(len(ROWS)) % 100, "flag": ROWS[:, 1] > 0})
        wanted = frame.astype("float64")
        frame = frame.astype(kinds)
        if kinds["x"] == "float32":
            wanted["x"] = wanted["x"].astype("float32").astype("float64")
        got = GaussianMixture(1).fit(dd.from_pandas(frame, npartitions=2))
        np.testing.assert_allclose(got.means_[0], wanted.mean(), rtol=1e-6)

    def test_that_are_sparse_are_read(self):
        frame = pd.DataFrame({"a": pd.arrays.SparseArray(ROWS[:, 0]), "b": ROWS[:, 1]})
        np.testing.assert_allclose(GaussianMixture(1).fit(frame).means_[0], ROWS.mean(axis=0))

    def test_whose_names_repeat_are_refused(self):
        frame = pd.DataFrame(ROWS, columns=["x", "x"])
        with pytest.raises(InvalidDataError, match="X has several columns 'x'; give each a different name"):
            GaussianMixture(2).fit(frame)


class TestNamesOfFolders:
    """Of a folder that Hive, Spark, pandas or dask partitioned; dask's default reader says what is right."""

    FRAME = pd.DataFrame(ROWS, columns=["a", "b"])

    @pytest.fixture(params=["table", "memory://table"], ids=["local", "remote"])
    def table(self, request):
        """Write a frame partitioned by columns, and give its place."""

        def written(frame, *by):
            for values, part in frame.groupby(list(by), dropna=False, sort=False):
                names = (
                    f"{name}={'__HIVE_DEFAULT_PARTITION__' if pd.isna(value) else value}"
                    for name, value in zip(by, values, strict=True)
                )
                folder = "/".join((request.param, *names))
                files = fsspec.url_to_fs(folder)[0]
                files.makedirs(folder, exist_ok=True)
                part.drop(columns=list(by)).to_parquet(f"{folder}/part.0.parquet", index=False)
            return request.param

        yield written
        if "://" in request.param:
            fsspec.filesystem("memory").store.clear()
            fsspec.filesystem("memory").pseudo_dirs.clear()

    @pytest.mark.parametrize("by", [("g",), ("g", "h"), ("h", "g")])
    def test_that_are_whole_numbers_are_features_after_those_of_the_files(self, table, by):
        frame = self.FRAME.assign(g=[-3, 2, 10] * 100, h=[2019, 2020] * 150)
        place = table(frame[["a", "b", *by]], *by)
        wanted = dd.read_parquet(place).astype(float).compute()
        source = open_source(place)
        assert source.names == tuple(wanted.columns) == ("a", "b", *by)
        np.testing.assert_array_equal(values(place), wanted)
        for chosen in (["g"], ["g", "a"]):
            np.testing.assert_array_equal(values(place, columns=chosen), wanted[chosen])

    def test_that_are_whole_numbers_have_the_type_that_pyarrow_infers(self, table):
        place = table(self.FRAME.assign(g=[1, 2, 3] * 100), "g")
        assert open_source(place, columns=["g"]).dtype == np.int32
        if "://" not in place:
            assert pa.dataset.dataset(place, partitioning="hive").schema.field("g").type == pa.int32()

    def test_that_are_null_are_missing(self, table):
        frame = self.FRAME.assign(g=["1", None, "3"] * 100).astype({"g": object})
        got = values(table(frame, "g"), columns=["g"])
        assert np.isnan(got).sum() == 100
        assert set(got[~np.isnan(got)]) == {1, 3}

    def test_that_are_text_are_left_out_with_a_warning_and_refused_if_named(self, table):
        place = table(self.FRAME.assign(region=["north", "a b"] * 150, g=[1, 2] * 150), "region", "g")
        with pytest.warns(UserWarning, match=r"give 1 column that .* left out: 'region'\."):
            source = open_source(place)
        assert source.names == ("a", "b", "g")
        with pytest.raises(InvalidDtypeError, match=r"column 'region' of .* a folder is named region="):
            open_source(place, columns=["a", "region"])

    @pytest.mark.filterwarnings("ignore:the names of folders")
    def test_that_some_files_lack_are_missing_there(self, table):
        table(self.FRAME.assign(g=1), "g")
        place = table(self.FRAME.assign(h=2), "h")
        got = values(place, columns=["a", "g", "h"])
        assert np.isnan(got).sum() == 2 * len(ROWS)
        assert (np.nanmin(got[:, 1]), np.nanmax(got[:, 2])) == (1, 2)
        np.testing.assert_array_equal(values(place, columns=["a"]), np.tile(ROWS[:, :1], (2, 1)))

    def test_that_are_all_the_same_are_features_with_a_warning(self, table):
        place = table(self.FRAME.assign(year=2024), "year")
        with pytest.warns(UserWarning, match="give all rows the same 'year': a constant feature"):
            assert open_source(place).names == ("a", "b", "year")

    def test_are_read_from_a_pattern_and_a_list_as_from_the_folder(self, table):
        place = table(self.FRAME.assign(g=[1, 2, 3] * 100), "g")
        wanted = values(place)
        for several in (f"{place}/*", f"{place}/*/*.parquet", [f"{place}/g={g}" for g in (1, 2, 3)]):
            assert open_source(several).names == ("a", "b", "g")
            np.testing.assert_array_equal(values(several), wanted)

    def test_label_rows_in_their_order(self, table):
        place = table(self.FRAME.assign(g=[2, 10] * 150), "g")
        gm = GaussianMixture(2, random_state=0).fit(place)
        assert gm.feature_names_in_.tolist() == ["a", "b", "g"]
        wanted = gm.predict(dd.read_parquet(place).astype(float).compute().to_numpy())
        np.testing.assert_array_equal(gm.predict(place).compute(), wanted)


class TestPaths:
    """Home folders are found at every entrance, and any name that the file system takes is a name."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path_factory, monkeypatch):
        home = tmp_path_factory.mktemp("home")
        monkeypatch.setenv("HOME", str(home))
        yield home
        assert not Path("~").exists()

    def test_of_python_lead_home(self, home):
        np.save(home / "rows.npy", ROWS)
        gm = GaussianMixture(2, checkpoint="~/run.zarr", random_state=0).fit("~/rows.npy")
        gm.save(Path("~/model.zarr"))
        assert sorted(path.name for path in home.iterdir()) == ["model.zarr", "rows.npy", "run.zarr"]
        assert len(GaussianMixture.load("~/model.zarr").predict(["~/rows.npy"])) == len(ROWS)
        resumed = GaussianMixture.resume(Path("~/run.zarr"), "~/rows.*")
        np.testing.assert_array_equal(resumed.means_, gm.means_)
        assert open_run("~/run.zarr").iteration == gm.n_iter_

    def test_of_commands_lead_home(self, home):
        for arguments in (
            ("dataset", "mixture", "~/rows.zarr", "--rows", "500", "--features", "2", "--components", "2"),
            ("fit", "~/rows.zarr", "-k", "2", "-o", "~/out", "--set", "checkpoint.path=~/run.zarr"),
            ("resume", "~/run.zarr"),
            ("inspect", "~/run.zarr"),
            ("predict", "~/out", "~/rows.zarr", "~/labels.zarr"),
            ("report", "~/out", "~/page.html", "--data", "~/rows.zarr"),
            ("select", "~/rows.zarr", "-k", "1:2", "-o", "~/selected"),
        ):
            assert emtau(*arguments).exit_code == 0, arguments
        wanted = ["labels.zarr", "out", "page.html", "rows.zarr", "run.zarr", "selected"]
        assert sorted(path.name for path in home.iterdir() if path.name[0] != ".") == wanted

    def test_of_no_user_are_names(self):
        np.save("~nobody-of-this-name.npy", ROWS)
        assert open_source("~nobody-of-this-name.npy").shape == ROWS.shape

    @pytest.mark.parametrize("ending", [b".npy", b".zarr", b".csv", b".parquet"])
    def test_that_are_not_utf8_are_read_and_written(self, ending):
        place, run, model = (os.fsdecode(name) for name in (b"r\xff" + ending, b"run\xff", b"model\xff"))
        frame = pd.DataFrame(ROWS, columns=["x", "y"])
        if ending == b".npy":
            np.save(place, ROWS)
        elif ending == b".zarr":
            zarr.create_array(place, data=ROWS)
        elif ending == b".csv":
            frame.to_csv(place, index=False)
        else:
            Path(place).write_bytes(frame.to_parquet())
        gm = GaussianMixture(2, checkpoint=run, random_state=0).fit(place)
        gm.save(model)
        wanted = GaussianMixture(2, random_state=0).fit(ROWS).means_
        np.testing.assert_array_equal(gm.means_, wanted)
        np.testing.assert_array_equal(GaussianMixture.load(model).means_, wanted)
        np.testing.assert_array_equal(GaussianMixture.resume(run, place).means_, wanted)


class TestStandardStreams:
    """A fit writes its results and ends with their exit code, whoever reads what it prints."""

    @pytest.mark.parametrize(
        "redirected",
        [
            ">&-",
            "2>&-",
            pytest.param("<&- >&- 2>&-", id="all closed"),
            "| true",
            "2> >(true)",
            "2>&1 | head -2",
        ],
    )
    def test_may_be_closed_or_lose_their_reader(self, redirected):
        np.save("rows.npy", ROWS)
        command = f"set -o pipefail; '{EMTAU}' fit rows.npy -k 2 -o out {redirected}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=100)
        assert done.returncode == 0
        assert GaussianMixture.load("out/model.zarr").converged_
        assert b"Error" not in done.stderr

    def test_that_are_closed_do_not_hide_how_a_fit_ended(self):
        np.save("rows.npy", ROWS)
        for options, code in (("--max-iter 1", 3), ("--missing nonsense", 2), ("--array none", 1)):
            command = f"'{EMTAU}' fit rows.npy -k 2 -o out {options} >&- 2>&-"
            assert subprocess.run(["bash", "-c", command], check=False, timeout=100).returncode == code

    def test_of_python_may_be_missing(self, monkeypatch):
        wanted = GaussianMixture(2, random_state=0).fit(ROWS).means_
        monkeypatch.setattr("sys.stdout", None)
        np.testing.assert_array_equal(GaussianMixture(2, random_state=0, verbose=1).fit(ROWS).means_, wanted)

    def test_on_a_full_disk_end_a_command_with_one_line(self):
        np.save("rows.npy", ROWS)
        GaussianMixture(2).fit(ROWS).save("model.zarr")
        command = f"'{EMTAU}' inspect model.zarr > /dev/full"
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=100)
        assert done.returncode == 1
        assert b"The disk is full" in done.stderr
        assert b"Traceback" not in done.stderr


class TestAdvice:
    """The message names what is likely wrong, from the numbers that the fit has."""

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize("fill", [1e20, 9.96921e36, -1e30])
    @pytest.mark.parametrize("covariance_type", ["full", "diag"])
    def test_a_fill_value_is_named(self, fill, covariance_type):
        frame = pd.DataFrame(ROWS.copy(), columns=["salinity", "depth"])
        frame.iloc[::25, 0] = fill
        with pytest.raises(SingularComponentError) as refused:
            GaussianMixture(3, covariance_type=covariance_type, random_state=0).fit(frame)
        said = str(refused.value)
        assert "the variance of feature 0, 'salinity' is" in said
        assert f"at {fill:.6g}, where its rows are" in said
        assert "replace them by NaN" in said
        assert "reg_covar" not in said

    def test_rows_that_are_equal_get_another_regularisation(self):
        with pytest.raises(
            SingularComponentError,
            match=r"increase reg_covar.*resolution of float64 at 3, where its rows are",
        ):
            GaussianMixture(1, reg_covar=0).fit(np.full((50, 1), 3.0))

    @pytest.mark.parametrize("share", [0.0, 0.001])
    def test_a_feature_that_is_missing_is_named(self, share):
        frame = pd.DataFrame(ROWS, columns=["x", "y"]).assign(
            z=np.where(np.arange(len(ROWS)) < share * len(ROWS), 1.0, np.nan)
        )
        words = "none has feature 2, 'z'" if share == 0 else "feature 2, 'z' is known in 0.3% of them"
        with pytest.raises(InvalidDataError, match=words):
            GaussianMixture(2, algorithm="em", missing="marginalise").fit(frame)


PACKINGS = {
    "scale and offset": {"dtype": "int16", "scale_factor": 0.001, "add_offset": 3.0, "_FillValue": -32768},
    "scale": {"dtype": "int32", "scale_factor": 0.5, "_FillValue": -1},
    "unsigned": {"dtype": "int8", "scale_factor": 0.1, "_FillValue": -1, "_Unsigned": "true"},
    "a fill value": {"dtype": "float32", "_FillValue": 9.96921e36},
    "a fill value of 0": {"dtype": "float64", "_FillValue": 0.0},
    "NaN": {"dtype": "float64", "_FillValue": np.nan},
    "nothing": {"_FillValue": None},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestAttributesOfZarr:
    """Of arrays that xarray wrote; xarray says what is right."""

    MEANT = np.round(np.abs(ROWS[:, :2]) * 4, 1)
    MEANT[3, 1] = MEANT[250, 0] = np.nan

    @pytest.fixture(params=[2, 3])
    def written(self, request):
        def write(encoding, **attributes):
            array = xr.DataArray(self.MEANT, dims=("row", "feature"), attrs=attributes)
            xr.Dataset({"X": array}).to_zarr("a.zarr", encoding={"X": encoding}, zarr_format=request.param)
            return xr.open_zarr("a.zarr").X.to_numpy()

        return write

    @pytest.mark.parametrize("packing", PACKINGS)
    def test_are_heeded(self, written, packing):
        wanted = written(PACKINGS[packing] | {"chunks": (40, 2)})
        assert np.isnan(wanted).sum() >= 2
        group = zarr.open_group("a.zarr", mode="r")
        for opened in (
            open_source("a.zarr"),
            open_source("a.zarr/X"),
            as_source(group["X"], ndim=2, what="X"),
        ):
            got = as_dask(opened).compute()
            assert got.dtype == opened.dtype
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
        fits = (
            GaussianMixture(2, algorithm="em", missing="marginalise", random_state=0, max_iter=5)
            for _ in "ab"
        )
        by_path, by_xarray = (
            gm.fit(rows) for gm, rows in zip(fits, ("a.zarr", xr.open_zarr("a.zarr").X), strict=True)
        )
        np.testing.assert_allclose(by_path.means_, by_xarray.means_, rtol=1e-5)
        np.testing.assert_array_equal(
            by_path.predict(group["X"]).compute(), by_path.predict("a.zarr").compute()
        )

    def test_of_missing_values_are_heeded(self):
        array = zarr.create_array("b.zarr", data=np.array([[1, 2], [-9, 4], [-8, 6]], "i2"))
        array.attrs.update({"missing_value": [-9, -8], "scale_factor": 2})
        np.testing.assert_array_equal(values("b.zarr"), [[2, 4], [np.nan, 8], [np.nan, 12]])

    @pytest.mark.parametrize(
        ("attributes", "wanted"),
        [
            ({"scale_factor": None, "add_offset": None}, [0, 255]),
            ({"scale_factor": [0.5]}, [0, 127.5]),
            ({"_Unsigned": "false"}, [0, -1]),
            ({"missing_value": "none", "_FillValue": 300}, [0, 255]),
            ({"missing_value": 10**400}, [0, 255]),
            ({"_ARRAY_DIMENSIONS": ["row", "feature"]}, [0, 255]),
        ],
    )
    def test_of_odd_kinds_are_read_as_xarray_reads_them(self, attributes, wanted):
        array = zarr.create_array("b.zarr", data=np.array([[0, 255]], "u1"))
        array.attrs.update(attributes)
        np.testing.assert_array_equal(values("b.zarr"), [wanted])

    def test_of_infinite_fill_values_leave_other_infinities(self):
        array = zarr.create_array("b.zarr", data=np.array([[np.inf, 1.0]], "f4"))
        array.attrs["_FillValue"] = 1e300
        np.testing.assert_array_equal(values("b.zarr"), [[np.inf, 1.0]])

    @pytest.mark.parametrize("scale", ["thousand", 10**400, [1, 2], True])
    def test_that_are_no_numbers_are_refused(self, scale):
        zarr.create_array("b.zarr", data=ROWS).attrs["scale_factor"] = scale
        with pytest.raises(InvalidDataError, match=r"attribute scale_factor of .*, which is not a number"):
            open_source("b.zarr")

    def test_that_make_dates_of_numbers_are_refused(self):
        zarr.create_array("b.zarr", data=ROWS).attrs["units"] = "days since 2000-01-01"
        with pytest.raises(
            InvalidDtypeError, match=r"holds dates .'days since 2000-01-01'., not real numbers"
        ):
            open_source("b.zarr")

    def test_that_change_nothing_leave_fits_as_they_were(self):
        array = zarr.create_array("b.zarr", data=ROWS, chunks=(50, 2))
        array.attrs.update({"units": "m", "long_name": "lengths", "scale_factor": 1, "add_offset": 0})
        got = GaussianMixture(2, random_state=0).fit("b.zarr").means_
        np.testing.assert_array_equal(
            got, GaussianMixture(2, random_state=0).fit(as_source(array, ndim=2, what="X")).means_
        )

    def test_are_not_applied_to_a_graph_of_stored_numbers(self):
        array = zarr.create_array("b.zarr", data=np.arange(600, dtype="i2").reshape(300, 2), chunks=(50, 2))
        array.attrs["scale_factor"] = 0.5
        lazy = da.from_zarr(array)
        np.testing.assert_array_equal(as_dask(as_source(lazy, ndim=2, what="X")).compute(), lazy.compute())

    def test_are_heeded_in_a_resumed_fit(self, written):
        written(PACKINGS["a fill value"] | {"chunks": (40, 2)})
        settings = {"algorithm": "em", "missing": "marginalise", "random_state": 0, "checkpoint": "run.zarr"}
        gm = GaussianMixture(2, max_iter=3, **settings).fit("a.zarr")
        again = GaussianMixture.resume("run.zarr", "a.zarr", max_iter=6)
        whole = GaussianMixture(2, max_iter=6, **settings | {"checkpoint": None}).fit("a.zarr")
        np.testing.assert_array_equal(again.means_, whole.means_)
        assert again.n_iter_ > gm.n_iter_


class TestGroupsOfArrays:
    """The one with two axes is taken unless something else is likely meant."""

    T = np.arange(50.0)

    @pytest.mark.parametrize(
        "arrays",
        [
            {
                "tas": (("time", "lat", "lon"), np.zeros((50, 4, 5))),
                "time_bnds": (("time", "bnds"), np.zeros((50, 2))),
            },
            {"tas": (("time",), T), "time_bnds": (("time", "bnds"), np.zeros((50, 2)))},
            {
                "tas": (("time", "lat", "lon"), np.zeros((50, 4, 5))),
                "mask": (("lat", "lon"), np.zeros((4, 5))),
            },
        ],
        ids=["a cube", "a line", "a mask"],
    )
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_bounds_and_masks_are_not(self, arrays):
        xr.Dataset(arrays, coords={"time": self.T}).to_zarr("a.zarr")
        with pytest.raises(
            InvalidDataError, match=r"hardly what is meant; its arrays are .*--array NAME, in Python"
        ):
            open_source("a.zarr")
        name = next(name for name, (dims, _) in arrays.items() if len(dims) == 2)
        assert open_source("a.zarr", array=name).shape[1] in (2, 5)

    def test_rows_beside_labels_and_weights_are(self):
        group = zarr.open_group("a.zarr", mode="w")
        group.create_array("rows", data=ROWS)
        group.create_array("labels", data=np.zeros(len(ROWS)))
        np.testing.assert_array_equal(values("a.zarr"), ROWS)

    def test_a_path_that_speaks_of_features_stays_what_it_is(self):
        Path("feature 99").mkdir()
        Path("feature 1").mkdir()
        for name in ("feature 99", "feature 1"):
            Path(name, "x.parquet").write_bytes(b"PAR1 is no table PAR1")
        frame = pd.DataFrame(ROWS, columns=["x", "y"])
        frame.to_parquet("rows.parquet")
        gm = GaussianMixture(2, random_state=0).fit("rows.parquet")
        for name in ("feature 99", "feature 1"):
            with pytest.raises(InvalidDataError, match=f"{name}/x.parquet"):
                gm.predict(f"{name}/x.parquet")

    def test_a_fit_after_an_interrupt_says_what_is_wrong_with_it(self):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with pytest.raises(InvalidDataError, match="does not exist"):
                GaussianMixture(1).fit("none.npy")
            rows = ROWS.copy()
            rows[3, 1] = np.nan
            with pytest.raises(InvalidDataError, match="row 3"):
                GaussianMixture(1).fit(rows)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f8", ">f8", ">f4", ">i2"])
def test_an_npy_file_is_read_in_the_type_that_it_has(dtype, order):
    rows = np.asarray(ROWS * 100, dtype, order=order)
    np.save("rows.npy", rows)
    source = open_source("rows.npy")
    got = source.ranges.read(3, 40).values
    assert source.dtype == got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, rows[3:40])


class TestWhatIsFittedIsSaid:
    @pytest.fixture
    def group(self):
        group = zarr.open_group("a.zarr", mode="w")
        group.create_array("rows", data=ROWS)
        group.create_array("depth", data=np.zeros(7))
        return "a.zarr"

    @pytest.fixture
    def folder_of_files(self):
        frame = pd.DataFrame(ROWS, columns=["x", "y"])
        Path("t").mkdir()
        for number in range(3):
            frame.to_parquet(f"t/part.{number}.parquet")
        Path("t/_SUCCESS").touch()
        Path("t/notes.txt").touch()
        return "t"

    @pytest.mark.parametrize(
        ("place", "chosen", "rows"),
        [
            ("group", "the array 'rows' of a.zarr", "rows of 2 features"),
            (
                "folder_of_files",
                "3 parquet files of t; not read: 2 other files",
                "rows of 2 features: x, y",
            ),
        ],
    )
    def test_by_every_command_the_summary_and_the_report(self, place, chosen, rows, request):
        path = request.getfixturevalue(place)
        n_rows = f"{len(ROWS) * (3 if place == 'folder_of_files' else 1):,}"
        for options in (["--plan"], ["-o", "out", "--set", "checkpoint.path=run.zarr"]):
            told = " ".join(emtau("fit", path, "-k", 2, *options).stdout.replace("|", " ").split())
            assert f"{chosen}; {n_rows} {rows}" in told
        assert f"fitted to {chosen}" in str(GaussianMixture.load("out/model.zarr").summary())
        assert f"fitted to {chosen}" in " ".join(
            emtau("inspect", "run.zarr").stdout.replace("|", " ").split()
        )
        assert emtau("report", "out", "report.html").exit_code == 0
        assert f"Fitted to</dt><dd>{chosen}" in html.unescape(Path("report.html").read_text())

    def test_of_an_array_nothing_was_chosen(self):
        zarr.save("rows.zarr", ROWS)
        assert GaussianMixture(2, random_state=0).fit("rows.zarr").summary().notes == ()


DOUBTFUL = {
    "an id": np.random.default_rng(0).permutation(len(ROWS)) + 10**6,
    "an id of text digits as float": np.random.default_rng(0).permutation(len(ROWS)) * 7.0,
    "a counter": np.arange(len(ROWS)),
    "a group": np.arange(len(ROWS)) // 40,
    "seconds since 1970": 1.7e9 + np.arange(len(ROWS)) * 60,
    "always the same": np.full(len(ROWS), 2.5),
    "always false": np.zeros(len(ROWS), dtype=bool),
}


class TestColumnsThatAreHardlyFeatures:
    FEATURES = pd.DataFrame(ROWS, columns=["x", "y"]).assign(
        doors=np.arange(len(ROWS)) % 5, paid=np.arange(len(ROWS)) > 99
    )
    N = len(ROWS)

    def fitted(self, frame, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = GaussianMixture(2, random_state=0, reg_covar=1e-3, **options).fit(frame)
        return model, [str(each.message) for each in caught if "eave " in str(each.message)]

    @pytest.mark.parametrize("name", DOUBTFUL)
    def test_are_named_once(self, name):
        model, said = self.fitted(self.FEATURES.assign(**{name: DOUBTFUL[name]}))
        assert len(said) == 1
        assert f"column {name!r} " in said[0]
        assert "eave" in said[0]
        assert said[0] in model.summary().notes

    def test_features_are_not(self):
        assert self.fitted(self.FEATURES)[1] == []
        assert self.fitted(np.arange(self.N).reshape(-1, 1))[1] == []
        assert self.fitted(self.FEATURES.assign(ident=np.arange(self.N))[:90])[1] == []

    def test_without_names_have_their_number(self):
        rows = self.FEATURES.assign(ident=np.arange(self.N), same=1.0).to_numpy(float)
        said = self.fitted(da.from_array(rows, chunks=(50, -1)), n_init=3)[1]
        assert ["feature 5 is constant" in said[0], "feature 4 holds" in said[1], len(said)] == [
            True,
            True,
            2,
        ]

    def test_copies_of_others_and_their_multiples_are_named_in_pairs(self):
        noise = np.random.default_rng(0).normal(size=self.N)
        copies = {"again": ROWS[:, 0], "scaled": 3 - 2 * ROWS[:, 0] + 1e-3 * noise, "same": 0.1, "too": 0.1}
        said = self.fitted(self.FEATURES.assign(**copies, like_y=ROWS[:, 1] + 0.3 * noise))[1]
        assert "columns 'same', 'too' are constant" in said[0]
        assert "columns 'x' and 'again', 'x' and 'scaled' are collinear in all" in said[1]
        assert len(said) == 2

    def test_the_command_line_names_them_too(self):
        self.FEATURES.assign(trip_id=np.arange(self.N)).to_parquet("trips.parquet")
        said = emtau("fit", "trips.parquet", "-k", 2, "-o", "out").output
        assert said.count("column 'trip_id' holds whole numbers") == 1

    def test_many_are_counted(self):
        same = {f"p{number}": 0.0 for number in range(12)}
        (said,) = self.fitted(self.FEATURES.assign(**same))[1]
        assert "columns 'p0', 'p1', 'p2', 'p3', 'p4' and 7 more are constant in all" in said
        assert said.endswith("They cannot separate components: leave them out.")
