"""A pass whose products lost digits is done again, in the centred form."""

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
    """Return whether rows went centred in each pass, if passes have these outcomes, and what is found."""
    centred, left = [], iter(outcomes)

    def score(plan):
        centred.append(plan.exact)
        return Totals(100)

    def maximise(totals):
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return centred, _with_enough_digits(score, maximise, plan_kernel(shrunk()))


SOUND, ONE = shrunk(), shrunk(2)
COLLAPSE = SingularComponentError(2, 1.0, "a test")


@pytest.mark.parametrize(
    ("outcomes", "centred"),
    [
        ([SOUND], [False]),
        ([ONE, ONE], [False, True]),
        ([ONE, SOUND], [False, True]),
        ([COLLAPSE, SOUND], [False, True]),
        ([COLLAPSE, COLLAPSE], [False, True]),
        ([ONE, COLLAPSE], [False, True]),
        ([None], [False]),
    ],
)
def test_rows_go_centred_where_a_component_lost_digits(outcomes, centred):
    found, (totals, parameters, collapse, repeated) = passes(outcomes)
    assert found == centred
    assert totals == Totals(100 * len(centred))
    last = outcomes[-1]
    assert (parameters, collapse) == ((None, last) if last is COLLAPSE else (last, None))
    assert repeated == (len(centred) > 1)


def test_so_they_do_where_components_share_a_covariance():
    factor = structure_named("tied").factor(np.eye(D), np.zeros((K, D)), np.ones(K))
    before = MixtureParameters("tied", np.full(K, 1 / K), shrunk().means, np.eye(D), factor)
    after = replace(before, covariances=1e-14 * np.eye(D), precisions_cholesky=1e7 * factor)
    plan = plan_kernel(before)
    assert plan.kept_digits(before)
    assert not plan.kept_digits(after)
