"""Fits of several starts that go on in other attempts, more than once: every commit can be read again."""

import re
import warnings
from collections import Counter

import dask
import pytest
from accelerated import interrupted
from fits import ROWS, assert_same_bits, mixture
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.storage.stores import LocalObjects

ITERATIONS, STARTS = 3, 3


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def fitted(checkpoint=None):
    start = {"init_params": "random_from_data", "n_init": STARTS, "random_state": 2}
    stop = {"tol": 0, "max_iter": ITERATIONS}
    return mixture(algorithm=EMTau(tau=1, revisit=2), checkpoint=checkpoint, **start, **stop).fit(ROWS)


@pytest.mark.parametrize("first", range(1, ITERATIONS * STARTS))
@pytest.mark.kills
def test_interrupted_twice_anywhere(tmp_path, first):
    expected = fitted()
    with interrupted(first + 1), pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "run")
    if first < ITERATIONS * STARTS - 1:
        with interrupted(2), pytest.raises(KeyboardInterrupt):
            GaussianMixture.resume(tmp_path / "run", ROWS)
    assert_same_bits(GaussianMixture.resume(tmp_path / "run", ROWS), expected)
    assert_same_bits(GaussianMixture.resume(tmp_path / "run", ROWS), expected)


@pytest.mark.parametrize("first", [1, ITERATIONS + 1], ids=["the first start", "beside a best start"])
def test_a_resume_reads_every_table_once(tmp_path, monkeypatch, first):
    """Only row state is read again, by the tasks that continue from it."""
    with interrupted(first + 1), pytest.raises(KeyboardInterrupt):
        fitted(tmp_path / "run")
    there = LocalObjects(str(tmp_path / "run"))
    tables = [key for key in there.list("attempts/") if re.search(r"/(?!rows)[a-z_]+/c\.", key)]
    asked, get = Counter(), LocalObjects.get

    def noted(objects, key, limit):
        asked[key] += 1
        return get(objects, key, limit)

    monkeypatch.setattr(LocalObjects, "get", noted)
    with interrupted(1), pytest.raises(KeyboardInterrupt):
        GaussianMixture.resume(tmp_path / "run", ROWS)
    found = {key: asked[key] for key in tables if asked[key]}
    assert {key.split("/")[2] for key in found} >= {"chunks", "digests", "contents", "weights", "covariances"}
    assert set(found.values()) == {1}, found
