"""What a notebook and a prompt show: the estimator, its history, its summary."""

import html.parser
import math
import sys

import numpy as np
import pandas as pd
import pytest
import sklearn

from emtau_dask import GaussianMixture
from emtau_dask.em import FitHistory
from emtau_dask.errors import MissingPackageError

ROWS = np.random.default_rng(0).normal(size=(300, 2)) + np.repeat([[0.0], [5.0], [-6.0]], 100, axis=0)
FRAME = pd.DataFrame(ROWS, columns=["height <m>", "weight"], index=np.arange(1000, 1300))


@pytest.fixture(scope="module")
def fitted():
    return GaussianMixture(3, random_state=0).fit(FRAME)


class Cells(html.parser.HTMLParser):
    """The texts of a table's cells; every element must be closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.cells.append("") if tag in ("td", "th") else None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_scikit_learn_shows_the_estimator(fitted):
    assert "GaussianMixture" in fitted._repr_html_()
    assert "Not fitted" in GaussianMixture()._repr_html_()
    assert 'href="https://scikit-learn.org' not in fitted._repr_html_()


@pytest.mark.parametrize("site", [None, "https://docs.example/emtau"])
def test_its_link_leads_to_the_pages_that_the_package_names(site, tmp_path, monkeypatch):
    folder = tmp_path / "emtau_dask-0.dist-info"
    folder.mkdir()
    url = "" if site is None else f"Project-URL: Documentation, {site}/\n"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: emtau_dask\nVersion: 0\n{url}")
    monkeypatch.syspath_prepend(str(tmp_path))
    page = "api/emtau_dask.GaussianMixture.html"
    assert GaussianMixture()._get_doc_link() == ("" if site is None else f"{site}/{page}")


def test_the_history_is_short_at_a_prompt_and_whole_as_a_frame(fitted):
    history = fitted.history_
    assert len(repr(history)) < 160
    assert f"{len(history)} iterations" in repr(history)
    frame = history.to_frame()
    assert list(frame["lower_bound"]) == fitted.lower_bounds_
    assert list(frame.index) == [record.iteration for record in history]
    assert frame["active_rows"].sum() / 300 == pytest.approx(history.work)
    assert frame["accepted"].dtype == bool


def test_the_history_of_no_iterations_has_a_frame_too():
    history = GaussianMixture(2, random_state=0, max_iter=0).fit(ROWS).history_
    assert "0 iterations" in repr(history)
    assert history.to_frame().shape == (0, 11)
    assert Cells(history._repr_html_()).cells


def test_a_notebook_shows_the_last_iterations(fitted):
    cells = Cells(fitted.history_._repr_html_()).cells
    assert str(len(fitted.history_)) in cells
    assert f"{fitted.lower_bounds_[-1]:.9g}" in cells


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        FitHistory().to_frame()


def test_the_history_is_printed_as_a_table_of_its_last_iterations(fitted, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    caption, headings, *lines = str(fitted.history_).splitlines()
    assert caption.startswith(repr(fitted.history_))
    assert headings.split()[:2] == ["iteration", "log-lik./row"]
    assert [int(line.split()[0]) for line in lines] == [each.iteration for each in fitted.history_[-10:]]


def test_the_summary_has_what_was_fitted(fitted):
    summary = fitted.summary()
    assert [component.weight for component in summary.components] == list(fitted.weights_)
    for k, component in enumerate(summary.components):
        assert np.array_equal(component.mean, fitted.means_[k])
        expected = np.sqrt(np.diag(fitted.covariances_[k]))
        np.testing.assert_allclose(component.standard_deviations, expected)
    assert (summary.converged, summary.stop_reason) == (True, "tol")
    assert (summary.lower_bound, summary.gap) == (fitted.lower_bound_, fitted.gap_)
    assert (summary.n_iter, summary.work) == (fitted.n_iter_, fitted.history_.work)
    assert summary.feature_names == ("height <m>", "weight")
    with pytest.raises(AttributeError):
        summary.work = 0


@pytest.mark.parametrize(
    ("k", "features", "covariance_type"), [(3, 2, "full"), (2, 20, "tied_spherical"), (50, 1, "diag")]
)
def test_the_summary_is_read_in_a_terminal(k, features, covariance_type):
    rows = np.random.default_rng(1).normal(size=(400, features)) * 1e5
    mixture = GaussianMixture(k, covariance_type=covariance_type, random_state=0, tol=1.0).fit(rows)
    text = str(mixture.summary())
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 60
    heaviest = f"{max(mixture.weights_):.4f}"
    for part in (f"{k} components", covariance_type, "400 rows", "natural logarithm", "passes", heaviest):
        assert part in text
    assert repr(mixture.summary()) == text


def test_the_summary_says_first_what_was_found_then_whether_to_trust_it_then_how_it_ran(fitted):
    text, shown = str(fitted.summary()), fitted.summary()._repr_html_()
    parts = [
        "3 components in 300 rows",
        "weight",
        "rows: weight × rows of the data",
        "converged",
        "could still gain",
        "ran: ",
    ]
    for whole in (text, shown):
        places = [whole.index(part) for part in parts]
        assert places == sorted(places)
    assert text.count("natural logarithm") == 1
    counted = [round(component.rows) for component in fitted.summary().components]
    assert counted == [round(300 * weight) for weight in fitted.weights_]
    parameters = 3 * (2 + 3) + 2
    assert f"sampling error (p/2N): about {parameters / (2 * 300):.2g} per row" in text


def test_long_names_of_features_take_two_lines_so_that_more_features_fit():
    names = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g"]
    scale = [3.0, 1.0, 7.0, 400.0]
    rows = pd.DataFrame(
        np.random.default_rng(0).normal(size=(300, 4)) * scale + [40, 17, 200, 4000], columns=names
    )
    lines = str(GaussianMixture(2, random_state=0, tol=1.0).fit(rows).summary()).splitlines()
    assert lines[2].split() == ["bill_", "bill_", "flipper_", "body_"]
    assert lines[3].split() == [
        "#",
        "weight",
        "rows",
        "certain",
        "length_mm",
        "depth_mm",
        "length_mm",
        "mass_g",
    ]


def test_what_is_nothing_but_rounding_is_shown_as_zero():
    rows = np.array([[-1.0, 3.0], [1.0, 5.0], [-2.0, 4.0], [2.0, 4.0]])
    mixture = GaussianMixture(1, tol=1.0).fit(rows)
    mixture.means_[0, 0] = -2.35e-17
    assert "e-17" not in str(mixture.summary()) + mixture.summary()._repr_html_()


def test_the_summary_in_a_notebook_is_escaped_and_complete(fitted):
    shown = fitted.summary()._repr_html_()
    cells = Cells(shown).cells
    assert "height &lt;m&gt;" in shown
    assert "<m>" not in shown
    for weight in fitted.weights_:
        assert f"{weight:.4f}" in cells


def test_a_summary_needs_a_fit_and_survives_save_and_load(fitted, tmp_path):
    with pytest.raises(sklearn.exceptions.NotFittedError):
        GaussianMixture().summary()
    fitted.save(tmp_path / "model.zarr")
    assert str(GaussianMixture.load(tmp_path / "model.zarr").summary()) == str(fitted.summary())
    assert not math.isnan(fitted.summary().work)
