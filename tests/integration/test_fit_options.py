"""`emtau fit` of data by options: the config that they amount to, their errors, results for programs."""

import json
import os
import re

import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau

from emtau_dask import GaussianMixture
from emtau_dask.cli.config import load_config
from emtau_dask.cli.main import main
from emtau_dask.cli.options import name_of
from emtau_dask.mixture.covariance_types import STRUCTURES
from emtau_dask.policies.registry import ALGORITHMS

ROWS = np.random.default_rng(0).normal(size=(60, 3)) + 9 * np.arange(2).repeat(30)[:, None]
TABLE = pd.DataFrame(ROWS, columns=["a", "b", "c"])
QUICK = ("--algorithm", "em", "--tol", "1e-3")


def fitted(*arguments, code=0):
    result = emtau("fit", *arguments)
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments, code=2):
    (line,) = fitted(*arguments, code=code).stderr.splitlines()
    return line


def array(path):
    zarr.create_array(store=path, data=ROWS, chunks=(25, 3))


WRITERS = {
    "points.zarr": array,
    "points.npy": lambda path: np.save(path, ROWS),
    "points.parquet": lambda path: TABLE.to_parquet(path),
    "points.csv": lambda path: TABLE.to_csv(path, index=False),
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(place):
    TABLE.to_parquet(place / "t.parquet")
    return "t.parquet"


class TestData:
    @pytest.mark.parametrize("name", WRITERS)
    def test_of_any_kind_are_fitted_as_by_the_estimator(self, place, name):
        WRITERS[name](place / name)
        said = fitted(name, "-k", "2", *QUICK).stdout
        assert "model saved in runs/points/model.zarr" in said
        direct = GaussianMixture(2, algorithm="em", tol=1e-3, random_state=0).fit(name)
        np.testing.assert_array_equal(GaussianMixture.load("runs/points/model.zarr").means_, direct.means_)

    def test_may_be_a_url(self, table, place):
        fitted(f"file://{place}/{table}", "-k", "2", *QUICK)
        assert (place / "runs/t/model.zarr").exists()

    def test_may_be_several_files_or_a_pattern(self, place):
        (place / "data").mkdir()
        for number, part in enumerate(np.split(ROWS, 3)):
            np.save(place / f"data/{number}.npy", part)
        fitted("data/0.npy", "data/1.npy", "data/2.npy", "-k", "2", *QUICK, "-o", "runs/files")
        fitted("data/*.npy", "-k", "2", *QUICK)
        one, other = (GaussianMixture.load(f"runs/{name}/model.zarr") for name in ("files", "data"))
        np.testing.assert_array_equal(one.means_, other.means_)

    @pytest.mark.parametrize(
        ("source", "folder"),
        [
            ("deep/in/points.zarr/", "points"),
            ("s3://bucket/year/points.parquet?versionId=SECRET", "points"),
            ("s3://bucket", "bucket"),
            ("data/**/*.parquet", "data"),
            ("part-[0-9]*.npy", "part"),
            ("our points.csv", "our-points"),
            ("*.npy", "data"),
        ],
    )
    def test_name_the_folder_of_the_results(self, source, folder):
        assert name_of(source) == folder


class TestOptions:
    def test_are_the_settings_of_the_fit(self, table):
        options = ["--columns", "c,a", "--covariance", "diag", "--algorithm", "em-tau", "--tol", "0"]
        fitted(table, "-k", 2, *options, "--max-iter", 3, "--seed", 7, "-o", "out", code=3)
        model = GaussianMixture.load("out/model.zarr")
        assert model.feature_names_in_.tolist() == ["c", "a"]
        assert model.get_params()["covariance_type"] == "diag"
        assert (model.n_iter_, model.random_state, model.tol) == (3, 7, 0)

    def test_name_a_member_of_a_group(self, place):
        zarr.create_group(place / "g.zarr").create_array("rows", data=ROWS)
        fitted("g.zarr", "-k", 2, "--array", "rows", *QUICK)

    def test_go_with_those_of_a_config(self, table):
        assert "memory of a process" in fitted(table, "-k", 2, "--workers", 1, "--plan").stdout
        fitted(table, "-k", 2, *QUICK, "--set", "output.labels=null", "--workers", 1)
        assert "use --overwrite" in refusal(table, "-k", 2, *QUICK, code=1)
        fitted(table, "-k", 2, *QUICK, "--overwrite")

    def test_say_what_may_be_chosen(self):
        said = re.sub(r"-\s+", "-", emtau("fit", "--help").stdout)
        assert {*STRUCTURES, *ALGORITHMS} <= set(re.findall(r"[\w-]+", said))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ([], "-k/--components (model.n_components) is missing"),
            (["-k", "0"], "-k/--components (model.n_components) = 0 must be an integer of at least 1"),
            (["-k", "two"], "-k/--components (model.n_components) = 'two' must be an integer"),
            (
                ["-k", "2", "--covariance", "ful"],
                "--covariance (model.covariance_type) = 'ful' must be one of",
            ),
            (["-k", "2", "--covariance", "ful"], "the nearest valid value is full"),
            (["-k", "2", "--tol", "-1"], "--tol (stop.tol) = -1 must be"),
            (["-k", "2", "--tol", "["], "--tol is not valid YAML"),
            (["-k", "2", "--max-iter", "1.5"], "--max-iter (stop.max_iter) = 1.5"),
            (["-k", "2", "--seed", "-1"], "--seed (model.random_state) = -1"),
            (["-k", "2", "--columns", "a,a"], "--columns (data.columns) = ['a', 'a'] must be a list"),
            (["-k", "2", "--algorithm", "emtau"], "--algorithm (algorithm.name) = 'emtau' must be"),
            (["-k", "2", "-o", ""], "-o/--output (output.directory) = '' must be a folder"),
        ],
    )
    def test_that_are_impossible_are_named(self, table, options, said):
        assert said in refusal(table, *options)

    def test_for_a_config_are_refused_with_the_way_to_say_it(self, place):
        (place / "run.yaml").write_text("data: {path: t.parquet}\nmodel: {n_components: 2}\n")
        line = refusal("run.yaml", "-k", "8", "--columns", "a,1e5", "-o", "out")
        assert "-k/--components" in line
        assert (
            "--set model.n_components=8 --set 'data.columns=[a, \"1e5\"]' --set output.directory=out" in line
        )

    def test_of_a_long_url_do_not_look_for_a_file(self):
        line = refusal(f"https://127.0.0.1:9/{'x' * 300}.npy", "-k", "0")
        assert "-k/--components" in line

    @pytest.mark.parametrize("name", ["points.csv", "points.npy", "points.parquet", "points.zarr", "points"])
    def test_a_pipe_is_called_one(self, table, name):
        """With options it cannot be a config; that a name says so was not looked at."""
        os.mkfifo(name)
        said = refusal(name, "-k", 3)
        assert f"{name} is a pipe. Give data in a file" in said
        assert "--set model.n_components=3" in said
        assert "but a pipe; give a file" in refusal(table, name, "-k", 3, code=1)
        assert "config points" in refusal(name)

    def test_a_config_among_data_is_refused(self, table):
        assert "run.yml" in refusal("run.yml", table, "-k", "2")


class TestSaveConfig:
    def test_writes_a_config_that_gives_the_same_bits(self, place, table):
        options = ["--columns", "c", "--columns", "a", "--covariance", "tied", "--seed", 3, *QUICK]
        fitted(table, "-k", 2, *options, "--set", "model.reg_covar=1e-5", "--save-config", "fit.yaml")
        first = GaussianMixture.load("runs/t/model.zarr")
        assert load_config("fit.yaml").model.reg_covar == 1e-5
        fitted("fit.yaml", "--overwrite")
        second = GaussianMixture.load("runs/t/model.zarr")
        for name in ("weights_", "means_", "covariances_", "lower_bound_"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))

    def test_keeps_texts_that_look_like_numbers(self, place):
        TABLE.rename(columns={"a": "1e5", "b": "null", "c": "é: x"}).to_parquet(place / "t.parquet")
        fitted("t.parquet", "-k", 2, "--columns", "1e5,null,é: x", "--plan", "--save-config", "fit.yml")
        assert load_config("fit.yml").data.columns == ("1e5", "null", "é: x")

    def test_replaces_another_file_only_with_overwrite(self, place, table):
        options = [table, "-k", 2, "--plan", "--save-config", "fit.yaml"]
        fitted(*options)
        fitted(*options)
        (place / "fit.yaml").write_text("mine")
        assert "fit.yaml already exists; use --overwrite" in refusal(*options, code=1)
        fitted(*options, "--overwrite")
        assert load_config("fit.yaml").model.n_components == 2

    def test_needs_a_name_that_fit_takes_for_a_config(self, place, table):
        assert "fit.txt must end in .yaml" in refusal(table, "-k", 2, "--plan", "--save-config", "fit.txt")

    def test_says_where_it_cannot_write(self, place, table):
        (place / "file").write_text("")
        line = refusal(table, "-k", 2, "--plan", "--save-config", "file/fit.yaml", code=1)
        assert "config cannot be written to file/fit.yaml" in line

    def test_writes_no_secret(self, place):
        line = refusal("https://me:SECRET@host/x.npy", "-k", 2, "--plan", "--save-config", "fit.yaml")
        assert "fit.yaml would hold a secret" in line
        assert "SECRET" not in line
        assert not (place / "fit.yaml").exists()


def test_the_result_is_one_json_object_for_programs(place, table):
    found = json.loads(fitted(table, "-k", 2, *QUICK, "--json").stdout)
    model = GaussianMixture.load("runs/t/model.zarr")
    labels = zarr.open_group("runs/t/labels.zarr", mode="r")["labels"][:]
    assert found == {
        "components": 2, "rows": 60, "features": 3, "left_out": 0,
        "lower_bound": model.lower_bound_, "gap": found["gap"],
        "converged": True, "stop_reason": model.stop_reason_, "iterations": model.n_iter_,
        "work": model.history_.work, "model": "runs/t/model.zarr", "labels": "runs/t/labels.zarr",
        "report": None, "rows_by_label": np.bincount(labels, minlength=2).tolist(),
    }  # fmt: skip


def test_a_result_for_programs_says_null_for_what_is_not_there(table):
    result = fitted(table, "-k", 2, "--max-iter", 1, *QUICK, "--json", "--set", "output.labels=null", code=3)
    found = json.loads(result.stdout)
    assert (found["converged"], found["stop_reason"], found["gap"], found["labels"]) == (
        False, "max-iter", None, None,
    )  # fmt: skip
    assert "without converging" in result.stderr


def test_the_result_of_a_resumed_fit_is_one_json_object_too(table):
    options = ["-k", 2, "--algorithm", "em", "--tol", 0, "--set", "checkpoint.path=runs/t/run.zarr"]
    fitted(table, *options, "--max-iter", 2, code=3)
    resumed = emtau("resume", "runs/t/run.zarr", "--set", "stop.max_iter=4", "--json")
    assert json.loads(resumed.stdout)["iterations"] == 4


def test_names_of_files_are_completed():
    fit = main.commands["fit"]
    (sources,) = (each for each in fit.params if each.name == "sources")
    (found,) = sources.shell_complete(fit.make_context("fit", ["x"]), "da")
    assert found.type == "file"


def test_a_plan_is_for_people(table):
    assert "--json" in refusal(table, "-k", 2, "--plan", "--json")


def test_a_wrong_column_is_named_before_results_that_exist(table):
    fitted(table, "-k", 2, *QUICK)
    result = emtau("fit", table, "-k", 2, "--columns", "misspelt")
    assert "has no column 'misspelt'" in result.stderr
    assert "(-o FOLDER, or --set output.directory=FOLDER)" in emtau("fit", table, "-k", 2).stderr
