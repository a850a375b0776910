"""The activity policies by sequences worked by hand."""

import heapq
import math

import numpy as np
import pytest
from tiers import exhaustive_but

from emtau_dask import EMLazy, EMStar, EMTau, FullEM
from emtau_dask.policies.policy import Evidence, NextPass, PassSummary


def evidence(labels, responsibilities=None, iteration=1):
    labels = np.asarray(labels, dtype=np.intp)
    n = len(labels)
    held = np.full(n, 0.9) if responsibilities is None else np.asarray(responsibilities, dtype=float)
    return Evidence(iteration, labels, held, np.zeros(n))


def fresh(policy, n, n_components=3, max_iter=100):
    arrays = policy.row_arrays(n_components, max_iter) or ()
    return {array.name: np.zeros(n, dtype=array.dtype) for array in arrays}


def summary(iteration=2, *, full_pass=False, remaining=5, change=1.0, tol=1e-3, since_reset=2):
    return PassSummary(iteration, full_pass, remaining, change, tol, since_reset)


def leaves_after(policy, labels):
    """In which iteration a row with these most probable components goes inactive; None where it does not."""
    state = fresh(policy, 1)
    for iteration, label in enumerate(labels, start=1):
        state, stays = policy.update(state, evidence([label], iteration=iteration))
        if not stays[0]:
            return iteration
    return None


class TestEMTau:
    @pytest.mark.parametrize(
        ("tau", "labels", "expected"),
        [
            (1, [0], 1),  # m_1 = 1
            (1, [2], 1),
            (2, [0, 0], 2),  # the first label 0 is no repetition of the empty state's 0
            (2, [0, 1, 1], 3),
            (2, [0, 1, 0, 1, 0], None),
            (3, [0, 0, 0], 3),
            (3, [0, 0, 1, 1, 1], 5),  # m: 1 2 1 2 3
            (3, [2, 1, 1, 2, 2, 2], 6),  # m: 1 1 2 1 2 3
            (3, [1, 1, 0, 1, 1, 0, 1, 1, 1], 9),
            (4, [1, 1, 1], None),
        ],
    )
    def test_a_row_leaves_once_it_kept_its_component_for_tau_iterations(self, tau, labels, expected):
        assert leaves_after(EMTau(tau=tau), labels) == expected

    def test_rows_count_apart(self):
        policy, state = EMTau(tau=2), fresh(EMTau(tau=2), 3)
        state, _ = policy.update(state, evidence([0, 1, 2]))
        _, stays = policy.update(state, evidence([0, 0, 2], iteration=2))
        assert stays.tolist() == [False, True, False]

    def test_long_counts_do_not_wrap(self):
        policy = EMTau(tau=300)
        state = fresh(policy, 1, max_iter=500)
        for iteration in range(1, 300):
            state, stays = policy.update(state, evidence([1], iteration=iteration))
            assert stays[0]
        assert not policy.update(state, evidence([1], iteration=300))[1][0]

    def test_many_components_fit_in_the_labels(self):
        policy = EMTau(tau=2)
        state, _ = policy.update(fresh(policy, 1, n_components=300), evidence([299]))
        _, stays = policy.update(state, evidence([299 - 256], iteration=2))
        assert stays[0]

    @pytest.mark.parametrize(
        ("n_components", "tau", "max_iter", "dtypes"),
        [
            (256, 255, 1000, ("uint8", "uint8")),
            (257, 256, 1000, ("uint16", "uint16")),
            (1, 10**9, 100, ("uint8", "uint8")),
            (70_000, 10**9, 70_000, ("uint32", "uint32")),
        ],
    )
    def test_row_arrays_are_the_smallest_that_fit(self, n_components, tau, max_iter, dtypes):
        arrays = EMTau(tau=tau).row_arrays(n_components, max_iter)
        assert tuple(array.dtype.name for array in arrays) == dtypes

    @pytest.mark.parametrize("full_pass", [True, False])
    def test_without_revisits_the_rest_goes_on_until_none_is_left_and_tol_is_always_tested(self, full_pass):
        for remaining, expected in ((0, NextPass.STOP), (1, NextPass.ACTIVE)):
            schedule = EMTau(revisit=None).schedule(summary(full_pass=full_pass, remaining=remaining))
            assert (schedule.next_pass, schedule.test_tol) == (expected, True)

    @pytest.mark.parametrize("full_pass", [True, False])
    def test_with_revisits_tol_is_tested_on_full_passes_only(self, full_pass):
        assert EMTau().schedule(summary(full_pass=full_pass)).test_tol is full_pass

    @pytest.mark.parametrize(
        ("situation", "expected"),
        [
            ({"remaining": 0}, NextPass.ALL),
            ({"remaining": 1}, NextPass.ACTIVE),
            ({"change": 0.9e-3}, NextPass.ALL),
            ({"change": -0.9e-3}, NextPass.ALL),
            ({"change": 1.1e-3}, NextPass.ACTIVE),
            ({"change": 0.0, "tol": 0.0}, NextPass.ACTIVE),
            ({"change": None}, NextPass.ACTIVE),
            ({"change": 0.9e-3, "full_pass": True}, NextPass.ACTIVE),
            ({"since_reset": 10**6}, NextPass.ACTIVE),
        ],
    )
    def test_on_empty_revisits_when_empty_or_stalled(self, situation, expected):
        assert EMTau().schedule(summary(**situation)).next_pass is expected

    @pytest.mark.parametrize("revisit", [4, np.int64(4)])
    @pytest.mark.parametrize(
        ("since_reset", "expected"), [(3, NextPass.ACTIVE), (4, NextPass.ALL), (5, NextPass.ALL)]
    )
    def test_a_number_revisits_after_so_many_iterations(self, revisit, since_reset, expected):
        assert EMTau(revisit=revisit).schedule(summary(since_reset=since_reset)).next_pass is expected

    @pytest.mark.parametrize("situation", [{"remaining": 0}, {"change": 0.0}])
    def test_a_number_revisits_when_empty_or_stalled_too(self, situation):
        assert EMTau(revisit=100).schedule(summary(**situation)).next_pass is NextPass.ALL


class TestEMStar:
    @pytest.mark.parametrize("n", exhaustive_but({1, 2, 3, 4, 7, 8, 17, 1001}, [*range(1, 18), 100, 1001]))
    @pytest.mark.parametrize("distinct", [True, False])
    def test_the_leaves_are_those_of_heapqs_heap(self, n, distinct):
        rng = np.random.default_rng(n)
        own = rng.random(n) if distinct else rng.choice([0.5, 0.75, 1.0], size=n)
        heap = [(-value, row) for row, value in enumerate(own)]
        heapq.heapify(heap)
        expected = sorted(row for _, row in heap[n // 2 :])
        _, stays = EMStar().update({}, evidence(np.zeros(n), own))
        assert np.flatnonzero(stays).tolist() == expected

    def test_every_component_has_a_heap_of_its_own(self):
        labels = [0, 1, 0, 1, 0, 1]
        own = [0.9, 0.5, 0.8, 0.6, 0.7, 0.4]
        # component 0: heap [.9 .8 .7] of rows 0 2 4, leaves at positions 1, 2: rows 2, 4
        # component 1: heap [.6 .5 .4] of rows 3 1 5, leaves: rows 1, 5
        _, stays = EMStar().update({}, evidence(labels, own))
        assert np.flatnonzero(stays).tolist() == [1, 2, 4, 5]

    @pytest.mark.parametrize("labels", [[0, 1, 2], []])
    def test_a_component_with_one_row_keeps_it_and_no_active_row_is_no_error(self, labels):
        assert EMStar().update({}, evidence(labels))[1].tolist() == [True] * len(labels)

    @pytest.mark.parametrize("tail", [0.01, 0.25, 0.5, 0.75, 1, 1.0])
    @pytest.mark.parametrize("n", [1, 2, 7, 64])
    def test_a_tail_keeps_the_ceil_of_the_share(self, tail, n):
        own = np.random.default_rng(n).random(n)
        _, stays = EMStar(tail=tail).update({}, evidence(np.zeros(n), own))
        kept = math.ceil(tail * n)
        assert sorted(own[stays]) == sorted(own)[:kept]

    def test_ties_in_a_tail_go_to_the_lower_row(self):
        _, stays = EMStar(tail=0.5).update({}, evidence([0] * 4, [0.7] * 4))
        assert stays.tolist() == [True, True, False, False]

    @pytest.mark.parametrize(
        ("iteration", "shrinks"), [(1, False), (2, False), (3, True), (4, False), (6, True)]
    )
    def test_every_shrinks_after_its_multiples_only(self, iteration, shrinks):
        _, stays = EMStar(every=3).update({}, evidence([0] * 8, np.arange(8) / 10, iteration))
        assert (not stays.all()) is shrinks

    @pytest.mark.parametrize("remaining", [0, 5])
    def test_it_goes_on_with_what_is_left_and_tests_tol(self, remaining):
        schedule = EMStar().schedule(summary(remaining=remaining))
        assert (schedule.next_pass, schedule.test_tol) == (NextPass.ACTIVE, True)


class TestEMLazy:
    def test_iterations_1_and_every_full_every_after_it_are_full(self):
        policy = EMLazy(full_every=4)
        before = [i for i in range(1, 13) if policy.schedule(summary(i)).next_pass is NextPass.ALL]
        assert [1, *(i + 1 for i in before)] == [1, 5, 9, 13]

    def test_tol_is_tested_after_full_iterations_only(self):
        policy = EMLazy(full_every=4)
        assert [i for i in range(1, 13) if policy.schedule(summary(i)).test_tol] == [1, 5, 9]

    def test_full_every_1_is_always_full(self):
        schedule = EMLazy(full_every=1).schedule(summary(7))
        assert (schedule.next_pass, schedule.test_tol) == (NextPass.ALL, True)

    def test_rows_up_to_the_threshold_are_active(self):
        _, stays = EMLazy(threshold=0.9).update({}, evidence([0, 0, 0], [0.89, 0.9, 0.91], iteration=2))
        assert stays.tolist() == [True, True, False]

    def test_no_row_rests_before_a_full_iteration(self):
        _, stays = EMLazy(full_every=5).update({}, evidence([0, 0], [1.0, 0.5], iteration=5))
        assert stays.all()

    def test_an_empty_active_set_does_not_stop(self):
        assert EMLazy().schedule(summary(2, remaining=0)).next_pass is NextPass.ACTIVE


class TestFullEM:
    def test_every_row_stays_without_row_state(self):
        assert FullEM().update({}, evidence([0, 1]))[1].all()
        assert FullEM().row_arrays(3, 100) is None

    def test_every_iteration_is_full_and_tests_tol(self):
        schedule = FullEM().schedule(summary())
        assert (schedule.next_pass, schedule.test_tol) == (NextPass.ALL, True)
