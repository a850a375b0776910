"""The cache of rows: what it finds is what was kept, within its bytes, and nothing of it stays."""

import errno
import mmap
import resource
import subprocess
import sys
import threading
from itertools import count

import dask
import numpy as np
import pytest
from processes import process_of

from emtau_dask.data import cache as rowcache
from emtau_dask.data.cache import CachedRows, RowCache, release_rows

PLENTY = 10**9


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """A store of the test's own."""
    store = rowcache.RowStore()
    monkeypatch.setattr(rowcache, "of_process", lambda make: store)
    return store


@pytest.fixture(autouse=True)
def scratch(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path / "scratch")}):
        yield tmp_path / "scratch"


def rows_at(positions, dtype="f8", weighted=False, source_bytes=PLENTY):
    positions = np.asarray(positions)
    rows = np.outer(positions, [1, 2, 3]).astype(dtype)
    return CachedRows(positions, rows, positions * 0.5 if weighted else None, source_bytes)


def files_in(scratch):
    return [path for path in scratch.rglob("*") if path.is_file() and path.name != "lock"]


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


KINDS = {"memory": PLENTY, "files": 0}


@pytest.fixture(params=KINDS)
def cache(request):
    return RowCache("mine", KINDS[request.param])


def test_a_process_says_which_chunks_it_caches_under_a_name_and_with_which_row_state(cache):
    """A fit sends the tasks of these chunks to that process."""
    for chunk in (2, 5):
        cache.keep(chunk, rows_at([0, 1]))
    cache.keep(3, rows_at([0, 1]), "sample 0")
    cache.keep_state(5, {"active": np.ones(4, np.bool_)}, stored=("digest", 0))
    cache.keep_state(6, {"active": np.ones(4, np.bool_)}, stored=("other", 0))
    state = ("digest", 0) if cache.limit else None
    assert cache.named().chunks() == {2: None, 5: state}
    assert cache.named("sample 0").chunks() == {3: None}
    release_rows("mine")
    assert cache.named().chunks() == {}


class TestWhatIsFound:
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("dtype", ["f8", "f4", "u1", ">i2"])
    def test_is_what_was_kept(self, cache, dtype, weighted):
        kept = rows_at([1, 4, 9], dtype, weighted, source_bytes=12345)
        cache.keep(7, kept)
        found, _ = cache.find(7, np.array([1, 4, 9]))
        assert (found.rows.dtype, found.rows.tobytes()) == (kept.rows.dtype, kept.rows.tobytes())
        assert found.positions.tolist() == [1, 4, 9]
        assert (found.weights is None) is not weighted
        assert not weighted or np.array_equal(found.weights, kept.weights)
        assert found.source_bytes == 12345
        assert not any(array.flags.writeable for array in found.arrays)

    def test_is_nothing_where_one_of_those_wanted_is_missing(self, cache):
        cache.keep(7, rows_at([1, 4, 9]))
        for wanted in ([], [1], [4, 9], [1, 4, 9]):
            assert cache.find(7, np.array(wanted, dtype=int)) is not None, wanted
        for wanted in ([0], [2], [10], [1, 5], [1, 4, 8], [1, 4, 9, 10], [0, 1, 4, 9]):
            assert cache.find(7, np.array(wanted)) is None, wanted
        assert cache.find(8, np.array([1])) is None
        assert RowCache("yours", PLENTY).find(7, np.array([1])) is None

    def test_is_what_was_kept_last(self, cache):
        cache.keep(7, rows_at([1, 4, 9]))
        cache.keep(7, rows_at([4]))
        assert cache.find(7, np.array([4]))[0].positions.tolist() == [4]
        assert cache.find(7, np.array([1, 4])) is None

    def test_is_nothing_after_a_drop(self, cache, scratch):
        cache.keep(7, rows_at([1]))
        cache.drop(7)
        assert cache.find(7, np.array([1])) is None
        assert files_in(scratch) == []

    def test_costs_the_bytes_of_its_file_and_none_from_memory(self, cache, scratch):
        cache.keep(0, rows_at([1, 4], weighted=True))
        files = files_in(scratch)
        assert len(files) == (cache.limit == 0)
        assert cache.find(0, np.array([1]))[1] == sum(file.stat().st_size for file in files)


class TestTheLimit:
    SIZE = rows_at([1, 2]).nbytes

    def test_what_does_not_fit_goes_to_a_file(self, store, scratch):
        cache = RowCache("mine", 2 * self.SIZE)
        for chunk in range(3):
            cache.keep(chunk, rows_at([1, 2]))
            assert cache.find(chunk, np.array([1])) is not None
        assert store._bytes == 2 * self.SIZE
        assert len(files_in(scratch)) == 1

    def test_is_that_of_all_tokens(self, scratch):
        RowCache("yours", self.SIZE).keep(0, rows_at([1, 2]))
        RowCache("mine", self.SIZE).keep(0, rows_at([1, 2]))
        assert len(files_in(scratch)) == 1

    def test_counts_what_was_replaced_or_dropped_no_more(self, scratch):
        cache = RowCache("mine", self.SIZE)
        for _ in range(3):
            cache.keep(0, rows_at([1, 2]))
        cache.drop(0)
        cache.keep(1, rows_at([1, 2]))
        assert files_in(scratch) == []

    def test_what_is_read_from_a_file_stays_in_memory_once_there_is_room(self, store, scratch):
        cache = RowCache("mine", self.SIZE)
        for chunk in range(2):
            cache.keep(chunk, rows_at([1, 2]))
        (file,) = files_in(scratch)
        size = file.stat().st_size
        assert [cache.find(1, np.array([1]))[1] for _ in range(2)] == [size, size]
        cache.drop(0)
        found = [cache.find(1, np.array([1])) for _ in range(2)]
        assert [read for _, read in found] == [size, 0]
        assert found[0][0].rows.tobytes() == found[1][0].rows.tobytes()
        assert (files_in(scratch), store._bytes) == ([], self.SIZE)

    def test_a_file_goes_once_there_is_room_in_memory(self, scratch):
        cache = RowCache("mine", self.SIZE)
        cache.keep(0, rows_at([1, 2, 3]))
        assert len(files_in(scratch)) == 1
        cache.keep(0, rows_at([1, 2]))
        assert files_in(scratch) == []

    def test_no_file_is_larger_than_what_is_read_from_the_source(self, scratch):
        cache = RowCache("mine", 0)
        cache.keep(0, rows_at([1, 2], source_bytes=self.SIZE))
        assert cache.find(0, np.array([1])) is None
        assert files_in(scratch) == []


def state_of(*values):
    return {"active": np.array(values, dtype=bool), "counter": np.array(values, dtype="u2")}


class TestState:
    SIZE = 3 * 4
    CACHE = RowCache("mine", PLENTY)

    def test_is_what_was_kept(self):
        self.CACHE.keep_state(7, state_of(1, 0, 0, 1), "digest")
        found = self.CACHE.find_state(7, "digest")
        assert {name: values.tolist() for name, values in found.items()} == {
            "active": [True, False, False, True],
            "counter": [1, 0, 0, 1],
        }
        assert not any(values.flags.writeable for values in found.values())

    def test_is_what_was_kept_last_of_that_chunk_and_token(self):
        self.CACHE.keep_state(7, state_of(1, 1), "digest")
        self.CACHE.keep_state(7, state_of(1, 0), "newer")
        assert self.CACHE.find_state(7, "digest") is None
        assert self.CACHE.find_state(7, "newer")["active"].tolist() == [True, False]
        assert self.CACHE.find_state(8, "newer") is None
        assert RowCache("yours", PLENTY).find_state(7, "newer") is None

    def test_is_nothing_after_a_drop(self, store):
        self.CACHE.keep_state(7, state_of(1, 1), "digest")
        self.CACHE.record_stored_states({7: None, 8: None})
        assert self.CACHE.find_state(7, "digest") is None
        assert store._bytes == 0

    def test_is_found_where_it_is_stored_once_it_has_been(self, store):
        self.CACHE.keep_state(7, state_of(1, 0))
        self.CACHE.keep_state(8, state_of(1, 1), "digest")
        taken = store._bytes
        self.CACHE.record_stored_states({6: "digest", 7: "digest", 8: "newer"})
        assert self.CACHE.find_state(7, "digest")["active"].tolist() == [True, False]
        assert self.CACHE.find_state(8, "digest")["active"].tolist() == [True, True]
        assert self.CACHE.find_state(6, "digest") is None
        assert self.CACHE.find_state(8, "newer") is None
        assert store._bytes == taken

    def test_rows_and_state_share_the_limit(self, store, scratch):
        cache = RowCache("mine", 4 * self.SIZE)
        cache.keep(0, rows_at([1]))
        assert store._bytes == rows_at([1]).nbytes > 2 * self.SIZE
        for chunk in range(2):
            cache.keep_state(chunk, state_of(1, 1, 1, 1), "digest")
        assert cache.find_state(0, "digest") is not None
        assert cache.find_state(1, "digest") is None
        assert store._bytes == rows_at([1]).nbytes + self.SIZE

    def test_takes_no_more_than_a_quarter_of_it(self, store, scratch):
        cache = RowCache("mine", 4 * (TestTheLimit.SIZE + self.SIZE))
        for chunk in range(1000):
            cache.keep_state(chunk, state_of(1, 1, 1, 1), "digest")
        assert cache.limit // 4 - self.SIZE < store._bytes <= cache.limit // 4
        for chunk in range(3):
            cache.keep(chunk, rows_at([1, 2]))
        assert files_in(scratch) == []

    def test_has_no_room_that_rows_have_taken(self, store):
        cache = RowCache("mine", TestTheLimit.SIZE)
        cache.keep(0, rows_at([1, 2]))
        cache.keep_state(0, state_of(1), "digest")
        assert cache.find_state(0, "digest") is None
        cache.drop(0)
        cache.keep_state(0, state_of(1), "digest")
        assert cache.find_state(0, "digest") is not None

    def test_that_has_no_room_leaves_none_of_before(self, store):
        cache = RowCache("mine", 4 * self.SIZE)
        cache.keep_state(0, state_of(1, 1, 1, 1), "digest")
        cache.keep_state(0, state_of(1, 1, 1, 1, 1), "newer")
        assert cache.find_state(0, "digest") is None
        assert cache.find_state(0, "newer") is None
        assert store._bytes == 0

    def test_goes_with_its_token(self, store):
        self.CACHE.keep_state(7, state_of(1), "digest")
        release_rows("mine")
        assert (store._tokens, store._bytes, store._state_bytes) == ({}, 0, 0)
        self.CACHE.keep_state(7, state_of(1), "digest")
        assert self.CACHE.find_state(7, "digest") is None


class TestFilesThatFail:
    def test_what_cannot_be_written_whole_leaves_what_was_there(self, scratch):
        """The limit of a file's size fails as a full disk does, in the middle of an array."""
        cache = RowCache("mine", 0)
        cache.keep(0, rows_at([1, 2, 3]))
        before, (soft, hard) = files_in(scratch), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        try:
            cache.keep(0, rows_at([1, 2]))
            cache.keep(1, rows_at([1, 2]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert files_in(scratch) == before
        assert cache.find(0, np.array([1]))[0].positions.tolist() == [1, 2, 3]
        assert cache.find(1, np.array([1])) is None

    def test_no_folder_is_no_cache(self, tmp_path):
        (tmp_path / "file").touch()
        cache = RowCache("mine", 0)
        with dask.config.set({"temporary-directory": str(tmp_path / "file")}):
            cache.keep(0, rows_at([1]))
        assert cache.find(0, np.array([1])) is None

    @pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: file.write_bytes(b"\x93NUM")])
    def test_a_file_that_cannot_be_read_is_nothing(self, scratch, harm):
        cache = RowCache("mine", 0)
        cache.keep(0, rows_at([1]))
        (file,) = files_in(scratch)
        harm(file)
        assert cache.find(0, np.array([1])) is None


class TestTheEnd:
    def test_nothing_of_the_token_stays(self, store, scratch):
        mine = RowCache("mine", TestTheLimit.SIZE)
        for chunk in range(3):
            mine.keep(chunk, rows_at([1, 2]))
        release_rows("mine")
        assert (store._tokens, store._bytes) == ({}, 0)
        assert list(scratch.iterdir()) == []

    def test_others_keep_theirs(self, cache):
        RowCache("yours", cache.limit).keep(0, rows_at([1]))
        cache.keep(0, rows_at([1]))
        release_rows("mine")
        assert RowCache("yours", cache.limit).find(0, np.array([1])) is not None

    def test_tasks_that_outlive_it_leave_nothing(self, store, cache, scratch):
        release_rows("mine")
        cache.keep(0, rows_at([1]))
        cache.drop(0)
        assert cache.find(0, np.array([1])) is None
        assert store._tokens == {}
        assert not scratch.exists()

    def test_a_file_under_way_when_it_comes_goes_too(self, store, scratch, monkeypatch):
        cache, write = RowCache("mine", 0), rowcache._CachedFile.write

        def write_late(folder, found):
            release_rows("mine")
            folder.mkdir()
            return write(folder, found)

        monkeypatch.setattr(rowcache._CachedFile, "write", write_late)
        cache.keep(0, rows_at([1]))
        assert list(scratch.iterdir()) == []
        assert store._tokens == {}

    def test_what_is_not_used_for_long_goes_when_another_comes(self, store, cache, scratch, monkeypatch):
        RowCache("old", cache.limit).keep(0, rows_at([1]))
        monkeypatch.setattr(rowcache, "MAX_IDLE_SECONDS", -1.0)
        cache.keep(0, rows_at([1]))
        assert list(store._tokens) == ["mine"]
        assert store._bytes in (0, rows_at([1]).nbytes)
        assert len(files_in(scratch)) == (cache.limit == 0)


KEEPER = """
import sys
import dask, numpy as np
from emtau_dask.data.cache import CachedRows, RowCache
dask.config.set({"temporary-directory": sys.argv[1]})
RowCache("theirs", 0).keep(0, CachedRows(np.arange(3), np.zeros((3, 2)), None, 10**9))
print("kept", flush=True)
sys.stdin.read()
"""
"""Keeps rows in a file until its input ends."""


def test_what_a_killed_process_left_goes_when_another_needs_a_folder(scratch):
    with process_of(KEEPER, scratch) as killed, process_of(KEEPER, scratch) as living:
        assert [process.stdout.readline() for process in (killed, living)] == [b"kept\n"] * 2
        left = files_in(scratch)
        killed.kill()
        killed.wait()
        assert files_in(scratch) == left
        RowCache("mine", 0).keep(0, rows_at([1]))
        assert len({path.parent for path in left} & set(scratch.iterdir())) == 1
        living.stdin.close()
        assert living.wait() == 0
        assert {path.parent for path in left} & set(scratch.iterdir()) == set()
        assert RowCache("mine", 0).find(0, np.array([1])) is not None


@pytest.mark.parametrize(
    ("missing", "stays"), [(None, False), ("boot id", True), ("locks", True), ("a mount in common", True)]
)
def test_what_cannot_be_proved_to_be_left_stays(store, scratch, monkeypatch, missing, stays):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    if missing == "boot id":
        monkeypatch.setattr("emtau_dask.storage.files.BOOT_ID", scratch / "none")
    if missing == "locks":
        monkeypatch.setattr("emtau_dask.storage.files.fcntl.flock", unsupported)
    if missing == "a mount in common":
        mounts = map(str, count())
        monkeypatch.setattr("emtau_dask.storage.files._mount", lambda folder: next(mounts))
    RowCache("yours", 0).keep(0, rows_at([1]))
    folder = store._tokens["yours"].folder
    if folder._lock is not None:
        folder._lock.close()  # as its end would
    RowCache("mine", 0).keep(0, rows_at([1]))
    assert folder.path.exists() == stays


def test_many_threads_at_once(store):
    cache, failures = RowCache("mine", 20 * TestTheLimit.SIZE), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(200):
            chunk, n = int(rng.integers(10)), int(rng.integers(1, 20))
            found = cache.find(chunk, np.arange(n))
            if found is not None and not np.array_equal(found[0].rows[:n], rows_at(np.arange(n)).rows):
                failures.append(chunk)
            cache.keep(chunk, rows_at(np.arange(n)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store._bytes == sum(rows.nbytes for rows in store._tokens["mine"].entries.values()) <= cache.limit


class TestMemoryOfItsOwn:
    """Resident memory is measured in a process of its own, so that nothing else takes or leaves any."""

    PROGRAM = """
import numpy as np
from pathlib import Path
from emtau_dask.data.cache import CachedRows, RowCache, release_rows

def resident():
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])

def keep(cache, chunk):
    rows = np.ones((20_000, 4))
    cache.keep(chunk, CachedRows(np.arange(20_000), rows, None, 10**9))
    gaps.append(np.ones(2_000))  # what stays among the rows, such as positions of a small sample

gaps = []
cache = RowCache("mine", 10**9)
keep(cache, 0)
before = resident()
for chunk in range(1, 101):
    keep(cache, chunk)
kept = resident() - before
for chunk in range(101):
    cache.drop(chunk)
print(kept, resident() - before)
"""

    def test_is_given_back_whatever_lies_beside_it(self):
        kept, left = map(int, run(self.PROGRAM).split())
        stored = 100 * 20_000 * (4 + 1) * 8
        assert stored <= kept <= 1.1 * stored
        assert left <= 0.1 * stored

    @pytest.mark.parametrize("weighted", [False, True])
    def test_is_mapped_for_many_rows_alone(self, weighted):
        cache = RowCache("mine", PLENTY)
        for n in (10, 20_000):
            kept = rows_at(range(n), weighted=weighted)
            cache.keep(n, kept)
            found, read = cache.find(n, kept.positions)
            assert read == 0
            assert [array.tobytes() for array in found.arrays] == [array.tobytes() for array in kept.arrays]
            assert not any(array.flags.writeable for array in found.arrays)
            assert np.shares_memory(found.rows, kept.rows) == (n == 10)

    def test_of_state_too(self):
        cache = RowCache("mine", PLENTY)
        values = {"active": np.arange(300_000) % 3 == 0, "counter": np.arange(300_000, dtype="u2")}
        cache.keep_state(0, values, "here")
        found = cache.find_state(0, "here")
        assert list(found) == list(values)
        for name, array in found.items():
            assert np.array_equal(array, values[name])
            assert array.dtype == values[name].dtype
            assert not array.flags.writeable
            assert not np.shares_memory(array, values[name])

    def test_is_malloc_s_where_none_can_be_mapped(self, monkeypatch):
        def none(*args, **kwargs):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr(mmap, "mmap", none)
        cache, kept = RowCache("mine", PLENTY), rows_at(range(20_000))
        cache.keep(0, kept)
        found, _ = cache.find(0, kept.positions)
        assert np.array_equal(found.rows, kept.rows)
