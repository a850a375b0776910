"""Products of tiles by vectors against sums in extended precision, for every rest of rows and columns."""

import numpy as np
import pytest
from numba.core.errors import TypingError

from emtau_dask.mixture.compiled_products import COLUMNS, multiply, multiply_transposed

DTYPES = (np.float32, np.float64)
LINE_BYTES = 64


def matrix(rng, rows, columns, dtype):
    return rng.normal(size=(rows, columns)).astype(dtype)


def tile_rows(dtype, lines):
    return lines * LINE_BYTES // np.dtype(dtype).itemsize


def assert_within_rounding(found, left, right, n_terms):
    """Of a sum in any order: n ε Σ|a b| (Higham 2002, section 3.1)."""
    left, right = left.astype(np.longdouble), right.astype(np.longdouble)
    bound = 1.01 * n_terms * np.finfo(found.dtype).eps * (np.abs(left) @ np.abs(right))
    assert (np.abs(found - left @ right) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lines", [COLUMNS, 3 * COLUMNS])
@pytest.mark.parametrize("features", [1, 2, 15, 153])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 17])
def test_products_are_the_sums_and_touch_no_other_row(rows, features, lines, dtype):
    rng, t = np.random.default_rng(rows), tile_rows(dtype, lines)
    left, right = matrix(rng, rows, features, dtype), matrix(rng, features, t, dtype)
    out = np.full((rows + 3, t), np.nan, dtype)
    multiply(left, right, out, 2)
    assert_within_rounding(out[2 : 2 + rows], left, right, features)
    assert np.isnan(out[:2]).all()
    assert np.isnan(out[2 + rows :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lines", [1, COLUMNS, 5])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 17])
def test_transposed_products_are_the_sums_over_columns_from_a_row_on(rows, columns, lines, dtype):
    rng, t = np.random.default_rng(rows), tile_rows(dtype, lines)
    left, right = matrix(rng, rows, t, dtype), matrix(rng, columns + 3, t, dtype)
    right[[0, 1, -1]] = np.nan
    out = np.full((rows, columns), np.nan, dtype)
    multiply_transposed(left, right, 2, out)
    assert_within_rounding(out, left, right[2 : 2 + columns].T, t)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_have_equal_products_wherever_they_stand(dtype):
    """Alone or among four at a time: components that are alike must tie exactly."""
    rng, t = np.random.default_rng(0), tile_rows(dtype, COLUMNS)
    left, right = np.repeat(matrix(rng, 1, 33, dtype), 7, axis=0), matrix(rng, 33, t, dtype)
    out, sums = np.empty((7, t), dtype), np.empty((7, 33), dtype)
    multiply(left, right, out, 0)
    assert np.array_equal(out, np.repeat(out[:1], 7, axis=0))
    multiply_transposed(out, right, 0, sums)
    assert np.array_equal(sums, np.repeat(sums[:1], 7, axis=0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_own_row_and_column(value):
    left, right, out = np.ones((5, 3)), np.ones((3, 24)), np.empty((5, 24))
    right[1, 7] = value
    multiply(left, right, out, 0)
    expected = np.full((5, 24), 3.0)
    expected[:, 7] = value
    assert np.array_equal(out, expected, equal_nan=True)
    sums = np.empty((5, 3))
    multiply_transposed(np.ones((5, 24)), right, 0, sums)
    assert np.array_equal(sums, np.tile([24.0, value, 24.0], (5, 1)), equal_nan=True)


@pytest.mark.parametrize(
    "matrices",
    [
        (np.ones((4, 3)), np.ones((24, 3)).T, np.ones((4, 24))),
        (np.ones((4, 3), np.float32), np.ones((3, 24)), np.ones((4, 24))),
    ],
)
def test_other_orders_and_mixed_types_do_not_compile(matrices):
    with pytest.raises(TypingError, match="of one type in C order"):
        multiply(*matrices, 0)
