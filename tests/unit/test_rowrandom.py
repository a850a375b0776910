"""Random numbers addressed by row: any split draws the same ones, and they are uniform."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.stats

from emtau_dask.data.row_random import PRIORITY, RESPONSIBILITY, row_uniforms


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("cuts", [[1], [50], [7, 7, 93], list(range(1, 100))], ids=str)
def test_any_split_draws_the_same_numbers(width, cuts):
    whole = row_uniforms(3, PRIORITY, 0, 100, width)
    bounds = [0, *cuts, 100]
    parts = [row_uniforms(3, PRIORITY, start, stop, width) for start, stop in pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_row_far_out_has_the_same_numbers_alone_and_in_a_range():
    far = 10**12
    assert np.array_equal(
        row_uniforms(3, PRIORITY, far, far + 1, 5)[0], row_uniforms(3, PRIORITY, far - 2, far + 1, 5)[2]
    )


def test_no_rows():
    assert row_uniforms(3, PRIORITY, 5, 5, 2).shape == (0, 2)


@pytest.mark.parametrize("other", [(4, PRIORITY), (3, RESPONSIBILITY), (2**63, PRIORITY)])
def test_another_seed_or_purpose_draws_other_numbers(other):
    a, b = row_uniforms(3, PRIORITY, 0, 50, 4), row_uniforms(*other, 0, 50, 4)
    assert not np.isin(a, b).any()


def test_no_two_rows_share_numbers():
    values = row_uniforms(0, RESPONSIBILITY, 0, 5000, 4)
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("purpose", [PRIORITY, RESPONSIBILITY])
def test_the_numbers_are_uniform(purpose):
    values = row_uniforms(11, purpose, 0, 20_000, 3)
    assert scipy.stats.kstest(values.ravel(), "uniform").pvalue > 1e-3


def test_neighbouring_rows_and_columns_are_uncorrelated():
    values = row_uniforms(11, PRIORITY, 0, 20_000, 3)
    columns = np.column_stack([values[:-1], values[1:]])
    assert np.abs(np.corrcoef(columns.T) - np.eye(6)).max() < 5 / np.sqrt(20_000)
