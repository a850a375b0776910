"""A split start: whose component is cut, and where; by clusters whose centres are known."""

import numpy as np
import pytest

from emtau_dask import GaussianMixture
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.selection.passes import CountedRows
from emtau_dask.selection.split import split_start
from emtau_dask.settings import COVARIANCE_TYPES

CENTRES = np.array([[0.0, 0.0], [40.0, 0.0], [40.0, 9.0]])
GROUP = np.repeat(np.arange(3), [300, 100, 200])
ROWS = np.random.default_rng(0).normal(size=(600, 2)) + CENTRES[GROUP]


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_the_component_of_two_clusters_is_cut_between_them(kind):
    mixture = GaussianMixture(2, covariance_type=kind, random_state=0).fit(ROWS)
    start = split_start(mixture, CountedRows(ROWS, None), 3)
    found = start["means_init"][np.lexsort(start["means_init"].T[::-1].round())]
    expected = np.array([ROWS[k == GROUP].mean(axis=0) for k in range(3)])
    np.testing.assert_allclose(found, expected, atol=0.3)
    np.testing.assert_allclose(np.sort(start["weights_init"]), [1 / 6, 1 / 3, 1 / 2], atol=0.01)
    assert start["precisions_init"].shape == structure_named(kind).shape(3, 2)


def test_missing_values_do_not_hide_where_a_component_is_cut():
    rows = ROWS.copy()
    rows[::10, 0], rows[5::10, 1] = np.nan, np.nan
    mixture = GaussianMixture(2, missing="marginalise", random_state=0).fit(rows)
    found = split_start(mixture, CountedRows(rows, None), 3)["means_init"]
    expected = np.array([ROWS[k == GROUP].mean(axis=0) for k in range(3)])
    np.testing.assert_allclose(found[np.lexsort(found.T[::-1].round())], expected, atol=0.3)


def test_counts_are_equal_rows_and_several_components_are_cut_one_after_another():
    mixture = GaussianMixture(1).fit(ROWS)
    rows, counts = np.concatenate([ROWS, ROWS[:100]]), np.ones(700)
    counted = split_start(mixture, CountedRows(ROWS, np.repeat([2.0, 1.0], [100, 500])), 3)
    repeated = split_start(mixture, CountedRows(rows, counts), 3)
    for name, value in counted.items():
        np.testing.assert_allclose(value, repeated[name], rtol=1e-9)
    assert len(counted["means_init"]) == 3


def test_components_of_too_few_rows_are_not_cut():
    mixture = GaussianMixture(1).fit(ROWS[:4])
    assert split_start(mixture, CountedRows(ROWS[:4], None), 2) is None
