"""Files behind fsspec URLs: read, listed, and what goes wrong with them said in words of ours.

Credentials, endpoints, timeouts and the like are fsspec's own configuration:
files in ``~/.config/fsspec``, or variables such as ``FSSPEC_S3``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.asyn import sync
from fsspec.config import apply_config
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from emtau_dask.errors import EmtauError, InvalidDataError
from emtau_dask.io.files import remedy_of
from emtau_dask.messages import cause_of, masked_url

ATTEMPTS = 3
FIRST_PAUSE = 0.2
CONNECT_SECONDS, READ_SECONDS = 5, 15
"""Patience with a server: until it accepts a connection, and from one byte to the next."""

SLOWEST_UPLOAD = 2**16
"""Bytes a second below which an upload is given up."""

S3, GS, HTTP = ("s3", "s3a"), ("gs", "gcs"), ("http", "https")
KEYS_ELSEWHERE = (
    "Give them in the environment (AWS_ACCESS_KEY_ID and its like; for gs:// FSSPEC_GS_TOKEN), or in a file "
    "in ~/.config/fsspec."
)
EXTRAS = {**dict.fromkeys(S3, "s3"), **dict.fromkeys(GS, "gs")}


def is_url(path: str) -> bool:
    """Return whether ``path`` is an fsspec URL, such as ``s3://bucket/rows.zarr``."""
    return "://" in path or "::" in path


def has_keys(url: str) -> bool:
    """Return whether a URL of an object store holds keys before its bucket: they are no part of such URLs."""
    bare = url.partition("?")[0].partition("#")[0]
    return _protocol(url) in S3 + GS and masked_url(bare) != bare


def plain_path(path: str) -> str:
    """Return the local path that a ``file://`` URL means; anything else as it is."""
    if path.startswith(("file://", "local://")):
        return str(LocalFileSystem._strip_protocol(path))
    return path


def suffix_of(path: str) -> str:
    """Return the ending of a path, or of a URL without its query, such as ``.npy``; "" for none."""
    bare = path.partition("?")[0] if is_url(path) else path
    return PurePosixPath(bare).suffix


def _protocol(url: str) -> str:
    return url.partition("://")[0].partition("::")[0]


def missing_package(url: str, error: ImportError) -> str:
    """Return what to say of a URL whose file system lacks a package."""
    protocol = _protocol(url)
    extra = EXTRAS.get(protocol)
    remedy = f"pip install 'emtau_dask[{extra}]'" if extra else "see the package that it names"
    return f"{protocol}:// needs a package that is missing ({error}): {remedy}"


def _filesystem_class(url: str) -> Any:
    protocol = _protocol(url)
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidDataError(missing_package(url, error)) from error
    except ValueError as error:
        raise InvalidDataError(
            f"{protocol}:// is no kind of URL that fsspec knows. Give a local path, or a URL of s3://, "
            "gs://, "
            "https:// or another of fsspec.available_protocols()."
        ) from error


def _options(url: str) -> dict[str, Any]:
    """Return the options of this process's fsspec configuration, and limits to waiting where it has none."""
    if "::" in url:
        return {}
    kind, protocol = _filesystem_class(url), _protocol(url)
    options: dict[str, Any] = apply_config(kind, {})
    if protocol in S3:
        limits = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        }
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
        # With more, s3fs asks for the size of each object before it reads it.
        options.setdefault("max_concurrency", 1)
    elif protocol in GS + HTTP:
        from aiohttp import ClientTimeout

        patience = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        key = "session_kwargs" if protocol in GS else "client_kwargs"
        options[key] = {"timeout": patience, **_bounded_session(), **options.get(key, {})}
    return options


def _bounded_session() -> dict[str, Any]:
    from emtau_dask.io.remote.http_answers import BoundedResponse

    return {"response_class": BoundedResponse}


@dataclass(frozen=True, repr=False)
class Url:
    """A file or folder behind a URL; picklable, and without a connection of its own.

    The file system is looked up at each use in fsspec's cache, so that every
    process, forked or not, has its own.

    Attributes
    ----------
    url : str
    options : mapping
        Of the file system; they go along to wherever the URL is read.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, url: str) -> Url:
        """Return a URL with the options that this process's configuration has for it.

        Raises
        ------
        InvalidDataError
            The protocol is unknown, a package that it needs is missing, or the URL holds keys of an
            object store.
        """
        if has_keys(url):
            raise InvalidDataError(f"{url} holds keys, which are no part of such a URL. {KEYS_ELSEWHERE}")
        return cls(url, _options(url))

    def __str__(self) -> str:
        """Return the URL without user, password and query, for messages."""
        return masked_url(self.url)

    def __repr__(self) -> str:
        """Return what `str` does, in words of Python."""
        return f"Url({str(self)!r})"

    def __truediv__(self, name: str) -> Url:
        """Return what is called ``name`` below this URL."""
        bare, question, query = self.url.partition("?")
        return Url(f"{bare.rstrip('/')}/{name}{question}{query}", self.options)

    def connect(self) -> tuple[Any, str]:
        """Return the file system, in its synchronous form, and this place's path in it."""
        if "::" in self.url:
            files, path = url_to_fs(self.url)
            return files, str(path)
        kind = _filesystem_class(self.url)
        options = {**kind._get_kwargs_from_urls(self.url), **self.options}
        if _protocol(self.url) in S3:
            # Among the options, another endpoint means another connection.
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            options.setdefault("endpoint_url", endpoint)
        files = kind(**options)
        if _protocol(self.url) in S3:
            # Around the attempts of botocore, s3fs would make 25 of its own.
            files.retries = 1
        return files, str(kind._strip_protocol(self.url))

    def read(self, start: int, stop: int | None, limit: int) -> bytes:
        """Return bytes ``start`` to ``stop``; to the end where that is None. A negative ``start`` is from it.

        Parameters
        ----------
        start : int
        stop : int or None
        limit : int
            Bytes that there are at most.

        Raises
        ------
        FileNotFoundError
            There is no such file. Other errors are the file system's own; see `read_errors`.
        InvalidDataError
            There are more.
        """
        files, path = self.connect()
        limits = self._limits(start, stop, limit)
        with self._bounded(limits, limit) as check:
            if files.async_impl:
                return check(sync(files.loop, _fetch, files, path, *limits))
            return check(files.cat_file(path, start=limits[0], end=limits[1]))

    async def read_async(self, start: int, stop: int | None, limit: int) -> bytes:
        """Do as `read`, from any event loop."""
        files, path = self.connect()
        if not files.async_impl:
            return await asyncio.to_thread(self.read, start, stop, limit)
        limits = self._limits(start, stop, limit)
        with self._bounded(limits, limit) as check:
            work = asyncio.run_coroutine_threadsafe(_fetch(files, path, *limits), files.loop)
            return check(await asyncio.wrap_future(work))

    def _limits(self, start: int, stop: int | None, limit: int) -> tuple[int | None, int | None]:
        """Return what to ask for: a little too much of what is asked for whole, to see whether there is more.

        Of a whole file behind HTTP all is asked for, since not every server knows ranges.
        """
        if start < 0 or stop is not None:
            return start, stop
        if start == 0 and _protocol(self.url) in HTTP:
            return None, None
        return start, start + limit + 1

    @contextmanager
    def _bounded(self, limits: tuple[int | None, int | None], limit: int) -> Iterator[Callable[[Any], bytes]]:
        """Bound what is read meanwhile; yield what checks how much it is, and makes bytes of it."""
        start, stop = limits
        most = -start if start is not None and start < 0 else limit
        if start is not None and start >= 0 and stop is not None:
            most = min(limit, stop - start)

        def check(data: Any) -> bytes:
            if len(data) > most:
                raise AnswerTooLongError(f"it gave {len(data):,} bytes")
            return data if isinstance(data, bytes) else bytes(data)

        try:
            with answers_within(most):
                yield check
        except AnswerTooLongError as error:
            raise InvalidDataError(
                f"{self}: {error}, where at most {most:,} belong to what was asked for. Either it was "
                "replaced since it was opened: open it anew; or its server ignores ranges: use another, or "
                "a local copy."
            ) from error

    def info(self) -> dict[str, Any]:
        """Return fsspec's ``type`` and ``size`` of what is there, fresh; raises FileNotFoundError."""
        files, path = self.connect()
        files.invalidate_cache()
        try:
            return dict(files.info(path))
        except FileNotFoundError as error:
            # So fsspec says of http:// whatever went wrong.
            if isinstance(error.__cause__, Exception) and _is_of_the_server(error.__cause__):
                raise error.__cause__ from None
            raise

    def exists(self) -> bool:
        """Return whether a file or folder is there; raises what prevents seeing it."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the names of files and folders directly below; none where there is no folder."""
        files, path = self.connect()
        files.invalidate_cache()
        try:
            found = files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = {str(each).rstrip("/").removeprefix(path.rstrip("/")).lstrip("/") for each in found}
        return sorted(name for name in names if name and "/" not in name)

    def find(self, suffix: str) -> list[tuple[str, int]]:
        """Return names and sizes of all files below that end in ``suffix``, in the order of `pathlib`."""
        files, path = self.connect()
        files.invalidate_cache()
        try:
            found = files.find(path, detail=True)
        except FileNotFoundError:
            return []
        sizes = {str(each).removeprefix(path.rstrip("/")).lstrip("/"): found[each]["size"] for each in found}
        wanted = [name for name in sizes if name and name.endswith(suffix)]
        return [(name, sizes[name]) for name in sorted(wanted, key=lambda name: name.split("/"))]


class AnswerTooLongError(Exception):
    """A server goes on after all that was asked for."""


_answer_limit: ContextVar[int] = ContextVar("emtau_answer_limit", default=2**26)


@contextmanager
def answers_within(limit: int) -> Iterator[None]:
    """Let no answer of an HTTP server that is read meanwhile have more than ``limit`` bytes."""
    token = _answer_limit.set(limit)
    try:
        yield
    finally:
        _answer_limit.reset(token)


def answer_limit() -> int:
    """Return the bytes that an answer to the reading task may have; where none is set, those of a listing."""
    return _answer_limit.get()


async def _fetch(files: Any, path: str, start: int | None, stop: int | None) -> Any:
    """Read, and again where the answer broke off: not every file system does that by itself."""
    for attempt in range(1, ATTEMPTS):
        try:
            return await files._cat_file(path, start=start, end=stop)
        except Exception as error:
            if not _is_passing(error):
                raise
        await asyncio.sleep(FIRST_PAUSE * 2**attempt)
    return await files._cat_file(path, start=start, end=stop)


_BROKEN_OFF = {
    "ClientPayloadError",
    "ConnectionResetError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
}
_UNREACHABLE = {
    "ClientConnectorError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "ConnectionRefusedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "ReadTimeoutError",
    "ServerTimeoutError",
    "TimeoutError",
    "gaierror",
}
_DENIED = {
    "AuthenticationException",
    "DefaultCredentialsError",
    "LogonFailure",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
    "RefreshError",
    "SMBAuthenticationError",
}


_DENIALS = ("Forbidden", "530 ")
"""How the messages of errors of one kind for everything begin; 530 is FTP's."""


def _kinds(error: BaseException) -> set[str]:
    """Return the names of the error's classes: most belong to packages that need not be there."""
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else 0


def _is_of_the_server(error: Exception) -> bool:
    """Return whether an error says nothing of whether a file exists."""
    known = _kinds(error) & (_BROKEN_OFF | _UNREACHABLE | _DENIED)
    return bool(known) or _status(error) in (401, 403) or _status(error) >= 500


def _is_passing(error: Exception) -> bool:
    return bool(_kinds(error) & _BROKEN_OFF) or getattr(error, "status", 0) in (500, 502, 503, 504)


def _remedy(error: Exception, *, remote: bool) -> str:
    kinds = _kinds(error)
    if "FileNotFoundError" in kinds:
        return "Nothing is there: check the name" + (", its bucket too." if remote else ", or restore it.")
    if kinds & _DENIED or _status(error) in (401, 403) or str(error).startswith(_DENIALS):
        return "Access is denied: " + (
            "give credentials that may use it, or for public data set FSSPEC_S3_ANON=true (s3://) or "
            "FSSPEC_GS_TOKEN=anon (gs://)."
            if remote
            else "make it readable for this user."
        )
    if not remote:
        return f"{remedy_of(error, otherwise='Restore it, or write it again')}."
    if kinds & _UNREACHABLE:
        return "The server does not answer: check the network and the endpoint (for s3:// AWS_ENDPOINT_URL)."
    if kinds & _BROKEN_OFF or isinstance(error, OSError) or _status(error) >= 500:
        return "The server failed, or the connection to it: try again."
    return "Restore it, or write it again."


def upload_seconds(n_bytes: int) -> float:
    """Return after how long an upload of so many bytes is given up, all attempts together."""
    return ATTEMPTS * (CONNECT_SECONDS + READ_SECONDS) + n_bytes / SLOWEST_UPLOAD


def is_unreachable(error: Exception) -> bool:
    """Return whether an error says that a server does not answer, after all attempts."""
    return bool(_kinds(error) & _UNREACHABLE)


def remote_remedy(error: Exception) -> str:
    """Return what is wrong with something behind a URL and what to do about it, without a full stop."""
    return _remedy(error, remote=True).rstrip(".")


@contextmanager
def read_errors(what: str, *, remote: bool) -> Iterator[None]:
    """Raise `InvalidDataError` for whatever goes wrong while ``what`` is read.

    Parameters
    ----------
    what : str
        Names the place, and begins the message.
    remote : bool
        Whether it is behind a URL, which other remedies fit.
    """
    try:
        yield
    except EmtauError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(" .:")
        raise InvalidDataError(
            f"{what} cannot be read ({reason}). {_remedy(error, remote=remote)}"
        ) from cause_of(error)
