"""With every row active the bound is SciPy's log-likelihood of the parameters before the M-step."""

import numpy as np
import pytest
from oracles import cases, naive, starts
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

# algorithm, an iteration of it with every row active
FULL_PASSES = [
    (cases.FULL, 1),
    (cases.FULL, 6),
    (cases.case("EMTau", tau=2, revisit=3), 4),
    (cases.case("EMTau", tau=1, revisit="on-empty"), 3),
    (cases.case("EMLazy", threshold=0.9, full_every=3), 7),
    (cases.case("EMStar", every=4), 4),
]


def scipys(X, weights, model):
    k, d = model.means_.shape
    full = naive.unpacked(model.covariances_, model.covariance_type, k, d)
    joint = [
        np.log(weight) + multivariate_normal(mean, covariance).logpdf(X)
        for weight, mean, covariance in zip(model.weights_, model.means_, full, strict=True)
    ]
    return np.average(logsumexp(joint, axis=0), weights=weights)


@pytest.mark.parametrize(("case", "iteration"), FULL_PASSES, ids=lambda value: str(value))
@pytest.mark.parametrize(
    ("covariance_type", "weighted"),
    [*((structure, False) for structure in starts.COVARIANCE_TYPES), ("full", True)],
    ids=[*starts.COVARIANCE_TYPES, "full-weighted"],
)
def test_bound_with_every_row_active(fit, covariance_type, weighted, case, iteration):
    X, k = starts.data("separated")
    weights = np.random.default_rng(2).uniform(0.5, 2, size=len(X)) if weighted else np.ones(len(X))
    given = starts.start(X, k, covariance_type)
    options = {"covariance_type": covariance_type, "sample_weight": weights if weighted else None}
    after = fit(starts.chunked(X, "ragged"), given, case, max_iter=iteration, **options)
    assert after.history_[-1].active_rows == len(X)
    if iteration == 1:
        theta = naive.theta_of(given, covariance_type)
        expected = np.average(naive.log_likelihoods(X, theta), weights=weights)
    else:
        before = fit(starts.chunked(X, "ragged"), given, case, max_iter=iteration - 1, **options)
        expected = scipys(X, weights, before)
    assert abs(after.lower_bound_ - expected) <= 1e-11 * max(1, abs(expected))


@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_score_is_scipys_log_likelihood(fit, case):
    X, k = starts.data("separated")
    model = fit(starts.chunked(X, "ragged"), starts.start(X, k, "full"), case)
    expected = scipys(X, np.ones(len(X)), model)
    assert abs(model.score(X) - expected) <= 1e-11 * max(1, abs(expected))
