"""A selection kept behind a URL or in a zarr store: killed, disturbed, refused, and gone on with."""

import json
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter

import fsspec
import numpy as np
import pytest
import zarr
from clusters import processes
from counting import Reads
from zarr.storage import LocalStore, MemoryStore

from emtau_dask import GaussianMixture, select_components
from emtau_dask.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointTakenError,
)
from emtau_dask.selection import fits

pytest_plugins = "s3server"

RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(900, 2)) + 7.0 * RNG.integers(3, size=900)[:, None]
ROWS.setflags(write=False)
ASKED = {"n_components": (2, 3), "covariance_types": ("diag", "full"), "random_state": 0}
ASKED |= {"estimator": GaussianMixture(algorithm="em")}
NAMES = ("diag-2", "diag-3", "full-2", "full-3")
unguarded = pytest.mark.filterwarnings("ignore:.* cannot create an object on condition")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    zarr.create_array(store=path, data=ROWS, chunks=(150, 2))
    return str(path)


@pytest.fixture(scope="module")
def expected(stored):
    return bits(select_components(stored, **ASKED))


def bits(found):
    """All that was found but what the clock says, as bytes."""
    best = found.best_estimator_
    arrays = (best.weights_, best.means_, best.covariances_, best.lower_bounds_)
    records = [[vars(each) | {"seconds": 0} for each in table] for table in (found.table_, found.finalists_)]
    return [np.asarray(array).tobytes() for array in arrays], json.dumps(records), found.passes_


@pytest.fixture
def fitted(monkeypatch):
    """The candidates that are fitted to the sample, as they are."""
    seen, original = [], fits.fit_sample

    def watched(mixture, *where):
        seen.append((mixture.covariance_type, mixture.n_components))
        return original(mixture, *where)

    monkeypatch.setattr(fits, "fit_sample", watched)
    return seen


PROGRAM = """
import sys
import emtau_dask
from emtau_dask.selection import checkpoint, fits, select
from emtau_dask.storage import objects
from emtau_dask.storage.commits import CommitLog

data, place, name, count = sys.argv[1:]
calls = 0

def watched(kind, method):
    original = getattr(kind, method)
    def call(*arguments, **options):
        global calls
        result = original(*arguments, **options)
        if method == name:
            calls += 1
            if calls == int(count):
                print("there", flush=True)
                sys.stdin.read()
        return result
    setattr(kind, method, call)

watched(checkpoint.SelectionCheckpoint, "begin")
watched(checkpoint.SelectionCheckpoint, "keep")
watched(objects, "each")
watched(fits, "copy_new")
watched(select, "score_all")
watched(CommitLog, "append")
em = emtau_dask.GaussianMixture(algorithm="em")
emtau_dask.select_components(
    data, (2, 3), estimator=em, covariance_types=("diag", "full"), random_state=0, checkpoint=place
)
"""


def killed(stored, place, name, count):
    """Let another process begin the selection, and kill it where it has done something so many times."""
    command = [sys.executable, "-c", PROGRAM, stored, place, name, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert any(line == "there\n" for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


def written(s3):
    """How often the document of the selection, and the root and the last commits of runs were written."""
    paths = (path.partition("?")[0] for method, path in s3.proxy.requests if method == "PUT")
    names = (path.partition("/c/")[2] for path in paths)
    return Counter(name for name in names if name == "selection.json" or name.endswith(".zarr/zarr.json"))


@pytest.mark.kills
@pytest.mark.parametrize(
    ("name", "count", "left"),
    [
        ("begin", 1, NAMES),
        ("each", 3, NAMES[2:]),  # A run is copied, but for its root.
        ("copy_new", 3, NAMES[3:]),
        ("score_all", 1, ()),
        pytest.param("keep", 1, (), marks=pytest.mark.soak),
        ("append", 19, ()),  # Each candidate has four commits; of the fit to all rows this is the third.
    ],
)
@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_a_killed_selection_goes_on_to_the_same_bits(
    s3, stored, expected, fitted, tmp_path, kind, name, count, left
):
    """The server outlives the process; it saw each run begun once, by one process or the other."""
    place = s3.url("c") if kind == "bucket" else str(tmp_path / "c")
    killed(stored, place, name, count)
    assert bits(select_components(stored, **ASKED, checkpoint=place)) == expected
    assert {f"{kind}-{number}" for kind, number in fitted} == set(left)
    runs = [*(f"candidates/{each}" for each in NAMES), "fits/diag-3"]
    begun = {"selection.json": 2, **{f"{each}.zarr/zarr.json": 1 for each in runs}}
    assert written(s3) == (begun if kind == "bucket" else {})
    fitted.clear()
    s3.proxy.reset()
    reads = Reads(LocalStore(stored, read_only=True))
    again = select_components(zarr.open_array(reads, mode="r"), **ASKED, checkpoint=place)
    assert bits(again) == expected
    assert not fitted
    assert not written(s3)
    # To see that the data are the same: by the selection, and by the one fit to all rows.
    assert Counter(reads.chunks) == dict.fromkeys(range(len(ROWS) // 150), 2)


PLACES = {
    "file URL": lambda path: f"file://{path}/c",
    "memory URL": lambda path: f"memory://{uuid.uuid4().hex}/c",
    "zarr store": lambda path: MemoryStore(),
}


@unguarded
@pytest.mark.parametrize("kind", PLACES)
def test_any_place_of_a_checkpoint_keeps_a_selection(kind, stored, expected, fitted, tmp_path):
    place = PLACES[kind](tmp_path)
    assert bits(select_components(stored, **ASKED, checkpoint=place)) == expected
    fitted.clear()
    assert bits(select_components(stored, **ASKED, checkpoint=place)) == expected
    assert not fitted


@pytest.mark.kills
def test_a_damaged_model_in_a_bucket_is_fitted_again_and_an_unreachable_one_is_not(
    s3, stored, expected, fitted
):
    select_components(stored, **ASKED, checkpoint=s3.url("c"))
    fitted.clear()
    s3.proxy.fail("403", match=lambda method, path: "full-2.zarr/attempts" in path and "/means/c." in path)
    with pytest.raises(CheckpointError, match=r"cannot read .*/means.* in s3://.*/full-2\.zarr"):
        select_components(stored, **ASKED, checkpoint=s3.url("c"))
    s3.proxy.reset()
    assert bits(select_components(stored, **ASKED, checkpoint=s3.url("c"))) == expected
    assert not fitted
    s3.remove("c/candidates/full-2.zarr/attempts")
    assert bits(select_components(stored, **ASKED, checkpoint=s3.url("c"))) == expected
    assert set(fitted) == {("full", 2)}


@pytest.mark.kills
def test_a_store_that_fails_ends_the_selection_which_goes_on_afterwards(s3, stored, expected, fitted):
    def second_candidate(method, path):
        return method == "PUT" and "candidates/diag-3.zarr/commits/" in path

    s3.proxy.fail("403", match=second_candidate)
    with pytest.raises(CheckpointError, match=r"in s3://.*candidates/diag-3\.zarr.*Access ?Denied"):
        select_components(stored, **ASKED, checkpoint=s3.url("c"))
    s3.proxy.reset()
    fitted.clear()
    assert bits(select_components(stored, **ASKED, checkpoint=s3.url("c"))) == expected
    assert ("diag", 2) not in fitted


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_of_two_processes_at_one_selection_the_later_is_refused(kind, s3, stored, tmp_path, monkeypatch):
    """While one fits its second candidate, the other does all."""
    place = s3.url("c") if kind == "bucket" else tmp_path / "c"
    original, other = fits.fit_sample, []

    def beside(mixture, *where):
        if mixture.n_components == 3 and not other:
            other.append(True)
            other.append(select_components(stored, **ASKED, checkpoint=place))
        return original(mixture, *where)

    monkeypatch.setattr(fits, "fit_sample", beside)
    with pytest.raises(CheckpointTakenError, match=r"another process continues .* in .*c/.*/diag-3\.zarr"):
        select_components(stored, **ASKED, checkpoint=place)
    assert other[1].best_n_components_ == 3


def test_what_is_no_selection_in_a_bucket_is_refused_by_name_and_left_alone(s3, stored):
    s3.files.pipe_file(f"{s3.bucket}/letters/a.txt", b"mine")
    GaussianMixture(2, max_iter=2, tol=1e9, checkpoint=s3.url("run")).fit(ROWS)
    for name in ("letters", "run"):
        before = s3.files.find(f"{s3.bucket}/{name}")
        with pytest.raises(CheckpointExistsError, match=rf"s3://.*/{name} holds .* not a selection"):
            select_components(stored, **ASKED, checkpoint=s3.url(name))
        s3.files.invalidate_cache()
        assert s3.files.find(f"{s3.bucket}/{name}") == before


@unguarded
def test_another_selection_behind_a_url_is_refused_by_name(stored):
    place = f"memory://{uuid.uuid4().hex}/c"
    select_components(stored, **ASKED, checkpoint=place)
    with pytest.raises(CheckpointMismatchError, match=r"selection in memory:.*/c has other candidates: "):
        select_components(stored, **ASKED | {"n_components": (2, 4)}, checkpoint=place)


def test_two_processes_that_could_miss_each_other_are_warned_of_once(stored):
    with pytest.warns(UserWarning, match="on condition that it is new") as caught:
        select_components(stored, **ASKED, checkpoint=f"memory://{uuid.uuid4().hex}/c")
    assert len(caught) == 1


def test_secrets_of_a_place_are_not_shown(stored):
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(CheckpointError, match="check the network") as failed:
        select_components(stored, **ASKED, checkpoint=f"ftp://me:hunter2@{dead}/c")
    assert "hunter2" not in str(failed.value)
    with pytest.raises(CheckpointError, match="holds keys") as failed:
        select_components(stored, **ASKED, checkpoint="s3://AKIA1:hunter2@bucket/c")
    assert "hunter2" not in str(failed.value)


@pytest.mark.cluster
def test_a_place_that_workers_cannot_reach_is_refused_before_anything_is_fitted(
    zygote, tmp_path, stored, fitted
):
    place = f"memory://{uuid.uuid4().hex}/c"
    with (
        processes(zygote, tmp_path / "cluster", 1) as cluster,
        cluster.client(),
        pytest.warns(UserWarning, match="on condition"),
        pytest.raises(CheckpointError, match="this process's memory, which workers cannot reach"),
    ):
        select_components(stored, **ASKED, checkpoint=place)
    assert not fitted
    assert not fsspec.filesystem("memory").find(place)
