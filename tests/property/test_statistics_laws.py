"""The laws of sufficient statistics on random rows: identity, order of merging, and any split."""

from functools import partial, reduce
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references import COVARIANCE_TYPES, LONG, naive_statistics, statistics_of

from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.statistics import PairwiseMerger, merge, merged, remainder, zero

FIELDS = ("weights", "means", "scatter")

structures = st.sampled_from(COVARIANCE_TYPES).map(structure_named)


@st.composite
def tables(draw, max_rows=24):
    """Rows near or far from the origin, some of them equal, and responsibilities with zeros among them."""
    seed = draw(st.integers(0, 2**32 - 1))
    n, d, k = draw(st.integers(1, max_rows)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.integers(-6, 7, size=d)
    rows = rng.normal(size=(n, d)) * scales + scales * draw(st.sampled_from([0.0, 1.0, -1e3, 1e7]))
    if draw(st.booleans()):
        rows[:] = rows[rng.integers(0, max(1, n // 3), size=n)]
    responsibilities = rng.dirichlet(np.full(k, 0.3), size=n) * rng.choice([0.0, 1.0, 2.5], size=(n, 1))
    responsibilities[:, rng.random(k) < 0.2] = 0
    return rows, responsibilities


@st.composite
def splits(draw):
    """A table and the boundaries of a split into parts, some of them empty."""
    rows, responsibilities = draw(tables())
    cuts = draw(st.lists(st.integers(0, len(rows)), max_size=6))
    return rows, responsibilities, [0, *sorted(cuts), len(rows)]


def part_statistics(structure, rows, responsibilities, bounds):
    return [
        statistics_of(structure, rows[start:stop], responsibilities[start:stop])
        for start, stop in pairwise(bounds)
    ]


def fields(statistics):
    return [getattr(statistics, name).astype(LONG) for name in FIELDS]


def assert_same_bits(a, b):
    for name in FIELDS:
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name


def assert_close(structure, actual, expected, rows, responsibilities):
    """Equal to rounding: of sums, of means (in units of the rows' magnitude), and of scatters about them."""
    eps = np.finfo(float).eps
    weights = responsibilities.astype(LONG).sum(axis=0)
    resolution = 16 * eps * np.abs(rows).max(axis=0)
    spread = np.ptp(rows, axis=0)
    wider = spread + resolution
    matrix = (1 + 64 * eps) * np.outer(wider, wider).astype(LONG) - np.outer(spread, spread)
    widths = {
        "full": lambda: weights[:, None, None] * matrix,
        "tied": lambda: weights.sum() * matrix,
        "diag": lambda: weights[:, None] * np.diag(matrix),
        "spherical": lambda: weights * np.trace(matrix),
        "tied_diag": lambda: weights.sum() * np.diag(matrix),
        "tied_spherical": lambda: weights.sum() * np.trace(matrix),
    }
    limits = {"weights": 64 * eps * weights, "means": resolution, "scatter": widths[structure.name]()}
    for name, reference in zip(FIELDS, expected, strict=True):
        error = np.abs(getattr(actual, name).astype(LONG) - reference)
        assert np.all(error <= limits[name]), name


@given(structure=structures, table=tables())
def test_zero_is_the_identity_bit_for_bit(structure, table):
    statistics = statistics_of(structure, *table)
    nothing = zero(structure, table[1].shape[1], table[0].shape[1])
    assert_same_bits(merge(structure, nothing, statistics), statistics)
    assert_same_bits(merge(structure, statistics, nothing), statistics)


@given(structure=structures, split=splits())
def test_merging_commutes_to_rounding(structure, split):
    rows, responsibilities, bounds = split
    middle = bounds[len(bounds) // 2]
    a, b = part_statistics(structure, rows, responsibilities, [0, middle, len(rows)])
    assert_close(structure, merge(structure, a, b), fields(merge(structure, b, a)), rows, responsibilities)


@given(structure=structures, table=tables(), where=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_merging_associates_to_rounding(structure, table, where):
    rows, responsibilities = table
    bounds = [0, *sorted(round(share * len(rows)) for share in where), len(rows)]
    a, b, c = part_statistics(structure, rows, responsibilities, bounds)
    left = merge(structure, merge(structure, a, b), c)
    right = merge(structure, a, merge(structure, b, c))
    assert_close(structure, left, fields(right), rows, responsibilities)


@settings(deadline=None)
@given(structure=structures, table=tables())
def test_a_block_is_the_naive_sum(structure, table):
    expected = naive_statistics(*table, structure.name)
    assert_close(structure, statistics_of(structure, *table), expected, *table)


def in_a_chain(structure, parts):
    return reduce(partial(merge, structure), parts)


def as_a_tree(structure, parts):
    merger = PairwiseMerger(partial(merge, structure))
    for part in parts:
        merger.push(part)
    return merger.total()


@pytest.mark.parametrize("way", [in_a_chain, merged, as_a_tree])
@settings(deadline=None)
@given(structure=structures, split=splits())
def test_any_split_merged_in_any_way_is_the_naive_sum(way, structure, split):
    rows, responsibilities, bounds = split
    found = way(structure, part_statistics(structure, rows, responsibilities, bounds))
    expected = naive_statistics(rows, responsibilities, structure.name)
    assert_close(structure, found, expected, rows, responsibilities)


@given(structure=structures, split=splits(), seed=st.integers(0, 99))
def test_what_is_left_of_a_whole_is_the_statistics_of_the_other_rows(structure, split, seed):
    """Within 32 times the rounding of the whole, or it is refused; it is where less than a 16th is left."""
    rows, responsibilities, _ = split
    inside = np.random.default_rng(seed).random(len(rows)) < 0.3
    whole, part, rest = (
        statistics_of(structure, rows[which], responsibilities[which])
        for which in (slice(None), inside, ~inside)
    )
    found = remainder(structure, whole, part, np.zeros(len(whole.weights)))
    shares = rest.weights[whole.weights > 0] / whole.weights[whole.weights > 0]
    if (shares < 0.06).any():
        assert found is None
    if found is None:
        return
    assert (shares > 0.062).all()
    expected = naive_statistics(rows[~inside], responsibilities[~inside], structure.name)
    assert_close(structure, found, expected, rows, 32 * responsibilities)


CENTRES = np.array([[0.0, 0.0], [8.0, 1.0], [1e5, 1e5]])
APART = CENTRES[np.arange(400) % 2] + np.random.default_rng(5).normal(size=(400, 2))


def settled(covariance_type, staying, negligible=0.0):
    """What is left of 400 rows near two of three components, where some rows stay; and what is expected."""
    structure = structure_named(covariance_type)
    distances = ((APART[:, np.newaxis] - CENTRES) ** 2).sum(axis=2)
    responsibilities = np.exp(-0.5 * (distances - distances.min(axis=1, keepdims=True)))
    responsibilities[:, 2] = 1e-30
    whole, part = (
        statistics_of(structure, APART[which], responsibilities[which]) for which in (slice(None), staying)
    )
    found = remainder(structure, whole, part, np.full(3, negligible))
    return found, naive_statistics(APART[~staying], responsibilities[~staying], covariance_type)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_most_rows_of_a_chunk_are_left_without_being_looked_at(covariance_type):
    found, expected = settled(covariance_type, np.arange(400) % 9 == 0)
    assert found is not None
    for name, reference in zip(FIELDS, expected, strict=True):
        assert np.allclose(getattr(found, name), reference.astype(float), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_a_component_that_nearly_all_its_rows_stay_with_is_refused_unless_it_is_negligible(covariance_type):
    """The first component's rows stay, but for one in a hundred; its weight is 200."""
    near_first = APART[:, 0] < 4
    staying = near_first & (np.cumsum(near_first) % 100 != 0)
    assert settled(covariance_type, staying)[0] is None
    found, _ = settled(covariance_type, staying, negligible=300.0)
    assert found is not None
    assert (found.weights == 0).all()
