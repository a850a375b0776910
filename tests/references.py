"""Naive references that the unit and property tests share: loops in extended precision."""

import numpy as np
from oracles import naive, starts
from scipy.stats import multivariate_normal

from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import MostProbable
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import block_statistics

LONG = np.longdouble
COVARIANCE_TYPES = starts.COVARIANCE_TYPES


def shaped(matrices, covariance_type):
    """K full scatter matrices as the structure holds them: summed over what it shares."""
    return {
        "full": lambda: matrices,
        "tied": lambda: matrices.sum(axis=0),
        "diag": lambda: np.array([np.diag(matrix) for matrix in matrices]),
        "spherical": lambda: np.array([np.trace(matrix) for matrix in matrices]),
        "tied_diag": lambda: np.diag(matrices.sum(axis=0)),
        "tied_spherical": lambda: np.asarray(np.trace(matrices.sum(axis=0))),
    }[covariance_type]()


def naive_statistics(rows, responsibilities, covariance_type):
    """Weights, means and scatter about the means, row by row, in longdouble."""
    rows, responsibilities = rows.astype(LONG), responsibilities.astype(LONG)
    (n, d), k = rows.shape, responsibilities.shape[1]
    weights, means, scatter = np.zeros(k, LONG), np.zeros((k, d), LONG), np.zeros((k, d, d), LONG)
    for component in range(k):
        for row in range(n):
            weights[component] += responsibilities[row, component]
            means[component] += responsibilities[row, component] * rows[row]
        if weights[component] > 0:
            means[component] /= weights[component]
        for row in range(n):
            difference = rows[row] - means[component]
            scatter[component] += responsibilities[row, component] * np.outer(difference, difference)
    return weights, means, shaped(scatter, covariance_type)


def summed(kernel):
    """The statistics of all rows that a kernel has summed."""
    return kernel.plan.statistics(kernel.sums())


def full_covariances(covariances, covariance_type, k, d):
    """scikit-learn's shape for a structure -> K full matrices, float64."""
    return naive.unpacked(np.asarray(covariances), covariance_type, k, d)


def log_joint(rows, parameters):
    """ln π_k + ln N(x_n | μ_k, Σ_k) by scipy: N x K."""
    full = full_covariances(parameters.covariances, parameters.covariance_type, *parameters.means.shape)
    densities = [multivariate_normal(*each).logpdf(rows) for each in zip(parameters.means, full, strict=True)]
    return np.log(parameters.weights) + np.array(densities).reshape(len(full), -1).T


def random_covariances(rng, covariance_type, k, d):
    """Well conditioned covariances in scikit-learn's shape for the structure."""
    roots = rng.normal(size=(k, d, d)) * 0.4
    matrices = roots @ roots.swapaxes(1, 2) + np.eye(d) * rng.uniform(0.5, 1.5, size=(k, 1, 1))
    return np.array(naive.packed(matrices, covariance_type))


def statistics_of(structure, rows, responsibilities):
    """Return the block statistics of rows under responsibilities (n, K)."""
    return block_statistics(structure, rows, np.ascontiguousarray(responsibilities.T))


def drawn(covariance_type, k=3, d=4, seed=0, spread=2.0):
    """A mixture whose means are about ``spread`` from 0 in each feature."""
    rng = np.random.default_rng(seed)
    structure = structure_named(covariance_type)
    covariances = random_covariances(rng, covariance_type, k, d)
    weights, means = rng.dirichlet(np.ones(k) * 5), rng.normal(size=(k, d)) * spread
    factors = structure.factor(covariances, means, np.ones(k))
    return MixtureParameters(covariance_type, weights, means, covariances, factors)


def rows_near(parameters, n, dtype=np.float64, seed=1):
    """Rows about means of a mixture, of standard deviation 1 in each feature."""
    rng = np.random.default_rng(seed)
    owners = rng.integers(parameters.n_components, size=n)
    return (parameters.means[owners] + rng.normal(size=(n, parameters.n_features))).astype(dtype)


def room(n):
    """Where a kernel writes the most probable component of each row, and its responsibility."""
    return MostProbable(np.full(n, 255, np.uint8), np.full(n, np.nan))


def assert_naive(found, rows, responsibilities, covariance_type="full", *, rtol=1e-11, atol=(1e-12, 1e-10)):
    """Statistics are the sums over rows; ``atol`` of means and scatter, and ``rtol`` of all or of each."""
    wanted = naive_statistics(rows, responsibilities, covariance_type)
    rtols = rtol if isinstance(rtol, tuple) else (rtol,) * 3
    names = ("weights", "means", "scatter")
    for name, expected, relative, absolute in zip(names, wanted, rtols, (0, *atol), strict=True):
        actual = getattr(found, name)
        assert np.allclose(actual, expected.astype(float), rtol=relative, atol=absolute), name


def theta_of(parameters):
    """Parameters as the oracles hold them."""
    full = full_covariances(parameters.covariances, parameters.covariance_type, *parameters.means.shape)
    return naive.Theta(parameters.weights, parameters.means, full)


def started(rows, k, covariance_type, seed=0):
    """Parameters from the start that the oracles take."""
    given = starts.start(rows, k, covariance_type, seed=seed)
    covariances, factors = structure_named(covariance_type).from_precisions(given["precisions_init"])
    return MixtureParameters(
        covariance_type, given["weights_init"], given["means_init"], covariances, factors
    )
