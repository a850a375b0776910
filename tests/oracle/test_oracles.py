"""The oracles themselves, against scikit-learn, SciPy, mpmath and cases worked out by hand."""

import numpy as np
import pytest
from oracles import agree, cases, extended, naive, policies, starts
from oracles.linear import inverse
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture
from tiers import exhaustive_but

LONG_ENOUGH = pytest.mark.skipif(not extended.EXTENDED, reason="longdouble is only a double on this platform")
EVERY = pytest.mark.parametrize("case", exhaustive_but(set(cases.ONE_EACH), cases.ALL), ids=str)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", ["overlapping", "separated"])
@pytest.mark.parametrize("covariance_type", starts.SCIKIT_LEARN_TYPES)
def test_naive_full_em_is_scikit_learns(covariance_type, name):
    X, k = starts.data(name)
    given = starts.start(X, k, covariance_type)
    judge = GaussianMixture(
        k, covariance_type=covariance_type, tol=0, max_iter=25, reg_covar=1e-6, **given
    ).fit(X)
    agree.assert_parameters(
        judge, naive.fit(X, given, covariance_type=covariance_type, reg_covar=1e-6), 1e-11
    )


@EVERY
def test_partial_passes_with_every_row_active_are_full_em(case):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, "full")
    one, full = naive.fit(X, given, case.oracle(), max_iter=1), naive.fit(X, given, max_iter=1)
    np.testing.assert_array_equal(one.means, full.means)


@LONG_ENOUGH
@EVERY
def test_extended_precision_takes_the_same_path(case):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, "full")
    short, long = naive.fit(X, given, case.oracle()), extended.fit(X, given, policy=case.oracle())
    assert short.counts == long.counts
    agree.assert_parameters(_fitted(short), long, 1e-12)


@LONG_ENOUGH
def test_extended_log_likelihood_at_correlation_1_minus_1e_8_is_mpmaths():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 1)) + 1e-4 * rng.normal(size=(20, 3))
    covariance = np.full((3, 3), 1 - 1e-8) + 1e-8 * np.eye(3)
    weights, means, covariances = (
        np.array([0.3, 0.7]),
        np.zeros((2, 3)),
        np.array([covariance, 2 * covariance]),
    )
    expected = extended.mean_log_likelihood_mpmath(X, weights, means, covariances)
    theta = naive.Theta(*(a.astype(np.longdouble) for a in (weights, means, covariances)))
    actual = naive.log_likelihoods(X.astype(np.longdouble), theta).mean()
    assert abs(actual - np.longdouble(str(expected))) < 1e-9


def test_log_density_is_scipys():
    X, _ = starts.data("overlapping")
    covariance = starts.spd(np.random.default_rng(1), 3)
    theta = naive.Theta(np.array([1.0]), np.ones((1, 3)), covariance[None])
    expected = multivariate_normal(np.ones(3), covariance).logpdf(X)
    np.testing.assert_allclose(naive.log_likelihoods(X, theta), expected, rtol=1e-13, atol=1e-13)


def test_free_energy_with_fresh_responsibilities_is_the_log_likelihood():
    X, k = starts.data("overlapping")
    theta = naive.theta_of(starts.start(X, k, "full"), "full")
    s = np.random.default_rng(0).uniform(size=len(X))
    expected = s @ naive.log_likelihoods(X, theta) / s.sum()
    assert naive.free_energy(X, s, theta, naive.e_step(X, theta)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
@EVERY
def test_free_energy_never_falls(case, covariance_type):
    X, k = starts.data("separated")
    run = naive.fit(X, starts.start(X, k, covariance_type), case.oracle(), covariance_type=covariance_type)
    assert np.min(np.diff(run.bounds)) > -1e-12


def test_structures_pack_and_unpack():
    rng = np.random.default_rng(0)
    full = np.array([starts.spd(rng, 3) for _ in range(2)])
    for covariance_type in starts.COVARIANCE_TYPES:
        held = naive.restricted(full, np.array([1.0, 3.0]), covariance_type)
        again = naive.unpacked(naive.packed(held, covariance_type), covariance_type, 2, 3)
        np.testing.assert_array_equal(held, again)


def test_inverse_is_numpys():
    matrix = starts.spd(np.random.default_rng(2), 5)
    np.testing.assert_allclose(inverse(matrix), np.linalg.inv(matrix), rtol=1e-12)


def _step(responsibilities, *, iteration=1, active=None, chunk_of=None):
    n = len(responsibilities)
    present = np.ones(n, dtype=bool)
    active = present if active is None else active
    chunk_of = np.zeros(n, dtype=int) if chunk_of is None else np.asarray(chunk_of)
    return policies.Step(iteration, np.asarray(responsibilities), active, present, np.inf, 0.0, chunk_of)


def _one_component(own):
    """Rows that all belong to component 0 with the given responsibilities (all above one half)."""
    return np.stack([own, 1 - np.asarray(own)], axis=1)


@pytest.mark.parametrize(
    ("policy", "own", "kept"),
    [
        # after heapify in row order: 0.9 (row 4), 0.7 (row 1), 0.8 (row 2), 0.55 (row 3), 0.6 (row 0)
        (policies.EMStar(), [0.6, 0.7, 0.8, 0.55, 0.9], [0, 2, 3]),
        (policies.EMStar(), [0.9], [0]),
        (policies.EMStar(), [0.7, 0.7, 0.7, 0.7], [2, 3]),
        (policies.EMStar(tail=0.4), [0.6, 0.7, 0.8, 0.55, 0.9], [0, 3]),
        (policies.EMStar(tail=0.5), [0.7, 0.7, 0.7], [0, 1]),
        (policies.EMStar(tail=0.01), [0.9, 0.8], [1]),
    ],
    ids=["leaves", "one-row", "leaves-of-ties", "tail", "tail-of-ties", "tail-keeps-one"],
)
def test_em_star_keeps_the_tail_of_the_heap(policy, own, kept):
    assert np.flatnonzero(policy.next_active(_step(_one_component(own)))).tolist() == kept


def test_em_star_heaps_are_per_chunk():
    step = _step(_one_component([0.9, 0.8, 0.7, 0.6]), chunk_of=[0, 0, 1, 1])
    assert np.flatnonzero(policies.EMStar().next_active(step)).tolist() == [1, 3]


def test_em_tau_counts_consecutive_iterations():
    policy = policies.EMTau(tau=2, revisit=None)
    policy.begin(2)
    first = policy.next_active(_step([[0.9, 0.1], [0.9, 0.1]]))
    second = policy.next_active(_step([[0.9, 0.1], [0.1, 0.9]], iteration=2, active=first))
    third = policy.next_active(_step([[0.9, 0.1], [0.1, 0.9]], iteration=3, active=second))
    assert (first.tolist(), second.tolist(), third) == ([True, True], [False, True], None)


def test_em_lazy_keeps_the_undecided_rows():
    step = _step([[0.9, 0.1], [0.5, 0.5], [0.91, 0.09]])
    assert policies.EMLazy(threshold=0.9, full_every=5).next_active(step).tolist() == [True, True, False]


class _fitted:  # noqa: N801
    """A run under the names of a fitted estimator."""

    def __init__(self, run):
        self.weights_, self.means_, self.covariances_ = run.weights, run.means, run.covariances
