"""Row state: written anew by every step, one object for the chunks of a task, and never changed."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from numcodecs.zstd import Zstd
from processes import process_of
from tiers import exhaustive_but

from emtau_dask import CheckpointCorruptError, ConfigError, EMLazy, EMStar, EMTau, FullEM
from emtau_dask.data.opening import as_source
from emtau_dask.em.fit import FitSources, fit
from emtau_dask.em.problem import Context
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import FitState, RunState
from emtau_dask.em.state_store import row_fields, temporary_state_store
from emtau_dask.execution.choice import choose_executor
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.policies.policy import NextPass, RowArray, Schedule
from emtau_dask.settings import Settings
from emtau_dask.storage.objects import digest
from emtau_dask.storage.row_state import (
    OBJECT_ROWS,
    RECENT_BYTES,
    SHARING_ROWS,
    RecentObjects,
    RowFields,
    RowStateRef,
    RowStateWriter,
    StateObject,
    StoreMarker,
    most_object_rows,
    rows_layout,
)
from emtau_dask.storage.stores import LocalObjects, object_store

CHUNK_ROWS = (3, 0, 5, 1)
SLOT_ROWS = 5
DTYPES = {"active": np.dtype(bool), "label": np.dtype("uint8"), "count": np.dtype("uint16")}
FIELDS = RowFields.of(DTYPES, SLOT_ROWS)
STEPS = 20


PLACES = {
    "folder": lambda path: path / "state",
    "url": lambda path: f"memory://{path}/state",
    "zarr store": lambda path: zarr.storage.MemoryStore(),
}


@pytest.fixture(params=exhaustive_but({"folder"}, PLACES))
def objects(request, tmp_path):
    store = object_store(PLACES[request.param](tmp_path))
    store.prepare()
    return store


@pytest.fixture
def folder(tmp_path):
    store = object_store(tmp_path / "state")
    store.prepare()
    return store


def writer(objects, step=1, fields=FIELDS):
    objects.put("marker", b"here")
    layout = rows_layout("rows", fields, STEPS, len(CHUNK_ROWS))
    return RowStateWriter(objects, layout, fields, step, StoreMarker.of("marker", b"here"))


def values(slot, fill):
    n = CHUNK_ROWS[slot]
    return {
        "active": np.arange(n) % 2 == 0,
        "label": np.full(n, fill, dtype="uint8"),
        "count": np.full(n, 256 + fill, dtype="uint16"),
    }


def write(objects, step, slots, fill):
    """Write an object for each chunk."""
    return {slot: alone(writer(objects, step), slot, values(slot, fill)) for slot in slots}


def alone(step, slot, state):
    return step.write({slot: state})[slot]


def assert_holds(objects, state, slot, fill):
    found, expected = state.read(objects, CHUNK_ROWS[slot]), values(slot, fill)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
        assert found[name].dtype == array.dtype, name


class TestSlots:
    @pytest.mark.parametrize("objects", PLACES, indirect=True)
    def test_what_was_written_is_read(self, objects):
        """Slot 1 has no rows, slot 3 is the padded last one; both have a slot as all others."""
        for slot, state in write(objects, 1, [0, 1, 2, 3], 7).items():
            assert_holds(objects, state, slot, 7)

    @pytest.mark.parametrize("maximum", [1, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**64 - 1])
    def test_values_up_to_the_largest_that_a_policy_names(self, objects, maximum):
        fields = RowFields.of({"active": np.dtype(bool), "n": RowArray("n", maximum).dtype}, SLOT_ROWS)
        n = np.array([0, maximum, 1], dtype=np.uint64)
        state = alone(writer(objects, fields=fields), 0, {"active": np.ones(3, dtype=bool), "n": n})
        found = state.read(objects, 3)
        assert found["n"].tolist() == [0, maximum, 1]
        assert found["n"].dtype == np.min_scalar_type(maximum)
        assert found["active"].tolist() == [True] * 3

    def test_writing_a_step_does_not_change_the_one_before(self, objects):
        before = write(objects, 1, [0, 2], 7)
        write(objects, 2, [0, 2], 8)
        for slot, state in before.items():
            assert_holds(objects, state, slot, 7)

    def test_no_two_steps_and_no_two_slots_share_an_object(self, objects):
        states = [
            state for step in range(STEPS) for state in write(objects, step, range(4), fill=step).values()
        ]
        keys = [state.object.key for state in states]
        assert len(set(keys)) == len(keys) == STEPS * len(CHUNK_ROWS)
        assert objects.list("rows/") == sorted(keys)

    def test_writing_the_same_again_is_writing_it_once(self, objects):
        """What a task that is repeated does: after a worker's death, or beside one that is slow."""
        first = write(objects, 1, [0, 2], 7)
        before = [objects.get(state.object.key, 10**6) for state in first.values()]
        second = write(objects, 1, [0, 2], 7)
        assert second == first
        assert [objects.get(state.object.key, 10**6) for state in first.values()] == before
        assert objects.list("rows/") == sorted(state.object.key for state in first.values())

    def test_other_values_have_another_digest(self, objects):
        seven, eight = write(objects, 1, [0], 7)[0], write(objects, 2, [0], 8)[0]
        assert seven.object.sha256 != eight.object.sha256
        assert seven.object.sha256 == digest(objects.get(seven.object.key, 10**6))

    def test_zeros_are_written_too_and_compress_to_almost_nothing(self, objects):
        """State must never be inferred from absence."""
        rows = 100_000
        zeros = {name: np.zeros(rows, dtype=dtype) for name, dtype in DTYPES.items()}
        state = alone(writer(objects, fields=RowFields.of(DTYPES, rows)), 0, zeros)
        assert 0 < len(objects.get(state.object.key, 10**6)) < 1000

    def test_writers_and_states_travel_by_pickle(self, folder):
        sent = pickle.loads(pickle.dumps(writer(folder)))
        state = pickle.loads(pickle.dumps(alone(sent, 2, values(2, 7))))
        assert_holds(folder, state, 2, 7)


TOGETHER = RowFields.of(DTYPES, sum(CHUNK_ROWS))


@pytest.fixture
def gets(monkeypatch):
    """The keys of the objects that a folder is asked for."""
    asked, get = [], LocalObjects.get

    def noted(store, key, limit):
        asked.append(key)
        return get(store, key, limit)

    monkeypatch.setattr(LocalObjects, "get", noted)
    return asked


class TestTogether:
    def test_chunks_that_are_written_together_share_an_object(self, objects):
        states = writer(objects, fields=TOGETHER).write({slot: values(slot, 7) for slot in (3, 0, 2, 1)})
        assert objects.list("rows/") == ["rows/c.1.0.0.0"]
        assert {slot: state.first_row for slot, state in states.items()} == {0: 0, 1: 3, 2: 3, 3: 8}
        for slot, state in states.items():
            assert_holds(objects, state, slot, 7)

    def test_they_lie_one_after_another(self, objects):
        state = writer(objects, fields=TOGETHER).write({slot: values(slot, 7) for slot in (0, 3)})[3]
        raw = Zstd().decode(objects.get(state.object.key, 10**6))
        found = np.frombuffer(raw, "<u2").reshape(3, sum(CHUNK_ROWS))
        assert found[0].tolist() == [1, 0, 1, 1, 0, 0, 0, 0, 0]
        assert found[1].tolist() == [7, 7, 7, 7, 0, 0, 0, 0, 0]

    @pytest.mark.parametrize(
        ("room", "firsts"), [(5, [0, 2, 3]), (6, [0, 2]), (7, [0, 2]), (8, [0, 3]), (9, [0])]
    )
    def test_an_object_has_as_many_as_there_is_room_for(self, objects, room, firsts):
        step = writer(objects, fields=RowFields.of(DTYPES, room))
        states = step.write({slot: values(slot, 7) for slot in range(4)})
        assert objects.list("rows/") == [f"rows/c.1.{first}.0.0" for first in firsts]
        for slot, state in states.items():
            assert_holds(objects, state, slot, 7)

    def test_what_changes_is_written_and_the_rest_stays_where_it_is(self, objects):
        states = writer(objects, 1, TOGETHER).write({slot: values(slot, 7) for slot in range(4)})
        states |= writer(objects, 2, TOGETHER).write({slot: values(slot, 8) for slot in (2, 3)})
        assert objects.list("rows/") == ["rows/c.1.0.0.0", "rows/c.2.2.0.0"]
        for slot, fill in enumerate((7, 7, 8, 8)):
            assert_holds(objects, states[slot], slot, fill)

    def test_tasks_that_read_one_chunk_after_another_get_the_object_once(self, folder, gets):
        step = writer(folder, fields=TOGETHER)
        states = step.write({slot: values(slot, 7) for slot in range(4)})
        for slot, state in states.items():
            found = step.read(state, CHUNK_ROWS[slot])
            assert found["count"].tolist() == values(slot, 7)["count"].tolist()
        assert gets == ["rows/c.1.0.0.0"]

    def test_so_do_threads_side_by_side(self, folder, gets):
        step = writer(folder, fields=TOGETHER)
        states = step.write({slot: values(slot, 9) for slot in range(4)})
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: step.read(states[i % 4], CHUNK_ROWS[i % 4]), range(80)))
        assert all(state["label"].tolist() == [9] * CHUNK_ROWS[i % 4] for i, state in enumerate(found))
        assert gets == ["rows/c.1.0.0.0"]

    def test_an_object_that_could_not_be_read_is_asked_for_again(self, folder):
        step = writer(folder, fields=TOGETHER)
        states = step.write({slot: values(slot, 11) for slot in range(4)})
        whole = folder.get("rows/c.1.0.0.0", 10**6)
        folder.put("rows/c.1.0.0.0", flipped(whole))
        for _ in range(2):
            with pytest.raises(CheckpointCorruptError, match="has been altered"):
                step.read(states[2], 5)
        folder.put("rows/c.1.0.0.0", whole)
        assert step.read(states[2], 5)["label"].tolist() == [11] * 5

    def test_only_so_many_bytes_are_kept(self, folder, gets):
        """Each of six objects takes a quarter of them: the first two are forgotten."""
        fields = RowFields.of(DTYPES, RECENT_BYTES // 4 // 2 // len(DTYPES))
        stored = [writer(folder, step, fields).write({0: values(0, step)})[0].object for step in range(1, 7)]
        recent = RecentObjects()
        for each in (*stored, *reversed(stored)):
            assert recent.read(each, folder)[1, 0] == stored.index(each) + 1
        assert gets == [each.key for each in (*stored, stored[1], stored[0])]

    def test_chunks_beyond_the_end_of_an_object_are_refused(self, objects):
        state = writer(objects, fields=TOGETHER).write({2: values(2, 7)})[2]
        with pytest.raises(CheckpointCorruptError, match="ends before row 10"):
            RowStateRef(state.object, 5).read(objects, 5)

    @pytest.mark.parametrize(
        ("lengths", "rows"),
        [
            ([], 0),
            ([(0, 5)], 0),
            ([(100, 3)], 300),
            ([(100, 10_000)], OBJECT_ROWS),
            ([(SHARING_ROWS, 2), (3, 1)], 2 * SHARING_ROWS + 3),
            ([(SHARING_ROWS + 1, 2), (3, 1)], SHARING_ROWS + 1),
            ([(10**6, 1), (100, 10_000)], 10**6),
            ([(10**9, 0), (7, 1)], 7),
        ],
    )
    def test_the_rows_of_an_object(self, lengths, rows):
        assert most_object_rows(lengths) == rows

    def test_chunks_of_a_graph_have_an_object_each_as_they_have_a_task_each(self):
        rows = as_source(da.zeros((9, 2), chunks=((3, 5, 1), 2)) + 1, ndim=2, what="X")
        assert row_fields(rows, 4, EMStar(), 500).object_rows == 5


class TestLayout:
    def test_an_object_is_a_slot_padded_with_zeros(self, objects):
        """Fields by rows, little-endian in the widest of their types, zstd."""
        state = write(objects, 1, [3], 7)[3]
        raw = Zstd().decode(objects.get(state.object.key, 10**6))
        expected = [[1, 0, 0, 0, 0], [7, 0, 0, 0, 0], [263, 0, 0, 0, 0]]
        assert np.frombuffer(raw, "<u2").reshape(3, SLOT_ROWS).tolist() == expected

    def test_zarr_reads_it(self, folder):
        write(folder, 1, [0, 2], 7)
        write(folder, 2, [2], 8)
        folder.put("rows/zarr.json", rows_layout("rows", FIELDS, STEPS, len(CHUNK_ROWS)).document())
        array = zarr.open_array(Path(folder.root, "rows"), mode="r")
        assert array.shape == (STEPS, len(CHUNK_ROWS), len(DTYPES), SLOT_ROWS)
        assert array.attrs["fields"] == list(DTYPES)
        assert array[1, 0, :, :3].tolist() == [values(0, 7)[name].tolist() for name in DTYPES]
        assert array[2, 2].tolist() == [values(2, 8)[name].tolist() for name in DTYPES]
        assert not array[1, 3].any()

    @pytest.mark.parametrize(
        ("dtypes", "stored"),
        [
            ([bool], "uint8"),
            ([bool, "uint8"], "uint8"),
            (["uint8", "uint16", bool], "uint16"),
            ([bool, "uint32", "uint16"], "uint32"),
            ([bool, "uint64"], "uint64"),
        ],
    )
    def test_fields_are_stored_in_the_widest_of_their_types(self, dtypes, stored):
        named = {f"f{i}": np.dtype(dtype) for i, dtype in enumerate(dtypes)}
        assert RowFields.of(named, 1).stored == np.dtype(stored)

    @pytest.mark.parametrize(
        ("policy", "names", "dtypes"),
        [
            (EMTau(tau=20), ("active", "label", "count"), ("bool", "uint8", "uint8")),
            (EMTau(tau=300), ("active", "label", "count"), ("bool", "uint8", "uint16")),
            (EMStar(), ("active",), ("bool",)),
            (EMLazy(), ("active",), ("bool",)),
        ],
        ids=repr,
    )
    def test_the_fields_of_a_policy(self, policy, names, dtypes):
        rows = as_source(np.zeros((9, 2)), ndim=2, what="X").aligned(CHUNK_ROWS)
        assert row_fields(rows, 4, policy, 500) == RowFields(names, dtypes, sum(CHUNK_ROWS))

    def test_a_policy_that_keeps_nothing_has_no_fields(self):
        rows = as_source(np.zeros((9, 2)), ndim=2, what="X")
        assert row_fields(rows, 4, FullEM(), 50) is None


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE = [
    flipped,
    lambda data: data[:-1],
    lambda data: data + b"\0",
    lambda data: data + bytes(10**6),
    lambda data: b"",
]


class TestDamage:
    @pytest.mark.parametrize("objects", PLACES, indirect=True)
    def test_an_object_that_is_altered_or_missing_is_refused_by_name(self, objects):
        states = write(objects, 1, [0, 2], 7)
        state, key = states[2], states[2].object.key
        whole, other = (objects.get(each.object.key, 10**6) for each in (state, states[0]))
        for damaged in (other, *(damage(whole) for damage in DAMAGE)):
            objects.put(key, damaged)
            with pytest.raises(CheckpointCorruptError, match=rf"{key} in .* has been altered"):
                state.read(objects, 5)
        objects.delete([key])
        with pytest.raises(CheckpointCorruptError, match=rf"{key} in .* is missing"):
            state.read(objects, 5)

    def test_a_slot_never_written_is_missing_and_not_zero(self, objects):
        write(objects, 1, [0], 7)
        key = rows_layout("rows", FIELDS, STEPS, len(CHUNK_ROWS)).chunk_key(1, 2)
        with pytest.raises(CheckpointCorruptError, match="is missing"):
            RowStateRef(StateObject(key, digest(b""), FIELDS), 0).read(objects, 5)

    @pytest.mark.parametrize(
        "data",
        [
            b"no zstd",
            Zstd().encode(bytes(3 * SLOT_ROWS * 2 - 1)),
            Zstd().encode(bytes(3 * SLOT_ROWS * 2 + 1)),
            Zstd().encode(bytes(10**6)),
        ],
        ids=["nonsense", "too short", "too long", "a bomb"],
    )
    def test_an_object_of_another_size_is_refused(self, objects, data):
        """Its digest is right: a checkpoint that a stranger made."""
        objects.put("rows/c.1.2.0.0", data)
        with pytest.raises(CheckpointCorruptError, match=r"rows/c\.1\.2\.0\.0 in .* cannot be decoded"):
            RowStateRef(StateObject("rows/c.1.2.0.0", digest(data), FIELDS), 0).read(objects, 5)

    @pytest.mark.parametrize(("field", "limit"), [("active", 1), ("label", 255)])
    def test_a_value_above_its_fields_limit_is_refused(self, objects, field, limit):
        for value, refused in [(limit, False), (limit + 1, True), (2**16 - 1, True)]:
            slot = np.zeros((3, SLOT_ROWS), dtype="<u2")
            slot[list(DTYPES).index(field), 2] = value
            data = bytes(Zstd().encode(slot.tobytes()))
            objects.put("rows/c.1.2.0.0", data)
            state = RowStateRef(StateObject("rows/c.1.2.0.0", digest(data), FIELDS), 0)
            if refused:
                with pytest.raises(CheckpointCorruptError, match=f"{field} is above {limit}"):
                    state.read(objects, 5)
            else:
                assert state.read(objects, 5)[field][2] == limit


THETA = MixtureParameters("full", np.ones(1), np.zeros((1, 2)), np.eye(2)[None], np.eye(2)[None])


def run_with(slots):
    return RunState(THETA, None, row_state=slots)


@pytest.fixture
def temporary(tmp_path):
    """Dask's temporary directory, which need not be there yet."""
    folder = tmp_path / "not" / "there yet"
    with dask.config.set({"temporary-directory": str(folder)}):
        yield folder


def files_in(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()}


INTERRUPTED = """
import os, sys
from emtau_dask.storage.files import ScratchFolder
mkdir = os.mkdir
def interrupted(path, *arguments):
    mkdir(path, *arguments)
    if "emtau-state-" in str(path):
        print("made", os.path.basename(path))
        raise KeyboardInterrupt
os.mkdir = interrupted
try:
    ScratchFolder("emtau-state-", sys.argv[1])
except KeyboardInterrupt:
    sys.exit(130)
"""

KEEPER = """
import sys
import dask, numpy as np
from emtau_dask.em.state_store import temporary_state_store
from emtau_dask.storage.row_state import RowFields
dask.config.set({"temporary-directory": sys.argv[1]})
with temporary_state_store(RowFields(("active",), ("bool",), 5), 1) as state_store:
    state = state_store.writer().write({0: {"active": np.ones(5, bool)}})[0]
    print(state_store.objects.root, flush=True)
    sys.stdin.read()
    assert state.read(state_store.objects, 5)["active"].all()
"""
"""Holds row state until its input ends, and reads it then."""


class TestTemporaryJournal:
    def test_state_that_was_superseded_is_removed(self, temporary):
        with temporary_state_store(FIELDS, len(CHUNK_ROWS)) as state_store:
            first = write_all(state_store, 7)
            state_store.save(FitState(current=run_with(first)), commit=False)
            second = first | {2: alone(state_store.writer(), 2, values(2, 8))}
            assert_holds(state_store.objects, first[2], 2, 7)
            state_store.save(FitState(current=run_with(second)), commit=False)
            assert state_store.objects.list("rows/") == sorted(state.object.key for state in second.values())
            with pytest.raises(CheckpointCorruptError):
                first[2].read(state_store.objects, 5)

    def test_the_best_run_keeps_its_state_while_another_goes_on(self, temporary):
        with temporary_state_store(FIELDS, len(CHUNK_ROWS)) as state_store:
            best, current = write_all(state_store, 7), write_all(state_store, 8)
            state_store.save(FitState(current=run_with(current), best=run_with(best)), commit=True)
            assert_holds(state_store.objects, best[2], 2, 7)
            state_store.save(FitState(current=run_with(current)), commit=True)
            assert state_store.objects.list("rows/") == sorted(state.object.key for state in current.values())

    def test_it_lies_in_dasks_temporary_directory_and_leaves_nothing(self, temporary):
        with temporary_state_store(FIELDS, len(CHUNK_ROWS)) as state_store:
            state = write_all(state_store, 7)[2]
            assert Path(state.object.key).name in files_in(temporary)
        assert list(temporary.iterdir()) == []

    def test_it_leaves_nothing_behind_where_the_fit_fails(self, temporary):
        def fail():
            with temporary_state_store(FIELDS, len(CHUNK_ROWS)) as state_store:
                write_all(state_store, 7)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert list(temporary.iterdir()) == []

    def test_it_leaves_nothing_behind_where_it_is_interrupted_at_once(self, temporary, monkeypatch):
        def interrupted(file, operation):
            raise KeyboardInterrupt

        monkeypatch.setattr("emtau_dask.storage.files.fcntl.flock", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised, temporary_state_store(FIELDS, len(CHUNK_ROWS)):
            pass
        assert raised.traceback  # It keeps what it went through, as it does at the end of a command.
        assert list(temporary.iterdir()) == []

    def test_it_leaves_nothing_behind_where_it_is_interrupted_while_it_is_made(self, temporary):
        """Right after the folder is there, in a process that then ends."""
        ended = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, str(temporary)], capture_output=True, text=True
        )
        assert ended.stdout.startswith("made emtau-state-"), ended.stderr
        assert ended.returncode == 130
        assert list(temporary.iterdir()) == []

    @pytest.mark.kills
    def test_what_a_killed_process_left_goes_with_the_next_fit(self, temporary):
        with process_of(KEEPER, temporary) as killed, process_of(KEEPER, temporary) as living:
            roots = [Path(process.stdout.readline().decode().strip()) for process in (killed, living)]
            killed.kill()
            killed.wait()
            assert [files_in(root) for root in roots] == [{"c.1.0.0.0", "marker"}] * 2
            with temporary_state_store(FIELDS, len(CHUNK_ROWS)) as state_store:
                state = write_all(state_store, 7)[2]
                assert [root.parent.exists() for root in roots] == [False, True]
                living.stdin.close()
                assert living.wait() == 0
                assert_holds(state_store.objects, state, 2, 7)
        assert list(temporary.iterdir()) == []

    def test_policies_without_row_state_need_no_place(self, temporary):
        with temporary_state_store(None, len(CHUNK_ROWS)) as state_store:
            assert state_store.writer() is None
            state_store.save(FitState(current=run_with({})), commit=True)
        assert not temporary.exists()

    def test_no_place_for_it_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with (
            dask.config.set({"temporary-directory": str(tmp_path / "file")}),
            pytest.raises(ConfigError, match=r"row state cannot be kept in .*file.*temporary-directory"),
            temporary_state_store(FIELDS, len(CHUNK_ROWS)),
        ):
            pass


def write_all(state_store, fill):
    step = state_store.writer()
    return {slot: alone(step, slot, values(slot, fill)) for slot in range(len(CHUNK_ROWS))}


class Rest:
    """Rows of component 0 rest after their first iteration, all others never; each counts its iterations."""

    def row_arrays(self, n_components, max_iter):
        return (RowArray("seen", max_iter, keep=True), RowArray("counted", max_iter))

    def update(self, state, evidence):
        seen = state["seen"] + 1
        return {"seen": seen, "counted": seen}, evidence.labels != 0

    def schedule(self, summary):
        return Schedule(NextPass.ACTIVE, test_tol=False)


FIT_ROWS = (30, 0, 20, 10)
"""Chunk 0: component 0, far from all; chunk 2: both; chunk 3: component 1."""


class TestInAFit:
    @pytest.fixture(scope="class")
    @classmethod
    def watched(cls):
        """A fit of 15 iterations, and after each save what the run refers to, has, and holds."""
        sides = np.repeat([0, 0, 1, 1], [30, 10, 10, 10])
        rows = np.random.default_rng(3).normal(size=(60, 2)) + 200.0 * sides[:, None]
        source = as_source(rows, ndim=2, what="X").aligned(FIT_ROWS)
        eyes = np.array([np.eye(2)] * 2)
        given = GivenParameters(np.full(2, 0.5), np.array([[0.0, 0.0], [200.0, 200.0]]), (eyes, eyes))
        settings = EmSettings(Settings(2, max_iter=15), Rest(), 0.0, given=given)
        seen = []
        with temporary_state_store(row_fields(source, 2, Rest(), 15), len(FIT_ROWS)) as state_store:
            save = state_store.save

            def watch(state, *, commit):
                save(state, commit=commit)
                slots = state.current.row_state
                read = {
                    chunk: slot.read(state_store.objects, FIT_ROWS[chunk]) for chunk, slot in slots.items()
                }
                seen.append((state.current.iteration, dict(slots), state_store.objects.list("rows/"), read))

            state_store.save = watch
            fit(settings, FitSources(source), choose_executor(), state_store, Context())
        return sides, {iteration: rest for iteration, *rest in seen}

    def test_it_ran(self, watched):
        assert list(watched[1]) == list(range(16))

    def test_nothing_is_kept_but_the_last_state_of_each_chunk(self, watched):
        for slots, keys, _ in watched[1].values():
            assert keys == sorted({slot.object.key for slot in slots.values()})

    def test_a_chunk_without_active_rows_is_not_written_again(self, watched):
        """An iteration writes one object, since all chunks share a task: of those with active rows."""
        keys = {
            i: {chunk: slot.object.key for chunk, slot in slots.items()}
            for i, (slots, _, _) in watched[1].items()
        }
        assert keys[0] == {}
        assert keys[1] == dict.fromkeys([0, 2, 3], "rows/c.1.0.0.0")
        for i in range(2, 16):
            assert keys[i] == {0: keys[1][0], 2: f"rows/c.{i}.2.0.0", 3: f"rows/c.{i}.2.0.0"}

    def test_the_state_is_that_of_every_row(self, watched):
        sides, saved = watched
        bounds = (0, *accumulate(FIT_ROWS))
        for iteration, (_, _, found) in saved.items():
            for chunk, state in found.items():
                start, stop = list(pairwise(bounds))[chunk]
                active = sides[start:stop] == 1
                assert state["active"].tolist() == active.tolist()
                assert state["seen"].tolist() == np.where(active, iteration, 1).tolist()
                assert state["counted"].tolist() == np.where(active, iteration, 0).tolist()
