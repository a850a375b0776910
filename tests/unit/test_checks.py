"""Constraints on settings: what they allow, how they say it, and the nearest valid value."""

import math
from fractions import Fraction

import numpy as np
import pytest

from emtau_dask.constraints import FLAG, FRACTION, MAX_ITERATIONS, NONE, choice, either, integer, number

COUNT = integer(1, 9)
LEVEL = number(0)
NAME = choice("full", "tied")
ANY = either(choice("on-empty"), NONE, integer(1))

ALLOWED = [
    (COUNT, [1, 9, np.int8(3), np.uint64(9)]),
    (LEVEL, [0, 1e-320, 1e308, 2, np.float32(2), np.longdouble(1), Fraction(1, 3)]),
    (FRACTION, [1, 1e-320, 0.5, np.float32(1)]),
    (FLAG, [True, False, np.bool_(1)]),
    (NONE, [None]),
    (NAME, ["full", "tied"]),
    (ANY, ["on-empty", None, 1, MAX_ITERATIONS]),
]
OTHER = ["x", "1", "\ud800", b"x", [], {}, object(), 1j, np.array([1, 2]), -(10**400), 10**5000]
REFUSED = [
    (COUNT, [0, 10, 1.0, True, None, math.nan, Fraction(3), *OTHER]),
    (LEVEL, [-1, -1e-320, math.nan, math.inf, True, None, *OTHER]),
    (FRACTION, [0, -0.0, 1 + 1e-15, math.nan, math.inf, True, None, Fraction(1, 3), *OTHER]),
    (FLAG, [0, 1, None, *OTHER]),
    (NONE, [0, False, *OTHER]),
    (NAME, ["ful", "Full", 0, None, *OTHER]),
    (ANY, ["on_empty", 0, False, MAX_ITERATIONS + 1, *OTHER]),
]


@pytest.mark.parametrize(("constraint", "values"), ALLOWED)
def test_what_is_allowed(constraint, values):
    assert [value for value in values if not constraint.holds(value)] == []


@pytest.mark.parametrize(("constraint", "values"), REFUSED)
def test_what_is_refused(constraint, values):
    assert [number for number, value in enumerate(values) if constraint.holds(value)] == []
    for value in values:
        constraint.nearest(value)


WORDS = [
    (integer(0), "an integer of at least 0 and at most 1,000,000,000,000"),
    (LEVEL, "a finite number of at least 0"),
    (NAME, "one of 'full', 'tied'"),
    (either(choice("leaves"), FRACTION), "'leaves' or a number above 0 and at most 1"),
    (either(choice("on-empty"), NONE, COUNT), "'on-empty', None, or an integer of at least 1 and at most 9"),
]
NEAREST = [
    (COUNT, 0, 1),
    (COUNT, 10, 9),
    (COUNT, 3.0, 3),
    (COUNT, 2.5, None),
    (COUNT, True, None),
    (COUNT, "7", "7 (without quotes)"),
    (LEVEL, -1, "0"),
    (LEVEL, math.nan, None),
    (FRACTION, 1.5, "1"),
    (FRACTION, 0, None),
    (NAME, "ful", "full"),
    (NAME, 5, None),
    (ANY, "onempty", "on-empty"),
    (ANY, 0, 1),
]


def test_the_words():
    assert [constraint.words for constraint, _ in WORDS] == [words for _, words in WORDS]


def test_the_nearest_valid_value():
    wrong = [case for case in NEAREST if case[0].nearest(case[1]) != case[2]]
    assert wrong == []
