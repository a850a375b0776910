"""What every store of objects promises: whole objects, created exclusively, listed and removed by key."""

import asyncio
import errno
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from sklearn.exceptions import ConvergenceWarning
from zarr.storage import MemoryStore

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.checkpoint.reader import read_newest
from emtau_dask.errors import CheckpointError, CheckpointTakenError
from emtau_dask.storage import files
from emtau_dask.storage.commits import open_log, start_log
from emtau_dask.storage.files import each
from emtau_dask.storage.stores import LocalObjects, object_store, objects_below

PLACES = {
    "folder": lambda path: str(path / "objects"),
    "folder without hard links": lambda path: str(path / "objects"),
    "URL": lambda path: f"memory://{uuid.uuid4().hex}/objects",
    "zarr store": lambda path: MemoryStore(),
    "part of a folder": lambda path: objects_below(object_store(str(path / "objects")), "a/part"),
    "part of a URL": lambda path: objects_below(
        object_store(f"memory://{uuid.uuid4().hex}/objects"), "a/part"
    ),
    "part of a zarr store": lambda path: objects_below(object_store(MemoryStore()), "a/part"),
}


def no_links(source, target):
    """What FAT says."""
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)


@pytest.fixture(params=PLACES)
def objects(request, tmp_path, monkeypatch):
    if "without hard links" in request.param:
        monkeypatch.setattr(os, "link", no_links)
    store = object_store(PLACES[request.param](tmp_path))
    assert store.empty()
    store.prepare()
    return store


def test_what_was_put_is_there_until_something_else_is(objects):
    for data in (b"first, longer", b"second", b""):
        objects.put("a/b/c.0", data)
        assert objects.get("a/b/c.0", 100) == data
    objects.sync(["a/b/c.0"])
    assert objects.get("a/b/c.0", 100) == b""
    for key in ("y", "a/y", "a", "a/b", "a/b/c.0/y"):
        assert objects.get(key, 100) is None, key


def test_only_the_first_creates_and_again_after_a_deletion(objects):
    assert objects.create("commits/0/zarr.json", b"first")
    assert not objects.create("commits/0/zarr.json", b"second")
    assert objects.get("commits/0/zarr.json", 100) == b"first"
    objects.delete(["commits/0/zarr.json"])
    assert objects.create("commits/0/zarr.json", b"third")
    assert objects.get("commits/0/zarr.json", 100) == b"third"


@pytest.mark.parametrize("objects", [name for name in PLACES if "URL" not in name], indirect=True)
def test_one_of_several_threads_creates(objects):
    barrier = threading.Barrier(8)

    def create(number):
        barrier.wait(60)
        return objects.create("a/x", f"{number}".encode() * 1000)

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(create, range(8)))
        assert sum(made) == 1
        assert objects.get("a/x", 10_000) == f"{made.index(True)}".encode() * 1000
        assert objects.list("") == ["a/x"]
        objects.delete(["a/x"])


def test_a_file_system_that_cannot_create_exclusively_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(files, "_renameat2", lambda: None)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} .*choose a place on another"):
        start_log(object_store(str(tmp_path)), overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_listing_is_by_folder_and_sorted_and_what_is_deleted_is_gone(objects):
    for key in ("b/y", "a/x", "a/c/d", "ab/z", "top"):
        objects.put(key, b"1")
    assert objects.list("a/") == ["a/c/d", "a/x"]
    assert objects.list("") == ["a/c/d", "a/x", "ab/z", "b/y", "top"]
    assert objects.list("none/") == []
    objects.delete(["a/x", "a/never", "never/there"])
    assert objects.list("") == ["a/c/d", "ab/z", "b/y", "top"]
    assert objects.get("a/x", 100) is None
    assert not objects.empty()
    objects.delete(objects.list(""))
    assert objects.empty()


def test_one_at_a_time_may_replace_what_is_there(objects):
    def claim():
        with objects.claimed():
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            claim()
    with (
        objects.claimed(),
        pytest.raises(CheckpointTakenError, match=r"another process is replacing the run"),
    ):
        claim()
    assert objects.empty()


def test_a_store_is_itself_a_location_and_a_class_is_no_store(objects):
    assert object_store(objects) is objects
    assert objects.location
    with pytest.raises(CheckpointError, match="give a path, a URL or a zarr store"):
        object_store(LocalObjects)


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_folder_that_vanishes_while_folders_are_made_in_it_is_not_made_again(tmp_path, monkeypatch, moment):
    root, made = tmp_path / "objects", []
    store = object_store(str(root))
    store.prepare()
    mkdir = os.mkdir

    def vanishing(*args, **kwargs):
        made.append(args)
        if len(made) == moment:
            root.rename(tmp_path / "elsewhere")
        mkdir(*args, **kwargs)

    monkeypatch.setattr(os, "mkdir", vanishing)
    with pytest.raises(CheckpointError, match=rf"{root} .*has vanished: restore it"):
        store.put("a/b/c/x", b"1")
    assert len(made) == moment
    assert not root.exists()


def test_zarr_reads_every_array_of_a_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    rows = da.from_array(np.concatenate([rng.normal(c, 1, (40, 2)) for c in (-2, 2)]), chunks=(30, 2))
    path = tmp_path / "run.zarr"
    model = GaussianMixture(2, algorithm=EMTau(tau=2), random_state=0, max_iter=4, tol=0.0, checkpoint=path)
    with dask.config.set(scheduler="synchronous"), pytest.warns(ConvergenceWarning):
        model.fit(rows)
    objects = object_store(path)
    saved = read_newest(open_log(objects))
    group = zarr.open_group(path, mode="r")
    manifest = group[f"commits/{saved.number}"].attrs.asdict()
    assert manifest["number"] == saved.number
    run = saved.state.current
    entry = manifest["fit"]["current"]
    expected = {name: getattr(run.parameters, name) for name in entry["parameters"]}
    if run.frozen is not None:
        for name in ("weights", "means", "scatter"):
            expected[f"frozen_{name}"] = getattr(run.frozen.statistics, name)
    refs = entry["parameters"] | (entry["frozen"] or {"statistics": {}})["statistics"]
    for name, values in expected.items():
        folder, _, chunk = refs[name]["key"].rpartition("/")
        step = int(chunk.split(".")[1])
        array = group[folder]
        assert array.shape[1:] == values.shape
        assert np.asarray(array[step]).tobytes() == values.tobytes(), name
    for chunk, slot in run.row_state.items():
        folder, _, key = slot.object.key.rpartition("/")
        array = group[folder]
        step, first = map(int, key.split(".")[1:3])
        begin, n_rows = slot.first_row, rows.chunks[0][chunk]
        stored = dict(zip(array.attrs["fields"], np.asarray(array[step, first]), strict=True))
        for name, values in slot.read(objects, n_rows).items():
            assert np.array_equal(stored[name][begin : begin + n_rows], values), name


def test_all_calls_side_by_side_have_ended_when_one_raises():
    begun, ended = threading.Event(), []

    def call(number):
        if number == 0:
            assert begun.wait(60)
            raise KeyError(number)
        begun.set()
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(KeyError):
        each(call, [0, 1])
    assert ended == [1]


def test_calls_side_by_side_may_make_such_calls_themselves():
    """There are more of them than threads, so that none would be left for the inner ones."""
    assert each(lambda i: each(lambda j: j, [i, i + 1]), range(40)) == [[i, i + 1] for i in range(40)]


def test_of_many_threads_one_creates_an_object_whatever_the_zarr_store():
    """Also where the store waits between looking and writing."""

    class Slow(MemoryStore):
        async def get(self, *arguments, **options):
            found = await super().get(*arguments, **options)
            await asyncio.sleep(0.01)
            return found

    objects, won = object_store(Slow()), []
    threads = [threading.Thread(target=lambda: won.append(objects.create("one", b"x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


@pytest.mark.parametrize("place", ["folder", "URL", "zarr store"])
def test_a_part_is_the_objects_below_a_folder_and_no_others(tmp_path, place):
    whole = object_store(PLACES[place](tmp_path))
    whole.prepare()
    part = objects_below(whole, "a/part")
    assert part.empty()
    for key in ("a/part/x", "a/part/c/y", "a/partial/z", "a/top"):
        whole.put(key, key.encode())
    assert part.list("") == ["c/y", "x"]
    assert part.get("x", 100) == b"a/part/x"
    assert not part.create("c/y", b"second")
    part.delete(part.list(""))
    assert whole.list("") == ["a/partial/z", "a/top"]
    assert part.location == f"{whole.location}/a/part"
    assert (part.shared, part.exclusive) == (whole.shared, whole.exclusive)
