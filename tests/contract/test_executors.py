"""What every executor promises of a pass: bits, order of merges, errors, interrupts, reads and progress."""

import os
import signal
import threading
import time
from functools import partial, reduce
from operator import add

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from passes import Recorder, joined
from processes import pool_of_two

from emtau_dask.data.dask_arrays import GraphSource
from emtau_dask.em.history import SilentObserver
from emtau_dask.errors import InvalidDataError
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import NO_SOURCE, AheadBudget, MapReduce, ReadingTask

FAN_IN = 8
EXECUTORS = ["threads", "one thread", "processes", "cluster"]
OWN = "processes of the pass"
SLOW_TO_BEGIN = pytest.param(OWN, marks=pytest.mark.cluster)
and_processes_of_the_pass = pytest.mark.parametrize("executor", [*EXECUTORS, SLOW_TO_BEGIN], indirect=True)
"""For what depends on how processes begin and end; the others share a pool, as starting one takes seconds."""


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool():
    with pool_of_two() as pool:
        yield pool


@pytest.fixture(params=EXECUTORS)
def executor(request):
    """The executor that a fit would choose for each of dask's ways to compute."""
    if request.param == "cluster":
        with Client(request.getfixturevalue("cluster")):
            yield choose_executor()
        return
    scheduler = {"threads": "threads", "one thread": "synchronous"}.get(request.param, "processes")
    pool = request.getfixturevalue("pool") if request.param == "processes" else None
    with dask.config.set(scheduler=scheduler, num_workers=2, pool=pool):
        yield choose_executor()


def run(executor, task, items, merge=None, *, sources=(), observer=None, **options):
    work = MapReduce(task, merge or partial(reduce, add), sources, items, "test", "a stage", **options)
    return executor.map_reduce(work, observer or SilentObserver())


def third_of(item, *blocks):
    return np.float32(1) / np.float32(3 + item)


def name_of(item, *blocks):
    return str(item)


def sums_by_hand(values):
    """The same sums, group by group of the tree: chunk // 8, then // 64, and so on."""
    while len(values) > 1:
        groups = {}
        for number in sorted(values):
            groups.setdefault(number // FAN_IN, []).append(values[number])
        values = {number: reduce(add, members) for number, members in groups.items()}
    return next(iter(values.values()))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 70])
def test_the_bits_are_those_of_the_tree_of_chunk_numbers(executor, n):
    items = {chunk: chunk for chunk in range(n)}
    expected = sums_by_hand({chunk: third_of(chunk) for chunk in items})
    assert run(executor, third_of, items).tobytes() == expected.tobytes()


def test_results_merge_in_the_order_of_their_chunks_whatever_they_cost(executor):
    items = {chunk: chunk for chunk in (9, 0, 1, 64, 10)}
    for costs in (None, dict.fromkeys(items, 2.0**30)):
        assert run(executor, name_of, items, joined, costs=costs) == "(((0 1) (9 10)) 64)"


def test_a_task_gets_its_item_and_the_blocks_of_its_chunk(executor):
    array = da.from_array(np.arange(12.0).reshape(6, 2), chunks=((1, 0, 2, 3), (1, 1)))
    found = run(
        executor, blocks_of, {0: 0, 2: 2}, partial(reduce, add), sources=[NO_SOURCE, GraphSource(array + 1)]
    )
    assert found == ["0: [] [1.0, 2.0]", "2: [] [3.0, 4.0, 5.0, 6.0]"]


def blocks_of(item, nothing, blocks):
    return [f"{item}: {nothing} {np.concatenate(blocks, axis=1).ravel().tolist()}"]


def fail_at_three(item):
    if item == 3:
        raise InvalidDataError(f"chunk {item} cannot be used")
    return item


@and_processes_of_the_pass
def test_an_error_of_a_task_comes_out_as_it_is_and_the_next_pass_runs(executor):
    items = {chunk: chunk for chunk in range(6)}
    for costs in (None, dict.fromkeys(items, 2.0**30)):
        with pytest.raises(InvalidDataError, match=r"^chunk 3 cannot be used$"):
            run(executor, fail_at_three, items, costs=costs)
    assert run(executor, third_of, {0: 0}) == third_of(0)


def fail_to_merge(parts):
    raise InvalidDataError(f"{len(list(parts))} parts cannot be merged")


def test_an_error_of_a_merge_comes_out_as_it_is(executor):
    with pytest.raises(InvalidDataError, match="2 parts cannot be merged"):
        run(executor, third_of, {0: 0, 1: 1}, fail_to_merge)


def note_and_wait(folder, item):
    (folder / str(item)).touch()
    time.sleep(0.05)
    return 1


def interrupt_once_there_is_any(folder):
    while not any(folder.iterdir()):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("executor", ["threads", "one thread", SLOW_TO_BEGIN, "cluster"], indirect=True)
def test_after_an_interrupt_tasks_that_did_not_begin_never_do(executor, tmp_path):
    """Some may have been at hand where the interrupt was not known; a pool of the user's has all of them."""
    items = {chunk: chunk for chunk in range(200)}
    interrupting = threading.Thread(target=interrupt_once_there_is_any, args=[tmp_path])
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        run(executor, partial(note_and_wait, tmp_path), items, costs=dict.fromkeys(items, 2.0**30))
    interrupting.join()
    time.sleep(0.5)
    began = len(list(tmp_path.iterdir()))
    assert began < 150
    time.sleep(0.3)
    assert len(list(tmp_path.iterdir())) == began
    assert run(executor, third_of, {0: 0}) == third_of(0)


class Reading(ReadingTask):
    """Notes who reads and who computes a chunk, and when, in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def read(self, item, *blocks):
        (self.folder / f"read-{item}-{os.getpid()}-{threading.get_ident()}").touch()
        return item

    def compute(self, item, found):
        (self.folder / f"compute-{item}-{os.getpid()}-{threading.get_ident()}").touch()
        time.sleep(0.01)
        return [found]


def test_what_a_task_reads_is_read_once_and_only_ahead_by_threads_of_this_process(executor, tmp_path):
    items = {chunk: chunk for chunk in range(12)}
    ahead = AheadBudget(100, dict.fromkeys(items, 1))
    found = run(executor, Reading(tmp_path), items, ahead=ahead, costs=dict.fromkeys(items, 2.0**30))
    assert found == list(items)
    names = sorted(path.name.split("-") for path in tmp_path.iterdir())
    assert sorted((what, int(item)) for what, item, *_ in names) == [
        *(("compute", item) for item in items),
        *(("read", item) for item in items),
    ]
    by_item = {(what, int(item)): who for what, item, *who in names}
    elsewhere = [item for item in items if by_item["read", item] != by_item["compute", item]]
    assert bool(elsewhere) == (executor.in_process and executor.threads > 1)


def pid_of(item):
    return {os.getpid()}


def union(parts):
    return set().union(*parts)


@and_processes_of_the_pass
def test_it_says_where_tasks_run(executor):
    pids = run(executor, pid_of, {0: 0, 1: 1}, union)
    assert (pids == {os.getpid()}) == executor.in_process
    assert executor.threads >= 1
    assert executor.client is None or not executor.in_process


def test_the_observer_hears_of_the_stage_and_of_every_chunk(executor):
    for n in (0, 1, 30):
        observer = Recorder()
        found = run(executor, third_of, {chunk: chunk for chunk in range(n)}, observer=observer)
        assert observer.stages == [("a stage", n)]
        if executor.client is None:  # a cluster's tasks are told of when they are all done, or not at all
            assert sum(observer.done) == n
        assert (found is None) is (n == 0)


def thread_of(item):
    return {(os.getpid(), threading.get_ident())}


def test_what_holds_the_interpreters_lock_runs_in_the_thread_that_waits(executor):
    """Where it is in this process."""
    found = run(executor, thread_of, dict.fromkeys(range(100)), union, interpreted=True)
    here = (os.getpid(), threading.get_ident())
    assert (found == {here}) if executor.in_process else (here not in found)
