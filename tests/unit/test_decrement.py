"""The Newton decrement against where EM ends, with an E-step written out here."""

import math

import numpy as np
import pytest
from oracles import naive, starts
from references import COVARIANCE_TYPES, started, statistics_of, theta_of
from tiers import exhaustive_but

from emtau_dask.em import gap as decrement
from emtau_dask.em.acceleration import EvaluatedPoint, Maximiser
from emtau_dask.em.gap import jacobian_of, newton_decrement
from emtau_dask.em.moments import MomentSpace
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import m_step

K, D, N = 3, 2, 400
ROWS, _ = starts.mixture(N, K, D, separation=2.5, seed=7)
STRUCTURES = pytest.mark.parametrize(
    "covariance_type", exhaustive_but({"full", "tied", "spherical"}, COVARIANCE_TYPES)
)
WIDTH = 6e-6


def statistics_under(parameters, rows):
    return statistics_of(parameters.structure, rows, naive.e_step(rows, theta_of(parameters)))


def objective(parameters, rows):
    return float(naive.log_likelihoods(rows, theta_of(parameters)).mean())


class Measuring:
    """A point that is the M-step of given statistics, and the products with J there."""

    def __init__(self, statistics, structure, rows=ROWS):
        self.rows, self.structure = rows, structure
        parameters = m_step(statistics, structure, 0.0)
        self.space = MomentSpace(structure, parameters.means)
        self.evaluated = 0
        response = self.response(parameters)
        self.point = EvaluatedPoint(
            parameters,
            objective(parameters, rows),
            self.space.of(statistics) / statistics.weights.sum(),
            response,
        )
        maximiser = Maximiser(structure, 0.0, 1, 10)
        self.jacobian = jacobian_of(self.space, self.point, maximiser, response, self.response, WIDTH)

    def response(self, parameters):
        self.evaluated += 1
        return self.space.of(statistics_under(parameters, self.rows)) / len(self.rows)

    def found(self, least=25, most=25):
        return newton_decrement(self.space, self.point, self.jacobian, least, most)


@pytest.fixture(scope="module")
def near():
    """By covariance type, the statistics of a point of EM, and how far its objective is below the limit."""
    found = {}

    def of(covariance_type):
        if covariance_type not in found:
            structure, parameters = structure_named(covariance_type), started(ROWS, K, covariance_type)
            statistics, bounds = [], []
            for _ in range(3000):
                statistics.append(statistics_under(parameters, ROWS))
                parameters = m_step(statistics[-1], structure, 0.0)
                bounds.append(objective(parameters, ROWS))
                if len(bounds) > 1 and bounds[-1] - bounds[-2] < 1e-15:
                    break
            gaps = bounds[-1] - np.array(bounds)
            chosen = int(np.argmax(gaps < 1e-6))
            found[covariance_type] = statistics[chosen], gaps[chosen]
        return found[covariance_type]

    return of


@STRUCTURES
def test_near_a_maximum_it_is_the_distance_of_the_objective(covariance_type, near, monkeypatch):
    monkeypatch.setattr(decrement, "GRADIENT_SPREAD", 0.0)
    statistics, gap = near(covariance_type)
    measured = Measuring(statistics, structure_named(covariance_type)).found()
    assert measured.gap == pytest.approx(gap, rel=0.03)
    assert measured.most == pytest.approx(measured.gap, rel=1e-3)


@STRUCTURES
@pytest.mark.parametrize("most", [4, 8])
def test_with_few_products_it_is_within_a_factor_of_two(covariance_type, near, most):
    statistics, gap = near(covariance_type)
    measured = Measuring(statistics, structure_named(covariance_type)).found(4, most)
    assert gap / 2 < measured.gap < 2 * gap
    assert measured.most >= measured.gap


def test_each_product_is_one_evaluation(near):
    statistics, _ = near("full")
    measuring = Measuring(statistics, structure_named("full"))
    before = measuring.evaluated
    assert measuring.found(least=4, most=6).products == measuring.evaluated - before <= 6


def test_a_solution_that_is_exact_is_the_end(near):
    """Of a map that leads to the maximum at once: H is the identity, and one product solves with it."""
    statistics, _ = near("full")
    measuring = Measuring(statistics, structure_named("full"))
    asked = []

    def nothing(moments):
        asked.append(moments)
        return np.zeros_like(moments)

    found = newton_decrement(measuring.space, measuring.point, nothing, 8, 32)
    gradient = measuring.space.standardised(measuring.point.gradient, measuring.point.parameters)
    assert 0.9**2 <= found.gap / (0.5 * gradient @ gradient) <= 1.1**2
    assert found.most == pytest.approx(found.gap, rel=1e-9)
    assert len(asked) < 8


def coincident():
    """Two components in one place, of data with two clusters: a saddle, to which EM is drawn."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(-3.0, 1, (200, D)), rng.normal(3.0, 1, (200, D))])
    structure = structure_named("full")
    half = np.full((len(rows), 2), 0.5)
    return Measuring(statistics_of(structure, rows + 0.01, half), structure, rows)


def test_near_a_saddle_there_is_none():
    assert math.isnan(coincident().found().gap)


def test_a_gradient_that_is_the_same_for_both_components_would_not_show_the_saddle(monkeypatch):
    monkeypatch.setattr(decrement, "GRADIENT_SPREAD", 0.0)
    assert coincident().found(4, 4).gap < 1e-2


def test_at_a_maximum_it_is_nothing():
    """One component: the first M-step is the maximum."""
    structure = structure_named("full")
    measuring = Measuring(statistics_of(structure, ROWS, np.ones((N, 1))), structure)
    assert measuring.found().gap == pytest.approx(0.0, abs=1e-20)
