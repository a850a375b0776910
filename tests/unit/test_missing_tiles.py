"""Compiled tiles of rows with missing values against sums pattern by pattern; which plans go by them."""

from dataclasses import replace

import numpy as np
import pytest
from references import COVARIANCE_TYPES, drawn

from emtau_dask.kernels.dispatch import Kernels
from emtau_dask.mixture.estep import MostProbable
from emtau_dask.mixture.missing import PatternKernels
from emtau_dask.mixture.plan import plan_incomplete, plan_kernel

N = 700
SHAPES = [(1, 1, 0.3), (3, 4, 0.3), (9, 12, 0.6), (17, 3, 0.1), (3, 30, 0.1)]
"""Components, features, and the share of missing values: with 0.6, the inverses are more than are kept."""


def in_units(parameters, unit):
    """The mixture of rows times ``unit``."""
    return replace(
        parameters,
        means=parameters.means * unit,
        covariances=parameters.covariances * unit**2,
        precisions_cholesky=parameters.precisions_cholesky / unit,
    )


def summed(kernels, rows, weights):
    kernel = kernels.acquire(len(rows))
    out = MostProbable(np.empty(len(rows), np.intp), np.empty(len(rows)))
    scored = kernel.accumulate(rows, weights, out)
    return scored, out, kernels.plan.statistics(kernels.release(kernel))


@pytest.mark.parametrize(("K", "d", "share"), SHAPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("unit", [1e-90, 1.0, 1e90])
@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_results_are_those_by_pattern(K, d, share, weighted, unit, covariance_type):
    rng = np.random.default_rng(0)
    parameters = in_units(drawn(covariance_type, K, d), unit)
    rows = parameters.means[rng.integers(K, size=N)] + 3 * unit * rng.normal(size=(N, d))
    rows[rng.random(rows.shape) < share] = np.nan
    rows[5] = np.nan
    weights = rng.random(N) if weighted else None
    plan = plan_incomplete(parameters)
    assert plan.incomplete
    scored, out, found = summed(Kernels(plan, compiled=True), rows, weights)
    expected_scored, expected_out, expected = summed(PatternKernels(plan_kernel(parameters)), rows, weights)
    scale = np.abs(expected_scored.log_likelihoods).max()
    assert np.allclose(
        scored.log_likelihoods, expected_scored.log_likelihoods, rtol=1e-11, atol=1e-12 * scale
    )
    assert scored.squared == pytest.approx(expected_scored.squared, rel=1e-12)
    assert np.array_equal(out.labels, expected_out.labels)
    assert np.allclose(out.largest, expected_out.largest, rtol=1e-9)
    assert np.allclose(found.weights, expected.weights, rtol=1e-10, atol=1e-10)
    assert np.allclose(found.means / unit, expected.means / unit, rtol=1e-9, atol=1e-9)
    assert np.allclose(found.scatter / unit**2, expected.scatter / unit**2, rtol=1e-8, atol=1e-8)


def test_infinity_is_found_beside_missing_values():
    rows = np.zeros((100, 4))
    rows[3, 1], rows[50, 2] = np.nan, np.inf
    kernel = Kernels(plan_incomplete(drawn("full", 3, 4)), compiled=True).acquire(100)
    assert not np.isfinite(kernel.accumulate(rows).total)
    rows[50, 2] = 0.0
    assert np.isfinite(kernel.accumulate(rows).total)


def test_rows_beyond_the_range_are_found_as_by_pattern():
    parameters = drawn("full", 3, 4)
    rows = np.full((100, 4), np.nan)
    rows[:, 0] = 1e160
    kernels = [Kernels(plan_incomplete(parameters), compiled=True), PatternKernels(plan_kernel(parameters))]
    found, expected = (kernel.acquire(100).accumulate(rows).log_likelihoods for kernel in kernels)
    assert np.array_equal(found, expected, equal_nan=True)
