"""One suite over every activity policy, the built-in ones and a user's own."""

import pickle
import warnings
from itertools import product

import dask
import dask.array as da
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from tiers import exhaustive_but

from emtau_dask import EMLazy, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.policies.policy import (
    ActivityPolicy,
    Evidence,
    NextPass,
    PassSummary,
    RowArray,
    Schedule,
    Traced,
    checked_update,
)
from emtau_dask.policies.registry import as_policy

K, N, MAX_ITER = 4, 60, 40


class Confident:
    """A user's own: a row rests after two scorings in a row above a level; keeps how sure it was."""

    level = 0.8

    def row_arrays(self, n_components, max_iter):
        return RowArray("streak", 2), RowArray("percent", 100, keep=True)

    def update(self, state, evidence):
        sure = evidence.responsibilities > self.level
        streak = np.where(sure, state["streak"] + 1, 0).astype(state["streak"].dtype)
        percent = np.round(100 * evidence.responsibilities).astype(state["percent"].dtype)
        return {"streak": streak, "percent": percent}, streak < 2

    def schedule(self, summary):
        again = summary.remaining == 0 or summary.since_reset >= 6
        return Schedule(NextPass.ALL if again else NextPass.ACTIVE, test_tol=summary.full_pass)


POLICIES = [
    FullEM(),
    EMTau(tau=3),
    EMTau(tau=1, revisit=None),
    EMTau(tau=300, revisit=2),
    EMStar(),
    EMStar(tail=0.6, every=2),
    EMLazy(threshold=0.7, full_every=3),
    EMLazy(threshold=1.0, full_every=1),
    Traced(EMTau(tau=3)),
    Traced(EMStar()),
    Confident(),
]


@pytest.fixture(
    scope="module",
    params=exhaustive_but(set(POLICIES[:7]) | {POLICIES[8], POLICIES[10]}, POLICIES),
    ids=lambda policy: str(policy) if hasattr(policy, "get_params") else None,
)
def policy(request):
    return request.param


def evidence(iteration, n=N):
    rng = np.random.default_rng(iteration)
    return Evidence(iteration, rng.integers(K, size=n), rng.uniform(1 / K, 1, size=n), rng.normal(size=n))


def fresh(policy, n=N):
    return {a.name: np.zeros(n, dtype=a.dtype) for a in policy.row_arrays(K, MAX_ITER) or ()}


def after(policy, iterations):
    """The state of the rows that a policy still wants active after some iterations, and those rows."""
    state, rows = fresh(policy), np.arange(N)
    for iteration in range(1, iterations + 1):
        state, stays = policy.update(state, picked(evidence(iteration), rows))
        state, rows = {name: values[stays] for name, values in state.items()}, rows[stays]
    return state, rows


def picked(whole, rows):
    return Evidence(
        whole.iteration, whole.labels[rows], whole.responsibilities[rows], whole.log_likelihoods[rows]
    )


def test_it_can_be_passed_as_algorithm_and_declares_arrays_of_different_names(policy):
    assert isinstance(policy, ActivityPolicy)
    assert as_policy(policy) is policy
    arrays = policy.row_arrays(K, MAX_ITER) or ()
    assert all(array.dtype.kind == "u" for array in arrays)
    assert len({array.name for array in arrays} | {"active"}) == len(arrays) + 1


def test_update_answers_for_every_active_row_in_the_declared_types_and_is_pure(policy):
    declared = {name: values.dtype for name, values in fresh(policy).items()}
    for iterations in (0, 1, 2):
        state, rows = after(policy, iterations)
        given = picked(evidence(iterations + 1), rows)
        for array in (*state.values(), given.labels, given.responsibilities, given.log_likelihoods):
            array.setflags(write=False)
        (found, stays), (again, stay_again) = policy.update(state, given), policy.update(state, given)
        assert (stays.shape, stays.dtype) == ((len(rows),), np.bool_)
        assert {name: values.shape for name, values in found.items()} == dict.fromkeys(state, (len(rows),))
        assert {name: values.dtype for name, values in found.items()} == declared
        assert np.array_equal(stays, stay_again)
        assert all(np.array_equal(found[name], again[name]) for name in state)
    found, stays = policy.update(fresh(policy, 0), evidence(1, 0))
    assert len(stays) == 0
    assert all(len(values) == 0 for values in found.values())


def test_it_travels_by_pickle(policy):
    copy = pickle.loads(pickle.dumps(policy))
    state, rows = after(policy, 1)
    given = picked(evidence(2), rows)
    assert np.array_equal(copy.update(state, given)[1], policy.update(state, given)[1])


def test_schedule_is_pure_and_well_formed(policy):
    for full_pass, remaining in product((True, False), (0, 7)):
        summary = PassSummary(3, full_pass, remaining, 0.5, 1e-3, 2)
        schedule = policy.schedule(summary)
        assert isinstance(schedule.next_pass, NextPass)
        assert isinstance(schedule.test_tol, bool)
        assert policy.schedule(summary) == schedule


def fit(policy, X, **settings):
    means = np.array([[0.0, 0], [4, 0], [0, 4], [4, 4]])
    mixture = GaussianMixture(
        K,
        algorithm=policy,
        weights_init=np.full(K, 1 / K),
        means_init=means + 0.5,
        precisions_init=np.array([np.eye(2)] * K),
        max_iter=12,
        **({"tol": 0, "reg_covar": 0} | settings),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return mixture.fit(X)


@pytest.fixture(scope="module")
def X():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(240, 2)) + 4 * rng.integers(2, size=(240, 2))
    return da.from_array(rows, chunks=((70, 0, 100, 70), 2)).map_blocks(np.copy)


@pytest.fixture(scope="module")
def fitted(policy, X):
    return fit(policy, X)


def test_the_bound_never_falls_and_full_passes_score_every_row(fitted):
    bounds = np.array(fitted.lower_bounds_)
    assert np.all(np.diff(bounds) >= -1e-11 * np.maximum(1, np.abs(bounds[1:])))
    assert fitted.history_[0].full_pass
    assert all(record.full_pass == (record.active_rows == 240) for record in fitted.history_)
    assert {record.chunks_processed + record.chunks_skipped for record in fitted.history_} == {3}


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_a_fit_can_be_repeated_bit_for_bit(policy, fitted, X, scheduler):
    with dask.config.set(scheduler=scheduler, num_workers=3):
        again = fit(policy, X)
    assert fitted.means_.tobytes() == again.means_.tobytes()
    assert fitted.lower_bounds_ == again.lower_bounds_


class Wide(Confident):
    """A user's own whose numbers are of another type than it declared."""

    def update(self, state, evidence):
        return {name: values.astype(np.int64) + 1 for name, values in state.items()}, evidence.labels > 0


def test_numbers_of_another_type_become_those_declared():
    state = fresh(Wide())
    found, _ = checked_update(Wide(), state, evidence(1))
    assert {name: (values.dtype, set(values)) for name, values in found.items()} == {
        name: (values.dtype, {1}) for name, values in state.items()
    }
