"""Numbers that spoil naive formulas, against extended precision on the stored float64 values."""

from functools import cache

import numpy as np
import pytest
from oracles import agree, cases, extended, naive, starts

pytestmark = pytest.mark.skipif(not extended.EXTENDED, reason="longdouble is only a double on this platform")
STRUCTURES = pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
CHUNKINGS = pytest.mark.parametrize("chunking", ["one-chunk", "ragged", "features-split"])
SHIFT = 1e8
SCALES = 10.0 ** np.array([-6, -3, 0, 3, 6])


def shifted(covariance_type, *, separation):
    """Unit spread around 1e8: the stored values, and a start among them."""
    X = starts.mixture(400, 3, 3, separation=separation, seed=32)[0] + SHIFT
    given = starts.start(X - SHIFT, 3, covariance_type)
    return X, {**given, "means_init": given["means_init"] + SHIFT}


def assert_shifted(model, run):
    errors = {
        "weights": np.max(np.abs(model.weights_ - run.weights)),
        "means": np.max(np.abs((model.means_ - SHIFT) - run.means)),
        "covariances": np.max(np.abs(model.covariances_ - run.covariances)),
        "bounds": np.max(np.abs(np.array(model.lower_bounds_) - run.bounds)),
    }
    assert max(errors.values()) <= 1e-6, errors


@CHUNKINGS
@pytest.mark.parametrize("separation", [4, 6])
@STRUCTURES
def test_data_shifted_by_1e8(fit, covariance_type, separation, chunking):
    X, given = shifted(covariance_type, separation=separation)
    run = extended.fit(X, given, shift=SHIFT, covariance_type=covariance_type)
    assert_shifted(fit(starts.chunked(X, chunking), given, cases.FULL, covariance_type=covariance_type), run)


@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_data_shifted_by_1e8_with_partial_passes(fit, case):
    X, given = shifted("full", separation=6)
    run = extended.fit(X, given, shift=SHIFT, policy=case.oracle())
    # means at 1e8 are stored to 1.5e-8, so the active sets must bear more than 1e-12
    start = {**given, "means_init": given["means_init"] - SHIFT}
    agree.assert_stable(X - SHIFT, start, case, run, size=1e-7)
    assert_shifted(fit(starts.chunked(X, "one-chunk"), given, case), run)


def assert_scaled(model, run):
    """Every error in units of the features' own standard deviations."""
    k, d = model.means_.shape
    expected = run.thetas[-1].covariances
    actual = naive.unpacked(model.covariances_, model.covariance_type, k, d)
    sd = np.sqrt(np.diagonal(expected, axis1=1, axis2=2))
    assert np.max(np.abs(actual - expected) / (sd[:, :, None] * sd[:, None, :])) <= 1e-9
    assert np.max(np.abs(model.means_ - run.means) / sd) <= 1e-9


def scaled():
    return starts.mixture(500, 3, 5, separation=3.0, seed=37)[0] * SCALES


@CHUNKINGS
@STRUCTURES
def test_feature_scales_from_1e_minus_6_to_1e6(fit, covariance_type, chunking):
    X = scaled()
    given = np.random.default_rng(5).dirichlet(np.full(3, 0.3), len(X))
    run = extended.fit(X, given, covariance_type=covariance_type)
    assert_scaled(fit(starts.chunked(X, chunking), given, cases.FULL, covariance_type=covariance_type), run)


@pytest.mark.parametrize("covariance_type", ["full", "tied", "diag", "tied_diag"])
def test_feature_scales_from_given_precisions(fit, covariance_type):
    X = scaled()
    given = starts.start(X / SCALES, 3, covariance_type)
    units = dict.fromkeys(("full", "tied"), np.outer(SCALES, SCALES))
    units |= dict.fromkeys(("diag", "tied_diag"), SCALES**2)
    given["means_init"] = given["means_init"] * SCALES
    given["precisions_init"] = given["precisions_init"] / units[covariance_type]
    run = extended.fit(X, given, covariance_type=covariance_type)
    assert_scaled(fit(starts.chunked(X, "ragged"), given, cases.FULL, covariance_type=covariance_type), run)


@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_feature_scales_with_partial_passes(fit, case):
    X = scaled()
    given = np.random.default_rng(5).dirichlet(np.full(3, 0.3), len(X))
    run = extended.fit(X, given, policy=case.oracle())
    assert_scaled(fit(starts.chunked(X, "one-chunk"), given, case), run)


@cache
def tight(ratio):
    """Rows of a tight component among broad ones, responsibilities, and the run in extended precision."""
    rng = np.random.default_rng(43)
    X = starts.mixture(400, 2, 3, separation=3.0, seed=43)[0]
    X = np.concatenate([X, np.array([1.3, -0.7, 2.1]) + ratio * rng.normal(size=(100, 3))])
    given = np.full((500, 3), 0.05)
    given[np.arange(500), np.where(np.arange(500) >= 400, 2, X[:, 0] > 0)] = 0.9
    order = rng.permutation(500)
    return X[order], given[order], extended.fit(X[order], given[order])


@pytest.mark.parametrize("ratio", [1e-3, 1e-5])
@CHUNKINGS
def test_a_tight_component_among_broad_ones(fit, chunking, ratio):
    X, given, run = tight(ratio)
    assert_scaled(fit(starts.chunked(X, chunking), given, cases.FULL), run)


def correlated(contrast):
    """Two components, all features correlated at 1 − 1e-8, apart along it and by `contrast` across."""
    rng = np.random.default_rng(3)
    labels = rng.integers(2, size=400)
    ridge = rng.normal(size=(400, 1)) * np.array([1, 1.4])[labels][:, None]
    centre = 2 * np.ones(3) + contrast * np.array([1, -1, 0.5])
    return ridge + 1e-4 * rng.normal(size=(400, 3)) + np.where(labels, 1.0, -1.0)[:, None] * centre


@CHUNKINGS
@pytest.mark.parametrize("contrast", [0, 5e-4], ids=["along-the-ridge", "across-the-ridge"])
@pytest.mark.parametrize("covariance_type", ["full", "tied"])
def test_bound_of_features_correlated_at_1_minus_1e_8(fit, covariance_type, contrast, chunking):
    X = correlated(contrast)
    given = starts.start(X, 2, covariance_type)
    run = extended.fit(X, given, covariance_type=covariance_type)
    model = fit(starts.chunked(X, chunking), given, cases.FULL, covariance_type=covariance_type)
    assert np.max(np.abs(np.array(model.lower_bounds_) - run.bounds)) <= 1e-7


@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
@pytest.mark.exhaustive
def test_bound_of_correlated_features_with_partial_passes(fit, case):
    X = correlated(5e-4)
    given = starts.start(X, 2, "full")
    run = extended.fit(X, given, policy=case.oracle())
    model = fit(starts.chunked(X, "one-chunk"), given, case)
    assert np.max(np.abs(np.array(model.lower_bounds_) - run.bounds)) <= 1e-7


@pytest.mark.parametrize("covariance_type", ["full", "tied"])
def test_score_of_correlated_features(fit, covariance_type):
    X = correlated(5e-4)
    given = starts.start(X, 2, covariance_type)
    run = extended.fit(X, given, covariance_type=covariance_type)
    model = fit(starts.chunked(X, "one-chunk"), given, cases.FULL, covariance_type=covariance_type)
    expected = naive.log_likelihoods(X.astype(extended.LONG), run.thetas[-1]).mean()
    assert abs(model.score(X) - expected) <= 1e-7
