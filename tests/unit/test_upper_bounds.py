"""Scores of ill-conditioned components where products bound them from above, and where rows are near."""

import numpy as np
import pytest
from references import LONG, drawn, full_covariances

from emtau_dask.mixture import estep
from emtau_dask.mixture.covariance import Frame
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.estep import CentredScores
from emtau_dask.mixture.features import coefficients, frames_of, upper_bounds
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import plan_kernel

K = 6


def bounds_of(parameters, frame):
    return upper_bounds(coefficients(parameters, frame), parameters, frame)


def narrow(covariance_type, d, condition, offset=0.0, ill=range(K)):
    """Components of which some are long in one direction and narrow in others, whatever their size."""
    rng = np.random.default_rng(d)
    lengths = np.where(np.isin(np.arange(K), ill)[:, None], np.geomspace(1, condition**-0.5, d), 1.0)
    rotations = np.linalg.qr(rng.normal(size=(K, d, d)))[0]
    covariances = {
        "full": (rotations * lengths[:, None, :] ** 2) @ rotations.swapaxes(1, 2),
        "diag": lengths**2,
        "spherical": lengths[:, -1] ** 2,
    }[covariance_type]
    means, weights = offset + 3 * rng.normal(size=(K, d)), rng.dirichlet(np.ones(K))
    structure = structure_named(covariance_type)
    if covariance_type == "full":
        covariances = (covariances + covariances.swapaxes(1, 2)) / 2
    factors = structure.factor(covariances, means, weights)
    return MixtureParameters(covariance_type, weights, means, covariances, factors)


def rows_of(parameters, n):
    """Rows at a mean, near it, along its long and its narrow directions, and far from all."""
    rng = np.random.default_rng(0)
    d = parameters.n_features
    full = full_covariances(parameters.covariances, parameters.covariance_type, K, d)
    whose, normals = rng.integers(K, size=n), rng.normal(size=(n, d))
    roots = np.linalg.cholesky(full)[whose]
    near = parameters.means[whose] + np.einsum("nij,nj->ni", roots, normals)
    away = parameters.means[whose] + normals * 10.0 ** rng.uniform(-8, 4, size=(n, 1))
    return np.concatenate([parameters.means, near, away])


def exact(rows, parameters):
    """Weighted log-densities (K, n) in extended precision; factors and scales are taken as they are."""
    factors = full_covariances(
        parameters.precisions_cholesky, parameters.covariance_type, K, parameters.n_features
    )
    scores = []
    for scale, mean, factor in zip(parameters.log_scales, parameters.means, factors, strict=True):
        whitened = (rows.astype(LONG) - mean.astype(LONG)) @ factor.astype(LONG)
        scores.append(scale - (whitened**2).sum(axis=1) / 2)
    return np.array(scores)


def features(rows, frame, structure):
    y = frame.vectors(rows - frame.centre).T
    squares = np.empty((structure.squares.count(len(y)), len(rows)))
    for step in structure.squares.fill(y, squares):
        step()
    return np.concatenate([np.ones((1, len(rows))), y, squares])


@pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical"])
@pytest.mark.parametrize("d", [1, 2, 4, 16])
@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8, 1e14])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_no_log_density_is_above_its_bound(covariance_type, d, condition, offset):
    parameters = narrow(covariance_type, d, condition, offset)
    rows = rows_of(parameters, 500)
    expected = exact(rows, parameters)
    for frame in frames_of(parameters):
        bounds = bounds_of(parameters, frame) @ features(rows, frame, parameters.structure)
        assert (bounds >= expected).all()


@pytest.mark.parametrize("d", [2, 4, 16])
def test_bounds_are_close_beside_the_distance_at_which_components_do_not_count(d):
    parameters = narrow("full", d, 1e8)
    rows = rows_of(parameters, 500)
    rows = rows[np.abs(rows).max(axis=1) < 30]
    frame = Frame(parameters.weights @ parameters.means, None)
    bounds = bounds_of(parameters, frame) @ features(rows, frame, parameters.structure)
    assert (bounds - exact(rows, parameters)).max() < estep.REACH / 100


def test_bounds_need_no_finite_scale():
    """Where squares of a factor overflow, a bound is infinite or NaN, and rows are scored after all."""
    tiny = np.full((2, 3), 1e-310)
    parameters = MixtureParameters("diag", np.full(2, 0.5), np.ones((2, 3)), tiny, np.full((2, 3), 1e155))
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = bounds_of(parameters, Frame(np.zeros(3), None))
    assert not (bounds[:, 0] < 0).any()


@pytest.mark.parametrize("covariance_type", ["full", "diag", "spherical"])
@pytest.mark.parametrize("d", [2, 16])
def test_only_rows_whose_bound_is_within_reach_are_scored(covariance_type, d):
    parameters = drawn(covariance_type, K, d)
    rows = np.random.default_rng(0).normal(size=(300, d)) * 3
    some = np.array([1, 4])
    scores = CentredScores(parameters, parameters.log_scales[:, None], some, 500)
    whole = np.zeros((K, 300))
    scores.write(rows, whole)
    largest = np.linspace(700.0, 810.0, 300)
    bounds, within = np.full((K, 300), -5.0), largest - estep.REACH < -5.0
    bounds[1, 290:] = np.nan
    near = np.array([within, within])
    near[0, 290:] = True
    found = bounds.copy()
    scores.write_near(rows, found, largest)
    assert np.allclose(found[some][near], whole[some][near], rtol=1e-13)
    assert np.array_equal(found[some][~near], bounds[some][~near])
    others = np.setdiff1d(np.arange(K), some)
    assert np.array_equal(found[others], bounds[others])
    for reach in (-1e4, 1e4):
        found = bounds.copy()
        scores.write_near(rows, found, np.full(300, reach))
        expected = whole[some] if reach < 0 else np.where(np.isnan(bounds), whole, bounds)[some]
        assert np.allclose(found[some], expected, rtol=1e-13)


def test_bounds_are_of_components_that_are_not_scored_together_beside_features():
    parameters = narrow("full", 4, 1e8, ill=[2])
    plan = plan_kernel(parameters)
    assert plan.bounds_others
    assert np.flatnonzero(~plan.together).tolist() == [2]
    assert not plan.centred.bounds_others
    assert not plan_kernel(narrow("full", 4, 1.0)).bounds_others
    assert not plan_kernel(narrow("full", 64, 1e8, ill=[2])).bounds_others
