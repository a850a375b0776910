"""Estimated gaps against sequences of bounds whose limit is known."""

import math
from dataclasses import replace

import pytest

from emtau_dask.em import FitHistory, IterationRecord
from emtau_dask.em.history import MAX_CORRECTION, corrected_gap, extrapolated_gap

LIMIT = -3.0


def record(iteration, bound, gap=math.nan, full_pass=True, accepted=True):
    return IterationRecord(iteration, bound, 100, full_pass, 1, 0, 0, 0.1, 100, accepted, gap)


def records(gaps, estimate=lambda gap: math.nan):
    """Full passes that are ``gaps`` below the limit."""
    return [record(i + 1, LIMIT - gap, estimate(gap)) for i, gap in enumerate(gaps)]


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.97])
def test_bounds_that_rise_geometrically_are_extrapolated_to_their_limit(factor):
    gaps = [factor**i for i in range(5)]
    assert extrapolated_gap(records(gaps)) == pytest.approx(gaps[-1], rel=1e-9)


@pytest.mark.parametrize("made", [0, 1, 2])
def test_two_bounds_say_nothing_of_their_limit(made):
    assert math.isnan(extrapolated_gap(records([1.0, 0.5][:made])))


@pytest.mark.parametrize("change", [{"full_pass": False}, {"accepted": False}])
def test_passes_that_are_partial_or_refused_are_not_extrapolated(change):
    kept = records([1.0, 0.5, 0.25])
    kept[1] = replace(kept[1], **change)
    assert math.isnan(extrapolated_gap(kept))


def test_bounds_whose_gains_grow_are_not_extrapolated():
    assert math.isnan(extrapolated_gap(records([1.0, 0.9, 0.7])))


@pytest.mark.parametrize("factor", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("passes", [6, 20, 40])
def test_where_passes_crawl_the_gap_is_that_of_their_extrapolation(factor, passes):
    """As when the curvature is known of few directions: the step's own estimate is a hundredth of the gap."""
    gaps = [factor**i for i in range(passes)]
    estimate = corrected_gap(records(gaps[:-1], lambda gap: gap / 100), gaps[-1] / 100, LIMIT - gaps[-1])
    assert estimate == pytest.approx(gaps[-1], rel=1e-6)


def test_gains_that_fluctuate_about_a_crawl_leave_the_gap_within_a_factor_of_three():
    gaps = [0.94**i * (1.02 if i % 3 else 1.0) for i in range(60)]
    for made in range(20, 60):
        before, now = records(gaps[:made], lambda gap: gap / 100), gaps[made]
        assert now / 3 < corrected_gap(before, now / 100, LIMIT - now) < 3 * now


def test_a_crawl_that_is_over_is_not_extrapolated():
    crawl = [0.9**i for i in range(30)]
    gaps = [*crawl, *(crawl[-1] * 0.05**i for i in range(1, 4))]
    estimate = corrected_gap(records(gaps[:-1], lambda gap: gap), gaps[-1], LIMIT - gaps[-1])
    assert estimate == gaps[-1]


def test_an_estimate_grows_as_the_one_before_should_have():
    before = [record(1, LIMIT - 1.0, gap=0.2)]
    assert corrected_gap(before, 0.01, LIMIT - 0.2) == pytest.approx(0.01 * 0.8 / 0.2)
    assert corrected_gap([record(1, LIMIT - 1.0, gap=1e-9)], 0.01, LIMIT) == pytest.approx(
        0.01 * MAX_CORRECTION
    )
    assert corrected_gap([record(1, LIMIT - 1.0, gap=5.0)], 0.01, LIMIT - 0.2) == 0.01


def test_without_an_estimate_or_earlier_passes_there_is_nothing_to_correct():
    assert math.isnan(corrected_gap(records([1.0, 0.9, 0.8], lambda gap: gap), math.nan, LIMIT))
    assert corrected_gap([], 0.5, LIMIT) == 0.5
    sampled = [record(1, LIMIT - 1.0, gap=0.2, full_pass=False), record(2, LIMIT, gap=0.1, accepted=False)]
    assert corrected_gap(sampled, 0.5, LIMIT - 0.2) == 0.5


def test_the_last_that_is_kept_is_not_a_refused_pass():
    kept = record(1, LIMIT)
    history = FitHistory(
        (kept, record(2, LIMIT - 0.1, full_pass=False), record(3, LIMIT - 1, accepted=False))
    )
    assert history.last_kept is kept
