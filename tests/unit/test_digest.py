"""The digest of values: of dtype, shape and bytes in C order, whatever the memory order and the feeding."""

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from emtau_dask.data.source import GrowingDigest, values_digest

_random = np.random.default_rng(6)
SHAPES = [(0, 3), (1, 1), (100, 3), (2048, 8), (40_000, 7), (3, 50_000), (70_000,)]


def values_of(shape, dtype):
    return (100 * _random.normal(size=shape)).astype(np.dtype(dtype), casting="unsafe")


def by_hand(values):
    return xxh3_128_digest(f"{values.dtype.str} {values.shape}".encode() + values.tobytes())


def test_the_algorithm_is_xxh3():
    """The digest of nothing, as the specification's own program prints it."""
    assert xxh3_128_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("dtype", ["f8", "f4", ">f8", "f2", "i2", "u1", "?"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_that_of_the_bytes_in_c_order_in_any_memory_order(shape, dtype):
    values = values_of(shape, dtype)
    expected = by_hand(values)
    assert values_digest(values) == expected
    assert values_digest(np.asfortranarray(values)) == expected
    assert values_digest(np.ascontiguousarray(values[::-1])[::-1]) == expected


@pytest.mark.parametrize("steps", [(7,), (0, 100, 100, 5000), (1000, 39_000), (40_000,), ()])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_may_be_fed_in_blocks_or_left_to_the_end(steps, order):
    values = np.asarray(values_of((40_000, 3), "f8"), order=order)
    growing, begin = GrowingDigest(values), 0
    for step in steps:
        growing.feed(begin, values[begin : begin + step])
        begin += step
    assert growing.digest() == growing.digest() == by_hand(values)


def test_blocks_that_come_again_or_too_early_do_not_count():
    values = values_of((1000, 3), "f8")
    growing = GrowingDigest(values)
    for begin in (0, 0, 500, 250, 0, 100, 500):
        growing.feed(begin, values[begin : begin + 250])
    assert growing.digest() == by_hand(values)


@pytest.mark.parametrize("order", ["C", "F"])
def test_any_bit_of_any_value_counts(order):
    values = np.asarray(values_of((30_000, 2), "f8"), order=order)
    before = values_digest(values)
    for place in _random.integers(values.size, size=200):
        row, column = divmod(int(place), 2)
        value = values[row, column]
        values[row, column] = np.nextafter(value, np.inf)
        assert values_digest(values) != before
        values[row, column] = value
    assert values_digest(values) == before


def test_dtype_shape_and_order_of_values_count():
    values = values_of((600, 4), "i4")
    others = [values.astype("i8"), values.astype("f4"), values.reshape(300, 8), values[:, ::-1], values[::-1]]
    others += [np.sort(values, axis=0), values.view("f4"), values.astype(">i4")]
    assert len({values_digest(values), *map(values_digest, others)}) == 9
