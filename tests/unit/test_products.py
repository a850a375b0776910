"""Products in slices against NumPy's own of the whole."""

import numpy as np
import pytest
from tiers import exhaustive_but

from emtau_dask.mixture.linalg import perform, product, score_slices, squares, sum_slices, summed_product

SHAPES = [
    (1, 3, 1),
    (1, 3, 70),
    (8, 15, 16_640),
    (8, 15, 16_643),
    (3, 6, 40_001),
    (64, 561, 300),
    (16, 18, 5_000),
]


@pytest.fixture(
    params=exhaustive_but({(1, 3, 1), (8, 15, 16_640), (8, 15, 16_643), (64, 561, 300)}, SHAPES), ids=str
)
def factors(request):
    k, f, n = request.param
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(k, n + 5)), rng.normal(size=(f, n + 5))
    return rng.normal(size=(k, f)), whole[0][:, :n], whole[1][:, :n]


def test_a_product_is_that_of_the_whole(factors):
    coefficients, scores, features = factors
    perform(product(coefficients, features, scores))
    expected = np.einsum("kf,fn->kn", coefficients, features)
    assert np.allclose(scores, expected, rtol=1e-12, atol=1e-12)


def test_a_summed_product_is_that_of_the_whole(factors):
    _, scores, features = factors
    out = np.full((len(scores), len(features)), np.nan)
    perform(summed_product(scores, features, out))
    size = np.einsum("kn,fn->kf", np.abs(scores), np.abs(features))
    assert (np.abs(out - np.einsum("kn,fn->kf", scores, features)) <= 1e-14 * size).all()


def test_squares_are_those_of_the_whole_and_symmetric(factors):
    features = factors[2]
    out = np.empty((len(features), len(features)))
    perform(squares(features, out))
    assert np.array_equal(out, out.T)
    size = np.einsum("fn,gn->fg", np.abs(features), np.abs(features))
    assert (np.abs(out - np.einsum("fn,gn->fg", features, features)) <= 1e-14 * size).all()


def test_products_of_float32_are_summed_in_float64_over_slices():
    """Of 2^25 ones, float32 sums no more than 2^24."""
    ones = np.ones((1, 2**25), dtype=np.float32)
    out = np.empty((1, 1))
    perform(summed_product(ones, ones, out))
    assert out == 2**25


@pytest.mark.parametrize(
    ("n_rows", "size", "slices"),
    [
        (8_333, 120, 1),
        (8_334, 120, 2),
        (3_712, 16 * 153, 16),
        (4_096, 7_812, 32),
        (4_096, 7_813, 1),
        (50, 1, 1),
    ],
)
def test_scores_are_formed_in_slices_of_a_million_multiplications(n_rows, size, slices):
    assert score_slices(n_rows, size) == slices


@pytest.mark.parametrize(
    ("n_rows", "size", "single", "slices"),
    [
        (16_640, 120, False, 8),
        (8_000, 500, False, 4),
        (8_000, 501, False, 8),
        (2_000, 1_000, False, 2),
        (2_000, 1_001, False, 1),
        (2_048, 1_001, True, 2),
        (2_049, 1_001, True, 4),
        (255, 1, False, 1),
        (256, 1, False, 2),
    ],
)
def test_sums_are_formed_in_slices_that_are_neither_packed_nor_locked(n_rows, size, single, slices):
    assert sum_slices(n_rows, size, single=single) == slices
