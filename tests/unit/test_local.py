"""Tasks in threads of this process: which thread runs what, and what is left of a graph that fails."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import dask
import pytest

from emtau_dask.execution.threads import ThreadExecutor, compute_here, compute_in_threads, lasting_threads
from emtau_dask.interrupts import Stop


def gathered(*found):
    return [*found, threading.current_thread()]


def graph(task, n):
    """Return ``n`` tasks, each told its number, and one that has what they gave and its own thread."""
    parts = {("part", i): (task, i) for i in range(n)}
    return {**parts, "whole": (gathered, *parts)}


def where(_):
    time.sleep(0.005)
    return threading.current_thread()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_threads_as_dask_is_told_run_tasks_and_the_caller_the_last(threads):
    with dask.config.set(num_workers=threads):
        *others, last = compute_in_threads(graph(where, 12), "whole", 2, Stop())
    assert last is threading.current_thread()
    assert last not in others
    assert len(set(others)) == threads


def test_the_only_task_runs_in_the_thread_that_waits():
    assert compute_in_threads({"only": (where, 0)}, "only", 2, Stop()) is threading.current_thread()


def test_threads_are_gone_when_the_graph_is_done():
    *threads, _ = compute_in_threads(graph(where, 12), "whole", 2, Stop())
    assert threads
    assert not any(thread.is_alive() for thread in threads)


def test_a_pool_that_dask_is_given_is_used():
    with ThreadPoolExecutor(2, thread_name_prefix="given") as pool, dask.config.set(pool=pool):
        *others, last = compute_in_threads(graph(where, 6), "whole", 2, Stop())
    assert all(thread.name.startswith("given") for thread in others)
    assert last is threading.current_thread()


def test_pools_of_other_kinds_are_left_to_dask():
    with ThreadPool(2) as pool, dask.config.set(pool=pool):
        assert threading.current_thread() not in compute_in_threads(graph(where, 6), "whole", 2, Stop())


def test_a_thread_has_its_next_task_before_the_caller_hears_of_the_last():
    """The caller is kept from its queue for as long as the only thread runs two tasks."""
    ran, two_ran = [], threading.Event()

    def task(i):
        ran.append(i)
        if len(ran) == 2:
            two_ran.set()

    class Slow(dask.callbacks.Callback):
        def _posttask(self, *_):
            assert two_ran.wait(10)

    with dask.config.set(num_workers=1), Slow():
        compute_in_threads(graph(task, 4), "whole", 2, Stop())
    assert sorted(ran) == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [2, 3])
def test_after_an_error_tasks_that_lie_ready_do_not_begin(threads):
    """One of the threads may have taken another when the caller hears of it, and no more of them."""
    began, may_end, counter = [], threading.Event(), itertools.count()

    def task(i):
        began.append(i)
        if next(counter) == 0:
            raise LookupError(i)
        may_end.wait(3)

    with dask.config.set(num_workers=threads), pytest.raises(LookupError):
        compute_in_threads(graph(task, 20), "whole", 2, Stop())
    may_end.set()
    with dask.config.set(num_workers=threads):
        compute_in_threads(graph(where, 2 * threads), "whole", 2, Stop())
    assert len(began) <= 1 + threads


def test_errors_of_the_last_task_are_raised():
    def failing(*_):
        raise LookupError("at last")

    with pytest.raises(LookupError, match="at last"):
        compute_in_threads({"part": (where, 0), "whole": (failing, "part")}, "whole", 2, Stop())


def test_tasks_may_compute_themselves():
    def nested(_):
        return compute_in_threads(graph(where, 3), "whole", 2, Stop())[-1] is threading.current_thread()

    with dask.config.set(num_workers=2):
        *found, _ = compute_in_threads(graph(nested, 5), "whole", 2, Stop())
    assert found == [True] * 5


def test_threads_that_last_run_one_graph_after_another_and_are_gone_at_the_end():
    with lasting_threads(ThreadExecutor(2, compute_in_threads)) as executor:
        found = [executor.compute(graph(where, 12), "whole", 2, Stop()) for _ in range(3)]
        assert {last for *_, last in found} == {threading.current_thread()}
        threads = {thread for *others, _ in found for thread in others}
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
        with lasting_threads(ThreadExecutor(1, compute_in_threads)) as executor:
            found.append(executor.compute(graph(where, 1), "whole", 2, Stop())[0])
            found.append(threading.Thread(target=executor.compute, args=(graph(task, 1), "whole", 2, Stop())))
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


def test_threads_that_are_not_the_executors_own_are_used_as_they_are():
    serial = ThreadExecutor(1, compute_here)
    with lasting_threads(serial) as executor:
        assert executor is serial
    with ThreadPoolExecutor(2) as pool, dask.config.set(pool=pool):
        of_pool = ThreadExecutor(2, compute_in_threads)
        with lasting_threads(of_pool) as executor:
            assert executor is of_pool
