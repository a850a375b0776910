"""docker-compose.yml: what it promises, and its own commands, run as processes instead of containers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zarr
from dask.utils import parse_bytes
from distributed import Client
from processes import free_port

from emtau_dask import GaussianMixture
from emtau_dask.cli.config import load_config

REPOSITORY = Path(__file__).parents[2]
COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "Dockerfile"

ROWS, COMPONENTS = 8_000, 4
SETTINGS = {
    "data.dataset_options.rows": ROWS,
    "data.dataset_options.chunk_rows": 2_000,
    "data.dataset_options.components": COMPONENTS,
    "model.n_components": COMPONENTS,
    "stop.tol": 1e-7,  # iterations enough to be interrupted in
}
SMALL = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]

GUARD = 120  # seconds after which something that hangs is given up


def project(**variables: str) -> dict[str, Any]:
    """Read the file and replace ``${NAME:-default}``, the one form in it, as compose does."""
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}",
        lambda found: variables.get(found[1], found[2]),
        COMPOSE.read_text(encoding="utf-8"),
    )
    assert "$" not in text
    content = yaml.safe_load(text)
    assert isinstance(content, dict)
    return content


SERVICES: dict[str, dict[str, Any]] = project()["services"]


def option(service: str, name: str) -> str:
    words = shlex.split(SERVICES[service]["command"])
    return words[words.index(name) + 1]


def test_the_file_follows_the_compose_specification(tmp_path: Path) -> None:
    """From the copy of its schema in check-jsonschema; a key that compose does not know is noticed."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run([*check, COMPOSE], capture_output=True, text=True, timeout=GUARD)
    assert result.returncode == 0, result.stdout + result.stderr
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text(encoding="utf-8").replace("mem_limit:", "memory_limit:"))
    result = subprocess.run([*check, wrong], capture_output=True, text=True, timeout=GUARD)
    assert result.returncode == 1
    assert "memory_limit" in result.stdout + result.stderr


@pytest.mark.parametrize("variables", [{}, {"EMTAU_SCHEDULER_PORT": "9001", "EMTAU_DASHBOARD_PORT": "9002"}])
def test_ports_are_published_on_this_machine_alone(variables: dict[str, str]) -> None:
    services = project(**variables)["services"]
    published = [port.rsplit(":", 2) for service in services.values() for port in service.get("ports", [])]
    assert [target for _, _, target in published] == ["8786", "8787"]
    assert {host for host, _, _ in published} == {"127.0.0.1"}
    assert not any("network_mode" in service for service in services.values())
    if variables:
        assert [port for _, port, _ in published] == ["9001", "9002"]


def test_workers_can_be_scaled() -> None:
    assert not {"ports", "container_name", "hostname"} & set(SERVICES["worker"])
    assert SERVICES["worker"]["scale"] == 2
    assert project(EMTAU_WORKERS="4")["services"]["worker"]["scale"] == 4


def test_dask_acts_before_the_container_of_a_worker_is_full() -> None:
    (mebibytes,) = re.fullmatch(r"(\d+)m", SERVICES["worker"]["mem_limit"]).groups()  # type: ignore[union-attr]
    assert 1 < int(mebibytes) * 2**20 / parse_bytes(option("worker", "--memory-limit")) < 1.5


def test_what_goes_on_running_is_checked_and_what_ends_waits_for_it() -> None:
    lasting = {name for name, service in SERVICES.items() if service["restart"] != "no"}
    assert lasting == {"scheduler", "worker"}
    for name in lasting:
        assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    healthy = {"condition": "service_healthy"}
    assert SERVICES["worker"]["depends_on"] == {"scheduler": healthy}
    for name in SERVICES.keys() - lasting:
        assert SERVICES[name]["depends_on"] == dict.fromkeys(lasting, healthy)


def test_all_services_share_a_volume_and_one_image_that_is_built_here() -> None:
    assert project()["volumes"].keys() == {"shared"}
    for service in SERVICES.values():
        assert service["volumes"] == ["shared:/shared"]
        assert service["working_dir"] == "/shared"
    assert len({service["image"] for service in SERVICES.values()}) == 1
    built = {name: service["pull_policy"] for name, service in SERVICES.items() if "build" in service}
    assert built == {"scheduler": "build"}
    assert {service["pull_policy"] for service in SERVICES.values()} == {"build", "never"}


def test_the_image_has_what_the_commands_name() -> None:
    recipe = DOCKERFILE.read_text(encoding="utf-8")
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied: dict[str, str] = {}
    for words in re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+)$", recipe, re.MULTILINE):
        *sources, target = words.split()
        for source in sources:
            assert (REPOSITORY / source).exists()
            assert f"!{source}" in ignored
            copied[source] = target
    assert copied["configs"] == "/configs"
    assert re.findall(r"^USER (.+)$", recipe, re.MULTILINE)[-1] not in ("root", "0")


def test_resume_goes_on_with_what_fit_commits() -> None:
    config = load_config(REPOSITORY / "configs" / "cluster.yaml")
    assert "/configs/cluster.yaml" in shlex.split(SERVICES["fit"]["command"])
    words = shlex.split(SERVICES["resume"]["command"])
    assert words[:3] == ["emtau", "resume", config.checkpoint.path]
    assert option("resume", "--scheduler") == option("fit", "--scheduler")


class Processes:
    """The services' commands as processes in a folder that stands for the volume.

    What a container network and its files would give is put in place of the names in the
    file: `replaced` is all that differs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replaced = {
            "/shared": str(folder),
            "/configs": str(REPOSITORY / "configs"),
            "/health.py": str(REPOSITORY / "containers" / "health.py"),
            "scheduler:": "127.0.0.1:",
            "0.0.0.0": "127.0.0.1",
            "8786": str(free_port()),
            "8787": str(free_port()),
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def here(self, text: str, worker_port: str) -> str:
        replaced = {**self.replaced, "8788": worker_port}
        return re.sub("|".join(map(re.escape, replaced)), lambda found: replaced[found[0]], text)

    def surroundings(self, service: str, worker_port: str) -> dict[str, Any]:
        settings = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
        settings["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        for name, value in SERVICES[service]["environment"].items():
            settings[name] = self.here(value, worker_port)
        return {"env": settings, "cwd": self.here(SERVICES[service]["working_dir"], worker_port)}

    def log(self, process: subprocess.Popen[bytes]) -> Path:
        return self.folder.with_name(f"log-{self.running.index(process)}")

    def start(self, service: str, *more: str, worker_port: str = "") -> subprocess.Popen[bytes]:
        words = [self.here(word, worker_port) for word in shlex.split(SERVICES[service]["command"])]
        path = self.folder.with_name(f"log-{len(self.running)}")
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*words, *more],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self.surroundings(service, worker_port),
            )
        self.running.append(process)
        return process

    def is_healthy(self, service: str, worker_port: str = "") -> bool:
        _, *words = SERVICES[service]["healthcheck"]["test"]
        words = [self.here(word, worker_port) for word in words]
        surroundings = self.surroundings(service, worker_port)
        return subprocess.run(words, capture_output=True, timeout=GUARD, **surroundings).returncode == 0

    def wait(self, process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
        """Wait until something holds; fail with the log where the process ends before."""
        end = time.monotonic() + GUARD
        while not until():
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{process.args}: {process.poll()}\n{self.log(process).read_text()}")
            time.sleep(0.05)

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        return process.wait(GUARD), self.log(process).read_text(encoding="utf-8")

    def stop(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in reversed(self.running):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            finally:
                kill_group(process)
                process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process at once, and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("compose") / "shared"
    folder.mkdir()
    processes = Processes(folder)
    try:
        scheduler = processes.start("scheduler")
        processes.wait(scheduler, lambda: processes.is_healthy("scheduler"))
        for port in (str(free_port()), str(free_port())):
            # In a container a worker may listen on every interface.
            worker = processes.start("worker", "--host", "127.0.0.1", worker_port=port)
            processes.wait(worker, lambda port=port: processes.is_healthy("worker", port))
        yield processes
    finally:
        processes.stop()


@pytest.fixture
def client(cluster: Processes) -> Iterator[Client]:
    with Client(cluster.here("tcp://scheduler:8786", ""), set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def fitted(cluster: Processes) -> tuple[GaussianMixture, np.ndarray[Any, Any]]:
    code, output = cluster.finish(cluster.start("fit", *SMALL))
    assert code == 0, output
    return results(cluster)


def results(cluster: Processes) -> tuple[GaussianMixture, np.ndarray[Any, Any]]:
    run = cluster.folder / "runs" / "cluster"
    labels = zarr.open_group(str(run / "labels.zarr"), mode="r")["labels"]
    assert isinstance(labels, zarr.Array)
    return GaussianMixture.load(str(run / "model.zarr")), np.asarray(labels[...])


@pytest.mark.cluster
@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_a_health_check_fails_where_nothing_runs(tmp_path: Path, service: str) -> None:
    assert not Processes(tmp_path).is_healthy(service, str(free_port()))


@pytest.mark.cluster
def test_healthy_workers_are_in_the_cluster_with_their_limits(client: Client) -> None:
    # Both are of one host here, so that the check of either is content with one of them.
    client.wait_for_workers(2, timeout=GUARD)
    workers = client.scheduler_info()["workers"].values()
    assert [(worker["nthreads"], worker["memory_limit"]) for worker in workers] == [(1, 2**30)] * 2


@pytest.mark.cluster
def test_the_settings_of_dask_arrive(cluster: Processes, client: Client) -> None:
    def failures(dask_scheduler: Any) -> int:
        return int(dask_scheduler.allowed_failures)

    def folder(dask_worker: Any) -> str:
        return str(dask_worker.local_directory)

    assert client.run_on_scheduler(failures) == 10
    scratch = cluster.folder / "scratch"
    assert all(Path(path).is_relative_to(scratch) for path in client.run(folder).values())


@pytest.mark.cluster
def test_fit_ends_with_a_model_and_labels(fitted: tuple[GaussianMixture, np.ndarray[Any, Any]]) -> None:
    model, labels = fitted
    assert model.converged_
    assert labels.shape == (ROWS,)
    assert set(np.unique(labels)) == set(range(COMPONENTS))


@pytest.mark.cluster
def test_the_cluster_computed_the_fit(
    client: Client, fitted: tuple[GaussianMixture, np.ndarray[Any, Any]]
) -> None:
    def transitions_of_tasks(dask_scheduler: Any) -> int:
        return int(dask_scheduler.transition_counter)

    assert client.run_on_scheduler(transitions_of_tasks) > fitted[0].n_iter_


@pytest.mark.cluster
def test_resume_ends_a_fit_that_was_killed_as_if_it_had_not_been(
    cluster: Processes, fitted: tuple[GaussianMixture, np.ndarray[Any, Any]]
) -> None:
    run = cluster.folder / "runs" / "cluster"
    shutil.rmtree(run)
    fit = cluster.start("fit", *SMALL)
    commits = run / "run.zarr" / "commits"
    cluster.wait(fit, lambda: any(int(path.name) >= 3 for path in commits.glob("[0-9]*")))
    kill_group(fit)
    assert fit.wait(GUARD) == -signal.SIGKILL
    assert not (run / "model.zarr").exists()

    code, output = cluster.finish(cluster.start("resume"))
    assert code == 0, output
    model, labels = results(cluster)
    np.testing.assert_array_equal(model.covariances_, fitted[0].covariances_)
    np.testing.assert_array_equal(labels, fitted[1])
