"""Which chunks a fingerprint samples: few enough to cost little, spread over all, always some."""

import numpy as np
import pytest

from emtau_dask.checkpoint.fingerprints import sampled, sampled_digests
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import RangeSource
from emtau_dask.em.history import SilentObserver
from emtau_dask.execution.choice import choose_executor

MIB = 2**20


class Sized:
    """A reader of nothing: what is sampled depends on shapes alone."""


def source(chunk_rows, row_bytes=8 * 16):
    return RangeSource(Sized(), (sum(chunk_rows), row_bytes // 8), np.dtype("f8"), tuple(chunk_rows))


def bytes_of(ranges, row_bytes=8 * 16):
    return sum(chunk_range.n_rows for chunk_range in ranges.values()) * row_bytes


@pytest.mark.parametrize(
    ("chunks", "chunk_mib", "expected"),
    [
        (1, 1, 1),
        (4, 16, 4),
        (1000, 1, 16),  # never more than 16
        (4, 128, 1),  # one chunk, whatever it takes
        (100, 16, 5),  # a twentieth of 1600 MiB
        (20, 128, 1),
        (40, 128, 2),
        (10_000, 128, 16),
    ],
)
def test_as_many_chunks_as_a_twentieth_of_the_data_or_64_mib(chunks, chunk_mib, expected):
    rows = chunk_mib * MIB // 128
    found = sampled(source([rows] * chunks))
    assert len(found) == expected
    assert expected == 1 or bytes_of(found) <= max(64 * MIB, chunks * chunk_mib * MIB / 20)


def test_they_are_spread_evenly_and_known_by_their_places():
    found = sampled(source([1000] * 160))
    assert list(found) == [10 * i + 5 for i in range(16)]
    bounds = {chunk: (chunk_range.start, chunk_range.stop) for chunk, chunk_range in found.items()}
    assert bounds == {chunk: (1000 * chunk, 1000 * chunk + 1000) for chunk in found}


def test_chunks_without_rows_are_not_sampled():
    assert list(sampled(source([0, 5, 0, 0, 7, 0]))) == [1, 4]
    assert sampled(source([])) == sampled(source([0, 0])) == {}


@pytest.mark.parametrize("changed", [0, 3, 15])
def test_of_a_few_small_chunks_all_are_read(changed):
    rows = np.random.default_rng(0).normal(size=(160, 3))
    other = rows.copy()
    other[10 * changed + 4, 1] += 1e-9

    def of(values):
        source = as_source(values, ndim=2, what="X").aligned((10,) * 16)
        return sampled_digests(source, "X", choose_executor(), SilentObserver())

    assert of(rows) == of(rows.copy())
    assert [one.chunk for one, now in zip(of(rows), of(other), strict=True) if one != now] == [changed]
