"""The mixture of some features, and that of the rest where they are known, against naive loops and draws."""

from collections.abc import Callable

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from oracles import starts
from references import COVARIANCE_TYPES, full_covariances
from scipy.stats import multivariate_normal

from emtau_dask import GaussianMixture, InvalidDataError

NAMES = ["length", "width", "depth", "mass"]
ROWS, _ = starts.mixture(600, 3, 4, separation=1.5, seed=11)
MIXING = np.array([[1, 0.4, 0, 0.1], [0, 1, -0.5, 0], [0, 0, 1, 0.3], [0, 0, 0, 1.0]])
ROWS = ROWS @ MIXING * [1, 20, 0.1, 1000]
ROWS.setflags(write=False)
SPLITS = [([0], [1, 2, 3]), ([3, 1], [0, 2]), ([2, 0, 3], [1])]


def fitted(covariance_type="full", X=ROWS, **settings):
    return GaussianMixture(3, covariance_type=covariance_type, tol=1e-3, random_state=0, **settings).fit(X)


@pytest.fixture(scope="module", params=COVARIANCE_TYPES)
def model(request):
    return fitted(request.param)


@pytest.fixture(scope="module")
def full():
    return fitted()


@pytest.fixture(scope="module")
def named():
    return fitted(X=pd.DataFrame(ROWS, columns=NAMES))


def matrices(model):
    return full_covariances(model.covariances_, model.covariance_type, *model.means_.shape)


def naive(model, given, rest, row):
    """Weights, means and covariances of the rest, by inverses and densities (Bishop 2006, eq. 2.81, 2.82)."""
    logs, means, covariances = [], [], []
    for weight, mean, sigma in zip(model.weights_, model.means_, matrices(model), strict=True):
        own, across = sigma[np.ix_(given, given)], sigma[np.ix_(rest, given)]
        density = multivariate_normal(mean[given], own)
        logs.append(np.log(weight) + density.logpdf(row))
        means.append(mean[rest] + across @ np.linalg.inv(own) @ (row - mean[given]))
        covariances.append(sigma[np.ix_(rest, rest)] - across @ np.linalg.inv(own) @ across.T)
    weights = np.exp(np.array(logs) - max(logs))
    return weights / weights.sum(), np.array(means), np.array(covariances)


def naive_mean(model, given, rest, row):
    weights, means, _ = naive(model, given, rest, row)
    return sum(weight * mean for weight, mean in zip(weights, means, strict=True))


@pytest.mark.parametrize(("given", "rest"), SPLITS)
class TestAgainstNaiveLoops:
    def test_the_conditional_mixture(self, model, given, rest):
        for row in ROWS[::100, given]:
            found = model.condition(given, row)
            weights, means, covariances = naive(model, given, rest, row)
            assert np.allclose(found.weights_, weights, rtol=1e-8, atol=1e-14)
            assert np.allclose(found.means_, means, rtol=1e-9)
            scale = np.sqrt(np.einsum("kii->ki", covariances))
            off = (matrices(found) - covariances) / scale[:, :, None] / scale[:, None, :]
            assert np.abs(off).max() < 1e-9

    def test_its_density_is_the_quotient_of_densities(self, model, given, rest):
        """p(rest | given) = p(all) / p(given): Bayes' rule, with no formula of conditioning."""
        conditional = model.condition(given, ROWS[7, given])
        points = ROWS[:50].copy()
        points[:, given] = ROWS[7, given]
        whole = model.to_sklearn().score_samples(points)
        part = logsumexp_of_given(model, given, ROWS[7, given])
        assert np.allclose(conditional.score_samples(points[:, rest]), whole - part, rtol=1e-9, atol=1e-9)

    def test_means_of_many_rows(self, model, given, rest):
        found = model.conditional_mean(ROWS[::20, given], given)
        expected = [naive_mean(model, given, rest, row) for row in ROWS[::20, given]]
        assert np.allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(ROWS[:, rest]).max(axis=0))

    def test_the_marginal_mixture(self, model, given, rest):
        found = model.marginal(given)
        assert np.array_equal(found.weights_, model.weights_)
        assert np.array_equal(found.means_, model.means_[:, given])
        assert np.array_equal(matrices(found), matrices(model)[:, given][:, :, given])
        expected = [logsumexp_of_given(model, given, row) for row in ROWS[:50, given]]
        assert np.allclose(found.score_samples(ROWS[:50, given]), expected, rtol=1e-9, atol=1e-9)


def logsumexp_of_given(model, given, row):
    logs = [
        np.log(weight) + multivariate_normal(mean[given], sigma[np.ix_(given, given)]).logpdf(row)
        for weight, mean, sigma in zip(model.weights_, model.means_, matrices(model), strict=True)
    ]
    return np.logaddexp.reduce(logs)


def test_draws_from_the_conditional_mixture_have_its_mean(full):
    conditional = full.condition({0: ROWS[3, 0]})
    drawn, labels = conditional.sample(40_000)
    error = drawn.std(axis=0) / np.sqrt(len(drawn))
    assert (np.abs(drawn.mean(axis=0) - full.conditional_mean(ROWS[3:4, :1], [0])[0]) < 5 * error).all()
    assert np.abs(np.bincount(labels, minlength=3) / len(labels) - conditional.weights_).max() < 0.02


def test_all_features_in_another_order_are_the_same_mixture(model):
    order = [2, 0, 3, 1]
    found = model.marginal(order).score_samples(ROWS[:, order])
    assert np.allclose(found, model.score_samples(ROWS), rtol=1e-11, atol=1e-9)


def test_nearly_singular_covariances_keep_their_digits():
    """Features that agree to 5e-6 of their size: the plain formula has 11 digits of cancellation."""
    rng = np.random.default_rng(2)
    first = rng.normal(size=4000)
    X = np.column_stack([first, first + 5e-6 * rng.normal(size=4000), rng.normal(size=4000)])
    found = GaussianMixture(1, reg_covar=0, random_state=0).fit(X).condition({0: 0.5})
    # The conditional mean of one Gaussian is the line of least squares.
    slope, intercept = np.polyfit(X[:, 0], X[:, 1] - X[:, 0], 1)
    residual = X[:, 1] - X[:, 0] - slope * X[:, 0] - intercept
    assert abs(found.means_[0, 0] - 0.5 - (0.5 * slope + intercept)) < 1e-10
    assert found.covariances_[0, 0, 0] == pytest.approx(np.mean(residual**2), rel=1e-4)


def test_a_row_far_from_all_components_has_one_component_and_its_mean(full):
    row = np.array([1e6])
    weights, means, _ = naive(full, [0], [1, 2, 3], row)
    found = full.condition([0], row)
    assert (found.weights_ > 0).all()
    assert np.allclose(found.weights_, weights, atol=1e-300)
    assert np.allclose(found.means_, means, rtol=1e-9)
    assert np.isfinite(found.score_samples(means)).all()


class TestFitted:
    def test_features_by_name(self, named):
        by_name = named.condition({"mass": 900.0, "width": 3.0})
        by_number = named.condition({3: 900.0, 1: 3.0})
        assert np.array_equal(by_name.means_, by_number.means_)
        assert list(by_name.feature_names_in_) == ["length", "depth"]
        assert list(named.marginal(["mass", "length"]).feature_names_in_) == ["mass", "length"]

    def test_it_predicts_frames_and_refuses_other_names(self, named):
        conditional = named.condition({"mass": 900.0, "width": 3.0})
        frame = pd.DataFrame(ROWS[:, [0, 2]], columns=["length", "depth"])
        assert conditional.predict_proba(frame).shape == (600, 3)
        with pytest.raises(InvalidDataError, match="feature names"):
            conditional.predict(frame[["depth", "length"]])

    def test_it_has_no_fit_of_its_own(self, full):
        made = full.condition({0: 1.0})
        assert (made.n_features_in_, made.n_iter_, len(made.history_), made.lower_bounds_) == (3, 0, 0, [])
        assert made.lower_bound_ == -np.inf
        assert (made.converged_, made.stop_reason_) == (full.converged_, full.stop_reason_)
        assert "weight" in str(made.summary())

    def test_it_can_be_saved_fitted_and_conditioned_again(self, full, tmp_path):
        made = full.condition({0: 1.0})
        made.save(tmp_path / "model.zarr")
        loaded = GaussianMixture.load(tmp_path / "model.zarr")
        assert np.array_equal(loaded.score_samples(ROWS[:, 1:]), made.score_samples(ROWS[:, 1:]))
        twice, once = made.condition({1: 0.2}), full.condition({0: 1.0, 2: 0.2})
        assert np.allclose(twice.weights_, once.weights_, rtol=1e-9)
        assert np.allclose(twice.means_, once.means_, rtol=1e-9)
        assert made.to_sklearn().means_.shape == (3, 3)
        assert made.fit(ROWS[:, 1:]).n_iter_ > 0

    def test_starts_of_all_features_do_not_go_along(self):
        made = fitted(means_init=ROWS[:3], warm_start=True).condition({0: 1.0})
        assert (made.means_init, made.warm_start) == (None, False)
        made.fit(ROWS[:, 1:])

    def test_the_mixture_itself_stays_as_it_was(self, full):
        before = full.score_samples(ROWS)
        full.condition({0: 1.0}).means_[...] = 0
        full.marginal([0, 1]).covariances_[...] = 0
        assert np.array_equal(full.score_samples(ROWS), before)


class TestManyRows:
    GIVEN = (3, 1)

    @pytest.fixture
    def expected(self, full):
        return full.conditional_mean(ROWS[:, self.GIVEN], self.GIVEN)

    def test_lazy_data_has_lazy_means_in_its_chunks(self, full, expected):
        X = da.from_array(ROWS[:, self.GIVEN], chunks=((0, 250, 350), 1))
        found = full.conditional_mean(X, self.GIVEN)
        assert isinstance(found, da.Array)
        assert (found.shape, found.dtype, found.chunks) == ((600, 2), np.float64, ((0, 250, 350), (2,)))
        assert np.allclose(found.compute(), expected, rtol=1e-12)

    def test_nothing_is_computed_before_and_each_chunk_once(self, full):
        asked = []

        def note(block):
            asked.append(len(block))
            return block

        X = da.from_array(ROWS[:, self.GIVEN], chunks=(200, 2))
        found = full.conditional_mean(X.map_blocks(note, dtype=float, meta=np.empty((0, 0))), self.GIVEN)
        assert asked == []
        with dask.config.set(scheduler="synchronous"):
            found.compute()
        assert asked == [200, 200, 200]

    def test_zarr_and_parquet(self, full, named, expected, tmp_path):
        stored = zarr.create_array(store=tmp_path / "x.zarr", data=ROWS[:, self.GIVEN], chunks=(200, 2))
        assert np.allclose(full.conditional_mean(stored, self.GIVEN).compute(), expected, rtol=1e-12)
        pd.DataFrame(ROWS, columns=NAMES).to_parquet(tmp_path / "x.parquet", index=False)
        found = named.conditional_mean(str(tmp_path / "x.parquet"), ["mass", "width"])
        assert np.allclose(found.compute(), expected, rtol=1e-9)

    def test_the_columns_of_a_frame_say_which_features_they_are(self, named, expected):
        frame = pd.DataFrame(ROWS, columns=NAMES)[["mass", "width"]]
        assert np.allclose(named.conditional_mean(frame), expected, rtol=1e-9)
        with pytest.raises(InvalidDataError, match="feature names"):
            named.conditional_mean(frame, ["width", "mass"])

    def test_a_row_with_nan_is_named(self, named):
        bad = ROWS[:, self.GIVEN].copy()
        bad[431, 1] = np.nan
        with pytest.raises(InvalidDataError, match=r"row 431 .*feature 1, 'width'"):
            named.conditional_mean(da.from_array(bad, chunks=(200, 2)), ["mass", "width"]).compute()

    def test_one_matrix_of_columns_too_many(self, full):
        with pytest.raises(InvalidDataError, match="3 features"):
            full.conditional_mean(ROWS[:, :3], [0, 1])


REFUSED: dict[str, tuple[Callable, str]] = {
    "unknown number": (lambda m: m.condition({4: 1.0}), "no feature 4; .* 0 to 3"),
    "negative number": (lambda m: m.marginal([-1]), "no feature -1"),
    "unknown name": (lambda m: m.condition({"wdith": 1.0}), "no feature 'wdith'.*Did you mean 'width'"),
    "a flag": (lambda m: m.condition({True: 1.0}), "no feature True"),
    "nothing": (lambda m: m.condition({}), "no feature is given"),
    "everything": (lambda m: m.condition(dict.fromkeys(range(4), 0.0)), "all 4 features"),
    "everything, for rows": (lambda m: m.conditional_mean(ROWS, range(4)), "all 4 features"),
    "one twice": (lambda m: m.condition({"width": 1.0, 1: 1.0}), "feature 'width' is given twice"),
    "NaN": (lambda m: m.condition({0: np.nan}), "feature 0 is given as nan"),
    "infinity": (lambda m: m.condition([0, 1], [1.0, np.inf]), "feature 1 is given as inf"),
    "text": (lambda m: m.condition({0: "1.0"}), "feature 0 is given as '1.0'"),
    "no values": (lambda m: m.condition([0, 1]), "condition needs features and their values"),
    "values twice": (lambda m: m.condition({0: 1.0}, [1.0]), "given is a mapping with values"),
    "too few values": (lambda m: m.condition([0, 1], [1.0]), r"shape \(1,\), but 2"),
    "a matrix": (lambda m: m.condition([0, 1], ROWS[:, :2]), "conditional_mean"),
    "a name alone": (lambda m: m.marginal("width"), "a list"),
    "no number": (lambda m: m.marginal(3), "a list"),
    "beyond float64": (lambda m: m.condition({0: 1e200}), "too large"),
    "no names of columns": (lambda m: m.conditional_mean(ROWS[:, :2]), "features is None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(named, case):
    call, message = REFUSED[case]
    with pytest.raises(InvalidDataError, match=message):
        call(named)


def test_names_where_the_fit_had_none(full):
    with pytest.raises(InvalidDataError, match="had no names of features"):
        full.condition({"width": 1.0})


@pytest.mark.parametrize("call", ["marginal", "condition", "conditional_mean"])
def test_before_a_fit(call):
    with pytest.raises(ValueError, match="not fitted yet"):
        getattr(GaussianMixture(), call)([0])
