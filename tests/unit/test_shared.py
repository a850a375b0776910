"""What a process proves before it reads: once, from a few rows, and never from memory of a failure."""

import threading

import numpy as np
import pytest

from emtau_dask.data.dask_arrays import shared_rows
from emtau_dask.data.source import Loaded, RangeSource
from emtau_dask.errors import InvalidDataError
from emtau_dask.process import MAX_TOKENS, VerifiedTokens, of_process

MIB = 2**20


class Rows:
    """Rows of one value, of which a read holds so many bytes; notes what is read."""

    def __init__(self, value=0.0, held=0):
        self.value, self.held, self.reads = value, held, []

    def read(self, start, stop):
        self.reads.append((start, stop))
        return Loaded(np.full((stop - start, 16), self.value), 0)

    def identity(self):
        return "rows"

    def peak_bytes(self, start, stop):
        return self.held


def source(reader, chunk_rows):
    return RangeSource(reader, (sum(chunk_rows), 16), np.dtype("f8"), tuple(chunk_rows))


@pytest.fixture
def forgetful(monkeypatch):
    monkeypatch.setattr(of_process(VerifiedTokens), "_tokens", {})


@pytest.mark.parametrize(
    ("chunk_rows", "held", "expected"),
    [
        ([10], 0, [(0, 10)]),
        ([0, 10, 0, 10], 0, [(0, 10), (10, 20)]),
        ([10] * 80, 0, [(100, 110), (300, 310), (500, 510), (700, 710)]),
        ([10**6] * 2, 0, [(0, 2**15), (10**6, 10**6 + 2**15)]),  # 4 MiB of 128-byte rows
        ([10] * 80, 100 * MIB, [(100, 110), (300, 310)]),
        ([10] * 80, 1000 * MIB, [(100, 110)]),
        ([], 0, []),
    ],
)
def test_samples_are_few_spread_and_bounded(chunk_rows, held, expected):
    reader = Rows(held=held)
    shared_rows(source(reader, chunk_rows), "X")
    assert reader.reads == expected


def test_who_made_it_proves_nothing_and_others_once(forgetful):
    reader = Rows()
    rows = shared_rows(source(reader, [10, 10]), "X")
    rows.read(3, 4)
    assert reader.reads == [(0, 10), (10, 20), (3, 4)]
    of_process(VerifiedTokens)._tokens.clear()  # as in another process
    rows.read(5, 6)
    rows.read(6, 7)
    assert reader.reads[3:] == [(0, 10), (10, 20), (5, 6), (6, 7)]


def test_other_values_are_refused_until_they_are_the_same(forgetful):
    reader = Rows()
    rows = shared_rows(source(reader, [10, 10]), "weights")
    of_process(VerifiedTokens)._tokens.clear()
    reader.value = np.nextafter(0.0, 1.0)
    for _ in range(2):
        with pytest.raises(
            InvalidDataError, match=r"process \d+ on .* sees other data as weights .*rows 0 to 10"
        ):
            rows.read(0, 1)
    reader.value = 0.0
    assert rows.read(0, 1)[0].shape == (1, 16)


def test_threads_wait_for_the_one_that_proves(forgetful):
    begun, go, calls = threading.Event(), threading.Event(), []

    def prove():
        calls.append("proved")
        begun.set()
        assert go.wait(60)

    first = threading.Thread(target=of_process(VerifiedTokens).once, args=("token", prove))
    second = threading.Thread(
        target=lambda: (of_process(VerifiedTokens).once("token", prove), calls.append("second"))
    )
    first.start()
    assert begun.wait(60)
    second.start()
    go.set()
    first.join()
    second.join()
    assert calls == ["proved", "second"]


def test_only_so_many_proofs_are_remembered(forgetful):
    for number in range(MAX_TOKENS + 5):
        of_process(VerifiedTokens).add(str(number))
    assert list(of_process(VerifiedTokens)._tokens) == [str(number) for number in range(5, MAX_TOKENS + 5)]
