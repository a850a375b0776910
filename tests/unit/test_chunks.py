"""Which values of a chunk in memory are admitted, and what is said of the others."""

import numpy as np
import pytest

from emtau_dask.data.chunk import LARGEST, LoadedChunk
from emtau_dask.errors import UnusableRowError

pytestmark = pytest.mark.filterwarnings("error")


def blocks(rows, size=40):
    chunk = LoadedChunk(rows, None, None, start=1000, bytes_read=0, chunk=3)
    return [block.copy() for _, block in chunk.blocks(chunk.positions(), size, rows.dtype)]


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1e149, 0.0])
def test_values_up_to_the_limit_are_admitted_however_many(value):
    """The sum of their squares may be far beyond the square of the limit."""
    rows = np.full((100, 3), value)
    assert np.array_equal(np.concatenate(blocks(rows)), rows)


def test_float32_values_are_admitted_whose_squares_float32_cannot_hold():
    rows = np.full((100, 3), 1e30, dtype=np.float32)
    assert np.array_equal(np.concatenate(blocks(rows)), rows)


@pytest.mark.parametrize("value", [1.001e150, -1e200, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("others", [0.0, 1e149, 1e150])
def test_a_value_beyond_is_refused_with_its_row(value, others):
    rows = np.full((100, 3), others)
    rows[57, 1] = value
    with pytest.raises(UnusableRowError, match=r"row 1057 \(chunk 3, its row 57\).*feature 1") as caught:
        blocks(rows)
    assert caught.value.row == 1057
