"""Which chunks share a task changes nothing but the number of tasks."""

from functools import partial, reduce
from operator import add

import cloudpickle
import dask
import numpy as np
import pytest
from counting import expected_batches
from dask.callbacks import Callback
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import expected_tree, joined, run_pass

from emtau_dask.data.chunk import ChunkLoader
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import ChunkRange
from emtau_dask.em.task import EStepItem, EStepTask
from emtau_dask.execution.executor import NO_SOURCE
from emtau_dask.execution.graph import FAN_IN, batches_of
from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import plan_kernel
from emtau_dask.storage.row_state import RowFields, RowStateRef, StateObject

NUMBERS = (st.integers(0, 2**24) | st.integers(0, 2**10) | st.integers(2**30, 2**36)).map(float)
"""With one of the last a thousandth of all is more than other bounds, and may be many of the others."""
COSTS = st.dictionaries(st.integers(0, 5000), NUMBERS, min_size=1, max_size=200)


@settings(deadline=None)
@given(COSTS, st.randoms())
def test_batches_are_the_uppermost_nodes_of_the_tree_that_are_small_enough(costs, random):
    """Whatever the order in which chunks are told."""
    shuffled = list(costs.items())
    random.shuffle(shuffled)
    batches = batches_of(dict(shuffled))
    assert batches == batches_of(costs)
    assert [batch.chunks for batch in batches] == expected_batches(costs)
    for batch in batches:
        assert {chunk // FAN_IN**batch.level for chunk in batch.chunks} == {batch.number}


class Ran(Callback):
    def __init__(self):
        super().__init__(pretask=lambda key, *_: self.keys.append(key))
        self.keys = []


def run(costs, task=lambda chunk, *blocks: np.float32(1) / np.float32(chunk + 3), merge=None):
    items = {chunk: chunk for chunk in costs}
    with dask.config.set(scheduler="synchronous"), Ran() as ran:
        value = run_pass(
            task,
            merge or partial(reduce, add),
            [NO_SOURCE],
            items,
            costs=costs,
        )
    return value, ran.keys


@settings(max_examples=30, deadline=None)
@given(COSTS)
def test_batching_changes_no_bit(costs):
    alone = dict.fromkeys(costs, 2.0**30)
    assert run(costs)[0].tobytes() == run(alone)[0].tobytes()
    for each in (costs, alone):
        assert run(each, lambda chunk, *blocks: str(chunk), joined)[0] == expected_tree(sorted(costs))


def test_a_thousand_small_chunks_take_a_few_tasks():
    _, keys = run(dict.fromkeys(range(1000), 100.0))
    assert len(keys) <= 200


def test_large_chunks_have_tasks_of_their_own():
    _, keys = run(dict.fromkeys(range(100), 2.0**21))
    assert sum(isinstance(key, tuple) and key[0].startswith("emtau-test") for key in keys) == 100


def graph_bytes(n_chunks, n_components=16, n_features=12):
    """The pickled size of an E-step's graph: all of it, of what its tasks share, of its largest task."""
    rows = as_source(np.zeros((1, n_features)), ndim=2, what="X")
    structure = structure_named("full")
    matrices = np.tile(np.eye(n_features), (n_components, 1, 1))
    means = np.zeros((n_components, n_features))
    parameters = MixtureParameters("full", np.full(n_components, 1 / n_components), means, matrices, matrices)
    assert parameters.structure is structure
    fields = RowFields(("active", "label", "count"), ("bool", "uint8", "uint8"), 1000)
    items = {
        chunk: EStepItem(
            ChunkRange(chunk, chunk * 1000, (chunk + 1) * 1000),
            RowStateRef(
                StateObject(f"attempts/0-{0:032x}/rows/c/17/{chunk}/0/0", f"{chunk:064x}", fields), 0
            ),
        )
        for chunk in range(n_chunks)
    }
    sizes = {}

    def measure(graph, keys, **options):
        graph = graph.__dask_graph__() if hasattr(graph, "__dask_graph__") else graph
        graph = dict(sorted(graph.items(), key=lambda pair: str(pair[0])))  # later references take more bytes
        sizes["tasks"] = {key: len(cloudpickle.dumps(task)) for key, task in graph.items()}
        sizes["whole"] = len(cloudpickle.dumps(graph))
        raise InterruptedError

    with dask.config.set(scheduler=measure), pytest.raises(InterruptedError):
        run_pass(
            EStepTask(
                ChunkLoader(rows.reader(), None), Kernels(plan_kernel(parameters), compiled=False), 3, None
            ),
            max,
            [NO_SOURCE],
            items,
            name="estep",
            costs=dict.fromkeys(items, 2.0**22),
        )
    shared = max(sizes["tasks"].values())
    steps = [size for key, size in sizes["tasks"].items() if isinstance(key, tuple) and "estep" in key[0]]
    assert len(steps) == n_chunks
    return sizes["whole"], shared, max(steps)


def test_tasks_carry_only_what_is_their_own_however_many_there_are():
    few, many = graph_bytes(250), graph_bytes(4000)
    for whole, shared, task in (few, many):
        print(f"graph {whole:,} bytes, of which shared {shared:,}; largest E-step task {task:,}")
    assert many[1] == few[1] > 8 * 16 * 12 * 12  # the covariances
    assert many[2] <= few[2] + 64  # longer numbers
    assert (many[0] - many[1]) / 4000 <= (few[0] - few[1]) / 250 + 16
