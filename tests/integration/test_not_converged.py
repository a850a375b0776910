"""What a fit that max_iter stopped says: how far it was, and how to go on; each remedy is followed."""

import re
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMLazy, GaussianMixture

ROWS = np.random.default_rng(0).normal(size=(400, 2)) + np.repeat([[0.0], [3.0]], 200, axis=0)
NUMBER = r"[-+]?[\d.]+(?:e[-+]\d+)?"


def warned(fit):
    """What the fit warned of, and what it returned."""
    with pytest.warns(ConvergenceWarning) as found:
        mixture = fit()
    return mixture, str(found[0].message)


def test_the_last_change_and_the_tolerance_are_named():
    mixture, message = warned(
        lambda: GaussianMixture(2, algorithm="em", tol=1e-9, max_iter=3, random_state=0).fit(ROWS)
    )
    change = mixture.lower_bounds_[-1] - mixture.lower_bounds_[-2]
    said = re.search(rf"log-likelihood per row last changed by ({NUMBER}); .*tol is ({NUMBER})\.", message)
    assert [float(number) for number in said.groups()] == [float(f"{change:.2g}"), 1e-9]


def test_the_estimated_gap_is_named():
    mixture, message = warned(
        lambda: GaussianMixture(2, algorithm="em", tol=1e-12, max_iter=20, random_state=0).fit(ROWS)
    )
    said = re.search(rf"it could still gain about ({NUMBER}); tol is 1e-12\.", message)
    assert float(said[1]) == float(f"{mixture.gap_:.2g}")


def test_an_estimate_below_the_last_change_is_left_out():
    mixture, message = warned(
        lambda: GaussianMixture(3, algorithm="em", random_state=0, tol=1e-9, max_iter=4).fit(ROWS)
    )
    assert mixture.gap_ < mixture.history_.last_change
    assert "changed by" in message
    assert "could still gain" not in message


@pytest.mark.parametrize("max_iter", [1, 2])
def test_nothing_is_made_up_where_there_is_nothing_to_compare(max_iter):
    _, message = warned(
        lambda: GaussianMixture(2, tol="statistical", max_iter=max_iter, random_state=0).fit(ROWS)
    )
    assert "nan" not in message
    assert "tol is 'statistical'" in message
    assert ("changed by" in message) == (max_iter > 1)


def test_it_goes_on_by_a_warm_start():
    mixture, message = warned(
        lambda: GaussianMixture(2, algorithm="em", tol=1e-9, max_iter=3, random_state=0).fit(ROWS)
    )
    assert "set_params(max_iter=..., warm_start=True).fit(X)" in message
    before = mixture.lower_bound_
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixture.set_params(max_iter=500, warm_start=True).fit(ROWS)
    assert mixture.lower_bounds_[0] >= before


def test_it_goes_on_from_its_checkpoint(tmp_path):
    path = str(tmp_path / "run.zarr")
    settings = {"algorithm": "em", "tol": 1e-9, "random_state": 0}
    _, message = warned(lambda: GaussianMixture(2, max_iter=3, checkpoint=path, **settings).fit(ROWS))
    assert f"GaussianMixture.resume({path!r}, X, max_iter=...)" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = GaussianMixture.resume(path, ROWS, max_iter=500)
    assert np.array_equal(resumed.means_, GaussianMixture(2, **settings).fit(ROWS).means_)


def test_a_gap_is_measured_only_after_passes_that_may_end_the_fit():
    """With EM-Lazy, those after which rows are chosen anew: the others are over all rows here too."""
    rng = np.random.default_rng(1)
    rows = np.repeat(2 * rng.normal(size=(3, 2)), 1500, axis=0) + rng.normal(size=(4500, 2))
    settings = {"acceleration": "quasi-newton", "tol": "statistical", "max_iter": 400, "random_state": 1}
    found = GaussianMixture(3, algorithm=EMLazy(threshold=1.0, full_every=8), **settings).fit(rows)
    measured = [record.iteration for record in found.history_ if record.active_rows > 3 * record.rows]
    assert found.converged_
    assert measured[-1] == found.n_iter_
    assert {iteration % 8 for iteration in measured} == {1}
