"""The budget of reads under way: never exceeded, never in the way of one read alone, always given back."""

import threading

import pytest

from emtau_dask.data.zarr_arrays import ReadBudget


class Meter:
    """Runs reads of given sizes in threads of their own; `high` is the most bytes held at once."""

    def __init__(self, budget):
        self.budget, self.lock = budget, threading.Lock()
        self.held = self.high = 0
        self.alone = True

    def read(self, size):
        with self.budget.reading(size):
            with self.lock:
                self.held += size
                self.high = max(self.high, self.held)
                self.alone &= size <= 10 or self.held == size
            with self.lock:
                self.held -= size

    def run(self, sizes):
        threads = [threading.Thread(target=self.read, args=(size,)) for size in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self


def test_reads_together_stay_within_the_limit():
    assert Meter(ReadBudget(10)).run([3, 4, 5, 6] * 20).high <= 10


def test_a_read_beyond_the_limit_goes_alone():
    meter = Meter(ReadBudget(10)).run([25, 4] * 20)
    assert meter.high == 25
    assert meter.alone


def test_reads_that_fit_run_side_by_side():
    budget, both = ReadBudget(10), threading.Barrier(2)

    def read():
        with budget.reading(5):
            both.wait(timeout=30)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken


def test_a_read_that_fails_gives_its_bytes_back():
    budget = ReadBudget(10)
    with pytest.raises(OSError, match="broken"), budget.reading(10):
        raise OSError("broken")
    with budget.reading(10):
        pass


def test_a_read_of_nothing_is_no_read():
    with ReadBudget(10).reading(0):
        pass
