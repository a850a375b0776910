"""Samples by row number: nested, of the right share, the same under any chunking; the numbers are uniform."""

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from emtau_dask.data.row_random import ACTIVITY, BLOCK, MEMBERSHIP, Samples, hashed_uniforms
from emtau_dask.data.source import chunk_ranges

N = 200_000
SHARES = (1 / 256, 1 / 64, 1 / 16, 0.5)
CHUNKINGS = {
    "one": (N,),
    "ragged": (1, 0, 70_000, 3, N - 70_004, 0),
    "many": (10_000,) * 20,
    "beside a hashed block": (BLOCK - 1, BLOCK + 1, 1, N - 2 * BLOCK - 1),
}
MASK = 2**64 - 1


def split_mix(value):
    """SplitMix64's finaliser, in Python's own integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def naive_uniform(keys, row):
    golden = 0x9E3779B97F4A7C15
    salt = reduce(lambda state, key: split_mix(((state ^ (key & MASK)) + golden) & MASK), keys, 0)
    return (split_mix(((row * golden) & MASK) ^ salt) >> 11) / 2**53


def members(samples, chunking, n=N):
    """The row numbers of every sample, chunk by chunk."""
    found = [[] for _ in samples.shares]
    for chunk_range in chunk_ranges(chunking).values():
        for level, positions in enumerate(samples.positions(chunk_range, np.arange(chunk_range.n_rows))):
            found[level].append(positions + chunk_range.start)
    return [np.concatenate(parts) for parts in found]


class TestSamples:
    @pytest.mark.parametrize("chunking", list(CHUNKINGS)[1:])
    def test_the_same_rows_under_any_chunking(self, chunking):
        samples = Samples(5, SHARES)
        whole, split = (members(samples, CHUNKINGS[name]) for name in ("one", chunking))
        for a, b in zip(whole, split, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_each_holds_the_one_before(self):
        found = members(Samples(5, SHARES), CHUNKINGS["one"])
        for smaller, larger in pairwise(found):
            assert len(smaller) < len(larger)
            assert np.isin(smaller, larger).all()

    @pytest.mark.parametrize("seed", range(5))
    def test_their_shares_are_right_within_the_error_of_drawing(self, seed):
        for share, found in zip(SHARES, members(Samples(seed, SHARES), CHUNKINGS["one"]), strict=True):
            assert stats.binomtest(len(found), N, share).pvalue > 1e-4

    def test_rows_that_are_absent_are_in_none_and_change_no_others(self):
        samples, (chunk_range,) = Samples(5, SHARES), chunk_ranges((N,)).values()
        everyone = samples.positions(chunk_range, np.arange(N))
        present = np.flatnonzero(np.random.default_rng(0).uniform(size=N) < 0.7)
        for some, everybody in zip(samples.positions(chunk_range, present), everyone, strict=True):
            np.testing.assert_array_equal(some, np.intersect1d(everybody, present))

    def test_a_sample_of_a_share_of_its_own_is_nested_among_them(self):
        samples, (chunk_range,) = Samples(5, SHARES), chunk_ranges((N,)).values()
        inside = samples.positions(chunk_range, np.arange(N))
        between = samples.within_share(chunk_range, inside[1], 1 / 128)
        assert np.isin(inside[0], between).all()
        assert np.isin(between, inside[1]).all()
        assert stats.binomtest(len(between), N, 1 / 128).pvalue > 1e-4
        np.testing.assert_array_equal(samples.within_share(chunk_range, inside[1], 1.0), inside[1])

    def test_other_seeds_draw_others_independently(self):
        a, b = (set(members(Samples(seed, (0.25,)), CHUNKINGS["one"])[0].tolist()) for seed in (0, 1))
        assert stats.binomtest(len(a & b), N, 1 / 16).pvalue > 1e-4

    def test_names_tell_levels_apart(self):
        samples = Samples(5, SHARES)
        assert len(set(samples.names)) == len(SHARES)


class TestHash:
    @pytest.mark.parametrize("keys", [(0,), (7, MEMBERSHIP), (2**31 - 1, ACTIVITY, 12), (-3, 5), (2**70,)])
    def test_it_is_split_mix(self, keys):
        rows = np.array([0, 1, 2, 3, 1000, BLOCK - 1, BLOCK, 2**31, 2**40 + 5])
        keys_seen = tuple(key % 2**64 for key in keys)
        expected = [naive_uniform(keys_seen, int(row)) for row in rows]
        np.testing.assert_array_equal(hashed_uniforms(keys, rows), expected)

    def test_no_rows_have_no_numbers(self):
        assert hashed_uniforms((1, 2), np.arange(0)).shape == (0,)

    @pytest.mark.parametrize("keys", [(0, MEMBERSHIP), (1, MEMBERSHIP), (0, ACTIVITY, 1), (0, ACTIVITY, 2)])
    def test_numbers_are_uniform(self, keys):
        numbers = hashed_uniforms(keys, np.arange(N))
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4

    @pytest.mark.parametrize("stride", [1, 2, 64, 1000])
    def test_numbers_of_rows_beside_each_other_are_independent(self, stride):
        numbers = hashed_uniforms((3, ACTIVITY, 4), np.arange(N))
        assert independent(numbers[:-stride], numbers[stride:])

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ((0, MEMBERSHIP), (1, MEMBERSHIP)),
            ((0, MEMBERSHIP), (0, ACTIVITY, 1)),
            ((0, ACTIVITY, 1), (0, ACTIVITY, 2)),
            ((0, ACTIVITY, 1), (1, ACTIVITY, 1)),
            ((1, ACTIVITY, 2), (2, ACTIVITY, 1)),
            ((2**31, ACTIVITY, 1), (0, ACTIVITY, 1)),
        ],
    )
    def test_seeds_uses_and_iterations_are_independent(self, one, other):
        assert independent(hashed_uniforms(one, np.arange(N)), hashed_uniforms(other, np.arange(N)))

    def test_the_order_in_which_rows_are_asked_for_changes_nothing(self):
        rows = np.random.default_rng(0).permutation(3 * BLOCK)
        np.testing.assert_array_equal(
            hashed_uniforms((9,), rows), hashed_uniforms((9,), np.arange(3 * BLOCK))[rows]
        )


def independent(a, b, cells=16):
    """Whether pairs fill the unit square evenly."""
    counts = np.histogram2d(a, b, bins=cells, range=[[0, 1], [0, 1]])[0]
    return stats.chisquare(counts.ravel()).pvalue > 1e-4
