"""Sufficient statistics against row-by-row sums in extended precision."""

from functools import partial

import numpy as np
import pytest
from references import COVARIANCE_TYPES, LONG, naive_statistics, statistics_of

from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.statistics import (
    Merger,
    PairwiseMerger,
    group_statistics,
    merge,
    merged,
    zero,
)

SHAPES = {
    "full": (3, 4, 4),
    "tied": (4, 4),
    "diag": (3, 4),
    "spherical": (3,),
    "tied_diag": (4,),
    "tied_spherical": (),
}
FIELDS = ("weights", "means", "scatter")


@pytest.fixture(params=COVARIANCE_TYPES)
def structure(request):
    return structure_named(request.param)


def draw(n=40, k=3, d=4, *, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) + shift, rng.dirichlet(np.ones(k), size=n)


def assert_matches(statistics, expected, rtol=1e-13):
    for name, reference in zip(FIELDS, expected, strict=True):
        actual = getattr(statistics, name).astype(LONG)
        assert np.abs(actual - reference).max() <= rtol * np.abs(reference).max(), name


def test_zero_is_all_zeros_in_the_structures_shapes(structure):
    arrays = [getattr(zero(structure, 3, 4), name) for name in FIELDS]
    assert [array.shape for array in arrays] == [(3,), (3, 4), SHAPES[structure.name]]
    assert not any(array.any() for array in arrays)


@pytest.mark.parametrize("kind", ["plain", "weighted", "far from the origin", "a component without weight"])
def test_block_statistics_are_the_sums_over_rows(structure, kind):
    rows, responsibilities = draw(shift=1e8 if kind.startswith("far") else 0.0)
    if kind == "weighted":
        responsibilities *= np.random.default_rng(1).uniform(0, 5, size=(len(rows), 1))
    if kind.startswith("a component"):
        responsibilities[:, 1] = 0
    before = rows.copy(), responsibilities.copy()
    statistics = statistics_of(structure, rows, responsibilities)
    assert_matches(statistics, naive_statistics(rows, responsibilities, structure.name))
    empty = responsibilities.sum(axis=0) == 0
    assert not statistics.weights[empty].any()
    assert not statistics.means[empty].any()
    assert not any(getattr(statistics, name).flags.writeable for name in FIELDS)
    assert np.array_equal(rows, before[0])
    assert np.array_equal(responsibilities, before[1])


@pytest.mark.parametrize("n", [1, 50])
def test_identical_rows_have_no_scatter(structure, n):
    rows = np.full((n, 4), 0.1) + 1e5
    _, responsibilities = draw(n=n)
    statistics = statistics_of(structure, rows, responsibilities)
    assert np.allclose(statistics.means, rows[:1], rtol=1e-15, atol=0)
    assert np.abs(statistics.scatter).max() <= n * (np.finfo(float).eps * 1e5) ** 2


@pytest.mark.parametrize("weighted", [False, True])
def test_group_statistics_are_those_of_each_components_own_rows(structure, weighted):
    rng = np.random.default_rng(5)
    rows, groups = rng.normal(size=(40, 3)) + 1e6, rng.integers(0, 4, 40)
    groups[groups == 2] = 1
    weights = rng.uniform(0, 2, 40) if weighted else np.ones(40)
    found = group_statistics(structure, rows, groups, weights if weighted else None, 5)
    responsibilities = (groups[:, None] == np.arange(5)) * weights[:, None]
    assert_matches(found, naive_statistics(rows, responsibilities, structure.name))


@pytest.mark.parametrize("apart", [0.0, 1e6])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_merged_parts_are_the_statistics_of_all_rows(structure, parts, apart):
    """Near or far from each other; the first lacks a component, and only the last has another."""
    rows, responsibilities = draw(n=44)
    pieces = np.array_split(np.arange(44), parts)
    for number, piece in enumerate(pieces):
        rows[piece] += apart * number
    responsibilities[pieces[0][: len(pieces[0]) * (parts > 1)], 0] = 0
    responsibilities[: pieces[-1][0], 1] = 0
    made = [statistics_of(structure, rows[piece], responsibilities[piece]) for piece in pieces]
    before = [[getattr(part, name).copy() for name in FIELDS] for part in made]
    expected = naive_statistics(rows, responsibilities, structure.name)
    assert_matches(merged(structure, iter(made)), expected)
    if parts == 2:
        assert_matches(merge(structure, *made), expected)
    for part, arrays in zip(made, before, strict=True):
        assert all(np.array_equal(getattr(part, name), a) for name, a in zip(FIELDS, arrays, strict=True))


def test_a_merger_without_anything_has_no_total(structure):
    assert PairwiseMerger(partial(merge, structure)).total() is None
    assert Merger(structure).total() is None


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 11])
def test_a_merger_gives_the_statistics_of_all_blocks_and_begins_again(structure, blocks):
    rows, responsibilities = draw(n=44)
    merger = PairwiseMerger(partial(merge, structure))
    for some in (np.arange(33), np.arange(33, 44)):
        for part in np.array_split(some, blocks):
            merger.push(statistics_of(structure, rows[part], responsibilities[part]))
        expected = naive_statistics(rows[some], responsibilities[some], structure.name)
        assert_matches(merger.total(), expected)
        assert merger.total() is None


def test_a_merger_loses_less_than_merging_one_after_another():
    """1,024 blocks of one row far out: a balanced tree rounds the mean 10 times, a chain 1,023."""
    structure = structure_named("diag")
    rows = np.random.default_rng(3).normal(size=(1024, 2)) + 1e8
    responsibilities = np.ones((1024, 1))
    merger = PairwiseMerger(partial(merge, structure))
    for row in rows:
        merger.push(statistics_of(structure, row[None], responsibilities[:1]))
    _, means, _ = naive_statistics(rows, responsibilities, "diag")
    spacing = np.spacing(1e8)
    assert np.abs(merger.total().means - means).max() <= 6 * spacing
