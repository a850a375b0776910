"""Comparisons that the oracle tests share; the tolerances are the issue's."""

import numpy as np

from oracles import naive
from oracles.starts import disturbed

PARAMETERS = ("weights", "means", "covariances")


def worst(actual, expected):
    """max|actual − expected| / max|expected|, the issue's measure."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def assert_parameters(fitted, run, limit=1e-9):
    """The fitted arrays are the run's last parameters, to `limit` of each array's largest entry."""
    errors = {name: worst(getattr(fitted, f"{name}_"), getattr(run, name)) for name in PARAMETERS}
    assert max(errors.values()) <= limit, errors


def assert_stable(X, given, case, run, size=1e-12, **options):
    """Disturbing the start by `size` changes no active set: the case judges the package, not rounding."""
    for seed in (1, 2):
        other = naive.fit(X, disturbed(given, seed=seed, size=size), case.oracle(), **options)
        same = len(other.active) == len(run.active) and all(
            np.array_equal(a, b) for a, b in zip(other.active, run.active, strict=True)
        )
        assert same, f"the case {case} is not stable: choose another seed"
    return run


def oracle_run(X, given, case, **options):
    """The oracle's run of a case, after checking that the case is a stable one."""
    run = naive.fit(X, given, case.oracle(), **options)
    return assert_stable(X, given, case, run, **options)
