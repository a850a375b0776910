"""Files and folders behind fsspec's URLs: read, listed, written.

The number of attempts and the waiting time are bounded. Credentials, endpoints and the like are fsspec's
configuration: files in ``~/.config/fsspec``, or variables such as ``FSSPEC_S3``.

`zarr.storage.FsspecStore` is not used: its asynchronous file system has connections that are bound to one
event loop, do not survive a fork, and are not closed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from dask.utils import natural_sort_key
from fsspec.asyn import AsyncFileSystem
from fsspec.config import apply_config
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from emtau_dask.errors import InvalidDataError, masked_url
from emtau_dask.process import of_process
from emtau_dask.storage.errors import (
    is_conflict,
    is_server_error,
    is_temporary,
    is_unreachable,
    read_errors,
)
from emtau_dask.storage.files import with_home

S3, GS, HTTP = ("s3", "s3a"), ("gs", "gcs"), ("http", "https")
EXTRAS = {**dict.fromkeys(S3, "s3"), **dict.fromkeys(GS, "gs")}
ATTEMPTS = 3
FIRST_PAUSE = 0.2
CONFLICT_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Approximate pauses between attempts after the server has answered with a conflict (seconds)."""
CONNECT_SECONDS, READ_SECONDS = 5, 15
"""Maximum waits for a server: for a connection, and between two bytes."""
MIN_UPLOAD_SPEED = 2**16
"""Minimum speed of an upload (bytes per second)."""
REPLACED = (
    "Either it was replaced since it was opened: open it anew; or its server ignores ranges: use another, or "
    "a local copy."
)
T = TypeVar("T")


def is_url(path: str) -> bool:
    """Return whether ``path`` is an fsspec URL, such as ``s3://bucket/rows.zarr``."""
    return "://" in path or "::" in path


def plain_path(path: str) -> str:
    """Return the local path of a ``file://`` URL or of a path with ``~``; anything else unchanged."""
    if path.startswith(("file://", "local://")):
        return str(LocalFileSystem._strip_protocol(path))
    return with_home(path)


def suffix_of(path: str) -> str:
    """Return the ending of a path, or of a URL without its query, such as ``.npy``; "" for none."""
    bare = path.partition("?")[0] if is_url(path) else path
    return PurePosixPath(bare).suffix


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, such as ``s3``."""
    return url.partition("://")[0].partition("::")[0]


def has_keys(url: str) -> bool:
    """Return whether a URL of an object store holds keys, which do not belong before its bucket."""
    bare = url.partition("?")[0].partition("#")[0]
    return protocol_of(url) in S3 + GS and masked_url(bare) != bare


def missing_package(url: str, error: ImportError) -> str:
    """Return the message for a URL whose file system lacks a package."""
    protocol = protocol_of(url)
    extra = EXTRAS.get(protocol)
    remedy = f"pip install 'emtau_dask[{extra}]'" if extra else "see the package that it names"
    return f"{protocol}:// needs a package that is missing ({error}): {remedy}"


@dataclass(frozen=True)
class Opener:
    """How a process makes a file system of fsspec: from a protocol or a class, and its arguments."""

    kind: str | type
    options: Mapping[str, Any] = field(hash=False, repr=False)
    arguments: tuple[Any, ...] = field(default=(), hash=False, repr=False)

    @property
    def filesystem_class(self) -> Any:
        """The class; raises `InvalidDataError` if a package is missing."""
        return _filesystem_class(self.kind) if isinstance(self.kind, str) else self.kind

    @property
    def protocols(self) -> frozenset[str]:
        """The protocols of the file system, such as ``s3`` and ``s3a``."""
        names = self.filesystem_class.protocol
        return frozenset([names] if isinstance(names, str) else names)

    def __call__(self) -> Any:
        """Return the file system; fsspec remembers one for each thread."""
        files = self.filesystem_class(*self.arguments, **self.options)
        if not self.protocols.isdisjoint(S3):
            files.retries = 1  # s3fs would make 25 attempts around those of botocore.
        return files


@dataclass(frozen=True, repr=False)
class Url:
    """A file or folder behind a URL: its text, its path in the file system, and how that is made.

    It is picklable and holds no connection: every process, forked or not, has its own.
    """

    url: str
    path: str
    opener: Opener

    @classmethod
    def of(cls, url: str) -> Url:
        """Return a URL with the options that this process's configuration has for it.

        Raises `InvalidDataError` for an unknown protocol, a missing package, keys of an object store in the
        URL, or a server that is asked at once and does not answer.
        """
        if has_keys(url):
            raise InvalidDataError(
                f"{url} holds keys, which are no part of such a URL. Give them in the environment "
                "(AWS_ACCESS_KEY_ID and its like; for gs:// FSSPEC_GS_TOKEN), or in a file in "
                "~/.config/fsspec."
            )
        options = _options(url)
        with read_errors(masked_url(url), remote=True):
            files, path = url_to_fs(url, **options)
        return cls(url, str(path), Opener(protocol_of(url), files.storage_options))

    @classmethod
    def within(cls, files: Any, path: str) -> Url:
        """Return a path in a file system that the user made, with or without zarr's wrapper around it."""
        files, path = getattr(files, "sync_fs", files), path.rstrip("/")
        options = files.storage_options
        if isinstance(files, AsyncFileSystem):
            options = {**options, "asynchronous": False}
        url = path if "://" in path else str(files.unstrip_protocol(path))  # HTTP's paths are URLs.
        return cls(url, path, Opener(type(files), options, files.storage_args))

    @property
    def files(self) -> Any:
        """The synchronous file system: that of the process, or of the thread if each thread needs its own."""
        if issubclass(self.opener.filesystem_class, AsyncFileSystem):
            return of_process(self.opener)
        return self.opener()

    def __str__(self) -> str:
        """Return the URL without user, password and query, for messages."""
        return masked_url(self.url)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __truediv__(self, name: str) -> Url:
        path = _joined(self.path, name) if "://" in self.path else f"{self.path.rstrip('/')}/{name}"
        return Url(_joined(self.url, name), path, self.opener)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes ``start`` to ``stop``, None for the end; a negative ``start`` counts from the end.

        Raises FileNotFoundError if there is no such file, `InvalidDataError` if the server sends more,
        and errors of the file system's own; see `read_errors`.
        """
        data = _with_retries(lambda: self.files.cat_file(self.path, **_range_arguments(start, stop)))
        return self._checked(data, start, stop)

    async def read_async(self, start: int, stop: int | None) -> bytes:
        """Do as `read`, in any event loop; the first attempt needs no thread if the file system is async."""
        files = self.files
        if files.async_impl:
            request = files._cat_file(self.path, **_range_arguments(start, stop))
            try:
                data = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, files.loop))
                return self._checked(data, start, stop)
            except Exception as error:
                if not is_temporary(error):
                    raise
        return await asyncio.to_thread(self.read, start, stop)

    def _checked(self, data: Any, start: int, stop: int | None) -> bytes:
        """Return the bytes read; raise `InvalidDataError` if there are more than requested."""
        most = -start if start < 0 else len(data) if stop is None else stop - start
        if len(data) > most:
            raise InvalidDataError(f"{self} gave {len(data):,} bytes for at most {most:,}. {REPLACED}")
        return data if isinstance(data, bytes) else bytes(data)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop``; raises as `read` does, and `InvalidDataError` for fewer."""
        data = self.read(start, stop)
        if len(data) != stop - start:
            raise InvalidDataError(
                f"{self} gave {len(data):,} bytes for a range of {stop - start:,}. {REPLACED}"
            )
        return data

    def read_if_there(self) -> bytes | None:
        """Return the whole file; None if there is none."""
        try:
            return self.read()
        except FileNotFoundError:
            return None

    def info(self) -> dict[str, Any]:
        """Return fsspec's ``type`` and ``size``, not from a cache; raises FileNotFoundError."""
        files, path = self._fresh()

        def ask() -> dict[str, Any]:
            try:
                return dict(files.info(path))
            except FileNotFoundError as error:
                cause = error.__cause__  # For http:// fsspec raises this whatever went wrong.
                if isinstance(cause, Exception) and is_server_error(cause):
                    raise cause from None
                raise

        return _with_retries(ask)

    def size_in(self, info: Mapping[str, Any]) -> int:
        """Return the bytes of this file from its `info`; raises `InvalidDataError` if they are missing."""
        if info["size"] is None:
            raise InvalidDataError(
                f"{self}: its server does not say how many bytes it has (Content-Length), without which it "
                "is not read. Use a server that does, or a local copy."
            )
        return int(info["size"])

    def exists(self) -> bool:
        """Return whether a file or folder is there; raises other errors of the file system."""
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the names of files and folders directly below; "" means a file at this path itself."""
        files, path = self._fresh()
        try:
            return sorted(_below(path, _with_retries(lambda: files.ls(path, detail=False))))
        except FileNotFoundError:
            return []

    def find(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below, at any depth, by name."""
        files, path = self._fresh()
        try:
            found = _with_retries(lambda: files.find(path, detail=True))
        except FileNotFoundError:
            return {}
        sizes = (info.get("size") or 0 for info in found.values())
        return {name: size for name, size in zip(_below(path, found), sizes, strict=True) if name}

    def glob(self, pattern: str) -> list[str]:
        """Return the names of files and folders below that match a pattern, in dask's natural order."""
        files, path = self._fresh()
        found = _with_retries(lambda: files.glob(f"{path.rstrip('/')}/{pattern}"))
        return sorted(_below(path, found), key=natural_sort_key)

    def _fresh(self) -> tuple[Any, str]:
        """Return the file system, its cache of listings emptied, and the path in it."""
        files = self.files
        files.invalidate_cache()
        return files, self.path

    def write(self, data: bytes, **condition: str) -> None:
        """Upload a whole file; with ``mode="create"`` it must not replace one.

        The time is bounded here: clients wait for ever for the answer that permits the body.
        """
        files = self.files
        seconds = ATTEMPTS * (CONNECT_SECONDS + READ_SECONDS) + len(data) / MIN_UPLOAD_SPEED
        patience = {"timeout": seconds} if isinstance(files, AsyncFileSystem) else {}
        _with_retries(lambda: files.pipe_file(self.path, data, **condition, **patience))

    def create(self, data: bytes) -> bool:
        """Upload on condition that there is no such file; return whether the file there has this content.

        If an answer is lost, the client repeats the request and may find its own file, so the contents are
        compared. S3 answers 409 during another request for the same file; then the request is repeated.
        """
        pauses = iter(CONFLICT_PAUSES)
        while True:
            try:
                self.write(data, mode="create")
                return True
            except Exception as error:
                conflict = is_conflict(error)
                if is_unreachable(error) or not (conflict or isinstance(error, OSError)):
                    raise
                found = self.read_if_there()
                if found is not None:
                    return found == data
                pause = next(pauses, None)
                if not conflict or pause is None:
                    raise
            time.sleep(pause * random.uniform(0.5, 1.5))

    def delete(self) -> None:
        """Remove a file; one that is not there is no error."""
        with suppress(FileNotFoundError):
            self.files.rm_file(self.path)  # Tried once: another process may have made a new file since then.


def _joined(url: str, name: str) -> str:
    bare, question, query = url.partition("?")
    return f"{bare.rstrip('/')}/{name}{question}{query}"


def _range_arguments(start: int, stop: int | None) -> dict[str, int | None]:
    """Return fsspec's arguments for a range; none for a whole file, since servers refuse empty ranges."""
    return {"start": None if (start, stop) == (0, None) else start, "end": stop}


def _below(path: str, found: Iterable[Any]) -> list[str]:
    """Return paths relative to ``path``."""
    return [str(each).rstrip("/").removeprefix(path.rstrip("/")).lstrip("/") for each in found]


def _with_retries(request: Callable[[], T]) -> T:
    """Make a request, and repeat it after a temporary error, which not every file system does itself."""
    for attempt in range(1, ATTEMPTS):
        try:
            return request()
        except Exception as error:
            if not is_temporary(error):
                raise
        time.sleep(FIRST_PAUSE * 2**attempt)
    return request()


def _filesystem_class(protocol: str) -> Any:
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidDataError(missing_package(f"{protocol}://", error)) from error
    except ValueError as error:
        raise InvalidDataError(
            f"{protocol}:// is no kind of URL that fsspec knows. Give a local path, or a URL of s3://, "
            "gs://, https:// or another of fsspec.available_protocols()."
        ) from error


def _options(url: str) -> dict[str, Any]:
    """Return the options of this process's fsspec configuration, with default limits on waiting."""
    if "::" in url:
        return {}
    protocol = protocol_of(url)
    options: dict[str, Any] = apply_config(_filesystem_class(protocol), {})
    if protocol in S3:
        limits = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        }
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
        # With more, s3fs asks for the size of each object before it reads it.
        options.setdefault("max_concurrency", 1)
        # As an option, another endpoint means another connection.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        options.setdefault("endpoint_url", endpoint)
    elif protocol in GS + HTTP:
        from aiohttp import ClientTimeout

        patience = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        key = "session_kwargs" if protocol in GS else "client_kwargs"
        options[key] = {"timeout": patience, **options.get(key, {})}
    return options


def opened_stream(url: Url, size: int) -> BinaryIO:
    """Return a file of ``size`` bytes as a stream: each read is one range, and the last one is kept."""
    return cast("BinaryIO", _Stream(url, size))


class _Stream(AbstractBufferedFile):  # type: ignore[misc]
    def __init__(self, url: Url, size: int) -> None:
        self._url = url
        super().__init__(url.files, url.path, block_size=0, size=size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._url.read_range(start, end)


def byte_limits(byte_range: ByteRequest | None) -> tuple[int, int | None]:
    """Return the start of a range, from the end if negative, and its stop, None for the end."""
    match byte_range:
        case RangeByteRequest(start, end):
            return start, end
        case OffsetByteRequest(offset):
            return offset, None
        case SuffixByteRequest(suffix):
            return -suffix, None
    return 0, None


class UrlStore(Store):
    """Objects below a URL, to be read only."""

    supports_writes = False
    supports_deletes = False
    supports_partial_writes = False
    supports_listing = True

    def __init__(self, root: Url) -> None:
        super().__init__(read_only=True)
        self.root = root

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlStore) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return str(self.root)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read an object or a range of it; None if there is no such object."""
        try:
            data = await (self.root / key).read_async(*byte_limits(byte_range))
        except FileNotFoundError:
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Read several ranges in parallel."""
        return await asyncio.gather(*(self.get(key, prototype, limits) for key, limits in key_ranges))

    async def exists(self, key: str) -> bool:
        """Look for an object."""
        return await asyncio.to_thread((self.root / key).exists)

    def list(self) -> AsyncIterator[str]:
        """List every object."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List every object below a folder."""
        for name in await asyncio.to_thread(self._folder(prefix).find):
            yield f"{prefix.rstrip('/')}/{name}" if prefix else name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List what is directly below a folder."""
        for name in await asyncio.to_thread(self._folder(prefix).names):
            if name and "/" not in name:
                yield name

    def _folder(self, prefix: str) -> Url:
        return self.root / prefix.rstrip("/") if prefix else self.root

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse."""
        self._check_writable()
