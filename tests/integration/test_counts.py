"""Work skipped is proved by counting it: tasks in the graph, tasks run, chunks really read.

Here each chunk has its own task, as large ones do; test_batches.py has small ones, which travel together.
What a cache of active rows saves beyond that is counted in test_active_cache.py.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from counting import START, K, Reads, Tasks, chunks_of, counted_fit, layer, one_chunk_a_task
from fits import quietly
from oracles import naive, policies
from zarr.storage import LocalStore

from emtau_dask import EMLazy, EMTau, FullEM, GaussianMixture
from emtau_dask.data.opening import as_source
from emtau_dask.em.state_store import MARKER
from emtau_dask.mixture.estep import BlockKernel
from emtau_dask.policies.policy import NextPass, RowArray, Schedule
from emtau_dask.storage.stores import LocalObjects

CHUNKS = (40, 40, 0, 80, 40)
"""Chunks 0 and 4 hold a cluster far from all others, 1 and 3 one each of two that overlap, 2 nothing."""

EVERYWHERE = [0, 1, 3, 4]
ACTIVE = [EVERYWHERE] * 4 + [[1, 3]] * 3 + [[3]] * 2
"""The chunks with active rows in every iteration; the first test has them from a naive run."""


def draw_rows():
    rng = np.random.default_rng(23)
    sizes = [size for size in CHUNKS if size]
    parts = [rng.normal(centre, 1, (size, 2)) for centre, size in zip([-50, 0, 0.8, 50], sizes, strict=True)]
    return np.concatenate(parts)


ROWS = draw_rows()


def inputs(keys):
    """The keys that are not the engine's."""
    return {key for key in keys if not layer(key).startswith("emtau-")}


def shared(graph):
    """The keys of what all tasks of a pass share."""
    return {key for key in graph if layer(key) == "emtau-pass"}


@pytest.fixture
def apart():
    """Every chunk has its own task, however small it is."""
    with one_chunk_a_task():
        yield


TAU = EMTau(tau=4, revisit=None)
fit = partial(counted_fit, max_iter=12)


def test_the_naive_run_has_these_active_chunks():
    run = naive.fit(ROWS, START, policies.EMTau(tau=4, revisit=None), max_iter=12, reg_covar=1e-6)
    chunk_of = np.repeat(np.arange(len(CHUNKS)), CHUNKS)
    assert [sorted(set(chunk_of[mask].tolist())) for mask in run.active] == ACTIVE


def numpy_chunks(path):
    return as_source(ROWS, ndim=2, what="X").aligned(CHUNKS)


def zarr_array(path):
    """Chunks of 40 rows: the data's chunk 3 is the zarr chunks 2 and 3, its chunk 4 the zarr chunk 4."""
    return zarr.create_array(store=path / "rows.zarr", data=ROWS, chunks=(40, 2))


def dask_array_of_numpys(path):
    return da.from_array(ROWS, chunks=(CHUNKS, 2))


def persisted(path):
    return graph_of().persist(scheduler="synchronous")


def from_zarr(path):
    zarr_array(path)
    return da.from_zarr(str(path / "rows.zarr"), chunks=((40, 40, 80, 40), 2))


def sharded_zarr(path):
    return zarr.create_array(store=path / "rows.zarr", data=ROWS, chunks=(10, 1), shards=(40, 2))


def renumbered(active, names):
    return [sorted(new for old in chunks for new in names[old]) for chunks in active]


BY_40_ROWS = {0: [0], 1: [1], 3: [2, 3], 4: [4]}
ADDRESSABLE = {
    "numpy": (numpy_chunks, ACTIVE),
    "dask array of numpy's": (dask_array_of_numpys, ACTIVE),
    "persisted": (persisted, ACTIVE),
    "from_zarr": (from_zarr, renumbered(ACTIVE, {0: [0], 1: [1], 3: [2], 4: [3]})),
}


@pytest.fixture(scope="module", params=ADDRESSABLE)
def addressable(request, tmp_path_factory):
    make, active = ADDRESSABLE[request.param]
    with one_chunk_a_task():
        return *fit(make(tmp_path_factory.mktemp("rows")), TAU), active


class TestAddressable:
    def test_one_task_for_each_active_chunk_and_none_for_a_skipped_one(self, addressable):
        _, tasks, active = addressable
        assert [chunks_of(keys) for keys in tasks.ran] == active

    def test_no_tasks_but_merges_beside_them(self, addressable):
        _, tasks, _ = addressable
        assert {layer(key) for keys in tasks.ran for key in keys} == {"emtau-estep", "emtau-merge"}

    def test_nothing_is_in_the_graph_that_does_not_run_but_what_the_tasks_share(self, addressable):
        """Local schedulers hand that one key on as data; it is no task that they run."""
        _, tasks, _ = addressable
        for graph, keys in zip(tasks.graphs, tasks.ran, strict=True):
            assert len(shared(graph)) == 1
            assert sorted(map(str, keys)) == sorted(map(str, set(graph) - shared(graph)))

    def test_the_history_counts_the_same(self, addressable):
        mixture, _, active = addressable
        counted = [(record.chunks_processed, record.chunks_skipped) for record in mixture.history_]
        assert counted == [(len(chunks), 4 - len(chunks)) for chunks in active]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("make", [zarr_array, sharded_zarr])
def test_a_zarr_array_is_worked_on_by_its_own_chunks_or_shards(make, tmp_path):
    _, tasks = fit(make(tmp_path), FullEM())
    assert [chunks_of(keys) for keys in tasks.ran] == [[0, 1, 2, 3, 4]] * 12


@pytest.mark.usefixtures("apart")
def test_weights_add_no_task(tmp_path):
    _, tasks = fit(numpy_chunks(tmp_path), TAU, sample_weight=np.ones(len(ROWS)))
    weights, *iterations = tasks.ran
    assert chunks_of(weights, "emtau-weights") == EVERYWHERE
    assert [chunks_of(keys) for keys in iterations] == ACTIVE
    assert not any(inputs(graph) for graph in tasks.graphs)


@pytest.mark.usefixtures("apart")
def test_an_iteration_without_active_rows_has_no_tasks():
    mixture, tasks = fit(numpy_chunks(None), EMLazy(threshold=0.2, full_every=4))  # max_k w_nk >= 1/4 always
    assert [record.active_rows for record in mixture.history_] == [200, 0, 0, 0] * 3
    assert [chunks_of(keys) for keys in tasks.ran] == [EVERYWHERE] * 3


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
def test_starts_have_one_task_a_chunk_and_no_tasks_but_merges(init):
    mixture = GaussianMixture(K, algorithm="em", init_params=init, max_iter=0, random_state=0)
    with dask.config.set(scheduler="synchronous"), Tasks() as tasks:
        mixture.fit(numpy_chunks(None))
    for keys in tasks.ran:
        names = {layer(key) for key in keys} - {"emtau-merge"}
        assert len(names) == 1
        assert chunks_of(keys, *names) == EVERYWHERE


def graph_of(calls=None, columns=2):
    """A graph of two tasks a block or more, which are not fused; `calls` collects the chunks computed."""

    def note(block, block_info):
        if calls is not None:
            calls.append(block_info[0]["chunk-location"][0])
        return block + 0

    array = da.from_array(ROWS, chunks=(CHUNKS, columns))
    return array.map_blocks(note, dtype=float, meta=np.empty((0, 0)))


def needed(graph, keys):
    """All keys that `keys` depend on, by walking the graph naively."""
    found, waiting = set(), list(keys)
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += getattr(graph[key], "dependencies", ())
    return found


GRAPHS = {
    "computed": graph_of,
    "features split": lambda: graph_of(columns=1),
    "in memory, features split": lambda: da.from_array(ROWS, chunks=(CHUNKS, 1)),
}


@pytest.fixture(scope="module", params=GRAPHS)
def graph(request):
    X = GRAPHS[request.param]()
    with dask.config.set({"emtau.cache-bytes": 0}):
        return X, *fit(X, TAU)


class TestGraph:
    """Chunks that tasks of the user's own compute never share a task of the engine, small as they are."""

    def test_one_task_for_each_active_chunk_and_none_for_a_skipped_one(self, graph):
        _, _, tasks = graph
        assert [chunks_of(keys) for keys in tasks.ran] == ACTIVE

    def test_beside_it_only_the_inputs_own_tasks_of_the_active_chunks(self, graph):
        X, _, tasks = graph
        (optimised,) = dask.optimize(X)
        own, keys = dict(optimised.__dask_graph__()), optimised.__dask_keys__()
        expected = [needed(own, [key for c in chunks for key in keys[c]]) for chunks in ACTIVE]
        assert [inputs(graph) for graph in tasks.graphs] == expected

    def test_no_tasks_of_the_engine_but_those(self, graph):
        _, _, tasks = graph
        names = {layer(key) for graph in tasks.graphs for key in graph.keys() - inputs(graph)}
        assert names == {"emtau-estep"}

    def test_nothing_of_the_engine_does_not_run(self, graph):
        _, _, tasks = graph
        for known, keys in zip(tasks.graphs, tasks.ran, strict=True):
            assert known.keys() - inputs(known) == set(keys) - inputs(known)

    def test_the_fit_is_the_one_of_an_addressable_source(self, graph, addressable):
        assert np.allclose(graph[1].means_, addressable[0].means_, rtol=1e-12)


@pytest.mark.parametrize("columns", [1, 2])
def test_the_blocks_of_a_skipped_chunk_are_not_computed(columns):
    calls = []
    with dask.config.set({"emtau.cache-bytes": 0}):
        fit(graph_of(calls, columns), TAU)
    blocks = 2 // columns
    assert sorted(calls) == sorted(c for chunks in ACTIVE for c in chunks for _ in range(blocks))


def test_every_active_chunk_of_a_zarr_is_read_once_and_no_other_and_bytes_are_counted(tmp_path):
    path = tmp_path / "rows.zarr"
    zarr.create_array(store=path, data=ROWS, chunks=(40, 2))
    store = Reads(LocalStore(path, read_only=True))
    with one_chunk_a_task(), dask.config.set({"emtau.cache-bytes": 0}):
        X = da.from_array(zarr.open_array(store=store, mode="r"), chunks=((40, 40, 80, 40), 2))
        mixture, _ = fit(X, TAU)
    active = renumbered(ACTIVE, BY_40_ROWS)
    assert sorted(store.chunks) == sorted(c for chunks in active for c in chunks)
    sizes = [(path / "c" / str(chunk) / "0").stat().st_size for chunk in range(5)]
    expected = [sum(sizes[c] for c in chunks) for chunks in active]
    assert [record.bytes_read for record in mixture.history_] == expected


def test_bytes_read_of_a_pass_that_is_repeated_are_of_both_readings(tmp_path):
    """Component 1 lies on equal rows: after iteration 1 it is too far away, in its units, for features."""
    path, chunk = tmp_path / "rows.zarr", 20
    rows = np.concatenate([np.random.default_rng(3).normal(size=(40, 2)), np.full((20, 2), 20.0)])
    zarr.create_array(store=path, data=rows, chunks=(chunk, 2), compressors=None)
    store = Reads(LocalStore(path, read_only=True))
    mixture = GaussianMixture(
        2,
        algorithm="em",
        tol=0,
        max_iter=3,
        weights_init=[0.5, 0.5],
        means_init=[[0, 0], [20, 20]],
        precisions_init=[np.eye(2)] * 2,
    )
    with dask.config.set(scheduler="synchronous"):
        quietly(mixture, zarr.open_array(store=store, mode="r"))
    read = [record.bytes_read for record in mixture.history_]
    assert read == [2 * rows.nbytes, rows.nbytes, rows.nbytes]
    assert [record.repeated for record in mixture.history_] == [True, False, False]
    assert sum(read) == len(store.chunks) * rows[:chunk].nbytes


def test_bytes_read_of_a_graph_are_those_of_the_decoded_chunks(graph):
    bounds = (0, *accumulate(CHUNKS))
    sizes = [ROWS[bounds[c] : bounds[c + 1]].nbytes for c in range(len(CHUNKS))]
    assert [record.bytes_read for record in graph[1].history_] == [sum(sizes[c] for c in cs) for cs in ACTIVE]


def test_drawing_a_sample_reads_no_rows_but_those_of_chunks_drawn_from():
    """400 chunks of one row, K = 2: 64 x K of them are read for the sample, then all of them once."""
    calls = []

    def note(block, block_info):
        calls.append(block_info[0]["chunk-location"][0])
        return block

    rows = np.random.default_rng(0).normal(size=(400, 1))
    X = da.from_array(rows, chunks=(1, 1)).map_blocks(note, dtype=float, meta=np.empty((0, 0)))
    mixture = GaussianMixture(2, init_params="random_from_data", n_init=1, max_iter=0, random_state=0)
    with dask.config.set(scheduler="synchronous"):
        mixture.fit(X)
    assert len(calls) == 2 * 64 + 400


@dataclass(frozen=True)
class HalfStays:
    """Every other row stays active for good; with ``counting``, iterations are counted for each of them."""

    counting: bool

    def row_arrays(self, n_components, max_iter):
        return (RowArray("seen", max_iter),) if self.counting else ()

    def update(self, state, evidence):
        n = len(evidence.labels)
        stays = np.arange(n) % 2 == 0 if evidence.iteration == 1 else np.ones(n, dtype=bool)
        return {name: values + 1 for name, values in state.items()}, stays

    def schedule(self, summary):
        return Schedule(NextPass.ACTIVE, test_tol=False)


def test_row_state_that_does_not_change_is_not_written(monkeypatch):
    put, written = LocalObjects.put, []

    def counted(store, key, data):
        if key != MARKER:
            written.append(key)
        put(store, key, data)

    monkeypatch.setattr(LocalObjects, "put", counted)

    def fit(counting):
        written.clear()
        mixture = GaussianMixture(K, algorithm=HalfStays(counting), tol=0, max_iter=6, **START)
        with dask.config.set(scheduler="synchronous"):
            quietly(mixture, as_source(ROWS, ndim=2, what="X").aligned(CHUNKS))
        return mixture, len(written)

    (still, few), (counted_rows, many) = fit(False), fit(True)
    assert (few, many) == (1, 6)  # All chunks share a task, and so their row state an object.
    assert np.array_equal(still.means_, counted_rows.means_)
    assert still.lower_bounds_ == counted_rows.lower_bounds_
    assert [record.active_rows for record in still.history_] == [len(ROWS)] + [len(ROWS) // 2] * 5


def fitted_rows(X, max_iter):
    """How many rows were given to be scored in a fit of two components by EM-Lazy, and its records."""
    scored, accumulate = [], BlockKernel.accumulate

    def counted(kernel, rows, *others):
        scored.append(len(rows))
        return accumulate(kernel, rows, *others)

    mixture = GaussianMixture(2, algorithm=EMLazy(full_every=9), max_iter=max_iter)
    start = {"means_init": [[0, 0], [12, 12]], "precisions_init": [np.eye(2)] * 2, "weights_init": [0.5] * 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockKernel, "accumulate", counted)
        records = quietly(mixture.set_params(**start), X).history_
    return sum(scored), list(records)


@pytest.mark.parametrize(("between", "few"), [(0, True), (100, True), (4000, False)])
def test_where_few_rows_stay_active_they_are_scored_again_and_not_those_that_settle(between, few):
    """Two clusters apart, whose rows settle in the first iteration, and rows between them, which do not."""
    rng = np.random.default_rng(3)
    apart = np.vstack([rng.normal(centre, 1, (500, 2)) for centre in (0.0, 12.0)])
    X = rng.permutation(np.vstack([apart, rng.normal(6.0, 0.1, (between, 2))]))
    (scored, _), (_, records) = fitted_rows(X, 1), fitted_rows(X, 2)
    staying = records[1].active_rows if records[1:] else 0
    assert between * 0.5 <= staying <= between
    assert (3 * staying < len(X)) == few
    assert scored == len(X) + (staying if few else len(X) - staying)
