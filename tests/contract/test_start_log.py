"""Where a run begins while another process begins, goes on or ends one there: nothing of its is lost."""

import uuid

import pytest
from zarr.storage import MemoryStore

from emtau_dask.errors import CheckpointError, CheckpointExistsError, CheckpointTakenError
from emtau_dask.storage.commits import open_log, start_log
from emtau_dask.storage.stores import object_store

PLACES = {
    "folder": lambda path: str(path / uuid.uuid4().hex / "run.zarr"),
    "URL": lambda path: f"memory://{uuid.uuid4().hex}/run.zarr",
    "zarr store": lambda path: MemoryStore(),
}


class Meanwhile:
    """A store that has something done before the call of a number, from 1."""

    def __init__(self, objects, number, do):
        self._objects, self._left, self._do = objects, number, do

    @property
    def over(self):
        return self._left > 0

    def __getattr__(self, name):
        value = getattr(self._objects, name)
        if not callable(value):
            return value

        def call(*arguments):
            self._left -= 1
            if self._left == 0:
                self._do()
            return value(*arguments)

        return call


class Run:
    """A run of one commit, made by a process of its own."""

    def __init__(self, objects, overwrite):
        self.error = self.log = None
        try:
            self.log = start_log(objects, overwrite=overwrite)
        except CheckpointError as error:
            self.error = error

    def commit(self):
        """Write it, unless it has been replaced."""
        try:
            self._commit()
        except CheckpointTakenError as error:
            self.error = error
        return self

    def _commit(self):
        attempt = f"0-{uuid.uuid4().hex}"
        self.keys = keys = [f"attempts/{attempt}/rows/c.{i}" for i in range(3)]
        for key in keys:
            self.log.objects.put(key, attempt.encode())
        self.log.written(keys)
        self.log.append({"attempt": attempt, "keys": keys}, keys)


def assert_whole(objects, run, replaced=None):
    """There is one commit, a run's, with all that it refers to, and nothing of one that was replaced."""
    log = open_log(objects)
    manifest = log.read(log.last)
    assert manifest["run"] == run.log.run
    assert all(objects.get(key, 100) == manifest["attempt"].encode() for key in manifest["keys"])
    assert log.numbers() == [0]
    assert all(key.endswith("zarr.json") or key.startswith("attempts/") for key in objects.list(""))
    assert replaced is None or not set(objects.list("")) & set(replaced.keys)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("earlier", [False, True], ids=["nothing there", "a run there"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_another_process_runs_to_its_end_at_any_moment(place, earlier, overwrite, tmp_path):
    """That is, before any of the calls by which a run begins."""
    ends, number = set(), 0
    while True:
        number += 1
        objects = object_store(PLACES[place](tmp_path))
        first = Run(objects, False).commit() if earlier else None
        others = []

        def other(objects=objects, others=others):
            run = Run(objects, overwrite)
            others.append(run if run.error else run.commit())

        watched = Meanwhile(objects, number, other)
        run = Run(watched, overwrite)
        if watched.over:
            break
        if not run.error:
            run.log.objects = objects
            run.commit()
        won = [each for each in (run, *others) if not each.error]
        refused = {type(each.error) for each in (run, *others) if each.error}
        assert refused <= {CheckpointTakenError, CheckpointExistsError}, number
        if not run.error:
            ends.add("the first")
            assert_whole(objects, run, first)
        elif won:
            ends.add("the other")
            assert_whole(objects, won[0], first)
        else:
            ends.add("neither")
            assert_whole(objects, first)
    expected = {"the first", "the other"} if overwrite or not earlier else {"neither"}
    assert ends == expected


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_goes_on_with_the_replaced_run_cannot_harm_the_new_one(place, tmp_path):
    """Wherever in the replacing it writes its next commit."""
    number = 0
    while True:
        number += 1
        objects = object_store(PLACES[place](tmp_path))
        first, others = Run(objects, False).commit(), []

        def go_on(first=first, others=others):
            others.append(first.commit().error)

        watched = Meanwhile(objects, number, go_on)
        run = Run(watched, True)
        if watched.over:
            break
        run.log.objects = objects
        assert_whole(objects, run.commit())
        assert all(error is None or type(error) is CheckpointTakenError for error in others)
    assert number > 5


@pytest.mark.parametrize("place", PLACES)
def test_what_somebody_else_puts_there_after_the_check_stays(place, tmp_path):
    number = 0
    while True:
        number += 1
        objects = object_store(PLACES[place](tmp_path))

        def put(objects=objects):
            objects.prepare()
            objects.put("notes/mine.txt", b"mine")

        watched = Meanwhile(objects, number, put)
        run = Run(watched, False)
        if watched.over:
            break
        assert objects.get("notes/mine.txt", 100) == b"mine"
        assert (run.error is None) == (number > 1)


@pytest.mark.parametrize("place", ["URL", "zarr store"])
def test_a_process_that_was_killed_while_it_replaced_a_run_is_named_to_the_next(place, tmp_path):
    objects = object_store(PLACES[place](tmp_path))
    Run(objects, False).commit()
    assert objects.create("replacing", b"theirs")
    refused = Run(objects, True)
    assert isinstance(refused.error, CheckpointTakenError)
    assert "remove the object 'replacing' there" in str(refused.error)
    objects.delete(["replacing"])
    assert_whole(objects, Run(objects, True).commit())
