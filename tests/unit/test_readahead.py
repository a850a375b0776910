"""What tasks will ask for is read while they compute: proved by who waits for whom, not by time."""

import threading
from contextvars import ContextVar

import pytest

from emtau_dask.execution.executor import AheadBudget, ReadAhead

PATIENCE = 60.0
"""Seconds after which a test that waits in vain gives up."""
ALL = 10**9


class Storage:
    """Gives each chunk's number times ten, notes by which thread, and waits where it is told to."""

    def __init__(self, waits_for=None):
        self.readers, self.begun, self.waits_for = [], {}, waits_for or {}

    def event(self, chunk):
        return self.begun.setdefault(chunk, threading.Event())

    def read(self, chunk):
        self.readers.append((chunk, threading.current_thread().name))
        self.event(chunk).set()
        if chunk in self.waits_for:
            assert self.waits_for[chunk].wait(PATIENCE)
        return 10 * chunk

    @property
    def chunks(self):
        return [chunk for chunk, _ in self.readers]

    @property
    def ahead(self):
        return [chunk for chunk, name in self.readers if name.startswith("emtau-read-ahead")]


def budget(limit=ALL, size=1, chunks=range(100)):
    return AheadBudget(limit, dict.fromkeys(chunks, size))


def ahead_of(read, batches, budget):
    ahead = ReadAhead(read, budget)
    ahead.expect(batches)
    return ahead


def readers_left():
    return [thread for thread in threading.enumerate() if thread.name.startswith("emtau-read-ahead")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert readers_left() == []


class TestOverlap:
    def test_the_next_chunk_of_a_batch_is_read_while_one_is_scored(self):
        """The read of each ends only once scoring of the one before has begun."""
        scoring = [threading.Event() for _ in range(4)]
        storage = Storage({chunk: scoring[chunk - 1] for chunk in (1, 2, 3)})
        with ahead_of(storage.read, [(0, 1, 2, 3)], budget()) as ahead:
            for chunk in range(4):
                assert ahead.take(chunk) == 10 * chunk
                scoring[chunk].set()
                if chunk < 3:
                    assert storage.event(chunk + 1).wait(PATIENCE)
        assert storage.ahead == [1, 2, 3]

    def test_so_is_the_first_chunk_of_the_next_batch(self):
        storage = Storage()
        with ahead_of(storage.read, [(0,), (8, 9), (16,)], budget()) as ahead:
            assert ahead.take(0) == 0
            assert storage.event(8).wait(PATIENCE)
            assert ahead.take(8) == 80
            assert storage.event(9).wait(PATIENCE)
            assert ahead.take(9) == 90
            assert storage.event(16).wait(PATIENCE)
            assert ahead.take(16) == 160
        assert storage.ahead == [8, 9, 16]

    def test_each_task_under_way_has_its_own(self):
        """Two tasks have a chunk each; both reads ahead are under way at once, which a barrier proves."""
        both = threading.Barrier(2, timeout=PATIENCE)

        def read(chunk):
            if chunk in (2, 3):
                both.wait()
            return chunk

        with ahead_of(read, [(0, 2), (1, 3)], budget()) as ahead:
            assert [ahead.take(chunk) for chunk in range(4)] == [0, 1, 2, 3]

    def test_the_context_of_the_task_is_that_of_the_read(self):
        told = ContextVar("told")
        with ahead_of(lambda chunk: told.get(None), [(0, 1)], budget()) as ahead:
            told.set("by the task")
            assert (ahead.take(0), ahead.take(1)) == ("by the task", "by the task")


class TestWhatIsRead:
    @pytest.mark.parametrize("limit", [0, 1, 2, ALL])
    @pytest.mark.parametrize(
        "order", [(*range(12),), (*range(11, -1, -1),), (3, 1, 4, 0, 5, 9, 2, 6, 8, 7, 11, 10)]
    )
    def test_every_chunk_once_whatever_the_order(self, limit, order):
        storage = Storage()
        with ahead_of(storage.read, [(chunk,) for chunk in range(12)], budget(limit)) as ahead:
            assert [ahead.take(chunk) for chunk in order] == [10 * chunk for chunk in order]
        assert sorted(storage.chunks) == list(range(12))

    def test_every_chunk_once_by_many_threads(self):
        storage = Storage()
        batches = [tuple(range(first, first + 8)) for first in range(0, 400, 8)]
        found = {}

        def run(mine):
            for batch in mine:
                for chunk in batch:
                    found[chunk] = ahead.take(chunk)

        with ahead_of(storage.read, batches, budget(3, chunks=range(400))) as ahead:
            threads = [threading.Thread(target=run, args=(batches[i::4],)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == {chunk: 10 * chunk for chunk in range(400)}
        assert sorted(storage.chunks) == list(range(400))

    def test_nothing_before_the_first_is_taken_and_nothing_beyond_the_last(self):
        storage = Storage()
        with ahead_of(storage.read, [(0, 1)], budget()) as ahead:
            assert storage.chunks == []
            ahead.take(0)
            ahead.take(1)
        assert storage.chunks == [0, 1]

    def test_no_more_than_the_budget_holds(self):
        """Of three tasks with more to read, two have room; once one of these is taken, there is again."""
        storage = Storage()
        batches = [(0, 1, 2), (8, 9), (16, 17)]
        with ahead_of(storage.read, batches, budget(limit=20, size=10)) as ahead:
            for first in (0, 8, 16):
                ahead.take(first)
            assert storage.event(1).wait(PATIENCE)
            assert storage.event(9).wait(PATIENCE)
            ahead.take(17)
            ahead.take(1)
            assert storage.event(2).wait(PATIENCE)
        assert sorted(storage.ahead) == [1, 2, 9]

    def test_none_that_is_larger_than_the_budget(self):
        storage = Storage()
        with ahead_of(storage.read, [(0, 1, 2)], AheadBudget(10, {0: 10, 1: 11, 2: 10})) as ahead:
            for chunk in range(3):
                ahead.take(chunk)
        assert storage.ahead == [2]


class TestTheEnd:
    def test_an_error_is_that_of_the_chunk_whose_task_asks(self):
        error = ValueError("chunk 1 is damaged")

        def read(chunk):
            if chunk == 1:
                raise error
            return chunk

        with ahead_of(read, [(0, 1, 2)], budget()) as ahead:
            assert ahead.take(0) == 0
            with pytest.raises(ValueError, match="chunk 1 is damaged") as raised:
                ahead.take(1)
            assert raised.value is error
            assert ahead.take(2) == 2

    def test_an_error_that_no_task_asks_for_is_none(self):
        def read(chunk):
            if chunk:
                raise ValueError(chunk)

        with ahead_of(read, [(0, 1)], budget()) as ahead:
            ahead.take(0)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_no_thread_outlasts_it(self, error):
        leaving = threading.Event()
        storage = Storage({1: leaving})

        def fail():
            with ahead_of(storage.read, [(0, 1, 2)], budget()) as ahead:
                ahead.take(0)
                assert storage.event(1).wait(PATIENCE)
                assert len(readers_left()) == 1
                leaving.set()
                raise error

        with pytest.raises(error):
            fail()
        assert readers_left() == []

    def test_a_task_that_outlasts_it_reads_for_itself(self):
        storage = Storage()
        with ahead_of(storage.read, [(0, 1, 2)], budget()) as ahead:
            ahead.take(0)
        assert ahead.take(1) == 10
        assert ahead.take(2) == 20
        assert storage.ahead in ([], [1])  # the read of 1 may have begun before the end
