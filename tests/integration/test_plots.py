"""The Displays draw what they say: known ellipses, densities of 1, so many rows, each chunk read once."""

import re
import subprocess
import sys
from types import SimpleNamespace

import dask.array as da
import matplotlib
import numpy as np
import pandas as pd
import pytest
import zarr
from counting import Reads
from references import COVARIANCE_TYPES, full_covariances
from scipy.linalg import eigh, null_space, subspace_angles
from scipy.stats import norm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from zarr.storage import MemoryStore

from emtau_dask import EMTau, GaussianMixture, InvalidDataError
from emtau_dask.em import FitHistory, IterationRecord
from emtau_dask.errors import MissingPackageError
from emtau_dask.plot import (
    ComponentsDisplay,
    ConvergenceDisplay,
    PairsDisplay,
    SelectionDisplay,
    UncertaintyDisplay,
)


@pytest.fixture(autouse=True)
def _no_screen():
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    yield
    plt.close("all")


def rows_of(n, d, seed=0, centres=((0, 0), (5, 1), (-3, 6))):
    """Overlapping clouds, correlated, in the first two features."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, d))
    rows[:, 0] += 0.7 * rows[:, 1]
    rows[:, :2] += np.array(centres)[rng.integers(len(centres), size=n)]
    return rows


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_ellipses_are_one_and_two_deviations_of_the_fitted_covariances(covariance_type):
    X = rows_of(1500, 4)
    gm = GaussianMixture(3, covariance_type=covariance_type, random_state=0).fit(X)
    display = ComponentsDisplay.from_estimator(gm, X, features=[1, 0])
    for k, matrix in enumerate(full_covariances(gm.covariances_, covariance_type, 3, 4)):
        plane = matrix[np.ix_([1, 0], [1, 0])]
        for deviations, ellipse in zip((1, 2), display.ellipses_[2 * k : 2 * k + 2], strict=True):
            axes = 2 * deviations * np.sqrt(np.linalg.eigh(plane)[0])
            np.testing.assert_allclose(sorted((ellipse.width, ellipse.height)), axes, rtol=1e-9)
            corners = ellipse.get_patch_transform().transform([(1, 0), (0, 1), (0.6, 0.8)])
            away = corners - gm.means_[k, [1, 0]]
            distances = np.sqrt(np.einsum("ij,jk,ik->i", away, np.linalg.inv(plane), away))
            np.testing.assert_allclose(distances, deviations, rtol=1e-6)


def within_and_between(gm, covariance_type):
    """W and B of a fitted mixture: the mean covariance of its components, and the covariance of its means."""
    full = full_covariances(gm.covariances_, covariance_type, *gm.means_.shape)
    centre = np.average(gm.means_, axis=0, weights=gm.weights_)
    return (
        np.average(full, axis=0, weights=gm.weights_),
        sum(w * np.outer(m - centre, m - centre) for w, m in zip(gm.weights_, gm.means_, strict=True)),
    )


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_more_features_are_drawn_on_the_discriminants_of_the_mixture(covariance_type):
    """Only the means tell the components apart: the other features vary as much, and more in mixed units."""
    units = np.array([1, 1, 3, 1, 1, 4000.0])
    X = rows_of(900, 6)
    gm = GaussianMixture(3, covariance_type=covariance_type, random_state=0).fit(X)
    display = ComponentsDisplay.from_estimator(gm, X)
    within, between = within_and_between(gm, covariance_type)
    expected = eigh(between, within)[1][:, :-3:-1]
    directions = display.plane.directions
    signs = np.sign((directions * expected).sum(axis=0))
    np.testing.assert_allclose(directions, expected * signs, rtol=1e-7, atol=1e-9)
    loadings = directions * np.sqrt(np.diagonal(within))[:, np.newaxis]
    assert (loadings[np.abs(loadings).argmax(axis=0), [0, 1]] > 0).all()
    for k, matrix in enumerate(full_covariances(gm.covariances_, covariance_type, 3, 6)):
        np.testing.assert_allclose(display.covariances[k], directions.T @ matrix @ directions, atol=1e-9)
    if covariance_type == "full":
        start = {"weights_init": gm.weights_, "means_init": gm.means_ * units}
        start["precisions_init"] = gm.precisions_ / np.outer(units, units)
        scaled = GaussianMixture(3, max_iter=0, **start).fit(X * units)
        in_units = ComponentsDisplay.from_estimator(scaled, X * units).plane
        np.testing.assert_allclose(in_units.points(X * units), display.plane.points(X), atol=1e-6)


def test_the_discriminants_are_those_of_scikit_learn_for_rows_of_the_mixture():
    X = rows_of(600, 5)
    gm = GaussianMixture(3, random_state=0).fit(X)
    plane = ComponentsDisplay.from_estimator(gm, X).plane
    rows, labels = gm.sample(100_000)
    scalings = LinearDiscriminantAnalysis(solver="eigen").fit(rows, labels).scalings_[:, :2]
    assert np.degrees(subspace_angles(plane.directions, scalings)).max() < 2


@pytest.mark.parametrize("k", [1, 2])
def test_axes_without_a_discriminant_are_principal_axes_within_components(k):
    X = rows_of(900, 5, centres=((0, 0), (9, 3))[:k]) * [1, 1, 3, 1, 1000.0]
    gm = GaussianMixture(k, random_state=0).fit(X)
    plane = ComponentsDisplay.from_estimator(gm, X).plane
    within, between = within_and_between(gm, "full")
    deviations = np.sqrt(np.diagonal(within))
    correlations = within / np.outer(deviations, deviations)
    directions = plane.directions * deviations[:, np.newaxis]
    np.testing.assert_allclose(directions.T @ correlations @ directions, np.eye(2), atol=1e-9)
    first = eigh(between, within)[1][:, -1:] * deviations[:, np.newaxis]
    across = null_space((correlations @ first).T) if k == 2 else np.eye(5)
    expected = across @ eigh(across.T @ correlations @ across)[1][:, ::-1]
    assert [label.split(" (")[0] for label in plane.labels] == [
        "discriminant axis 1" if k == 2 else "principal axis 1",
        "principal axis 2",
    ]
    for axis, wanted in zip(directions.T[k - 1 :], expected.T, strict=False):
        assert abs(axis @ wanted) == pytest.approx(np.linalg.norm(axis))


def test_an_axis_is_named_by_what_it_is_made_of():
    rng = np.random.default_rng(0)
    size, other = rng.normal(size=(2, 2000))
    X = pd.DataFrame(
        {"mass": 800 * size + 4000, "length": 14 * size + 200, "depth": 2 * other, "width": 0.1 * other + 5}
    )
    X += rng.normal(size=X.shape) * X.std().to_numpy() * [0.1, 0.1, 0.8, 0.8]
    gm = GaussianMixture(1).fit(X)
    axes = ComponentsDisplay.from_estimator(gm, X).plane.labels
    made = [set(re.findall(r"0\.7 × (\w+)", label)) for label in axes]
    assert made == [{"mass", "length"}, {"depth", "width"}]
    few, _ = ComponentsDisplay.from_estimator(
        GaussianMixture(1).fit(rows_of(99, 9)), rows_of(9, 9)
    ).plane.labels
    assert few.startswith("principal axis 1 (2 of 9 features shown)\n")
    opposite = X.assign(length=-X["length"])
    first, _ = ComponentsDisplay.from_estimator(GaussianMixture(1).fit(opposite), opposite).plane.labels
    assert re.search(r"^principal axis 1\n0\.7 × \w+ − 0\.7 × \w+$", first)


@pytest.mark.parametrize("rows", [np.ones((5, 3)), np.arange(3.0).reshape(1, 3), np.eye(3)[:2]])
def test_rows_that_span_no_plane_are_drawn_all_the_same(rows):
    gm = GaussianMixture(1, covariance_type="diag", reg_covar=0.1).fit(np.eye(3))
    display = ComponentsDisplay.from_estimator(gm, rows)
    assert np.linalg.matrix_rank(display.plane.directions) == 2
    display.figure_.canvas.draw()
    UncertaintyDisplay.from_estimator(gm, rows).figure_.canvas.draw()


def test_few_rows_have_the_colour_and_the_marker_of_their_component():
    X = rows_of(400, 2)
    gm = GaussianMixture(3, random_state=0).fit(X)
    display = ComponentsDisplay.from_estimator(gm, X)
    labels = gm.to_sklearn().predict(X)
    drawn = [collection.get_offsets() for collection in display.ax_.collections]
    assert [sorted(map(tuple, points)) for points in drawn] == [
        sorted(map(tuple, X[labels == k])) for k in range(3)
    ]
    assert len({tuple(each.get_facecolor()[0]) for each in display.ax_.collections}) == 3
    assert len({each.get_paths()[0].vertices.tobytes() for each in display.ax_.collections}) == 3
    assert len({ellipse.get_linestyle() for ellipse in display.ellipses_}) == 3


@pytest.fixture(scope="module")
def mixed():
    """Two groups in millimetres and grams; the last feature tells nothing."""
    rng = np.random.default_rng(0)
    group = rng.integers(2, size=1500)
    rows = np.array([[39.0, 18, 190, 3700, 0], [48.0, 15, 217, 5000, 0]])[group]
    rows += rng.normal(size=(1500, 5)) * [3, 1.1, 6.5, 450, 1]
    frame = pd.DataFrame(rows, columns=["bill", "depth", "flipper", "mass", "noise"])
    return frame, GaussianMixture(2, random_state=0).fit(frame)


class TestPairs:
    def test_each_panel_is_the_mixture_in_its_features(self, mixed):
        frame, gm = mixed
        display = PairsDisplay.from_estimator(gm, frame, features=["mass", "bill", 2])
        assert display.labels == ("mass", "bill", "flipper")
        assert display.axes_.shape == (3, 3)
        chosen = [3, 0, 2]
        for (row, column), panel in display.panels.items():
            some = [chosen[column]] if row == column else [chosen[column], chosen[row]]
            np.testing.assert_allclose(panel.means, gm.means_[:, some])
            np.testing.assert_allclose(panel.covariances, gm.covariances_[:, some][:, :, some], rtol=1e-9)
            assert panel.ax_ is display.axes_[row, column]
        assert {place for place in np.ndindex(3, 3) if display.axes_[place].axison} == set(display.panels)

    def test_the_diagonal_has_the_densities_of_data_and_mixture(self, mixed):
        frame, gm = mixed
        panel = PairsDisplay.from_estimator(gm, frame, features=["mass", "bill"]).panels[1, 1]
        ((edges),) = panel.edges_
        expected, _ = np.histogram(frame["bill"], edges, density=True)
        np.testing.assert_allclose(panel.density_, expected)
        x, y = panel.curves_[-1].get_data()
        both = zip(gm.weights_, gm.means_[:, 0], gm.covariances_[:, 0, 0], strict=True)
        np.testing.assert_allclose(y, sum(w * norm(m, np.sqrt(v)).pdf(x) for w, m, v in both))

    def test_labels_stand_at_the_left_and_at_the_bottom(self, mixed):
        frame, gm = mixed
        axes = PairsDisplay.from_estimator(gm, frame, features=[0, 1, 2]).axes_
        assert [ax.get_xlabel() for ax in axes[2]] == ["bill", "depth", "flipper"]
        assert [ax.get_ylabel() for ax in axes[1:, 0]] == ["depth", "flipper"]
        assert {ax.get_xlabel() + ax.get_ylabel() for ax in (axes[0, 0], axes[1, 1])} == {""}
        assert "2 components; all 1,500 rows" in texts(axes[0, 0])

    def test_of_many_features_those_that_separate_components_are_drawn(self):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(600, 9))
        X[:300, [1, 3, 4, 6, 8]] += 5
        gm = GaussianMixture(2, covariance_type="diag", random_state=0).fit(X)
        display = PairsDisplay.from_estimator(gm, X)
        assert display.labels == tuple(f"feature {i}" for i in (1, 3, 4, 6, 8))
        assert "the 5 of 9 features that separate components best" in texts(display.axes_[0, 0])
        with pytest.raises(InvalidDataError, match="from one to 10 different features"):
            PairsDisplay.from_estimator(gm, X, features=[*range(9), 0])

    @pytest.mark.parametrize("d", [1, 2])
    def test_one_feature_and_two_are_drawn_too(self, d):
        X = rows_of(200, 2)[:, :d]
        display = PairsDisplay.from_estimator(GaussianMixture(2, random_state=0).fit(X), X)
        assert display.axes_.shape == (d, d)
        display.figure_.canvas.draw()


def test_the_density_in_a_plane_is_that_of_the_rows():
    X = rows_of(6000, 2)
    gm = GaussianMixture(3, random_state=0).fit(X)
    display = ComponentsDisplay.from_estimator(gm, X, max_rows=5000)
    areas = np.outer(*(np.diff(edges) for edges in display.edges_))
    assert (display.density_ * areas).sum() == pytest.approx(1)
    middles = [(edges[:-1] + edges[1:]) / 2 for edges in display.edges_]
    for axis, (middle, edges) in enumerate(zip(middles, display.edges_, strict=True)):
        marginal = (display.density_ * areas).sum(axis=1 - axis)
        mean = display.drawn.rows[:, axis].mean()
        assert marginal @ middle == pytest.approx(mean, abs=np.diff(edges).max() / 2)


def test_one_feature_is_drawn_as_curves_over_a_histogram():
    X = rows_of(3000, 3)
    gm = GaussianMixture(3, random_state=0).fit(X)
    display = ComponentsDisplay.from_estimator(gm, X, features=1)
    ((edges),) = display.edges_
    assert (display.density_ * np.diff(edges)).sum() == pytest.approx(1)
    *curves, mixture = display.curves_
    deviations = np.sqrt(gm.covariances_[:, 1, 1])
    expected = [
        w * norm(m, s).pdf(curves[0].get_xdata())
        for w, m, s in zip(gm.weights_, gm.means_[:, 1], deviations, strict=True)
    ]
    np.testing.assert_allclose([curve.get_ydata() for curve in curves], expected, rtol=1e-9)
    np.testing.assert_allclose(mixture.get_ydata(), np.sum(expected, axis=0), rtol=1e-9)
    assert display.ellipses_ == []


def texts(axes):
    return " ".join(text.get_text() for text in [axes.title, axes._left_title, *axes.texts])


def test_each_chunk_is_read_once_and_so_many_rows_are_drawn():
    X = rows_of(4000, 3)
    store = Reads(MemoryStore())
    stored = zarr.create_array(store, data=X, chunks=(400, 3))
    gm = GaussianMixture(2, random_state=0).fit(X)
    store.chunks = ()
    display = ComponentsDisplay.from_estimator(gm, stored, max_rows=1500)
    assert sorted(store.chunks) == list(range(10))
    assert display.drawn.rows.shape == (1500, 3)
    assert {tuple(row) for row in display.drawn.rows} < {tuple(row) for row in X}
    assert len({tuple(row) for row in display.drawn.rows}) == 1500
    assert "1,500 of 4,000 rows" in texts(display.ax_)
    store.chunks = ()
    doubts = UncertaintyDisplay.from_estimator(gm, stored, max_rows=1500)
    assert sorted(store.chunks) == list(range(10))
    assert "1,500 of 4,000 rows" in texts(doubts.axes_[0])
    np.testing.assert_array_equal(display.drawn.rows, doubts.drawn.rows)


def test_fewer_rows_than_the_bound_are_all_drawn_and_a_seed_draws_others():
    X = rows_of(300, 2)
    gm = GaussianMixture(2, random_state=0).fit(X)
    everything = ComponentsDisplay.from_estimator(gm, X)
    np.testing.assert_array_equal(np.sort(everything.drawn.rows, axis=0), np.sort(X, axis=0))
    assert "all 300 rows" in texts(everything.ax_)
    first, again, other = (
        ComponentsDisplay.from_estimator(gm, X, max_rows=50, random_state=seed).drawn.rows
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_the_sample_is_the_same_for_arrays_dask_and_paths_and_bounded_in_values(tmp_path, monkeypatch):
    X = rows_of(2000, 2)
    zarr.create_array(store=tmp_path / "x.zarr", data=X, chunks=(300, 2))
    gm = GaussianMixture(2, random_state=0).fit(X)
    kinds = [X, X.tolist(), da.from_array(X, chunks=(170, 2)) + 0.0, str(tmp_path / "x.zarr")]
    drawn = [ComponentsDisplay.from_estimator(gm, data, max_rows=100).drawn.rows for data in kinds]
    for rows in drawn[1:]:
        np.testing.assert_array_equal(rows, drawn[0])
    monkeypatch.setattr("emtau_dask.estimator.row_sample.MAX_VALUES", 60)
    assert ComponentsDisplay.from_estimator(gm, X, max_rows=100).drawn.rows.shape == (30, 2)


def test_rows_of_weight_zero_are_not_drawn_and_weights_weigh():
    X = rows_of(1500, 2)
    weights = np.where(X[:, 0] > 0, 2.0, 0.0)
    gm = GaussianMixture(2, random_state=0).fit(X, sample_weight=weights)
    display = UncertaintyDisplay.from_estimator(gm, X, sample_weight=weights)
    assert (display.drawn.rows[:, 0] > 0).all()
    assert len(display.drawn.rows) == display.drawn.total == (weights > 0).sum()
    assert (display.drawn.weights == 2.0).all()


def test_uncertainty_counts_the_largest_responsibilities():
    X = rows_of(800, 2)
    gm = GaussianMixture(3, random_state=0).fit(X)
    display = UncertaintyDisplay.from_estimator(gm, X)
    twin = gm.to_sklearn().predict_proba(X)
    assert display.sure_ == pytest.approx((twin.max(axis=1) >= 0.9).mean())
    for line, k in enumerate(display.shown):
        own = twin[twin.argmax(axis=1) == k].max(axis=1)
        counts, _ = np.histogram(own, display.edges_)
        np.testing.assert_allclose(display.histogram_[line], counts / len(own), atol=1e-12)
    bars = np.array([bar.get_width() for bar in display.axes_[0].patches]).reshape(3, 3)
    np.testing.assert_allclose(bars, display.histogram_[:, :3].T)


def test_of_many_components_the_heaviest_are_drawn_and_the_picture_says_so():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2))
    gm = GaussianMixture(70, covariance_type="spherical", max_iter=1, n_init=1, reg_covar=0.1, random_state=0)
    with pytest.warns(Warning, match="converge"):
        gm.fit(X)
    display = ComponentsDisplay.from_estimator(gm, X)
    assert sorted(gm.weights_[display.shown]) == sorted(gm.weights_)[10:]
    assert "the 60 heaviest of 70 components" in texts(display.ax_)
    assert len(display.ellipses_) == 120
    assert len(UncertaintyDisplay.from_estimator(gm, X).shown) == 40


def test_components_at_one_place_have_one_label():
    X = rows_of(300, 2)
    gm = GaussianMixture(3, random_state=0).fit(X)
    display = ComponentsDisplay.from_estimator(gm, X)
    assert texts(display.ax_).endswith(" 0 1 2")
    display.means = display.means[[0, 1, 0]] + [[0, 0], [0, 0], [0.01, 0]]
    assert texts(display.plot().ax_).endswith(" 0, 2 1")


def test_convergence_is_drawn_against_work_and_iterations():
    X = rows_of(3000, 3)
    gm = GaussianMixture(3, algorithm=EMTau(tau=3), random_state=0).fit(da.from_array(X, chunks=(1000, 3)))
    display = ConvergenceDisplay.from_estimator(gm)
    work = [sum(r.active_rows / r.rows for r in gm.history_[: i + 1]) for i in range(gm.n_iter_)]
    np.testing.assert_allclose(display.positions, work)
    assert work[-1] == pytest.approx(gm.history_.work)
    assert display.panels == ("log-likelihood", "gain", "rows", "bytes")
    bound, _, scored, read = display.axes_
    points = np.concatenate([drawn.get_offsets() for drawn in bound.collections])
    expected = sorted(zip(work, gm.lower_bounds_, strict=True))
    np.testing.assert_allclose(np.array(sorted(points.tolist())), expected)
    tops = [bar.get_height() for bar in scored.patches]
    np.testing.assert_allclose(tops, [r.active_rows / r.rows for r in gm.history_])
    np.testing.assert_allclose([bar.get_x() + bar.get_width() for bar in scored.patches], work)
    unit = {"KiB": 2**10, "MiB": 2**20, "bytes": 1}[read.get_ylabel()]
    np.testing.assert_allclose(
        [bar.get_height() * unit for bar in read.patches], [r.bytes_read for r in gm.history_]
    )
    by_number = ConvergenceDisplay.from_history(gm.history_, against="iteration")
    np.testing.assert_allclose(by_number.positions, np.arange(1, gm.n_iter_ + 1))


def record(i, bound, *, full=True, scored=100, **more):
    return IterationRecord(i, bound, scored, full, 1, 0, more.pop("read", 8), 0.1, 100, **more)


def test_refused_steps_estimates_and_gaps_are_told_apart():
    history = FitHistory(
        (
            record(1, -3.0, full=False),
            record(2, -2.0, gap=0.5),
            record(3, -2.5, accepted=False),
            record(4, -1.9, gap=1e-4),
        )
    )
    display = ConvergenceDisplay.from_history(history)
    legend = [text.get_text() for text in display.axes_[0].get_legend().get_texts()]
    assert legend == ["all rows", "some of the rows", "refused step"]
    counts = [len(drawn.get_offsets()) for drawn in display.axes_[0].collections]
    assert counts == [2, 1, 1]
    gaps = [value for line in display.axes_[1].lines for value in line.get_ydata()]
    np.testing.assert_allclose(gaps, [0.5, 1e-4, 2.0 - 1.9])
    assert display.axes_[1].get_yscale() == "log"


def test_the_run_that_was_kept_is_a_line_and_other_starts_are_points():
    """Three starts on a sample, of which the second ends highest, a larger sample, then all rows."""
    bounds = {
        "first": [-5.0, -4.0, -3.9], "second": [-5.2, -3.5, -3.4], "third": [-5.1, -4.2],
        "larger": [-3.6, -3.5], "all": [-3.52, -3.51, -3.505],
    }  # fmt: skip
    scored = {"first": 10, "second": 10, "third": 10, "larger": 40, "all": 100}
    records = [
        record(0, bound, full=part == "all", scored=scored[part])
        for part, several in bounds.items()
        for bound in several
    ]
    display = ConvergenceDisplay.from_history(FitHistory(tuple(records)))
    drawn = [[*line.get_ydata()] for line in display.axes_[0].lines]
    points = [each for each in drawn if len(each) == 1]
    assert sorted(points) == [[-4.2], [-3.9]]
    assert [each for each in drawn if len(each) > 1] == [bounds["second"], bounds["larger"], bounds["all"]]
    assert list(np.flatnonzero(~display.kept)) == [0, 1, 2, 6, 7]


def test_no_line_runs_between_samples_and_passes_over_all_rows():
    bounds = [
        (-3.0, True),
        (-2.8, False),
        (-2.7, False),
        (-2.9, True),
        (-2.6, False),
        (-2.5, False),
        (-2.85, True),
    ]
    records = [record(0, bound, full=full, scored=100 if full else 5) for bound, full in bounds]
    display = ConvergenceDisplay.from_history(FitHistory(tuple(records)))
    lines = [[*line.get_ydata()] for line in display.axes_[0].lines]
    assert lines == [[-3.0, -2.9, -2.85], [-2.8, -2.7], [-2.6, -2.5]]


def test_panels_that_would_be_empty_are_left_out():
    display = ConvergenceDisplay.from_history(FitHistory((record(1, -2.0, read=0),)))
    assert display.panels == ("log-likelihood", "rows")
    assert len(display.axes_) == 2
    X = np.repeat([[0.0, 0.0], [100.0, 0.0]], 50, axis=0) + rows_of(100, 2, centres=((0, 0),))
    certain = UncertaintyDisplay.from_estimator(GaussianMixture(2, random_state=0).fit(X), X)
    assert certain.panels == ("certainty",)
    assert len(certain.axes_) == 1
    assert "every row shown is at least 90% certain" in texts(certain.axes_[0])


def test_first_bounds_far_below_are_left_out_and_counted():
    bounds = [-1000.0, -900.0, *(-2.0 + 0.01 * i for i in range(30))]
    records = [IterationRecord(i + 1, b, 9, True, 1, 0, 8, 0.1, 9) for i, b in enumerate(bounds)]
    bound = ConvergenceDisplay.from_history(FitHistory(tuple(records))).axes_[0]
    assert bound.get_ylim()[0] > -3
    assert "2 iterations lower than this" in texts(bound)


def test_given_axes_are_used_or_divided():
    from matplotlib import pyplot as plt

    X = rows_of(200, 2)
    history = FitHistory((record(1, -3.0), record(2, -2.0, gap=0.1)))
    figure, axes = plt.subplots(2, 2)
    display = ConvergenceDisplay.from_history(history, ax=axes)
    assert [*display.axes_] == [*axes.ravel()]
    assert display.figure_ is figure
    figure, (left, right) = plt.subplots(1, 2)
    assert ConvergenceDisplay.from_history(history, ax=left).figure_ is figure
    gm = GaussianMixture(2, random_state=0).fit(X)
    assert ComponentsDisplay.from_estimator(gm, X, ax=right).ax_ is right
    with pytest.raises(InvalidDataError, match="ax holds 2 axes, but 4"):
        ConvergenceDisplay.from_history(history, ax=[left, right])
    _, axes = plt.subplots(2, 2)
    fewer = ConvergenceDisplay.from_history(FitHistory((record(1, -2.0, read=0),)), ax=axes)
    assert [*fewer.axes_] == [*axes[0]]
    assert not axes[1, 0].axison


def candidate(k, covariance_type, **criteria):
    return SimpleNamespace(n_components=k, covariance_type=covariance_type, **criteria)


def test_selection_draws_a_line_for_each_type_and_marks_the_best():
    table = [
        candidate(1, "full", bic=9.0, held_out=-3.0),
        candidate(2, "full", bic=4.0, held_out=-1.0),
        candidate(3, "full", bic=float("nan"), held_out=None),
        candidate(2, "diag", bic=3.0, held_out=-2.0),
        candidate(3, "diag", bic=None, held_out=-2.5),
    ]
    display = SelectionDisplay.from_selection(SimpleNamespace(table_=table))
    assert display.chosen_ is table[3]
    lines = {name: line.get_xydata().tolist() for name, line in display.lines_.items()}
    assert lines == {"full": [[1, 9], [2, 4]], "diag": [[2, 3]]}
    held_out = SelectionDisplay.from_selection(SimpleNamespace(table_=table, criterion="held-out"))
    assert held_out.chosen_ is table[1]
    assert SelectionDisplay.from_selection(SimpleNamespace(table_=table), "held_out").chosen_ is table[1]


@pytest.mark.parametrize(
    ("criterion", "message"),
    [("bicc", "criterion is 'bicc'; it must be one of bic"), ("aic", "No mixture of the selection")],
)
def test_a_selection_without_the_criterion_is_refused(criterion, message):
    with pytest.raises(InvalidDataError, match=message):
        SelectionDisplay.from_selection(SimpleNamespace(table_=[candidate(1, "full", bic=1.0)]), criterion)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": ["z"]}, "no feature 'z'.*0 to 1"),
        ({"features": 2}, "no feature 2"),
        ({"features": -1}, "no feature -1"),
        ({"features": [0, 0]}, "from one to 2 different features"),
        ({"features": [0, 1, 1]}, "from one to 2 different features"),
        ({"features": 1.5}, "no feature 1.5"),
        ({"max_rows": 0}, "max_rows is 0; it must be an integer of at least 1"),
        ({"sample_weight": [1.0]}, "sample_weight has 1 value, X has 50 rows"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given, message):
    X = rows_of(50, 2)
    gm = GaussianMixture(1).fit(X)
    with pytest.raises(InvalidDataError, match=message):
        ComponentsDisplay.from_estimator(gm, X, **given)


def test_data_that_do_not_fit_the_mixture_are_refused():
    gm = GaussianMixture(1).fit(rows_of(50, 2))
    with pytest.raises(InvalidDataError, match="X has 3 features"):
        ComponentsDisplay.from_estimator(gm, rows_of(50, 3))
    bad = rows_of(50, 2)
    bad[7, 1] = np.nan
    with pytest.raises(InvalidDataError, match="row 7"):
        UncertaintyDisplay.from_estimator(gm, bad)


def test_a_fit_without_iterations_and_another_axis_are_refused():
    with pytest.raises(InvalidDataError, match="no iteration"):
        ConvergenceDisplay.from_history(FitHistory())
    gm = GaussianMixture(1).fit(rows_of(50, 2))
    with pytest.raises(InvalidDataError, match="against is 'time'; it must be 'work' or 'iteration'"):
        ConvergenceDisplay.from_estimator(gm, against="time")


@pytest.mark.parametrize(
    "names", [("$\\frac{", "a\nb\x1b[31m"), ("<script>alert(1)</script>", "x" * 500)], ids=["markup", "long"]
)
def test_names_of_features_are_drawn_as_they_are(names, tmp_path):
    X = pd.DataFrame(rows_of(60, 2), columns=names)
    gm = GaussianMixture(2, random_state=0).fit(X)
    for display in (
        ComponentsDisplay.from_estimator(gm, X),
        *(ComponentsDisplay.from_estimator(gm, X, features=name) for name in names),
        UncertaintyDisplay.from_estimator(gm, X),
        PairsDisplay.from_estimator(gm, X),
    ):
        display.figure_.savefig(tmp_path / "picture.svg")
        written = (tmp_path / "picture.svg").read_text()
        assert "<script" not in written
        assert "\x1b" not in written
        assert "x" * 40 not in written


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    gm = GaussianMixture(1).fit(rows_of(50, 2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: ConvergenceDisplay.from_estimator(gm),
        lambda: ComponentsDisplay.from_estimator(gm, rows_of(50, 2)),
        lambda: UncertaintyDisplay.from_estimator(gm, rows_of(50, 2)),
        lambda: PairsDisplay.from_estimator(gm, rows_of(50, 2)),
        lambda: SelectionDisplay.from_selection(SimpleNamespace(table_=[candidate(1, "full", bic=1.0)])),
    ):
        with pytest.raises(MissingPackageError, match=r"pip install 'emtau_dask\[plot\]'"):
            draw()


def test_importing_the_displays_does_not_import_matplotlib():
    code = "import sys, emtau_dask.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
