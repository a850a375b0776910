"""`emtau report`: the page says what the fit was, holds all that it shows, and obeys nobody's data."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
import zarr
from commands import emtau

from emtau_dask import GaussianMixture
from emtau_dask.em import FitHistory
from emtau_dask.estimator.fitting import fit_estimator
from emtau_dask.estimator.row_sample import drawn_rows
from emtau_dask.estimator.summary import share_text
from emtau_dask.plot import PairsDisplay
from emtau_dask.report.content import Subject, summary_of_rows, tables_of, warnings_of
from emtau_dask.report.page import report_page

EVIL = "<script>alert(1)</script>"
EVIL_ATTRIBUTE = "\"><img src=x onerror='alert(2)'>"


def rows_of(n=900, d=3, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, d))
    rows[: n // 2, 0] += 6
    rng.shuffle(rows)
    return rows


class Page(HTMLParser):
    """The elements of a page in order, and its text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.words = [], []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page_at(path):
    return Page(Path(path).read_text(encoding="utf-8"))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array(store=tmp_path / "points.zarr", data=rows_of(), chunks=(300, 3))
    return tmp_path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder with data and a run, which has a model and a checkpoint in its folder."""
    folder = tmp_path_factory.mktemp("fitted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        zarr.create_array(store=folder / "points.zarr", data=rows_of(), chunks=(300, 3))
        where = ["--set", "checkpoint.path=runs/points/run.zarr"]
        assert emtau("fit", "points.zarr", "-k", 2, "-o", "runs/points", *where).exit_code == 0
    return folder


@pytest.fixture
def run(fitted, workplace):
    """A copy of that run, whose checkpoint names the data of the first one."""
    shutil.copytree(fitted / "runs", workplace / "runs")
    return workplace / "runs/points"


@pytest.mark.parametrize("place", ["runs/points", "runs/points/model.zarr", "runs/points/run.zarr"])
def test_a_report_of_a_folder_a_model_and_a_checkpoint(run, place):
    result = emtau("report", place, "out.html")
    assert result.exit_code == 0, result.output
    assert "report written to out.html" in result.output
    page, model = page_at("out.html"), GaussianMixture.load(str(run / "model.zarr"))
    assert [
        text for text in ("Converged", "900 rows", "2 components", "passes") if text not in page.text
    ] == []
    assert f"{model.lower_bound_:.9g}" in page.text
    for k in range(2):
        assert f"{model.weights_[k]:.4f}" in page.text
        assert f"{model.means_[k, 0]:.2f} ± {np.sqrt(model.covariances_[k, 0, 0]):.2f}" in page.text
    assert f"emtau report {place.removesuffix('points')}" in page.text
    assert "The data were not read" in page.text
    assert len(page.of("svg")) == 4
    assert "Save this config" in page.text
    assert ("Versions of the fit" in page.text) == (place != "runs/points/model.zarr")


def test_the_config_of_the_page_repeats_the_fit(run):
    emtau("report", run, "out.html")
    html = Path("out.html").read_text(encoding="utf-8")
    (config,) = re.findall(r'<pre [^>]*aria-label="The config of the run">(.*?)</pre>', html, re.DOTALL)
    (command,) = re.findall(r'<pre [^>]*aria-label="The command">(.*?)</pre>', html, re.DOTALL)
    Path("fit.yaml").write_text("".join(Page(config).words))
    result = emtau(*command.split()[1:])
    assert result.exit_code == 0, result.output
    again, first = (GaussianMixture.load(f"{place}/model.zarr") for place in ("runs/again", run))
    np.testing.assert_array_equal(again.means_, first.means_)


def test_the_python_of_the_page_repeats_the_fit(run):
    emtau("report", run / "model.zarr", "out.html", "--data", "points.zarr")
    html = Path("out.html").read_text(encoding="utf-8")
    (lines,) = re.findall(r'<pre [^>]*aria-label="Python">(.*?)</pre>', html, re.DOTALL)
    names = {}
    code = "".join(Page(lines).words).replace("GaussianMixture(2", "fitted = GaussianMixture(2")
    exec(code, names)
    np.testing.assert_array_equal(
        names["fitted"].means_, GaussianMixture.load(str(run / "model.zarr")).means_
    )


def test_data_are_shown_where_they_are_given(run):
    result = emtau("report", run, "out.html", "--data", "points.zarr")
    assert result.exit_code == 0, result.output
    page = page_at("out.html")
    assert len(page.of("svg")) == 7
    assert "in all 900 rows" in page.text


def test_recorded_data_are_read_only_where_that_is_asked_for(run, fitted):
    (fitted / "points.zarr").rename(fitted / "away.zarr")
    assert emtau("report", run, "a.html").exit_code == 0
    result = emtau("report", run, "b.html", "--recorded-data")
    assert result.exit_code == 1
    assert "points.zarr, the data of" in result.output
    assert "--data DATA" in result.output
    (fitted / "away.zarr").rename(fitted / "points.zarr")
    assert emtau("report", run, "c.html", "--recorded-data").exit_code == 0
    assert len(page_at("c.html").of("svg")) == 7


@pytest.mark.parametrize("command", [("fit", "-k", 2), ("select", "-k", "2:3")])
def test_a_run_without_a_checkpoint_names_its_data_and_repeats_its_fit(command, workplace):
    name, *options = command
    assert emtau(name, "points.zarr", *options, "-o", "out").exit_code == 0
    assert emtau("report", "out", "out.html", "--recorded-data").exit_code == 0
    assert len(page_at("out.html").of("svg")) == {"fit": 7, "select": 8}[name]
    assert "n_components: 2" in page_at("out.html").text


@pytest.mark.parametrize("key", ["path", "weights"])
def test_no_url_that_a_run_names_is_opened(workplace, key, monkeypatch):
    """Even where it is asked for: who wrote the checkpoint chose it."""
    data = {"path": str(workplace / "points.zarr")} | {
        key: "https://user:secret@example.invalid/x.npy?sig=abc"
    }
    content = {"data": data, "model": {"n_components": 2}, "output": {"directory": "o"}}
    gm = GaussianMixture(2, random_state=0, checkpoint="run.zarr")
    fit_estimator(gm, rows_of(), None, None, run_config=content)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *a, **k: pytest.fail("a URL was opened"))
    result = emtau("report", "run.zarr", "out.html", "--recorded-data")
    assert result.exit_code == 2
    assert f"data.{key} = https://" in result.output
    assert "--data URL" in result.output
    assert "secret" not in result.output
    assert not Path("out.html").exists()
    assert emtau("report", "run.zarr", "out.html").exit_code == 0
    written = Path("out.html").read_text(encoding="utf-8")
    assert "secret" not in written
    assert "sig=abc" not in written


def test_what_was_fitted_of_a_file_is_a_fact_and_no_warning(workplace):
    zarr.create_group("group.zarr").create_array("X", data=rows_of())
    GaussianMixture(2, random_state=0).fit("group.zarr").save("model.zarr")
    assert emtau("report", "model.zarr", "out.html").exit_code == 0
    page = page_at("out.html").text
    assert "Fitted to the array 'X' of group.zarr" in page
    assert "Worth knowing" not in page


def python_in(path):
    html = Path(path).read_text(encoding="utf-8")
    return "".join(Page(re.findall(r'<pre [^>]*aria-label="Python">(.*?)</pre>', html, re.DOTALL)[0]).words)


def executed(code):
    """The last expression of lines of Python."""
    *lines, last = code.splitlines()
    names = {}
    exec("\n".join(lines), names)
    return eval(last, names)


def test_the_python_of_a_page_chooses_the_columns(workplace):
    frame = pd.DataFrame(rows_of(), columns=["a", "b", "c"]).assign(species="Adelie")
    frame.loc[5, "a"] = np.nan
    frame.to_parquet("penguins.parquet")
    given = ["--columns", "a,b", "--missing", "drop", "--set", "output.report=report.html"]
    assert emtau("fit", "penguins.parquet", "-k", 2, *given).exit_code == 0
    emtau("report", "runs/penguins", "out.html")
    model = GaussianMixture.load("runs/penguins/model.zarr")
    model.save("model.zarr")
    emtau("report", "model.zarr", "given.html", "--data", "penguins.parquet")
    for page in ("runs/penguins/report.html", "out.html", "given.html"):
        assert "columns=['a', 'b']" in python_in(page)
        assert np.array_equal(executed(python_in(page)).means_, model.means_)


def test_the_python_of_a_page_chooses_weights_arrays_and_cubes(workplace):
    xarray = pytest.importorskip("xarray")
    zarr.create_group("group.zarr").create_array("rows", data=rows_of(), chunks=(300, 3))
    emtau("fit", "group.zarr", "-k", 2, "--array", "rows")
    grid = (("y", "x", "band"), rows_of().reshape(30, 30, 3))
    xarray.Dataset({"a": grid, "b": grid}).to_zarr("cube.zarr")
    emtau("fit", "cube.zarr", "-k", 2, "--array", "a", "--features", "band")
    for name in ("group", "cube"):
        emtau("report", f"runs/{name}", f"{name}.html")
        model = GaussianMixture.load(f"runs/{name}/model.zarr")
        np.testing.assert_allclose(executed(python_in(f"{name}.html")).means_, model.means_)
    pd.DataFrame(rows_of(), columns=["a", "b", "w"]).abs().to_parquet("weighted.parquet")
    emtau("fit", "weighted.parquet", "-k", 2, "--set", "data.weights=w")
    emtau("report", "runs/weighted", "weighted.html")
    assert python_in("weighted.html").endswith("columns=['a', 'b'], sample_weight=weights)")


def test_a_model_of_python_has_no_recorded_data(workplace):
    GaussianMixture(2, random_state=0).fit("points.zarr").save("model.zarr")
    result = emtau("report", "model.zarr", "out.html", "--recorded-data")
    assert result.exit_code == 1
    said = "does not name its data: only models and checkpoints of emtau fit do. Give them: --data DATA"
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("n", "d"),
    [(300, 1), *(pytest.param(*size, marks=pytest.mark.exhaustive) for size in [(300, 2), (1500, 2)])],
)
def test_pictures_have_ids_of_their_own_and_styles_that_end_with_them(n, d):
    """Over points, over densities, and as curves."""
    X = rows_of(n, d)
    gm = GaussianMixture(2, random_state=0, n_init=1).fit(X)
    html = report_page(Subject(gm, "x", "x", drawn=drawn_rows(gm, X, size=n, seed=0)))
    page = Page(html)
    assert len(page.of("svg")) == 7
    check_names(page, html)
    assert len(page.of("style")) == 1
    for word in ("Log-likelihood", "Uncertain rows", "feature 0", "Could still gain"):
        assert word in page.text
    assert html == report_page(Subject(gm, "x", "x", drawn=drawn_rows(gm, X, size=n, seed=0)))


def check_names(page, html):
    """Every id is there once, and every reference leads to one, or to a picture that the page holds."""
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), key
            if key in ("href", "xlink:href", "src"):
                assert value.startswith(("#", "data:image/png;base64,")), value
                assert value.startswith("data:") or value[1:] in ids
            if key == "aria-labelledby":
                assert set(value.split()) <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)


def test_the_page_loads_nothing_and_its_names_are_its_own(run):
    emtau("report", run, "out.html", "--data", "points.zarr")
    page, html = page_at("out.html"), Path("out.html").read_text(encoding="utf-8")
    for tag in ("script", "link", "iframe", "object", "embed", "base", "form"):
        assert page.of(tag) == []
    check_names(page, html)
    assert "@import" not in html
    (policy,) = [each for each in page.of("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy["content"].startswith("default-src 'none'")
    assert "style-src 'unsafe-inline'" in policy["content"]


def test_the_page_has_a_structure_that_can_be_heard(run):
    emtau("report", run, "out.html", "--data", "points.zarr")
    page = page_at("out.html")
    assert page.of("html") == [{"lang": "en"}]
    assert [len(page.of(tag)) for tag in ("h1", "header", "main", "footer", "nav")] == [1] * 5
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(each["role"] == "img" and each["aria-labelledby"] for each in page.of("svg"))
    assert all(each["aria-label"] for each in page.of("table"))
    assert {each["scope"] for each in page.of("th")} == {"col", "row"}


def test_names_of_features_cannot_become_markup(workplace):
    names = [EVIL, EVIL_ATTRIBUTE, "{{ 7 * 7 }}", "a$b_{", *(f"f{i}" for i in range(5))]
    frame = pd.DataFrame(rows_of(300, 9), columns=names)
    frame.to_parquet("evil.parquet")
    place = workplace / "<b onclick=alert(3)>"
    assert emtau("fit", "evil.parquet", "-k", 2, "-o", place, "--covariance", "diag").exit_code == 0
    result = emtau("report", place, "out.html", "--data", "evil.parquet")
    assert result.exit_code == 0, result.output
    page, html = page_at("out.html"), Path("out.html").read_text(encoding="utf-8")
    assert page.of("script") == []
    assert page.of("img") == []
    assert page.of("b") == []
    assert EVIL in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert EVIL not in html
    assert "<img" not in html


def test_secrets_and_control_characters_are_left_out():
    gm = GaussianMixture(1).fit(rows_of())
    subject = Subject(gm, "a\x1b[31m", "s3://me:pw@bucket/x?token=abc", data="https://h/x.npy?sig=zzz")
    html = report_page(subject)
    assert "\x1b" not in html
    assert "pw@" not in html
    assert "abc" not in html
    assert "zzz" not in html


def test_many_features_are_folded_and_the_most_telling_come_first():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(400, 12))
    X[:200, 7] += 9
    X[:200, 3] += 5
    gm = GaussianMixture(2, covariance_type="diag", random_state=0).fit(X)
    tables = tables_of(Subject(gm, "x", "x"), gm.summary())
    assert tables.components.headings[4:6] == ("feature 7", "feature 3")
    assert len(tables.components.headings) == 4 + 6
    assert [row[0] for row in tables.means.rows[:2]] == ["feature 7", "feature 3"]
    assert len(tables.means.rows) == 12
    page = Page(report_page(Subject(gm, "x", "x")))
    assert "All features" in page.text
    assert "separate components best: feature 7, feature 3" in page.text


def test_features_separate_nothing_where_there_is_one_component():
    X = rows_of(d=12)
    gm = GaussianMixture(1, covariance_type="diag").fit(X)
    chosen = {
        "report": Page(report_page(Subject(gm, "x", "x"))).text,
        "summary": str(gm.summary()),
        "pairs": PairsDisplay.from_estimator(gm, X).choice,
    }
    assert "the first 6 of 12 features: feature 0, feature 1," in chosen["report"]
    assert re.search("the first \\d of 12 features", chosen["summary"])
    assert chosen["pairs"] == "the first 5 of 12 features; "
    assert not any(re.search("separates? components|between components", text) for text in chosen.values())


def test_large_mixtures_make_bounded_pages():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 250))
    gm = GaussianMixture(50, covariance_type="spherical", max_iter=2, n_init=1, random_state=0, reg_covar=1)
    with pytest.warns(Warning, match="converge"):
        gm.fit(X)
    html = report_page(Subject(gm, "x", "x", drawn=drawn_rows(gm, X, size=100, seed=0)))
    text = Page(html).text
    assert "The 40 heaviest of 50 components are shown." in text
    assert "200 of 250 features" in text
    assert "100 of 300 rows" in text
    assert len(html) < 3_000_000


def test_the_certainty_of_components_is_that_of_scikit_learn():
    X = rows_of(600)
    gm = GaussianMixture(2, random_state=0).fit(X)
    subject = Subject(gm, "x", "x", drawn=drawn_rows(gm, X, size=10**6, seed=0))
    summary = summary_of_rows(subject)
    twin = gm.to_sklearn().predict_proba(X)
    labels = twin.argmax(axis=1)
    for k, row in enumerate(tables_of(subject, summary).components.rows):
        assert row[2] == f"{600 * gm.weights_[k]:,.0f}"
        share = (twin[labels == k].max(axis=1) >= 0.9).mean()
        assert summary.components[k].certain == pytest.approx(share)
        assert row[3] == share_text(share)


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100%"), (0.9999, ">99%"), (0.42, "42%"), (1e-4, "<1%"), (0.0, "0%"), (np.nan, "-")],
)
def test_only_all_rows_are_called_100_percent(share, text):
    assert share_text(share) == text


def test_warnings_name_what_a_reader_must_know():
    X = np.concatenate([rows_of(200), np.full((4, 3), 50.0) + np.eye(4, 3)])
    gm = GaussianMixture(3, max_iter=2, random_state=0, n_init=1, tol=0)
    with pytest.warns(Warning, match="converge"):
        gm.fit(X)
    assert "reached max_iter = 2" in " ".join(warnings_of(Subject(gm, "x", "x")))
    assert "Few rows for 3 features: component" in Page(report_page(Subject(gm, "x", "x"))).text
    assert warnings_of(Subject(GaussianMixture(2, random_state=0).fit(rows_of()), "x", "x")) == []
    unfinished = Subject(gm, "x", "x", finished=False)
    assert "The run has not ended" in " ".join(warnings_of(unfinished))
    assert "Not finished" in Page(report_page(unfinished)).text


def test_a_report_of_a_selection_shows_its_candidates(workplace):
    selected = emtau(
        "select", "points.zarr", "--components", "1:3", "--covariance", "full,diag", "-o", "chosen"
    )
    assert selected.exit_code == 0, selected.output
    assert emtau("report", "chosen", "out.html").exit_code == 0
    page = page_at("out.html")
    written = json.loads(Path("chosen/selection.json").read_text())
    chosen = f"{written['n_components']}, {written['covariance_type']}"
    html = Path("out.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr><th scope=\"row\">(\d, \w+)</th>(.*?)</tr>", html)
    assert [name for name, _ in rows] == [
        f"{each['n_components']}, {each['covariance_type']}" for each in written["candidates"]
    ]
    assert [name for name, cells in rows if "<td>chosen</td>" in cells] == [chosen]
    assert any("best:" in word for word in page.words)
    assert "chosen by BIC of" in page.text
    damaged = {**written, "candidates": [{**written["candidates"][0], "bic": "<b>"}]}
    Path("chosen/selection.json").write_text(json.dumps(damaged))
    refused = emtau("report", "chosen", "again.html")
    assert (refused.exit_code, "is not the table of a selection" in refused.output) == (1, True)


def test_what_was_found_stands_before_how_it_ran(run):
    emtau("report", run, "out.html", "--data", "points.zarr")
    page = page_at("out.html")
    headings = [attributes["id"] for tag, attributes in page.elements if tag == "h2"]
    assert headings == ["found", "trust", "course", "again"]
    first_table = next(i for i, (tag, _) in enumerate(page.elements) if tag == "table")
    first_picture = next(i for i, (tag, _) in enumerate(page.elements) if tag == "svg")
    first_figure = next(i for i, (tag, _) in enumerate(page.elements) if tag == "dl")
    assert first_table < first_picture < first_figure
    assert page.text.count("natural logarithm") == 1


def test_a_fit_without_iterations_has_a_report():
    gm = GaussianMixture(1).fit(rows_of())
    gm.history_ = FitHistory()
    text = report_page(Subject(gm, "x", "x"))
    assert Page(text).of("svg") == []
    assert "a Gaussian mixture of 1 component<" in text


CONFIG = {
    "data": {"path": "points.zarr"},
    "model": {"n_components": 2},
    "checkpoint": {"path": "out/run.zarr"},
    "output": {"directory": "out", "report": "report.html", "labels": None},
}


def test_fit_writes_the_report_that_its_output_asks_for(workplace):
    Path("fit.yaml").write_text(yaml.safe_dump(CONFIG))
    result = emtau("fit", "fit.yaml", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output[result.output.index("{") :])["report"] == "out/report.html"
    page = page_at("out/report.html")
    assert len(page.of("svg")) == 7
    assert "in all 900 rows" in page.text
    assert "numpy" in page.text


def test_a_report_replaces_its_own_run_or_what_is_allowed(workplace):
    Path("fit.yaml").write_text(yaml.safe_dump(CONFIG))
    emtau("fit", "fit.yaml")
    again = emtau("fit", "fit.yaml", "--set", "checkpoint.path=null", "--set", "output.model=null")
    assert again.exit_code == 1
    assert "out/report.html already exists; use --overwrite" in again.output
    first = Path("out/report.html").read_bytes()
    resumed = emtau("resume", "out/run.zarr")
    assert resumed.exit_code == 0, resumed.output
    assert emtau("report", "out", "out/report.html").exit_code == 1
    assert Path("out/report.html").read_bytes()[:100] == first[:100]
    assert emtau("report", "out", "out/report.html", "--overwrite").exit_code == 0
    Path("out/report.html").write_text("<h1>mine</h1>")
    for command in (("report", "out", "out/report.html", "--overwrite"), ("resume", "out/run.zarr")):
        result = emtau(*command)
        assert result.exit_code == 1
        assert "out/report.html" in result.output
    assert Path("out/report.html").read_text() == "<h1>mine</h1>"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["report", "runs/points", "out.txt"], "a page of HTML, but the name out.txt has another ending"),
        (["report", "runs/points", "runs/points/model.zarr/x.html"], "which this run reads"),
        (["report", "runs/none", "out.html"], "runs/none"),
        (["report", "points.zarr", "out.html"], "points.zarr"),
        (["report", "runs/points", "out.html", "--data", "none.zarr"], "none.zarr"),
        (["report", "runs/points", "out.html", "--data", "wide.npy"], "wide.npy has 5 features; the fit had"),
        (["report", "runs/points", "https://h/out.html"], "is a URL"),
    ],
)
def test_what_cannot_be_reported_is_refused(run, arguments, part):
    np.save("wide.npy", np.zeros((10, 5)))
    result = emtau(*arguments)
    assert result.exit_code == 1, result.output
    assert part in result.output
    assert result.output.strip().count("\n") <= 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--data", "points.zarr", "--recorded-data"], "give one of them"),
        (["--array", "X"], "rows of --data"),
        (["--columns", "a"], "rows of --data"),
    ],
)
def test_options_that_contradict_are_refused(run, arguments, part):
    result = emtau("report", "runs/points", "out.html", *arguments)
    assert result.exit_code == 2
    assert part in result.output


def test_data_of_another_size_are_shown_with_a_note(run):
    np.save("more.npy", rows_of(1100))
    assert emtau("report", "runs/points", "out.html", "--data", "more.npy").exit_code == 0
    assert "The data that are shown have 1,100 rows; the fit had 900." in page_at("out.html").text


def test_without_matplotlib_nothing_is_begun(workplace, monkeypatch):
    Path("fit.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = emtau("fit", "fit.yaml")
    assert result.exit_code == 1
    assert "pip install 'emtau_dask[plot]'" in result.output
    assert not Path("out/run.zarr").exists()


def test_a_resumed_run_asks_before_it_writes_a_report_elsewhere(workplace):
    content = CONFIG | {"output": {**CONFIG["output"], "report": str(workplace / "elsewhere/report.html")}}
    Path("fit.yaml").write_text(yaml.safe_dump(content))
    assert emtau("fit", "fit.yaml", "--set", "stop.max_iter=1", "--set", "stop.tol=0").exit_code == 3
    Path("out").rename("moved")
    result = emtau("resume", "moved/run.zarr", "--set", "stop.max_iter=3", "--set", "output.directory=moved")
    assert result.exit_code == 2
    assert "output.report" in result.output
