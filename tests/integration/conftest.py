"""Processes that others are forked from, and a cluster of two workers, once for all tests."""

import pytest
from clusters import processes
from reliability.zygote import Zygote

from emtau_dask.storage.commits import CommitLog


@pytest.fixture(scope="session")
def zygote():
    with Zygote("clusters") as zygote:
        yield zygote


@pytest.fixture(scope="session")
def forked_fits():
    """The process that small fits are forked from, and what damages their checkpoints."""
    with Zygote("reliability.damage") as zygote:
        yield zygote


@pytest.fixture(scope="session")
def cluster_of_two(zygote, tmp_path_factory):
    with processes(zygote, tmp_path_factory.mktemp("session") / "cluster", 2) as cluster:
        yield cluster


@pytest.fixture
def two_workers(cluster_of_two):
    """The active client of a cluster that many tests share: none kills, adds or configures workers of it."""
    with cluster_of_two.client() as client:
        yield client


@pytest.fixture
def appended(monkeypatch):
    """Call a function after every commit."""
    calls = []
    plain = CommitLog.append

    def append(log, manifest, references):
        plain(log, manifest, references)
        for call in calls:
            call(log)

    monkeypatch.setattr(CommitLog, "append", append)
    return calls
