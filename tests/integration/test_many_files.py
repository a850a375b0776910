"""Several files as one table: by a pattern, in the order of their names, or by a list, in its order."""

import json
from pathlib import Path

import dask.array as da
import fsspec
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau
from distributed import Client
from fits import ROWS, assert_same_bits, mixture

from emtau_dask import CheckpointMismatchError, GaussianMixture, InvalidDataError
from emtau_dask.data.opening import as_dask, open_source

PIECES = np.split(ROWS, [90, 200])
NAMES = ["part-0", "part-9", "part-10"]
"""In the order in which dask reads them: 9 comes before 10."""


def in_npy(name, rows):
    np.save(f"{name}.npy", rows)


def in_zarr(name, rows):
    zarr.create_array(store=f"{name}.zarr", data=rows, chunks=(50, 2))


def in_parquet(name, rows):
    pd.DataFrame(rows, columns=["x", "y"]).to_parquet(f"{name}.parquet")


def in_csv(name, rows):
    pd.DataFrame(rows, columns=["x", "y"]).to_csv(f"{name}.csv", index=False)


FORMATS = {".npy": in_npy, ".zarr": in_zarr, ".parquet": in_parquet, ".csv": in_csv}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    return tmp_path


@pytest.fixture(params=FORMATS)
def ending(request):
    for name, rows in zip(NAMES, PIECES, strict=True):
        FORMATS[request.param](f"data/{name}", rows)
    return request.param


def rows_of(source):
    return as_dask(open_source(source)).compute()


class TestAPattern:
    def test_gives_the_files_that_it_matches_in_the_order_of_their_names(self, ending):
        for pattern in ("data/part-*", "**/part-*"):
            np.testing.assert_array_equal(rows_of(f"{pattern}{ending}"), ROWS)
        np.testing.assert_array_equal(rows_of(f"data/part-?{ending}"), ROWS[:200])
        of_0_and_10 = rows_of(f"data/part-[0-1]*{ending}")
        np.testing.assert_array_equal(of_0_and_10, np.concatenate([PIECES[0], PIECES[2]]))

    def test_that_is_the_name_of_a_file_is_that_file(self):
        in_npy("data/part-[9]", ROWS)
        in_npy("data/part-9", ROWS[:5])
        assert len(rows_of("data/part-[9].npy")) == 300

    def test_that_matches_nothing_is_refused(self):
        with pytest.raises(InvalidDataError, match=r"nothing matches data/\*\.npy"):
            open_source("data/*.npy")

    def test_behind_a_url(self):
        files = fsspec.filesystem("memory")
        for name, rows in zip(NAMES, PIECES, strict=True):
            in_npy(f"data/{name}", rows)
        files.put("data", "/many", recursive=True)
        try:
            np.testing.assert_array_equal(rows_of("memory://many/part-*.npy"), ROWS)
            with pytest.raises(InvalidDataError, match=r"nothing matches memory://many/\*\.zarr"):
                open_source("memory://many/*.zarr")
        finally:
            files.rm("/many", recursive=True)


class TestAList:
    def test_gives_the_files_in_its_order(self, ending):
        names = [f"data/{name}{ending}" for name in reversed(NAMES)]
        np.testing.assert_array_equal(rows_of(names), np.concatenate(PIECES[::-1]))

    def test_may_hold_patterns_and_formats_of_all_kinds(self):
        in_npy("data/a", PIECES[0])
        in_zarr("data/b", PIECES[1].astype("float32"))
        in_parquet("data/c", PIECES[2])
        found = rows_of(["data/a.npy", "data/b*", "data/c.parquet"])
        np.testing.assert_array_equal(found, np.concatenate([PIECES[0], PIECES[1].astype("f4"), PIECES[2]]))

    def test_of_files_with_other_features_is_refused(self):
        in_npy("data/a", ROWS)
        in_npy("data/b", ROWS[:, :1])
        with pytest.raises(InvalidDataError, match=r"data/b\.npy has 1 feature.*data/a\.npy has 2"):
            open_source(["data/a.npy", "data/b.npy"])

    def test_of_files_with_other_names_of_features_is_refused(self):
        in_parquet("data/a", ROWS)
        pd.DataFrame(ROWS, columns=["y", "z"]).to_parquet("data/b.parquet")
        with pytest.raises(InvalidDataError, match=r"b\.parquet has no column 'x'"):
            open_source(["data/a.parquet", "data/b.parquet"])

    def test_with_a_file_that_is_missing_names_it(self):
        in_npy("data/a", ROWS)
        with pytest.raises(InvalidDataError, match=r"data/b\.npy does not exist"):
            open_source(["data/a.npy", "data/b.npy"])


class TestTheEstimator:
    @pytest.mark.parametrize("as_path", [str, Path])
    def test_takes_patterns_and_lists(self, ending, as_path):
        expected = mixture(tol=1e-3).fit(open_source(f"data/*{ending}"))
        paths = [as_path(f"data/{name}{ending}") for name in NAMES]
        for source in (as_path(f"data/*{ending}"), paths, tuple(paths)):
            found = mixture(tol=1e-3).fit(source)
            assert_same_bits(found, expected)
            labels = found.predict(source)
            assert isinstance(labels, da.Array)
            np.testing.assert_array_equal(labels, expected.predict(ROWS))

    def test_resumes_with_the_same_files_and_no_others(self, ending):
        expected = mixture(tol=1e-3, checkpoint="run.zarr").fit(f"data/*{ending}")
        assert_same_bits(GaussianMixture.resume("run.zarr", f"data/*{ending}"), expected)
        FORMATS[ending]("data/part-99", ROWS)
        with pytest.raises(CheckpointMismatchError, match="600"):
            GaussianMixture.resume("run.zarr", f"data/*{ending}")

    def test_has_the_same_bits_on_a_cluster(self, ending):
        expected = mixture(tol=1e-3).fit(f"data/*{ending}")
        with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None):
            found = mixture(tol=1e-3).fit(f"data/*{ending}")
            np.testing.assert_array_equal(found.predict(f"data/*{ending}"), expected.predict(ROWS))
        assert_same_bits(found, expected)

    def test_chooses_columns(self):
        for name, rows in zip(NAMES, PIECES, strict=True):
            in_parquet(f"data/{name}", rows)
        fitted = mixture(tol=1e-3).fit("data/*.parquet", columns=["y"])
        assert fitted.feature_names_in_.tolist() == ["y"]
        np.testing.assert_array_equal(fitted.predict("data/*.parquet"), fitted.predict(ROWS[:, 1:]))


class TestTheCommandLine:
    @staticmethod
    def config(path):
        Path("run.yaml").write_text(
            f"data: {{path: {json.dumps(path)}}}\nmodel: {{n_components: 3}}\nalgorithm: {{name: em}}\n"
            "stop: {tol: 1e-3}\ncheckpoint: {path: run.zarr}\noutput: {directory: out}\n"
        )

    @pytest.mark.parametrize("listed", [False, True])
    def test_fits_resumes_and_predicts(self, ending, place, monkeypatch, listed):
        paths = [f"data/{name}{ending}" for name in NAMES]
        self.config(paths if listed else f"data/*{ending}")
        assert emtau("fit", "run.yaml", "--set", "stop.max_iter=2").exit_code == 3
        (place / "elsewhere").mkdir()
        monkeypatch.chdir(place / "elsewhere")
        assert emtau("resume", "../run.zarr", "--set", "stop.max_iter=50").exit_code == 0
        monkeypatch.chdir(place)
        expected = mixture(tol=1e-3).fit(open_source(f"data/*{ending}"))
        model = GaussianMixture.load("out/model.zarr")
        np.testing.assert_allclose(model.means_, expected.means_)
        assert emtau("predict", "out/model.zarr", f"data/*{ending}", "labels.zarr").exit_code == 0
        labels = zarr.open_group("labels.zarr", mode="r")["labels"][...]
        np.testing.assert_array_equal(labels, model.predict(ROWS))

    def test_takes_weights_from_the_same_tables(self):
        for name, rows in zip(NAMES, PIECES, strict=True):
            pd.DataFrame({"x": rows[:, 0], "y": rows[:, 1], "w": 1.0}).to_parquet(f"data/{name}.parquet")
        self.config("data/*.parquet")
        assert emtau("fit", "run.yaml", "--set", "data.weights=w").exit_code == 0
        assert GaussianMixture.load("out/model.zarr").feature_names_in_.tolist() == ["x", "y"]

    def test_never_writes_over_what_it_reads(self, ending):
        self.config(f"data/*{ending}")
        result = emtau("fit", "run.yaml", "--overwrite", "--set", f"output.labels=../data/{NAMES[0]}.zarr")
        if ending == ".zarr":
            assert "which this run reads" in result.stderr
        np.testing.assert_array_equal(rows_of(f"data/*{ending}"), ROWS)
