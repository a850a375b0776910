"""The digest of a chunk: what of it counts, by hand, and that neither memory order nor machine does."""

import hashlib
import struct

import numpy as np
import pytest

from emtau_dask.rows.contents import strips_digest

STRIP, PERIOD = 2**13, 2**18
_random = np.random.default_rng(6)


def by_hand(data):
    """The digest of bytes in C order, in plain integers."""
    found = hashlib.sha256()
    whole = len(data) // PERIOD * PERIOD
    for begin in range(0, whole, PERIOD):
        words = struct.unpack("<1024Q", data[begin : begin + STRIP])
        sums = [sum(words[column::64]) % 2**64 for column in range(64)]
        found.update(struct.pack("<64Q", *sums))
    found.update(data[whole : whole + STRIP])
    found.update(str(len(data)).encode())
    return found.digest()[:16]


@pytest.mark.parametrize("dtype", ["f8", "f4", ">f8", "i2", "u1", "?"])
@pytest.mark.parametrize(
    "shape", [(0, 3), (1, 1), (100, 3), (2048, 8), (16384, 1), (40_000, 7), (3, 50_000), (70_000,)]
)
def test_it_is_what_plain_integers_give_in_any_memory_order(shape, dtype):
    values = (100 * _random.normal(size=shape)).astype(np.dtype(dtype), casting="unsafe")
    expected = by_hand(values.tobytes())
    assert strips_digest(values) == expected
    assert strips_digest(np.asfortranarray(values)) == expected
    reversed_twice = np.ascontiguousarray(values[::-1])[::-1]
    assert strips_digest(reversed_twice) == expected


@pytest.mark.parametrize("row", [0, 7, 511, 16384, 16895, 32768])
def test_one_bit_of_a_row_in_a_strip(row):
    rows = _random.normal(size=(40_000, 2))
    before = strips_digest(rows)
    rows.view(np.uint64)[row, 1] ^= 1
    assert strips_digest(rows) != before


@pytest.mark.parametrize("row", [512, 16383, 16896, 33280])
def test_a_row_between_strips_is_not_looked_at(row):
    rows = _random.normal(size=(40_000, 2))
    before = strips_digest(rows)
    rows[row] += 100
    assert strips_digest(rows) == before


def test_a_change_of_so_many_rows_is_seen_wherever_it_begins():
    """Of 256 KiB less a strip, and one row: no gap between strips is so long."""
    rows = _random.normal(size=(100_000, 2))
    before, length = strips_digest(rows), (PERIOD - STRIP) // 16 + 1
    for begin in range(0, 98_304 - length, 997):
        other = rows.copy()
        other[begin : begin + length] += 100
        assert strips_digest(other) != before, begin


def test_columns_and_rows_in_another_order():
    rows = _random.normal(size=(50_000, 16))
    columns = _random.permutation(16)
    others = [rows[:, ::-1], rows[:, columns], rows[::-1], _random.permutation(rows), np.sort(rows, axis=0)]
    assert len({strips_digest(rows), *map(strips_digest, others)}) == 6
