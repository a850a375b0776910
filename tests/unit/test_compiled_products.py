"""Products of tiles by vectors against sums in extended precision, for every rest of rows and columns."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError
from tiers import exhaustive_but

from emtau_dask.kernels import tiling
from emtau_dask.kernels.products import (
    add_upper_squares,
    multiply,
    multiply_transposed,
    scatter,
    side_of,
    subtract_half_squares,
    subtract_transposed,
)
from emtau_dask.kernels.vectors import COLUMNS, VECTOR_BYTES, in_full_vectors

DTYPES = (np.float32, np.float64)
LINE_BYTES = 64
ROWS = exhaustive_but({1, 2, 3, 4, 7, 17}, [1, 2, 3, 4, 5, 6, 7, 8, 17])
"""Four go at once; the rest are one, two or three."""


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
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_the_sums_and_touch_nothing_else(rows, features, lines, dtype):
    rng, t = np.random.default_rng(rows), tile_rows(dtype, lines)
    left, right = matrix(rng, rows, features, dtype), matrix(rng, features, t, dtype)
    out = np.full((rows + 3, t), np.nan, dtype)
    multiply(left, right, out[2 : 2 + rows])
    assert_within_rounding(out[2 : 2 + rows], left, right, features)
    assert np.isnan(out[:2]).all()
    assert np.isnan(out[2 + rows :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lines", [1, COLUMNS, 5])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("rows", ROWS)
def test_transposed_products_are_the_sums_over_columns_of_the_first_rows(rows, columns, lines, dtype):
    rng, t = np.random.default_rng(rows), tile_rows(dtype, lines)
    left, right = matrix(rng, rows, t, dtype), matrix(rng, columns + 3, t, dtype)
    right[columns:] = np.nan
    out = np.full((rows, columns), np.nan, dtype)
    multiply_transposed(left, right, out)
    assert_within_rounding(out, left, right[:columns].T, t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lines", [COLUMNS, 3 * COLUMNS])
@pytest.mark.parametrize("m", ROWS)
def test_half_the_squares_of_triangular_products_about_a_point_are_subtracted(m, lines, dtype):
    """What is above the triangle is not looked at where it is beyond a step's four rows, and 0 elsewhere."""
    rng, t = np.random.default_rng(m), tile_rows(dtype, lines)
    left, right = matrix(rng, m + 1, m, dtype), matrix(rng, m, t, dtype)
    left[:m] = np.tril(left[:m])
    before = matrix(rng, 3, t, dtype)
    out = before.copy()
    about = right.astype(np.longdouble) - left[m, :, np.newaxis]
    expected = before[1] - 0.5 * ((left[:m].astype(np.longdouble) @ about) ** 2).sum(axis=0)
    for row in range(m):
        left[row, row - row % 4 + 4 :] = np.nan
    subtract_half_squares(left, right, 1, out)
    lengths = np.abs(np.nan_to_num(left[:m])) @ np.abs(about).astype(dtype)
    bound = 2 * (m + 3) * np.finfo(dtype).eps * ((lengths**2).sum(axis=0) + np.abs(before[1]))
    assert (np.abs(out[1] - expected) <= bound).all()
    assert np.array_equal(out[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lines", [1, COLUMNS, 5])
@pytest.mark.parametrize("d", exhaustive_but({1, 2, 3, 4, 5, 12, 17}, [*range(1, 10), 12, 17]))
def test_scatters_about_a_point_are_the_weighted_sums_on_and_above_the_diagonal(d, lines, dtype):
    """Other rows of the weights, and rows after the first d + 3, are not looked at."""
    rng, t = np.random.default_rng(d), tile_rows(dtype, lines)
    weights, coordinates = matrix(rng, 3, t, dtype), matrix(rng, d + 5, t, dtype)
    mean, out = matrix(rng, 1, d + 4, dtype), np.full((d + 3, d + 4), np.nan, dtype)
    weights[[0, 2]], coordinates[d + 3 :], mean[:, d + 3 :] = np.nan, np.nan, np.nan
    scatter(weights, 1, coordinates, mean, d, out)
    about = coordinates[:d].astype(np.longdouble) - mean[0, :d, np.newaxis]
    factors = np.concatenate([about, np.ones((1, t))])
    expected, size = (weights[1] * about) @ factors.T, (np.abs(weights[1] * about)) @ np.abs(factors).T
    upper = np.triu(np.ones((d, d + 1), bool))
    off = np.abs(out[:d, : d + 1] - expected)
    assert (off <= 1.01 * (t + 4) * np.finfo(dtype).eps * size)[upper].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [0, 1, 2, 64])
@pytest.mark.parametrize("beyond", [0, 3])
@pytest.mark.parametrize("d", exhaustive_but({1, 4, 5, 16, 33, 81}, [1, 4, 5, 16, 17, 33, 42, 64, 81]))
def test_upper_squares_are_added_up_over_the_first_rows(d, beyond, depth, dtype):
    """Other rows, and columns after the squares', are not looked at; nothing is lost of what was there."""
    rng, side = np.random.default_rng(d), side_of(d, np.dtype(dtype).itemsize)
    vectors = matrix(rng, 64, side + beyond, dtype)
    vectors[depth:], vectors[:, side:] = np.nan, np.nan
    before = matrix(rng, side, side, dtype)
    out = before.copy()
    add_upper_squares(vectors, depth, out)
    some = vectors[:depth, :side].astype(np.longdouble)
    bound = 1.01 * (depth + 1) * np.finfo(dtype).eps * (np.abs(some).T @ np.abs(some) + np.abs(before))
    off = np.abs(out - before.astype(np.longdouble) - some.T @ some)
    assert (off <= bound)[np.triu_indices(side)].all()


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("d", [1, 4, 5, 16, 17, 784])
def test_squares_have_whole_vectors_and_groups_of_four_and_no_more(d, itemsize):
    side, step = side_of(d, itemsize), max(4, VECTOR_BYTES // itemsize)
    assert side % step == 0
    assert d <= side < d + step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", exhaustive_but({1, 3, 4, 5, 16}, [1, 2, 3, 4, 5, 7, 8, 9, 16]))
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 23, 24])
def test_rows_less_an_origin_are_transposed_and_nothing_else_is_touched(n, d, dtype):
    rng = np.random.default_rng(n)
    rows, origin = matrix(rng, n, d, dtype), matrix(rng, 1, d, dtype)
    out = np.full((d + 3, 24), np.nan, dtype)
    subtract_transposed(rows, origin, out)
    assert np.array_equal(out[:d, :n], (rows - origin).T)
    assert np.isnan(out[d:]).all()
    assert np.isnan(out[:, n:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_have_equal_products_wherever_they_stand(dtype):
    """Alone or among four at a time: components that are alike must tie exactly."""
    rng, t = np.random.default_rng(0), tile_rows(dtype, COLUMNS)
    left, right = np.repeat(matrix(rng, 1, 33, dtype), 7, axis=0), matrix(rng, 33, t, dtype)
    out, sums = np.empty((7, t), dtype), np.empty((7, 33), dtype)
    multiply(left, right, out)
    assert np.array_equal(out, np.repeat(out[:1], 7, axis=0))
    multiply_transposed(out, right, sums)
    assert np.array_equal(sums, np.repeat(sums[:1], 7, axis=0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_own_row_and_column(value):
    left, right, out = np.ones((5, 3)), np.ones((3, 24)), np.empty((5, 24))
    right[1, 7] = value
    multiply(left, right, out)
    expected = np.full((5, 24), 3.0)
    expected[:, 7] = value
    assert np.array_equal(out, expected, equal_nan=True)
    sums = np.empty((5, 3))
    multiply_transposed(np.ones((5, 24)), right, sums)
    assert np.array_equal(sums, np.tile([24.0, value, 24.0], (5, 1)), equal_nan=True)


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        (np.ones((4, 3)), np.ones((24, 3)).T, np.ones((4, 24))),
        (np.ones((4, 3), np.float32), np.ones((3, 24)), np.ones((4, 24))),
        (np.ones((4, 3), int), np.ones((3, 24), int), np.ones((4, 24), int)),
        (np.ones((4, 3)), np.ones((3, 24)), np.broadcast_to(1.0, (4, 24))),
    ],
)
def test_other_orders_types_and_results_that_are_not_to_be_written_do_not_compile(left, right, out):
    with pytest.raises(TypingError, match="of one type of floats in C order"):
        multiply(left, right, out)


REFUSED = {
    multiply: [
        ((4, 3), (4, 24), (4, 24)),
        ((4, 3), (3, 24), (4, 48)),
        ((4, 3), (3, 25), (4, 25)),
        ((4, 3), (3, 24), (3, 24)),
        ((4, 3), (3, 24), (5, 24)),
    ],
    multiply_transposed: [
        ((4, 24), (3, 48), (4, 3)),
        ((4, 25), (3, 25), (4, 3)),
        ((4, 24), (3, 24), (5, 3)),
        ((4, 24), (3, 24), (4, 4)),
    ],
    subtract_transposed: [
        ((5, 4), (1, 5), (4, 24)),
        ((5, 4), (2, 4), (4, 24)),
        ((5, 4), (1, 4), (3, 24)),
        ((25, 4), (1, 4), (4, 24)),
    ],
    subtract_half_squares: [
        ((5, 4), (5, 24), 0, (1, 24)),
        ((5, 5), (4, 24), 0, (1, 24)),
        ((4, 4), (4, 24), 0, (1, 24)),
        ((5, 4), (4, 25), 0, (1, 25)),
        ((5, 4), (4, 24), 2, (2, 24)),
        ((5, 4), (4, 24), -1, (2, 24)),
        ((5, 4), (4, 24), 0, (1, 48)),
    ],
    add_upper_squares: [
        ((4, 16), 4, (16, 32)),
        ((4, 16), 4, (32, 16)),
        ((4, 15), 4, (16, 16)),
        ((4, 30), 4, (18, 18)),
        ((4, 16), 5, (16, 16)),
        ((4, 16), -1, (16, 16)),
    ],
    scatter: [
        ((2, 24), 2, (7, 24), (1, 7), 4, (7, 7)),
        ((2, 24), -1, (7, 24), (1, 7), 4, (7, 7)),
        ((2, 48), 1, (7, 24), (1, 7), 4, (7, 7)),
        ((2, 25), 1, (7, 25), (1, 7), 4, (7, 7)),
        ((2, 24), 1, (6, 24), (1, 7), 4, (7, 7)),
        ((2, 24), 1, (7, 24), (1, 6), 4, (7, 7)),
        ((2, 24), 1, (7, 24), (2, 7), 4, (7, 7)),
        ((2, 24), 1, (7, 24), (1, 7), 4, (6, 7)),
        ((2, 24), 1, (7, 24), (1, 7), 4, (7, 6)),
        ((2, 24), 1, (7, 24), (1, 7), 0, (7, 7)),
    ],
}
"""Of each product the shapes of its arrays, and the numbers between them."""


@pytest.mark.parametrize("product", REFUSED, ids=lambda product: product.py_func.__name__)
def test_shapes_that_do_not_fit_are_refused(product):
    for given in REFUSED[product]:
        arguments = [np.ones(each) if isinstance(each, tuple) else each for each in given]
        with pytest.raises(ValueError, match=r"fit|too few|fewer vectors"):
            product(*arguments)


def test_tiles_have_as_many_lines_as_go_at_once():
    assert tiling.LINES_AT_ONCE % COLUMNS == 0
    assert tiling.LINE_BYTES % VECTOR_BYTES == 0


KEPT = """
import numpy as np
from emtau_dask.kernels.products import multiply
out = np.empty((1, 24))
multiply(np.ones((1, 2)), np.ones((2, 24)), out)
print(sum(multiply.stats.cache_hits.values()), out[0, 0])
"""


@pytest.mark.exhaustive
def test_what_numba_kept_of_other_sources_is_not_used(tmp_path):
    """Not even where the file of the function is the same: others are compiled in, and types may be gone."""
    package = Path(tiling.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))

    def run():
        command = [sys.executable, "-c", KEPT]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert [run(), run()] == [["0", "2.0"], ["1", "2.0"]]
    changed = tmp_path / package.name / "kernels" / "features.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert run() == ["0", "2.0"]


OTHER_WIDTHS = """
import numpy as np
from emtau_dask.kernels.products import multiply, multiply_transposed
from emtau_dask.kernels.vectors import VECTOR_BYTES
from emtau_dask.kernels.products import subtract_half_squares, add_upper_squares, scatter, side_of
print(VECTOR_BYTES)
for dtype in ("f4", "f8"):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(7, 11)).astype(dtype), rng.normal(size=(11, 96)).astype(dtype)
    out, sums = np.empty((7, 96), dtype), np.empty((7, 11), dtype)
    multiply(left, right, out)
    multiply_transposed(out, right, sums)
    assert np.allclose(out, left @ right, atol=1e-5)
    assert np.allclose(sums, left @ right @ right.T, atol=1e-3)
    corner, squares = np.ascontiguousarray(np.tril(left[:, :7])), np.zeros((1, 96), dtype)
    origin = np.zeros((1, 11), dtype)
    own = np.empty((11, 11), dtype)
    scatter(left @ right, 2, right, origin, 8, own)
    side = side_of(33, np.dtype(dtype).itemsize)
    upper = np.zeros((side, side), dtype)
    subtract_half_squares(np.concatenate([corner, origin[:, :7]]), right[:7], 0, squares)
    add_upper_squares(right, 11, upper)
    assert np.allclose(squares, -0.5 * ((corner @ right[:7]) ** 2).sum(axis=0), rtol=1e-3)
    products = ((left @ right)[2] * right[:8]) @ right[:8].T
    assert np.allclose(np.triu(own[:8, :8]), np.triu(products), atol=1e-3)
    assert np.allclose(np.triu(upper), np.triu(right[:, :side].T @ right[:, :side]), atol=1e-3)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variable", "value", "width"),
    [("NUMBA_ENABLE_AVX", "0", 16), ("NUMBA_CPU_FEATURES", "+avx,+avx2,+fma", 32)],
)
def test_vectors_are_as_wide_as_numba_is_told_that_they_are(variable, value, width, tmp_path):
    environment = {**os.environ, variable: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", OTHER_WIDTHS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == width


def test_loops_may_be_vectorised_for_the_machines_width():
    @njit
    def doubled(values):
        in_full_vectors()
        for i in range(len(values)):
            values[i] *= 2.0

    values = np.arange(1000.0)
    doubled(values)
    assert np.array_equal(values, 2.0 * np.arange(1000.0))
    (signature,) = doubled.signatures
    assert f'"prefer-vector-width"="{8 * VECTOR_BYTES}"' in doubled.inspect_llvm(signature)
    if VECTOR_BYTES == LINE_BYTES:
        assert "zmm" in doubled.inspect_asm(signature)
