"""What others see of a run: at every commit, after it has ended, and after it has moved on."""

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from fits import quietly, resumed
from oracles import agree, cases, naive, starts
from zarr.storage import MemoryStore

import emtau_dask
from emtau_dask import (
    CheckpointCorruptError,
    CheckpointError,
    EMSampled,
    EMTau,
    GaussianMixture,
    open_run,
)

ROWS, K = starts.data("overlapping")
START = starts.start(ROWS, K, "full")
CHUNKS = starts.row_chunks(len(ROWS), "zero-row-chunks")
ITERATIONS = 12
NAMED = pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)


def fitted(run, algorithm, max_iter=ITERATIONS, X=None, **settings):
    given = START if X is None else {"random_state": 0, "init_params": "random_from_data"}
    rows = da.from_array(ROWS, chunks=(CHUNKS, 3)) if X is None else X
    options = {"tol": 0, "reg_covar": 0, "max_iter": max_iter, "algorithm": algorithm, **given, **settings}
    return quietly(GaussianMixture(K, checkpoint=run, **options), rows)


@pytest.fixture
def seen(appended):
    """A function that opens a run after each of its commits; what it finds is kept by iteration."""

    def watch(path):
        found = {}

        def look(log):
            run = open_run(path)
            found[run.iteration] = run, dask.compute(dict(run.rows))[0]

        appended.append(look)
        return found

    return watch


@NAMED
def test_active_rows_are_the_oracles_at_every_commit(tmp_path, seen, case):
    found = seen(tmp_path / "run.zarr")
    fitted(tmp_path / "run.zarr", case.package(emtau_dask))
    oracle = agree.oracle_run(ROWS, START, case, chunks=CHUNKS, max_iter=ITERATIONS + 1)
    assert set(found) == set(range(ITERATIONS + 1))
    for iteration, (run, rows) in found.items():
        assert run.active.chunks == (CHUNKS,)
        assert np.array_equal(rows["active"], oracle.active[iteration]), iteration
        assert run.iteration == len(run.history) == iteration
        assert agree.worst(run.parameters.means, oracle.thetas[iteration].means) <= 1e-9


def test_what_a_policy_counts_is_the_oracles_and_masked_where_it_is_not_kept(tmp_path, seen):
    found = seen(tmp_path / "run.zarr")
    settling = cases.case("EMTau", tau=6, revisit=None)
    fitted(tmp_path / "run.zarr", settling.package(emtau_dask))
    assert max(found) > 6
    for iteration in range(1, max(found) + 1):
        policy = settling.oracle()
        naive.fit(ROWS, START, policy, max_iter=iteration)
        run, rows = found[iteration]
        active = rows["active"]
        for name, expected in (("label", policy.c), ("count", policy.m)):
            assert np.array_equal(np.ma.getmaskarray(rows[name]), ~active)
            assert np.array_equal(rows[name][active], expected[active])
            assert isinstance(getattr(run, name)._meta, np.ma.MaskedArray)
    assert not active.all()


@pytest.mark.parametrize("algorithm", ["auto", EMSampled()], ids=str)
def test_as_many_rows_are_active_as_the_next_iteration_scores(tmp_path, seen, algorithm):
    X = starts.mixture(40_000, 3, 2, separation=2.0, seed=1)[0]
    found = seen(tmp_path / "run.zarr")
    model = fitted(
        tmp_path / "run.zarr", algorithm, X=da.from_array(X, chunks=(7000, 2)), max_iter=30, n_init=1
    )
    shares = set()
    for iteration, (_, rows) in found.items():
        if iteration < model.n_iter_:
            record = model.history_[iteration]
            scored = len(X) if record.full_pass else record.active_rows  # which counts rows scored twice
            assert rows["active"].sum() == scored
            shares.add(scored / len(X))
    assert len(shares) > 1  # all rows, and samples or rows that stand for all


@NAMED
def test_a_fit_that_has_ended_leaves_plain_arrays(tmp_path, case):
    path = tmp_path / "run.zarr"
    fitted(path, case.package(emtau_dask))
    run = open_run(path)
    assert run.stop_reason == "max-iter"
    if case.name == "FullEM":
        assert not (path / "rows").exists()
        return
    plain = zarr.open_group(path, mode="r")["rows"]
    assert set(plain) == set(run.rows)
    for name, array in run.rows.items():
        stored, expected = plain[name], array.compute()
        assert dict(stored.attrs)["iteration"] == ITERATIONS
        assert np.array_equal(stored[:], np.ma.filled(expected, 0))
        of = "active rows" if isinstance(expected, np.ma.MaskedArray) else "all rows"
        assert stored.attrs["of"] == of


def test_plain_arrays_have_chunks_of_whole_chunks_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr("emtau_dask.checkpoint.rows.MAX_ARRAY_ROWS", 150)
    fitted(tmp_path / "run.zarr", EMTau(tau=3))
    plain = zarr.open_group(tmp_path / "run.zarr", mode="r")["rows/active"]
    longest = max(CHUNKS)
    assert plain.chunks == (longest * max(1, 150 // longest),)
    assert np.array_equal(plain[:], open_run(tmp_path / "run.zarr").active.compute())


def test_a_fit_that_goes_on_has_no_plain_arrays_until_it_ends_again(tmp_path, appended):
    path, found = tmp_path / "run.zarr", []
    fitted(path, EMTau(tau=3))
    appended.append(lambda log: found.append((path / "rows" / "active").exists()))
    resumed(path, da.from_array(ROWS, chunks=(CHUNKS, 3)), max_iter=ITERATIONS + 3)
    assert found
    assert not any(found)
    plain = zarr.open_group(path, mode="r")["rows/active"]
    assert plain.attrs["iteration"] == ITERATIONS + 3


@pytest.fixture
def long_chunks():
    """Chunks whose row state shares no object, so that no process keeps it decoded."""
    return da.from_array(starts.mixture(80_000, 3, 3, separation=2.0, seed=1)[0], chunks=(20_000, 3))


def test_a_run_that_has_moved_on_is_said_to_have(tmp_path, long_chunks):
    path = tmp_path / "run.zarr"
    fitted(path, EMTau(tau=3), X=long_chunks)
    before = open_run(path)
    resumed(path, long_chunks, max_iter=ITERATIONS + 4)
    with pytest.raises(CheckpointError, match=r"has moved on.* Open it again"):
        before.active.compute()
    assert open_run(path).iteration == ITERATIONS + 4


def test_an_altered_object_is_refused(tmp_path, long_chunks):
    path = tmp_path / "run.zarr"
    fitted(path, EMTau(tau=3), X=long_chunks)
    run = open_run(path)
    for each in path.glob("attempts/*/rows/c.*"):
        each.write_bytes(each.read_bytes()[:-1])
    with pytest.raises(CheckpointCorruptError, match="has been altered"):
        run.active.compute()


def test_opening_reads_no_row_state_and_one_chunk_reads_one_object(tmp_path, monkeypatch, long_chunks):
    path = tmp_path / "run.zarr"
    fitted(path, EMTau(tau=3), X=long_chunks, max_iter=4)
    read = []
    plain = emtau_dask.storage.stores.LocalObjects.get

    def get(objects, key, limit):
        read.append(key)
        return plain(objects, key, limit)

    monkeypatch.setattr(emtau_dask.storage.stores.LocalObjects, "get", get)
    run = open_run(path)
    assert read
    assert not [key for key in read if "/rows/" in key]
    read.clear()
    dask.compute(run.active.blocks[1], run.label.blocks[1])
    assert len(read) == 1


def test_before_the_first_parameters_all_rows_are_active(tmp_path, seen):
    found = seen(tmp_path / "run.zarr")
    fitted(tmp_path / "run.zarr", EMTau(tau=3), X=ROWS, init_params="kmeans")
    run, rows = found[0]
    assert rows["active"].all()
    assert run.stop_reason is None


def test_a_zarr_store_of_the_users_can_be_opened():
    store = MemoryStore()
    fitted(store, EMTau(tau=3))
    run = open_run(store)
    assert np.array_equal(zarr.open_group(store, mode="r")["rows/active"][:], run.active.compute())


def test_a_name_that_no_array_has_is_refused_with_those_that_there_are(tmp_path):
    fitted(tmp_path / "run.zarr", "em-lazy")
    run = open_run(tmp_path / "run.zarr")
    assert "active" in dir(run)
    with pytest.raises(
        AttributeError, match="'label'; the arrays that this run keeps of its rows are active"
    ):
        run.label  # noqa: B018
