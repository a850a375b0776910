"""What lies behind fsspec's URLs: opened, listed, written as text.

Reading by URL bounds the number of attempts, the waiting and the length of answers. Credentials, endpoints
and the like are fsspec's configuration: files in ``~/.config/fsspec``, or variables such as ``FSSPEC_S3``.

zarr's own, `zarr.storage.FsspecStore`, holds an asynchronous file system, whose connections are bound to
one event loop, do not outlive a fork, and are not closed.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from dask.utils import natural_sort_key
from fsspec.asyn import AsyncFileSystem
from fsspec.config import apply_config
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from emtau_dask.errors import InvalidDataError, masked_url
from emtau_dask.storage.errors import (
    AnswerTooLongError,
    answer_limit,
    is_conflict,
    is_of_the_server,
    is_passing,
    is_unreachable,
)

S3, GS, HTTP = ("s3", "s3a"), ("gs", "gcs"), ("http", "https")
EXTRAS = {**dict.fromkeys(S3, "s3"), **dict.fromkeys(GS, "gs")}
ATTEMPTS = 3
FIRST_PAUSE = 0.2
CONFLICT_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds, about, between attempts after the server has answered with a conflict."""
CONNECT_SECONDS, READ_SECONDS = 5, 15
"""The longest waits for a server: for a connection, and from one byte to the next."""
SLOWEST_UPLOAD = 2**16
"""Bytes a second below which an upload is given up."""
REPLACED = (
    "Either it was replaced since it was opened: open it anew; or its server ignores ranges: use another, or "
    "a local copy."
)
T = TypeVar("T")
TAIL_BYTES = 2**16
"""Bytes at a file's end that are read at once: there formats such as parquet have their footer."""
MOST_BYTES = 2**31
"""Largest object that is read where no limit is known."""


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


def protocol_of(url: str) -> str:
    """Return what a URL begins with, such as ``s3``."""
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


class RemotePath(ABC):
    """A file or folder in an fsspec file system."""

    @abstractmethod
    def connect(self) -> tuple[Any, str]:
        """Return the file system, in its synchronous form, and this path in it."""

    @abstractmethod
    def __truediv__(self, name: str) -> RemotePath:
        """Return the path of ``name`` below this one."""

    @property
    def protocols(self) -> frozenset[str]:
        """The protocols of the file system, such as ``s3`` and ``s3a``."""
        return _protocols(self.connect()[0])

    def read(self, start: int, stop: int | None, limit: int) -> bytes:
        """Return bytes ``start`` to ``stop``, None for the end; a negative ``start`` counts from the end.

        Raises FileNotFoundError where there is no such file, `InvalidDataError` where the bytes are more
        than ``limit``, and errors of the file system's own; see `read_errors`.
        """
        files, path = self.connect()
        begin, end, most = _asked(files, start, stop, limit)
        with self._bounded(most) as check:
            return check(_insisting(lambda: files.cat_file(path, start=begin, end=end)))

    async def read_async(self, start: int, stop: int | None, limit: int) -> bytes:
        """Do as `read`, in any event loop."""
        files, path = self.connect()
        if not files.async_impl:
            return await asyncio.to_thread(self.read, start, stop, limit)
        begin, end, most = _asked(files, start, stop, limit)
        with self._bounded(most) as check:
            fetching = _insisting_async(lambda: files._cat_file(path, start=begin, end=end))
            return check(await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fetching, files.loop)))

    @contextmanager
    def _bounded(self, most: int) -> Iterator[Callable[[Any], bytes]]:
        """Bound answers within the block; yield a function that checks their length and returns bytes."""

        def check(data: Any) -> bytes:
            if len(data) > most:
                raise AnswerTooLongError(f"it gave {len(data):,} bytes")
            return data if isinstance(data, bytes) else bytes(data)

        token = answer_limit.set(most)
        try:
            yield check
        except AnswerTooLongError as error:
            raise InvalidDataError(
                f"{self}: {error}, where at most {most:,} belong to what was asked for. {REPLACED}"
            ) from error
        finally:
            answer_limit.reset(token)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop``; raises as `read` does, and `InvalidDataError` for fewer."""
        data = self.read(start, stop, stop - start)
        if len(data) != stop - start:
            raise InvalidDataError(
                f"{self} gave {len(data):,} bytes for a range of {stop - start:,}. {REPLACED}"
            )
        return data

    def read_beginning(self, limit: int) -> bytes | None:
        """Return at most ``limit`` bytes from the beginning; None where there is no such file."""
        try:
            return self.read(0, limit, limit)
        except FileNotFoundError:
            return None
        except Exception as error:
            if not is_unreachable(error):
                with suppress(Exception):
                    if self.info()["size"] == 0:  # Servers give no range of an empty file.
                        return b""
            raise

    def info(self) -> dict[str, Any]:
        """Return fsspec's ``type`` and ``size``, not from a cache; raises FileNotFoundError."""
        files, path = self._fresh()

        def ask() -> dict[str, Any]:
            try:
                return dict(files.info(path))
            except FileNotFoundError as error:
                cause = error.__cause__  # For http:// fsspec raises this whatever went wrong.
                if isinstance(cause, Exception) and is_of_the_server(cause):
                    raise cause from None
                raise

        return _insisting(ask)

    def size_in(self, info: Mapping[str, Any]) -> int:
        """Return the bytes of this file by its `info`; raises `InvalidDataError` where that lacks them."""
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
        """Return the names of files and folders directly below; "" stands for a file at this very path."""
        files, path = self._fresh()
        try:
            return sorted(_below(path, _insisting(lambda: files.ls(path, detail=False))))
        except FileNotFoundError:
            return []

    def find(self, suffix: str = "") -> list[tuple[str, int]]:
        """Return names and sizes of all files below that end in ``suffix``, in dask's natural order."""
        files, path = self._fresh()
        try:
            found = _insisting(lambda: files.find(path, detail=True))
        except FileNotFoundError:
            return []
        sizes = zip(_below(path, found), (info.get("size") or 0 for info in found.values()), strict=True)
        wanted = [(name, size) for name, size in sizes if name and name.endswith(suffix)]
        return sorted(wanted, key=lambda file: file[0].split("/"))

    def glob(self, pattern: str) -> list[str]:
        """Return the names of files and folders below that match a pattern, in dask's natural order."""
        files, path = self._fresh()
        found = _insisting(lambda: files.glob(f"{path.rstrip('/')}/{pattern}"))
        return sorted(_below(path, found), key=natural_sort_key)

    def _fresh(self) -> tuple[Any, str]:
        """Do as `connect`, and empty the file system's cache of listings."""
        files, path = self.connect()
        files.invalidate_cache()
        return files, path

    def write(self, data: bytes, **condition: str) -> None:
        """Upload a whole file; with ``mode="create"`` it must not replace one.

        The time is bounded here: a client waits for ever for the answer that lets it send the body.
        """
        files, path = self.connect()
        seconds = ATTEMPTS * (CONNECT_SECONDS + READ_SECONDS) + len(data) / SLOWEST_UPLOAD
        patience = {"timeout": seconds} if isinstance(files, AsyncFileSystem) else {}
        _insisting(lambda: files.pipe_file(path, data, **condition, **patience))

    def create(self, data: bytes) -> bool:
        """Upload on condition that there is no such file; return whether the file there has this content.

        After a lost answer the client asks again and may meet its own file, so the contents are compared.
        S3 answers 409 while another request for the same file is under way; then this asks again.
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
                found = self.read_beginning(len(data) + 1)
                if found is not None:
                    return found == data
                pause = next(pauses, None)
                if not conflict or pause is None:
                    raise
            time.sleep(pause * random.uniform(0.5, 1.5))

    def delete(self) -> None:
        """Remove a file; one that is not there is no error."""
        files, path = self.connect()
        with suppress(FileNotFoundError):
            files.rm_file(path)  # Tried once: another process may have made a new one meanwhile.


def _protocols(files: Any) -> frozenset[str]:
    names = files.protocol
    return frozenset([names] if isinstance(names, str) else names)


def _asked(files: Any, start: int, stop: int | None, limit: int) -> tuple[int | None, int | None, int]:
    """Return the range to ask for, and how many bytes may come.

    Without a ``stop``, the range has one byte more than ``limit``, which shows whether there is more. Of a
    file behind HTTP it is everything, since not every server knows ranges.
    """
    if start < 0:
        return start, stop, -start
    if stop is not None:
        return start, stop, min(limit, stop - start)
    if start == 0 and not _protocols(files).isdisjoint(HTTP):
        return None, None, limit
    return start, start + limit + 1, limit


def _below(path: str, found: Iterable[Any]) -> list[str]:
    """Return paths relative to ``path``."""
    return [str(each).rstrip("/").removeprefix(path.rstrip("/")).lstrip("/") for each in found]


def _insisting(request: Callable[[], T]) -> T:
    """Make a request, and repeat it after a temporary error: not every file system does so itself."""
    for pause in _pauses():
        try:
            return request()
        except Exception as error:
            if not is_passing(error):
                raise
        time.sleep(pause)
    return request()


async def _insisting_async(request: Callable[[], Awaitable[T]]) -> T:
    """Do as `_insisting` for a coroutine."""
    for pause in _pauses():
        try:
            return await request()
        except Exception as error:
            if not is_passing(error):
                raise
        await asyncio.sleep(pause)
    return await request()


def _pauses() -> list[float]:
    """Return the seconds to wait between attempts."""
    return [FIRST_PAUSE * 2**attempt for attempt in range(1, ATTEMPTS)]


@dataclass(frozen=True, repr=False)
class OpenedPath(RemotePath):
    """A path in an open fsspec file system, whose connections all threads share."""

    files: Any
    path: str

    @classmethod
    def of(cls, files: Any, path: str) -> OpenedPath:
        """Return a path in the synchronous form of a file system, without zarr's wrapper around it."""
        inner = getattr(files, "sync_fs", None)
        if inner is None and isinstance(files, AsyncFileSystem) and files.asynchronous:
            protocol = files.protocol if isinstance(files.protocol, str) else files.protocol[0]
            inner = fsspec.filesystem(protocol, **{**files.storage_options, "asynchronous": False})
        return cls(files if inner is None else inner, path.rstrip("/"))

    def __str__(self) -> str:
        """Return the URL without user, password and query, for messages."""
        whole = "://" in self.path  # A path of fsspec's HTTP is the URL itself.
        return masked_url(self.path if whole else str(self.files.unstrip_protocol(self.path)))

    def __truediv__(self, name: str) -> OpenedPath:
        return OpenedPath(self.files, f"{self.path}/{name}")

    def connect(self) -> tuple[Any, str]:
        """Return the two fields."""
        return self.files, self.path


@dataclass(frozen=True, repr=False)
class Url(RemotePath):
    """A file or folder behind a URL, with options of its file system; picklable, without a connection.

    Each use looks the file system up in fsspec's cache, so that every process, forked or not, has its own.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, url: str) -> Url:
        """Return a URL with the options that this process's configuration has for it.

        Raises `InvalidDataError` for an unknown protocol, a missing package, or keys of an object store in
        the URL.
        """
        if has_keys(url):
            raise InvalidDataError(
                f"{url} holds keys, which are no part of such a URL. Give them in the environment "
                "(AWS_ACCESS_KEY_ID and its like; for gs:// FSSPEC_GS_TOKEN), or in a file in "
                "~/.config/fsspec."
            )
        return cls(url, _options(url))

    def __str__(self) -> str:
        """Return the URL without user, password and query, for messages."""
        return masked_url(self.url)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __truediv__(self, name: str) -> Url:
        bare, question, query = self.url.partition("?")
        return Url(f"{bare.rstrip('/')}/{name}{question}{query}", self.options)

    def connect(self) -> tuple[Any, str]:
        """Return this process's file system, and this path in it."""
        if "::" in self.url:
            files, path = url_to_fs(self.url)
            return files, str(path)
        kind = _filesystem_class(self.url)
        options = {**kind._get_kwargs_from_urls(self.url), **self.options}
        is_s3 = protocol_of(self.url) in S3
        if is_s3:  # As an option, another endpoint means another connection.
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            options.setdefault("endpoint_url", endpoint)
        files = kind(**options)
        if is_s3:  # Around the attempts of botocore, s3fs would make 25 of its own.
            files.retries = 1
        return files, str(kind._strip_protocol(self.url))


def _filesystem_class(url: str) -> Any:
    protocol = protocol_of(url)
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidDataError(missing_package(url, error)) from error
    except ValueError as error:
        raise InvalidDataError(
            f"{protocol}:// is no kind of URL that fsspec knows. Give a local path, or a URL of s3://, "
            "gs://, https:// or another of fsspec.available_protocols()."
        ) from error


def _options(url: str) -> dict[str, Any]:
    """Return the options of this process's fsspec configuration, with limits on waiting where it has none."""
    if "::" in url:
        return {}
    protocol = protocol_of(url)
    options: dict[str, Any] = apply_config(_filesystem_class(url), {})
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

        from emtau_dask.storage.http_answers import BoundedResponse

        patience = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        key = "session_kwargs" if protocol in GS else "client_kwargs"
        session = {"timeout": patience, "response_class": BoundedResponse}
        options[key] = {**session, **options.get(key, {})}
    return options


def opened_stream(path: RemotePath, size: int) -> BinaryIO:
    """Return a file of ``size`` bytes as a stream: each read is one range, and the end is read once."""
    return cast("BinaryIO", _Stream(path, size))


class _Stream(io.RawIOBase):
    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size = path, size
        self._position, self._tail = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        begin = max(0, self._size - TAIL_BYTES)
        if self._position < begin:
            data = self._path.read_range(self._position, self._position + wanted)
        else:
            self._tail = self._tail or self._path.read_range(begin, self._size)
            data = self._tail[self._position - begin :][:wanted]
        self._position += wanted
        return data


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

    def __init__(self, root: RemotePath) -> None:
        super().__init__(read_only=True)
        self.root = root

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlStore) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return str(self.root)

    def with_read_only(self, read_only: bool = False) -> UrlStore:
        """Return the same store; it can only be read."""
        if not read_only:
            raise ValueError(f"{self} is opened to be read only")
        return self

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read an object or a range of it; None where there is no such object."""
        data = await self.get_within(key, *byte_limits(byte_range), MOST_BYTES)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_within(self, key: str, start: int, stop: int | None, limit: int) -> bytes | None:
        """Do as `RemotePath.read`; return None where there is no such object."""
        try:
            return await (self.root / key).read_async(start, stop, limit)
        except FileNotFoundError:
            return None

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Read several ranges side by side."""
        return await asyncio.gather(*(self.get(key, prototype, limits) for key, limits in key_ranges))

    async def exists(self, key: str) -> bool:
        """Look for an object."""
        return await asyncio.to_thread((self.root / key).exists)

    def list(self) -> AsyncIterator[str]:
        """List every object."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List every object below a folder."""
        for name, _ in await asyncio.to_thread(self._folder(prefix).find):
            yield f"{prefix.rstrip('/')}/{name}" if prefix else name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List what is directly below a folder."""
        for name in await asyncio.to_thread(self._folder(prefix).names):
            if name and "/" not in name:
                yield name

    def _folder(self, prefix: str) -> RemotePath:
        return self.root / prefix.rstrip("/") if prefix else self.root

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse."""
        self._check_writable()
