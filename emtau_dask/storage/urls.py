"""Files behind fsspec URLs: read, listed, and what goes wrong with them said in words of ours.

Credentials, endpoints, timeouts and the like are fsspec's own configuration:
files in ``~/.config/fsspec``, or variables such as ``FSSPEC_S3``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.asyn import sync
from fsspec.config import apply_config
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from emtau_dask.errors import EmtauError, InvalidDataError

__all__ = ["Url", "is_url", "plain_path", "read_errors", "suffix_of"]

ATTEMPTS = 3
FIRST_PAUSE = 0.2
CONNECT_SECONDS, READ_SECONDS = 5, 15
"""Patience with a server: until it accepts a connection, and from one byte to the next."""

S3, GS, HTTP = ("s3", "s3a"), ("gs", "gcs"), ("http", "https")
EXTRAS = {**dict.fromkeys(S3, "s3"), **dict.fromkeys(GS, "gs")}


def is_url(path: str) -> bool:
    """Return whether ``path`` is an fsspec URL, such as ``s3://bucket/rows.zarr``."""
    return "://" in path or "::" in path


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


def _filesystem_class(url: str) -> Any:
    protocol = _protocol(url)
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        remedy = f"pip install 'emtau_dask[{extra}]'" if extra else "see the package that it names"
        raise InvalidDataError(
            f"{protocol}:// needs a package that is missing ({error}): {remedy}"
        ) from error
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
        retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
        options["config_kwargs"] = {"retries": retries, **options.get("config_kwargs", {})}
        # With more, s3fs asks for the size of each object before it reads it.
        options.setdefault("max_concurrency", 1)
    elif protocol in GS + HTTP:
        from aiohttp import ClientTimeout

        patience = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        key = "session_kwargs" if protocol in GS else "client_kwargs"
        options[key] = {"timeout": patience, **options.get(key, {})}
    return options


@dataclass(frozen=True)
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
            The protocol is unknown, or a package that it needs is missing.
        """
        return cls(url, _options(url))

    def __str__(self) -> str:
        """Return the URL without password and signature, for messages."""
        bare, question, _ = self.url.partition("?")
        scheme, separator, rest = bare.partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}{'?…' if question else ''}"

    def __truediv__(self, name: str) -> Url:
        """Return what is called ``name`` below this URL."""
        bare, question, query = self.url.partition("?")
        return Url(f"{bare.rstrip('/')}/{name}{question}{query}", self.options)

    def _connect(self) -> tuple[Any, str]:
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

    def read(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Return bytes ``start`` to ``stop``, by default all; a negative ``start`` counts from the end.

        Raises
        ------
        FileNotFoundError
            There is no such file. Other errors are the file system's own; see `read_errors`.
        """
        files, path = self._connect()
        if files.async_impl:
            data = sync(files.loop, _fetch, files, path, start, stop)
        else:
            data = files.cat_file(path, start=start, end=stop)
        return data if isinstance(data, bytes) else bytes(data)

    async def read_async(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Do as `read`, from any event loop."""
        files, path = self._connect()
        if not files.async_impl:
            return await asyncio.to_thread(self.read, start, stop)
        work = asyncio.run_coroutine_threadsafe(_fetch(files, path, start, stop), files.loop)
        data = await asyncio.wrap_future(work)
        return data if isinstance(data, bytes) else bytes(data)

    def info(self) -> dict[str, Any]:
        """Return fsspec's ``type`` and ``size`` of what is there, fresh; raises FileNotFoundError."""
        files, path = self._connect()
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
        files, path = self._connect()
        files.invalidate_cache()
        try:
            found = files.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = {str(each).rstrip("/").removeprefix(path.rstrip("/")).lstrip("/") for each in found}
        return sorted(name for name in names if name and "/" not in name)

    def find(self, suffix: str) -> list[tuple[str, int]]:
        """Return names and sizes of all files below that end in ``suffix``, in the order of `pathlib`."""
        files, path = self._connect()
        files.invalidate_cache()
        try:
            found = files.find(path, detail=True)
        except FileNotFoundError:
            return []
        sizes = {str(each).removeprefix(path.rstrip("/")).lstrip("/"): found[each]["size"] for each in found}
        wanted = [name for name in sizes if name and name.endswith(suffix)]
        return [(name, sizes[name]) for name in sorted(wanted, key=lambda name: name.split("/"))]


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
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
    "RefreshError",
}


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
    if kinds & _DENIED or _status(error) in (401, 403) or str(error).startswith("Forbidden"):
        return "Access is denied: " + (
            "give credentials that may read it, or for public data set FSSPEC_S3_ANON=true (s3://) or "
            "FSSPEC_GS_TOKEN=anon (gs://)."
            if remote
            else "make it readable for this user."
        )
    if not remote:
        return "Restore it, or write it again."
    if kinds & _UNREACHABLE:
        return "The server does not answer: check the network and the endpoint (for s3:// AWS_ENDPOINT_URL)."
    if kinds & _BROKEN_OFF or isinstance(error, OSError) or _status(error) >= 500:
        return "The server failed, or the connection to it: try again."
    return "Restore it, or write it again."


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
        ) from error
