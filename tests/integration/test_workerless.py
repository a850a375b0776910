"""A cluster without workers: who waits for it is told so, and gets the right result once there are some."""

import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager

import dask
import numpy as np
import pytest
import yaml
import zarr
from clusters import GUARD, processes
from distributed import Client
from fits import ROWS, assert_same_bits, mixture

from emtau_dask import ClusterError, EMTau, GaussianMixture
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting
from emtau_dask.execution import dask_graph

pytestmark = pytest.mark.cluster
NONE = "has no workers"
NOT_CONVERGED = 3


def model_of(checkpoint=None, max_iter=5):
    settings = {"algorithm": EMTau(tau=2, revisit=3), "tol": 0, "init_params": "random"}
    return mixture(**settings, max_iter=max_iter, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    return zarr.create_array(store=path, data=ROWS, chunks=(30, 2))


@pytest.fixture(scope="module")
def fitted(stored, tmp_path_factory):
    """A fit by threads, and the checkpoint of the same after three iterations."""
    folder = tmp_path_factory.mktemp("fitted")
    with dask.config.set(scheduler="threads"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_of(folder / "run.zarr", max_iter=3).fit(stored)
        return model_of().fit(stored), folder / "run.zarr"


@contextmanager
def worker_after_warning(cluster):
    """Give the warnings of the block; one that there are no workers brings a worker, as does a long wait."""
    over = threading.Event()

    def bring():
        end = time.monotonic() + GUARD / 5
        while not over.wait(0.05) and time.monotonic() < end:
            if any(NONE in str(warning.message) for warning in found):
                break
        if not over.is_set():
            cluster.start_worker()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        bringing = threading.Thread(target=bring)
        bringing.start()
        try:
            yield found
        finally:
            over.set()
            bringing.join()


def those_of_none(found):
    return [str(warning.message) for warning in found if NONE in str(warning.message)]


CALLS = {
    "fit": (lambda stored, model, run: model_of().fit(stored), "iteration 1|random"),
    "fit with a checkpoint": (
        lambda stored, model, run: model_of(run.with_name("new.zarr")).fit(stored),
        "fingerprint of X",
    ),
    "resume": (
        lambda stored, model, run: GaussianMixture.resume(run, stored, max_iter=5),
        "fingerprint of X",
    ),
    "score": (lambda stored, model, run: model.score(stored), "the score"),
}


@pytest.mark.parametrize("call", CALLS)
def test_who_waits_is_told_and_goes_on_with_the_first_worker(zygote, stored, fitted, tmp_path, call):
    compute, waits = CALLS[call]
    model, run = fitted
    with (
        processes(zygote, tmp_path / "cluster") as cluster,
        Client(cluster.address) as client,
        worker_after_warning(cluster) as found,
    ):
        result = compute(stored, model, run)
        told = those_of_none(found)
        again = compute(stored, model, run) if call == "score" else result
        assert those_of_none(found) == told
        assert client.nthreads()
    (message,) = told
    assert f"the scheduler at {cluster.address} {NONE}" in message
    assert any(f": {name}" in message for name in waits.split("|")), message
    assert f"dask worker {cluster.address}" in message
    if call == "score":
        with dask.config.set(scheduler="threads"):
            assert result == again == model.score(stored)
    else:
        assert_same_bits(result, model)


def test_a_fit_that_loses_its_only_worker_tells_of_it(zygote, stored, fitted, tmp_path, monkeypatch):
    with processes(zygote, tmp_path / "cluster", 1) as cluster, cluster.client():

        class Observer(SilentObserver):
            def iteration(self, record, parameters):
                if record.iteration == 2:
                    (name,) = cluster.workers
                    cluster.kill_worker(name)

        monkeypatch.setattr(fitting, "observer_for", lambda verbose: Observer())
        with worker_after_warning(cluster) as found:
            result = model_of().fit(stored)
    (message,) = those_of_none(found)
    assert ": iteration 3 waits" in message
    assert_same_bits(result, fitted[0])


@pytest.mark.sample
def test_lazy_predictions_are_told_of_at_once(zygote, stored, fitted, tmp_path):
    model, _ = fitted
    with processes(zygote, tmp_path / "cluster") as cluster, Client(cluster.address) as client:
        with pytest.warns(UserWarning, match=f"{NONE}: computing what this call returns") as found:
            labels = model.predict(stored)
        assert [warning.filename for warning in found] == [__file__]
        cluster.start_worker()
        cluster.wait(client)
        computed = labels.compute()
    assert np.array_equal(computed, model.predict(ROWS))


def test_a_time_limit_of_the_scheduler_ends_the_wait(zygote, stored, tmp_path):
    with (
        processes(zygote, tmp_path / "cluster", scheduler__no_workers_timeout="1s") as cluster,
        Client(cluster.address),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with pytest.raises(ClusterError, match=r"Start a worker"):
            model_of().fit(stored)


def test_a_warning_that_is_an_error_reaches_the_caller(zygote, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(dask_graph, "POLL_SECONDS", 0.05)
    with (
        processes(zygote, tmp_path / "cluster") as cluster,
        Client(cluster.address),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)
        worker = threading.Timer(2, cluster.start_worker)
        worker.start()
        with pytest.raises(UserWarning, match=NONE):
            model_of().fit(stored)
        worker.join()


EMTAU = "import sys; from emtau_dask.cli.main import main; sys.exit(main())"


def test_the_command_line_says_it(zygote, stored, tmp_path):
    config = tmp_path / "run.yaml"
    with processes(zygote, tmp_path / "cluster") as cluster:
        sections = {
            "data": {"path": str(stored.store.root)},
            "model": {"n_components": 3, "random_state": 0},
            "stop": {"tol": 0.0, "max_iter": 3},
            "output": {"directory": str(tmp_path / "out")},
            "cluster": {"scheduler": cluster.address},
        }
        config.write_text(yaml.safe_dump(sections))
        command = [sys.executable, "-c", EMTAU, "fit", str(config)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as fit:
            guard = threading.Timer(GUARD / 5, fit.kill)
            guard.start()
            lines = []
            for line in fit.stderr:
                lines.append(line)
                if NONE in line:
                    cluster.start_worker()
            guard.cancel()
    assert any(f"the scheduler at {cluster.address} {NONE}" in line for line in lines), lines
    assert fit.returncode == NOT_CONVERGED, lines
