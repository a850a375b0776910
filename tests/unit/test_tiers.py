"""Which cases of a product the default run keeps."""

from itertools import product

import pytest
from tiers import beyond_each_value_once, exhaustive_but

AXES = ("full", "tied", "diag"), (1, 2, 3, 8), (False, True)


@pytest.fixture
def kept():
    values = {case: list(enumerate(case)) for case in product(*AXES)}
    return set(values) - set(beyond_each_value_once(values))


def test_each_value_is_in_a_kept_case(kept):
    assert [{case[place] for case in kept} for place in range(len(AXES))] == [set(axis) for axis in AXES]


def test_no_more_cases_are_kept_than_the_longest_axis_has_values(kept):
    assert len(kept) == 4


def test_values_of_a_short_axis_are_kept_about_as_often(kept):
    assert sum(case[2] for case in kept) == 2


def test_cases_that_are_not_listed_are_exhaustive():
    one, two = exhaustive_but({1}, [1, 2])
    assert one == 1
    assert two.values == (2,)
    assert [mark.name for mark in two.marks] == ["exhaustive"]
