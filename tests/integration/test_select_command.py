"""`emtau select`: its table, its files, its refusals, and how it goes on."""

import json
import math
import shlex
import uuid
from dataclasses import replace

import fsspec
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau

from emtau_dask import ConfigError, GaussianMixture, select_components
from emtau_dask.cli.main import CRITERIA, SHARED
from emtau_dask.cli.options import OPTIONS
from emtau_dask.cli.select import numbers_of
from emtau_dask.selection import CandidateRecord, SelectionTable
from emtau_dask.selection.criteria import CRITERIA as KNOWN

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(600, 2)) + 8.0 * RNG.integers(3, size=600)[:, None]
ROWS.setflags(write=False)
TABLE = pd.DataFrame(ROWS, columns=["a", "b"])


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array(store=tmp_path / "m.zarr", data=ROWS, chunks=(100, 2))
    return tmp_path


def selected(*arguments, code=0):
    result = emtau("select", *arguments, "--algorithm", "em")
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments, code=2):
    return selected(*arguments, code=code).stderr.splitlines()[-1]


def test_it_finds_what_python_finds(place):
    result = emtau("select", "m.zarr", "--components", "2:3", "--covariance", "full,diag", "--json")
    values = json.loads(result.stdout)
    found = select_components(ROWS, [2, 3], covariance_types=("full", "diag"), random_state=0)
    assert (values["n_components"], values["covariance_type"]) == (3, found.best_covariance_type_)
    assert values["sample_rows"] == found.sample_rows_
    for theirs, ours in zip(values["candidates"], found.table_, strict=True):
        assert theirs.keys() == vars(ours).keys()
        for name in theirs.keys() - {"seconds"}:
            value = getattr(ours, name)
            assert theirs[name] == (pytest.approx(value, rel=1e-10) if isinstance(value, float) else value)
    assert values["fit"]["model"] == "runs/m-best/model.zarr"
    assert sorted(path.name for path in (place / "runs" / "m-best").iterdir()) == [
        "labels.zarr",
        "model.zarr",
        "selection",
        "selection.json",
    ]


def test_its_results_are_a_model_labels_and_a_table(place):
    result = selected("m.zarr", "--components", "2:4", "-o", "out")
    model = GaussianMixture.load(place / "out" / "model.zarr")
    assert model.n_components == 3
    assert model.converged_
    labels = zarr.open_group(place / "out" / "labels.zarr", mode="r")["labels"][:]
    assert np.array_equal(labels, model.predict(ROWS))
    values = json.loads((place / "out" / "selection.json").read_text())
    assert [each["n_components"] for each in values["candidates"]] == [2, 3, 4]
    assert values["passes"]["sample"] == values["passes"]["scoring"] == 1
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert result.stdout.isascii()
    assert "best by BIC: 3 components, full covariance" in result.stdout
    assert "passes over 600 rows: 1 for the sample, 1 for scores, " in result.stdout
    assert "table saved in out/selection.json" in result.stdout
    assert "next: emtau inspect out, or emtau predict out DATA labels.zarr" in result.stdout
    predicted = emtau("predict", "out", "m.zarr", "again.zarr")
    assert predicted.exit_code == 0, predicted.output


def test_a_wide_table_stays_whole_within_80_columns():
    """Of 10⁹ rows, with the longest type, a hundred components and a candidate that collapsed."""
    big = CandidateRecord(100, "tied_spherical", 23_456, -123.456, 2.5e11, 2.4e11, 2.6e11, -123.457)
    records = (
        big,
        replace(big, bic=2.5e11 + 9_999_999, icl=3.1e11),
        CandidateRecord(7, "full", 1, reason="x"),
    )
    printed = SelectionTable(records, "bic", 0).text("a title")
    assert printed.isascii()
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["*", "100", "!"]
    for text in ("tied_spherical", "23,456", "-123.456", "9,999,999", "5.00e+10", "-123.457"):
        assert text in printed


def test_the_same_command_goes_on_and_another_is_refused(place):
    selected("m.zarr", "--components", "2:4", "-o", "out")
    kept = {path: path.stat().st_mtime_ns for path in (place / "out" / "selection").rglob("*")}
    again = selected("m.zarr", "--components", "2:4", "-o", "out", "--criterion", "icl")
    assert "best by ICL" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (place / "out" / "selection").rglob("*")} == kept
    line = refusal("m.zarr", "--components", "2:5", "-o", "out", code=1)
    assert "out/selection has other candidates: not K = 5 (full). Give the same" in line
    assert "(emtau select: -o FOLDER), or begin anew (emtau select: --overwrite;" in line
    line = refusal("m.zarr", "--components", "3:4", "-o", "out", "--covariance", "diag,full", code=1)
    assert "candidates: not K = 3 (diag), K = 4 (diag); also K = 2 (full). " in line
    replaced = selected("m.zarr", "--components", "2:3", "-o", "out", "--overwrite")
    assert "best by BIC: 3" in replaced.stdout
    assert "the largest number that was tried; try larger ones, too: -k 3:6" in replaced.stdout


def test_what_is_done_may_be_kept_behind_a_url(place, monkeypatch):
    url = f"memory://{uuid.uuid4().hex}/chosen"
    options = ("m.zarr", "--components", "2:3", "--checkpoint", url, "-o", "out")
    first = selected(*options)
    files = fsspec.filesystem("memory")
    kept = {path: files.modified(path) for path in files.find(url)}
    runs = {f"candidates/full-{number}.zarr/zarr.json" for number in (2, 3)}
    assert {path.partition("chosen/")[2] for path in kept} >= {"selection.json", *runs}
    assert sorted(each.name for each in place.iterdir()) == ["m.zarr", "out"]
    assert not (place / "out" / "selection").exists()
    again = selected(*options)
    assert "emtau: warning: " in again.stderr
    assert "on condition that it is new" in again.stderr
    assert again.stdout == first.stdout
    assert {path: files.modified(path) for path in files.find(url)} == kept
    selected(*options, "--overwrite")
    assert files.modified(f"{url}/selection.json") > kept[f"{url.removeprefix('memory:/')}/selection.json"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("emtau_dask.selection.fits.fit_sample", interrupted)
    assert f"done is in {url}." in refusal(*options, "--overwrite", code=130)


def test_its_report_shows_the_candidates(place):
    selected("m.zarr", "-k", 2, "-k", 3, "--set", "output.report=report.html", "-o", "out")
    assert "held out" in (place / "out" / "report.html").read_text()


def test_results_of_others_are_left_alone(place):
    assert emtau("fit", "m.zarr", "-k", "2", "-o", "out").exit_code == 0
    assert "already exists" in refusal("m.zarr", "--components", "2:3", "-o", "out", code=1)
    (place / "mine").mkdir()
    (place / "mine" / "selection.json").write_text("mine")
    assert "already exists" in refusal("m.zarr", "--components", "2:3", "-o", "mine", code=1)
    assert (place / "mine" / "selection.json").read_text() == "mine"


def test_columns_and_settings_reach_the_candidates(place):
    TABLE.assign(c=0.0).to_parquet(place / "t.parquet")
    options = ("--columns", "b", "--set", "model.reg_covar=1e-2", "--seed", "4", "--sample-rows", "300")
    values = json.loads(selected("t.parquet", "-k", "2,3", *options, "--json").stdout)
    assert [each["n_components"] for each in values["candidates"]] == [2, 3]
    estimator = GaussianMixture(reg_covar=1e-2, algorithm="em")
    found = select_components(ROWS[:, 1:], [2, 3], estimator=estimator, random_state=4, sample_rows=300)
    assert [each["bic"] for each in values["candidates"]] == pytest.approx(
        [each.bic for each in found.table_]
    )


def test_rows_with_missing_values_are_dropped_and_a_selection_of_all_is_replaced(place):
    rows = ROWS.copy()
    rows[::5, 0] = np.nan
    np.save("holes.npy", rows)
    options = ("holes.npy", "-k", "2,3", "-o", "out")
    assert "emtau: --missing drop" in refusal(*options, code=1)
    assert "--overwrite" in refusal(*options, "--missing", "drop", code=1)
    values = json.loads(selected(*options, "--missing", "drop", "--overwrite", "--json").stdout)
    assert values["rows"] == 480
    values = json.loads(selected(*options, "--missing", "marginalise", "--overwrite", "--json").stdout)
    assert values["rows"] == 600


def test_a_fit_that_stops_at_max_iter_ends_with_3():
    result = selected("m.zarr", "--components", "2,3", "--max-iter", "1", code=3)
    assert "max_iter" in result.stderr


REFUSED = {
    "--components 3:2": "3:2 is empty",
    "--components two": "give a range with both ends, such as 2:20",
    "--components 0:2": "--components has 0",
    "--components 2 --components 2": "--components has 2 twice",
    "--components 1:99999999": "more than 10,000 numbers",
    "--components 2:3 --covariance full,round": "--covariance has 'round'",
    "--components 2:3 --covariance full --covariance dia": "the nearest valid value is diag",
    "--components 2:3 --set model.n_components=3": "give --components",
    "--components 2:3 --set output.directory=x": "give -o",
    "--components 2:3 --set model.reg_cover=1": "model.reg_covar",
    "--components 2:3 --criterion bci": "'bic', 'aic', 'icl', 'held-out'",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_asked_is_refused(options):
    assert REFUSED[options] in refusal("m.zarr", *shlex.split(options))


def test_a_config_and_no_data_are_refused():
    assert "give data to emtau select" in refusal("fit.yaml", "--components", "2:3")
    assert "does not exist" in refusal("none.zarr", "--components", "2:3", code=1)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2:5", [2, 3, 4, 5]),
        ("10:30:10", [10, 20, 30]),
        ("2,4, 8", [2, 4, 8]),
        ("1:2,7", [1, 2, 7]),
        ("3", [3]),
    ],
)
def test_numbers_are_lists_and_ranges_with_both_ends(text, numbers):
    assert numbers_of(text) == numbers


@pytest.mark.parametrize("text", ["", ":", "1:", "-1:3", "1:2:0", "1:2:3:4", "1.5"])
def test_no_other_texts_are_numbers(text):
    with pytest.raises(ConfigError, match="--components"):
        numbers_of(text)


@pytest.mark.parametrize(
    ("options", "said"), [((), "done is in runs/m-best."), (("-o", "out"), "done is in out.")]
)
def test_an_interrupt_says_how_it_goes_on(options, said, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("emtau_dask.selection.fits.fit_sample", interrupted)
    assert said in refusal("m.zarr", "--components", "2:3", *options, code=130)


def test_criteria_and_shared_options_are_those_of_the_package():
    assert tuple(KNOWN) == CRITERIA
    assert {option.key for option in OPTIONS} >= set(SHARED)


def test_a_candidate_that_collapses_is_named():
    X = np.repeat([[0.0, 0.0], [5.0, 5.0]], 40, axis=0)
    X[:40] += np.random.default_rng(0).normal(size=(40, 2))
    np.save("c.npy", X)
    result = selected("c.npy", "--components", "1:2", "--set", "model.reg_covar=0")
    assert "could not be fitted: K = 2 (full). The first: Fitting the mixture model failed" in result.stdout
    found = selected("c.npy", "--components", "1:2", "--set", "model.reg_covar=0", "--json")
    values = json.loads(found.stdout)
    assert values["candidates"][1]["bic"] is None
    assert math.isfinite(values["candidates"][0]["bic"])
