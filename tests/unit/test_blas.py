"""Products by triangles, squares, factors and inverses in place, against NumPy and SciPy."""

import threading

import numpy as np
import pytest
import scipy.linalg
from tiers import exhaustive_but

from emtau_dask.mixture.linalg import (
    add_squares,
    factorise,
    invert_small,
    times_upper,
    upper_inverse,
    upper_times,
)

SHAPES = [(1, 1), (1, 5), (7, 1), (300, 4), (33, 17), (20, 130)]
EACH_SHAPE = pytest.mark.parametrize(
    "shape", exhaustive_but({(1, 1), (7, 1), (33, 17), (20, 130)}, SHAPES), ids=str
)


def by_features(rows):
    return np.asfortranarray(rows)


def among_others(rows):
    """The same rows as a part of a larger array."""
    larger = np.full((len(rows) + 3, rows.shape[1] + 5), np.nan)
    larger[1 : len(rows) + 1, 2 : rows.shape[1] + 2] = rows
    return larger[1 : len(rows) + 1, 2 : rows.shape[1] + 2]


def among_others_by_features(rows):
    return among_others(rows.T).T


LAYOUTS = [np.ascontiguousarray, by_features, among_others, among_others_by_features]


def triangle(rng, d):
    """An upper triangle; what is below it must not be looked at."""
    upper = np.triu(rng.normal(size=(d, d))) + 2.0 * np.eye(d)
    with_rest = upper.copy()
    with_rest[np.tril_indices(d, -1)] = np.nan
    return upper, with_rest


@pytest.mark.parametrize("layout", LAYOUTS)
@EACH_SHAPE
def test_times_upper_is_the_product(shape, layout):
    (n, d), rng = shape, np.random.default_rng(sum(shape))
    rows, (upper, with_rest) = rng.normal(size=(n, d)), triangle(rng, d)
    found = layout(rows.copy())
    times_upper(found, with_rest)
    assert np.allclose(found, rows @ upper, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, among_others])
@EACH_SHAPE
def test_upper_times_is_the_product(shape, layout):
    (n, d), rng = shape, np.random.default_rng(sum(shape))
    columns, (upper, with_rest) = rng.normal(size=(d, n)), triangle(rng, d)
    found = layout(columns.copy())
    upper_times(layout(with_rest), found, scale=-2.0)
    assert np.allclose(found, -2.0 * upper @ columns, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
@EACH_SHAPE
def test_add_squares_keeps_what_it_is_told_to_and_only_the_upper_triangle(shape, layout):
    (n, d), rng = shape, np.random.default_rng(sum(shape))
    rows, before = rng.normal(size=(n, d)), rng.normal(size=(d, d))
    above = np.triu_indices(d)
    for kept in (1.0, 0.25):
        found = before.copy()
        add_squares(layout(rows), found, kept)
        assert np.allclose(found[above], (kept * before + rows.T @ rows)[above], rtol=1e-13, atol=1e-13)
        assert np.array_equal(np.tril(found, -1), np.tril(before, -1))
    found = np.full((d, d), np.nan)
    add_squares(layout(rows), found, beta=0.0)
    assert np.allclose(found[above], (rows.T @ rows)[above], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("d", [1, 3, 40, 200])
def test_factors_are_scipys_and_inverses_undo_them(d):
    rng = np.random.default_rng(d)
    rows = rng.normal(size=(3, d, 2 * d))
    matrices = rows @ rows.swapaxes(1, 2)
    found = matrices.copy()
    assert np.array_equal(factorise(found), [0, 0, 0])
    expected = np.stack([scipy.linalg.cholesky(matrix) for matrix in matrices])
    assert np.allclose(np.triu(found), expected, rtol=1e-12, atol=1e-12)
    assert np.array_equal(np.tril(found, -1), np.tril(matrices, -1))
    invert_small(found)
    assert np.allclose(np.triu(found) @ expected, np.eye(d), atol=1e-12)


@pytest.mark.parametrize("d", [0, 1, 2, 64, 65, 129])
def test_an_inverse_is_that_of_scipy_and_leaves_its_argument(d):
    upper = np.triu(np.random.default_rng(d).normal(size=(d, d))) + 8 * np.eye(d)
    given = upper.copy()
    expected = scipy.linalg.solve_triangular(upper, np.eye(d)) if d else np.empty((0, 0))
    assert np.allclose(upper_inverse(upper), expected, rtol=1e-12, atol=1e-12)
    assert np.array_equal(upper, given)


def test_the_first_pivot_that_is_not_positive_is_counted_from_1():
    matrices = np.stack([np.eye(4)] * 3)
    matrices[0, 0, 0] = -1.0
    matrices[2, 1, 2] = matrices[2, 2, 1] = 1.5
    assert np.array_equal(factorise(matrices), [1, 0, 3])


def test_other_threads_run_while_a_routine_computes():
    """Python's lock is let go: else another thread would run twice at most, before and after the routine."""
    rows, upper = np.ones((2000, 1500)), np.triu(np.ones((1500, 1500)))
    attempt, ticks, done = [0], [], threading.Event()

    def tick():
        while not done.wait(1e-4):
            ticks.append(attempt[0])

    other = threading.Thread(target=tick)
    other.start()
    for number in range(1, 101):  # A busy machine may give the other thread no time at first.
        rows[...] = 1.0
        attempt[0] = number
        times_upper(rows, upper)
        attempt[0] = 0
        if ticks.count(number) >= 3:
            break
    done.set()
    other.join()
    assert ticks.count(number) >= 3
