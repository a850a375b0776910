"""A scheduler, workers, drivers and an object store in containers, on a network and a volume of their own.

Everything made carries labels, and goes at the end of `Engine.session`; what a killed
process left goes with the next session on the machine.
"""

from __future__ import annotations

import ipaddress
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
LABEL = "emtau.faults"
SCHEDULER, S3 = "scheduler", "s3"
PORT, S3_PORT, BUCKET = 8786, 5000, "faults"
HOSTS = {SCHEDULER: 10, S3: 30}
CALL_SECONDS = 120

SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "5s",
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "15s",
    "DASK_TEMPORARY_DIRECTORY": "/shared/scratch",
    "HOME": "/tmp",
}
"""Those of the compose file, and less patience of dask's, so that a case takes seconds."""


class UnavailableError(Exception):
    """This machine cannot do what a case needs; the message says why."""


class HungError(Exception):
    """Something did not happen within its time."""


def docker(*words: str, check: bool = True, timeout: float = CALL_SECONDS) -> str:
    """Run a command of Docker's and return what it prints."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def why_no_engine() -> str | None:
    """Return why containers cannot be run here; None where they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    try:
        docker("version", "--format", "{{.Server.Version}}", timeout=20)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"there is no Docker engine ({str(error).splitlines()[0]})"
    return None


def until(holds: Callable[[], Any], what: str, limit: float, pause: float = 0.1) -> Any:
    """Wait until something holds, and return it; raises `HungError` after ``limit`` seconds."""
    end = time.monotonic() + limit
    while not (found := holds()):
        if time.monotonic() > end:
            raise HungError(f"{what} did not happen within {limit:.0f} s")
        time.sleep(pause)
    return found


def _remove_all(label: str) -> None:
    for command in (("rm", "-f", "-v"), ("network", "rm")):
        kind = ("ps", "-aq") if command[0] == "rm" else ("network", "ls", "-q")
        found = docker(*kind, "--filter", f"label={label}", check=False).split()
        if found:
            docker(*command, *found, check=False)


def _remove_orphans() -> None:
    """Remove what sessions left whose processes were killed."""
    for kind in (("ps", "-a"), ("network", "ls")):
        owners = docker(
            *kind, "--filter", f"label={LABEL}", "--format", f'{{{{.Label "{LABEL}"}}}}', check=False
        )
        for owner in set(owners.split()):
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _remove_all(f"{LABEL}={owner}")


@dataclass(eq=False)
class Container:
    """A container that runs or has ended.

    Attributes
    ----------
    name : str
        By which others find it on the network.
    id : str
    network : str
    address : str
        On the network; the same again after a cut.
    """

    name: str
    id: str
    network: str
    address: str

    def _state(self, what: str) -> str:
        return docker("inspect", "--format", f"{{{{{what}}}}}", self.id)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._state(".State.Running") == "true"

    @property
    def pid(self) -> int:
        """Of its first process, on this machine."""
        return int(self._state(".State.Pid"))

    def cut(self) -> None:
        """Take it off the network: packets to and from it are lost, and nobody is told."""
        docker("network", "disconnect", self.network, self.id)

    def join(self) -> None:
        """Put it back on the network with the address that it had."""
        docker("network", "connect", "--ip", self.address, "--alias", self.name, self.network, self.id)

    def pause(self) -> None:
        """Freeze its processes."""
        docker("pause", self.id)

    def unpause(self) -> None:
        """Let its processes go on."""
        docker("unpause", self.id)

    def kill(self) -> None:
        """Kill all its processes."""
        docker("kill", self.id, check=False)
        docker("wait", self.id)

    def remove(self) -> None:
        """Kill it, and make its name and address free."""
        docker("rm", "-f", "-v", self.id)

    def execute(self, *words: str, check: bool = True) -> str:
        """Run a command in it."""
        return docker("exec", self.id, *words, check=check)

    def in_its_network(self, *words: str) -> bool:
        """Run a command of this machine's in its network; return whether that succeeded."""
        if os.getuid() or shutil.which("nsenter") is None or shutil.which(words[0]) is None:
            raise UnavailableError(f"packets are lost by {words[0]}, which needs root and nsenter")
        command = ["nsenter", "-t", str(self.pid), "-n", *words]
        return subprocess.run(command, capture_output=True, timeout=CALL_SECONDS).returncode == 0

    def ended(self, limit: float) -> int | None:
        """Wait for its end; return its exit code, None where it runs on after ``limit`` seconds."""
        try:
            return int(docker("wait", self.id, timeout=limit))
        except subprocess.TimeoutExpired:
            return None

    def logs(self) -> tuple[str, str]:
        """Return what it wrote to standard output and to standard error."""
        done = subprocess.run(
            ["docker", "logs", self.id], capture_output=True, text=True, timeout=CALL_SECONDS
        )
        return done.stdout, done.stderr


@dataclass(eq=False)
class World:
    """A network, its containers and the volume that they share.

    Attributes
    ----------
    image, label, network : str
    subnet : IPv4Network
    shared : Path
        This machine's name of what containers see as ``/shared``.
    given : sequence of str
        Options of ``docker run`` for every container.
    settings : mapping
        Environment of every container.
    """

    image: str
    label: str
    network: str
    subnet: ipaddress.IPv4Network
    shared: Path
    given: Sequence[str]
    settings: Mapping[str, str]
    containers: list[Container] = field(default_factory=list)
    drivers: int = 0

    def start(
        self,
        name: str,
        *command: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        volume: bool = True,
    ) -> Container:
        """Start a container."""
        host = HOSTS.get(name) or 50 + len(self.containers)
        if name.startswith("worker"):
            host = 10 + int(name.removeprefix("worker"))
        address = str(self.subnet[host])
        words = ["run", "-d", "--init", "--label", self.label, "--network", self.network, "--ip", address]
        words += ["--network-alias", name, "--hostname", name, "--log-driver", "json-file"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "-w", "/shared"]
        for key, value in {**SETTINGS, **self.settings, **(environment or {})}.items():
            words += ["-e", f"{key}={value}"]
        if volume:
            words += ["-v", f"{self.shared}:/shared"]
        container = Container(
            name, docker(*words, *self.given, *options, self.image, *command), self.network, address
        )
        self.containers.append(container)
        return container

    def scheduler(self, **more: Any) -> Container:
        """Start the scheduler."""
        return self.start(
            SCHEDULER, "dask", "scheduler", "--host", "0.0.0.0", "--port", str(PORT), "--no-dashboard", **more
        )

    def worker(self, number: int, *words: str, **more: Any) -> Container:
        """Start worker ``number``, which comes again where it ended, as in the compose file."""
        options = ["--restart", "unless-stopped", *more.pop("options", ())]
        command = ["dask", "worker", f"tcp://{SCHEDULER}:{PORT}", "--nthreads", "1", "--memory-limit", "1GiB"]
        command += ["--no-dashboard", "--death-timeout", "60", "--name", f"worker{number}"]
        # Imported by a task, the package would hold up heartbeats on a busy machine.
        command += ["--preload", "emtau_dask", *words]
        return self.start(f"worker{number}", *command, options=options, **more)

    def driver(self, *words: str, **more: Any) -> Container:
        """Start ``emtau`` with the given words."""
        self.drivers += 1
        return self.start(f"driver{self.drivers}", "emtau", *words, **more)

    def object_store(self) -> Container:
        """Start an S3 server, and wait for its bucket."""
        control = self.shared / S3
        control.mkdir()
        control.chmod(0o777)
        options = ["-v", f"{HERE / 'held_s3.py'}:/held_s3.py:ro"]
        server = self.start(
            S3, "python", "/held_s3.py", str(S3_PORT), BUCKET, f"/shared/{S3}", options=options
        )
        until(lambda: (control / "ready").exists() or not server.running, "the object store's start", 60)
        return server

    @property
    def s3_environment(self) -> dict[str, str]:
        """What a client needs to reach the object store."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{self.subnet[HOSTS[S3]]}:{S3_PORT}",
        }

    def workers_there(self, limit: float = 90, at_least: int = 2) -> None:
        """Wait until the scheduler has so many workers, as its log says."""
        scheduler = [container for container in self.containers if container.name == SCHEDULER][-1]

        def arrived() -> bool:
            return "".join(scheduler.logs()).count("Register worker") >= at_least

        until(arrived, f"the arrival of {at_least} workers", limit, pause=0.5)


@dataclass(eq=False)
class Session:
    """What the worlds of one process have in common.

    Attributes
    ----------
    image, label : str
    folder : Path
    given : sequence of str
    """

    image: str
    label: str
    folder: Path
    given: Sequence[str]
    worlds: int = 0

    @contextmanager
    def world(self, **settings: str) -> Iterator[World]:
        """Make a network and an empty volume, and remove them with all containers at the end."""
        self.worlds += 1
        shared = self.folder / f"world-{self.worlds}"
        for folder in (shared, shared / "scratch"):
            folder.mkdir()
            folder.chmod(0o777)
        network, subnet = self._network()
        world = World(self.image, self.label, network, subnet, shared, self.given, settings)
        try:
            yield world
        finally:
            for container in world.containers:
                docker("rm", "-f", "-v", container.id, check=False)
            docker("network", "rm", network, check=False)
            shutil.rmtree(shared, ignore_errors=True)

    def _network(self) -> tuple[str, ipaddress.IPv4Network]:
        refused = ""
        for _ in range(20):
            subnet = ipaddress.IPv4Network(f"10.{random.randrange(200, 250)}.{random.randrange(256)}.0/24")
            name = f"emtau-faults-{os.getpid()}-{self.worlds}"
            try:
                docker("network", "create", "--label", self.label, "--subnet", str(subnet), name)
            except RuntimeError as error:
                refused = str(error)
            else:
                return name, subnet
        raise RuntimeError(refused)


def _built(base: str | None, label: str) -> list[str]:
    """Build the project's image and the harness's on it; return their names."""
    project, own = f"emtau_faults:project-{os.getpid()}", f"emtau_faults:{os.getpid()}"
    arguments = [] if base is None else ["--build-arg", f"BASE={base}"]
    build = ["build", "-q", "--label", label]
    docker(*build, *arguments, "-t", project, str(REPOSITORY), timeout=1800)
    recipe = ["--build-arg", f"IMAGE={project}", "-f", str(HERE / "faults.Dockerfile")]
    docker(*build, *recipe, "-t", own, str(HERE), timeout=1800)
    return [own, project]


@contextmanager
def session(
    image: str | None = None, base: str | None = None, mounts: Sequence[str] = ()
) -> Iterator[Session]:
    """Have an image, built where none is given, and leave nothing behind.

    Parameters
    ----------
    image : str, optional
        One made from ``faults.Dockerfile`` before.
    base : str, optional
        The Dockerfile's ``BASE``.
    mounts : sequence of str
        More volumes for every container, as for ``docker run -v``.
    """
    _remove_orphans()
    label = f"{LABEL}={os.getpid()}"
    built: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="emtau-faults-"))
    folder.chmod(0o755)
    user = [] if os.getuid() == 0 else ["--user", f"{os.getuid()}:{os.getgid()}"]
    given = [*user, *(word for mount in mounts for word in ("-v", mount))]
    try:
        if image is None:
            built = _built(base, label)
        yield Session(image or built[0], label, folder, given)
    finally:
        _remove_all(label)
        if built:
            docker("rmi", *built, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def compiled_clock(folder: Path) -> Path:
    """Return a library that, preloaded, changes what processes take for the time."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise UnavailableError("the library that changes the clock needs a C compiler")
    library = folder / "wrong_clock.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "wrong_clock.c"], check=True)
    return library
