"""Fits that go by compiled tiles: scikit-learn's numbers, the same bits wherever they run."""

import warnings

import dask
import numba
import numpy as np
import pytest
import zarr
from clusters import processes
from fits import ROWS, START, assert_same_bits, mixture, quietly
from sklearn.mixture import GaussianMixture as Judge

from emtau_dask import ClusterError, EMLazy, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.em import compiling, task
from emtau_dask.kernels import dispatch
from emtau_dask.policies import policy

POLICIES = {
    "em": FullEM(),
    "em-tau": EMTau(tau=2, revisit=3),
    "em-star": EMStar(),
    "em-lazy": EMLazy(threshold=0.9, full_every=2),
}
SETTINGS = {
    "one thread": {"scheduler": "threads", "num_workers": 1},
    "two threads": {"scheduler": "threads", "num_workers": 2},
    "synchronous": {"scheduler": "synchronous"},
}


@pytest.fixture
def stored(tmp_path):
    array = zarr.create_array(tmp_path / "rows.zarr", shape=ROWS.shape, chunks=(100, 2), dtype="f8")
    array[:] = ROWS
    return array


@pytest.fixture
def accumulated(monkeypatch):
    """The numbers of rows that went by tiles, block by block."""
    rows_of, accumulate = [], dispatch.TileKernel.accumulate

    def noted(self, rows, weights=None, out=None):
        rows_of.append(len(rows))
        return accumulate(self, rows, weights, out)

    monkeypatch.setattr(dispatch.TileKernel, "accumulate", noted)
    monkeypatch.setattr(
        compiling, "compile_loops", lambda *_, missing: None
    )  # It scores a row, ahead of the fit.
    return rows_of


@pytest.fixture
def longer(tmp_path):
    """In chunks of several tiles, the last of them not full."""
    array = zarr.create_array(tmp_path / "longer.zarr", shape=(6000, 2), chunks=(1500, 2), dtype="f8")
    array[:] = np.concatenate([ROWS + shift for shift in np.linspace(0, 0.2, 20)])
    return array


def fit(X, policy="em-tau", compiled="always", **options):
    settings = {"tol": 0, "max_iter": 8} | START | options
    with dask.config.set({"emtau.compiled": compiled}):
        return quietly(mixture(algorithm=POLICIES[policy], **settings), X)


@pytest.fixture
def settled(monkeypatch):
    """How many rows policies let go and keep, chunk by chunk."""
    rows_of, update = [], policy.checked_update

    def noted(*arguments):
        after, stays = update(*arguments)
        rows_of.append((np.count_nonzero(~stays), np.count_nonzero(stays)))
        return after, stays

    monkeypatch.setattr(task, "checked_update", noted)
    return rows_of


@pytest.mark.parametrize("policy", POLICIES)
def test_all_rows_that_are_scored_go_by_tiles(stored, accumulated, settled, policy):
    """And once more those that settle, for what is remembered of them; or the others, where these are few."""
    found = fit(stored, policy)
    active = sum(record.active_rows for record in found.history_)
    again = sum(stay if 3 * stay < leave + stay else leave for leave, stay in settled)
    assert sum(accumulated) == active + again
    assert any(leave for leave, _ in settled) == (policy != "em")
    accumulated.clear()
    fit(stored, policy, "never")
    assert accumulated == []


def test_a_fit_of_some_size_is_compiled_for_by_default(stored, accumulated, monkeypatch):
    size = 300 * 3 * (1 + 2 + 3)  # rows, components, and features of full covariances in two dimensions
    monkeypatch.setattr(compiling, "MIN_PRODUCTS", size)
    fit(stored, compiled="auto")
    assert accumulated
    accumulated.clear()
    monkeypatch.setattr(compiling, "MIN_PRODUCTS", size + 1)
    fit(stored, compiled="auto")
    assert accumulated == []


def test_the_fit_is_scikit_learns(stored):
    judge = quietly(Judge(3, max_iter=8, tol=0, random_state=0, **START), ROWS)
    found = fit(stored, "em")
    assert np.allclose(found.means_, judge.means_, rtol=1e-10)
    assert np.allclose(found.covariances_, judge.covariances_, rtol=1e-10)
    assert np.isclose(found.lower_bound_, judge.lower_bound_, rtol=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_schedulers_and_numbers_of_threads_change_no_bit(longer, policy):
    fits = []
    for setting in SETTINGS.values():
        with dask.config.set(setting):
            fits.append(fit(longer, policy))
    for other in fits[1:]:
        assert_same_bits(other, fits[0])


def test_going_on_without_what_was_compiled_is_noted(stored, tmp_path):
    fit(stored, checkpoint=str(tmp_path / "run"), max_iter=3)
    with dask.config.set({"emtau.compiled": "never"}), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = GaussianMixture.resume(tmp_path / "run", stored, max_iter=5)
    (note,) = found.history_.notes
    assert f"(numba {numba.__version__} -> not used)" in note
    assert note in [str(warning.message) for warning in warned]


@pytest.mark.cluster
class TestCluster:
    def test_it_changes_no_bit_either(self, longer, request):
        expected = fit(longer)
        request.getfixturevalue("two_workers")
        assert_same_bits(fit(longer), expected)

    def test_where_a_worker_cannot_compile_none_does_by_default(self, zygote, stored, tmp_path, monkeypatch):
        monkeypatch.setattr(compiling, "MIN_PRODUCTS", 1)
        compiled, expected = fit(stored), fit(stored, compiled="never")
        with processes(zygote, tmp_path / "cluster", 1) as cluster, cluster.client() as client:
            assert_same_bits(fit(stored, compiled="auto"), compiled)
            cluster.start_worker(before=(("forget_package", "numba"),))
            cluster.wait(client)
            assert_same_bits(fit(stored, compiled="auto"), expected)

    def test_a_worker_that_cannot_compile_is_an_error_that_says_what_to_do(self, zygote, stored, tmp_path):
        with processes(zygote, tmp_path / "cluster") as cluster:
            cluster.start_worker(before=(("forget_package", "numba"),))
            with (
                cluster.client(),
                pytest.raises(ClusterError, match=r"pip install numba.*emtau\.compiled"),
            ):
                fit(stored)
