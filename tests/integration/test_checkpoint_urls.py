"""Checkpoints behind URLs: servers that are not there, refuse, or have another request under way."""

import re
import socket
import sys
import threading
from contextlib import contextmanager

import pytest
from fits import ROWS, quietly
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import CheckpointError, EmtauError, GaussianMixture, InvalidDataError
from emtau_dask.errors import StoreUnreachableError
from emtau_dask.storage import urls
from emtau_dask.storage.stores import object_store

pytest_plugins = "s3server"

SECRET = "hunter2"
SERVED = [
    "ftp://me:{}@{}/run",
    "simplecache::ftp://me:{}@{}/run",
    "http://me:{}@{}/run",
    "webhdfs://me:{}@{}/run",
]


def mixture(**settings):
    return GaussianMixture(2, max_iter=2, tol=0.0, random_state=0, **settings)


USES = {
    "fit": lambda url: mixture(checkpoint=url).fit(ROWS),
    "resume": lambda url: GaussianMixture.resume(url, ROWS),
    "data": lambda url: mixture().fit(f"{url}.npy"),
}


@pytest.fixture(scope="module")
def dead():
    """The address of a port that was just given up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def refused(use, url):
    """The error, which is of the right kind and names the place."""
    kind = InvalidDataError if use == "data" else CheckpointError
    with pytest.raises(EmtauError) as failed:
        USES[use](url)
    assert isinstance(failed.value, kind), failed.value
    message = str(failed.value)
    assert "intact" not in message
    return message


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("url", SERVED, ids=lambda url: url.partition("://")[0])
def test_a_server_that_is_not_there(dead, url, use):
    """It is named, without the password."""
    message = refused(use, url.format(SECRET, dead))
    assert "run" in message
    assert SECRET not in message
    if url.startswith("ftp"):
        assert f"ftp://…@{dead}/run" in message
    assert "check the network" in message or ("try again" in message and not url.startswith("ftp"))


@contextmanager
def strict_ftp_server():
    """An FTP server that knows nobody."""

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb", buffering=0) as stream:
                stream.write(b"220 ready\r\n")
                while stream.readline().upper().startswith(b"USER"):
                    stream.write(b"331 password, please\r\n")
                stream.write(b"530 Login incorrect.\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("use", USES)
def test_a_wrong_password(use):
    with strict_ftp_server() as address:
        message = refused(use, f"ftp://me:{SECRET}@{address}/run")
    assert "530 Login incorrect" in message
    assert "give credentials" in message
    assert SECRET not in message


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("url", "package"),
    [
        (f"sftp://me:{SECRET}@host/run", "paramiko"),
        (f"smb://me:{SECRET}@host/run", "smbprotocol"),
        ("gs://bucket/run", "gcsfs"),
    ],
    ids=lambda value: value.partition("://")[0],
)
def test_a_package_that_is_missing(monkeypatch, use, url, package):
    protocol = url.partition("://")[0]
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name == f"fsspec.implementations.{protocol}"]:
        monkeypatch.delitem(sys.modules, name)
    message = refused(use, url)
    assert package in message
    assert SECRET not in message


def test_what_is_no_url(dead):
    message = refused("fit", f"nonsense://{dead}/run")
    assert "no kind of URL that fsspec knows" in message


def puts(s3):
    return [path for method, path in s3.proxy.requests if method == "PUT"]


def is_put(method, path):
    return method == "PUT"


@pytest.fixture
def quick(monkeypatch):
    """Does not wait long between attempts."""
    monkeypatch.setattr(urls, "CONFLICT_PAUSES", (0.01,) * 5)


def test_a_conflict_is_asked_again(s3, quick):
    objects = object_store(s3.url("run"))
    s3.proxy.fail("409", match=is_put, times=3)
    assert objects.create("commits/0/zarr.json", b"mine")
    assert len(puts(s3)) == 4
    assert objects.get("commits/0/zarr.json", 100) == b"mine"
    assert not objects.create("commits/0/zarr.json", b"other")
    assert len(puts(s3)) == 5


def test_a_conflict_that_another_writer_has_won(s3, quick):
    objects = object_store(s3.url("run"))
    s3.files.pipe_file(f"{s3.bucket}/run/commits/0/zarr.json", b"theirs")
    s3.proxy.fail("409", match=is_put, times=1)
    assert not objects.create("commits/0/zarr.json", b"mine")
    assert objects.get("commits/0/zarr.json", 100) == b"theirs"


def test_a_conflict_that_does_not_end(s3, quick):
    objects = object_store(s3.url("run"))
    s3.proxy.fail("409", match=is_put)
    with pytest.raises(CheckpointError, match=r"ConditionalRequestConflict.*try again"):
        objects.create("commits/0/zarr.json", b"mine")
    assert len(puts(s3)) == 6


def test_a_fit_among_conflicts_has_the_same_bits(s3, quick):
    undisturbed = quietly(mixture(checkpoint=s3.url("undisturbed")), ROWS)
    s3.proxy.reset()
    seen = []

    def every_second_commit(method, path):
        if method != "PUT" or not re.search(r"/commits/\d+/zarr\.json", path):
            return False
        seen.append(path)
        return len(seen) % 2 == 1

    s3.proxy.fail("409", match=every_second_commit)
    model = quietly(mixture(checkpoint=s3.url("run")), ROWS)
    assert len(seen) >= 6
    assert model.means_.tobytes() == undisturbed.means_.tobytes()


@pytest.mark.parametrize(("mode", "asked"), [("slow", 2), pytest.param("mute", 1, marks=pytest.mark.kills)])
def test_a_store_that_falls_silent_in_a_commit_ends_the_fit_which_is_resumed(s3, monkeypatch, mode, asked):
    """It is asked so many times as its settings say, and then nothing more: each attempt takes long."""
    undisturbed = quietly(mixture(checkpoint=s3.url("undisturbed")), ROWS)
    monkeypatch.setattr(urls, "CONNECT_SECONDS", 1)
    monkeypatch.setattr(urls, "READ_SECONDS", 1)
    monkeypatch.setattr(urls, "ATTEMPTS", 2)
    s3.proxy.reset()
    s3.proxy.delay, silent = 7.0, []

    def from_the_second_commit_on(method, path):
        if silent or (method == "PUT" and re.search(r"/commits/1/zarr\.json", path)):
            silent.append(path)
        return bool(silent)

    s3.proxy.fail(mode, match=from_the_second_commit_on)
    with pytest.raises(StoreUnreachableError, match=r"does not answer: check the network.*last commit is 0"):
        quietly(mixture(checkpoint=s3.url("run")), ROWS)
    assert len(silent) == asked
    s3.proxy.reset()
    with pytest.warns(ConvergenceWarning):
        resumed = GaussianMixture.resume(s3.url("run"), ROWS)
    assert resumed.means_.tobytes() == undisturbed.means_.tobytes()
