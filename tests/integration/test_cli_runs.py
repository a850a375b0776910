"""The command line around long fits: checkpoints, interrupts, resume, inspect, plans, local clusters."""

import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import dask
import numpy as np
import pytest
import yaml
import zarr
from commands import emtau
from distributed import default_client
from processes import EMTAU

from emtau_dask import GaussianMixture

NOT_CONVERGED = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    rng = np.random.default_rng(3)
    rows = np.concatenate([rng.normal(centre, 1, (600, 3)) for centre in (0, 1.5, 5)])
    rng.shuffle(rows)
    zarr.create_array(store=path, data=rows, chunks=(300, 3))
    return path


def config_of(folder, data, /, **sections):
    content = {
        "data": {"path": str(data)},
        "model": {"n_components": 3, "random_state": 0},
        "algorithm": {"name": "em-tau", "tau": 4},
        "stop": {"tol": 0.0, "max_iter": 12},
        "checkpoint": {"path": str(folder / "run.zarr")},
        "output": {"directory": str(folder / "out")},
    } | sections
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def parameters(folder):
    model = GaussianMixture.load(folder / "out" / "model.zarr")
    return [model.weights_, model.means_, model.covariances_, np.array(model.lower_bounds_)]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(parameters(a), parameters(b), strict=True))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    result = emtau("fit", config_of(folder, data))
    assert result.exit_code == NOT_CONVERGED, result.stderr
    return folder


def test_a_fit_that_max_iter_stops_says_how_far_it_was_and_how_it_goes_on(data, undisturbed, tmp_path):
    result = emtau("fit", config_of(tmp_path, data), "--set", "stop.max_iter=6")
    assert result.exit_code == NOT_CONVERGED
    last = result.stderr.splitlines()[-1]
    assert re.search(r"after the log-likelihood changed by \S+ per row", last)
    assert emtau(*shlex.split(re.search(r"To continue: emtau (.*)", last)[1])).exit_code == NOT_CONVERGED
    assert same(tmp_path, undisturbed)


def wait_for_commit(run, number, process):
    while not (run / "commits" / str(number) / "zarr.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def wait_for_the_end_of_group(number):
    for _ in range(1000):
        os.killpg(number, 0)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "scheduler"),
    [
        (signal.SIGINT, "threads"),
        pytest.param(signal.SIGTERM, "threads", marks=pytest.mark.kills),
        pytest.param(signal.SIGINT, "processes", marks=pytest.mark.cluster),
    ],
)
def test_a_signal_ends_a_fit_with_one_line_which_says_how_to_go_on(
    number, scheduler, data, undisturbed, tmp_path
):
    """A terminal sends SIGINT to all processes of the group, those of a local cluster too."""
    options = ["--set", "stop.max_iter=100000", "--scheduler", scheduler, "--workers", "2"]
    process = subprocess.Popen(
        [*EMTAU, "fit", config_of(tmp_path, data), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_commit(tmp_path / "run.zarr", 4, process)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert output == ""
    lines = errors.splitlines()
    progress = ("fingerprint", "sample", "k-means", "iteration", "dashboard")
    (last,) = [line for line in lines if not line.startswith(progress)]
    assert lines[-1] == last
    command = re.fullmatch(r"emtau: interrupted; .* Resume with: emtau (resume .*)", last)
    assert command, last
    with pytest.raises(ProcessLookupError):
        wait_for_the_end_of_group(process.pid)
    described = json.loads(emtau("inspect", tmp_path / "run.zarr", "--json").stdout)
    assert described["stage"] == "iterating"
    done = described["iteration"]
    further = ["--scheduler", "threads", "--set", f"stop.max_iter={max(done + 1, 12)}"]
    result = emtau(*shlex.split(command[1]), *further)
    assert result.exit_code == NOT_CONVERGED, result.stderr
    if done < 12:
        assert same(tmp_path, undisturbed)


@pytest.mark.kills
@pytest.mark.parametrize(
    "beside", ["", "import threading; threading.Thread(target=threading.Event().wait).start();"]
)
def test_an_interrupt_leaves_no_temporary_row_state_and_waits_for_no_thread(beside, data, tmp_path):
    config = config_of(tmp_path, data, checkpoint={})
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": str(temporary)}
    python, option, program = EMTAU
    endless = [python, option, beside + program, "fit", config, "--set", "stop.max_iter=100000"]
    process = subprocess.Popen(endless, env=environment, stderr=subprocess.PIPE, text=True)
    while not any(temporary.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    said = process.communicate()[1].strip().splitlines()[-1]
    assert said.startswith("emtau: interrupted; without a checkpoint nothing of the fit was kept")
    assert "--checkpoint PATH" in said
    assert process.returncode == 130
    assert list(temporary.iterdir()) == []


def test_a_place_that_holds_a_run_is_refused_before_work_and_replaced_on_request(data, undisturbed, tmp_path):
    config = config_of(tmp_path, data, checkpoint={"path": str(undisturbed / "run.zarr")})
    before = json.loads(emtau("inspect", undisturbed / "run.zarr", "--json").stdout)
    result = emtau("fit", config)
    assert result.exit_code == 1
    assert "already holds a run" in result.stderr
    assert not (tmp_path / "out" / "model.zarr").exists()
    assert json.loads(emtau("inspect", undisturbed / "run.zarr", "--json").stdout) == before
    own = config_of(tmp_path, data)
    assert emtau("fit", own, "--set", "stop.max_iter=2").exit_code == NOT_CONVERGED
    assert emtau("fit", own, "--overwrite").exit_code == NOT_CONVERGED
    assert same(tmp_path, undisturbed)


def test_overwrite_replaces_nothing_but_a_run(data, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    result = emtau("fit", config_of(tmp_path, data, checkpoint={"path": str(precious)}), "--overwrite")
    assert result.exit_code == 1
    assert "not a run of emtau" in result.stderr
    assert (precious / "thesis.txt").read_text() == "years of work"


class TestInspect:
    def test_json_says_what_the_run_did(self, undisturbed):
        described = json.loads(emtau("inspect", undisturbed / "run.zarr", "--json").stdout)
        model = GaussianMixture.load(undisturbed / "out" / "model.zarr")
        assert described["stage"] == "finished"
        assert described["stop_reason"] == "max-iter"
        assert described["iteration"] == 12
        assert described["lower_bound"] == model.lower_bound_
        assert [record["lower_bound"] for record in described["history"]] == model.lower_bounds_
        assert [r["active_rows"] for r in described["history"]] == [r.active_rows for r in model.history_]
        assert described["config"]["algorithm"]["params"] == {"tau": 4, "revisit": "on-empty"}

    def test_people_get_tables(self, undisturbed):
        shown = emtau("inspect", undisturbed / "run.zarr").stdout
        assert "12 of at most 12" in shown
        assert "EMTau" in shown or "em-tau(" in shown


class TestResume:
    def test_data_that_moved_is_named(self, data, undisturbed, tmp_path):
        moved = tmp_path / "moved.zarr"
        config = config_of(tmp_path, moved)
        data.rename(moved)
        try:
            assert emtau("fit", config, "--set", "stop.max_iter=5").exit_code == NOT_CONVERGED
        finally:
            moved.rename(data)
        run = tmp_path / "run.zarr"
        assert emtau("resume", run, "--set", "stop.max_iter=12").exit_code == 1
        result = emtau("resume", run, "--set", "stop.max_iter=12", "--set", f"data.path={data}")
        assert result.exit_code == NOT_CONVERGED, result.stderr
        assert same(tmp_path, undisturbed)

    def test_settings_that_make_another_fit_are_refused(self, undisturbed):
        result = emtau("resume", undisturbed / "run.zarr", "--set", "model.n_components=4")
        assert result.exit_code == 2
        assert "model.n_components" in result.stderr
        assert "stop.max_iter" in result.stderr

    def test_the_folder_of_a_run_will_do(self, data, undisturbed, tmp_path):
        emtau("fit", config_of(tmp_path, data), "--set", "stop.max_iter=6")
        assert emtau("resume", tmp_path, "--set", "stop.max_iter=12").exit_code == NOT_CONVERGED
        assert same(tmp_path, undisturbed)

    def test_a_run_begun_from_python_says_so(self, data, tmp_path):
        rows = zarr.open_array(data, mode="r")
        GaussianMixture(2, checkpoint=tmp_path / "run.zarr", random_state=0).fit(rows)
        result = emtau("resume", tmp_path / "run.zarr")
        assert result.exit_code == 1
        assert "GaussianMixture.resume" in result.stderr


def test_predict_takes_the_last_commit_of_a_run(data, undisturbed, tmp_path):
    assert emtau("predict", undisturbed / "run.zarr", data, tmp_path / "labels.zarr").exit_code == 0
    model = GaussianMixture.load(undisturbed / "out" / "model.zarr")
    expected = model.predict(zarr.open_array(data, mode="r")[:])
    assert np.array_equal(zarr.open_group(tmp_path / "labels.zarr")["labels"][:], expected)


def listen_at(listener, port):
    """Wait for the port, which a test beside this one may have, unless a program seems to keep it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)


@pytest.mark.cluster
@pytest.mark.parametrize("busy", [False, True])
def test_the_dashboard_of_a_local_cluster_is_named_and_a_busy_port_is_no_trouble(busy, data, tmp_path):
    with socket.socket() as other:
        if busy:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listen_at(other, 8787)
        options = ["--set", "stop.max_iter=100000", "--scheduler", "processes", "--workers", "1"]
        process = subprocess.Popen(
            [*EMTAU, "fit", config_of(tmp_path, data), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_commit(tmp_path / "run.zarr", 0, process)
        first = process.stderr.readline()
        (address,) = re.match(r"dashboard: (http://127\.0\.0\.1:\d+)/status", first).groups()
        assert address.endswith(":8787") <= (not busy)
        with urllib.request.urlopen(f"{address}/info/main/workers.html") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert "already in use" not in process.communicate()[1]


@pytest.mark.cluster
def test_worker_processes_give_the_same_bits(data, undisturbed, tmp_path):
    result = emtau("fit", config_of(tmp_path, data), "--scheduler", "processes", "--workers", 1)
    assert result.exit_code == NOT_CONVERGED, result.stderr
    assert same(tmp_path, undisturbed)


@pytest.fixture
def nothing_collected():
    """Whatever a failure leaves behind in cycles is still there."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("nothing_collected")
def test_a_cluster_that_cannot_be_used_leaves_nothing_behind_that_later_fits_would_use(data, tmp_path):
    with dask.config.set({"distributed.comm.timeouts.connect": "100ms"}):
        refused = emtau("fit", config_of(tmp_path, data, cluster={"scheduler": "tls://127.0.0.1:1"}))
    assert refused.exit_code == 1
    assert "tls://127.0.0.1:1" in refused.stderr
    assert not (tmp_path / "run.zarr").exists()
    assert dask.config.get("scheduler", None) is None
    with pytest.raises(ValueError, match="No clients found"):
        default_client()
    result = emtau("fit", config_of(tmp_path, data))
    assert result.exit_code == NOT_CONVERGED, result.stderr


def lines_of(table):
    """The names and texts of a table; where one of them is long, it goes on in the lines below."""
    found = []
    for name, text in re.findall(r"^\| (.*?) *\| (.*?) *\|$", table, re.MULTILINE):
        if name and text:
            found.append((name, text))
        else:
            found[-1] = (f"{found[-1][0]} {name}".rstrip(), f"{found[-1][1]} {text}".rstrip())
    return dict(found)


class TestPlan:
    def test_it_says_what_is_needed_and_runs_nothing(self, data, tmp_path):
        result = emtau("fit", config_of(tmp_path, data), "--plan")
        assert result.exit_code == 0, result.stderr
        assert "6, the longest of 300 rows" in result.stdout
        assert re.search(r"bytes of a full pass\W+42.19 kiB", result.stdout)
        assert not (tmp_path / "run.zarr").exists()
        assert not (tmp_path / "out").exists()

    def test_it_makes_no_dataset(self, tmp_path):
        """And says the same as when the data are there, whose size nobody would wait for."""
        options = {"rows": 10**9, "features": 16, "components": 4, "chunk_rows": 2_000_000}
        config = config_of(
            tmp_path, None, data={"dataset": "mixture", "dataset_options": options, "labels": "labels"}
        )
        result = emtau("fit", config, "--plan")
        assert result.exit_code == 0, result.stderr
        assert "500, the longest of 2,000,000 rows" in result.stdout
        said = lines_of(result.stdout)["data"]
        assert "1,000,000,000 rows of 16 features; a dataset that the fit makes first" in said
        assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]

    def test_it_plans_for_a_dataset_as_if_it_were_made(self, tmp_path):
        options = {"rows": 700, "features": 3, "chunk_rows": 300}
        config = config_of(tmp_path, None, data={"dataset": "mixture", "dataset_options": options})
        before = lines_of(emtau("fit", config, "--plan").stdout)
        assert emtau("fit", config, "--set", "stop.max_iter=1").exit_code == NOT_CONVERGED
        after = lines_of(emtau("fit", config, "--plan").stdout)
        assert len(after) == 9
        # A chunk of an array that is not there yet may be copied; one in a local file is not.
        for name in ("memory of a process", "of which reading a chunk"):
            first, then = (float(re.search(r"[0-9.]+(?= MiB)", found[name])[0]) for found in (before, after))
            assert then <= first <= 1.01 * then
            after[name] = before[name]
        assert before == after | {"data": before["data"]}
        assert before["data"].startswith(after["data"])

    def test_another_dataset_in_its_place_is_named(self, tmp_path, data):
        config = config_of(tmp_path, data, data={"path": str(data), "dataset": "digits"})
        assert "use --overwrite to replace it" in emtau("fit", config, "--plan").stderr
        assert "3, the longest of 600 rows" in emtau("fit", config, "--plan", "--overwrite").stdout
        assert zarr.open_array(data, mode="r").shape == (1800, 3)

    def test_rows_that_cannot_be_counted_before_are_not_guessed(self, tmp_path):
        made = {"dataset": "mnist", "dataset_options": {"source": str(tmp_path / "mnist.npz")}}
        result = emtau("fit", config_of(tmp_path, None, data=made), "--plan")
        assert result.exit_code == 1
        assert "emtau dataset mnist" in result.stderr

    def test_a_fit_above_its_limit_is_refused_with_the_chunks_that_would_fit(self, tmp_path):
        path = tmp_path / "wide.zarr"
        zarr.create_array(store=path, shape=(4_000_000, 16), dtype="f8", chunks=(2_000_000, 16))
        config = config_of(tmp_path, path, cluster={"memory_limit": "600MB", "workers": 1})
        for arguments in (["fit", config], ["fit", config, "--plan"]):
            result = emtau(*arguments)
            assert result.exit_code == 2
            rows = int(re.search(r"chunks of at most ([\d,]+) rows", result.stderr)[1].replace(",", ""))
            assert 0 < rows < 2_000_000
        smaller = tmp_path / "smaller.zarr"
        zarr.create_array(store=smaller, shape=(4_000_000, 16), dtype="f8", chunks=(rows, 16))
        config = config_of(tmp_path, smaller, cluster={"memory_limit": "600MB", "workers": 1})
        assert emtau("fit", config, "--plan").exit_code == 0
        assert not Path(tmp_path, "run.zarr").exists()


@pytest.mark.parametrize(
    ("shape", "dtype", "what"),
    [((40,), float, "1 axes"), ((4, 3, 2), float, "3 axes"), ((9, 2), "U3", "dtype")],
)
@pytest.mark.parametrize("options", [["--plan"], []], ids=["plan", "fit"])
def test_data_that_are_no_rows_are_named_before_anything_is_planned(tmp_path, shape, dtype, what, options):
    np.save(tmp_path / "x.npy", np.ones(shape).astype(dtype))
    ended = emtau("fit", config_of(tmp_path, tmp_path / "x.npy"), *options)
    assert ended.exit_code == 1
    assert what in ended.stderr
    assert "--debug" not in ended.stderr
