"""A zarr store that reads behind a URL, through the synchronous file system of each process.

zarr's own, `zarr.storage.FsspecStore`, holds an asynchronous file system, whose connections are bound to
one event loop, do not outlive a fork, and are not closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from emtau_dask.io.remote.filesystem import RemotePath

MOST_BYTES = 2**31
"""Largest object that is read where no limit is known."""


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
