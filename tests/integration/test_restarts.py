"""Fits of several starts that go on in other attempts, more than once: every commit can be read again."""

import re
import warnings
from collections import Counter

import dask
import pytest
from fits import ROWS, assert_same_bits
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting
from emtau_dask.storage.stores import LocalObjects

ITERATIONS, STARTS = 3, 3


@pytest.fixture
def interrupted_after(monkeypatch):
    """Interrupt fits after so many iterations, all starts counted; None for never."""
    left = [None]

    class Observer(SilentObserver):
        def iteration(self, record, parameters):
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "observer_for", lambda verbose: Observer())

    def set_to(iterations):
        left[0] = iterations

    return set_to


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def fitted(checkpoint=None):
    mixture = GaussianMixture(
        3,
        algorithm=EMTau(tau=1, revisit=2),
        n_init=STARTS,
        init_params="random_from_data",
        max_iter=ITERATIONS,
        tol=0,
        random_state=2,
        checkpoint=checkpoint,
    )
    return mixture.fit(ROWS)


@pytest.mark.parametrize("first", range(1, ITERATIONS * STARTS))
def test_interrupted_twice_anywhere(tmp_path, interrupted_after, first):
    expected = fitted()
    interrupted_after(first)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "run")
    interrupted_after(1)
    if first < ITERATIONS * STARTS - 1:
        with pytest.raises(KeyboardInterrupt):
            GaussianMixture.resume(tmp_path / "run", ROWS)
    interrupted_after(None)
    assert_same_bits(GaussianMixture.resume(tmp_path / "run", ROWS), expected)
    assert_same_bits(GaussianMixture.resume(tmp_path / "run", ROWS), expected)


@pytest.mark.parametrize("first", [1, ITERATIONS + 1], ids=["the first start", "beside a best start"])
def test_a_resume_reads_every_table_once(tmp_path, interrupted_after, monkeypatch, first):
    """Only row state is read again, by the tasks that continue from it."""
    interrupted_after(first)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "run")
    there = LocalObjects(str(tmp_path / "run"))
    tables = [key for key in there.list("attempts/") if re.search(r"/(?!rows)[a-z_]+/c\.", key)]
    asked, get = Counter(), LocalObjects.get

    def noted(objects, key, limit):
        asked[key] += 1
        return get(objects, key, limit)

    monkeypatch.setattr(LocalObjects, "get", noted)
    interrupted_after(0)
    with pytest.raises(KeyboardInterrupt):
        GaussianMixture.resume(tmp_path / "run", ROWS)
    found = {key: asked[key] for key in tables if asked[key]}
    assert {key.split("/")[2] for key in found} >= {"chunks", "digests", "contents", "weights", "covariances"}
    assert set(found.values()) == {1}, found
