"""Row state by slot: written anew by every generation, read from the last one, never shared or changed."""

import pickle

import numpy as np
import pytest
import zarr

from emtau_dask.storage import RowStateStore

CHUNK_ROWS = (3, 0, 5, 1)
DTYPES = {"active": np.dtype(bool), "label": np.dtype("uint8"), "count": np.dtype("uint16")}


@pytest.fixture(params=["folder", "memory"])
def group(request, tmp_path):
    store = tmp_path / "state.zarr" if request.param == "folder" else zarr.storage.MemoryStore()
    return zarr.create_group(store=store)


@pytest.fixture
def store(group):
    return RowStateStore(group, CHUNK_ROWS, DTYPES)


def values(slot, fill):
    n = CHUNK_ROWS[slot]
    return {
        "active": np.arange(n) % 2 == 0,
        "label": np.full(n, fill, dtype="uint8"),
        "count": np.full(n, 256 + fill, dtype="uint16"),
    }


def write(store, iteration, slots, fill, forgotten=()):
    generation = store.begin(iteration)
    for slot in slots:
        generation.write(slot, values(slot, fill))
    store.commit(iteration, slots, forgotten)


def assert_holds(found, slot, fill):
    expected = values(slot, fill)
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
        assert found[name].dtype == array.dtype, name


@pytest.mark.parametrize("slot", [0, 2, 3])
def test_what_was_written_is_read(store, slot):
    write(store, 1, [0, 2, 3], 7)
    assert_holds(store.read(slot), slot, 7)


def test_a_chunk_without_rows_has_a_slot(store):
    write(store, 1, [1], 7)
    assert_holds(store.read(1), 1, 7)


def test_nothing_is_there_before_the_first_commit(store):
    store.begin(1).write(0, values(0, 7))
    assert store.latest(0) is None


def test_reading_a_slot_that_has_no_state_is_a_key_error(store):
    with pytest.raises(KeyError):
        store.read(0)


def test_a_new_generation_replaces_what_it_writes(store):
    write(store, 1, [0, 2], 7)
    write(store, 2, [0, 2], 8)
    assert_holds(store.read(0), 0, 8)


def test_a_skipped_slot_keeps_its_last_state(store):
    write(store, 1, [0, 2], 7)
    write(store, 2, [2], 8)
    write(store, 3, [2], 9)
    assert_holds(store.read(0), 0, 7)
    assert_holds(store.read(2), 2, 9)


def test_writing_a_generation_does_not_change_the_one_before(store):
    write(store, 1, [0], 7)
    before = store.latest(0)
    store.begin(2).write(0, values(0, 8))
    assert_holds(before.read(0, CHUNK_ROWS[0]), 0, 7)


def test_a_generation_that_is_not_committed_is_not_read(store):
    write(store, 1, [0], 7)
    store.begin(2).write(0, values(0, 8))
    assert_holds(store.read(0), 0, 7)


def test_writing_a_slot_twice_is_writing_it_once(store):
    generation = store.begin(1)
    generation.write(0, values(0, 7))
    generation.write(0, values(0, 7))
    store.commit(1, [0])
    assert_holds(store.read(0), 0, 7)


def test_generations_that_nothing_refers_to_are_removed(store, group):
    write(store, 1, [0, 2], 7)
    write(store, 2, [0, 2], 8)
    assert set(group.group_keys()) == {"2"}


def test_generations_that_a_skipped_slot_refers_to_stay(store, group):
    write(store, 1, [0, 2], 7)
    write(store, 2, [2], 8)
    write(store, 3, [2], 9)
    assert set(group.group_keys()) == {"1", "3"}


def test_a_forgotten_slot_has_no_state(store):
    write(store, 1, [0, 2], 7)
    write(store, 2, [0, 2], 8, forgotten=[0])
    assert store.latest(0) is None


def test_a_forgotten_slot_frees_its_generation(store, group):
    write(store, 1, [0, 2], 7)
    write(store, 2, [0], 8)
    write(store, 3, [0], 9, forgotten=[2])
    assert set(group.group_keys()) == {"3"}


def test_a_forgotten_slot_can_be_written_again(store):
    write(store, 1, [0], 7, forgotten=[0])
    write(store, 2, [0], 8)
    assert_holds(store.read(0), 0, 8)


def test_every_slot_is_one_zarr_chunk(store):
    for array in store.begin(1).arrays.values():
        assert array.shape == (len(CHUNK_ROWS) * max(CHUNK_ROWS),)
        assert array.chunks == (max(CHUNK_ROWS),)


def test_writing_a_slot_touches_one_chunk_file_of_each_array(tmp_path):
    store = RowStateStore(zarr.create_group(store=tmp_path / "state.zarr"), CHUNK_ROWS, DTYPES)
    store.begin(1).write(2, values(2, 7))
    chunks = [file for file in (tmp_path / "state.zarr/1").rglob("c/*") if file.is_file()]
    assert {(file.parts[-3], file.name) for file in chunks} == {(name, "2") for name in DTYPES}


def test_slots_of_zeros_are_written_too(tmp_path):
    """zarr leaves all-fill chunks out by default; state must never be inferred from absence."""
    store = RowStateStore(zarr.create_group(store=tmp_path / "state.zarr"), CHUNK_ROWS, DTYPES)
    store.begin(1).write(2, {name: np.zeros(5, dtype=dtype) for name, dtype in DTYPES.items()})
    assert all((tmp_path / f"state.zarr/1/{name}/c/2").is_file() for name in DTYPES)


def test_zeros_compress_to_almost_nothing(tmp_path):
    rows = 100_000
    store = RowStateStore(zarr.create_group(store=tmp_path / "state.zarr"), (rows,), DTYPES)
    store.begin(1).write(0, {name: np.zeros(rows, dtype=dtype) for name, dtype in DTYPES.items()})
    stored = sum((tmp_path / f"state.zarr/1/{name}/c/0").stat().st_size for name in DTYPES)
    assert stored < 1000


def test_a_generation_travels_by_pickle(tmp_path):
    store = RowStateStore(zarr.create_group(store=tmp_path / "state.zarr"), CHUNK_ROWS, DTYPES)
    generation = pickle.loads(pickle.dumps(store.begin(1)))
    generation.write(2, values(2, 7))
    store.commit(1, [2])
    assert_holds(store.read(2), 2, 7)
