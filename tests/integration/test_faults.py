"""Disks that fill up, turn read-only or vanish: a clear error, the last commit intact, and a resume."""

import errno
import os
import subprocess
from functools import partial

import pytest
from reliability import scenarios
from reliability.boundaries import At
from reliability.campaigns import FULL, READ_ONLY, Bench, campaign, spread
from reliability.scenarios import SIGKILL, Scenario
from reliability.zygote import Zygote


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with Zygote("reliability.scenarios") as zygote:
        yield Bench(zygote, Scenario("em-tau, revisit"), tmp_path_factory.mktemp("faults") / "bench")


@pytest.mark.parametrize("fault", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_refuses_from_some_step_on(bench, fault):
    steps = spread(bench.steps, 8, offset=fault.error)
    tally = campaign((f"step {step}", partial(bench.starved_at, step, fault)) for step in steps)
    assert not tally.problems, "\n".join(tally.problems)


def test_a_folder_that_vanishes(bench):
    steps = [step for step in spread(bench.steps, 8, offset=2) if step > 3]
    tally = campaign((f"step {step}", partial(bench.vanished_at, step)) for step in steps)
    assert not tally.problems, "\n".join(tally.problems)


class SmallDisk:
    """A file system of its own where one can be mounted; elsewhere the same errors, made by the harness."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=60", "tmpfs", str(folder)]
        self.real = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def remount(self, options):
        if self.real:
            subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)

    def close(self):
        if self.real:
            subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path):
    made = SmallDisk(tmp_path / "disk")
    yield made
    made.close()


def test_a_full_disk(bench, disk):
    run = str(disk.folder / "run.zarr")
    at = None if disk.real else At(bench.steps // 2, error=errno.ENOSPC, refused=FULL.refused)
    outcome = bench.zygote.run(scenarios.fit, bench.scenario, run, at)
    assert outcome.error == "CheckpointError", str(outcome)
    assert os.strerror(errno.ENOSPC) in outcome.message
    disk.remount("nr_inodes=10000")
    assert not bench.recovered(run).problem


def test_a_disk_that_is_mounted_read_only(bench, disk):
    run = str(disk.folder / "run.zarr")
    disk.remount("nr_inodes=10000")
    assert bench.zygote.run(scenarios.fit, bench.scenario, run, At(bench.steps // 2, SIGKILL)) is None
    disk.remount("ro")
    at = None if disk.real else At(1, error=errno.EROFS)
    outcome = bench.zygote.run(scenarios.resume, bench.scenario, run, at)
    assert outcome.error == "CheckpointError", str(outcome)
    assert os.strerror(errno.EROFS) in outcome.message
    disk.remount("rw")
    assert not bench.recovered(run).problem
