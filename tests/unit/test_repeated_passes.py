"""A pass whose products lost digits is done again, in the centred form."""

from dataclasses import replace

import numpy as np
import pytest

from emtau_dask.em.iteration import PassResult, _with_enough_digits
from emtau_dask.em.sums import PassSums
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


def passes(outcomes):
    """Return whether rows went centred in each pass, if passes have these outcomes, and what is found."""
    centred, left = [], iter(outcomes)

    def score(plan):
        centred.append(plan.exact)
        outcome = next(left)
        collapse = outcome if isinstance(outcome, Exception) else None
        em_parameters = None if collapse else outcome
        return PassResult(PassSums(bytes_read=100), None, None, None, 1.0, None, em_parameters, collapse, 0.0)

    return centred, _with_enough_digits(score, plan_kernel(shrunk()))


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
    found, scored = passes(outcomes)
    assert found == centred
    assert scored.sums.bytes_read == 100 * len(centred)
    last = outcomes[-1]
    assert (scored.em_parameters, scored.collapse) == ((None, last) if last is COLLAPSE else (last, None))
    assert scored.repeated == (len(centred) > 1)


def test_so_they_do_where_components_share_a_covariance():
    factor = structure_named("tied").factor(np.eye(D), np.zeros((K, D)), np.ones(K))
    before = MixtureParameters("tied", np.full(K, 1 / K), shrunk().means, np.eye(D), factor)
    after = replace(before, covariances=1e-14 * np.eye(D), precisions_cholesky=1e7 * factor)
    plan = plan_kernel(before)
    assert plan.kept_digits(before)
    assert not plan.kept_digits(after)
