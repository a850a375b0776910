"""An S3 endpoint over HTTP on this machine (moto), behind a proxy that can make it fail.

With ``pytest_plugins = "s3server"`` a module of tests has the fixture `s3`;
the environment then points to the endpoint, as a user's would.
"""

import socket
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from time import sleep
from uuid import uuid4

import fsspec
import pytest

INTERNAL_ERROR = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
)
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
)
CONFLICT = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>ConditionalRequestConflict</Code><Message>The conditional request cannot succeed due to "
    b"a conflicting operation against this resource.</Message></Error>"
)
FAILURES = {"500": INTERNAL_ERROR, "403": DENIED, "409": CONFLICT}
OF_A_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding", "expect"}


class FaultyProxy:
    """An HTTP proxy in front of one server, whose answers can be made to fail.

    Modes: ``"pass"``; ``"500"``, ``"403"`` and ``"409"``, answered without asking the server;
    ``"drop"``, the connection closed without asking it; ``"cut"``, its answer broken
    off half way (a request is then carried out, its answer lost); ``"slow"``, its
    answer after `delay` seconds; ``"mute"``, nothing for so long to who asks whether to
    go on with the body.

    Attributes
    ----------
    url : str
    requests : list of (method, path)
        All that came so far, whatever was done with them.
    sent : int
        Bytes of the bodies that were sent so far.
    delay : float
    """

    def __init__(self, server):
        self._server = server.removeprefix("http://")
        self._lock = Lock()
        self.reset()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def reset(self):
        """Pass all, and forget what came."""
        self.requests, self.sent, self.delay = [], 0, 0.2
        self.fail("pass")

    def fail(self, mode, *, match=lambda method, path: True, times=None, after=0):
        """Treat requests so from now on.

        Parameters
        ----------
        mode : str
        match : callable (method, path) -> bool
            Which requests are meant; others pass.
        times : int, optional
            How many of them; by default all.
        after : int
            How many of them pass before.
        """
        last = sys.maxsize if times is None else after + times
        with self._lock:
            self._mode, self._match, self._meant, self._seen = mode, match, range(after, last), 0

    def mode_of(self, method, path):
        """The mode for the request that comes now."""
        with self._lock:
            self.requests.append((method, path))
            if not self._match(method, path):
                return "pass"
            self._seen += 1
            return self._mode if self._seen - 1 in self._meant else "pass"

    def count(self, content):
        """Take a body as sent, before it is: whoever has received it finds it counted."""
        with self._lock:
            self.sent += len(content)

    def ask(self, method, path, headers, body):
        """The server's answer: status, headers, body."""
        connection = HTTPConnection(self._server, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    @contextmanager
    def running(self):
        thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def log_message(self, *_):
        pass

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def handle_expect_100(self):
        self._mode = self.proxy.mode_of(self.command, self.path)
        if self._mode == "mute":
            sleep(self.proxy.delay)
            self.close_connection = True
            return False
        return super().handle_expect_100()

    def _serve(self):
        body, mode = self._body(), self.__dict__.pop("_mode", None)
        if mode is None:
            mode = self.proxy.mode_of(self.command, self.path)
        if mode == "drop":
            self._hang_up()
            return
        if mode in FAILURES:
            self._answer(int(mode), [("Content-Type", "application/xml")], FAILURES[mode])
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}
        status, answered, content = self.proxy.ask(self.command, self.path, headers, body)
        if mode == "slow":
            sleep(self.proxy.delay)
        self._answer(status, answered, content, cut=mode == "cut")

    def _answer(self, status, headers, content, *, cut=False):
        self.send_response(status)
        size = len(content)
        for name, value in headers:
            if name.lower() not in OF_A_CONNECTION:
                self.send_header(name, value)
            elif name.lower() == "content-length" and self.command == "HEAD":
                size = value
        self.send_header("Content-Length", size)
        if cut and not content:
            self._hang_up()
            return
        self.end_headers()
        if self.command == "HEAD":
            return
        content = content[: len(content) // 2] if cut else content
        self.proxy.count(content)
        self.wfile.write(content)
        if cut:
            self._hang_up()

    def _hang_up(self):
        """Close the connection."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815


@dataclass(frozen=True)
class S3Place:
    """An empty bucket of its own for each test.

    Attributes
    ----------
    endpoint : str
        Of the server itself.
    bucket : str
    proxy : FaultyProxy
        In front of it.
    """

    endpoint: str
    bucket: str
    proxy: FaultyProxy

    def url(self, name):
        """The URL of an object or folder."""
        return f"s3://{self.bucket}/{name}"

    @property
    def files(self):
        """s3fs past the proxy, for what tests prepare and look at."""
        return fsspec.filesystem("s3", endpoint_url=self.endpoint)

    def upload(self, path, name):
        """Copy a local file or folder; return its URL."""
        path = Path(path)
        for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
            inner = name if path.is_file() else f"{name}/{file.relative_to(path).as_posix()}"
            self.files.pipe_file(f"{self.bucket}/{inner}", file.read_bytes())
        return self.url(name)

    def remove(self, name=""):
        """Remove an object or a folder; by default the bucket and all in it."""
        self.files.rm(f"{self.bucket}/{name}".rstrip("/"), recursive=True)


@dataclass(frozen=True)
class S3Server:
    """Where the server is, and the proxy in front of it."""

    endpoint: str
    proxy: FaultyProxy


@pytest.fixture(scope="session")
def s3_server():
    """An `S3Server` that lasts as long as the tests."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    kind = fsspec.get_filesystem_class("s3")
    kind.clear_instance_cache()
    with FaultyProxy(endpoint).running() as proxy:
        yield S3Server(endpoint, proxy)
    kind.clear_instance_cache()
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """An `S3Place`; to its proxy, which passes all at first, the environment points."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server.proxy.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    place = S3Place(s3_server.endpoint, f"bucket-{uuid4().hex}", s3_server.proxy)
    place.files.mkdir(place.bucket)
    place.proxy.reset()
    return place
