"""Predictions of many rows: by compiled tiles as by NumPy, chunk after chunk, wherever dask computes."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from counting import Reads
from distributed import Client, LocalCluster
from oracles import starts
from processes import pool_of_two
from threadpoolctl import threadpool_info
from zarr.storage import LocalStore

from emtau_dask import GaussianMixture
from emtau_dask.cli.predict import LabelOptions, write_labels
from emtau_dask.data.opening import as_source, open_source
from emtau_dask.em import compiling, predict
from emtau_dask.em.history import SilentObserver
from emtau_dask.em.predict import LABELS, LOG_LIKELIHOODS, kernels_to_score, score_rows
from emtau_dask.errors import InvalidDataError, UnusableRowError
from emtau_dask.execution.choice import choose_executor

ROWS, _ = starts.mixture(2000, 3, 3, separation=3.0, seed=3)
METHODS = ("predict", "predict_proba", "score_samples")


@pytest.fixture(scope="module")
def model():
    return GaussianMixture(3, algorithm="em", tol=1e-3, random_state=0).fit(ROWS)


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def stored(tmp_path):
    zarr.create_array(store=tmp_path / "x.zarr", data=ROWS, chunks=(130, 3))
    return tmp_path / "x.zarr"


def opened(path):
    return open_source(str(path))


MAKES = {
    "numpy": lambda path: ROWS,
    "float32": lambda path: ROWS.astype("float32"),
    "integers": lambda path: np.round(ROWS).astype(int),
    "columns in order": lambda path: np.asfortranarray(ROWS),
    "dask": lambda path: da.from_array(ROWS, chunks=(130, 2)),
    "zarr": zarr.open_array,
    "source": opened,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MAKES)
def test_tiles_predict_what_scikit_learn_does(model, stored, kind, method):
    X = MAKES[kind](stored)
    plain = np.asarray(MAKES[kind](stored), dtype=float) if kind != "source" else ROWS
    with dask.config.set({"emtau.compiled": "always"}):
        found = getattr(model, method)(X)
        found = found.compute() if isinstance(found, da.Array) else found
    assert np.allclose(found, getattr(model.to_sklearn(), method)(plain), rtol=1e-9, atol=1e-12)
    assert found.dtype == getattr(model, method)(ROWS).dtype


def test_what_goes_by_tiles_is_a_function_of_its_size(model, monkeypatch):
    assert not kernels_to_score(None, model.parameters_, len(ROWS)).by_tiles
    monkeypatch.setattr(compiling, "MIN_PRODUCTS_ONCE", 3 * 10 * len(ROWS))
    assert kernels_to_score(None, model.parameters_, len(ROWS)).by_tiles
    assert not kernels_to_score(None, model.parameters_, len(ROWS) - 1).by_tiles
    assert not kernels_to_score(None, model.parameters_, np.nan).by_tiles
    with_missing = partial(kernels_to_score, None, model.parameters_, len(ROWS), missing="marginalise")
    assert not with_missing().by_tiles
    monkeypatch.setattr(compiling, "MIN_PRODUCTS", 3 * 10 * len(ROWS))
    assert with_missing().by_tiles
    assert not with_missing(by_pattern=True).by_tiles


class Recorder(SilentObserver):
    def __init__(self):
        self.stages, self.done = [], 0

    def stage(self, name, chunks):
        self.stages.append((name, chunks))

    def chunks_done(self, count):
        self.done += count


@pytest.fixture(scope="module")
def pool():
    with pool_of_two() as pool:
        yield pool


@pytest.fixture(params=["threads", "synchronous", "processes", "cluster"])
def scheduler(request):
    if request.param == "cluster":
        with Client(request.getfixturevalue("cluster")):
            yield request.param
        return
    pool = request.getfixturevalue("pool") if request.param == "processes" else None
    with dask.config.set(scheduler=request.param, num_workers=2, pool=pool):
        yield request.param


@pytest.mark.parametrize("compiled", ["never", "always"])
def test_labels_are_written_wherever_dask_computes(model, stored, tmp_path, scheduler, compiled, monkeypatch):
    """In several passes."""
    monkeypatch.setattr(predict, "RESULT_BYTES", 1)
    told, out = Recorder(), tmp_path / "labels.zarr"
    options = LabelOptions(probabilities=True, scores=True)
    with dask.config.set({"emtau.compiled": compiled}):
        counts = write_labels(model, opened(stored), out, options, observer=told)
    group, twin = zarr.open_group(str(out)), model.to_sklearn()
    assert np.array_equal(group["labels"][:], twin.predict(ROWS))
    assert np.array_equal(counts, np.bincount(twin.predict(ROWS)))
    assert np.allclose(group["probabilities"][:], twin.predict_proba(ROWS), rtol=1e-9, atol=1e-12)
    assert np.allclose(group["scores"][:], twin.score_samples(ROWS), rtol=1e-12)
    assert told.stages == [("labels", 16)]
    assert told.done == 16


@pytest.mark.parametrize("most", [1, 2**26])
def test_each_chunk_is_read_once_for_all_outputs(model, stored, tmp_path, most, monkeypatch):
    """In one pass, and in several."""
    monkeypatch.setattr(predict, "RESULT_BYTES", most)
    store = Reads(LocalStore(stored, read_only=True))
    source = as_source(zarr.open_array(store=store, mode="r"), ndim=2, what="X")
    with dask.config.set({"emtau.direct-reads": "never"}):
        write_labels(model, source, tmp_path / "o.zarr", LabelOptions(True, True), observer=SilentObserver())
    assert sorted(store.chunks) == list(range(16))


@pytest.mark.parametrize(("most", "passes"), [(1, 8), (2**26, 1)])
def test_a_pass_is_over_as_many_chunks_as_its_results_may_take(model, stored, most, passes, monkeypatch):
    monkeypatch.setattr(predict, "RESULT_BYTES", most)
    with dask.config.set(scheduler="threads", num_workers=2):
        kernels = kernels_to_score(None, model.parameters_, len(ROWS))
        parts = list(score_rows(opened(stored), kernels, [LABELS, LOG_LIKELIHOODS], choose_executor()))
    assert len(parts) == passes
    labels = np.concatenate([labels for part in parts for labels, _ in part])
    assert np.array_equal(labels, model.to_sklearn().predict(ROWS))


@pytest.mark.parametrize("compiled", ["never", "always"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_the_first_row_that_cannot_be_scored_is_named(model, tmp_path, compiled, value):
    spoilt = ROWS.copy()
    spoilt[700, 1] = spoilt[1500, 0] = value
    zarr.create_array(store=tmp_path / "x.zarr", data=spoilt, chunks=(130, 3))
    with (
        dask.config.set({"emtau.compiled": compiled}),
        pytest.raises(UnusableRowError, match=r"row 700 \(chunk 5, its row 50\)"),
    ):
        write_labels(
            model,
            opened(tmp_path / "x.zarr"),
            tmp_path / "o.zarr",
            LabelOptions(),
            observer=SilentObserver(),
        )
    with dask.config.set({"emtau.compiled": compiled}), pytest.raises(UnusableRowError, match="row 700 "):
        model.predict(spoilt)
    assert not (tmp_path / "o.zarr").exists()


def test_few_large_results_do_not_wait_for_all_workers():
    """Chunks of 100 bytes: two workers are given one each, as long as their results take so many."""
    parts = predict._parts(range(6), [100] * 6, 1, 2)
    assert list(map(list, parts)) == [[0, 1, 2, 3, 4, 5]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "RESULT_BYTES", 50)
        assert list(map(list, predict._parts(range(5), [100] * 5, 1, 2))) == [[0, 1], [2, 3], [4]]
        patch.setattr(predict, "MAX_RESULT_BYTES", 150)
        assert list(map(list, predict._parts(range(3), [100] * 3, 1, 2))) == [[0], [1], [2]]


def test_names_of_lazy_predictions_tell_what_they_are_of(model, stored):
    X = zarr.open_array(stored)
    with dask.config.set({"emtau.compiled": "always"}):
        names = [model.predict(X).name, model.predict_proba(X).name, model.predict(da.zeros((5, 3))).name]
        assert model.predict(X).name == names[0]
    assert len({*names, model.predict(X).name}) == 4
    assert names[0].startswith("emtau-labels-")


def test_rows_in_memory_are_labelled_within_tasks_too(model):
    """In threads of a pool of the user's, all of which are at work."""
    X = da.from_array(ROWS, chunks=(500, 3))
    with (
        ThreadPoolExecutor(2) as pool,
        dask.config.set({"emtau.compiled": "always"}, scheduler="threads", pool=pool),
    ):
        labels = X.map_blocks(model.predict, drop_axis=1, dtype=int, meta=np.empty(0, int)).compute()
    assert np.array_equal(labels, model.to_sklearn().predict(ROWS))


def test_rows_in_memory_need_no_client_that_waits(model, cluster):
    async def labelled():
        async with Client(cluster.scheduler_address, asynchronous=True, set_as_default=True):
            with dask.config.set({"emtau.compiled": "always"}):
                return model.predict(ROWS)

    assert np.array_equal(asyncio.run(labelled()), model.to_sklearn().predict(ROWS))


def blas_threads(found):
    threads = {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}
    return np.full(len(found.rows), max(threads))


@pytest.mark.cluster
def test_blas_has_one_thread_where_other_processes_score(model, stored):
    counted = predict.Scoring("threads", blas_threads, np.dtype(int), lambda n_components: ())
    with dask.config.set(scheduler="processes", num_workers=2):
        kernels = kernels_to_score(None, model.parameters_, len(ROWS))
        parts = list(score_rows(opened(stored), kernels, [counted], choose_executor()))
    assert {int(threads) for part in parts for (found,) in part for threads in found} == {1}


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="a path that is another one in each process")
def test_a_worker_that_sees_other_rows_labels_none(model, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    zarr.create_array(store=elsewhere / "x.zarr", data=ROWS[::-1].copy(), chunks=(130, 3))
    source, out = opened("/proc/self/cwd/x.zarr"), tmp_path / "o.zarr"
    with LocalCluster(1, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        client.run(os.chdir, str(tmp_path))
        write_labels(model, source, out, LabelOptions(), observer=SilentObserver())
        client.run(os.chdir, str(elsewhere))
        with pytest.raises(InvalidDataError, match="sees other data"):
            write_labels(model, source, tmp_path / "again.zarr", LabelOptions(), observer=SilentObserver())
    assert np.array_equal(zarr.open_group(str(out))["labels"][:], model.to_sklearn().predict(ROWS))
    assert not (tmp_path / "again.zarr").exists()
