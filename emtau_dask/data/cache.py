"""Active rows and row state that a process keeps between passes.

Each fit has a token, under which a process caches. One limit of bytes in memory holds for all tokens
together; rows beyond it go to files in a temporary folder. What is not cached, or cannot be written or
read back, is read from its source again.
"""

from __future__ import annotations

import math
import mmap
import shutil
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import dask
import numpy as np
from numpy.typing import NDArray

from emtau_dask.process import of_process
from emtau_dask.storage.files import ScratchFolder

MIN_MAPPED_BYTES = 2**18
"""Minimum size (bytes) of arrays that are copied into a memory map of their own."""
ALIGNMENT = 64
"""Alignment of arrays in a map (bytes)."""
MAX_IDLE_SECONDS = 1800.0
"""Maximum time without use (s). Then the cache of a token is removed when the next token is new."""
STATE_SHARE = 4
"""Row state takes at most 1/STATE_SHARE of the limit, and only memory that rows do not need."""
ROWS, STATE = "rows", "state"
MAX_RELEASED_TOKENS = 256
"""Maximum number of released tokens that a process remembers. Tasks that outlive their fit cache nothing."""


def mapped_copies(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return read-only copies of arrays, all in one map of anonymous memory.

    Without the map a process needs up to twice the bytes that it caches: cached arrays lie between those that
    tasks allocate, and malloc rarely reuses or returns the gaps that freed ones leave. Small arrays are
    returned as they are, and so are all arrays if no memory can be mapped.
    """
    spans = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    if sum(spans) < MIN_MAPPED_BYTES:
        return list(arrays)
    try:
        mapped = mmap.mmap(-1, sum(spans), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return list(arrays)
    copies, begin = [], 0
    for array, span in zip(arrays, spans, strict=True):
        copied = np.ndarray(array.shape, array.dtype, mapped, begin)
        copied[...] = array
        copied.setflags(write=False)
        copies.append(copied)
        begin += span
    return copies


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows of a chunk.

    Attributes
    ----------
    positions : ndarray of shape (n,), integers
        Row numbers within the chunk, ascending.
    rows : ndarray of shape (n, d)
        In C order, of the source's dtype.
    weights : ndarray of shape (n,) or None
        None if every row weighs 1.
    source_bytes : int
        Bytes read from the source for the whole chunk.
    """

    positions: NDArray[Any]
    rows: NDArray[Any]
    weights: NDArray[np.float64] | None
    source_bytes: int

    def __post_init__(self) -> None:
        for array in self.arrays:
            array.setflags(write=False)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Positions, rows, and weights if there are any."""
        arrays = (self.positions, self.rows)
        return arrays if self.weights is None else (*arrays, self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def mapped_copy(self) -> CachedRows:
        """Return the same rows with arrays from `mapped_copies`."""
        positions, rows, *weights = mapped_copies(self.arrays)
        return CachedRows(positions, rows, weights[0] if weights else None, self.source_bytes)


def _covers(cached: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if len(wanted) > len(cached):
        return False
    indices = np.searchsorted(cached, wanted)
    return not len(wanted) or bool(indices[-1] < len(cached) and (cached[indices] == wanted).all())


@dataclass(frozen=True)
class _CachedFile:
    """Cached rows in a file: the bytes of their arrays, one after another. They take no memory.

    The file has no NumPy header, because Python 3.11 may fail if several threads parse headers at once.
    """

    path: Path
    kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    source_bytes: int
    nbytes: ClassVar[int] = 0

    @classmethod
    def write(cls, folder: Path, rows: CachedRows) -> _CachedFile:
        path = folder / uuid4().hex
        try:
            with path.open("xb") as file:
                for array in rows.arrays:
                    file.write(array.data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return cls(path, tuple((array.dtype, array.shape) for array in rows.arrays), rows.source_bytes)

    def read(self, wanted: NDArray[Any]) -> tuple[CachedRows, int] | None:
        """Return the rows and the bytes read; None if one of ``wanted`` is missing."""
        with self.path.open("rb", buffering=0) as file:
            arrays = (
                np.fromfile(file, dtype, math.prod(shape)).reshape(shape) for dtype, shape in self.kinds
            )
            positions = next(arrays)
            if not _covers(positions, wanted):
                return None
            rows, *weights = arrays
            cached = CachedRows(positions, rows, weights[0] if weights else None, self.source_bytes)
            return cached, file.tell()


@dataclass(frozen=True, eq=False)
class _CachedState:
    """A chunk's row state; ``stored`` identifies the stored copy, None if there is none yet."""

    stored: Hashable
    values: Mapping[str, NDArray[Any]]
    nbytes: int


_Entry = CachedRows | _CachedFile | _CachedState


@dataclass
class _TokenCache:
    """What is cached for one token; ``used`` is in seconds of the monotonic clock."""

    entries: dict[tuple[str, int], _Entry] = field(default_factory=dict)
    """By kind (`ROWS`, the name of a sample, or `STATE`) and chunk."""
    folder: ScratchFolder | None = None
    writable: bool = True
    """False once a file could not be written."""
    used: float = 0.0

    def folder_for_files(self) -> Path | None:
        """Return the folder for files, created at the first call; None if none can be written."""
        if self.folder is None and self.writable:
            try:
                self.folder = ScratchFolder("emtau-cache-", dask.config.get("temporary-directory", None))
            except OSError:
                self.writable = False
        return self.folder.path if self.folder is not None and self.writable else None


class RowStore:
    """All that a process caches. Threads hold ``lock`` while they read or change it.

    They acquire it by ``with store.lock``: an interrupt in a context manager written in Python could leave it
    locked.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._tokens: dict[str, _TokenCache] = {}
        self._released: deque[str] = deque(maxlen=MAX_RELEASED_TOKENS)
        self._bytes = self._state_bytes = 0

    def for_token(self, token: str) -> _TokenCache | None:
        """Return what is cached for a token; None for one that was released."""
        if token in self._released:
            return None
        now = time.monotonic()
        if token not in self._tokens:
            idle = [other for other, cache in self._tokens.items() if now - cache.used > MAX_IDLE_SECONDS]
            for other in idle:
                self._remove(other)
            self._tokens[token] = _TokenCache()
        self._tokens[token].used = now
        return self._tokens[token]

    def free_bytes(self, cached: _TokenCache, key: tuple[str, int], limit: int) -> int:
        """Return the maximum size of an entry in memory (bytes)."""
        before = cached.entries.get(key)
        free = limit - self._bytes
        if key[0] == STATE:
            free = min(free, limit // STATE_SHARE - self._state_bytes)
        return free + (before.nbytes if before else 0)

    def put(self, cached: _TokenCache, key: tuple[str, int], entry: _Entry | None) -> None:
        """Replace what is cached under a key; remove it if ``entry`` is None."""
        before = cached.entries.pop(key, None)
        if isinstance(before, _CachedFile):
            with suppress(OSError):
                before.path.unlink()
        if entry is not None:
            cached.entries[key] = entry
        added = (entry.nbytes if entry else 0) - (before.nbytes if before else 0)
        self._bytes += added
        self._state_bytes += added if key[0] == STATE else 0

    def release(self, token: str) -> None:
        """Remove all that is cached for a token; nothing will be cached for it again."""
        with self.lock:
            self._released.append(token)
            self._remove(token)

    def _remove(self, token: str) -> None:
        cached = self._tokens.pop(token, None)
        if cached is not None:
            for key in list(cached.entries):
                self.put(cached, key, None)
            if cached.folder is not None:
                cached.folder.remove()


def release_rows(token: str) -> None:
    """Remove all that this process caches for a token; see `RowStore.release`."""
    of_process(RowStore).release(token)


@dataclass(frozen=True)
class CachedName:
    """The token and the name under which rows are cached."""

    token: str
    name: str

    def chunks(self) -> dict[int, Hashable]:
        """Return the chunks whose rows this process caches, with what identifies their cached row state.

        That is None for a chunk without one.
        """
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            entries = {} if cached is None else cached.entries
            states = {chunk: entries.get((STATE, chunk)) for name, chunk in entries if name == self.name}
        return {chunk: getattr(state, "stored", None) for chunk, state in states.items()}


@dataclass(frozen=True)
class RowCache:
    """The cached rows and row state of one token in the current process. Tasks take it along.

    Attributes
    ----------
    token : str
        Identifies one fit.
    limit : int
        Maximum bytes that a process caches in memory, for all tokens together.
    """

    token: str
    limit: int

    def named(self, name: str = ROWS) -> CachedName:
        """Return where rows are cached under a name."""
        return CachedName(self.token, name)

    def _entry(self, kind: str, chunk: int) -> _Entry | None:
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            return cached.entries.get((kind, chunk)) if cached else None

    def find(self, chunk: int, positions: NDArray[Any], name: str = ROWS) -> tuple[CachedRows, int] | None:
        """Return the rows of a chunk that are cached under a name, and the bytes read from a file for them.

        They may be more than those at ``positions``. The result is None if one of these is missing. Rows read
        from a file stay in memory if they fit.
        """
        entry = self._entry(name, chunk)
        if isinstance(entry, CachedRows) and _covers(entry.positions, positions):
            return entry, 0
        read = None
        with suppress(OSError, ValueError, EOFError):
            read = entry.read(positions) if isinstance(entry, _CachedFile) else None
        if read is not None:
            self._keep_in_memory((name, chunk), read[0])
        return read

    def keep(self, chunk: int, rows: CachedRows, name: str = ROWS) -> None:
        """Cache rows of a chunk in place of those cached before under the same name.

        They stay in memory if they fit. Otherwise they are written to a file, if it is smaller than what the
        source would have to read. If neither is possible, what was cached before stays.
        """
        key, store = (name, chunk), of_process(RowStore)
        if self._keep_in_memory(key, rows):
            return
        with store.lock:
            cached = store.for_token(self.token)
            folder = cached.folder_for_files() if cached and rows.nbytes < rows.source_bytes else None
        if folder is None:
            return
        file = None
        with suppress(OSError):
            file = _CachedFile.write(folder, rows)
        with store.lock:
            cached = store.for_token(self.token)
            if cached:
                cached.writable = file is not None
                if file is not None:
                    store.put(cached, key, file)
                return
        shutil.rmtree(folder, ignore_errors=True)

    def _keep_in_memory(self, key: tuple[str, int], rows: CachedRows) -> bool:
        return self._fits(key, rows.nbytes) and self._put(key, rows.mapped_copy())

    def _fits(self, key: tuple[str, int], nbytes: int) -> bool:
        """Return whether an entry of so many bytes fits now, so that a copy is worth its time."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            return cached is not None and nbytes <= store.free_bytes(cached, key, self.limit)

    def _put(self, key: tuple[str, int], entry: CachedRows | _CachedState) -> bool:
        """Replace what is cached under a key if the entry fits; return whether it does."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            fits = cached is not None and entry.nbytes <= store.free_bytes(cached, key, self.limit)
            if cached is not None and fits:
                store.put(cached, key, entry)
        return fits

    def drop(self, chunk: int, name: str = ROWS) -> None:
        """Remove the rows of a chunk that are cached under a name."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            if cached and (name, chunk) in cached.entries:
                store.put(cached, (name, chunk), None)

    def find_state(self, chunk: int, stored: Hashable) -> Mapping[str, NDArray[Any]] | None:
        """Return a chunk's row state by name; None if the state that ``stored`` identifies is not cached."""
        entry = self._entry(STATE, chunk)
        return entry.values if isinstance(entry, _CachedState) and entry.stored == stored else None

    def keep_state(
        self, chunk: int, values: Mapping[str, NDArray[Any]], stored: Hashable | None = None
    ) -> None:
        """Cache a chunk's row state by name, in place of that cached before; its arrays become read-only.

        ``stored`` identifies the stored state, None if it is not stored yet (`record_stored_states`). If the
        state does not fit, nothing is cached.
        """
        arrays, key, entry, nbytes = list(values.values()), (STATE, chunk), None, 0
        for array in arrays:
            array.setflags(write=False)
            nbytes += array.nbytes
        if nbytes < MIN_MAPPED_BYTES:
            entry = _CachedState(stored, values, nbytes)
        elif self._fits(key, nbytes):
            entry = _CachedState(stored, dict(zip(values, mapped_copies(arrays), strict=True)), nbytes)
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            if cached is not None:
                fits = nbytes <= store.free_bytes(cached, key, self.limit)
                store.put(cached, key, entry if fits else None)

    def record_stored_states(self, stored: Mapping[int, Hashable | None]) -> None:
        """Record by chunk which stored state each cached one equals; None removes the cached state."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.for_token(self.token)
            if cached is None:
                return
            for chunk, key in stored.items():
                entry = cached.entries.get((STATE, chunk))
                if key is None:
                    store.put(cached, (STATE, chunk), None)
                elif isinstance(entry, _CachedState) and entry.stored is None:
                    cached.entries[STATE, chunk] = _CachedState(key, entry.values, entry.nbytes)
