"""Devices that fail while data are looked for or read: an error that names them, and a resume."""

import csv
import errno
import os
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import dask
import numpy as np
import pyarrow as pa
import pytest
import zarr
from clusters import fail_reads, processes
from fits import ROWS, assert_same_bits, mixture, quietly, resumed
from pyarrow import parquet

from emtau_dask import EMTau, InvalidDataError
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting

pytestmark = pytest.mark.kills
FAILED = "Input/output error.*device failed"


def _csv(path):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b"])
        writer.writerows(ROWS.tolist())


def _zarr(path, **options):
    zarr.create_array(store=path, data=ROWS, **options)


STORED = {
    "rows.zarr": lambda path: _zarr(path, chunks=(30, 2)),
    "shards.zarr": lambda path: _zarr(path, chunks=(10, 2), shards=(30, 2)),
    "two.zarr": lambda path: _zarr(path, chunks=(30, 2), zarr_format=2),
    "rows.csv": _csv,
}


@pytest.fixture(params=STORED)
def place(request, tmp_path):
    path = tmp_path / request.param
    STORED[request.param](path)
    return str(path)


def fit(X, **options):
    settings = {"algorithm": EMTau(tau=2, revisit=3), "tol": 0, "max_iter": 8, "init_params": "random"}
    return quietly(mixture(**settings | options), X)


@contextmanager
def threads(place, monkeypatch):
    with dask.config.set(scheduler="threads"):
        monkeypatch.setattr(os, "preadv", os.preadv)  # put back at the end
        fail_reads(place)
        yield


@contextmanager
def workers(place, zygote, folder):
    with processes(zygote, folder) as cluster:
        for _ in range(2):
            cluster.start_worker(before=(("fail_reads", place),))
        with cluster.client():
            yield


@pytest.mark.parametrize("place", ["rows.zarr", "shards.zarr", "two.zarr"], indirect=True)
@pytest.mark.parametrize("where", ["threads", "workers"])
def test_a_read_that_fails_in_the_middle_of_a_fit(place, where, zygote, tmp_path, monkeypatch):
    with dask.config.set(scheduler="threads"):
        undisturbed = fit(place)

    class Observer(SilentObserver):
        def iteration(self, record, parameters):
            if record.iteration == 4:
                Path(f"{place}.fail").touch()

    run = str(tmp_path / "run")
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"emtau.cache-bytes": 0}))
        stack.enter_context(
            threads(place, monkeypatch)
            if where == "threads"
            else workers(place, zygote, tmp_path / "cluster")
        )
        with monkeypatch.context() as patched:
            patched.setattr(fitting, "observer_for", lambda verbose: Observer())
            with pytest.raises(InvalidDataError, match=FAILED) as failed:
                fit(place, checkpoint=run)
        assert Path(place).name in str(failed.value)
        assert_same_bits(resumed(run, place), undisturbed)


@pytest.fixture
def failing(monkeypatch):
    """Let a function of the operating system fail for these paths, after so many calls that do not."""

    def fail(name, *paths, after=0, number=errno.EIO):
        plain, calls = getattr(os, name), count()

        def failing(asked, *arguments, **options):
            of_these = isinstance(asked, str | Path) and str(asked).rstrip("/") in map(str, paths)
            if of_these and next(calls) >= after:
                raise OSError(number, os.strerror(number), str(asked))
            return plain(asked, *arguments, **options)

        monkeypatch.setattr(os, name, failing)

    return fail


@pytest.mark.parametrize("after", range(10))
@pytest.mark.parametrize("call", ["stat", "open"])
def test_data_that_cannot_be_looked_at_from_some_moment_on(place, failing, call, after):
    failing(call, place, *[Path(place, name) for name in ("zarr.json", ".zgroup", ".zarray")], after=after)
    with suppress(InvalidDataError) if after else pytest.raises(InvalidDataError, match=FAILED):
        fit(place, max_iter=1)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("pattern", "call", "place"),
    [
        ("*/rows/*.csv", "scandir", "b/rows"),
        ("*/rows/*.csv", "lstat", "b/rows"),
        ("**/*.csv", "scandir", "b/rows"),
        ("*/rows/2.csv", "lstat", "b/rows"),
        ("*/rows/2.csv", "lstat", "b/rows/2.csv"),
    ],
)
def test_a_folder_that_may_hold_what_a_pattern_means(tmp_path, failing, pattern, call, place):
    for folder in ("a", "b", "c"):
        (tmp_path / folder / "rows").mkdir(parents=True)
        _csv(tmp_path / folder / "rows" / "2.csv")
    failing(call, tmp_path / place)
    with pytest.raises(InvalidDataError, match=FAILED):
        fit(str(tmp_path / pattern))


@pytest.mark.sample
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_folder_of_parquet_files_of_which_one_cannot_be_listed(tmp_path, failing, number):
    for folder in ("a", "b"):
        (tmp_path / "rows" / folder).mkdir(parents=True)
        parquet.write_table(pa.table({"x": np.arange(9.0)}), tmp_path / "rows" / folder / "0.parquet")
    failing("scandir", tmp_path / "rows" / "b", number=number)
    with pytest.raises(InvalidDataError, match=os.strerror(number)):
        fit(str(tmp_path / "rows"))
