"""Disks that fill up, turn read-only or vanish: a clear error, the last commit intact, and a resume."""

import errno
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from commands import emtau
from disks import SmallDisk
from distributed import Client
from reliability import scenarios
from reliability.boundaries import At
from reliability.campaigns import FLAW, FULL, QUOTA, READ_ONLY, Bench, campaign, spread
from reliability.scenarios import SIGKILL, Scenario

from emtau_dask import GaussianMixture, StorageError

pytestmark = pytest.mark.kills


@pytest.fixture
def small_disk(tmp_path):
    made = SmallDisk(tmp_path / "disk")
    yield made
    made.close()


NO_LINKS = At(1, error=errno.EPERM, refused=("link",))
"""What a file system such as FAT says to ``link``, made by the harness."""


@pytest.fixture(scope="module")
def bench(forked_fits, tmp_path_factory):
    return Bench(forked_fits, Scenario("em-tau, revisit"), tmp_path_factory.mktemp("faults") / "bench")


@pytest.mark.parametrize(
    "fault", [FULL, QUOTA, READ_ONLY, FLAW], ids=["full", "quota", "read-only", "one error"]
)
def test_a_disk_that_refuses_from_some_step_on(bench, fault):
    steps = spread(bench.steps, 8, offset=fault.error)
    tally = campaign((f"step {step}", partial(bench.starved_at, step, fault)) for step in steps)
    assert not tally.problems, "\n".join(tally.problems)


def test_an_object_or_a_folder_that_cannot_be_read_once(bench):
    """A folder that cannot be listed is not taken for an empty one, nor a commit in it for none."""
    half = bench.half_done(bench.steps * 2 // 3)
    tally = campaign((f"read {step}", partial(bench.misread_at, half, step)) for step in range(1, 300, 9))
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.counts["resumed"] > 20


@pytest.mark.sample
def test_a_folder_that_vanishes(bench):
    steps = [step for step in spread(bench.steps, 8, offset=2) if step > 3]
    tally = campaign((f"step {step}", partial(bench.vanished_at, step)) for step in steps)
    assert not tally.problems, "\n".join(tally.problems)


@pytest.fixture
def disk(tmp_path):
    made = SmallDisk(tmp_path / "disk", "size=1m,nr_inodes=60")
    yield made
    made.close()


@pytest.mark.sample
def test_a_full_disk(bench, disk):
    run = str(disk.folder / "run.zarr")
    at = None if disk.real else At(bench.steps // 2, error=errno.ENOSPC, refused=FULL.refused)
    outcome = bench.zygote.run(scenarios.fit, bench.scenario, run, at)
    assert outcome.error == "CheckpointError", str(outcome)
    assert os.strerror(errno.ENOSPC) in outcome.message
    assert re.search(r"The last commit, \d+, is intact", outcome.message)
    if disk.real:
        assert re.search(r"\d \w*B free, room for 0 files more", outcome.message)
    disk.remount("nr_inodes=10000")
    assert not bench.recovered(run).problem


@pytest.mark.sample
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


@pytest.fixture(scope="module")
def begin(bench):
    """The step after which there is a first commit."""
    low, high = 0, bench.steps
    while high > low + 1:
        middle = (low + high) // 2
        run = bench.half_done(middle + 1)
        low, high = (low, middle) if any(Path(run).glob("commits/*/zarr.json")) else (middle, high)
    return high


@pytest.mark.parametrize("wanted", [8, pytest.param(10**6, marks=pytest.mark.soak)], ids=["some", "every"])
@pytest.mark.parametrize("kind", [FULL, QUOTA], ids=["full", "quota"])
def test_a_disk_that_is_full_before_the_first_commit_leaves_nothing_in_the_way(
    bench, begin, tmp_path, kind, wanted
):
    """Afterwards the same place can be used, without overwriting."""
    messages = []
    for step in sorted({*spread(begin, wanted, offset=5), *range(begin - 2, begin + 1)}):
        run = str(tmp_path / f"run-{step}")
        outcome = bench.zygote.run(scenarios.fit, bench.scenario, run, replace(kind, step=step))
        assert outcome.error == "CheckpointError", str(outcome)
        messages.append(outcome.message)
        assert list(Path(run).rglob("*")) == [], (step, outcome.message)
        again = bench.zygote.run(scenarios.fit, bench.scenario, run)
        assert not bench.wrong(again), (step, bench.wrong(again))
    assert not any("intact" in message for message in messages)
    assert any("no commit yet, so nothing can be resumed" in message for message in messages)


ELSEWHERE = "dask's temporary-directory", "DASK_TEMPORARY_DIRECTORY=", "dask.config.set(temporary_directory="
"""Where the folder for row state is set, on the command line and in Python."""


@pytest.mark.sample
def test_row_state_that_does_not_fit_is_said_by_the_command_line(small_disk, tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(30_000, 2)))
    fit = ["fit", tmp_path / "rows.npy", "-k", "3", "--algorithm", "em-tau", "-o", tmp_path / "out"]
    with dask.config.set({"temporary-directory": str(small_disk.folder)}), small_disk.full(room=1):
        done = emtau(*fit)
    said = done.stderr.splitlines()[-1]
    assert done.exit_code == 1
    for part in ("emtau: cannot write", str(small_disk.folder), "no checkpoint", *ELSEWHERE):
        assert part in said
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("room", [1, 2**12, 2**13])
def test_row_state_of_a_cluster_that_does_not_fit_is_said(small_disk, room):
    """Its workers write there before the first pass, and after each."""
    rows = da.from_array(np.random.default_rng(0).normal(size=(30_000, 2)), chunks=(10_000, 2))
    model = GaussianMixture(3, algorithm="em-tau", max_iter=5, tol=0.0, random_state=3)
    with (
        Client(processes=False, dashboard_address=None),
        dask.config.set({"temporary-directory": str(small_disk.folder)}),
        small_disk.full(room if small_disk.real else 1),
        pytest.raises(StorageError) as failed,
    ):
        model.fit(rows)
    for part in (str(small_disk.folder), "no checkpoint", *ELSEWHERE):
        assert part in str(failed.value)


def test_row_state_without_a_checkpoint_on_a_full_disk(small_disk):
    """Nothing can be resumed; the message says so, where the folder is, and how to use another."""
    model = GaussianMixture(3, algorithm="em-tau", max_iter=5, tol=0.0, random_state=3)
    with dask.config.set({"temporary-directory": str(small_disk.folder)}):
        with small_disk.full(room=2**12) as number, pytest.raises(StorageError) as failed:
            model.fit(np.random.default_rng(0).normal(size=(30_000, 2)))
        message = str(failed.value)
        for part in (os.strerror(number), str(small_disk.folder), "no checkpoint", *ELSEWHERE):
            assert part in message
        assert "nothing can be resumed" in message
        assert "intact" not in message
        assert list(small_disk.folder.iterdir()) == []


@pytest.mark.sample
def test_a_file_system_without_hard_links(bench, tmp_path):
    """Files are renamed to free names instead."""
    run = str(tmp_path / "run")
    outcome = bench.zygote.run(scenarios.fit, bench.scenario, run, NO_LINKS)
    assert not bench.wrong(outcome)


def test_a_file_system_that_cannot_create_exclusively(bench, tmp_path):
    """Without hard links and without renames that replace nothing, nothing is begun."""
    run = str(tmp_path / "run")
    outcome = bench.zygote.run(scenarios.fit_without_exclusive_rename, bench.scenario, run, NO_LINKS)
    assert outcome.error == "CheckpointError", str(outcome)
    assert "neither hard links nor a rename that replaces nothing" in outcome.message
    assert "intact" not in outcome.message
    assert list(Path(run).iterdir()) == []
