"""Sampled partial E-steps against sums over all rows: the rows drawn, what they stand for, and each M-step.

The responsibilities of all rows are kept here, and moments are plain sums of (1, x, x xᵀ).
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from accelerated import iterations, quiet_fit
from oracles import agree, naive, starts

from emtau_dask import ConfigError, EMSampled
from emtau_dask.policies.policy import NextPass, RowArray, Schedule

STRUCTURES = pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)
K, D, N = 3, 2, 2000
ROWS, _ = starts.mixture(N, K, D, separation=2.5, seed=7)
LIMIT = 1e-9
MASK = 2**64 - 1


def mixed(value):
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniforms(seed, iteration, n):
    """The number of each row: SplitMix64 of its own number, salted by the seed, a 2 and the iteration."""
    salt = 0
    for key in (seed, 2, iteration):
        salt = mixed(((salt ^ key) + 0x9E3779B97F4A7C15) & MASK)
    return np.array([(mixed(((row * 0x9E3779B97F4A7C15) & MASK) ^ salt) >> 11) / 2**53 for row in range(n)])


@dataclass
class Moments:
    """Sums over rows of w (1, x, x xᵀ), which may be negative."""

    weights: np.ndarray
    firsts: np.ndarray
    seconds: np.ndarray

    @classmethod
    def of(cls, X, w):
        return cls(w.sum(axis=0), w.T @ X, np.einsum("nk,ni,nj->kij", w, X, X))

    def __add__(self, other):
        return Moments(self.weights + other.weights, self.firsts + other.firsts, self.seconds + other.seconds)

    def __mul__(self, factor):
        return Moments(factor * self.weights, factor * self.firsts, factor * self.seconds)

    def __sub__(self, other):
        return self + other * -1.0

    def theta(self, covariance_type):
        means = self.firsts / self.weights[:, None]
        covariances = self.seconds / self.weights[:, None, None] - np.einsum("ki,kj->kij", means, means)
        return naive.Theta(
            self.weights / self.weights.sum(),
            means,
            naive.restricted(covariances, self.weights, covariance_type),
        )

    def expected_log_density(self, theta):
        total = 0.0
        for k in range(len(theta.weights)):
            precision = np.linalg.inv(theta.covariances[k])
            mean, log_det = theta.means[k], np.linalg.slogdet(theta.covariances[k])[1]
            constant = np.log(theta.weights[k]) - 0.5 * (len(mean) * np.log(2 * np.pi) + log_det)
            total += self.weights[k] * (constant - 0.5 * mean @ precision @ mean)
            total += self.firsts[k] @ precision @ mean - 0.5 * np.sum(precision * self.seconds[k])
        return total


def entropy(w, r):
    return -np.sum(w[:, None] * r * np.log(np.where(r > 0, r, 1)))


class NaiveSampled:
    """EM with cycles of sampled rows, of EM's own steps alone; lists are by iteration."""

    def __init__(self, X, start, covariance_type, s, share, most, seed=0):
        self.X, self.s, self.type, self.share, self.most = X, s, covariance_type, share, most
        self.seed = seed
        self.scored, self.bounds, self.active, self.accepted = [], [], [], []
        self.uncertainty = None
        self.theta = naive.theta_of(start, covariance_type)

    def _noted(self, bound, active, accepted=True):
        self.scored.append(self.theta)
        self.bounds.append(bound)
        self.active.append(active)
        self.accepted.append(accepted)

    def full(self, before=None, again=None):
        """A pass over all rows; below the bound ``before`` it is refused, and ``again`` is the next Θ."""
        X, s = self.X, self.s
        r = naive.e_step(X, self.theta)
        bound = np.average(naive.log_likelihoods(X, self.theta), weights=s)
        uncertainty = 1 - r.max(axis=1)
        mean = 0.5 if self.uncertainty is None else self.uncertainty
        wanted = self.share * (uncertainty + 0.01) / (mean + 0.01)
        chances = np.clip(np.ceil(256 * wanted), 1, 256) / 256
        drawn = uniforms(self.seed, len(self.scored) + 1, len(X)) < chances
        self.uncertainty = np.average(uncertainty, weights=s)
        refused = before is not None and bound < before - 1e-13 * max(1, abs(before))
        self._noted(bound, len(X) + drawn.sum(), not refused)
        if refused:
            self.theta = again
            return None
        total = Moments.of(X, s[:, None] * r)
        factors = s[drawn] / chances[drawn]
        held = total - Moments.of(X[drawn], factors[:, None] * r[drawn])
        left = entropy(s, r) - entropy(factors, r[drawn])
        self.theta = total.theta(self.type)
        return drawn, factors, held, left, bound, total

    def cycle(self, drawn, factors, held, left):
        """The partial passes."""
        X = self.X[drawn]
        for _ in range(self.most):
            r = naive.e_step(X, self.theta)
            log_likelihood = factors @ naive.log_likelihoods(X, self.theta)
            bound = (log_likelihood + held.expected_log_density(self.theta) + left) / self.s.sum()
            self._noted(bound, drawn.sum())
            self.theta = (held + Moments.of(X, factors[:, None] * r)).theta(self.type)


def compared(model, made, run):
    assert len(made) == len(run.scored)
    assert [one.record.active_rows for one in made] == run.active
    assert [one.record.accepted for one in made] == run.accepted
    for one, theta, bound in zip(made, run.scored, run.bounds, strict=True):
        covariances = naive.packed(theta.covariances, run.type)
        for name, expected in (
            ("weights", theta.weights),
            ("means", theta.means),
            ("covariances", covariances),
        ):
            assert agree.worst(getattr(one.scored, name), expected) <= LIMIT, (one.record.iteration, name)
        assert one.record.lower_bound == pytest.approx(bound, abs=LIMIT)


class ToTheMost(EMSampled):
    """Does all partial passes of a cycle, whatever is left to gain."""

    def schedule(self, summary):
        return super().schedule(replace(summary, gap_at_reset=np.nan))


def fitted(policy, max_iter=6, *, covariance_type="full", chunking="ragged", **settings):
    """The fit without regularisation that goes on to its limit, and its iterations."""
    settings = {"tol": 0, "reg_covar": 0} | starts.start(ROWS, K, covariance_type) | settings
    with iterations() as made:
        model = quiet_fit(
            starts.chunked(ROWS, chunking),
            K,
            algorithm=policy,
            covariance_type=covariance_type,
            max_iter=max_iter,
            **settings,
        )
    return model, made


def one_cycle(covariance_type, share, most, *, weighted):
    """The oracle's run and the package's fit of a full pass, partial passes, and a full pass."""
    s = np.random.default_rng(1).uniform(0.2, 3, N) if weighted else np.ones(N)
    start = starts.start(ROWS, K, covariance_type)
    run = NaiveSampled(ROWS, start, covariance_type, s, share=share, most=most)
    drawn, factors, held, left, bound, _ = run.full()
    again = run.theta
    run.cycle(drawn, factors, held, left)
    run.full(before=bound, again=again)
    policy, options = ToTheMost(share=share, most=most), {"covariance_type": covariance_type}
    sample_weight = s if weighted else None
    model, made = fitted(policy, most + 2, acceleration=None, sample_weight=sample_weight, **options)
    compared(model, made, run)
    agree.assert_parameters(model, packed(run, covariance_type), LIMIT)
    return run


@STRUCTURES
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_one_cycle_is_that_of_sums_over_all_rows(covariance_type, weighted):
    assert one_cycle(covariance_type, 0.5, 3, weighted=weighted).accepted[-1]


def test_where_a_cycle_led_down_ems_own_step_from_before_it_follows():
    """From an early point, few sampled rows under held statistics lead astray."""
    assert not one_cycle("spherical", 0.25, 5, weighted=True).accepted[-1]


def packed(run, covariance_type):
    class Run:
        weights, means = run.theta.weights, run.theta.means
        covariances = naive.packed(run.theta.covariances, covariance_type)

    return Run


def test_three_cycles_are_those_of_sums_over_all_rows():
    """The second and the third weigh rows by how uncertain all were in the pass over all rows before."""
    start = starts.start(ROWS, K, "full")
    run = NaiveSampled(ROWS, start, "full", np.ones(N), share=0.5, most=3)
    for _ in range(3):
        drawn, factors, held, left, _, _ = run.full()
        run.cycle(drawn, factors, held, left)
    run.full()
    policy = ToTheMost(share=0.5, most=3)
    model, made = fitted(policy, 13, chunking="zero-row-chunks", acceleration=None)
    assert (
        np.diff([bound for one, bound in zip(made, run.bounds, strict=True) if one.record.full_pass]).min()
        > 0
    )
    compared(model, made, run)


class Halves:
    """Every row stays with a chance of a half, and stands for two; ``most`` partial passes."""

    def __init__(self, most=4, weight=2.0, wrong=None):
        self.most, self.weight, self.wrong = most, weight, wrong

    def row_arrays(self, n_components, max_iter):
        return (RowArray("drawn", 1),)

    def update(self, state, evidence):
        before = state["drawn"]
        if before.any():
            return state, np.ones(len(before), dtype=bool)
        return {"drawn": np.ones_like(before)}, evidence.draws < 0.5

    def row_weights(self, state):
        n = len(state["drawn"])
        if self.wrong == "shape":
            return np.full(n + 1, 2.0)
        if self.wrong == "dtype":
            return np.full(n, 2)
        if self.wrong == "list":
            return [2.0] * n
        return np.full(n, self.weight)

    def schedule(self, summary):
        all_next = summary.since_reset > self.most
        return Schedule(NextPass.ALL if all_next else NextPass.ACTIVE, test_tol=summary.full_pass)


class NaiveHalves(NaiveSampled):
    """The same, by a chance of a half for all rows."""

    def full(self, before=None, again=None):
        X = self.X
        r = naive.e_step(X, self.theta)
        bound = naive.log_likelihoods(X, self.theta).mean()
        drawn = uniforms(self.seed, len(self.scored) + 1, len(X)) < 0.5
        self._noted(bound, len(X) + drawn.sum())
        total, factors = Moments.of(X, r), np.full(drawn.sum(), 2.0)
        held = total - Moments.of(X[drawn], 2.0 * r[drawn])
        left = entropy(np.ones(len(X)), r) - entropy(factors, r[drawn])
        self.theta = total.theta(self.type)
        return drawn, factors, held, left, bound, total


def test_a_users_own_weighted_policy_is_followed():
    run = NaiveHalves(ROWS, starts.start(ROWS, K, "full"), "full", np.ones(N), share=None, most=4)
    run.cycle(*run.full()[:4])
    run.full()
    model, made = fitted(Halves(), acceleration=None)
    compared(model, made, run)


def test_it_may_extrapolate():
    model, made = fitted(Halves(), max_iter=60)
    assert {one.stage for one in made} >= {"cycle", "all rows"}
    kept = [one.record.lower_bound for one in made if one.record.full_pass and one.record.accepted]
    assert np.diff(kept).min() >= -1e-11
    assert model.lower_bound_ == kept[-1]
    plain = quiet_fit(
        ROWS, K, algorithm="em", tol=0, reg_covar=0, max_iter=60, **starts.start(ROWS, K, "full")
    )
    assert model.lower_bound_ >= plain.lower_bound_ - 1e-6


@pytest.mark.parametrize(
    "policy",
    [
        Halves(weight=0.5),
        Halves(weight=0.0),
        Halves(weight=-2.0),
        Halves(weight=np.nan),
        Halves(weight=np.inf),
        Halves(wrong="shape"),
        Halves(wrong="dtype"),
        Halves(wrong="list"),
    ],
    ids=["below 1", "0", "negative", "nan", "infinite", "shape", "dtype", "list"],
)
def test_wrong_weights_are_refused(policy):
    with pytest.raises(ConfigError, match=r"Halves\.row_weights returned"):
        fitted(policy)


def test_weights_of_1_hold_what_the_others_contribute_as_partial_e_steps_do():
    """Then the rows left stand for themselves alone: the paper's partial E-step, whose bound never falls."""
    _, made = fitted(Halves(weight=1.0), max_iter=6, acceleration=None)
    bounds = [one.record.lower_bound for one in made]
    assert np.diff(bounds).min() >= -1e-11


def test_a_cycle_that_began_without_an_estimate_ends_once_little_is_left_to_gain():
    """The gap of a first full pass is unknown; that must not cost all 40 partial passes."""
    start = starts.start(ROWS, K, "full")
    model = quiet_fit(ROWS, K, algorithm=EMSampled(share=0.5), tol=0, max_iter=60, **start)
    full = [record.iteration for record in model.history_ if record.full_pass]
    assert np.isnan(model.history_[0].gap)
    assert full[1] - full[0] < 20
