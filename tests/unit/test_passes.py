"""One pass over chunks: which tasks run and what they carry, in which order results merge, who is told."""

import pickle
import threading
from functools import partial, reduce
from operator import add

import dask
import dask.array as da
import numpy as np
import pytest
from counting import Tasks, chunks_of, expected_batches, layer, one_chunk_a_task, processed
from passes import Recorder, expected_tree, joined, run_pass
from processes import pool_of_two
from tiers import exhaustive_but

from emtau_dask.data.dask_arrays import GraphSource
from emtau_dask.execution.executor import NO_SOURCE
from emtau_dask.execution.graph import batches_of, merge_tree


def name_of(item, *blocks):
    return item


def merged(chunks, task=name_of, sources=(), observer=None, items=str, costs=None):
    """Run a pass whose items are the names of the chunks: its result spells the tree of merges."""
    items = {chunk: items(chunk) for chunk in chunks}
    return run_pass(task, joined, sources, items, stage="a stage", observer=observer, costs=costs)


@pytest.fixture(params=["in batches", "one by one"])
def batching(request):
    """Everything that merges must come out the same whichever chunks travel together."""
    if request.param == "in batches":
        yield
    else:
        with one_chunk_a_task():
            yield


@pytest.mark.parametrize(
    ("chunks", "tree"),
    [
        ([0], "0"),
        ([41], "41"),
        ([0, 1], "(0 1)"),
        ([0, 1, 2], "(0 1 2)"),
        ([0, 1, 9], "((0 1) 9)"),
        ([0, 9, 10], "(0 (9 10))"),
        ([7, 8], "(7 8)"),
        ([0, 9, 10, 64, 65], "((0 (9 10)) (64 65))"),
        ([6, 7, 8, 9], "((6 7) (8 9))"),
    ],
)
@pytest.mark.usefixtures("batching")
def test_small_trees_by_hand(chunks, tree):
    assert merged(chunks) == tree


@pytest.mark.usefixtures("batching")
@pytest.mark.parametrize("n", [63, 64, 65, 150])
def test_the_tree_is_fixed_by_chunk_number(n):
    assert merged(list(range(n))) == expected_tree(list(range(n)))


@pytest.fixture(scope="module")
def pool():
    with pool_of_two() as pool:
        yield pool


@pytest.fixture(params=["synchronous", "threads", "processes"])
def scheduler(request):
    """Each of this machine's, in a pool of the user's where there are processes."""
    pool = request.getfixturevalue("pool") if request.param == "processes" else None
    with dask.config.set(scheduler=request.param, num_workers=2, pool=pool):
        yield


@pytest.mark.usefixtures("batching")
def test_a_task_gets_an_empty_list_for_each_source_without_references():
    def task(item, first, second):
        assert first == second == []
        return item

    assert merged([3, 4, 90], task, [NO_SOURCE, NO_SOURCE]) == "((3 4) 90)"


@pytest.mark.usefixtures("batching")
def test_items_and_results_are_handed_on_as_they_are():
    """Items that dask would read as a key, a task or a list of them in a graph are none of these."""
    odd = {2: "emtau-pass", 3: ("emtau-test", 3), 4: (str, 5), 5: [2, 3], 70: {"emtau-test": 1}}
    found = run_pass(lambda item: [item], partial(reduce, add), [], odd)
    assert found == list(odd.values())


def test_the_configured_scheduler_is_used():
    with dask.config.set(scheduler="synchronous"):
        found = merged([0, 1], lambda chunk: threading.current_thread().name)
    name = threading.current_thread().name
    assert found == f"({name} {name})"


@pytest.mark.parametrize(
    "scheduler", exhaustive_but({"synchronous"}, ["synchronous", "processes"]), indirect=True
)
@pytest.mark.usefixtures("scheduler")
def test_the_payload_is_one_key_of_the_graph_which_local_schedulers_do_not_run():
    with Tasks() as tasks:
        merged(list(range(70)))
    (graph,), (ran,) = tasks.graphs, tasks.ran
    assert {layer(key) for key in graph} == {"emtau-test", "emtau-merge", "emtau-pass"}
    (payload,) = (key for key in graph if layer(key) == "emtau-pass")
    assert set(ran) == set(graph) - {payload}


@pytest.mark.usefixtures("batching")
def test_no_task_carries_a_copy_of_the_payload():
    """The function of a pass holds the parameters; a million bytes of them are in the graph once."""
    ballast = bytes(10**6)
    with dask.config.set(scheduler="synchronous"), Tasks() as tasks:
        assert merged(list(range(40)), partial(_heavy, ballast)) == expected_tree(list(range(40)))
    (graph,) = tasks.graphs
    sizes = {key: len(pickle.dumps(node)) for key, node in graph.items()}
    heavy = [key for key, size in sizes.items() if size >= len(ballast)]
    assert [layer(key) for key in heavy] == ["emtau-pass"]
    assert sum(sizes.values()) < len(ballast) + 100_000


def _heavy(ballast, item):
    return item


@pytest.mark.parametrize(
    ("costs", "batches"),
    [
        ({5: 0}, [(5,)]),
        ({5: 1e9}, [(5,)]),
        (dict.fromkeys(range(3), 0), [(0, 1, 2)]),
        (dict.fromkeys((6, 7, 8, 9), 0), [(6, 7, 8, 9)]),  # the node of 64 chunks holds them all
        (dict.fromkeys((6, 7, 8, 9), 120_000), [(6, 7), (8, 9)]),  # 545,536 together: the nodes of 8
        (dict.fromkeys((6, 7, 8, 9), 520_000), [(6,), (7,), (8,), (9,)]),
        ({0: 0, 1: 0, 8: 800_000, 9: 0}, [(0, 1), (8,), (9,)]),
        ({0: 0, 64: 800_000}, [(0,), (64,)]),
    ],
    ids=str,
)
def test_batches_by_hand(costs, batches):
    assert [batch.chunks for batch in batches_of(costs)] == batches
    assert expected_batches(costs) == batches


def test_batches_are_named_after_their_node():
    costs = {0: 0.0, 1: 0.0, 8: 800_000.0, 9: 0.0, 70: 200_000.0, 71: 200_000.0, 80: 200_000.0}
    found = {(batch.level, batch.number): batch.chunks for batch in batches_of(costs)}
    assert found == {(1, 0): (0, 1), (0, 8): (8,), (0, 9): (9,), (1, 8): (70, 71), (0, 80): (80,)}


def test_many_chunks_that_cost_little_still_are_work_for_many_workers():
    """Half a million numbers in all: tasks of 25 chunks at most, and not one task."""
    sizes = [len(batch.chunks) for batch in batches_of(dict.fromkeys(range(128), 4096.0))]
    assert sizes == [8] * 16


@pytest.mark.parametrize(
    ("chunks", "numbers", "sizes", "merges"),
    [
        (7_999, 2**24, [1] * 7_992 + [7], 999 + 125 + 16 + 2 + 1),
        (10_000, 2**24, [8] * 1_250, 157 + 20 + 3 + 1),
        (100_000, 2**20, [64] * 1_562 + [32], 196 + 25 + 3 + 1),
    ],
)
def test_a_thousandth_of_a_pass_is_not_divided_further(chunks, numbers, sizes, merges):
    """A thousandth is the cost of 7.999 chunks, of 10, and of 100. Merges are counted by level."""
    batches = batches_of(dict.fromkeys(range(chunks), float(numbers)))
    assert [len(batch.chunks) for batch in batches] == sizes
    assert len(merge_tree(batches).children) == merges


def test_a_task_has_512_chunks_at_most():
    """However little they cost beside another one."""
    batches = batches_of({**dict.fromkeys(range(1_500), 0.0), 5_000: 2.0**40})
    assert [len(batch.chunks) for batch in batches] == [512, 512, 476, 1]


@pytest.mark.parametrize("costs", [{3: 1.0, 4: 5.0, 77: 2.0}, dict.fromkeys(range(100), 4096.0)], ids=len)
def test_a_task_has_the_items_of_its_batch_and_no_others(costs):
    with dask.config.set(scheduler="synchronous"), Tasks() as tasks:
        merged(list(costs), costs=costs, items=lambda chunk: ("item", chunk))
    (found,) = ([processed(node) for node in nodes] for nodes in tasks.ran_of("emtau-test"))
    assert sorted(tuple(item[1] for item in items) for items in found) == expected_batches(costs)


@pytest.mark.parametrize("others", [[], [NO_SOURCE]])
def test_one_graph_among_the_sources_and_every_chunk_has_its_own_task(others):
    array = da.from_array(np.zeros((20, 1)), chunks=(1, 1))
    with dask.config.set(scheduler="synchronous"), Tasks() as tasks:
        merged(list(range(20)), sources=[*others, GraphSource(array + 0)])
    assert [chunks_of(keys, "emtau-test") for keys in tasks.ran] == [list(range(20))]


@pytest.mark.parametrize("chunks", [[5], list(range(20)), list(range(100))], ids=len)
def test_the_observer_hears_of_every_task_once(chunks):
    batched, alone = Recorder(), Recorder()
    merged(chunks, observer=batched)
    with one_chunk_a_task():
        merged(chunks, observer=alone)
    assert sorted(batched.done) == sorted(map(len, expected_batches(dict.fromkeys(chunks, 0))))
    assert alone.done == [1] * len(chunks)
