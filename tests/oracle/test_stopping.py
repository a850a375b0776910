"""tol > 0: the fit stops in the oracle's iteration, for the oracle's reason."""

import pytest
from oracles import agree, cases, starts

STOPPING = (
    cases.FULL,
    cases.case("EMTau", tau=12, revisit=None),
    cases.case("EMTau", tau=3, revisit=None),
    cases.case("EMTau", tau=3, revisit="on-empty"),
    cases.case("EMTau", tau=12, revisit="on-empty"),
    cases.case("EMTau", tau=12, revisit=9),
    cases.case("EMStar"),
    cases.case("EMStar", tail=0.75),
    cases.case("EMLazy", threshold=0.9, full_every=5),
    cases.case("EMLazy", threshold=0.9, full_every=1),
)


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("case", STOPPING, ids=str)
def test_stops_where_and_why_the_oracle_stops(fit, case, tol):
    X, k = starts.data("separated")
    given = starts.start(X, k, "full")
    run = agree.oracle_run(X, given, case, max_iter=80, tol=tol)
    model = fit(starts.chunked(X, "one-chunk"), given, case, max_iter=80, tol=tol)
    actual = (model.n_iter_, model.stop_reason_, [record.active_rows for record in model.history_])
    assert actual == (len(run.bounds), run.stop_reason, run.counts)
    assert model.converged_ == (model.stop_reason_ == "tol")
    agree.assert_parameters(model, run)
