"""docker-compose.yml on a Docker engine: the cluster, its limits, kills and resumes, TLS, and what is left.

Needs an engine and an image of the Dockerfile, which `.ci/containers` builds and names in EMTAU_TEST_IMAGE.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from clusters import GUARD, until
from processes import free_port
from reliability.containers import docker, why_no_engine

from emtau_dask import GaussianMixture
from emtau_dask.cli.config import load_config

REPOSITORY = Path(__file__).parents[2]
PLAIN = ("docker-compose.yml",)
TLS = ("docker-compose.yml", "docker-compose.tls.yml")

ROWS, COMPONENTS = 40_000, 4
SETTINGS = {
    "data.dataset_options.rows": ROWS,
    "data.dataset_options.chunk_rows": 2_000,
    "data.dataset_options.components": COMPONENTS,
    "model.n_components": COMPONENTS,
    "stop.tol": 0,
    "stop.max_iter": 40,
}
SMALL = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
CAME_TO_AN_END = (0, 3)  # converged, or stopped at max_iter


@functools.cache
def compose_command() -> tuple[str, ...]:
    """The plugin, or the older program of the same name; empty where there is neither."""
    for words in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(words[0]) and not subprocess.run([*words, "version"], capture_output=True).returncode:
            return words
    return ()


def missing() -> str:
    """What is missing for these tests; empty where all is there."""
    if (why := why_no_engine()) is not None:
        return why
    if not compose_command():
        return "there is neither docker compose nor docker-compose"
    if "EMTAU_TEST_IMAGE" not in os.environ:
        return "EMTAU_TEST_IMAGE names no image; .ci/containers builds one and runs these tests"
    return ""


pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing())]


def logged(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=GUARD)
    return done.stdout + done.stderr


class Project:
    """The services under a project name of their own."""

    def __init__(self, name: str, files: tuple[str, ...], **variables: str) -> None:
        self.name = f"{os.environ.get('EMTAU_TEST_PROJECT', f'emtau-test-{os.getpid()}')}-{name}"
        self.files = [word for file in files for word in ("-f", str(REPOSITORY / file))]
        self.environment = {
            **os.environ,
            "EMTAU_IMAGE": os.environ["EMTAU_TEST_IMAGE"],
            "EMTAU_SCHEDULER_PORT": str(free_port()),
            "EMTAU_DASHBOARD_PORT": str(free_port()),
            **variables,
        }

    def compose(self, *words: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        command = [*compose_command(), "-p", self.name, *self.files, *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=GUARD)
        assert done.returncode in codes, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def containers(self, service: str) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        of_service = f"label=com.docker.compose.service={service}"
        return docker("ps", "-aq", "--no-trunc", "--filter", label, "--filter", of_service).split()

    def state(self, service: str) -> list[dict[str, Any]]:
        return [
            json.loads(docker("inspect", "--format", "{{json .}}", container))
            for container in self.containers(service)
        ]

    def health(self, service: str) -> list[str]:
        return [found["State"]["Health"]["Status"] for found in self.state(service)]

    def start(self, *more: str) -> None:
        """Bring up the cluster, without the fit of the file's own config."""
        try:
            self.compose("up", "-d", "--no-build", *more, "scheduler", "worker")
            until(lambda: set(self.health("worker")) == {"healthy"}, "the workers' health")
        except AssertionError as failure:
            logs = self.compose("logs", "--no-color", "--tail", "40", "scheduler", "worker").stdout
            raise AssertionError(f"{failure}\n{logs}") from None

    def read(self, path: str) -> str:
        """Run a command in the scheduler's container, and return what it prints."""
        return docker("exec", self.containers("scheduler")[0], "sh", "-c", path, check=False)

    def copied(self, path: str, to: Path) -> Path:
        docker("cp", f"{self.containers('scheduler')[0]}:{path}", str(to))
        return to / Path(path).name

    def newest(self) -> int:
        names = self.read("ls /shared/runs/cluster/run.zarr/commits").split()
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def left(self) -> list[str]:
        """Whatever of the project is still there."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q"))
        return [name for kind in kinds for name in docker(*kind, "--filter", label).split()]


@contextmanager
def project(name: str, files: tuple[str, ...] = PLAIN, **variables: str) -> Iterator[Project]:
    made = Project(name, files, **variables)
    try:
        yield made
    finally:
        made.compose("--profile", "resume", "down", "--volumes", "--remove-orphans", "-t", "5")
        for container in docker("ps", "-aq", "--filter", f"name={made.name}").split():
            docker("rm", "-f", "-v", container)
    assert made.left() == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Project]:
    with project("cluster") as made:
        made.start("--scale", "worker=4")
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[GaussianMixture, np.ndarray[Any, Any]]:
    """The same fit in a container of its own, in threads."""
    with project("threads") as made:
        made.compose("up", "-d", "--no-build", "--no-deps", "scheduler")
        fit = ("emtau", "fit", "/configs/cluster.yaml", "--scheduler", "threads", *SMALL)
        made.compose("run", "--rm", "--no-deps", "fit", *fit, codes=CAME_TO_AN_END)
        return results(made, tmp_path_factory.mktemp("threads"))


def results(made: Project, folder: Path) -> tuple[GaussianMixture, np.ndarray[Any, Any]]:
    config = load_config(REPOSITORY / "configs" / "cluster.yaml")
    copied = made.copied(f"/shared/{config.output.directory}", folder)
    model = GaussianMixture.load(copied / "model.zarr")
    labels = zarr.open_group(copied / "labels.zarr", mode="r")["labels"]
    assert isinstance(labels, zarr.Array)
    return model, np.asarray(labels[...])


def assert_same(found: Any, expected: Any) -> None:
    (model, labels), (other, others) = found, expected
    for name in ("weights_", "means_", "covariances_", "lower_bounds_"):
        assert np.array_equal(getattr(model, name), getattr(other, name)), name
    assert np.array_equal(labels, others)
    assert len(labels) == ROWS


def test_workers_are_as_many_as_asked_for(cluster: Project) -> None:
    assert cluster.health("scheduler") == ["healthy"]
    assert cluster.health("worker") == ["healthy"] * 4
    with project("one", EMTAU_WORKERS="1") as other:  # Not the file's own number.
        other.start()
        assert other.health("worker") == ["healthy"]


def test_services_have_their_limits(cluster: Project) -> None:
    for service, mebibytes in (("scheduler", 1024), ("worker", 1280)):
        for found in cluster.state(service):
            host = found["HostConfig"]
            assert host["ReadonlyRootfs"]
            assert host["CapDrop"] == ["ALL"]
            assert "no-new-privileges:true" in host["SecurityOpt"]
            assert (host["Memory"], host["PidsLimit"]) == (mebibytes * 2**20, 512)
            bound = [binding for port in (host["PortBindings"] or {}).values() for binding in port]
            assert all(binding["HostIp"] == "127.0.0.1" for binding in bound)
    assert cluster.read("id -u") == "10001"
    refused = docker("exec", cluster.containers("worker")[0], "sh", "-c", "touch /there 2>&1", check=False)
    assert "Read-only file system" in refused


def test_a_fit_that_was_killed_is_resumed_to_the_bits_of_one_process(
    cluster: Project, expected: Any, tmp_path: Path
) -> None:
    fit = ("emtau", "fit", "/configs/cluster.yaml", "--scheduler", "tcp://scheduler:8786", *SMALL)
    cluster.compose("run", "-d", "--no-deps", "fit", *fit)
    (container,) = cluster.containers("fit")
    until(lambda: cluster.newest() >= 3, "the fourth commit")
    docker("kill", container)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "137"
    docker("rm", container)
    stopped_at = cluster.newest()
    assert stopped_at < SETTINGS["stop.max_iter"]
    cluster.compose("run", "--rm", "--no-deps", "resume", codes=CAME_TO_AN_END)
    assert_same(results(cluster, tmp_path), expected)


def test_a_fit_ends_on_sigterm_in_time_and_says_how_to_go_on(cluster: Project) -> None:
    more = ("--overwrite", "--set", "stop.max_iter=100000")
    fit = (
        "emtau",
        "fit",
        "/configs/cluster.yaml",
        "--scheduler",
        "tcp://scheduler:8786",
        "-v",
        *SMALL,
        *more,
    )
    cluster.compose("run", "-d", "--no-deps", "fit", *fit)
    (container,) = cluster.containers("fit")
    until(lambda: "iteration 4" in logged(container), "the fourth iteration")
    docker("stop", "-t", "30", container)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "130"
    assert "emtau resume" in logged(container)
    docker("rm", container)


def test_a_worker_that_is_frozen_is_unhealthy_until_it_wakes(cluster: Project) -> None:
    worker = cluster.containers("worker")[0]
    _, *check = cluster.state("worker")[0]["Config"]["Healthcheck"]["Test"]

    def is_healthy() -> bool:
        command = ["docker", "exec", worker, *check]
        return subprocess.run(command, capture_output=True, timeout=GUARD).returncode == 0

    assert is_healthy()
    docker("exec", worker, "sh", "-c", "kill -STOP -1")  # All that runs in it, but for its init.
    try:
        assert not is_healthy()
    finally:
        docker("exec", worker, "sh", "-c", "kill -CONT -1")
    until(is_healthy, "the worker's recovery")


def test_all_end_on_sigterm_in_time() -> None:
    with project("stop") as made:
        made.start("--scale", "worker=2")
        made.compose("stop", "-t", "30")
        codes = {found["State"]["ExitCode"] for name in ("scheduler", "worker") for found in made.state(name)}
    assert 137 not in codes


def test_with_tls_only_certificates_come_in(tmp_path: Path, expected: Any) -> None:
    with project("tls", TLS) as made:
        made.start("--scale", "worker=2")
        copied = made.copied("/certificates", tmp_path)
        address = f"tls://127.0.0.1:{made.environment['EMTAU_SCHEDULER_PORT']}"
        assert connection(address) != ""
        assert connection(address.replace("tls:", "tcp:")) != ""
        assert connection(address, certificates=copied) == ""
        fit = ("emtau", "fit", "/configs/cluster.yaml", "--scheduler", "tls://scheduler:8786", *SMALL)
        made.compose("run", "--rm", "--no-deps", "fit", *fit, codes=CAME_TO_AN_END)
        assert_same(results(made, tmp_path), expected)


def connection(address: str, certificates: Path | None = None) -> str:
    """Why a client of this machine does not come in; empty where it does."""
    code = (
        "import sys\nfrom distributed import Client\n"
        "with Client(sys.argv[1], timeout=5) as client:\n"
        "    assert len(client.scheduler_info()['workers'])\n"
    )
    given = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    if certificates is not None:
        prefix = "DASK_DISTRIBUTED__COMM__TLS__"
        given[f"{prefix}CA_FILE"] = str(certificates / "ca.pem")
        given[f"{prefix}CLIENT__CERT"] = str(certificates / "cert.pem")
        given[f"{prefix}CLIENT__KEY"] = str(certificates / "key.pem")
    done = subprocess.run(
        [sys.executable, "-c", code, address], env=given, capture_output=True, text=True, timeout=GUARD
    )
    return done.stderr if done.returncode else ""
