"""Zarr arrays as sources: chunks are read and decoded within a budget of memory.

While zarr reads a chunk it holds the stored bytes, the decoded chunk, and the array that it copies into:
two or three times the chunk. With chunks of 128 MB two reads at once take more than the fit itself. So
reads share a budget; small chunks are still read at the same time.

If the wanted rows are one whole chunk in a local file, uncompressed or with one fast codec, this module
decodes them: zarr takes up to three times as long, most of it to copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs.blosc import Blosc
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath, ZipStore

from emtau_dask.data.packing import Packing, unpacked
from emtau_dask.data.source import CHUNK_BYTES, Loaded, RangeReader, RangeSource, Unstored, equal_chunks
from emtau_dask.data.zarr_layout import ZarrLayout, count_unstored, place_of_object
from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.linalg import Bools
from emtau_dask.process import of_process
from emtau_dask.storage.direct_reads import LEAST_BYTES, passes_cache, read_directly
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import read_regular
from emtau_dask.storage.urls import Url, UrlStore, is_url
from emtau_dask.storage.zarr_check import Found, StoredArray, StrictStore, attributes_at, document_at

READ_BYTES = 2**28
"""Budget of a process for reads at the same time (bytes)."""
MANY_CHUNKS = 2**16
"""Maximum number of row chunks that are read one by one. If there are more, small ones are read in groups."""
MAX_GROUPED = 2**12
"""Maximum number of chunks in a group: zarr takes some kilobytes for each."""
BOUNDS = ("_bnds", "_bounds", "_vertices")
"""Endings of the names of arrays that hold the bounds of a coordinate (CF conventions, section 7.1)."""
DECODERS = {"blosc": Blosc().decode, "lz4": LZ4().decode, "zstd": Zstd().decode}
"""Fast codecs, which need no settings to decode."""


class ReadBudget:
    """Lets reads begin while they take at most ``limit`` bytes together; a single one is always allowed."""

    def __init__(self, limit: int = READ_BYTES) -> None:
        self.limit = limit
        self._taken = 0
        self._lock = threading.Lock()  # An interrupt in a condition's own `with` could leave it locked.
        self._freed = threading.Condition(self._lock)

    @contextmanager
    def reading(self, size: int) -> Iterator[None]:
        """Take ``size`` bytes of the budget; wait until they are free."""
        with self._lock:
            while self._taken and self._taken + size > self.limit:
                self._freed.wait()
            self._taken += size
        try:
            yield
        finally:
            with self._lock:
                self._taken -= size
                self._freed.notify_all()


class CountingStore(StrictStore):
    """The store during one read: it counts ``bytes_read``, and records what is not stored.

    ``lacking`` says by key which chunks an object lacks; None for an object that does not exist. Local files
    are read by `whole_file` if ``whole`` objects are read.
    """

    def __init__(self, store: Store, layout: ZarrLayout, *, whole: bool) -> None:
        super().__init__(store)
        self._layout, self._whole = layout, whole
        self.bytes_read = 0
        self.lacking: dict[str, Bools | None] = {}

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Read and count."""
        value = await super().get(key, prototype, byte_range)
        if value is None:
            self.lacking[key] = None
            return None
        if byte_range is None:
            check_whole(self._layout, key, value.as_numpy_array())
        self.bytes_read += len(value)
        if self._layout.index is not None:
            lacking = self._layout.index.lacking(value, byte_range)
            if lacking is not None and lacking.any():
                self.lacking[key] = lacking
        return value

    def local_bytes(self, path: Path, byte_range: ByteRequest | None = None) -> NDArray[np.uint8] | None:
        """Return the bytes of a local file, by `whole_file` if the object is read whole."""
        if self._whole and byte_range is None:
            return whole_file(self._layout, path)
        return super().local_bytes(path, byte_range)


def whole_file(layout: ZarrLayout, path: Path) -> NDArray[np.uint8] | None:
    """Return the bytes of a stored object; None if it does not exist. Raises OSError.

    The page cache is bypassed if it could not hold the whole array.
    """
    with suppress(FileNotFoundError):
        if layout.object_bytes >= LEAST_BYTES and passes_cache(layout.n_objects * path.stat().st_size):
            read = read_directly(path)
            if read is not None:
                return read
        return read_regular(path, 0, None)
    return None


def check_whole(layout: ZarrLayout, key: str, data: NDArray[Any]) -> None:
    """Raise ValueError for a truncated object that decoding would not notice.

    Zarr treats an empty shard as one that is not stored. Blosc reads beyond the end of a buffer, up to the
    length that its header states.
    """
    blosc = layout.outer == "blosc"
    if not len(data) or (blosc and int.from_bytes(data[12:16].tobytes(), "little") != len(data)):
        raise ValueError(f"{key} has {len(data):,} bytes: it was cut off")


def is_remote(store: Store) -> bool:
    """Return whether what a store reads may come from a network."""
    return not isinstance(store, (LocalStore, MemoryStore, ZipStore))


@dataclass(frozen=True, eq=False)
class LocalChunks:
    """Chunks of whole rows, each in a local file of its own, uncompressed or by one fast codec.

    Attributes
    ----------
    array : zarr.Array
        Its metadata name the files.
    layout : ZarrLayout
    dtype : dtype
    root : Path
        Folder of the store.
    peak_bytes : int
        Upper bound of the bytes held while a chunk is read.
    unstored : Unstored
        The `Unstored` of a stored chunk.
    """

    array: zarr.Array[Any]
    layout: ZarrLayout
    dtype: np.dtype[Any]
    root: Path
    peak_bytes: int
    unstored: Unstored

    @classmethod
    def of(cls, array: zarr.Array[Any], layout: ZarrLayout, fill: str) -> LocalChunks | None:
        """Return the chunks of an array with the fill value ``fill``; None if they are stored otherwise."""
        store = array.store
        if type(store) is not LocalStore or not layout.whole_rows or layout.outer not in ("", *DECODERS):
            return None
        peak_bytes = layout.peak_bytes(0, layout.chunks[0], copied=False, remote=False)
        return cls(array, layout, array.dtype, store.root, peak_bytes, Unstored(0, 1, fill))

    def chunk_of_rows(self, start: int, stop: int) -> int | None:
        """Return the chunk that consists of exactly these rows; None if there is none.

        The last chunk may extend beyond the last row.
        """
        n_rows = self.layout.chunks[0]
        whole = start < stop == min(start + n_rows, self.layout.shape[0]) and start % n_rows == 0
        return start // n_rows if whole else None

    def read(self, chunk: int, n_rows: int) -> Loaded | None:
        """Return the first rows of a chunk; None if it is not stored, or has another size.

        Then zarr reads it, and returns the fill value or raises.
        """
        array, layout = self.array, self.layout
        place = (chunk, *[0] * (len(layout.shape) - 1))
        key = f"{array.path}/{array.metadata.encode_chunk_key(place)}".lstrip("/")
        data = whole_file(layout, self.root / key)
        if data is None:
            return None
        check_whole(layout, key, data)
        decoded = np.frombuffer(DECODERS[layout.outer](data), np.uint8) if layout.outer else data
        if len(decoded) != layout.chunk_bytes:
            return None
        return Loaded(decoded.view(self.dtype).reshape(layout.chunks)[:n_rows], len(data), self.unstored)


@dataclass(frozen=True, eq=False)
class ZarrReader(RangeReader):
    """Reads rows of a zarr array.

    If the rows are one of the ``local`` chunks, it is decoded without zarr. A ``remote`` store may read from
    a network. Chunks that are not stored are read as the value ``fill``.
    """

    stored: StoredArray
    layout: ZarrLayout
    local: LocalChunks | None
    remote: bool
    fill: str

    @classmethod
    def of(cls, stored: StoredArray) -> ZarrReader:
        """Return the reader of an array."""
        array, layout = stored.array, ZarrLayout.of(stored)
        # None in format 2 means the dtype's zero.
        fill = "0" if array.fill_value is None else str(array.fill_value)
        local = LocalChunks.of(array, layout, fill) if layout.shape else None
        return cls(stored, layout, local, is_remote(array.store), fill)

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows; the bytes are the stored (compressed) ones."""
        local, loaded = self.local, None
        chunk = None if local is None else local.chunk_of_rows(start, stop)
        try:
            if local is not None and chunk is not None:
                with of_process(ReadBudget).reading(local.peak_bytes):
                    loaded = local.read(chunk, stop - start)
            if loaded is None:
                with of_process(ReadBudget).reading(self.peak_bytes(start, stop)):
                    loaded = self._read_by_zarr(start, stop)
        except Exception:
            # Entered for errors only, to save its time for every chunk.
            with read_errors(f"rows {start} to {stop} of {self._name}", remote=self.remote):
                raise
        return loaded

    def _read_by_zarr(self, start: int, stop: int) -> Loaded:
        array, layout = self.stored.array, self.layout
        store = CountingStore(array.store, layout, whole=layout.is_whole_objects(start, stop))
        rows = np.asarray(self.stored.through(store)[start:stop])
        if store.lacking:
            self.identity()  # It raises if the whole array is gone.
        skipped = len(array.path)
        places = {place_of_object(key[skipped:]): lacking for key, lacking in store.lacking.items()}
        return Loaded(
            rows, store.bytes_read, Unstored(*count_unstored(layout, start, stop, places), self.fill)
        )

    @property
    def _name(self) -> str:
        return f"the zarr array {self.stored.where}"

    def identity(self) -> str:
        """Return the SHA-256 of the array's metadata document, as stored."""
        array = self.stored.array
        with read_errors(self._name, remote=self.remote):
            found = document_at(array.store, array.path, (array.metadata.zarr_format,))
            if found is None:
                raise FileNotFoundError("it has no metadata document")
        return f"zarr array, SHA-256 {sha256(found.data).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds at once, the rows included."""
        if self.local is not None and self.local.chunk_of_rows(start, stop) is not None:
            return self.local.peak_bytes
        return self.layout.peak_bytes(start, stop, copied=True, remote=self.remote)


def _with_absolute_path(store: Store) -> Store:
    """Return the store with an absolute path if it is local: workers have other working directories."""
    if type(store) is LocalStore:
        return LocalStore(store.root.absolute(), read_only=store.read_only)
    if type(store) is ZipStore and store.read_only:
        return ZipStore(store.path.absolute(), mode="r", read_only=True)
    return store


def zarr_source(array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Return the stored numbers of a zarr array, in these row chunks, by default its own (`own_chunk_rows`).

    The array is read as its stored document says, however ``array`` was opened.

    Raises
    ------
    InvalidDataError
        The document is gone or has changed, or it describes an array that cannot be read.
    """
    return source_in(_with_absolute_path(array.store), array, chunk_rows)


def source_in(store: Store, array: zarr.Array[Any], chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    """Return what `zarr_source` returns, but read through ``store``, even if its path is relative."""
    with read_errors(f"the zarr array {StorePath(store, array.path)}", remote=is_remote(store)):
        found = document_at(store, array.path, (array.metadata.zarr_format,))
        if found is None or found.kind != "array":
            raise FileNotFoundError("it has no metadata document of its own")
        source = _source(store, array.path, found, chunk_rows)
        opened = np.dtype(array.dtype)
        if source.shape != array.shape or source.dtype.newbyteorder("=") != opened.newbyteorder("="):
            raise ValueError(f"it has another shape or dtype now, {source.shape} and {source.dtype}")
    return replace(source, dtype=opened)


def _source(store: Store, path: str, found: Found, chunk_rows: tuple[int, ...] | None = None) -> RangeSource:
    where = str(StorePath(store, path))
    stored = StoredArray.of(store, path, found.document, where)
    reader = ZarrReader.of(stored)
    if chunk_rows is None:
        chunk_rows = own_chunk_rows(reader.layout, where)
    return RangeSource(reader, stored.array.shape, np.dtype(stored.array.dtype), chunk_rows)


def _decoded_source(store: Store, path: str, found: Found) -> RangeSource:
    """Return the decoded numbers of an array (see `Packing`), in its own row chunks."""
    source = _source(store, path, found)
    attributes = attributes_at(store, path, found)
    fill = found.document.get("fill_value") if found.zarr_format == 2 else None
    return unpacked(source, Packing.of(attributes, fill, str(StorePath(store, path))))


def array_source(array: zarr.Array[Any]) -> RangeSource:
    """Return the numbers of a zarr array, decoded (see `Packing`); raises as `zarr_source`."""
    fill = array.fill_value if array.metadata.zarr_format == 2 else None
    packing = Packing.of(dict(array.attrs), fill, f"the zarr array {array.store_path}")
    return unpacked(zarr_source(array), packing)


def own_chunk_rows(layout: ZarrLayout, where: str) -> tuple[int, ...]:
    """Return the rows of an array's own row chunks, or of its shards, so that each is read once.

    If there are more than 65,536, small consecutive ones are grouped: what a fit keeps for each would take
    more memory than its rows. Raises `InvalidDataError` for too many.
    """
    if not layout.shape:
        return ()
    n_rows, unit = layout.shape[0], layout.stored[0]
    if -(-n_rows // unit) > MANY_CHUNKS:
        most = min(CHUNK_BYTES // max(1, unit * layout.row_bytes), MAX_GROUPED // layout.chunks_across)
        unit *= max(1, most)
    return equal_chunks(n_rows, unit, where)


def open_zarr(path: str, array: str | None) -> RangeSource:
    """Open a zarr array, or a member of a zarr group, as a source.

    Parameters
    ----------
    path : str
        A local path or a URL.
    array : str or None
        The group's member. The default is ``"X"``, else the only array with two axes, unless another array
        has more axes or its name is that of the bounds of a coordinate.

    Raises
    ------
    InvalidDataError
        Nothing is there, or the group has no such default.
    """
    store = UrlStore(Url.of(path)) if is_url(path) else LocalStore(Path(path).absolute(), read_only=True)
    where = str(store) if is_remote(store) else path
    with read_errors(where, remote=is_remote(store)):
        found = document_at(store, "")
        if found is None:
            raise InvalidDataError(
                f"{where} holds no zarr array or group: it has no zarr.json, .zarray or .zgroup."
            )
        if found.kind == "group":
            return _member(store, "", found, array, where)
        if array is not None:
            raise InvalidDataError(f"{where} is a zarr array, not a group; remove the array name {array!r}.")
        return _decoded_source(store, "", found)


def group_source(group: zarr.Group, array: str | None, where: str) -> RangeSource:
    """Return a member of a zarr group, named ``where`` in errors, as a source; see `open_zarr`."""
    store = _with_absolute_path(group.store)
    with read_errors(where, remote=is_remote(store)):
        found = document_at(store, group.path, (group.metadata.zarr_format,))
        if found is None:
            raise FileNotFoundError("it has no metadata document")
        return _member(store, group.path, found, array, where)


def _member(store: Store, path: str, group: Found, array: str | None, where: str) -> RangeSource:
    def found_at(name: str) -> Found | None:
        return document_at(store, f"{path}/{name}".lstrip("/"), (group.zarr_format,))

    name = array or "X"
    member = found_at(name)
    if member is None or member.kind != "array":
        members = {each: found_at(each) for each in _names(store, path, group)}
        arrays = {each: found for each, found in members.items() if found and found.kind == "array"}
        axes = {each: len(found.document.get("shape", ())) for each, found in arrays.items()}
        tables = [each for each in arrays if axes[each] == 2]
        problem = None
        if array is not None:
            problem = f"no array {array!r}"
        elif len(tables) != 1:
            problem = "no array 'X' and not exactly one with two axes"
        elif max(axes.values()) > 2 or tables[0].endswith(BOUNDS):
            problem = f"one array with two axes, {tables[0]!r}, which is hardly what is meant"
        if problem is not None:
            remedies = [
                "Name one of the arrays: --array NAME, in Python zarr.open_group(...)[NAME]. ",
                "Of a cube name the features: --features A,B, in Python fit(..., features=['A', 'B']), or "
                "those along one dimension: --features DIMENSION --array NAME. ",
            ]
            labelled = any(found.document.get("dimension_names") for found in arrays.values())
            if array is None and (labelled or max(axes.values(), default=0) > 2):
                remedies.reverse()
            raise InvalidDataError(
                f"the zarr group {where} has {problem}; its arrays are {sorted(arrays) or 'none'}. "
                f"{''.join(remedies).rstrip()}"
            )
        (name,) = tables
        member = arrays[name]
    source = _decoded_source(store, f"{path}/{name}".lstrip("/"), member)
    return replace(source, chosen=f"the array {name!r} of {where}")


def _names(store: Store, path: str, group: Found) -> list[str]:
    """Return the names in a group, from the store's list and from consolidated metadata."""

    async def listed() -> list[str]:
        return [name async for name in store.list_dir(path)]

    consolidated = (group.document.get("consolidated_metadata") or {}).get("metadata") or {}
    return sorted({*(name for name in consolidated if "/" not in name), *sync(listed())})
