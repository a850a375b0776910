"""Rows with missing values: fits, predictions and imputation against naive loops over rows and features."""

import re
import subprocess
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from commands import emtau
from oracles import starts
from references import COVARIANCE_TYPES, full_covariances, shaped
from scipy.stats import multivariate_normal
from sklearn.exceptions import ConvergenceWarning
from sklearn.frozen import FrozenEstimator
from sklearn.utils.estimator_checks import parametrize_with_checks

from emtau_dask import (
    ConfigError,
    EMSampled,
    EMTau,
    GaussianMixture,
    InvalidDataError,
    MixtureOutlierDetector,
)
from emtau_dask.cli.config import checked_config, complete_values
from emtau_dask.cli.fit import run_plan
from emtau_dask.plot import ComponentsDisplay

pytestmark = pytest.mark.filterwarnings(f"ignore::{ConvergenceWarning.__module__}.ConvergenceWarning")

K, D = 3, 4
WHOLE, _ = starts.mixture(120, K, D, separation=2.0, seed=21)
WHOLE = WHOLE @ np.array([[1, 0.5, 0, 0], [0, 1, -0.4, 0], [0, 0, 1, 0.6], [0, 0, 0, 1.0]])
WHOLE.setflags(write=False)
ROWS = WHOLE.copy()
ROWS[np.random.default_rng(3).random(ROWS.shape) < 0.25] = np.nan
ROWS[17] = np.nan
ROWS.setflags(write=False)
ITERATIONS = 3


def given(covariance_type):
    """A start that no data is needed for."""
    return starts.start(WHOLE, K, covariance_type, seed=8)


def mixture(covariance_type="full", **settings):
    settings = {"algorithm": "em", "missing": "marginalise", "random_state": 0} | settings
    return GaussianMixture(K, covariance_type=covariance_type, **settings)


def stepwise(covariance_type="full", X=ROWS, **settings):
    """A fit of a few iterations from the given start."""
    settings = {"max_iter": ITERATIONS, "tol": 0} | given(covariance_type) | settings
    weights = settings.pop("sample_weight", None)
    return mixture(covariance_type, **settings).fit(X, sample_weight=weights)


def naive_row(weights, means, covariances, row):
    """Log-likelihood, responsibilities, and for each component the completed row and its covariance."""
    o = np.flatnonzero(~np.isnan(row))
    m = np.flatnonzero(np.isnan(row))
    logs, completed, spreads = np.log(weights), [], []
    for k in range(len(weights)):
        filled, spread = means[k].copy(), covariances[k].copy()
        if len(o):
            own = covariances[k][np.ix_(o, o)]
            logs[k] += multivariate_normal(means[k][o], own).logpdf(row[o])
            across = covariances[k][np.ix_(m, o)] @ np.linalg.inv(own)
            filled[o] = row[o]
            filled[m] = means[k][m] + across @ (row[o] - means[k][o])
            spread[:] = 0
            spread[np.ix_(m, m)] = covariances[k][np.ix_(m, m)] - across @ covariances[k][np.ix_(o, m)]
        completed.append(filled)
        spreads.append(spread)
    total = np.logaddexp.reduce(logs)
    return total, np.exp(logs - total), np.array(completed), np.array(spreads)


def averaged(covariance_type, scatters, counts):
    """The covariances that maximise the expected likelihood, from K full scatters."""
    total = counts.sum()
    shares = {
        "full": counts[:, None, None], "tied": total, "diag": counts[:, None], "spherical": D * counts,
        "tied_diag": total, "tied_spherical": D * total,
    }  # fmt: skip
    means = shaped(scatters, covariance_type) / shares[covariance_type]
    return full_covariances(means, covariance_type, K, D)


def naive_em(covariance_type, rows, row_weights, reg_covar=1e-6):
    """Ghahramani and Jordan 1994, section 3, row by row: parameters, and the bound before each M-step."""
    start = given(covariance_type)
    weights, means = np.array(start["weights_init"]), np.array(start["means_init"])
    precisions = full_covariances(start["precisions_init"], covariance_type, K, D)
    covariances = np.array([np.linalg.inv(each) for each in precisions])
    bounds = []
    for _ in range(ITERATIONS):
        found = [naive_row(weights, means, covariances, row) for row in rows]
        bounds.append(
            sum(s * total for s, (total, *_) in zip(row_weights, found, strict=True)) / sum(row_weights)
        )
        r = np.array([s * each[1] for s, each in zip(row_weights, found, strict=True)])
        counts = r.sum(axis=0)
        means = np.array(
            [sum(r[n, k] * found[n][2][k] for n in range(len(rows))) / counts[k] for k in range(K)]
        )
        scatters = np.zeros((K, D, D))
        for n, (_, _, completed, spreads) in enumerate(found):
            for k in range(K):
                difference = completed[k] - means[k]
                scatters[k] += r[n, k] * (np.outer(difference, difference) + spreads[k])
        covariances = averaged(covariance_type, scatters, counts) + reg_covar * np.eye(D)
        weights = counts / counts.sum()
    return weights, means, covariances, bounds


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
class TestFitAgainstANaiveLoop:
    def test_every_iteration(self, covariance_type, weighted):
        row_weights = (
            np.random.default_rng(1).integers(0, 3, size=len(ROWS)) if weighted else np.ones(len(ROWS))
        )
        weights, means, covariances, bounds = naive_em(covariance_type, ROWS, row_weights)
        found = stepwise(covariance_type, sample_weight=row_weights if weighted else None)
        assert np.allclose(found.lower_bounds_, bounds, rtol=1e-10)
        assert np.allclose(found.weights_, weights, rtol=1e-9)
        assert np.allclose(found.means_, means, rtol=1e-9, atol=1e-10)
        full = full_covariances(found.covariances_, covariance_type, K, D)
        assert np.allclose(full, covariances, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_compiled_loops_against_a_naive_loop(weighted, covariance_type):
    row_weights = np.random.default_rng(1).integers(0, 3, size=len(ROWS)) if weighted else np.ones(len(ROWS))
    weights, means, covariances, bounds = naive_em(covariance_type, ROWS, row_weights)
    with dask.config.set({"emtau.compiled": "always"}):
        found = stepwise(covariance_type, sample_weight=row_weights if weighted else None)
    assert np.allclose(found.lower_bounds_, bounds, rtol=1e-10)
    assert np.allclose(found.weights_, weights, rtol=1e-9)
    assert np.allclose(found.means_, means, rtol=1e-9, atol=1e-10)
    full = full_covariances(found.covariances_, covariance_type, K, D)
    assert np.allclose(full, covariances, rtol=1e-8, atol=1e-10)


MANY, _ = starts.mixture(6000, K, D, separation=3.0, seed=22)
MANY[np.random.default_rng(4).random(MANY.shape) < 0.1] = np.nan
MANY.setflags(write=False)
ALGORITHMS = {
    "default": {"algorithm": "auto"},
    "quasi-Newton": {"acceleration": "quasi-newton"},
    "sampled": {"algorithm": EMSampled()},
    "tau": {"algorithm": EMTau(tau=20)},
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("compiled", ["never", "always"])
class TestAlgorithms:
    def test_it_ends_where_em_stands_still(self, name, compiled):
        """Its bound is the naive mean log-likelihood, and EM from there gains nothing and goes nowhere."""
        with dask.config.set({"emtau.compiled": compiled}):
            found = mixture(**{"tol": 1e-7, "max_iter": 400} | ALGORITHMS[name]).fit(MANY)
        assert found.converged_
        on = mixture(
            tol=0, max_iter=30, weights_init=found.weights_, means_init=found.means_,
            precisions_init=found.precisions_,
        ).fit(MANY)  # fmt: skip
        assert on.lower_bound_ == pytest.approx(found.lower_bound_, abs=5e-6)
        assert np.allclose(on.means_, found.means_, atol=0.02)
        some = MANY[:500]
        expected = [naive_row(found.weights_, found.means_, found.covariances_, row)[0] for row in some]
        assert found.score(some) == pytest.approx(np.mean(expected), rel=1e-9)

    def test_a_resumed_run_has_the_same_bits(self, name, compiled, tmp_path):
        settings = {"tol": 1e-7} | ALGORITHMS[name]
        with dask.config.set({"emtau.compiled": compiled}):
            whole = mixture(**settings, max_iter=40).fit(MANY)
            mixture(**settings, max_iter=40, checkpoint=tmp_path / "run.zarr").fit(MANY)
            found = GaussianMixture.resume(tmp_path / "run.zarr", MANY)
        assert found.means_.tobytes() == whole.means_.tobytes()


class TestFit:
    def test_complete_rows_are_fitted_as_without(self):
        found, expected = stepwise(X=WHOLE), stepwise(X=WHOLE, missing="raise")
        assert np.allclose(found.means_, expected.means_, rtol=1e-10)
        assert np.allclose(found.lower_bounds_, expected.lower_bounds_, rtol=1e-12)

    @pytest.mark.parametrize("chunks", [(0, 50, 0, 70), (120,), (1,) * 20 + (100,)], ids=str)
    def test_chunks_change_nothing_but_rounding(self, chunks):
        lazy = stepwise(X=da.from_array(ROWS, chunks=(chunks, D)))
        assert np.allclose(lazy.means_, stepwise().means_, rtol=1e-10)
        assert np.allclose(lazy.covariances_, stepwise().covariances_, rtol=1e-9, atol=1e-11)

    def test_it_reads_each_chunk_once_an_iteration(self):
        asked = []

        def note(block):
            asked.append(len(block))
            return block

        X = da.from_array(ROWS, chunks=(40, D)).map_blocks(note, dtype=float, meta=np.empty((0, 0)))
        stepwise(X=X)
        assert asked == [40] * 3 * ITERATIONS

    def test_the_bound_rises_to_the_score_of_the_model(self):
        found = mixture(tol=1e-7).fit(ROWS)
        assert found.converged_
        assert (np.diff(found.lower_bounds_) > -1e-9).all()
        assert found.score(ROWS) == pytest.approx(found.lower_bound_, abs=1e-5)

    @pytest.mark.parametrize("init_params", ["kmeans", "k-means++", "random", "random_from_data"])
    def test_starts_take_complete_rows(self, init_params):
        found = mixture(init_params=init_params, max_iter=3).fit(ROWS)
        assert np.isfinite(found.means_).all()
        assert np.isfinite(found.lower_bounds_).all()

    def test_too_few_complete_rows_for_a_start(self):
        rows = ROWS.copy()
        rows[:, 0], rows[5:, 1] = np.nan, rows[5:, 1]
        with pytest.raises(
            InvalidDataError, match=r"only 0 have all features, and none has feature 0\. Leave that"
        ):
            mixture().fit(rows)
        assert np.isfinite(stepwise(X=rows).means_[:, 1:]).all()

    def test_single_precision_rows(self):
        single = ROWS.astype("float32")
        found, expected = stepwise(X=single), stepwise(X=single.astype(float))
        assert np.allclose(found.means_, expected.means_, rtol=1e-12)

    def test_a_resumed_run_has_the_same_bits(self, tmp_path):
        stepwise(checkpoint=tmp_path / "run.zarr", max_iter=2)
        found = GaussianMixture.resume(tmp_path / "run.zarr", ROWS, max_iter=ITERATIONS)
        assert found.missing == "marginalise"
        assert found.means_.tobytes() == stepwise().means_.tobytes()

    def test_the_error_of_a_missing_value_names_the_settings_that_allow_it(self):
        settings = r'missing="drop" \(emtau: --missing drop\).*missing="marginalise" \(--missing'
        for bad, named in ((np.nan, True), (np.inf, False)):
            with pytest.raises(InvalidDataError) as caught:
                GaussianMixture(1).fit(np.array([[1.0, 2.0], [3.0, bad], [4.0, 1.0]]))
            assert bool(re.search(settings, str(caught.value))) == named

    def test_infinity_is_refused_and_named_though_values_before_it_are_missing(self):
        rows = ROWS.copy()
        rows[110, 2] = np.inf
        with pytest.raises(InvalidDataError, match=r"row 110 .*infinity \(inf\) \(feature 2\)"):
            stepwise(X=rows)

    def test_given_responsibilities_are_refused(self):
        with pytest.raises(ConfigError, match="responsibilities_init is given with missing='marginalise'"):
            mixture().fit(ROWS, responsibilities_init=np.full((120, K), 1 / K))

    def test_an_unknown_word(self):
        with pytest.raises(
            ConfigError, match="missing is 'leave'; it must be one of 'raise', 'drop', 'marginalise'"
        ):
            mixture(missing="leave").fit(ROWS)

    def test_nan_is_refused_where_it_is_not_asked_for(self):
        with pytest.raises(InvalidDataError, match="NaN"):
            mixture(missing="raise", algorithm="auto").fit(ROWS)


@pytest.fixture(scope="module", params=COVARIANCE_TYPES)
def model(request):
    fitted = mixture(request.param, missing="raise", tol=1e-3).fit(WHOLE)
    return fitted.set_params(missing="marginalise")


@pytest.fixture(scope="module")
def one_model():
    return mixture(missing="raise", tol=1e-3).fit(WHOLE).set_params(missing="marginalise")


def naive(model):
    covariances = full_covariances(model.covariances_, model.covariance_type, K, D)
    return [naive_row(model.weights_, model.means_, covariances, row) for row in ROWS]


class TestPredictions:
    @pytest.mark.parametrize("compiled", ["never", "always"])
    def test_scores_responsibilities_and_labels(self, model, compiled):
        expected = naive(model)
        logs, responsibilities = (np.array(each) for each in list(zip(*expected, strict=True))[:2])
        with dask.config.set({"emtau.compiled": compiled}):
            assert np.allclose(model.score_samples(ROWS), logs, rtol=1e-9, atol=1e-9)
            assert np.allclose(model.predict_proba(ROWS), responsibilities, rtol=1e-8, atol=1e-12)
            assert np.array_equal(model.predict(ROWS), responsibilities.argmax(axis=1))
            assert model.score(ROWS) == pytest.approx(logs.mean(), rel=1e-10)

    @pytest.mark.parametrize("compiled", ["never", "always"])
    def test_imputed_values(self, model, compiled):
        expected = [r @ completed for _, r, completed, _ in naive(model)]
        with dask.config.set({"emtau.compiled": compiled}):
            found = model.impute(ROWS)
        assert np.allclose(found, expected, rtol=1e-8, atol=1e-9)
        assert np.array_equal(found[~np.isnan(ROWS)], ROWS[~np.isnan(ROWS)])

    def test_a_row_that_has_nothing(self, one_model):
        nothing = np.full((1, D), np.nan)
        assert one_model.score_samples(nothing).tolist() == [0.0]
        assert np.array_equal(one_model.predict_proba(nothing)[0], one_model.weights_)
        assert np.allclose(one_model.impute(nothing)[0], one_model.weights_ @ one_model.means_)

    @pytest.mark.parametrize("method", ["predict", "predict_proba", "score_samples", "impute"])
    def test_lazy_data_has_lazy_results(self, one_model, method):
        X = da.from_array(ROWS, chunks=(50, 2))
        found = getattr(one_model, method)(X)
        expected = getattr(one_model, method)(ROWS)
        assert isinstance(found, da.Array)
        assert (found.shape, found.dtype, found.chunks[0]) == (
            expected.shape,
            expected.dtype,
            (50, 50, 20),
        )
        assert np.allclose(found.compute(), expected, rtol=1e-12)

    def test_rows_without_missing_values_are_scored_as_ever(self, one_model):
        expected = mixture(missing="raise", tol=1e-3).fit(WHOLE)
        assert np.array_equal(one_model.score_samples(WHOLE), expected.score_samples(WHOLE))

    def test_imputing_needs_no_setting(self):
        plain = mixture(missing="raise", tol=1e-3).fit(WHOLE)
        assert np.isfinite(plain.impute(ROWS)).all()
        with pytest.raises(InvalidDataError, match="NaN"):
            plain.predict(ROWS)

    def test_infinity_is_refused(self, one_model):
        rows = ROWS.copy()
        rows[9, 1] = -np.inf
        with pytest.raises(InvalidDataError, match=r"row 9 .*infinity \(-inf\) \(feature 1\)"):
            one_model.predict(rows)

    def test_more_patterns_than_are_kept(self, one_model, monkeypatch):
        monkeypatch.setattr("emtau_dask.mixture.missing.PATTERNS_BYTES", 0)
        monkeypatch.setattr("emtau_dask.mixture.missing.MIN_PATTERNS", 1)
        assert np.allclose(one_model.score_samples(ROWS), [each[0] for each in naive(one_model)])

    def test_frames_with_names(self):
        frame = pd.DataFrame(WHOLE, columns=list("abcd"))
        fitted = mixture(tol=1e-3).fit(frame)
        assert fitted.impute(frame.mask(np.isnan(ROWS))).shape == (120, D)

    def test_a_saved_model_and_the_command(self, one_model, tmp_path):
        one_model.save(tmp_path / "model.zarr")
        assert GaussianMixture.load(tmp_path / "model.zarr").missing == "marginalise"
        zarr.create_array(store=tmp_path / "rows.zarr", data=ROWS, chunks=(100, D))
        run = emtau("predict", *(tmp_path / name for name in ("model.zarr", "rows.zarr", "out.zarr")))
        assert run.exit_code == 0, run.output
        labels = zarr.open_group(tmp_path / "out.zarr", mode="r")["labels"][:]
        assert np.array_equal(labels, one_model.predict(ROWS))

    def test_pictures_have_expected_values_in_the_place_of_missing_ones(self, one_model):
        display = ComponentsDisplay.from_estimator(one_model, ROWS, features=[0, 2])
        assert np.isfinite(display.drawn.rows).all()
        order = np.lexsort(display.drawn.rows.T)
        imputed = one_model.impute(ROWS)
        assert np.allclose(display.drawn.rows[order], imputed[np.lexsort(imputed.T)])

    def test_outliers_among_incomplete_rows(self, one_model):
        detector = MixtureOutlierDetector(FrozenEstimator(one_model), contamination=0.1).fit(ROWS)
        assert detector.offset_ == np.quantile(one_model.score_samples(ROWS), 0.1)


@pytest.mark.exhaustive
@parametrize_with_checks([GaussianMixture(algorithm="em", missing="marginalise")])
def test_estimator_checks(estimator, check):
    check(estimator)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array(store="rows.zarr", data=ROWS, chunks=(50, D))
    return "rows.zarr"


class TestCommandLine:
    OPTIONS = ("-k", K, "--missing", "marginalise", "--tol", "1e-3", "-o", "out")

    def test_a_fit_is_pythons_and_labels_incomplete_rows(self, stored):
        ended = emtau("fit", stored, *self.OPTIONS, "--algorithm", "em", "--save-config", "saved.yaml")
        assert ended.exit_code == 0, ended.output
        expected = mixture(tol=1e-3).fit(zarr.open_array(stored))
        found = GaussianMixture.load("out/model.zarr")
        assert np.array_equal(found.means_, expected.means_)
        assert found.missing == "marginalise"
        labels = zarr.open_group("out/labels.zarr", mode="r")["labels"][:]
        assert np.array_equal(labels, expected.predict(ROWS))
        assert emtau("fit", "saved.yaml", "--overwrite").exit_code == 0
        assert np.array_equal(GaussianMixture.load("out/model.zarr").means_, expected.means_)

    @pytest.mark.parametrize("missing", ["drop", "marginalize"])
    def test_rows_are_labelled_as_it_is_told(self, missing, stored):
        fitted = mixture(missing="raise", tol=1e-3).fit(WHOLE)
        fitted.save("model.zarr")
        ended = emtau("predict", "model.zarr", stored, "out.zarr", "--missing", missing)
        assert ended.exit_code == 0, ended.output
        labels = zarr.open_group("out.zarr", mode="r")["labels"][:]
        assert np.array_equal(labels, fitted.set_params(missing=missing).predict(ROWS))

    def test_its_report_is_written(self, stored):
        ended = emtau("fit", stored, *self.OPTIONS, "--algorithm", "em", "--set", "output.report=report.html")
        assert ended.exit_code == 0, ended.output
        page = Path("out/report.html").read_text(encoding="utf-8")
        share = np.isnan(ROWS).mean()
        assert f"{share:.1%} of the values of the rows that are shown were missing" in page
        assert "nan" not in re.sub("<[^>]*>", " ", page.lower()).split()

    def test_compare_refuses_it(self, stored):
        Path("c.yaml").write_text(
            f"data: {{path: {stored}}}\nmodel: {{n_components: 3, missing: marginalise}}\n"
            "algorithm: {name: em, compare: [{name: em-tau}]}\n"
        )
        ended = emtau("compare", "c.yaml")
        assert ended.exit_code != 0
        assert "model.missing is 'marginalise', but compare needs complete rows" in ended.stderr


IN_ITS_OWN_PROCESS = """
import resource, sys, warnings
from pathlib import Path
import dask
from emtau_dask import GaussianMixture
warnings.simplefilter("ignore")
dask.config.set(scheduler="threads", num_workers=2)
GaussianMixture(8, algorithm="em", missing="marginalise", max_iter=3, random_state=0).fit(sys.argv[1])
status = Path("/proc/self/status").read_text()
print(1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux alone says what a process took")
def test_a_plan_is_an_upper_bound(tmp_path):
    rows = np.random.default_rng(0).normal(size=(120_000, 12))
    rows[np.random.default_rng(1).random(rows.shape) < 0.05] = np.nan
    path = str(tmp_path / "rows.zarr")
    zarr.create_array(store=path, data=rows, chunks=(30_000, 12))
    values = {"data": {"path": path}, "model": {"n_components": 8, "missing": "marginalise"}}
    config = checked_config(
        complete_values({**values, "algorithm": {"name": "em"}, "cluster": {"workers": 2}}, [], "run")
    )
    command = [sys.executable, "-c", IN_ITS_OWN_PROCESS, path]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert taken <= run_plan(config, overwrite=False).demand.memory <= 3 * taken
