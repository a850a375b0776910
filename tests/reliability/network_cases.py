"""Faults between hosts: what is done to a fit whose scheduler, workers and driver are in containers.

Each case starts a fit, disturbs it in the middle, and says which drivers' ends count. What they
leave is held against the undisturbed fit of one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zarr

from emtau_dask import GaussianMixture
from reliability.containers import (
    BUCKET,
    PORT,
    S3,
    SCHEDULER,
    Container,
    HungError,
    Session,
    UnavailableError,
    World,
    compiled_clock,
    docker,
    until,
)

ROWS, FEATURES, COMPONENTS, CHUNK_ROWS = 40_000, 4, 4, 5_000
ITERATIONS = 50
DAY = 86_400
START_SECONDS = 90
REMOTE = f"s3://{BUCKET}/run.zarr"
TO_SCHEDULER = ("--scheduler", f"tcp://{SCHEDULER}:{PORT}")
NUMBA = {"PYTHONPATH": "/opt/numba"}
DONE = (0, 3)  # converged, stopped at max_iter


class TooLateError(Exception):
    """The fit had ended before it was disturbed."""


@dataclass(frozen=True)
class Fit:
    """The fit of a case, as a config says it."""

    checkpoint: str = "run.zarr"
    rows: int = ROWS
    features: int = FEATURES
    components: int = COMPONENTS
    iterations: int = ITERATIONS

    def config(self) -> dict[str, Any]:
        """Return what goes into a file."""
        return {
            "data": {"path": "points.zarr"},
            "model": {"n_components": self.components, "init_params": "random", "random_state": 0},
            "algorithm": {"name": "em-tau", "tau": 3, "revisit": 4},
            "stop": {"tol": 0, "max_iter": self.iterations},
            "checkpoint": {"path": self.checkpoint, "every": 1},
            "output": {"directory": "out", "model": "model.zarr", "labels": "labels.zarr"},
        }

    def points(self) -> np.ndarray[Any, Any]:
        """Return the rows: of clusters that overlap, so that EM goes on for long."""
        centres = np.random.default_rng(0).uniform(-3, 3, (self.components, self.features))
        which = np.arange(self.rows) % self.components
        return np.random.default_rng(1).normal(centres[which], 1.5)

    def put(self, folder: Path) -> None:
        """Write the data and the config into the shared volume."""
        zarr.create_array(
            store=folder / "points.zarr", data=self.points(), chunks=(self.rows // 8, self.features)
        )
        (folder / "fit.yaml").write_text(yaml.safe_dump(self.config()), encoding="utf-8")
        folder.chmod(0o777)


def digest_of(folder: Path) -> str:
    """Return a digest of the model and the labels that a fit left in a volume."""
    model = GaussianMixture.load(str(folder / "out" / "model.zarr"))
    labels = zarr.open_group(str(folder / "out" / "labels.zarr"), mode="r")["labels"]
    assert isinstance(labels, zarr.Array)
    found = sha256()
    for array in (model.weights_, model.means_, model.covariances_, model.lower_bounds_, labels[...]):
        found.update(np.ascontiguousarray(array).tobytes())
    return f"{model.n_iter_} {found.hexdigest()}"


@dataclass(eq=False)
class Scene:
    """A world in which a fit is disturbed.

    Attributes
    ----------
    world : World
    fit : Fit
    repetition : int
        For cases of several forms.
    judged : list of Container
        The drivers whose ends count.
    cleared : callable
        Ends what the fault left, before the fit is gone on with.
    surroundings : dict
        What the driver that began the fit was started with.
    """

    world: World
    fit: Fit
    session: Session
    repetition: int = 0
    judged: list[Container] = field(default_factory=list)
    cleared: Callable[[], Any] = lambda: None
    surroundings: dict[str, Any] = field(default_factory=dict)

    def driver(self, *words: str, **more: Any) -> Container:
        """Start a driver whose end counts."""
        started = self.world.driver(*words, **self._reaching(more))
        self.judged.append(started)
        return started

    def _reaching(self, more: dict[str, Any]) -> dict[str, Any]:
        if self.fit.checkpoint == REMOTE:
            more["environment"] = {**self.world.s3_environment, **more.get("environment", {})}
        return more

    def begin(self, **more: Any) -> Container:
        """Start the fit."""
        self.surroundings = more
        return self.driver("fit", "fit.yaml", *TO_SCHEDULER, **more)

    def begin_until(self, commit: int) -> Container:
        """Start a fit, and wait until its commit of this number is there."""
        driver = self.begin()
        self.wait_for_commit(commit, driver)
        return driver

    def resume(self, **more: Any) -> Container:
        """Go on with it in another container, by default of the same kind."""
        # Results beside a checkpoint are no question; those of one in an object store are.
        beside = () if self.fit.checkpoint != REMOTE else ("--set", "output.directory=/shared/out")
        return self.driver(
            "resume", self.fit.checkpoint, *TO_SCHEDULER, *beside, **(more or self.surroundings)
        )

    def cluster(
        self, first: dict[str, Any] | None = None, second: dict[str, Any] | None = None
    ) -> tuple[Container, Container, Container]:
        """Start a scheduler and two workers, and wait for them."""
        scheduler = self.world.scheduler()
        workers = [
            self.world.worker(number, **self._reaching(more or {}))
            for number, more in ((1, first), (2, second))
        ]
        self.world.workers_there(START_SECONDS)
        return scheduler, workers[0], workers[1]

    @property
    def newest(self) -> int:
        """The number of the newest commit, −1 for none."""
        folder = self.world.shared / (
            f"{S3}/commits" if self.fit.checkpoint == REMOTE else "run.zarr/commits"
        )
        names = [path.name for path in folder.glob("*")] if folder.is_dir() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def wait_for_commit(self, number: int, *drivers: Container, limit: float = 120) -> None:
        """Wait until a commit is there; raises `TooLateError` where all of ``drivers`` have ended before."""

        end = time.monotonic() + limit
        while self.newest < number:
            if drivers and not any(driver.running for driver in drivers):
                raise TooLateError(f"the driver ended at commit {self.newest}: {said(drivers[0])}")
            if time.monotonic() > end:
                raise HungError(f"commit {number} was not there within {limit:.0f} s")
            for _ in range(20):
                if self.newest < number:
                    time.sleep(0.05)
        for driver in drivers:
            if not driver.running:
                raise TooLateError(f"the driver has ended at commit {self.newest}")


@contextmanager
def scene(session: Session, case: Case, repetition: int) -> Iterator[Scene]:
    """Make the world of a case."""
    with session.world(**case.settings) as world:
        case.fit.put(world.shared)
        yield Scene(world, case.fit, session, repetition)


@dataclass(frozen=True, eq=False)
class Case:
    """A kind of fault.

    Attributes
    ----------
    name, title : str
    disturb : callable (Scene)
    limit : float
        Seconds from the disturbance to the last driver's end.
    fit : Fit
    settings : mapping
        Environment of all containers.
    one_of : bool
        One of the judged drivers must end well, the others may be told that the run was taken.
    begun : bool
        False where the fault stands before the fit begins, so that there is nothing to resume.
    """

    name: str
    title: str
    disturb: Callable[[Scene], Any]
    limit: float = 90
    fit: Fit = Fit()
    settings: dict[str, str] = field(default_factory=dict)
    one_of: bool = False
    begun: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes
    ----------
    kind : str
        ``"same bits"``, ``"error"`` (and then the same bits), ``"other bits, said"``, ``"wrong"``,
        ``"lost"``, ``"hung"``, ``"bare"``; ``"unavailable"``, ``"too late"``.
    seconds : float
        From the disturbance to the end of the last driver.
    message : str
        What the driver said.
    """

    kind: str
    seconds: float
    message: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it is what is promised."""
        return self.kind in GOOD


GOOD = ("same bits", "error", "other bits, said")


def said(driver: Container) -> str:
    """Return the last line that a driver wrote to standard error."""
    lines = driver.logs()[1].strip().splitlines()
    return lines[-1].strip() if lines else ""


def is_bare(message: str) -> bool:
    """Return whether a line is another library's, not an error of the package."""
    return not message.startswith("emtau: ") or "(use --debug for the traceback)" in message


def judged(case: Case, scene: Scene, expected: str) -> Outcome:
    """Wait for the drivers, go on with the fit where they failed, and compare."""
    began = time.monotonic()
    codes = []
    for driver in scene.judged:
        code = driver.ended(max(1.0, case.limit - (time.monotonic() - began)))
        if code is None:
            return Outcome("hung", time.monotonic() - began, said(driver))
        codes.append(code)
    seconds = time.monotonic() - began
    bad = [driver for driver, code in zip(scene.judged, codes, strict=True) if code not in DONE]
    messages = [said(driver) for driver in bad]
    for driver, message in zip(bad, messages, strict=True):
        if is_bare(message):
            return Outcome("bare", seconds, driver.logs()[1][-4000:])
    warned = " ".join(
        line for driver in scene.judged for line in driver.logs()[1].splitlines() if "Warning" in line
    )
    taken = case.one_of and len(bad) < len(codes)
    if bad and taken and not all("another process" in message for message in messages):
        return Outcome("wrong", seconds, messages[0])
    if bad and not taken:
        return _gone_on_with(case, scene, expected, seconds, messages[-1])
    if digest_of(scene.world.shared) != expected:
        return Outcome("other bits, said" if "bits" in warned else "wrong", seconds, warned)
    return Outcome("same bits", seconds, messages[0] if messages else warned)


def _gone_on_with(case: Case, scene: Scene, expected: str, seconds: float, message: str) -> Outcome:
    scene.cleared()
    driver = scene.resume() if case.begun else scene.begin()
    code = driver.ended(case.limit)
    if code is None:
        return Outcome("hung", seconds, f"{message} … and then the resume: {said(driver)}")
    if code not in DONE or digest_of(scene.world.shared) != expected:
        return Outcome("lost", seconds, f"{message} … and then the resume: {said(driver)}")
    return Outcome("error", seconds, message)


def run_case(case: Case, session: Session, expected: str, repetition: int) -> Outcome:
    """Run a case once; a fit that ended too early to be disturbed is tried again."""
    for _ in range(3):
        try:
            with scene(session, case, repetition) as made:
                try:
                    case.disturb(made)
                except HungError as error:
                    return Outcome("hung", 0.0, f"{error}; {' / '.join(said(d) for d in made.judged)}")
                return judged(case, made, expected)
        except TooLateError as error:
            late = str(error)
        except UnavailableError as error:
            return Outcome("unavailable", 0.0, str(error))
    return Outcome("too late", 0.0, late)


def undisturbed(session: Session, fit: Fit, settings: dict[str, str]) -> str:
    """Return the digest of a fit in threads of one container."""
    with session.world(**settings) as world:
        local = Fit(**{**fit.__dict__, "checkpoint": "run.zarr"})
        local.put(world.shared)
        driver = world.driver("fit", "fit.yaml", "--scheduler", "threads")
        code = driver.ended(300)
        assert code in DONE, driver.logs()[1]
        return digest_of(world.shared)


def _begun(scene: Scene, first: dict[str, Any] | None = None) -> tuple[Container, ...]:
    """Start a cluster and a fit; return scheduler, workers and driver once the fourth commit is there."""
    return *scene.cluster(first=first), scene.begin_until(3)


# --- workers -----------------------------------------------------------------------------------


def worker_cut_off_and_back(scene: Scene) -> None:
    """For longer than `worker-ttl`, or not, in turn."""
    _, worker, *_ = _begun(scene)
    worker.cut()
    time.sleep(8 if scene.repetition % 2 == 0 else 2)
    worker.join()


def worker_cut_off(scene: Scene) -> None:
    _, worker, *_ = _begun(scene)
    worker.cut()


def worker_paused_and_woken(scene: Scene) -> None:
    """Wakes when the fit has gone on without it."""
    _, worker, _, fit = _begun(scene)
    worker.pause()
    paused_at = scene.newest
    try:
        scene.wait_for_commit(paused_at + 4, fit)
    finally:
        worker.unpause()


def worker_out_of_memory(scene: Scene) -> None:
    """Files in memory count for the container, and the kernel kills what is largest in it."""
    more = {"options": ["--memory", "600m", "--memory-swap", "600m", "--shm-size", "1g"]}
    _, worker, *_ = _begun(scene, first=more)
    worker.execute("sh", "-c", "head -c 590000000 /dev/zero > /dev/shm/full", check=False)
    of_worker = ("--filter", f"container={worker.id}", "--filter", "event=oom")
    if not docker("events", "--since", "10m", "--until", "0s", *of_worker):
        log = "".join(worker.logs())
        assert "signal 9" in log, f"the kernel killed nothing: {log[-500:]}"
    worker.execute("rm", "-f", "/dev/shm/full", check=False)


def worker_killed(scene: Scene) -> None:
    _, worker, *_ = _begun(scene)
    worker.kill()
    docker("start", worker.id)


# --- schedulers --------------------------------------------------------------------------------


def scheduler_killed_and_replaced(scene: Scene) -> None:
    scheduler, *_ = _begun(scene)
    scheduler.kill()
    scheduler.remove()
    scene.world.scheduler()
    scene.cleared = scene.world.workers_there


def scheduler_cut_off(scene: Scene) -> None:
    """From workers and driver, for good."""
    scheduler, *_ = _begun(scene)
    scheduler.cut()

    def again() -> None:
        scheduler.remove()
        scene.world.scheduler()
        scene.world.workers_there()

    scene.cleared = again


def scheduler_cut_off_and_back(scene: Scene) -> None:
    """From workers and driver."""
    scheduler, *_ = _begun(scene)
    scheduler.cut()
    time.sleep(3 if scene.repetition % 2 == 0 else 15)
    scheduler.join()


def all_workers_cut_off_and_back(scene: Scene) -> None:
    _, *workers, _ = _begun(scene)
    for worker in workers:
        worker.cut()
    time.sleep(10)
    for worker in workers:
        worker.join()


# --- drivers -----------------------------------------------------------------------------------


def driver_killed(scene: Scene) -> None:
    """Its tasks go on while the resume begins."""
    *_, fit = _begun(scene)
    scene.judged.clear()
    fit.kill()
    scene.resume()


def driver_cut_off(scene: Scene) -> None:
    """From the cluster, which the volume is not."""
    *_, fit = _begun(scene)
    fit.cut()


def two_resumes(scene: Scene) -> None:
    driver_killed(scene)
    scene.resume()


def driver_paused_while_another_ends(scene: Scene) -> None:
    *_, fit = _begun(scene)
    fit.pause()
    try:
        other = scene.resume()
        if other.ended(120) is None:
            raise HungError(f"the resume: {said(other)}")
    finally:
        fit.unpause()


# --- object stores -----------------------------------------------------------------------------


def _held_commit(scene: Scene) -> tuple[Container, Path]:
    """Start all, and wait until the writing of a commit is held, before or after it is stored, in turn."""
    server = scene.world.object_store()
    scene.cluster()
    control = scene.world.shared / S3
    which = ("before", "after")[scene.repetition % 2]
    scene.wait_for_commit(3, scene.begin())
    (control / "new").write_text(f"/commits/\n{which}")
    (control / "new").rename(control / "hold")
    until((control / "held").exists, "a commit that is held", 60)
    return server, control / "hold"


def store_cut_off_and_back(scene: Scene) -> None:
    server, hold = _held_commit(scene)
    server.cut()
    hold.unlink()
    time.sleep(3)
    server.join()


def store_cut_off(scene: Scene) -> None:
    server, hold = _held_commit(scene)
    server.cut()
    hold.unlink()
    scene.cleared = server.join


def store_silent(scene: Scene) -> None:
    """Accepts connections, and says nothing for good."""
    server, hold = _held_commit(scene)
    server.pause()
    hold.unlink()
    scene.cleared = server.unpause


# --- what differs between hosts -----------------------------------------------------------------


def clocks_differ(scene: Scene) -> None:
    """By a day, forward or back; a resume has another clock than the fit that was killed."""
    compiled = compiled_clock(scene.session.folder)

    def wrong(days: int) -> dict[str, Any]:
        environment = {"LD_PRELOAD": "/wrong_clock.so", "WRONG_CLOCK": str(days * DAY)}
        return {"options": ["-v", f"{compiled}:/wrong_clock.so:ro"], "environment": environment}

    days = ((1, -1, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, -1, 1), (1, 0, 0, -1))
    scheduler, first, driver, second_driver = days[scene.repetition % len(days)]
    scene.world.scheduler(**wrong(scheduler))
    scene.world.worker(1, **wrong(first))
    scene.world.worker(2)
    scene.world.workers_there(START_SECONDS)
    fit = scene.begin(**wrong(driver))
    scene.wait_for_commit(3, fit)
    scene.judged.clear()
    fit.kill()
    scene.resume(**wrong(second_driver))


def other_numpy(scene: Scene) -> None:
    scene.cluster(first={"environment": {"PYTHONPATH": "/opt/numpy"}})
    scene.begin()


def worker_without_numba(scene: Scene) -> None:
    scene.cluster(second={"environment": NUMBA})
    scene.begin(environment=NUMBA)


def driver_without_numba(scene: Scene) -> None:
    scene.cluster(first={"environment": NUMBA}, second={"environment": NUMBA})
    scene.begin()


def late_worker_without_numba(scene: Scene) -> None:
    """Joins when the others compile."""
    scene.world.scheduler()
    scene.world.worker(1, environment=NUMBA)
    scene.world.workers_there(START_SECONDS, 1)
    fit = scene.begin(environment=NUMBA)
    scene.wait_for_commit(2, fit)
    late = scene.world.worker(2)
    scene.cleared = late.remove


def without_volume(scene: Scene) -> None:
    _, worker, _ = scene.cluster(first={"volume": False})
    scene.begin()
    scene.cleared = lambda: (worker.remove(), time.sleep(6))


def late_worker_without_volume(scene: Scene) -> None:
    scene.world.scheduler()
    scene.world.worker(2)
    scene.world.workers_there(START_SECONDS, 1)
    scene.begin_until(2)
    late = scene.world.worker(1, volume=False)
    scene.cleared = lambda: (late.remove(), time.sleep(6))


# --- bad lines ------------------------------------------------------------------------------------


def lossy_line(scene: Scene) -> None:
    """Every tenth packet to a worker and to the driver is lost."""
    _, worker, _, fit = _begun(scene)
    drop = "iptables -A INPUT -m statistic --mode random --probability 0.1 -j DROP"
    for container in (worker, fit):
        if not container.in_its_network(*drop.split()):
            raise UnavailableError("iptables cannot lose packets here")


COMPILED = Fit(rows=200_000, features=8, components=8, iterations=20)
STORE = Fit(checkpoint=REMOTE, iterations=20)

CASES = {
    case.name: case
    for case in (
        Case("worker-back", "a worker cut off, and back", worker_cut_off_and_back),
        Case("worker-cut", "a worker cut off for good", worker_cut_off),
        Case(
            "worker-zombie", "a worker paused past `worker-ttl`, woken as a zombie", worker_paused_and_woken
        ),
        Case("worker-oom", "a worker killed by the kernel for memory", worker_out_of_memory),
        Case("worker-killed", "a worker's container killed and started again", worker_killed),
        Case("scheduler-replaced", "the scheduler killed and replaced", scheduler_killed_and_replaced),
        Case("scheduler-cut", "the scheduler cut off for good", scheduler_cut_off),
        Case("scheduler-back", "the scheduler cut off, and back", scheduler_cut_off_and_back),
        Case("workers-back", "all workers cut off, and back", all_workers_cut_off_and_back),
        Case("driver-killed", "the driver's container killed, a resume at once", driver_killed),
        Case("driver-cut", "the driver cut off from the cluster", driver_cut_off),
        Case("two-resumes", "two resumes from two containers", two_resumes, one_of=True),
        Case(
            "driver-zombie",
            "the driver paused, a resume ends, the driver woken",
            driver_paused_while_another_ends,
            one_of=True,
        ),
        Case("store-back", "object store cut off in mid-commit, and back", store_cut_off_and_back, fit=STORE),
        Case("store-cut", "object store cut off in mid-commit for good", store_cut_off, fit=STORE),
        Case("store-silent", "object store that accepts and says nothing", store_silent, fit=STORE),
        Case(
            "two-resumes-store",
            "two resumes of a run in an object store",
            lambda scene: (scene.world.object_store(), two_resumes(scene)),
            fit=STORE,
            one_of=True,
        ),
        Case("clocks", "clocks that differ by a day", clocks_differ),
        Case("numpy", "a worker with another NumPy", other_numpy),
        Case("no-numba", "a worker without numba", worker_without_numba, fit=COMPILED, begun=False),
        Case("driver-no-numba", "workers with numba, the driver without", driver_without_numba, fit=COMPILED),
        Case(
            "late-no-numba",
            "a worker without numba joins in mid-fit",
            late_worker_without_numba,
            fit=COMPILED,
        ),
        Case("no-volume", "a worker without the volume", without_volume, begun=False),
        Case("late-no-volume", "a worker without the volume joins in mid-fit", late_worker_without_volume),
        Case("lossy", "every tenth packet of a worker and the driver lost", lossy_line),
    )
}
