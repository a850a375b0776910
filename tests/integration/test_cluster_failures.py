"""Workers that die or freeze, a scheduler that dies, an interrupted client."""

import asyncio
import os
import re
import signal
import subprocess
import threading
import warnings
from contextlib import contextmanager

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
import zarr
from clusters import GUARD, Eventful, addresses, alive, dying, end, held, processes, tasks_of, until
from distributed import Client, LocalCluster, Status, Worker
from fits import CHUNKS, ROWS, assert_same_bits, mixture, quietly, resumed
from processes import EMTAU

from emtau_dask import ClusterError, EMTau, GaussianMixture
from emtau_dask.data.opening import as_source
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting
from emtau_dask.execution import dask_graph
from emtau_dask.execution.scheduler import cluster_errors

pytestmark = pytest.mark.cluster
ITERATIONS = 12


def fit(X, algorithm, checkpoint=None):
    settings = {"algorithm": algorithm, "tol": 0, "max_iter": ITERATIONS, "init_params": "random"}
    return quietly(mixture(checkpoint=checkpoint, **settings), X)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    return zarr.create_array(store=path, data=ROWS, chunks=(30, 2))


def in_memory():
    """The rows as an array in memory, but in several chunks."""
    return as_source(ROWS, ndim=2, what="X").aligned(CHUNKS)


def sources(stored):
    """The rows of all kinds of source: what is computed is cached by workers, of which one may die."""
    graph = da.from_array(ROWS, chunks=(CHUNKS, 2)).map_blocks(np.positive)
    return {"stored": stored, "in memory": in_memory(), "computed": graph}


@pytest.fixture(scope="module")
def undisturbed(stored):
    with dask.config.set(scheduler="threads"):
        algorithm = EMTau(tau=2, revisit=3)
        return {source: fit(X, algorithm) for source, X in sources(stored).items()}


@pytest.fixture
def after_iterations(monkeypatch):
    """Let functions be called after iterations, by their numbers."""
    calls = {}

    class Observer(SilentObserver):
        def iteration(self, record, parameters):
            calls.get(record.iteration, lambda: None)()

    monkeypatch.setattr(fitting, "observer_for", lambda verbose: Observer())
    return calls


@contextmanager
def replaced(cluster):
    """Start a new worker for each that dies; give a list of those that did."""
    over, dead = threading.Event(), []

    def replace():
        while not over.wait(0.05):
            for name in [name for name, worker in cluster.workers.items() if not alive(worker)]:
                cluster.kill_worker(name)
                dead.append(name)
                cluster.start_worker()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        yield dead
    finally:
        over.set()
        thread.join()


@pytest.mark.sample
@pytest.mark.parametrize(("source", "kept"), [("stored", True), ("in memory", False), ("computed", False)])
def test_killed_workers_change_no_bit(zygote, stored, undisturbed, after_iterations, tmp_path, source, kept):
    (tmp_path / "events").mkdir()
    X = sources(stored)[source]
    for iteration in (1, 3, 5, 7):
        after_iterations[iteration] = (tmp_path / "events" / "die").touch
    with (
        processes(zygote, tmp_path / "cluster", 2, scheduler__allowed_failures="99") as cluster,
        cluster.client(),
        replaced(cluster) as dead,
    ):
        found = fit(X, Eventful(folder=str(tmp_path / "events")), tmp_path / "run" if kept else None)
    assert len(dead) == 4
    assert_same_bits(found, undisturbed[source])


def test_no_pass_waits_for_rows_that_a_paused_worker_caches(
    zygote, stored, undisturbed, monkeypatch, tmp_path
):
    paused, holders_of = set(), dask_graph.GraphExecutor._holders

    def pause(dask_worker):
        dask_worker.status = Status.paused

    def holders_before_one_pauses(executor, work):
        holders = holders_of(executor, work)
        if holders and not paused:
            paused.add(min(holders.values()))
            executor.client.run(pause, workers=list(paused))
        return holders

    monkeypatch.setattr(dask_graph.GraphExecutor, "_holders", holders_before_one_pauses)
    with processes(zygote, tmp_path / "cluster", 2) as cluster, cluster.client():
        found = fit(sources(stored)["computed"], EMTau(tau=2, revisit=3))
    assert paused
    assert_same_bits(found, undisturbed["computed"])


@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.soak), True], ids=["", "checkpoint"])
def test_a_frozen_worker_that_wakes_and_writes_changes_no_bit(
    zygote, stored, undisturbed, after_iterations, tmp_path, kept
):
    events = tmp_path / "events"
    events.mkdir()
    after_iterations[2] = (events / "freeze").touch
    with (
        processes(zygote, tmp_path / "cluster", 2, scheduler__worker_ttl="3s") as cluster,
        cluster.client() as client,
    ):

        def wake():
            pid = int((events / "met").read_text())
            (zombie,) = [name for name, worker in cluster.workers.items() if worker.pid == pid]
            assert zombie not in addresses(client)
            assert cluster.workers[zombie].stopped
            os.kill(pid, signal.SIGCONT)

        after_iterations[4] = wake
        found = fit(stored, Eventful(folder=str(events)), tmp_path / "run" if kept else None)
    assert_same_bits(found, undisturbed["stored"])
    if kept:
        algorithm = Eventful(folder=str(events))
        assert_same_bits(resumed(tmp_path / "run", stored, algorithm=algorithm), undisturbed["stored"])


@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.soak), True], ids=["", "checkpoint"])
def test_a_scheduler_that_dies_ends_the_fit_which_can_be_resumed_on_another(
    zygote, stored, undisturbed, after_iterations, tmp_path, kept
):
    algorithm, run = EMTau(tau=2, revisit=3), tmp_path / "run" if kept else None
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "20s"}),
        processes(zygote, tmp_path / "cluster", 1) as cluster,
    ):
        after_iterations[4] = lambda: end(cluster.scheduler)
        with cluster.client(timeout=20), pytest.raises(ClusterError, match="scheduler"):
            fit(stored, algorithm, run)
        after_iterations.clear()
        for name in list(cluster.workers):
            cluster.kill_worker(name)
        cluster.start_scheduler()
        cluster.start_worker()
        with cluster.client():
            found = resumed(run, stored) if kept else fit(stored, algorithm)
    assert_same_bits(found, undisturbed["stored"])


def test_a_chunk_that_kills_its_workers_ends_the_fit_with_what_to_raise(zygote, tmp_path):
    X = da.from_array(ROWS, chunks=(100, 2)).map_blocks(dying, dtype=float, meta=np.empty((0, 0)))
    with (
        processes(zygote, tmp_path / "cluster", 1, scheduler__allowed_failures="1") as cluster,
        cluster.client() as client,
        replaced(cluster) as dead,
    ):
        with pytest.raises(ClusterError, match=r"allowed-failures \(now 1\)"):
            fit(X, "em")
        until(lambda: not tasks_of(client), "the release of all tasks")
        until(lambda: len(dead) >= 2, "the second death")


@pytest.fixture
def impatient(monkeypatch):
    """Let a fit wait for seconds in place of a minute."""
    monkeypatch.setattr(dask_graph, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(dask_graph, "PATIENCE_SECONDS", 5.0)
    monkeypatch.setattr(dask_graph, "STABLE_SECONDS", 2.5)


@contextmanager
def killing(cluster, doomed):
    """Kill those of these workers that a scheduler knows, twice a second; start others in their place."""
    over = threading.Event()

    def kill():
        with Client(cluster.address, set_as_default=False) as client:
            while not over.wait(0.5):
                for name in set(doomed()) & set(addresses(client)):
                    cluster.kill_worker(name)
                    cluster.start_worker()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_workers_that_die_again_and_again_end_the_fit_which_is_resumed_on_others(
    zygote, stored, undisturbed, after_iterations, impatient, tmp_path
):
    """However many deaths the scheduler allows a task."""
    holding = tmp_path / "holding"
    after_iterations[4] = holding.mkdir
    X = da.from_zarr(stored).map_blocks(held, folder=str(holding), dtype=float, meta=np.empty((0, 0)))
    with (
        processes(zygote, tmp_path / "cluster", 3, scheduler__allowed_failures="100000") as cluster,
        cluster.client() as client,
        killing(cluster, lambda: list(cluster.workers) if holding.exists() else []),
    ):
        with pytest.raises(ClusterError, match="die again and again") as raised:
            fit(X, EMTau(tau=2, revisit=3), tmp_path / "run")
        until(lambda: not tasks_of(client), "the release of all tasks")
    message = str(raised.value)
    found = re.search(
        r"of iteration 5 was done, and (\d+) workers were lost, of at most (\d) at a time", message
    )
    assert found is not None, message
    lost, most = map(int, found.groups())
    assert lost > most
    assert most <= 3
    assert re.search(r"\(the last: (tcp://127\.0\.0\.1:\d+(, )?){3}\)", message), message
    holding.rmdir()
    with processes(zygote, tmp_path / "others", 2) as cluster, cluster.client():
        assert_same_bits(resumed(tmp_path / "run", X), undisturbed["stored"])


def test_a_cluster_that_has_closed_its_workers_ends_the_fit_which_is_resumed_on_another(
    stored, undisturbed, after_iterations, impatient, tmp_path
):
    """Dask's own clusters do so with workers whose processes are not back in time; they start no others."""
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "50ms"}):
        with LocalCluster(**options) as cluster, Client(cluster):
            after_iterations[4] = lambda: os.kill(cluster.workers[0].pid, signal.SIGKILL)
            with pytest.raises(ClusterError, match=r"closed its workers 0, .*lost-worker-timeout .50ms"):
                fit(stored, EMTau(tau=2, revisit=3), tmp_path / "run")
        with LocalCluster(**options) as cluster, Client(cluster):
            assert_same_bits(resumed(tmp_path / "run", stored), undisturbed["stored"])


NOT_CONVERGED = 3


class Slow(Worker):
    """A worker whose machine takes its time to start."""

    async def start(self):
        await asyncio.sleep(6)
        await super().start()


def test_workers_that_have_not_come_yet_are_waited_for(monkeypatch):
    """They are no workers that a cluster has closed."""
    monkeypatch.setattr(dask_graph, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(dask_graph, "POLL_SECONDS", 0.5)
    rows = np.random.default_rng(0).normal(size=(200, 2))
    with (
        warnings.catch_warnings(),
        LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        warnings.simplefilter("ignore")
        cluster.new_spec = {"cls": Slow, "options": {"nthreads": 1, "dashboard": False}}
        cluster.scale(1)
        GaussianMixture(1, algorithm="em", max_iter=2).fit(da.from_array(rows, chunks=50))


def test_the_command_lines_own_workers_come_back_however_long_it_takes(stored, tmp_path):
    """Dask would close a worker that is away for longer than a limit, which the fit does not leave to it."""
    settings = ["-k", "3", "--max-iter", "150", "--tol", "0", "--scheduler", "processes", "--workers", "1"]
    command = [*EMTAU, "--log-level", "info", "fit", str(stored.store.root), *settings]
    environment = {**os.environ, "DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "50ms"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as program:
        guard = threading.Timer(GUARD / 3, program.kill)
        guard.start()
        killed = []
        for line in program.stderr:
            if "iteration 5" in line and not killed:
                killed = [
                    child
                    for child in psutil.Process(program.pid).children()
                    if "spawn_main" in " ".join(child.cmdline())
                ]
                for child in killed:
                    child.kill()
        guard.cancel()
    assert len(killed) == 1
    assert program.returncode == NOT_CONVERGED


def test_workers_that_are_all_replaced_once_are_waited_for(
    zygote, stored, undisturbed, after_iterations, impatient, tmp_path
):
    with (
        processes(zygote, tmp_path / "cluster", 2, scheduler__allowed_failures="99") as cluster,
        cluster.client(),
    ):

        def replace():
            for name in list(cluster.workers):
                cluster.kill_worker(name)
            late.start()

        late = threading.Timer(2 * dask_graph.PATIENCE_SECONDS, cluster.start_worker)
        after_iterations[4] = replace
        with pytest.warns(UserWarning, match="has no workers"):
            found = fit(stored, EMTau(tau=2, revisit=3))
        late.join()
    assert_same_bits(found, undisturbed["stored"])


def test_a_long_task_of_a_worker_that_stays_is_waited_for_while_others_die(
    zygote, stored, undisturbed, impatient, tmp_path
):
    events = tmp_path / "events"
    events.mkdir()
    (events / "wait").touch()
    with (
        processes(zygote, tmp_path / "cluster", 2, scheduler__allowed_failures="100000") as cluster,
        cluster.client(),
    ):

        def others():
            if not (events / "met").exists():
                return []
            pid = int((events / "met").read_text())
            return [name for name, worker in cluster.workers.items() if worker.pid != pid]

        going = threading.Timer(3 * dask_graph.PATIENCE_SECONDS, (events / "go").touch)
        going.start()
        with killing(cluster, lambda: [] if (events / "go").exists() else others()):
            found = fit(stored, Eventful(folder=str(events)))
        going.join()
    assert len(cluster.children) > 6
    assert_same_bits(found, undisturbed["stored"])


def test_annotations_that_no_worker_meets_end_the_fit(zygote, stored, tmp_path):
    with (
        processes(zygote, tmp_path / "cluster", 1, scheduler__no_workers_timeout="1s") as cluster,
        cluster.client(),
        dask.annotate(resources={"SLOT": 1}),
        pytest.raises(ClusterError, match="resources that annotations ask for"),
    ):
        fit(stored, "em")


INTERRUPTED = """
from pathlib import Path
import numpy, zarr
from distributed import Client
from clusters import Eventful, until
from emtau_dask import GaussianMixture

def fit(X):
    mixture = GaussianMixture(
        3, algorithm=Eventful(folder=EVENTS), tol=0, max_iter=6, random_state=0, init_params="random"
    )
    return mixture.fit(X).means_

with Client(ADDRESS) as client:
    X = zarr.open_array(STORED, mode="r") if STORED else numpy.load(EVENTS + "/rows.npy")
    try:
        fit(X)
    except KeyboardInterrupt as error:
        kept = error  # with its traceback, and all that the frames hold
    Path(EVENTS, "interrupted").touch()
    until(lambda: Path(EVENTS, "again").exists(), "the word to fit again")
    answer["means"] = fit(X)
"""


@pytest.mark.parametrize("source", ["stored", "in memory"])
def test_an_interrupt_releases_everything(zygote, stored, tmp_path, source):
    events = tmp_path / "events"
    events.mkdir()
    np.save(events / "rows.npy", ROWS)
    (events / "wait").touch()
    path = str(stored.store.root) if source == "stored" else ""
    with processes(zygote, tmp_path / "cluster", 1) as cluster, cluster.client() as client:
        program = cluster.start_python(f"EVENTS, STORED = {str(events)!r}, {path!r}\n{INTERRUPTED}")
        until((events / "met").exists, "a task")
        assert any("emtau-estep" in key for key in tasks_of(client))
        program.signal(signal.SIGINT)
        until((events / "interrupted").exists, "the interrupt")
        (events / "go").touch()
        until(lambda: not tasks_of(client), "the release of all tasks")
        (events / "again").touch()
        answer = program.result()
    with dask.config.set(scheduler="threads"):
        X = stored if source == "stored" else ROWS
        again = mixture(algorithm=EMTau(2, 3), tol=0, max_iter=6, init_params="random")
        assert np.array_equal(quietly(again, X).means_, answer["means"])


@pytest.mark.sample
def test_a_connection_that_is_not_made_in_time_is_an_error_of_the_cluster():
    """Distributed raises Python's own OSError and TimeoutError for it."""
    from distributed.comm import connect
    from distributed.utils import sync

    with Client(processes=False, n_workers=1, dashboard_address=None) as client:

        async def never():
            await asyncio.sleep(60)

        for fail in (
            lambda: asyncio.run(connect("tcp://127.0.0.1:1", timeout=0.2)),
            lambda: sync(client.loop, never, callback_timeout=0.1),
        ):
            with (
                pytest.raises(ClusterError, match=r"cluster cannot be reached .*See that its sch") as raised,
                cluster_errors(),
            ):
                fail()
            assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.sample
def test_a_timeout_of_a_task_stays_what_it_is():
    def wait_too_long():
        raise TimeoutError("of the task")

    with (
        Client(processes=False, n_workers=1, dashboard_address=None) as client,
        pytest.raises(TimeoutError, match="of the task"),
        cluster_errors(),
    ):
        client.submit(wait_too_long).result()
