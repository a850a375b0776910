"""Passes in threads of this process: which thread runs what, and what is left of a pass that fails."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool

import dask
import pytest

from emtau_dask.em.history import SilentObserver
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import MapReduce
from emtau_dask.execution.graph import MAX_BATCH_COST
from emtau_dask.execution.threads import ThreadExecutor, lasting_threads


def found_by(task, n, executor=None, observer=None):
    """Return what ``n`` tasks, each told its number and too large for a batch, gave; in order."""
    costs = dict.fromkeys(range(n), 2.0 * MAX_BATCH_COST)
    work = MapReduce(
        lambda i: [task(i)], partial(sum, start=[]), [], {i: i for i in costs}, "test", "", costs
    )
    return (executor or choose_executor()).map_reduce(work, observer or SilentObserver())


def where(_):
    time.sleep(0.005)
    return threading.current_thread()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_threads_as_dask_is_told_run_tasks_and_are_gone_at_the_end(threads):
    with dask.config.set(num_workers=threads):
        found = set(found_by(where, 12))
    assert len(found) == threads
    assert threading.current_thread() not in found
    assert not any(thread.is_alive() for thread in found)


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ThreadPool])
def test_a_pool_that_dask_is_given_is_used_and_stays(pool):
    with pool(2) as given, dask.config.set(pool=given):
        first, second = set(found_by(where, 12)), set(found_by(where, 12))
        assert len(first | second) == 2
        assert all(thread.is_alive() for thread in first)
        assert threading.current_thread() not in first


def test_a_thread_has_its_next_task_before_the_caller_hears_of_the_last():
    """The caller is kept from its queue for as long as the only thread runs two tasks."""
    ran, two_ran = [], threading.Event()

    def task(i):
        ran.append(i)
        if len(ran) == 2:
            two_ran.set()

    class Slow(SilentObserver):
        def chunks_done(self, count):
            assert two_ran.wait(10)

    found_by(task, 4, ThreadExecutor(1), Slow())
    assert ran == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [2, 3])
def test_after_an_error_tasks_that_lie_ready_do_not_begin(threads):
    """One of the threads may have taken another when the caller hears of it, and no more of them."""
    began, may_end, counter = [], threading.Event(), itertools.count()

    def task(i):
        began.append(i)
        if next(counter) == 0:
            raise LookupError(i)
        may_end.wait(3)

    with pytest.raises(LookupError):
        found_by(task, 20, ThreadExecutor(threads))
    may_end.set()
    assert len(began) <= 1 + threads


def test_tasks_may_run_passes_themselves():
    def nested(_):
        return len(found_by(where, 3, ThreadExecutor(2)))

    assert found_by(nested, 5, ThreadExecutor(2)) == [3] * 5


def test_threads_that_last_run_one_pass_after_another_and_are_gone_at_the_end():
    with lasting_threads(ThreadExecutor(2)) as executor:
        threads = {thread for _ in range(3) for thread in found_by(where, 12, executor)}
        assert len(threads) == 2
        assert all(thread.is_alive() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_threads_that_last_end_with_an_error_which_does_not_wait_for_them(error):
    began, may_end = threading.Event(), threading.Event()

    def task(i):
        began.set()
        may_end.wait(30)
        return threading.current_thread()

    found = []

    def fails_beside_a_task():
        with lasting_threads(ThreadExecutor(1)) as executor:
            found.extend(found_by(where, 1, executor))
            found.append(threading.Thread(target=found_by, args=(task, 1, executor)))
            found[1].start()
            assert began.wait(10)
            raise error

    with pytest.raises(error):
        fails_beside_a_task()
    assert found[0].is_alive()
    may_end.set()
    for thread in found:
        thread.join(10)
        assert not thread.is_alive()


def test_a_pool_of_the_users_is_no_executors_to_end():
    with ThreadPoolExecutor(2) as pool, dask.config.set(pool=pool):
        executor = choose_executor()
        with lasting_threads(executor) as lasting:
            assert lasting is executor
