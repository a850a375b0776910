"""The covariance types against plain linear algebra on full matrices."""

import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.linalg
from references import COVARIANCE_TYPES, full_covariances, random_covariances, shaped
from sklearn.mixture import GaussianMixture as SklearnMixture

from emtau_dask.errors import EmtauError, InvalidDataError, SingularComponentError
from emtau_dask.mixture.covariance_types import STRUCTURES, structure_named
from emtau_dask.mixture.linalg import precision_factors
from emtau_dask.mixture.parameters import THREADED, m_step
from emtau_dask.mixture.statistics import SufficientStatistics

K, D = 3, 4


@pytest.fixture(params=COVARIANCE_TYPES)
def structure(request):
    return structure_named(request.param)


@pytest.fixture
def covariances(structure):
    return random_covariances(np.random.default_rng(5), structure.name, K, D)


@pytest.fixture
def factors(structure, covariances):
    return structure.factor(covariances, np.zeros((K, D)), np.ones(K))


def matrices(structure, values):
    return full_covariances(values, structure.name, K, D)


def scatter_of(structure, full):
    return shaped(full, structure.name)


def test_there_is_a_structure_for_each_covariance_type():
    assert tuple(STRUCTURES) == COVARIANCE_TYPES


@pytest.mark.parametrize("name", ["fulll", None, 3, ["full"]])
def test_an_unknown_covariance_type_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidDataError, match=", ".join(map(repr, COVARIANCE_TYPES))):
        structure_named(name)


def test_factors_and_precisions_are_those_of_the_inverse(structure, covariances, factors):
    assert structure.shape(K, D) == covariances.shape
    inverses = np.linalg.inv(matrices(structure, covariances))
    full, precisions = (matrices(structure, each) for each in (factors, structure.precisions(factors)))
    assert np.array_equal(full, np.triu(full))
    assert np.allclose(full @ full.swapaxes(1, 2), inverses, rtol=1e-12, atol=1e-12)
    assert np.allclose(precisions, inverses, rtol=1e-12, atol=1e-12)
    assert np.array_equal(precisions, precisions.swapaxes(1, 2))
    log_dets = -0.5 * np.linalg.slogdet(matrices(structure, covariances))[1]
    assert np.allclose(structure.log_det(factors, K, D), log_dets, rtol=1e-12)


def test_whitened_rows_have_the_mahalanobis_distance(structure, covariances, factors):
    rows = np.random.default_rng(0).normal(size=(9, D))
    inverses = np.linalg.inv(matrices(structure, covariances))
    for k in range(K):
        out = rows.copy()
        structure.whiten(out, factors, k)
        expected = [row @ inverses[k] @ row for row in rows]
        assert np.allclose((out**2).sum(axis=1), expected, rtol=1e-12)


def test_sum_scatter_sums_outer_products(structure):
    rng = np.random.default_rng(1)
    scatter = np.zeros(structure.shape(K, D))
    expected = np.zeros((K, D, D))
    for k in range(K):
        roots = rng.normal(size=(6, D))
        structure.sum_scatter(scatter, k, iter([roots[:3], roots[3:]]))
        expected[k] = sum(np.outer(root, root) for root in roots)
    assert np.allclose(scatter, scatter_of(structure, expected), rtol=1e-13)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize(("k", "d"), [(K, D), (3, 300), (700, 12)], ids=["small", "wide", "many"])
def test_add_outer_adds_weighted_outer_products(structure, k, d, m):
    """Some of the shapes are worked on in several tiles, of rows or of components."""
    rng = np.random.default_rng(2)
    weights, vectors = rng.uniform(-1, 1, size=(m, k)), rng.normal(size=(m, k, d))
    scatter = rng.normal(size=structure.shape(k, d))
    each = [
        sum(w * np.outer(v, v) for w, v in zip(weights[:, j], vectors[:, j], strict=True)) for j in range(k)
    ]
    expected = scatter + scatter_of(structure, np.array(each))
    structure.add_outer(scatter, weights, vectors)
    assert np.allclose(scatter, expected, rtol=1e-12, atol=1e-12)


def test_distances_are_traces(structure, covariances, factors):
    rng = np.random.default_rng(3)
    roots = rng.normal(size=(K, D, D))
    scatters = roots @ roots.swapaxes(1, 2)
    inverses = np.linalg.inv(matrices(structure, covariances))
    expected = sum(np.trace(inverse @ scatter) for inverse, scatter in zip(inverses, scatters, strict=True))
    assert np.isclose(structure.distances(scatter_of(structure, scatters), factors), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["full", "tied"])
@pytest.mark.parametrize("d", [63, 64, 150])
def test_distances_of_many_features_are_traces_of_all_components(name, d):
    structure = structure_named(name)
    drawn = random_covariances(np.random.default_rng(d), name, 2, d)
    factors = structure.factor(drawn, np.zeros((2, d)), np.ones(2))
    scatter = random_covariances(np.random.default_rng(1), name, 2, d)
    expected = np.trace(np.linalg.solve(drawn, scatter), axis1=-2, axis2=-1).sum()
    assert np.isclose(structure.distances(scatter, factors), expected, rtol=1e-11)


DISTANCES = """
import numpy as np
from emtau_dask.mixture.covariance_types import STRUCTURES
rng = np.random.default_rng(0)
for _ in range(20):
    scatter, factors = rng.normal(size=(2, 3, 3, 3))
    print(STRUCTURES["full"].distances(scatter, np.triu(factors)).hex())
"""


def test_distances_do_not_depend_on_the_seed_of_the_hashes_of_strings():
    printed = {
        subprocess.run(
            [sys.executable, "-c", DISTANCES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize("structure", ["full", "tied"], indirect=True)
def test_covariances_are_exactly_symmetric(structure):
    rng = np.random.default_rng(6)
    scatter = np.zeros(structure.shape(K, D))
    structure.add_outer(scatter, np.ones((1, K)), rng.normal(size=(1, K, D)))
    scatter *= 1 + rng.uniform(0, 1e-15, size=D)
    full = matrices(structure, structure.covariances(scatter, np.ones(K), D, 1.0))
    assert np.array_equal(full, full.swapaxes(1, 2))


def test_given_precisions_have_their_covariances_and_factors(structure, covariances, factors):
    found = structure.from_precisions(structure.precisions(factors))
    assert np.allclose(found[0], covariances, rtol=1e-12)
    assert np.allclose(found[1], factors, rtol=1e-11, atol=1e-13)
    covariance, factor = (matrices(structure, each) for each in found)
    assert np.array_equal(covariance, covariance.swapaxes(1, 2))
    assert np.array_equal(factor, np.triu(factor))


def test_precisions_that_are_not_positive_are_refused(structure, covariances):
    with pytest.raises(InvalidDataError, match=f"'{structure.name} precision' should be.*positive"):
        structure.from_precisions(-covariances)


def test_precisions_that_are_not_symmetric_are_refused():
    lopsided = np.eye(3)
    lopsided[0, 1] = 0.5
    with pytest.raises(InvalidDataError, match="symmetric"):
        structure_named("tied").from_precisions(lopsided)


def test_precisions_that_are_indefinite_are_refused():
    with pytest.raises(InvalidDataError, match="positive-definite"):
        structure_named("full").from_precisions(np.array([[[1.0, 2.0], [2.0, 1.0]]]))


def test_n_parameters_are_scikit_learns(structure):
    k, d = 5, 4
    judge = SklearnMixture(k, covariance_type=structure.scikit_learn_name)
    judge.means_ = np.zeros((k, d))
    expected = {"tied_diag": d, "tied_spherical": 1}.get(
        structure.name, judge._n_parameters() - k * d - (k - 1)
    )
    assert structure.n_parameters(k, d) == expected


def test_draw_maps_standard_normals_to_the_covariance(structure, covariances):
    for k in range(K):
        root = structure.draw(np.eye(D), covariances, k)
        assert np.allclose(root.T @ root, matrices(structure, covariances)[k], rtol=1e-12, atol=1e-12)


def test_variances_of_zero_are_singular_with_component_and_weight_and_so_are_those_of_nan(
    structure, covariances
):
    broken = covariances * 0
    with pytest.raises(SingularComponentError) as caught:
        structure.factor(broken, np.ones((K, D)), np.array([7.0, 8.0, 9.0]))
    shared = structure.name.startswith("tied")
    assert caught.value.component == (-1 if shared else 0)
    assert caught.value.weight == (24.0 if shared else 7.0)
    with pytest.raises(EmtauError):
        structure.factor(covariances * np.nan, np.zeros((K, D)), np.ones(K))


def precision_factor(covariance, means, component=0, weight=1.0):
    (factor,) = precision_factors(covariance[None], means[None], np.array([weight]), component)
    return factor


def test_a_variance_below_what_the_rows_rounding_can_make_is_singular():
    covariance = np.diag([1.0, 1e-22])
    with pytest.raises(SingularComponentError, match="the resolution of float64"):
        precision_factor(covariance, np.array([0.0, 1e5]))
    assert np.allclose(precision_factor(covariance, np.zeros(2)), np.diag([1.0, 1e11]))


def test_a_linearly_dependent_feature_is_singular_and_named():
    rows = np.random.default_rng(0).normal(size=(50, 2))
    with pytest.raises(SingularComponentError, match="feature 2 is a linear combination"):
        precision_factor(np.cov(np.column_stack([rows, rows.sum(axis=1)]).T), np.zeros(3))
    rows = np.random.default_rng(0).normal(size=(900, 300))
    rows[:, 217] = rows[:, 30] - rows[:, 119]
    with pytest.raises(SingularComponentError, match="feature 217 is a linear combination"):
        precision_factor(np.cov(rows.T), np.zeros(300))


@pytest.mark.parametrize("d", [64, 65, 95, 96, 97, 129, 193, 401])
def test_factors_of_many_features_are_the_inverse_of_scipys(d):
    matrix = np.cov(np.random.default_rng(d).normal(size=(3 * d, d)).T)
    factor = precision_factor(matrix, np.zeros(d))
    expected = scipy.linalg.solve_triangular(scipy.linalg.cholesky(matrix, lower=True), np.eye(d), lower=True)
    assert np.allclose(factor, expected.T, rtol=1e-11, atol=1e-13)
    assert np.array_equal(factor, np.triu(factor))


def test_threads_change_no_bit_of_an_m_step():
    structure, d, weights = structure_named("full"), 300, np.array([1.0, 2.0, 5.0])
    assert 3 * d**3 > THREADED
    scatter = weights[:, None, None] * random_covariances(np.random.default_rng(8), "full", 3, d)
    statistics = SufficientStatistics(weights, np.zeros((3, d)), scatter)
    alone, together = (m_step(statistics, structure, 0.5, threads) for threads in (1, 3))
    assert np.array_equal(alone.covariances, together.covariances)
    assert np.array_equal(alone.precisions_cholesky, together.precisions_cholesky)
    covariances, factors = alone.covariances, alone.precisions_cholesky
    assert np.allclose(covariances, scatter / weights[:, None, None] + 0.5 * np.eye(d), rtol=1e-14)
    assert np.allclose(factors.swapaxes(1, 2) @ covariances @ factors, np.eye(d), atol=1e-10)
    scatter[1, 0] = scatter[1, :, 0] = 0.0
    for threads in (1, 3):
        with pytest.raises(SingularComponentError) as caught:
            m_step(statistics, structure, 0.0, threads)
        assert caught.value.component == 1


@pytest.mark.parametrize("broken", [0, 2, 4])
def test_the_component_that_is_singular_is_named_among_sound_ones(broken):
    """Whether LAPACK refuses the matrix, or only leaves a pivot too small."""
    for least in (-1e-3, 1e-17):
        matrices = random_covariances(np.random.default_rng(9), "full", 5, 3)
        rotation, _ = np.linalg.qr(np.random.default_rng(10).normal(size=(3, 3)))
        matrices[broken] = (rotation * [1.0, 0.5, least]) @ rotation.T
        with pytest.raises(SingularComponentError, match="linear combination") as caught:
            precision_factors(matrices, np.zeros((5, 3)), np.arange(1.0, 6.0))
        assert (caught.value.component, caught.value.weight) == (broken, broken + 1.0)


@pytest.mark.parametrize(("refused", "tiny"), [(1, 3), (3, 1)])
def test_of_several_singular_components_the_first_is_named(refused, tiny):
    matrices = np.stack([np.eye(3)] * 5)
    matrices[refused, 0, 1] = matrices[refused, 1, 0] = 1.5
    matrices[tiny, 0, 1] = matrices[tiny, 1, 0] = 1 - 1e-15
    with pytest.raises(SingularComponentError, match="feature 1 is a linear combination") as caught:
        precision_factors(matrices, np.zeros((5, 3)), np.ones(5))
    assert caught.value.component == 1


@pytest.mark.parametrize("name", ["full", "diag", "spherical"])
def test_the_component_whose_variance_is_too_small_is_named(name):
    structure = structure_named(name)
    covariances = random_covariances(np.random.default_rng(3), name, 4, D)
    covariances[2] *= 1e-40
    with pytest.raises(SingularComponentError, match="not above") as caught:
        structure.factor(covariances, np.ones((4, D)), np.arange(1.0, 5.0))
    assert (caught.value.component, caught.value.weight) == (2, 3.0)


def test_features_correlated_at_1_minus_1e8_are_not():
    correlated = np.array([[1.0, 1 - 1e-8], [1 - 1e-8, 1.0]])
    factor = precision_factor(correlated, np.zeros(2))
    assert np.allclose(factor.T @ correlated @ factor, np.eye(2), atol=1e-7)


def test_the_scale_of_features_changes_a_factor_by_that_scale_only():
    matrix = random_covariances(np.random.default_rng(7), "tied", 1, D)
    scale = np.array([2.0**-20, 1.0, 2.0**10, 2.0**20])
    plain = precision_factor(matrix, np.zeros(D))
    scaled = precision_factor(matrix * np.outer(scale, scale), np.zeros(D))
    assert np.array_equal(scaled, plain / scale[:, None])


def test_the_message_names_the_three_remedies():
    with pytest.raises(SingularComponentError) as caught:
        precision_factor(np.zeros((2, 2)), np.zeros(2), 4, 2.5)
    message = str(caught.value)
    remedies = ("decrease the number of components", "increase reg_covar", "scale the input data")
    assert all(text in message for text in ("component 4 (weight 2.5 rows)", *remedies))
