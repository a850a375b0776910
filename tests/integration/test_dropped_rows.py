"""missing="drop": rows with NaN take no part, against fits of the complete rows alone."""

import json
import subprocess
import sys

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau
from oracles import starts
from processes import KILLED_IN_ITERATION_3
from references import COVARIANCE_TYPES
from sklearn.exceptions import ConvergenceWarning
from sklearn.frozen import FrozenEstimator
from sklearn.mixture import GaussianMixture as SklearnMixture

from emtau_dask import (
    GaussianMixture,
    InvalidDataError,
    MixtureOutlierDetector,
    open_run,
    select_components,
)
from emtau_dask.plot import ComponentsDisplay

pytestmark = pytest.mark.filterwarnings(f"ignore::{ConvergenceWarning.__module__}.ConvergenceWarning")

K, D, N = 3, 3, 400
WHOLE, _ = starts.mixture(N, K, D, separation=9.0, seed=5)
INCOMPLETE = np.random.default_rng(2).random(N) < 0.3
FAR = 1e6
ROWS = WHOLE.copy()
ROWS[INCOMPLETE] = FAR  # What is left of a row that is dropped would spoil whatever sees it.
ROWS[INCOMPLETE, np.random.default_rng(4).integers(0, D, INCOMPLETE.sum())] = np.nan
ROWS.setflags(write=False)
COMPLETE = np.ascontiguousarray(ROWS[~INCOMPLETE])
WEIGHTS = np.random.default_rng(6).integers(0, 3, N).astype(float)
CHUNKS = (0, 90, 0, 150, 160)


def given(covariance_type="full"):
    return starts.start(WHOLE, K, covariance_type, seed=8)


def mixture(**settings):
    return GaussianMixture(**{"n_components": K, "missing": "drop", "random_state": 0} | settings)


def stepwise(covariance_type="full", **settings):
    """Five iterations from the given start."""
    fixed = {"algorithm": "em", "covariance_type": covariance_type, "max_iter": 5, "tol": 0}
    return mixture(**fixed | given(covariance_type) | settings)


def assert_alike(found, expected):
    for name in ("weights_", "means_", "covariances_"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-8, atol=1e-9)


@pytest.fixture(scope="module")
def fitted():
    return stepwise().fit(ROWS)


@pytest.fixture(scope="module")
def plain():
    return stepwise(missing="raise").fit(COMPLETE)


class TestAFitIsThatOfTheCompleteRows:
    @pytest.mark.parametrize("covariance_type", starts.SCIKIT_LEARN_TYPES)
    def test_by_scikit_learn(self, covariance_type):
        found = stepwise(covariance_type).fit(ROWS)
        theirs = SklearnMixture(
            K, covariance_type=covariance_type, max_iter=5, tol=0, **given(covariance_type)
        )
        assert_alike(found, theirs.fit(COMPLETE))

    @pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
    def test_with_weights(self, covariance_type):
        found = stepwise(covariance_type).fit(ROWS, sample_weight=WEIGHTS)
        expected = stepwise(covariance_type, missing="raise")
        assert_alike(found, expected.fit(COMPLETE, sample_weight=WEIGHTS[~INCOMPLETE]))
        np.testing.assert_allclose(found.lower_bounds_, expected.lower_bounds_, rtol=1e-10)

    @pytest.mark.parametrize("algorithm", ["em-tau", "em-star", "em-lazy"])
    def test_by_partial_e_steps(self, algorithm):
        settings = {"algorithm": algorithm, "max_iter": 30, "tol": 1e-9}
        found = stepwise(**settings).fit(da.from_array(ROWS, chunks=(CHUNKS, D)))
        kept = [int(part.sum()) for part in np.split(~INCOMPLETE, np.cumsum(CHUNKS)[:-1])]
        expected = stepwise(missing="raise", **settings)
        expected.fit(da.from_array(COMPLETE, chunks=(tuple(kept), D)))
        assert_alike(found, expected)
        assert [each.active_rows for each in found.history_] == [
            each.active_rows for each in expected.history_
        ]

    def test_by_given_responsibilities(self):
        responsibilities = np.random.default_rng(1).dirichlet(np.ones(K), N)
        settings = {"algorithm": "em", "max_iter": 5, "tol": 0}
        found = mixture(**settings).fit(ROWS, responsibilities_init=responsibilities)
        expected = mixture(missing="raise", **settings)
        assert_alike(found, expected.fit(COMPLETE, responsibilities_init=responsibilities[~INCOMPLETE]))

    def test_from_any_container(self, fitted, tmp_path):
        zarr.create_array(store=tmp_path / "rows.zarr", data=ROWS, chunks=(70, D))
        pd.DataFrame(ROWS, columns=list("abc")).to_parquet(tmp_path / "rows.parquet")
        np.save(tmp_path / "rows.npy", ROWS)
        lazy = da.from_array(ROWS, chunks=(CHUNKS, D))
        paths = [str(tmp_path / f"rows.{ending}") for ending in ("zarr", "parquet", "npy")]
        for data in (lazy, lazy.map_blocks(np.copy), lazy.rechunk((50, 1)), ROWS.astype("f4"), *paths):
            tolerance = 1e-4 if getattr(data, "dtype", None) == "f4" else 1e-10
            np.testing.assert_allclose(stepwise().fit(data).means_, fitted.means_, rtol=tolerance)

    def test_whole_chunks_may_be_missing(self):
        rows = ROWS.copy()
        rows[90:240, 1] = np.nan
        found = stepwise().fit(da.from_array(rows, chunks=(CHUNKS, D)))
        kept = ~np.isnan(rows).any(axis=1)
        assert_alike(found, stepwise(missing="raise").fit(rows[kept]))

    def test_integers_have_none(self):
        counts = np.rint(WHOLE * 10).astype(int)
        start = given() | {"means_init": given()["means_init"] * 10}
        assert_alike(stepwise(**start).fit(counts), stepwise(missing="raise", **start).fit(counts))


class TestNothingSeesADroppedRow:
    @pytest.mark.parametrize("init_params", ["kmeans", "k-means++", "random", "random_from_data"])
    @pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
    def test_no_start(self, init_params, weighted):
        weights = WEIGHTS if weighted else None
        found = mixture(init_params=init_params, algorithm="em").fit(ROWS, sample_weight=weights)
        assert np.abs(found.means_).max() < 100

    @pytest.mark.parametrize("algorithm", ["auto", "em-sampled"])
    def test_no_sample_and_no_cache(self, algorithm, tmp_path):
        repeated = np.tile(ROWS, (100, 1))
        zarr.create_array(store=tmp_path / "rows.zarr", data=repeated, chunks=(5000, D))
        found = mixture(algorithm=algorithm).fit(str(tmp_path / "rows.zarr"))
        expected = mixture(algorithm="em", missing="raise").fit(COMPLETE)
        order, theirs = np.argsort(found.means_[:, 0]), np.argsort(expected.means_[:, 0])
        np.testing.assert_allclose(found.means_[order], expected.means_[theirs], atol=0.05)

    def test_the_summary_says_how_many_are_left_out(self, fitted, plain):
        note = f"note: {INCOMPLETE.sum()} of 400 rows left out: missing values"
        assert note in str(fitted.summary()).splitlines()
        assert "left out" not in str(plain.summary())
        both = stepwise().fit(ROWS, sample_weight=WEIGHTS)
        n_out = (INCOMPLETE | (WEIGHTS == 0)).sum()
        assert both.history_.notes == (f"{n_out} of 400 rows left out: missing values or weight 0",)
        weighted = stepwise(missing="raise").fit(WHOLE, sample_weight=WEIGHTS)
        assert weighted.history_.notes == (f"{(WEIGHTS == 0).sum()} of 400 rows left out: weight 0",)

    def test_no_picture(self, fitted):
        display = ComponentsDisplay.from_estimator(fitted, ROWS, features=[0, 1])
        assert len(display.drawn.rows) == display.drawn.total == len(COMPLETE)

    def test_no_selection(self):
        found = select_components(ROWS, [1], estimator=mixture(), random_state=0)
        expected = SklearnMixture(1).fit(COMPLETE)
        assert found.best_estimator_.bic(ROWS) == pytest.approx(expected.bic(COMPLETE), rel=1e-6)

    def test_no_row_state(self, tmp_path):
        mixture(algorithm="em-tau", checkpoint=tmp_path / "run.zarr", max_iter=3).fit(ROWS)
        assert not open_run(tmp_path / "run.zarr").active.compute()[INCOMPLETE].any()


class TestPredictions:
    @pytest.mark.parametrize("data", [ROWS, da.from_array(ROWS, chunks=(CHUNKS, D))], ids=["", "lazy"])
    def test_have_a_value_for_every_row(self, fitted, plain, data):
        labels, shares = np.asarray(fitted.predict(data)), np.asarray(fitted.predict_proba(data))
        scores = np.asarray(fitted.score_samples(data))
        assert (labels[INCOMPLETE] == -1).all()
        assert np.isnan(shares[INCOMPLETE]).all()
        assert np.isnan(scores[INCOMPLETE]).all()
        np.testing.assert_array_equal(labels[~INCOMPLETE], plain.predict(COMPLETE))
        np.testing.assert_allclose(shares[~INCOMPLETE], plain.predict_proba(COMPLETE), rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(scores[~INCOMPLETE], plain.score_samples(COMPLETE), rtol=1e-9)

    def test_many_rows_go_by_tiles(self, fitted):
        labels = fitted.predict(np.tile(ROWS, (500, 1)))
        np.testing.assert_array_equal(labels, np.tile(fitted.predict(ROWS), 500))

    @pytest.mark.parametrize("data", [ROWS, da.from_array(ROWS, chunks=(CHUNKS, D))], ids=["", "lazy"])
    def test_criteria_count_complete_rows(self, fitted, data):
        theirs = SklearnMixture(K, max_iter=5, tol=0, **given()).fit(COMPLETE)
        assert fitted.score(data) == pytest.approx(theirs.score(COMPLETE))
        assert fitted.bic(data) == pytest.approx(theirs.bic(COMPLETE))
        assert fitted.aic(data) == pytest.approx(theirs.aic(COMPLETE))

    def test_no_complete_row_has_no_score(self, fitted):
        with pytest.raises(InvalidDataError, match="X has no rows without missing values"):
            fitted.score(ROWS[INCOMPLETE])

    def test_rows_are_scored_as_ever_without_missing_values(self, fitted):
        raising = stepwise(missing="raise").fit(COMPLETE)
        np.testing.assert_allclose(fitted.score_samples(WHOLE), raising.score_samples(WHOLE), rtol=1e-10)

    def test_fit_predict(self):
        assert (stepwise().fit_predict(ROWS) == -1).tolist() == INCOMPLETE.tolist()

    @pytest.mark.parametrize("kept", [2**23, 0])
    def test_outliers(self, fitted, kept, monkeypatch):
        monkeypatch.setattr("emtau_dask.estimator.outliers.MAX_COMPUTED", kept)
        lazy = da.from_array(ROWS, chunks=(CHUNKS, D))
        detector = MixtureOutlierDetector(FrozenEstimator(fitted), contamination=0.1).fit(lazy)
        expected = np.quantile(fitted.score_samples(COMPLETE), 0.1, method="linear" if kept else "lower")
        assert detector.offset_ == pytest.approx(expected, rel=1e-6)
        found = detector.predict(ROWS)
        assert (found[INCOMPLETE] == 0).all()
        assert (found[~INCOMPLETE] != 0).all()


class TestRefusals:
    def test_infinity_is_refused(self):
        rows = ROWS.copy()
        row = int(np.flatnonzero(~INCOMPLETE)[7])
        rows[row, 2] = np.inf
        with pytest.raises(InvalidDataError, match=rf"row {row} .*infinity \(inf\) \(feature 2\)"):
            stepwise().fit(rows)

    def test_infinity_beside_minus_infinity_is_no_missing_value(self):
        rows = ROWS.copy()
        row = int(np.flatnonzero(~INCOMPLETE)[7])
        rows[row, :2] = np.inf, -np.inf
        with pytest.raises(InvalidDataError, match=rf"row {row} .*infinity"):
            stepwise().fit(rows)

    def test_no_row_is_complete(self):
        frame = pd.DataFrame(ROWS, columns=["temperature", "salinity", "oxygen"])
        frame["oxygen"] = np.nan
        with pytest.raises(
            InvalidDataError, match=r"no row is complete.*feature 2, 'oxygen' is missing in 100\.0%"
        ):
            mixture().fit(frame)

    def test_every_row_lacks_every_feature(self):
        with pytest.raises(InvalidDataError, match="every row lacks every feature"):
            mixture().fit(np.full((20, 3), np.nan))

    def test_fewer_complete_rows_than_components(self):
        with pytest.raises(InvalidDataError, match="n_components = 3, n_samples = 2 without missing values"):
            mixture().fit(np.vstack([ROWS[INCOMPLETE], COMPLETE[:2]]))

    def test_weights_of_complete_rows_are_all_zero(self):
        with pytest.raises(InvalidDataError, match="no row is complete"):
            mixture().fit(ROWS, sample_weight=INCOMPLETE.astype(float))


KILLED = (
    KILLED_IN_ITERATION_3
    + """
import zarr
from emtau_dask import GaussianMixture
settings = {"algorithm": "em-tau", "missing": "drop", "random_state": 0, "tol": 1e-9}
GaussianMixture(3, **settings, checkpoint=sys.argv[2]).fit(sys.argv[1])
"""
)


@pytest.mark.kills
def test_a_killed_fit_is_resumed_to_the_same_bits(tmp_path):
    data, run = str(tmp_path / "rows.zarr"), str(tmp_path / "run.zarr")
    zarr.create_array(store=data, data=ROWS, chunks=(150, D))
    killed = subprocess.run([sys.executable, "-c", KILLED, data, run], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    found = GaussianMixture.resume(run, data)
    assert found.missing == "drop"
    assert found.n_iter_ > 3
    expected = mixture(algorithm="em-tau", tol=1e-9).fit(data)
    assert found.means_.tobytes() == expected.means_.tobytes()
    np.testing.assert_array_equal(found.predict(ROWS), expected.predict(ROWS))


class TestTheCommandLine:
    def test_labels_are_minus_one(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        zarr.create_array(store="rows.zarr", data=ROWS, chunks=(150, D))
        options = ("--missing", "drop", "-o", "out", "--json", "--set", "output.scores=true")
        ended = emtau("fit", "rows.zarr", "-k", K, *options)
        assert ended.exit_code == 0, ended.output
        written = zarr.open_group("out/labels.zarr", mode="r")
        np.testing.assert_array_equal(written["labels"][:] == -1, INCOMPLETE)
        np.testing.assert_array_equal(np.isnan(written["scores"][:]), INCOMPLETE)
        model = GaussianMixture.load("out/model.zarr")
        assert model.missing == "drop"
        np.testing.assert_array_equal(written["labels"][:], model.predict(ROWS))
        again = json.loads(emtau("predict", "out", "rows.zarr", "again.zarr", "--json").stdout)
        for values in (json.loads(ended.stdout), again):
            assert (values["rows"], values["left_out"]) == (len(ROWS), INCOMPLETE.sum())
            assert sum(values["rows_by_label"]) == (~INCOMPLETE).sum()
        np.testing.assert_array_equal(zarr.open_group("again.zarr")["labels"][:], written["labels"][:])

    def test_compare_refuses_it(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        zarr.create_array(store="rows.zarr", data=ROWS)
        (tmp_path / "c.yaml").write_text(
            "data: {path: rows.zarr}\nmodel: {n_components: 3, missing: drop}\n"
            "algorithm: {name: em, compare: [{name: em-tau}]}\n"
        )
        assert "model.missing is 'drop', but compare needs complete rows" in emtau("compare", "c.yaml").stderr


class TestTheOtherSpelling:
    def test_is_what_it_means(self):
        spelt = stepwise(missing="marginalize").fit(ROWS)
        expected = stepwise(missing="marginalise").fit(ROWS)
        assert spelt.means_.tobytes() == expected.means_.tobytes()
        assert spelt.get_params()["missing"] == "marginalize"
        np.testing.assert_array_equal(spelt.predict(ROWS), expected.predict(ROWS))

    def test_is_stored_as_the_first_in_models_and_checkpoints(self, tmp_path):
        stepwise(missing="marginalize", checkpoint=tmp_path / "run.zarr").fit(ROWS).save(
            tmp_path / "model.zarr"
        )
        assert GaussianMixture.load(tmp_path / "model.zarr").missing == "marginalise"
        assert GaussianMixture.resume(tmp_path / "run.zarr", ROWS).missing == "marginalise"
