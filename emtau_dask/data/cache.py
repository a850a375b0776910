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
"""Minimum bytes of arrays that get a memory map of their own; fewer stay where malloc put them."""
ALIGNED = 64
"""Alignment of arrays in a map (bytes)."""
IDLE_SECONDS = 1800.0
"""Time without use (s) after which a new token removes what is cached for another one."""
STATE_SHARE = 4
"""Row state takes at most 1/4 of the limit, and only what rows leave free."""
ROWS, STATE = "rows", "state"
RELEASED_TOKENS = 256
"""Maximum released tokens that a process remembers; tasks that outlive their fit cache nothing."""


def mapped_copies(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return read-only copies of arrays that lie in one map of anonymous memory.

    Cached arrays would otherwise lie among what tasks allocate, and leave gaps when they are freed, which
    malloc rarely fills or returns: a process would need up to twice the bytes that it caches. Small arrays
    are returned as they are, and so are all if no memory can be mapped.
    """
    spans = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]
    if sum(spans) < MIN_MAPPED_BYTES:
        return list(arrays)
    try:
        mapped = mmap.mmap(-1, sum(spans), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return list(arrays)
    found, begin = [], 0
    for array, span in zip(arrays, spans, strict=True):
        copied = np.ndarray(array.shape, array.dtype, mapped, begin)
        copied[...] = array
        copied.setflags(write=False)
        found.append(copied)
        begin += span
    return found


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
        None where every row weighs 1.
    source_bytes : int
        Bytes that reading the whole chunk from the source took.
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
        found = (self.positions, self.rows)
        return found if self.weights is None else (*found, self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def mapped_copy(self) -> CachedRows:
        """Return the same with arrays in memory of their own."""
        positions, rows, *weights = mapped_copies(self.arrays)
        return CachedRows(positions, rows, weights[0] if weights else None, self.source_bytes)


def _covers(cached: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if len(wanted) > len(cached):
        return False
    found = np.searchsorted(cached, wanted)
    return not len(wanted) or bool(found[-1] < len(cached) and (cached[found] == wanted).all())


@dataclass(frozen=True)
class _File:
    """Cached rows in a file: the bytes of their arrays, one after another. They take no memory.

    Not in NumPy's format: Python 3.11 may fail where several threads parse headers at a time.
    """

    path: Path
    kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    source_bytes: int
    nbytes: ClassVar[int] = 0

    @classmethod
    def write(cls, folder: Path, found: CachedRows) -> _File:
        path = folder / uuid4().hex
        try:
            with path.open("xb") as file:
                for array in found.arrays:
                    file.write(array.data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return cls(path, tuple((array.dtype, array.shape) for array in found.arrays), found.source_bytes)

    def read(self, wanted: NDArray[Any]) -> tuple[CachedRows, int] | None:
        """Return the rows and the bytes read; None where one of ``wanted`` is missing."""
        with self.path.open("rb", buffering=0) as file:
            arrays = (
                np.fromfile(file, dtype, math.prod(shape)).reshape(shape) for dtype, shape in self.kinds
            )
            positions = next(arrays)
            if not _covers(positions, wanted):
                return None
            rows, *weights = arrays
            found = CachedRows(positions, rows, weights[0] if weights else None, self.source_bytes)
            return found, file.tell()


@dataclass(frozen=True, eq=False)
class _State:
    """A chunk's row state, and where it is stored."""

    stored: Hashable
    values: Mapping[str, NDArray[Any]]
    nbytes: int


_Entry = CachedRows | _File | _State


@dataclass
class _Cached:
    """What is cached for one token; ``used`` is in seconds of the monotonic clock."""

    entries: dict[tuple[str, int], _Entry] = field(default_factory=dict)
    """By `ROWS`, the name of other rows or `STATE`, and chunk."""
    folder: ScratchFolder | None = None
    writable: bool = True
    """False once a file could not be written."""
    used: float = 0.0

    def folder_for_files(self) -> Path | None:
        """Return the folder for files, made at the first call; None if none can be written."""
        if self.folder is None and self.writable:
            try:
                self.folder = ScratchFolder("emtau-cache-", dask.config.get("temporary-directory", None))
            except OSError:
                self.writable = False
        return self.folder.path if self.folder is not None and self.writable else None


class RowStore:
    """All that a process caches, for any number of threads; each holds ``lock`` while it looks or changes.

    They take it by ``with store.lock``: in a context manager of our own an interrupt could leave it held.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._tokens: dict[str, _Cached] = {}
        self._released: deque[str] = deque(maxlen=RELEASED_TOKENS)
        self._bytes = self._state_bytes = 0

    def of(self, token: str) -> _Cached | None:
        """Return what is cached for a token; None for one that was released."""
        if token in self._released:
            return None
        now = time.monotonic()
        if token not in self._tokens:
            for idle in [other for other, of in self._tokens.items() if now - of.used > IDLE_SECONDS]:
                self._remove(idle)
            self._tokens[token] = _Cached()
        self._tokens[token].used = now
        return self._tokens[token]

    def room(self, cached: _Cached, key: tuple[str, int], limit: int) -> int:
        """Return how many bytes an entry may have in memory."""
        before = cached.entries.get(key)
        free = limit - self._bytes
        if key[0] == STATE:
            free = min(free, limit // STATE_SHARE - self._state_bytes)
        return free + (before.nbytes if before else 0)

    def put(self, cached: _Cached, key: tuple[str, int], entry: _Entry | None) -> None:
        """Replace what is cached under a key, by nothing where ``entry`` is None."""
        before = cached.entries.pop(key, None)
        if isinstance(before, _File):
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
    """Do as `RowStore.release` in this process."""
    of_process(RowStore).release(token)


@dataclass(frozen=True)
class RowCache:
    """The cached rows and row state of one token, in whatever process it is; it travels into tasks.

    Attributes
    ----------
    token : str
        Of one fit alone.
    limit : int
        Bytes that a process may cache in memory, for all tokens together.
    """

    token: str
    limit: int

    def _look(self, what: str, chunk: int) -> _Entry | None:
        store = of_process(RowStore)
        with store.lock:
            cached = store.of(self.token)
            return cached.entries.get((what, chunk)) if cached else None

    def find(self, chunk: int, positions: NDArray[Any], name: str = ROWS) -> tuple[CachedRows, int] | None:
        """Return cached rows of a chunk and the bytes read from a file for them, 0 for rows in memory.

        They may be more than those at ``positions``. None where one of these is missing. Rows that were
        cached under another ``name`` are others. Those of a file stay in memory from now on where they fit.
        """
        found = self._look(name, chunk)
        if isinstance(found, CachedRows) and _covers(found.positions, positions):
            return found, 0
        read = None
        with suppress(OSError, ValueError, EOFError):
            read = found.read(positions) if isinstance(found, _File) else None
        if read is not None:
            self._keep_in_memory((name, chunk), read[0])
        return read

    def keep(self, chunk: int, found: CachedRows, name: str = ROWS) -> None:
        """Cache rows of a chunk in place of those cached before under the same name.

        They stay in memory where they fit, else go to a file where it is smaller than what the source
        would have to read. Where neither is possible, what was cached before stays.
        """
        key, store = (name, chunk), of_process(RowStore)
        if self._keep_in_memory(key, found):
            return
        with store.lock:
            cached = store.of(self.token)
            folder = cached.folder_for_files() if cached and found.nbytes < found.source_bytes else None
        if folder is None:
            return
        file = None
        with suppress(OSError):
            file = _File.write(folder, found)
        with store.lock:
            cached = store.of(self.token)
            if cached:
                cached.writable = file is not None
                if file is not None:
                    store.put(cached, key, file)
                return
        shutil.rmtree(folder, ignore_errors=True)

    def _keep_in_memory(self, key: tuple[str, int], found: CachedRows) -> bool:
        return self._fits(key, found.nbytes) and self._put(key, found.mapped_copy())

    def _fits(self, key: tuple[str, int], nbytes: int) -> bool:
        """Return whether an entry has room now: whether it is worth a copy."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.of(self.token)
            return cached is not None and nbytes <= store.room(cached, key, self.limit)

    def _put(self, key: tuple[str, int], entry: CachedRows | _State) -> bool:
        """Replace what is cached under a key, where the entry has room; return whether it has."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.of(self.token)
            fits = cached is not None and entry.nbytes <= store.room(cached, key, self.limit)
            if cached is not None and fits:
                store.put(cached, key, entry)
        return fits

    def drop(self, chunk: int, name: str = ROWS) -> None:
        """Remove the rows of a chunk that are cached under a name."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.of(self.token)
            if cached and (name, chunk) in cached.entries:
                store.put(cached, (name, chunk), None)

    def find_state(self, chunk: int, stored: Hashable) -> Mapping[str, NDArray[Any]] | None:
        """Return a chunk's row state by name; None unless that which is ``stored`` there is cached."""
        found = self._look(STATE, chunk)
        return found.values if isinstance(found, _State) and found.stored == stored else None

    def keep_state(
        self, chunk: int, values: Mapping[str, NDArray[Any]], stored: Hashable | None = None
    ) -> None:
        """Cache a chunk's row state by name, made read-only, in place of that cached before.

        ``stored`` identifies the stored state, None if it is not stored yet (`record_stored_states`). If the
        quarter of the limit has no room, nothing is cached.
        """
        arrays, key, entry, nbytes = list(values.values()), (STATE, chunk), None, 0
        for array in arrays:
            array.setflags(write=False)
            nbytes += array.nbytes
        if nbytes < MIN_MAPPED_BYTES:
            entry = _State(stored, values, nbytes)
        elif self._fits(key, nbytes):
            entry = _State(stored, dict(zip(values, mapped_copies(arrays), strict=True)), nbytes)
        store = of_process(RowStore)
        with store.lock:
            cached = store.of(self.token)
            if cached is not None:
                fits = nbytes <= store.room(cached, key, self.limit)
                store.put(cached, key, entry if fits else None)

    def record_stored_states(self, stored: Mapping[int, Hashable | None]) -> None:
        """Record which stored state belongs to what is cached, by chunk; for None the cached state goes."""
        store = of_process(RowStore)
        with store.lock:
            cached = store.of(self.token)
            if cached is None:
                return
            for chunk, key in stored.items():
                found = cached.entries.get((STATE, chunk))
                if key is None:
                    store.put(cached, (STATE, chunk), None)
                elif isinstance(found, _State) and found.stored is None:
                    cached.entries[STATE, chunk] = _State(key, found.values, found.nbytes)
