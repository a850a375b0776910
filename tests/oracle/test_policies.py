"""Every algorithm and covariance type against the paper's own, the whole N × K matrix kept: 25 iterations."""

import numpy as np
import pytest
from oracles import agree, cases, starts

ALGORITHMS = pytest.mark.parametrize("case", cases.ALL, ids=str)
STRUCTURES = pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)


def assert_same(model, run):
    assert [record.active_rows for record in model.history_] == run.counts
    agree.assert_parameters(model, run)
    assert np.max(np.abs(np.array(model.lower_bounds_) - run.bounds)) <= 1e-9
    assert model.stop_reason_ == run.stop_reason


@STRUCTURES
@ALGORITHMS
def test_same_active_counts_and_parameters(fit, case, covariance_type):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, covariance_type)
    run = agree.oracle_run(X, given, case, covariance_type=covariance_type)
    assert_same(fit(starts.chunked(X, "one-chunk"), given, case, covariance_type=covariance_type), run)


@pytest.mark.parametrize(
    ("case", "chunking"),
    [(case, "ragged") for case in cases.ALL]
    + [(case, chunking) for case in cases.ONE_EACH for chunking in ("zero-row-chunks", "features-split")],
    ids=str,
)
def test_same_with_several_chunks(fit, case, chunking):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, "full")
    run = agree.oracle_run(X, given, case, chunks=starts.row_chunks(len(X), chunking))
    assert_same(fit(starts.chunked(X, chunking), given, case), run)


@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_same_with_reg_covar(fit, case):
    X, k = starts.data("separated")
    given = starts.start(X, k, "full")
    run = agree.oracle_run(X, given, case, reg_covar=0.05)
    assert_same(fit(starts.chunked(X, "one-chunk"), given, case, reg_covar=0.05), run)


@STRUCTURES
@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_same_on_separated_components(fit, case, covariance_type):
    X, k = starts.data("separated")
    given = starts.start(X, k, covariance_type)
    run = agree.oracle_run(X, given, case, covariance_type=covariance_type)
    assert_same(fit(starts.chunked(X, "one-chunk"), given, case, covariance_type=covariance_type), run)


@pytest.mark.parametrize("name", ["one-feature", "one-component", "tall"])
@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_same_on_other_shapes(fit, case, name):
    X, k = starts.data(name)
    given = starts.start(X, k, "full")
    run = agree.oracle_run(X, given, case)
    assert_same(fit(starts.chunked(X, "one-chunk"), given, case), run)


@STRUCTURES
@pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)
def test_same_from_given_responsibilities(fit, case, covariance_type):
    X, k = starts.data("separated")
    given = np.random.default_rng(4).dirichlet(np.ones(k), len(X))
    run = agree.oracle_run(X, given, case, covariance_type=covariance_type)
    assert_same(fit(starts.chunked(X, "one-chunk"), given, case, covariance_type=covariance_type), run)


@pytest.mark.parametrize(
    ("dtype", "chunking"),
    [(np.float64, "one-chunk"), (np.float64, "ragged"), (np.float32, "zero-row-chunks")],
)
@STRUCTURES
def test_em_tau_beyond_max_iter_is_full_em_bit_for_bit(fit, covariance_type, dtype, chunking):
    X, k = starts.data("overlapping")
    given = starts.start(X, k, covariance_type)
    X = starts.chunked(X.astype(dtype), chunking)
    never = cases.case("EMTau", tau=26, revisit=None)
    full = fit(X, given, cases.FULL, covariance_type=covariance_type)
    tau = fit(X, given, never, covariance_type=covariance_type)
    for name in ("weights_", "means_", "covariances_", "lower_bounds_"):
        np.testing.assert_array_equal(getattr(tau, name), getattr(full, name), err_msg=name)
