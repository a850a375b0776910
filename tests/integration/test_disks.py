"""Disks that refuse what a command writes or reads: an error of ours, with the path, and nothing is left."""

import errno
import os
import resource
import subprocess
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
import zarr
from commands import emtau
from disks import SmallDisk
from processes import EMTAU

from emtau_dask import EmtauError, GaussianMixture

pytestmark = pytest.mark.kills
LONG = "n" * 300
X = np.random.default_rng(0).normal(size=(20_000, 2))
OURS = "(use --debug for the traceback)"
"""What the command line adds to errors that are not."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with rows, a model and a config."""
    folder = tmp_path_factory.mktemp("base")
    np.save(folder / "rows.npy", X)
    GaussianMixture(2, random_state=0, tol=1e-2).fit(X).save(folder / "model.zarr")
    config = {
        "data": {"path": str(folder / "rows.npy")},
        "model": {"n_components": 2, "random_state": 0},
        "algorithm": {"name": "em-tau"},
        "stop": {"max_iter": 3, "tol": 0.5},
        "output": {"labels": None, "model": None},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "file").write_text("mine")
    return folder


@pytest.fixture
def disk(tmp_path):
    made = SmallDisk(tmp_path / "disk", "size=2m")
    yield made
    made.close()


WRITERS = {
    "dataset": lambda base, place: ["dataset", "digits", place],
    "labels": lambda base, place: ["predict", base / "model.zarr", base / "rows.npy", place, "--proba"],
    "model of a fit": lambda base, place: ["fit", base / "run.yaml", "--set", f"output.model={place}"],
    "labels of a fit": lambda base, place: ["fit", base / "run.yaml", "--set", f"output.labels={place}"],
    "checkpoint": lambda base, place: ["fit", base / "run.yaml", "--set", f"checkpoint.path={place}"],
}


def failed(arguments):
    """Return the one line by which a command ends that fails as it should."""
    result = emtau(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2), result.output
    lines = [line for line in result.output.splitlines() if line.startswith("emtau: ")]
    assert len(lines) == 1
    assert OURS not in lines[0]
    return lines[0]


def full(disk):
    return disk.full(2**10)


@contextmanager
def read_only(disk):
    """Where no file system can be mounted, a folder in which nothing can be made: a file."""
    if disk.real:
        disk.remount("ro")
        try:
            yield errno.EROFS
        finally:
            disk.remount("rw")
    else:
        disk.folder.rmdir()
        disk.folder.write_text("in the way")
        try:
            yield errno.EEXIST
        finally:
            disk.folder.unlink()
            disk.folder.mkdir()


@pytest.mark.sample
@pytest.mark.parametrize("fault", [full, read_only])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_refuses(base, disk, writer, fault):
    place = disk.folder / "result.zarr"
    with fault(disk) as number:
        message = failed(WRITERS[writer](base, place))
    assert str(disk.folder) in message
    known = [os.strerror(number), "B free, room", os.strerror(errno.ENOTDIR)]
    assert any(part in message for part in known)
    assert not any(path.is_file() for path in disk.folder.rglob("*"))
    if writer != "dataset":
        result = emtau(*WRITERS[writer](base, place))
        assert result.exit_code == 0, result.output
        assert (place / "zarr.json").exists()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_name_that_is_too_long(base, tmp_path, writer):
    assert "too long" in failed(WRITERS[writer](base, tmp_path / LONG))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_in_the_place_of_a_folder(base, writer):
    assert str(base / "file") in failed(WRITERS[writer](base, base / "file" / "result.zarr"))
    assert (base / "file").read_text() == "mine"


@contextmanager
def no_more_files():
    """Let this process open no more files than it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as file:
        lowest_free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


USES = {
    "save": lambda model, base, folder: model.save(folder / "model.zarr"),
    "load": lambda model, base, folder: GaussianMixture.load(base / "model.zarr"),
    "fit": lambda model, base, folder: GaussianMixture(2).fit(str(base / "rows.npy")),
}


@pytest.mark.sample
@pytest.mark.parametrize("use", USES)
def test_too_many_open_files(base, tmp_path, use):
    model = GaussianMixture(2, tol=100.0).fit(X)
    with no_more_files(), pytest.raises(EmtauError, match=os.strerror(errno.EMFILE)):
        USES[use](model, base, tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


READERS = {
    "config": lambda base, name: ["fit", f"{name}.yaml"],
    "data": lambda base, name: ["fit", name, "-k", "2"],
    "compared config": lambda base, name: ["compare", name],
    "rows": lambda base, name: ["fit", base / "run.yaml", "--set", f"data.path={name}"],
    "rows of NumPy": lambda base, name: ["fit", base / "run.yaml", "--set", f"data.path={name}.npy"],
    "rows of parquet": lambda base, name: ["fit", base / "run.yaml", "--set", f"data.path={name}.parquet"],
    "weights": lambda base, name: ["fit", base / "run.yaml", "--set", f"data.weights={name}"],
    "model": lambda base, name: ["predict", name, base / "rows.npy", base / "labels.zarr"],
    "rows to label": lambda base, name: ["predict", base / "model.zarr", name, base / "labels.zarr"],
    "run": lambda base, name: ["resume", name],
    "run to inspect": lambda base, name: ["inspect", name],
    "images": lambda base, name: ["dataset", "mnist", base / "mnist.zarr", "--source", name],
}


@pytest.mark.parametrize("reader", READERS)
def test_reading_a_name_that_is_too_long(base, reader):
    message = failed(READERS[reader](base, base / LONG))
    assert "too long" in message
    assert LONG in message


@pytest.mark.parametrize("reader", READERS)
def test_reading_below_a_file(base, reader):
    assert str(base / "file") in failed(READERS[reader](base, base / "file" / "inner"))


MIXTURE = ["dataset", "mixture", "--rows", "50", "--features", "16"]


def test_a_log_on_a_full_disk_ends_no_work(tmp_path):
    """/dev/full takes nothing; the results are those of a run whose log is read."""
    with Path("/dev/full").open("w") as log:
        subprocess.run([*EMTAU, *MIXTURE, tmp_path / "rows.zarr"], stderr=log, check=False)
    assert zarr.open_array(tmp_path / "rows.zarr" / "X", mode="r").shape == (50, 16)


def test_an_observer_of_a_fit_whose_stream_fails():
    with Path("/dev/full").open("w", buffering=1) as log, redirect_stdout(log):
        model = GaussianMixture(2, tol=1.0, verbose=1).fit(X)
        assert model.converged_
        with suppress(OSError):
            log.flush()
        # What it holds still can be written at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), log.fileno())


@pytest.mark.sample
def test_standard_output_on_a_full_disk_is_said(tmp_path):
    with Path("/dev/full").open("w") as output:
        done = subprocess.run(
            [*EMTAU, *MIXTURE, tmp_path / "rows.zarr"],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert "The disk is full" in done.stderr.splitlines()[-1]
    assert (tmp_path / "rows.zarr" / "zarr.json").exists()
