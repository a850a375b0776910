"""The M-step, the expected log-density and the checks of given parameters, against loops over rows."""

import numpy as np
import pytest
from references import (
    COVARIANCE_TYPES,
    full_covariances,
    log_joint,
    naive_statistics,
    random_covariances,
    statistics_of,
)

from emtau_dask.errors import InvalidDataError, SingularComponentError
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.linalg import read_only_copy
from emtau_dask.mixture.parameters import (
    MixtureParameters,
    check_means,
    check_precisions,
    check_weights,
    expected_log_density,
    m_step,
    most_probable,
    tempered,
)
from emtau_dask.mixture.statistics import zero

N, K, D = 60, 3, 2


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("k", [1, 2, 16, 255, 256, 257])
@pytest.mark.parametrize("levels", [2, 1000])
def test_the_most_probable_component_is_the_first_of_the_largest(k, dtype, levels):
    """With few levels nearly all rows have ties."""
    scores = (np.random.default_rng(0).integers(levels, size=(k, 500)) / levels).astype(dtype)
    labels, largest = most_probable(scores)
    assert np.array_equal(labels, [list(row).index(max(row)) for row in scores.T])
    assert np.array_equal(largest, [max(row) for row in scores.T])
    assert labels.dtype == (np.uint8 if k <= 256 else np.uint16)


@pytest.fixture(params=COVARIANCE_TYPES)
def structure(request):
    return structure_named(request.param)


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(size=(N, D)) * [1.0, 3.0] + 5


@pytest.fixture(scope="module")
def responsibilities():
    return np.random.default_rng(1).dirichlet(np.ones(K), size=N)


@pytest.fixture
def parameters(structure):
    rng = np.random.default_rng(2)
    covariances = random_covariances(rng, structure.name, K, D)
    weights, means = rng.dirichlet(np.ones(K) * 9), rng.normal(size=(K, D)) + 5
    factors = structure.factor(covariances, means, np.ones(K))
    return MixtureParameters(structure.name, weights, means, covariances, factors)


def m_step_of(structure, rows, responsibilities, reg_covar=0.0):
    return m_step(statistics_of(structure, rows, responsibilities), structure, reg_covar)


@pytest.mark.parametrize("reg_covar", [0.0, 0.5])
def test_an_m_step_gives_weighted_means_and_scatters(structure, rows, responsibilities, reg_covar):
    weights, means, scatter = naive_statistics(rows, responsibilities, "full")
    each = scatter / weights[:, None, None]
    pooled = scatter.sum(axis=0) / N
    variances = np.array([np.diag(matrix) for matrix in each])
    expected = {
        "full": each + reg_covar * np.eye(D),
        "tied": pooled + reg_covar * np.eye(D),
        "diag": variances + reg_covar,
        "spherical": variances.mean(axis=1) + reg_covar,
        "tied_diag": np.diag(pooled) + reg_covar,
        "tied_spherical": np.diag(pooled).mean() + reg_covar,
    }[structure.name]
    found = m_step_of(structure, rows, responsibilities, reg_covar)
    assert np.allclose(found.weights, weights / N, rtol=1e-14)
    assert np.allclose(found.means, means, rtol=1e-14)
    assert np.allclose(found.covariances, expected.astype(float), rtol=1e-13)
    precisions = structure.precisions(found.precisions_cholesky)
    full = [full_covariances(values, structure.name, K, D) for values in (found.covariances, precisions)]
    assert np.allclose(full[0] @ full[1], np.eye(D), atol=1e-12)
    arrays = found.weights, found.means, found.covariances, found.precisions_cholesky
    assert not any(array.flags.writeable for array in arrays)


def test_a_component_without_weight_is_named(structure, rows, responsibilities):
    emptied = responsibilities.copy()
    emptied[:, 1] = 0
    with pytest.raises(SingularComponentError, match="no row is left in it") as caught:
        m_step_of(structure, rows, emptied)
    assert (caught.value.component, caught.value.weight) == (1, 0.0)


def test_no_rows_and_nan_are_singular(structure, rows, responsibilities):
    with pytest.raises(SingularComponentError):
        m_step(zero(structure, K, D), structure, 1e-6)
    with np.errstate(all="ignore"), pytest.raises(SingularComponentError):
        m_step_of(structure, rows * np.nan, responsibilities)


def test_log_scales_are_the_log_density_at_the_mean(parameters):
    at_means = np.diag(log_joint(parameters.means, parameters))
    assert np.allclose(parameters.log_scales, at_means, rtol=1e-13)


def test_responsibilities_of_tempered_parameters_are_those_of_powers_of_densities(parameters, rows):
    found = log_joint(rows, tempered(parameters, 0.5))
    expected = 0.5 * log_joint(rows, parameters)
    shifts = found - expected
    assert np.allclose(shifts, shifts[:, :1], rtol=0, atol=1e-11)
    assert np.allclose(
        tempered(parameters, 0.5).log_scales, np.diag(log_joint(parameters.means, tempered(parameters, 0.5)))
    )


def test_expected_log_density_is_the_sum_over_rows_and_of_none_zero(
    structure, parameters, rows, responsibilities
):
    statistics = statistics_of(structure, rows, responsibilities)
    expected = (responsibilities * log_joint(rows, parameters)).sum()
    assert np.isclose(expected_log_density(statistics, parameters), expected, rtol=1e-12)
    assert expected_log_density(zero(structure, K, D), parameters) == 0


def test_frozen_arrays_are_copies():
    values = np.ones(3)
    copy = read_only_copy(values)
    values[0] = 2
    assert np.array_equal(copy, np.ones(3))


def test_given_weights_are_normalised():
    given = np.array([0.3, 0.7 + 5e-7])
    assert np.allclose(check_weights(given, 2), given / given.sum(), rtol=1e-15)


UNUSABLE = [
    ([0.5, 0.25, 0.25], r"shape of \(2,\), but got \(3,\)"),
    ([[0.5, 0.5]], r"shape of \(2,\), but got \(1, 2\)"),
    ([1.5, -0.5], r"from -0\.50000 to 1\.50000"),
    ([0.5, 0.4], r"sum\(weights\) = 0\.90000.*divide weights_init by its sum"),
    ([1.0, 0.0], r"weights_init\[1\] is 0; every weight must be above 0"),
    ([np.nan, 1.0], "weights_init holds NaN or infinity"),
]
NO_NUMBERS = [
    ["a", "b"],
    ["0.5", "0.5"],
    [0.5 + 0j, 0.5],
    np.array([0.5 + 1j, 0.5]),
    [[1], [1, 2]],
    [None, 1.0],
]


def test_weights_that_cannot_be_used_or_are_no_real_numbers_are_refused():
    for values, message in [*UNUSABLE, *((values, "weights_init") for values in NO_NUMBERS)]:
        with pytest.raises(InvalidDataError, match=message):
            check_weights(values, 2)


def test_means_of_another_shape_are_refused_with_both_shapes():
    with pytest.raises(
        InvalidDataError, match=r"'means' should have the shape of \(2, 3\), but got \(3, 2\)"
    ):
        check_means(np.zeros((3, 2)), 2, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_means_that_are_not_finite_are_refused(bad):
    with pytest.raises(
        InvalidDataError, match="means_init holds NaN or infinity; every value must be finite"
    ):
        check_means([[bad, 0.0]], 1, 2)


def test_precisions_of_another_shape_are_refused_with_both_shapes(structure):
    wanted = structure.shape(K, D)
    with pytest.raises(InvalidDataError) as caught:
        check_precisions(np.ones((9, 9, 9)), structure, K, D)
    assert f"'{structure.name} precision' should have the shape of {wanted}" in str(caught.value)
    assert "(9, 9, 9)" in str(caught.value)


def test_given_arrays_are_not_touched():
    values = np.array([[1.0, 2.0]])
    check_means(values, 1, 2)
    assert values.flags.writeable
