"""A dask cluster of real processes on this machine: a scheduler and workers that can be killed or frozen.

They run dask's own command lines, in forks of a process that has imported all
of it already (see `reliability.zygote`), and die with that process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
import distributed.cli.dask_scheduler
import distributed.cli.dask_worker
from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin
from reliability.zygote import Child, Zygote

from emtau_dask import EMTau, GaussianMixture

GUARD = 300  # seconds after which something that hangs is given up
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
COMMANDS = {"scheduler": distributed.cli.dask_scheduler.main, "worker": distributed.cli.dask_worker.main}


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait until something holds (is true), and return it."""
    end = time.monotonic() + GUARD
    while not (found := holds()):
        assert time.monotonic() < end, f"{what} did not happen within {GUARD} seconds"
        time.sleep(0.05)
    return found


def _system_call(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def hide(folder: str) -> None:
    """Put an empty folder in the place of one, for this process alone, as on another machine."""
    _own_mounts()
    _system_call("mount", b"none", folder.encode(), b"tmpfs", 0, None)


def _own_mounts() -> None:
    ids = os.getuid(), os.getgid()
    _system_call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if ids[0] else 0))
    if ids[0]:
        Path("/proc/self/setgroups").write_text("deny")
        for kind, number in zip(("uid", "gid"), ids, strict=True):
            Path(f"/proc/self/{kind}_map").write_text(f"{number} {number} 1")
    _system_call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)


def enter(folder: str) -> None:
    """Work in another folder."""
    os.chdir(folder)


def swap(folders: str) -> None:
    """See another folder (the second of two lines) in the place of one, as on another machine."""
    here, there = folders.splitlines()
    _own_mounts()
    _system_call("mount", there.encode(), here.encode(), None, MS_BIND, None)


def pretend(package: str) -> None:
    """Have another version of a package: its name and that version."""
    name, version = package.split()
    sys.modules[name].__version__ = version  # type: ignore[attr-defined]


def forget_package(name: str) -> None:
    """Be without a package, as a process would be in whose environment it is not installed."""
    for module in list(sys.modules):
        if module.partition(".")[0] == name:
            del sys.modules[module]
    sys.modules[name] = None  # type: ignore[assignment]


def fail_reads(place: str) -> None:
    """Let a read of a file or folder fail as on a device that does, once for each file ``place.fail``."""
    plain = os.preadv

    def preadv(descriptor: int, *arguments: Any) -> int:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(place):
            with suppress(FileNotFoundError):
                Path(f"{place}.fail").unlink()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(descriptor, *arguments)

    os.preadv = preadv


def _settle(log: str, settings: dict[str, str]) -> None:
    """Make a fork a process of its own, with its own output and configuration of dask."""
    _system_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(settings)
    dask.config.refresh()


def run_dask(
    log: str, settings: dict[str, str], before: list[tuple[str, str]], command: str, options: list[str]
) -> None:
    """Run ``dask COMMAND OPTIONS``; ``before`` names functions of this module to call first."""
    _settle(log, settings)
    for name, argument in before:
        globals()[name](argument)
    COMMANDS[command](options)


def run_python(log: str, settings: dict[str, str], code: str) -> dict[str, Any]:
    """Run a program; return the names that it leaves in ``answer``."""
    _settle(log, settings)
    names: dict[str, Any] = {"__name__": "__main__", "answer": {}}
    exec(code, names)
    return dict(names["answer"])


class Processes:
    """A scheduler, and workers of one thread each.

    Parameters
    ----------
    zygote : Zygote
        Of this module.
    folder : Path
        For logs and the workers' own files.
    **config : str
        Of distributed, for all of them: ``scheduler__allowed_failures="99"``.
    """

    def __init__(self, zygote: Zygote, folder: Path, **config: str) -> None:
        self.zygote, self.folder, self.config = zygote, folder, config
        self.address = ""
        self.workers: dict[str, Child] = {}
        self.children: list[Child] = []

    def _start(self, name: str, function: Callable[..., Any], *arguments: Any, **config: str) -> Child:
        settings = {f"DASK_DISTRIBUTED__{key.upper()}": value for key, value in config.items()}
        settings |= {"DASK_TEMPORARY_DIRECTORY": str(self.folder)}
        child: Child = self.zygote.start(function, str(self._log(name)), settings, *arguments)
        self.children.append(child)
        return child

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start_scheduler(self) -> None:
        """Start a scheduler on a free port."""
        file = self.folder / f"scheduler-{len(self.children)}.json"
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        self.scheduler = self._start("scheduler", run_dask, [], "scheduler", options, **self.config)

        def address() -> Any:
            assert alive(self.scheduler), self._log("scheduler").read_text()
            with suppress(OSError, ValueError):
                return json.loads(file.read_text(encoding="utf-8"))["address"]

        self.address = until(address, "the scheduler's start")

    def start_worker(self, *options: str, before: tuple[tuple[str, str], ...] = (), **config: str) -> str:
        """Start a worker with options of ``dask worker``, and return its name; `client` waits for it."""
        name = f"worker-{len(self.children)}"
        words = [self.address, "--no-nanny", "--nthreads", "1", "--name", name, "--host", "127.0.0.1"]
        words += ["--no-dashboard", "--death-timeout", str(GUARD), "--memory-limit", "0", *options]
        config = self.config | config
        self.workers[name] = self._start(name, run_dask, list(before), "worker", words, **config)
        return name

    def start_python(self, code: str, **config: str) -> Child:
        """Start a program that finds the scheduler's address in ``ADDRESS``."""
        return self._start("program", run_python, f"ADDRESS = {self.address!r}\n{code}", **config)

    @contextmanager
    def client(self, **options: Any) -> Iterator[Client]:
        """Be the active client of this cluster, once its workers are there."""
        with Client(self.address, **options) as client:
            self.wait(client)
            yield client

    def wait(self, client: Client) -> None:
        """Wait until the scheduler knows the workers that run, and no others."""

        def all_there() -> bool:
            for name, worker in self.workers.items():
                assert alive(worker), self._log(name).read_text()
            return set(addresses(client)) == set(self.workers)

        until(all_there, "the workers' start")

    def kill_worker(self, name: str) -> None:
        """Kill a worker with SIGKILL."""
        end(self.workers.pop(name))

    def stop(self) -> None:
        """Kill everything that still runs."""
        for child in self.children:
            end(child)


def alive(child: Child) -> bool:
    """Whether a process runs (or is stopped)."""
    return child.signal(0)


def end(child: Child) -> None:
    """Kill a process, and wait for its end."""
    child.kill()
    until(lambda: not alive(child), "a killed process's end")
    if child.pipe >= 0:
        os.close(child.pipe)
        child.pipe = -1


def addresses(client: Client) -> dict[str, str]:
    """The addresses of the workers that the scheduler knows, by name."""

    def named(dask_scheduler: Any) -> dict[str, str]:
        return {worker.name: worker.address for worker in dask_scheduler.workers.values()}

    found: dict[str, str] = client.run_on_scheduler(named)
    return found


def tasks_of(client: Client) -> list[str]:
    """The keys of the tasks that the scheduler holds."""

    def keys(dask_scheduler: Any) -> list[str]:
        return [str(key) for key in dask_scheduler.tasks]

    found: list[str] = client.run_on_scheduler(keys)
    return found


@contextmanager
def processes(zygote: Zygote, folder: Path, n_workers: int = 0, **config: str) -> Iterator[Processes]:
    """Run a cluster, and kill all of it at the end."""
    folder.mkdir()
    cluster = Processes(zygote, folder, **config)
    try:
        cluster.start_scheduler()
        for _ in range(n_workers):
            cluster.start_worker()
        yield cluster
    finally:
        cluster.stop()


class Seen(SchedulerPlugin):  # type: ignore[misc]
    """Notes on the scheduler every task that a worker gets: its key, the worker's name, its annotations."""

    name = "seen"

    def __init__(self) -> None:
        self.tasks: list[tuple[str, str, dict[str, Any]]] = []
        self.scheduler: Any = None

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "processing":
            task = self.scheduler.tasks[key]
            self.tasks.append((str(key), task.processing_on.name, dict(task.annotations or {})))


@contextmanager
def seen(client: Client) -> Iterator[list[tuple[str, str, dict[str, Any]]]]:
    """Fill a list with what `Seen` notes, at the end."""

    def noted(dask_scheduler: Any) -> list[tuple[str, str, dict[str, Any]]]:
        return list(dask_scheduler.plugins["seen"].tasks)

    found: list[tuple[str, str, dict[str, Any]]] = []
    client.register_plugin(Seen())
    try:
        yield found
        found += client.run_on_scheduler(noted)
    finally:
        client.unregister_scheduler_plugin("seen")


def name_of(key: str) -> str:
    """``('emtau-estep-0123', 4)`` -> ``emtau-estep``."""
    name = key.split("'")[1] if key.startswith("(") else key
    return name.rpartition("-")[0]


def fit_inside(X: Any, settings: dict[str, Any]) -> Any:
    """Fit in a task of dask's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GaussianMixture(**settings).fit(X)


def transfers(dask_worker: Any) -> list[str]:
    """The keys that a worker got from others."""
    return [str(key) for entry in dask_worker.transfer_incoming_log for key in entry["keys"]]


class Eventful(EMTau):
    """`EMTau` that does something to the worker in the middle of a task, once for each file in a folder.

    A task that meets a file removes it first, so that no other task does the same.
    """

    def __init__(self, tau: int = 2, revisit: Any = 3, folder: str = "") -> None:
        super().__init__(tau, revisit)
        self.folder = folder

    def update(self, state: Any, evidence: Any) -> Any:
        """Look for a file named ``freeze``, ``die`` or ``wait``."""
        for event, act in EVENTS.items():
            with suppress(FileNotFoundError):
                Path(self.folder, event).unlink()
                Path(self.folder, "met").write_text(str(os.getpid()))
                act(Path(self.folder))
        return super().update(state, evidence)


def _stay(folder: Path) -> None:
    until(lambda: (folder / "go").exists(), "the word to go on")


EVENTS: dict[str, Callable[[Path], Any]] = {
    "freeze": lambda folder: os.kill(os.getpid(), signal.SIGSTOP),
    "die": lambda folder: os.kill(os.getpid(), signal.SIGKILL),
    "wait": _stay,
}


class Homebound(EMTau):
    """`EMTau` that only the process that made it may pickle."""

    def __init__(self, tau: int = 2, revisit: Any = 3, home: int = 0) -> None:
        super().__init__(tau, revisit)
        self.home = home

    def __getstate__(self) -> dict[str, Any]:
        """Refuse elsewhere."""
        if os.getpid() != self.home:
            raise TypeError(f"process {os.getpid()} pickles what process {self.home} made")
        return self.__dict__


def dying(block: Any) -> Any:
    """End the worker that computes it."""
    os._exit(1)


def held(block: Any, folder: str) -> Any:
    """Return a block once a folder is not there."""
    until(lambda: not Path(folder).exists(), "the word to go on")
    return block
