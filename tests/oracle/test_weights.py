"""Rows of weight 0 are as if absent, integer weights are repeated rows, any weights are the oracle's."""

import numpy as np
import pytest
from oracles import agree, cases, naive, starts

EVERY = pytest.mark.parametrize(
    ("case", "covariance_type"),
    [
        *((case, "full") for case in cases.BUT_STAR),
        *((cases.TAU[1], covariance_type) for covariance_type in starts.COVARIANCE_TYPES[1:]),
    ],
    ids=str,
)


def drawn(n, values):
    """Weights from `values`, with a chunk of the ragged chunking (its last five rows) at values[0]."""
    weights = np.random.default_rng(8).choice(values, size=n)
    weights[-5:] = values[0]
    return weights


@EVERY
def test_weight_zero_is_absent(fit, case, covariance_type):
    X, k = starts.data("overlapping")
    weights = drawn(len(X), [0.0, 1.0, 1.0])
    given = starts.start(X, k, covariance_type)
    run = agree.oracle_run(X[weights > 0], given, case, covariance_type=covariance_type)
    model = fit(
        starts.chunked(X, "ragged"), given, case, covariance_type=covariance_type, sample_weight=weights
    )
    assert [r.active_rows for r in model.history_] == run.counts
    agree.assert_parameters(model, run)


@EVERY
def test_integer_weights_are_repeated_rows(fit, case, covariance_type):
    X, k = starts.data("overlapping")
    weights = drawn(len(X), [1, 2, 3, 0])
    given = starts.start(X, k, covariance_type)
    repeated = np.repeat(X, weights, axis=0)
    run = agree.oracle_run(repeated, given, case, covariance_type=covariance_type)
    model = fit(
        starts.chunked(X, "ragged"), given, case, covariance_type=covariance_type, sample_weight=weights
    )
    first = (
        np.cumsum(weights)[weights > 0] - weights[weights > 0]
    )  # the first copy of every row that is there
    assert [r.active_rows for r in model.history_] == [int(mask[first].sum()) for mask in run.active]
    agree.assert_parameters(model, run)


def test_weight_zero_is_absent_from_em_stars_heaps(fit):
    X, k = starts.data("overlapping")
    weights = drawn(len(X), [0.0, 1.0, 1.0])
    given = starts.start(X, k, "full")
    run = agree.oracle_run(X[weights > 0], given, cases.STAR[0])
    model = fit(starts.chunked(X, "one-chunk"), given, cases.STAR[0], sample_weight=weights)
    assert [r.active_rows for r in model.history_] == run.counts


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_real_weights_are_the_oracles(fit, case):
    X, k = starts.data("overlapping")
    weights = np.random.default_rng(9).uniform(0.1, 5, size=len(X))
    given = starts.start(X, k, "full")
    run = agree.oracle_run(X, given, case, sample_weight=weights)
    model = fit(starts.chunked(X, "one-chunk"), given, case, sample_weight=weights)
    assert [r.active_rows for r in model.history_] == run.counts
    agree.assert_parameters(model, run)
    assert np.max(np.abs(np.array(model.lower_bounds_) - run.bounds)) <= 1e-9


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_the_scale_of_the_weights_does_not_matter(fit, scale):
    X, k = starts.data("overlapping")
    weights = np.full(len(X), scale)
    given = starts.start(X, k, "full")
    model = fit(starts.chunked(X, "ragged"), given, cases.TAU[1], sample_weight=weights)
    agree.assert_parameters(model, naive.fit(X, given, cases.TAU[1].oracle()))
