"""How much is kept between passes by default: in this process, on workers, in a run with a limit."""

import re
import runpy
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from commands import emtau
from dask.utils import parse_bytes
from distributed import Client, LocalCluster
from fits import assert_same_bits
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.data.cache import RowCache
from emtau_dask.em import fit as context
from emtau_dask.execution.scheduler import task_processes
from emtau_dask.storage.direct_reads import usable_memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MiB = 2**20


@pytest.fixture
def stored(tmp_path):
    rows = np.random.default_rng(0).normal(size=(2000, 3)) + 2.5 * (np.arange(2000) % 3)[:, None]
    return zarr.create_array(store=tmp_path / "rows.zarr", data=rows, chunks=(250, 3))


@pytest.fixture
def limits(monkeypatch):
    """The limits of the caches that fits opened."""
    seen = []

    def noted(token, limit):
        seen.append(limit)
        return RowCache(token, limit)

    monkeypatch.setattr(context, "RowCache", noted)
    return seen


def fit(X):
    mixture = GaussianMixture(3, algorithm=EMTau(tau=2, revisit=5), tol=0, max_iter=8, random_state=0)
    with pytest.warns(ConvergenceWarning):
        return mixture.set_params(init_params="random_from_data").fit(X)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """More rows than any default keeps."""
    path = tmp_path_factory.mktemp("data") / "wide.zarr"
    zarr.create_array(store=path, shape=(40_000_000, 16), dtype="f8", chunks=(100_000, 16))
    return path


def plan(path, limit=None, cache="auto", scheduler="threads"):
    arguments = ["fit", path, "-k", 4, "--plan", "--set", f"cluster.scheduler={scheduler}"]
    if scheduler in ("threads", "processes"):
        arguments += ["--workers", 2]
    arguments += [] if limit is None else ["--set", f"cluster.memory_limit={limit}"]
    with dask.config.set({"emtau.cache-bytes": cache}):
        return emtau(*arguments)


def line(result, name):
    assert result.exit_code == 0, result.stderr
    return int(parse_bytes(re.search(rf"{name}\W+(?:at most )?([\d.]+ \w+)", result.stdout)[1]))


def memory(result):
    return line(result, "memory of a process")


def kept(result):
    return line(result, "active rows and row state kept")


class TestFits:
    def test_in_threads_may_keep_a_fifth_of_the_memory(self, stored, limits):
        with dask.config.set(scheduler="threads", num_workers=2):
            found = fit(stored)
            with dask.config.set({"emtau.cache-bytes": 0}):
                without = fit(stored)
        assert limits == [usable_memory() // 5]
        assert_same_bits(found, without)
        assert sum(one.bytes_read for one in found.history_) < sum(one.bytes_read for one in without.history_)

    @pytest.mark.cluster
    def test_on_a_cluster_may_keep_a_fifth_of_what_the_smallest_worker_may_use(self, stored, limits):
        with dask.config.set({"emtau.cache-bytes": 0, "scheduler": "threads"}):
            without = fit(stored)
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=1, memory_limit="3 GB", dashboard_address=None
            ) as cluster,
            Client(cluster) as client,
        ):
            assert task_processes(client) == (2_400_000_000, 1)
            assert client.submit(task_processes, None).result()[0] == 2_400_000_000
            cluster.new_spec["options"] |= {"memory_limit": "2 GB", "nthreads": 2}
            cluster.scale(2)
            client.wait_for_workers(2)
            assert task_processes(client) == (1_600_000_000, 2)
            found = fit(stored)
            assert limits == [320_000_000]
            with dask.config.set({"emtau.cache-bytes": "3 MiB"}):
                fit(stored)
            assert limits == [320_000_000, 3 * MiB]
        assert_same_bits(found, without)

    @pytest.mark.cluster
    def test_on_workers_without_a_limit_share_the_memory(self):
        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None, processes=False
            ) as cluster,
            Client(cluster) as client,
        ):
            assert task_processes(client) == (usable_memory() // 2 * 4 // 5, 1)


class TestPlans:
    def test_count_a_fifth_of_a_limit(self, wide):
        found = plan(wide, "2.5GB")
        assert kept(found) == pytest.approx(500_000_000, rel=0.01)
        assert memory(found) - kept(found) == pytest.approx(
            memory(plan(wide, "2.5GB", cache="32 MiB")) - 32 * MiB, rel=0.01
        )

    def test_count_a_fifth_of_what_a_worker_may_use_before_it_is_paused(self, wide):
        assert kept(plan(wide, "2.5GB", scheduler="processes")) == pytest.approx(400_000_000, rel=0.01)

    def test_without_a_limit_share_the_memory_of_the_machine(self, wide):
        most = kept(plan(wide, scheduler="tcp://127.0.0.1:1"))
        for scheduler, processes in (("threads", 1), ("processes", 2)):
            assert kept(plan(wide, scheduler=scheduler)) <= min(
                most, usable_memory() // processes // 5 * 1.01
            )

    def test_of_a_distant_cluster_count_all_that_is_ever_kept(self, wide):
        half = 20_000_000 * 16 * 8
        assert half < kept(plan(wide, scheduler="tcp://127.0.0.1:1")) < 2 * half

    def test_are_admitted_where_a_number_as_large_as_a_fifth_is_not(self, wide):
        limit = memory(plan(wide, cache="32 MiB")) + MiB  # what is printed is rounded
        refused = plan(wide, limit, cache=limit // 5)
        assert refused.exit_code == 2
        assert "lower dask's emtau.cache-bytes" in " ".join(refused.stderr.split())
        found = plan(wide, limit)
        assert 32 * MiB < kept(found) < 40 * MiB < limit // 5
        assert memory(found) <= limit * 1.001

    def test_keep_less_rather_than_refuse(self, wide):
        limit = memory(plan(wide, cache="32 MiB")) - 20 * MiB
        assert plan(wide, limit, cache="32 MiB").exit_code == 2
        assert 10 * MiB < kept(plan(wide, limit)) < 14 * MiB

    def test_that_are_refused_all_the_same_do_not_blame_the_cache(self, wide):
        refused = plan(wide, "100MB")
        assert refused.exit_code == 2
        assert "emtau.cache-bytes" not in refused.stderr
        assert "chunks of at most" in refused.stderr or "raise the limit" in refused.stderr


@pytest.mark.parametrize("scheduler", ["threads", pytest.param("processes", marks=pytest.mark.cluster)])
def test_a_run_keeps_what_its_plan_says(stored, tmp_path, limits, scheduler):
    arguments = ["fit", tmp_path / "rows.zarr", "-k", 3, "-o", tmp_path / "out", "--workers", 1]
    arguments += ["--set", f"cluster.scheduler={scheduler}", "--set", "cluster.memory_limit=1GB"]
    arguments += ["--set", "algorithm.name=em-tau", "--set", "model.random_state=0"]
    assert emtau(*arguments).exit_code == 0
    assert limits == [{"threads": 200_000_000, "processes": 160_000_000}[scheduler]]


@pytest.mark.exhaustive
def test_a_process_stays_within_a_limit_that_its_cache_fills(tmp_path):
    path, run = tmp_path / "rows.zarr", runpy.run_path(str(BENCHMARKS / "memory.py"))["run"]
    array = zarr.create_array(
        store=path, shape=(2_400_000, 16), dtype="f8", chunks=(50_000, 16), compressors=None
    )
    rng = np.random.default_rng(0)
    for start in range(0, 2_400_000, 50_000):
        array[start : start + 50_000] = rng.normal(size=(50_000, 16)) + rng.integers(4, size=(50_000, 1))
    limit = memory(plan(path, cache="1 MiB")) + 60 * MiB
    planned = plan(path, limit)
    assert 59 * MiB < kept(planned) < 62 * MiB
    assert memory(planned) <= limit * 1.001
    arguments = ["fit", str(path), "-k", "4", "-o", str(tmp_path / "out"), "--workers", "2"]
    arguments += ["--set", f"cluster.memory_limit={limit}", "--set", "stop.max_iter=60"]
    megabytes, _ = run([*arguments, "--set", "model.random_state=0"], (0, 3))
    assert megabytes <= limit / 1e6
