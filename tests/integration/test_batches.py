"""Small chunks of stored data travel together: which share a task, and that it changes nothing but that."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import dask
import numpy as np
import pytest
import zarr
from counting import (
    START,
    K,
    Reads,
    Tasks,
    counted_fit,
    expected_batches,
    layer,
    one_chunk_a_task,
    processed,
)
from fits import assert_same_bits
from oracles import naive, policies
from zarr.storage import LocalStore

from emtau_dask import EMLazy, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.data.opening import as_source

CHUNKS = (3,) * 16 + (0,) + (3,) * 83
"""A cluster far from all others in chunks 0 to 15, two that overlap in 17 to 90, another far one later."""

PRESENT = [chunk for chunk, rows in enumerate(CHUNKS) if rows]
D, ITERATIONS = 2, 7


def draw_rows():
    rng = np.random.default_rng(0)
    centres = np.repeat([-50.0, 0.0, 0.8, 50.0], [48, 111, 111, 27])
    rows = rng.normal(size=(297, D)) + centres[:, None]
    rows[48:270] = rng.permutation(rows[48:270])
    return rows


ROWS = draw_rows()
CHUNK_OF = np.repeat(np.arange(len(CHUNKS)), CHUNKS)


def in_numpy(path):
    return as_source(ROWS, ndim=2, what="X").aligned(CHUNKS)


def in_zarr(path):
    array = zarr.create_array(store=path / "rows.zarr", data=ROWS, chunks=(3, D))
    return as_source(array, ndim=2, what="X").aligned(CHUNKS)


LAZY = EMLazy(threshold=0.65, full_every=5)


fit = partial(counted_fit, max_iter=ITERATIONS)


@pytest.fixture(scope="module")
def active():
    """How many rows each chunk with active rows has of them, in every iteration of a naive run."""
    policy = policies.EMLazy(0.65, 5)
    run = naive.fit(ROWS, START, policy, max_iter=ITERATIONS, reg_covar=1e-6)
    counts = [np.bincount(CHUNK_OF[mask], minlength=len(CHUNKS)) for mask in run.active]
    return [{chunk: int(count[chunk]) for chunk in np.flatnonzero(count).tolist()} for count in counts]


@pytest.fixture(scope="module")
def batches(active):
    """The batches that these make: a row to be scored costs its features, one only read a sixteenth of it."""
    costs = [{c: rows * D + CHUNKS[c] * D / 16 for c, rows in iteration.items()} for iteration in active]
    return [expected_batches(each) for each in costs]


def test_the_naive_run_has_batches_of_many_kinds(active, batches):
    """All chunks, by eights; some, by 64; fewer, all of them together; and all of them again."""
    eighths = [tuple(c for c in PRESENT if c // 8 == eighth) for eighth in range(13)]
    assert [len(found) for found in batches] == [13, 2, 2, 1, 1, 13, 2]
    assert batches[0] == batches[5] == eighths
    for iteration, found in zip(active, batches, strict=True):
        if len(found) < 13:
            assert set(iteration) < set(range(17, 91))
            assert found == [part for part in by_64(list(iteration), len(found)) if part]


def by_64(chunks, parts):
    return [tuple(c for c in chunks if parts == 1 or c // 64 == part) for part in range(parts)]


@pytest.fixture(scope="module", params=[in_numpy, in_zarr])
def fitted(request, tmp_path_factory):
    return fit(request.param(tmp_path_factory.mktemp("rows")), LAZY)


def chunks_by_task(tasks, name="emtau-estep"):
    """The chunks of every task of this name, as its own items say, by computation."""
    return [
        sorted(tuple(getattr(item, "chunk_range", item).chunk for item in processed(node)) for node in nodes)
        for nodes in tasks.ran_of(name)
    ]


class TestBatches:
    def test_they_follow_the_nodes_of_the_tree(self, fitted, batches):
        _, tasks = fitted
        assert chunks_by_task(tasks) == batches

    def test_every_active_chunk_is_in_one_and_a_skipped_one_in_none(self, fitted, active):
        _, tasks = fitted
        found = [[chunk for batch in found for chunk in batch] for found in chunks_by_task(tasks)]
        assert [sorted(chunks) for chunks in found] == [list(iteration) for iteration in active]

    def test_a_task_is_named_after_the_first_chunk_of_its_batch(self, fitted, batches):
        _, tasks = fitted
        named = [sorted(key[1] for key in keys if layer(key) == "emtau-estep") for keys in tasks.ran]
        assert named == [[batch[0] for batch in found] for found in batches]

    def test_a_batch_merges_its_chunks_itself(self, fitted, batches):
        """One result for each batch is all that is left to merge."""
        _, tasks = fitted
        for keys, found in zip(tasks.ran, batches, strict=True):
            merges = [key for key in keys if layer(key) == "emtau-merge"]
            assert len(keys) == len(found) + len(merges)
            assert len(merges) < max(len(found), 1)
            assert bool(merges) is (len(found) > 1)

    def test_nothing_is_in_the_graph_that_does_not_run_but_what_the_tasks_share(self, fitted):
        _, tasks = fitted
        for graph, keys in zip(tasks.graphs, tasks.ran, strict=True):
            (rest,) = graph.keys() - set(keys)
            assert layer(rest) == "emtau-pass"

    def test_the_history_counts_chunks_and_not_tasks(self, fitted, active):
        counted = [(record.chunks_processed, record.chunks_skipped) for record in fitted[0].history_]
        assert counted == [(len(iteration), 99 - len(iteration)) for iteration in active]

    def test_the_history_counts_rows(self, fitted, active):
        scored = [record.active_rows for record in fitted[0].history_]
        assert scored == [sum(iteration.values()) for iteration in active]


def stored_chunk(chunk):
    """The zarr array has no chunk for the one without rows, 16."""
    return chunk if chunk < 16 else chunk - 1


def test_every_active_chunk_of_a_zarr_is_read_once_and_no_other_and_bytes_are_counted(tmp_path, active):
    path = tmp_path / "rows.zarr"
    zarr.create_array(store=path, data=ROWS, chunks=(3, D))
    store = Reads(LocalStore(path, read_only=True))
    with dask.config.set({"emtau.cache-bytes": 0}):
        X = as_source(zarr.open_array(store=store, mode="r"), ndim=2, what="X").aligned(CHUNKS)
        mixture, _ = fit(X, LAZY)
    starts = list(accumulate((len(iteration) for iteration in active), initial=0))
    assert len(store.chunks) == starts[-1]
    for start, iteration in zip(starts, active, strict=False):
        read = store.chunks[start : start + len(iteration)]
        assert sorted(read) == [stored_chunk(chunk) for chunk in iteration]
    size = {chunk: (path / "c" / str(stored_chunk(chunk)) / "0").stat().st_size for chunk in PRESENT}
    expected = [sum(size[chunk] for chunk in iteration) for iteration in active]
    assert [record.bytes_read for record in mixture.history_] == expected


def without_seconds(mixture):
    return [replace(record, seconds=0.0) for record in mixture.history_]


CASES = [
    (in_zarr, LAZY),
    *((in_numpy, each) for each in (LAZY, EMTau(tau=2), EMStar(tail=0.5))),
    *(pytest.param(in_numpy, each, marks=pytest.mark.exhaustive) for each in (EMTau(2, None), FullEM())),
]


class TestSameBits:
    """Results with and without batches, to the last bit."""

    @pytest.mark.parametrize(
        ("make", "algorithm"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
    )
    def test_of_every_algorithm(self, make, algorithm, tmp_path):
        X = make(tmp_path)
        with one_chunk_a_task():
            alone, tasks = fit(X, algorithm)
            assert {len(batch) for found in chunks_by_task(tasks) for batch in found} == {1}
        together, tasks = fit(X, algorithm)
        assert max(len(batch) for found in chunks_by_task(tasks) for batch in found) >= 8
        assert_same_bits(together, alone)
        assert without_seconds(together) == without_seconds(alone)

    def test_with_weights_some_of_them_zero(self):
        weights = np.random.default_rng(5).uniform(0.5, 2, len(ROWS))
        weights[::7] = 0
        weights[30:60] = 0
        with one_chunk_a_task():
            alone, _ = fit(in_numpy(None), LAZY, sample_weight=weights)
        together, tasks = fit(in_numpy(None), LAZY, sample_weight=weights)
        assert_same_bits(together, alone)
        assert without_seconds(together) == without_seconds(alone)
        (weighed,) = [found for found in chunks_by_task(tasks, "emtau-weights") if found]
        assert weighed == expected_batches(dict.fromkeys(PRESENT, 3))

    def test_on_threads(self, fitted):
        there, _ = fit(in_numpy(None), LAZY, scheduler="threads")
        assert_same_bits(there, fitted[0])

    @pytest.mark.parametrize("init", ["kmeans", "k-means++", "random", "random_from_data"])
    def test_of_every_start(self, init):
        def start():
            mixture = GaussianMixture(K, algorithm="em", init_params=init, max_iter=0, random_state=0)
            with dask.config.set(scheduler="synchronous"), Tasks() as tasks:
                return mixture.fit(in_numpy(None)), tasks

        with one_chunk_a_task():
            alone, _ = start()
        together, tasks = start()
        assert_same_bits(together, alone)
        for keys in tasks.ran:
            (name,) = {layer(key) for key in keys} - {"emtau-merge"}
            (found,) = [found for found in chunks_by_task(tasks, name) if found][:1]
            assert found == expected_batches(dict.fromkeys(PRESENT, 3 * D))
