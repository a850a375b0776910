"""A pass whose products lost digits is done again: with what lost them centred, at last with everything."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from emtau_dask.em.iteration import _with_enough_digits
from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.plan import plan_kernel

K, D = 4, 2
STRUCTURE = structure_named("full")


def shrunk(*components):
    """Return a mixture of which these components have lost nearly all of their extent."""
    covariances = np.stack([np.eye(D)] * K)
    covariances[list(components)] *= 1e-14
    means = np.arange(K * D, dtype=float).reshape(K, D)
    factors = STRUCTURE.factor(covariances, means, np.ones(K))
    return MixtureParameters("full", np.full(K, 1 / K), means, covariances, factors)


@dataclass(frozen=True)
class Totals:
    bytes_read: int


def passes(outcomes):
    """Return which components went centred in each pass, if passes have these outcomes, and what is found."""
    centred, left = [], iter(outcomes)

    def score(plan):
        centred.append(np.flatnonzero(~plan.together).tolist())
        return Totals(100)

    def maximise(totals):
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return centred, _with_enough_digits(score, maximise, plan_kernel(shrunk()))


SOUND, ONE, TWO = shrunk(), shrunk(2), shrunk(2, 1)
COLLAPSE = SingularComponentError(2, 1.0, "a test")


@pytest.mark.parametrize(
    ("outcomes", "centred"),
    [
        ([SOUND], [[]]),
        ([ONE, ONE], [[], [2]]),
        ([ONE, TWO, TWO], [[], [2], [0, 1, 2, 3]]),
        ([shrunk(0, 1, 2, 3), SOUND], [[], [0, 1, 2, 3]]),
        ([COLLAPSE, SOUND], [[], [0, 1, 2, 3]]),
        ([COLLAPSE, COLLAPSE], [[], [0, 1, 2, 3]]),
        ([ONE, COLLAPSE, ONE], [[], [2], [0, 1, 2, 3]]),
        ([None], [[]]),
    ],
)
def test_components_that_lost_digits_go_centred(outcomes, centred):
    found, (totals, parameters, collapse, repeated) = passes(outcomes)
    assert found == centred
    assert totals == Totals(100 * len(centred))
    last = outcomes[-1]
    assert (parameters, collapse) == ((None, last) if last is COLLAPSE else (last, None))
    assert repeated == (len(centred) > 1)


def test_one_that_shares_its_covariance_sends_all_centred():
    factor = structure_named("tied").factor(np.eye(D), np.zeros((K, D)), np.ones(K))
    before = MixtureParameters("tied", np.full(K, 1 / K), shrunk().means, np.eye(D), factor)
    after = replace(before, covariances=1e-14 * np.eye(D), precision_factors=1e7 * factor)
    plan = plan_kernel(before)
    assert plan.together.all()
    assert plan.again(after).exact
