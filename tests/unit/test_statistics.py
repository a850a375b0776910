"""Sufficient statistics against row-by-row sums in extended precision."""

from functools import partial

import numpy as np
import pytest
from references import COVARIANCE_TYPES, LONG, naive_statistics, statistics_of

from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.statistics import (
    Merger,
    PairwiseMerger,
    chosen,
    group_statistics,
    merge,
    merged,
    spread_out,
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


def test_zero_has_the_structures_shapes(structure):
    nothing = zero(structure, 3, 4)
    assert [getattr(nothing, name).shape for name in FIELDS] == [(3,), (3, 4), SHAPES[structure.name]]


def test_zero_is_all_zeros(structure):
    assert all(not getattr(zero(structure, 3, 4), name).any() for name in FIELDS)


def test_block_statistics_are_the_sums_over_rows(structure):
    rows, responsibilities = draw()
    statistics = statistics_of(structure, rows, responsibilities)
    assert_matches(statistics, naive_statistics(rows, responsibilities, structure.name))


def test_row_weights_may_be_in_the_responsibilities(structure):
    rows, responsibilities = draw()
    weighted = responsibilities * np.random.default_rng(1).uniform(0, 5, size=(len(rows), 1))
    statistics = statistics_of(structure, rows, weighted)
    assert_matches(statistics, naive_statistics(rows, weighted, structure.name))


def test_one_row_is_its_own_mean_without_scatter(structure):
    rows, responsibilities = draw(n=1)
    statistics = statistics_of(structure, rows, responsibilities)
    assert np.allclose(statistics.means, np.repeat(rows, 3, axis=0), rtol=1e-15, atol=0)
    assert np.abs(statistics.scatter).max() <= 4 * (np.finfo(float).eps * np.abs(rows).max()) ** 2


def test_rows_far_from_the_origin_keep_their_scatter(structure):
    rows, responsibilities = draw(shift=1e8)
    statistics = statistics_of(structure, rows, responsibilities)
    assert_matches(statistics, naive_statistics(rows, responsibilities, structure.name))


def test_identical_rows_have_no_scatter(structure):
    rows = np.full((50, 4), 0.1) + 1e5
    _, responsibilities = draw(n=50)
    scatter = statistics_of(structure, rows, responsibilities).scatter
    assert np.abs(scatter).max() <= 50 * (np.finfo(float).eps * 1e5) ** 2


def test_a_component_without_weight_has_zero_mean_and_scatter(structure):
    rows, responsibilities = draw()
    responsibilities[:, 1] = 0
    statistics = statistics_of(structure, rows, responsibilities)
    assert statistics.weights[1] == 0
    assert not statistics.means[1].any()


def test_a_component_without_weight_leaves_the_others_alone(structure):
    rows, responsibilities = draw()
    responsibilities[:, 1] = 0
    statistics = statistics_of(structure, rows, responsibilities)
    assert_matches(statistics, naive_statistics(rows, responsibilities, structure.name))


def test_some_components_chosen_and_spread_out_again_are_those_components():
    rng = np.random.default_rng(0)
    found = statistics_of(structure_named("full"), rng.normal(size=(20, 3)), rng.random((20, 4)))
    components = np.array([True, False, True, False])
    some = chosen(found, components)
    assert np.array_equal(some.scatter, found.scatter[[0, 2]])
    again = spread_out(some, components)
    for part, whole in ((getattr(each, name) for each in (again, found)) for name in FIELDS):
        assert np.array_equal(part[components], whole[components])
        assert not part[~components].any()
    assert chosen(found, np.ones(4, dtype=bool)) is found


def test_statistics_are_read_only(structure):
    statistics = statistics_of(structure, *draw())
    assert not any(getattr(statistics, name).flags.writeable for name in FIELDS)


def test_block_statistics_do_not_touch_their_arguments(structure):
    rows, responsibilities = draw()
    before = rows.copy(), responsibilities.copy()
    statistics_of(structure, rows, responsibilities)
    assert np.array_equal(rows, before[0])
    assert np.array_equal(responsibilities, before[1])


@pytest.mark.parametrize("weighted", [False, True])
def test_group_statistics_are_those_of_each_components_own_rows(structure, weighted):
    rng = np.random.default_rng(5)
    rows, groups = rng.normal(size=(40, 3)) + 1e6, rng.integers(0, 4, 40)
    groups[groups == 2] = 1
    weights = rng.uniform(0, 2, 40) if weighted else np.ones(40)
    found = group_statistics(structure, rows, groups, weights if weighted else None, 5)
    responsibilities = (groups[:, None] == np.arange(5)) * weights[:, None]
    assert_matches(found, naive_statistics(rows, responsibilities, structure.name))


def test_merge_gives_the_statistics_of_both(structure):
    rows, responsibilities = draw()
    parts = [statistics_of(structure, rows[s], responsibilities[s]) for s in (slice(13), slice(13, None))]
    assert_matches(merge(structure, *parts), naive_statistics(rows, responsibilities, structure.name))


def test_merging_parts_far_apart_keeps_the_scatter_between_them(structure):
    rows, responsibilities = draw()
    rows[13:] += 1e6
    parts = [statistics_of(structure, rows[s], responsibilities[s]) for s in (slice(13), slice(13, None))]
    assert_matches(merge(structure, *parts), naive_statistics(rows, responsibilities, structure.name))


def test_merging_a_component_that_one_side_lacks(structure):
    rows, responsibilities = draw()
    responsibilities[:13, 0] = 0
    parts = [statistics_of(structure, rows[s], responsibilities[s]) for s in (slice(13), slice(13, None))]
    assert_matches(merge(structure, *parts), naive_statistics(rows, responsibilities, structure.name))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_many_parts_merge_in_one_go(structure, parts):
    """Far from each other; the first lacks a component, and only the last has another."""
    rows, responsibilities = draw(n=44)
    pieces = np.array_split(np.arange(44), parts)
    for number, piece in enumerate(pieces):
        rows[piece] += 1e6 * number
    responsibilities[pieces[0][: len(pieces[0]) * (parts > 1)], 0] = 0
    responsibilities[: pieces[-1][0], 1] = 0
    found = merged(structure, (statistics_of(structure, rows[p], responsibilities[p]) for p in pieces))
    assert_matches(found, naive_statistics(rows, responsibilities, structure.name))


def test_merging_leaves_the_parts_as_they_were(structure):
    rows, responsibilities = draw()
    parts = [statistics_of(structure, rows[p], responsibilities[p]) for p in np.array_split(np.arange(40), 3)]
    before = [[getattr(part, name).copy() for name in FIELDS] for part in parts]
    merged(structure, parts)
    for part, arrays in zip(parts, before, strict=True):
        assert all(np.array_equal(getattr(part, name), a) for name, a in zip(FIELDS, arrays, strict=True))


def test_a_merger_without_anything_has_no_total(structure):
    assert PairwiseMerger(partial(merge, structure)).total() is None
    assert Merger(structure).total() is None


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 11])
def test_a_merger_gives_the_statistics_of_all_blocks(structure, blocks):
    rows, responsibilities = draw(n=44)
    merger = PairwiseMerger(partial(merge, structure))
    for part in np.array_split(np.arange(44), blocks):
        merger.push(statistics_of(structure, rows[part], responsibilities[part]))
    assert_matches(merger.total(), naive_statistics(rows, responsibilities, structure.name))


def test_a_merger_begins_again_after_its_total(structure):
    rows, responsibilities = draw(n=44)
    merger = PairwiseMerger(partial(merge, structure))
    for some in (np.arange(33), np.arange(33, 44)):
        for part in np.array_split(some, 3):
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
