"""Every algorithm and covariance type against the paper's own, the whole N × K matrix kept: 25 iterations."""

import numpy as np
import pytest
from oracles import agree, cases, starts
from tiers import exhaustive_but

ALGORITHMS = pytest.mark.parametrize("case", cases.ALL, ids=str)
STRUCTURES = pytest.mark.parametrize("covariance_type", starts.COVARIANCE_TYPES)


ONE_EACH = pytest.mark.parametrize("case", cases.ONE_EACH, ids=str)


def assert_same(fit, name, case, covariance_type="full", *, given=None, chunking="one-chunk", **options):
    """The fit to named data is the oracle's, from a start or from ``given`` responsibilities."""
    X, k = starts.data(name)
    given = starts.start(X, k, covariance_type) if given is None else given(len(X), k)
    options["covariance_type"] = covariance_type
    chunks = None if chunking == "one-chunk" else starts.row_chunks(len(X), chunking)
    run = agree.oracle_run(X, given, case, chunks=chunks, **options)
    model = fit(starts.chunked(X, chunking), given, case, **options)
    assert [record.active_rows for record in model.history_] == run.counts
    agree.assert_parameters(model, run)
    assert np.max(np.abs(np.array(model.lower_bounds_) - run.bounds)) <= 1e-9
    assert model.stop_reason_ == run.stop_reason


@STRUCTURES
@ALGORITHMS
def test_same_active_counts_and_parameters(fit, case, covariance_type):
    assert_same(fit, "overlapping", case, covariance_type)


@pytest.mark.parametrize("chunking", ["ragged", "zero-row-chunks", "features-split"])
@pytest.mark.parametrize("case", exhaustive_but({*cases.ONE_EACH, cases.STAR[1]}, cases.ALL), ids=str)
def test_same_with_several_chunks(fit, case, chunking):
    assert_same(fit, "overlapping", case, chunking=chunking)


@ONE_EACH
def test_same_with_reg_covar(fit, case):
    assert_same(fit, "separated", case, reg_covar=0.05)


@STRUCTURES
@ONE_EACH
def test_same_on_separated_components(fit, case, covariance_type):
    assert_same(fit, "separated", case, covariance_type)


@pytest.mark.parametrize("name", ["one-feature", "one-component", "tall"])
@ONE_EACH
def test_same_on_other_shapes(fit, case, name):
    assert_same(fit, name, case)


def responsibilities(n, k):
    return np.random.default_rng(4).dirichlet(np.ones(k), n)


@STRUCTURES
@ONE_EACH
def test_same_from_given_responsibilities(fit, case, covariance_type):
    assert_same(fit, "separated", case, covariance_type, given=responsibilities)


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
