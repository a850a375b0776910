"""What is said of components: their overlap, how sure their rows are, which are suspicious."""

from textwrap import wrap

import numpy as np
import pytest
from references import COVARIANCE_TYPES
from scipy.integrate import dblquad, quad
from scipy.stats import multivariate_normal, norm
from sklearn.mixture import GaussianMixture as SklearnMixture

from emtau_dask import GaussianMixture
from emtau_dask.estimator.findings import (
    coefficient,
    expected_certainty,
    nearly_equal,
    remarks_on,
    share_between_components,
)
from emtau_dask.estimator.summary import _mean_texts, ratio_text
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters


def mixture(means, covariances, weights=None, covariance_type="full"):
    means, covariances = np.array(means, dtype=float), np.array(covariances, dtype=float)
    weights = np.full(len(means), 1 / len(means)) if weights is None else np.array(weights)
    factors = structure_named(covariance_type).factor(covariances, means, weights)
    return MixtureParameters(covariance_type, weights, means, covariances, factors)


def test_share_between_components_is_the_share_of_variance_between_components():
    """By the law of total variance, from draws of the mixture."""
    rng = np.random.default_rng(0)
    weights, means = np.array([0.2, 0.3, 0.5]), rng.normal(scale=2, size=(3, 4))
    variances = rng.uniform(0.5, 3, size=(3, 4))
    labels = rng.choice(3, size=400_000, p=weights)
    rows = rng.normal(means[labels], np.sqrt(variances[labels]))
    expected = 1 - sum((labels == k).mean() * rows[labels == k].var(axis=0) for k in range(3)) / rows.var(
        axis=0
    )
    np.testing.assert_allclose(share_between_components(weights, means, variances), expected, atol=0.005)
    np.testing.assert_array_equal(share_between_components(np.ones(1), np.ones((1, 2)), np.ones((1, 2))), 0)


TWO = [[[1.0, 0.3], [0.3, 0.5]], [[0.7, -0.2], [-0.2, 1.5]]]


def test_the_coefficient_is_the_integral_of_the_root_of_both_densities():
    means = [[0.0, 0.0], [0.6, -0.4]]
    first, second = (multivariate_normal(mean, matrix).pdf for mean, matrix in zip(means, TWO, strict=True))
    expected, _ = dblquad(lambda y, x: np.sqrt(first((x, y)) * second((x, y))), -9, 9, -9, 9, epsabs=1e-7)
    assert coefficient(mixture(means, TWO), 0, 1) == pytest.approx(expected, abs=1e-6)


def test_the_coefficient_of_one_feature_is_the_integral_too():
    expected, _ = quad(lambda x: np.sqrt(norm(1, 2).pdf(x) * norm(2.5, 1.1).pdf(x)), -30, 30)
    assert coefficient(mixture([[1.0], [2.5]], [[[4.0]], [[1.21]]]), 0, 1) == pytest.approx(expected)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_no_nearly_equal_pair_is_missed(covariance_type):
    """Bounds by single features leave out no pair that the coefficient itself, of all pairs, finds."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 3)) * [1.0, 10.0, 0.1]
    gm = GaussianMixture(6, covariance_type=covariance_type, random_state=0, tol=0.5, n_init=1).fit(rows)
    parameters = gm.parameters_
    every = {(i, j): coefficient(parameters, i, j) for i in range(6) for j in range(i + 1, 6)}
    found = {(i, j): overlap for i, j, overlap in nearly_equal(parameters)}
    assert found == {pair: overlap for pair, overlap in every.items() if overlap >= 0.9}


def test_components_that_differ_along_a_correlation_are_found_too():
    """Each feature tells them apart a little, but all tell the same: the features do not add up."""
    matrix = np.full((3, 3), 0.95) + 0.05 * np.eye(3)
    difference = np.full(3, 0.6)
    ((*_, overlap),) = nearly_equal(mixture([np.zeros(3), difference], [matrix] * 2))
    assert overlap == pytest.approx(np.exp(-difference @ np.linalg.solve(matrix, difference) / 8))
    assert np.exp(-(difference**2).sum() / 8) < 0.9 < overlap


def test_equal_components_are_named_and_others_are_not():
    means = [[0.0, 0.0], [0.05, 0.0], [4.0, 0.0]]
    parameters = mixture(means, [np.eye(2)] * 3)
    ((i, j, overlap),) = nearly_equal(parameters)
    assert (i, j) == (0, 1)
    assert overlap == pytest.approx(np.exp(-(0.05**2) / 8))
    (remark,) = remarks_on(parameters, 1000, 1e-6, ["a", "b"])
    assert remark.startswith("nearly equal: components 0 and 1 (overlap 100%).")


def test_few_rows_and_constant_features_are_named():
    covariances = [np.eye(2), np.diag([1.2e-6, 1.0])]
    parameters = mixture([[0.0, 0.0], [9.0, 9.0]], covariances, weights=[0.98, 0.02])
    few, constant = remarks_on(parameters, 100, 1e-6, ["length", "mass"])
    assert few.startswith("few rows for 2 features: component 1 (2 rows).")
    assert "reg_covar = 1e-06: component 1 (length)." in constant
    (constant,) = remarks_on(parameters, 300, 1e-6, ["length", "mass"])  # 2 (d + 1) rows are not few
    assert remarks_on(parameters, 0, 0.0, ["length", "mass"]) == ()


def test_constant_features_of_many_components_take_three_lines():
    means = np.arange(10)[:, np.newaxis] * np.full(20, 9.0)
    names = [f"pixel_{j}_{j}" for j in range(20)]
    (remark,) = remarks_on(mixture(means, [np.eye(20)] * 10), 10**4, 1.0, names)
    assert "components 0, 1, 2, 3, 4 and 5 more (pixel_0_0, pixel_1_1, pixel_2_2, pixel_3_3, " in remark
    assert "pixel_4_4 and 15 more)." in remark
    assert len(wrap(f"suspicious: {remark}", 80, subsequent_indent="  ")) == 3


def test_an_ordinary_fit_has_no_remarks():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 2)) + np.repeat([[0.0], [5.0], [-6.0]], 100, axis=0)
    assert GaussianMixture(3, random_state=0).fit(rows).summary().remarks == ()


def test_certainty_is_what_scikit_learn_finds_in_rows_of_its_own():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, 2)) + rng.choice([0.0, 2.0, 7.0], size=(3000, 1))
    gm = GaussianMixture(3, random_state=0).fit(rows)
    twin: SklearnMixture = gm.to_sklearn()
    twin.random_state = 1
    responsibilities = twin.predict_proba(twin.sample(200_000)[0])
    labels = responsibilities.argmax(axis=1)
    sure = responsibilities.max(axis=1) >= 0.9
    expected = [sure[labels == k].mean() for k in range(3)]
    assert min(expected) < 0.8
    np.testing.assert_allclose(expected_certainty(gm.parameters_), expected, atol=0.05)


def test_a_large_mixture_has_no_expected_certainty():
    parameters = mixture(np.zeros((200, 40)), [np.eye(40)] * 200)
    assert np.isnan(expected_certainty(parameters)).all()


@pytest.mark.parametrize(
    ("error", "gap", "text"),
    [
        (1e-4, 2e-8, "5,000 times as much"),
        (1.5e-4, 4.836e-8, "3,100 times as much"),
        (1e-6, 1e-4, "0.01 times as much"),
        (1e-4, 0.0, "far more than it could still gain"),
    ],
)
def test_the_sampling_error_is_compared_with_the_gain(error, gap, text):
    assert ratio_text(error, gap) == text


def test_a_mean_that_rounds_to_zero_has_no_sign():
    assert _mean_texts(np.array([-0.01, 4.0]), np.array([1.3, 1.2])) == ["0.0 ± 1.3", "4.0 ± 1.2"]
