"""Fits on a cluster of processes: the bits of a threaded run, and who reads, holds and runs what."""

import asyncio
import os
import sys
import threading
import warnings
from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from clusters import GUARD, Homebound, fit_inside, name_of, processes, seen, tasks_of, transfers, until
from counting import one_chunk_a_task
from distributed import Client, futures_of, wait
from fits import ROWS, assert_same_bits, mixture, quietly, resumed
from processes import pool_of_two

from emtau_dask import ClusterError, EMLazy, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.checkpoint.reader import read_newest
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.stores import object_store

pytestmark = pytest.mark.cluster
FITS = {
    "em": (FullEM(), "kmeans"),
    "em-tau": (EMTau(tau=2, revisit=3), "k-means++"),
    "em-star": (EMStar(), "random"),
    "em-lazy": (EMLazy(threshold=0.9, full_every=2), "random_from_data"),
}
WEIGHTS = np.random.default_rng(3).integers(0, 3, len(ROWS)).astype(float)
THREADS = {"scheduler": "threads", "num_workers": 2}


def fit(X, name="em-tau", checkpoint=None, max_iter=6, **fit_options):
    algorithm, start = FITS[name]
    settings = {"algorithm": algorithm, "init_params": start, "tol": 0, "max_iter": max_iter}
    return quietly(mixture(checkpoint=checkpoint, **settings), X, **fit_options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    return zarr.create_array(store=path, data=ROWS, chunks=(25, 2))


@pytest.fixture(scope="module")
def threaded(stored):
    with dask.config.set(THREADS):
        return {name: fit(stored, name) for name in FITS}


@pytest.fixture(scope="module")
def cluster(zygote, tmp_path_factory):
    with processes(
        zygote, tmp_path_factory.mktemp("cluster") / "1", scheduler__work_stealing="False"
    ) as cluster:
        cluster.start_worker("--resources", "SLOT=1")
        yield cluster


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.sample)],
)
def client(request, cluster):
    while len(cluster.workers) < request.param:
        cluster.start_worker()
    with cluster.client() as client:
        yield client


@pytest.fixture
def one(cluster):
    """A client of a cluster that has one worker, or more after other tests."""
    with cluster.client() as client:
        yield client


class TestBits:
    @pytest.mark.parametrize(("name", "kept"), [("em", False), *((name, True) for name in FITS)])
    def test_those_of_threads(self, client, stored, threaded, tmp_path, name, kept):
        found = fit(stored, name, tmp_path / "run" if kept else None)
        assert_same_bits(found, threaded[name])

    def test_those_of_threads_for_arrays_in_memory_of_which_nothing_stays(self, client):
        with dask.config.set(THREADS):
            expected = fit(ROWS, sample_weight=WEIGHTS)
        assert_same_bits(fit(ROWS, sample_weight=WEIGHTS), expected)
        until(lambda: not tasks_of(client), "the release of all tasks")

    def test_arrays_in_memory_are_sent_without_a_warning(self, client):
        limit = {"distributed.admin.large-graph-warning-threshold": 2**18}
        with dask.config.set(limit), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Sending large graph")
            fit(np.tile(ROWS, (100, 1)), max_iter=1)

    def test_a_graph_that_every_pass_needs_whole_is_warned_about(self, client):
        graph = da.from_array(ROWS, chunks=(500, ROWS.shape[1])).map_blocks(np.negative)
        with pytest.warns(UserWarning, match=r"computes it again.*X\.persist\(\)"):
            fit(graph, "em", max_iter=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*computes it again")
            fit(graph.persist(), "em", max_iter=1)
            fit(graph, "em-tau", max_iter=1)

    def test_a_resumed_fits_are_those_of_one_that_was_not_interrupted(
        self, client, stored, threaded, tmp_path
    ):
        fit(stored, checkpoint=tmp_path / "run", max_iter=3)
        assert_same_bits(resumed(tmp_path / "run", stored, max_iter=6), threaded["em-tau"])


def test_multiprocessing_gives_the_bits_of_threads(stored, threaded, tmp_path):
    with pool_of_two() as pool, dask.config.set(scheduler="processes", pool=pool):
        assert_same_bits(fit(stored, checkpoint=tmp_path / "run"), threaded["em-tau"])
        from_memory = fit(ROWS)
    with dask.config.set(THREADS):
        assert_same_bits(from_memory, fit(ROWS))


def test_processes_of_dasks_pool_last_for_the_whole_fit(tmp_path):
    """New ones in each pass would import everything again."""

    def noted(block):
        (tmp_path / str(os.getpid())).touch()
        return block

    graph = da.from_array(ROWS, chunks=(500, ROWS.shape[1])).map_blocks(noted, meta=ROWS[:0])
    with dask.config.set(scheduler="processes", num_workers=2):
        model = fit(graph, max_iter=3)
        assert dask.config.get("pool", None) is None
    assert 1 <= len(list(tmp_path.iterdir())) <= 2
    with dask.config.set(THREADS):
        assert_same_bits(model, fit(ROWS, max_iter=3))


class TestWhoReads:
    @pytest.mark.sample
    def test_chunks_and_row_state_are_read_by_workers_alone_but_for_a_few_samples(
        self, one, stored, tmp_path
    ):
        opened, hearing = [], True

        def hear(event, arguments):
            if hearing and event == "open":
                opened.append(str(arguments[0]))

        sys.addaudithook(hear)
        fit(stored, checkpoint=tmp_path / "run")
        hearing = False
        data = [path for path in opened if path.startswith(str(stored.store.root))]
        chunks = Counter(path for path in data if "zarr.json" not in path)
        assert len(chunks) == 4 < len(ROWS) // 25
        assert set(chunks.values()) == {1}
        state = Counter(path for path in opened if path.startswith(str(tmp_path)) and "/rows/c." in path)
        at_the_end = read_newest(open_log(object_store(tmp_path / "run"))).row_state
        left = {str(tmp_path / "run" / stored.key) for stored in at_the_end}  # read for the arrays that stay
        assert left
        assert {path: 1 + (path in left) for path in state} == state  # once for fsync; others are not read
        assert not [path for path in opened if "/rows/.c." in path]

    def test_persisted_input_stays_where_it_is(self, cluster, one, monkeypatch):
        while len(cluster.workers) < 2:
            cluster.start_worker()
        cluster.wait(one)
        X = da.from_array(np.tile(ROWS, (40, 1)), chunks=(1000, 2)).map_blocks(np.abs).persist()
        wait(X)
        keys, holders = {str(key) for key in X.__dask_keys__() for key in key}, one.who_has(X)
        assert len(set(holders.values())) > 1
        gathered, gather = [], Client.gather

        def noted(self, futures, **options):
            gathered.extend(str(future.key) for future in futures_of(futures))
            return gather(self, futures, **options)

        monkeypatch.setattr(Client, "gather", noted)
        with seen(one) as ran:
            fit(X)
        moved = [key for log in one.run(transfers).values() for key in log if key in keys]
        assert not moved
        assert one.who_has(X) == holders
        assert not {key for key, _, _ in ran} & keys
        assert all(name_of(key).startswith("emtau-") for key in gathered)

    def test_a_graph_is_computed_for_full_passes_and_once_for_all_samples(self, cluster, one):
        """The workers that cache rows of samples, and later active rows, take them from there."""
        while len(cluster.workers) < 2:
            cluster.start_worker()
        cluster.wait(one)
        rng = da.random.default_rng(0)
        X = rng.normal(size=(80_000, 2), chunks=(10_000, 2)) + 2.5 * rng.integers(
            3, size=(80_000, 1), chunks=10_000
        )
        with seen(one) as ran:
            found = quietly(GaussianMixture(3, random_state=0), X)
        with dask.config.set(THREADS):
            assert_same_bits(found, quietly(GaussianMixture(3, random_state=0), X))
        own = Counter(key for key, _, _ in ran if not name_of(key).startswith("emtau-"))
        full = sum(record.full_pass for record in found.history_)
        assert len(found.history_) > 3 * full > 0
        assert set(own.values()) == {1 + full}

    @pytest.mark.parametrize("chunks", [None, 100])
    def test_an_array_in_memory_is_sent_once(self, one, chunks):
        X = ROWS if chunks is None else da.from_array(ROWS, chunks=(chunks, 2))
        with seen(one) as ran:
            fit(X, name="em")
        assert not {name_of(key) for key, _, _ in ran if not name_of(key).startswith("emtau-")}
        sent = [key for key, _, _ in ran if name_of(key) == "emtau-input"]
        assert len(sent) == len(set(sent)) == (1 if chunks is None else len(ROWS) // chunks)


class TestScheduling:
    def test_workers_pass_on_what_tasks_need_without_pickling_what_is_in_use(
        self, cluster, one, stored, threaded, monkeypatch
    ):
        while len(cluster.workers) < 2:
            cluster.start_worker()
        cluster.wait(one)
        monkeypatch.setitem(FITS, "homebound", (Homebound(home=os.getpid()), "k-means++"))
        with one_chunk_a_task():
            found = fit(stored, "homebound")
        assert_same_bits(found, threaded["em-tau"])
        assert any("emtau-pass" in key for keys in one.run(transfers).values() for key in keys)

    def test_a_configured_scheduler_beats_the_client(self, one, stored, threaded):
        with seen(one) as ran, dask.config.set(scheduler="threads"):
            assert_same_bits(fit(stored), threaded["em-tau"])
        assert ran == []

    def test_tasks_have_telling_names_and_annotations_reach_all_of_them(self, one, stored):
        X = da.from_array(ROWS, chunks=(100, 2)).map_blocks(np.copy)
        with seen(one) as ran, dask.annotate(resources={"SLOT": 1}, priority=7):
            fit(stored, "em")
            fit(ROWS, "em")
            fit(X, "em")
        names = {name_of(key) for key, _, _ in ran} - {"array-copy", "copy"}
        passes = {"emtau-draw", "emtau-take", "emtau-assign", "emtau-estep"}
        assert names == {*passes, "emtau-pass", "emtau-merge", "emtau-input"}
        assert all(notes.get("resources") == {"SLOT": 1} for _, _, notes in ran)
        assert len({worker for _, worker, _ in ran}) == 1

    @pytest.mark.sample
    def test_a_fit_inside_a_task_of_the_only_thread(self, zygote, one, stored, threaded, tmp_path):
        path, expected = str(stored.store.root), threaded["em-tau"]
        settings = expected.get_params(deep=False)
        with processes(zygote, tmp_path / "cluster", 1) as small, small.client() as client:
            found = client.submit(fit_inside, path, settings).result(timeout=GUARD)
            in_memory = client.submit(fit_inside, ROWS, settings).result(timeout=GUARD)
        assert_same_bits(found, expected)
        with dask.config.set(THREADS):
            assert_same_bits(in_memory, fit(ROWS))

    def test_an_asynchronous_client_is_refused(self, cluster, stored):
        async def attempt():
            async with Client(cluster.address, asynchronous=True):
                with pytest.raises(ClusterError, match="asynchronous"):
                    fit(stored)

        asyncio.run(attempt())

    def test_two_fits_at_once_do_not_disturb_each_other(self, one, stored, threaded):
        found = {}
        threads = [
            threading.Thread(target=lambda name=name: found.update({name: fit(stored, name)}))
            for name in ("em-tau", "em-star")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD)
        for name in ("em-tau", "em-star"):
            assert_same_bits(found[name], threaded[name])

    @pytest.mark.sample
    @pytest.mark.parametrize("name", ["em", "em-tau"])
    def test_nothing_is_left_on_the_scheduler(self, one, stored, name):
        fit(stored, name)
        until(lambda: not tasks_of(one), "the release of all tasks")
