"""What workers cannot see, run or be sent is found before the first iteration, and named."""

import importlib
import threading
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from clusters import addresses, processes, seen
from fits import ROWS, mixture, quietly
from zarr.storage import MemoryStore

from emtau_dask import CheckpointError, ClusterError, EMTau, GaussianMixture, InvalidDataError, StorageError
from emtau_dask.execution import workers as access
from emtau_dask.process import numerical_environment, software

pytestmark = pytest.mark.cluster


def fit(X, algorithm="em-tau", **settings):
    return quietly(mixture(algorithm=algorithm, tol=0, max_iter=4, init_params="random", **settings), X)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder that this process sees, and data in it."""
    folder = tmp_path_factory.mktemp("here")
    zarr.create_array(store=folder / "rows.zarr", data=ROWS, chunks=(50, 2))
    np.save(folder / "rows.npy", ROWS)
    (folder / "temporary").mkdir()
    return folder


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """A zarr array that every worker sees."""
    store = tmp_path_factory.mktemp("everywhere") / "rows.zarr"
    return zarr.create_array(store=store, data=ROWS, chunks=(50, 2))


@pytest.fixture(scope="module")
def cluster(zygote, here, tmp_path_factory):
    """Two workers; the second finds an empty folder in the place of ``here``."""
    with processes(zygote, tmp_path_factory.mktemp("access") / "cluster", 1) as cluster:
        cluster.blind = cluster.start_worker(before=(("hide", str(here)),))
        yield cluster


@pytest.fixture
def client(cluster):
    with cluster.client() as client:
        yield client


@pytest.fixture
def blind(cluster, client):
    return addresses(client)[cluster.blind]


class TestAWorkerElsewhere:
    def test_a_checkpoint_that_it_cannot_see_is_refused_and_the_place_is_free_again(
        self, client, blind, here, everywhere
    ):
        with (
            seen(client) as ran,
            pytest.raises(CheckpointError, match=f"the worker {blind} cannot use {here}"),
        ):
            fit(everywhere, checkpoint=here / "run")
        assert ran == []
        assert list((here / "run").iterdir()) == []
        with dask.config.set(scheduler="threads"):
            assert fit(everywhere, checkpoint=here / "run").n_iter_ == 4

    def test_a_run_that_is_to_be_replaced_is_not_touched(self, client, here, everywhere):
        from emtau_dask.estimator.fitting import fit_estimator

        with dask.config.set(scheduler="threads"):
            fit(everywhere, checkpoint=here / "old")
        before = files(here / "old")
        with pytest.raises(CheckpointError, match="cannot use"):
            fit_estimator(GaussianMixture(3, checkpoint=here / "old"), everywhere, None, None, overwrite=True)
        assert files(here / "old") == before

    @pytest.mark.sample
    @pytest.mark.parametrize("name", ["rows.zarr", "rows.npy"])
    @pytest.mark.parametrize("algorithm", ["em", "em-tau"])
    def test_data_that_it_cannot_see_is_refused(self, client, blind, here, algorithm, name):
        with seen(client) as ran, pytest.raises(InvalidDataError, match=f"the worker {blind} .* X"):
            fit(str(here / name), algorithm)
        assert ran == []

    def test_so_it_is_by_resume(self, client, blind, here, everywhere, tmp_path):
        with dask.config.set(scheduler="threads"):
            fit(str(here / "rows.zarr"), checkpoint=tmp_path / "run")
        with pytest.raises(InvalidDataError, match=f"the worker {blind} .* X"):
            GaussianMixture.resume(tmp_path / "run", str(here / "rows.zarr"), max_iter=5)

    def test_row_state_in_a_folder_that_it_cannot_see_is_refused(self, client, blind, here, everywhere):
        with (
            dask.config.set({"temporary-directory": str(here / "temporary")}),
            seen(client) as ran,
            pytest.raises(StorageError, match=rf"{blind} cannot use .*temporary-directory\) that every"),
        ):
            fit(everywhere)
        assert ran == []
        assert list((here / "temporary").iterdir()) == []

    def test_an_algorithm_without_row_state_needs_no_folder(self, client, here, everywhere):
        with dask.config.set({"temporary-directory": str(here / "temporary")}):
            assert fit(everywhere, "em").n_iter_ == 4

    def test_a_shared_temporary_directory_will_do(self, client, everywhere, tmp_path):
        with dask.config.set({"temporary-directory": str(tmp_path)}):
            assert fit(everywhere).n_iter_ == 4


def files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_checkpoint_in_this_processs_memory_is_refused(client, everywhere):
    with pytest.raises(CheckpointError, match="this process's memory"):
        fit(everywhere, checkpoint=MemoryStore())


class Locked(EMTau):
    def __init__(self, tau=3):
        super().__init__(tau)
        self.lock = threading.Lock()


@pytest.mark.parametrize("scheduler", [None, "processes"])
def test_a_policy_that_cannot_be_sent_is_refused(client, everywhere, scheduler):
    with (
        dask.config.set({} if scheduler is None else {"scheduler": scheduler}),
        pytest.raises(ClusterError, match=r"the policy Locked cannot be sent .*cannot pickle .*lock"),
    ):
        fit(everywhere, Locked())


def test_a_policy_that_workers_cannot_import_is_named(client, everywhere, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("from emtau_dask import EMTau\n\n\nclass Mine(EMTau):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("only_here").Mine()
    refused = r"the worker tcp://.* cannot unpickle .*only_here.*must be importable"
    with pytest.raises(ClusterError, match=refused):
        fit(everywhere, mine)


def test_a_worker_of_other_versions_is_named_and_noted(zygote, everywhere, tmp_path):
    with processes(zygote, tmp_path / "cluster") as cluster:
        name = cluster.start_worker(before=(("pretend", "numpy 1.99.0"),))
        with cluster.client() as client:
            (address,) = addresses(client).values()
            with pytest.warns(UserWarning, match="workers differ") as warned:
                mixture = fit(everywhere)
    assert name
    (note,) = mixture.history_.notes
    assert note in [str(warning.message) for warning in warned]
    assert f"{address} (numpy 1.99.0, here {np.__version__})" in note


def test_a_worker_without_the_package_is_named(zygote, everywhere, tmp_path):
    with processes(zygote, tmp_path / "cluster") as cluster:
        cluster.start_worker(before=(("forget_package", "emtau_dask"),))
        with cluster.client() as client:
            (address,) = addresses(client).values()
            with pytest.raises(ClusterError, match=f"{address} cannot run emtau_dask .*same packages"):
                fit(everywhere)


class Answers:
    """A client whose workers answer as it is told."""

    status = "running"

    def __init__(self, *rounds):
        self.rounds = list(rounds)

    def nthreads(self):
        return dict.fromkeys(self.rounds[0] if self.rounds else self.last, 1)

    def run(self, function, *told, workers, on_error):
        self.last = self.rounds.pop(0)
        return {worker: self.last[worker] for worker in workers}


SIGHT = access._WorkerReport(None, "", "", numerical_environment(), software())


def proved(*rounds):
    return access.verify_access(Answers(*rounds), None, {})


@pytest.mark.sample
def test_a_worker_that_dies_while_it_is_asked_is_left_out():
    assert proved({"a": SIGHT, "b": ConnectionResetError("gone")}, {"a": SIGHT}) == []


@pytest.mark.sample
def test_a_worker_that_answers_when_asked_again_will_do():
    assert proved({"a": OSError("timed out")}, {"a": SIGHT}) == []


@pytest.mark.sample
def test_a_worker_that_stays_without_answering_is_named():
    with pytest.raises(ClusterError, match="the worker a does not answer"):
        proved(*[{"a": OSError("timed out")}] * 4)
