"""Some rows of chunks, and the state of all, cached by a process so that they need not be read again.

What a process caches belongs to a token, which every fit has for itself. It stays in memory up to a
number of bytes for all tokens together; beyond that, rows go to files of a temporary folder. Whatever
the cache lacks, or cannot write or read back, is read from where it came.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import dask
import numpy as np
from numpy.typing import NDArray

from emtau_dask.io.files import ScratchFolder

IDLE_SECONDS = 1800.0
"""What is cached for a token that no task has used for so long is removed when a task brings a new token."""
STATE_SHARE = 4
"""Row state may take one part in so many of the bytes: it is cached before rows are."""
ROWS, STATE = "rows", "state"
"""What is cached of a chunk."""
RELEASED_TOKENS = 256
"""How many released tokens a process remembers, so that tasks that outlive their fit cache nothing."""


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Rows of a chunk.

    Attributes
    ----------
    positions : ndarray of shape (n,), integers
        Of the rows in the chunk, ascending.
    rows : ndarray of shape (n, d)
        In C order, of the type that is stored.
    weights : ndarray of shape (n,) or None
        None where every row weighs 1.
    source_bytes : int
        Bytes that were read from the source for the whole chunk.
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
        """All that is cached."""
        found = (self.positions, self.rows)
        return found if self.weights is None else (*found, self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def _covers(cached: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if len(wanted) > len(cached):
        return False
    found = np.searchsorted(cached, wanted)
    return not len(wanted) or bool(found[-1] < len(cached) and (cached[found] == wanted).all())


@dataclass(frozen=True)
class _File:
    """Cached rows in a file: their arrays, one after another, in NumPy's format."""

    path: Path
    weighted: bool
    source_bytes: int
    nbytes: ClassVar[int] = 0
    """Of memory."""

    @classmethod
    def write(cls, folder: Path, found: CachedRows) -> _File:
        path = folder / uuid4().hex
        try:
            with path.open("xb") as file:
                for array in found.arrays:
                    np.save(file, array, allow_pickle=False)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return cls(path, found.weights is not None, found.source_bytes)

    def read(self, wanted: NDArray[Any]) -> tuple[CachedRows, int] | None:
        """Return the rows and the bytes read, None where some of ``wanted`` are not among them."""
        with self.path.open("rb") as file:
            positions = np.load(file, allow_pickle=False)
            if not _covers(positions, wanted):
                return None
            rows = np.load(file, allow_pickle=False)
            weights = np.load(file, allow_pickle=False) if self.weighted else None
            return CachedRows(positions, rows, weights, self.source_bytes), file.tell()


@dataclass(frozen=True, eq=False)
class _State:
    """A chunk's row state, and the digest of the object that it is stored in."""

    sha256: str
    values: Mapping[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.values.values())


_Entry = CachedRows | _File | _State


@dataclass
class _Cached:
    """What is cached for one token, by `ROWS` or `STATE` and chunk.

    ``writable`` is False once a file could not be written; ``used`` is in seconds of the monotonic clock.
    """

    entries: dict[tuple[str, int], _Entry] = field(default_factory=dict)
    folder: ScratchFolder | None = None
    writable: bool = True
    used: float = 0.0


class RowStore:
    """All that a process caches, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, _Cached] = {}
        self._released: deque[str] = deque(maxlen=RELEASED_TOKENS)
        self._bytes = 0
        self._state_bytes = 0

    def look(self, token: str, what: str, chunk: int) -> _Entry | None:
        """Return what is cached of a chunk, `ROWS` or `STATE`; rows may be in a file."""
        with self._of(token) as cached:
            return cached.entries.get((what, chunk)) if cached else None

    def drop(self, token: str, what: str, chunk: int) -> None:
        """Remove what is cached of a chunk, `ROWS` or `STATE`."""
        with self._of(token) as cached:
            if cached:
                self._put(cached, (what, chunk), None)

    def keep_rows(self, token: str, chunk: int, found: CachedRows, limit: int) -> None:
        """Cache rows in memory where they fit, else in a file where that saves bytes to read."""
        with self._of(token) as cached:
            if cached is None:
                return
            before = cached.entries.get((ROWS, chunk))
            if self._bytes - (before.nbytes if before else 0) + found.nbytes <= limit:
                self._put(cached, (ROWS, chunk), found)
                return
            folder = _folder(cached) if found.nbytes < found.source_bytes else None
        if folder is None:
            return
        file = None
        with suppress(OSError):
            file = _File.write(folder, found)
        with self._of(token) as cached:
            if cached:
                cached.writable = file is not None
                if file is not None:
                    self._put(cached, (ROWS, chunk), file)
                return
        shutil.rmtree(folder, ignore_errors=True)

    def keep_state(self, token: str, chunk: int, state: _State, limit: int) -> None:
        """Cache a chunk's state, where there is room, instead of that cached before."""
        with self._of(token) as cached:
            if cached:
                self._put(cached, (STATE, chunk), None)
                room = min(limit - self._bytes, limit // STATE_SHARE - self._state_bytes)
                if state.nbytes <= room:
                    self._put(cached, (STATE, chunk), state)

    def release(self, token: str) -> None:
        """Remove all that is cached for a token; nothing will be cached for it again."""
        with self._lock:
            self._released.append(token)
            self._remove(token)

    @contextmanager
    def _of(self, token: str) -> Iterator[_Cached | None]:
        """Give what is cached for a token, with the lock; None for one that was released."""
        with self._lock:
            if token in self._released:
                yield None
                return
            now = time.monotonic()
            if token not in self._tokens:
                for idle in [other for other, of in self._tokens.items() if now - of.used > IDLE_SECONDS]:
                    self._remove(idle)
                self._tokens[token] = _Cached()
            self._tokens[token].used = now
            yield self._tokens[token]

    def _put(self, cached: _Cached, key: tuple[str, int], entry: _Entry | None) -> None:
        """Cache an entry, or nothing, in place of what was cached before."""
        before = cached.entries.pop(key, None)
        if isinstance(before, _File):
            with suppress(OSError):
                before.path.unlink()
        if entry is not None:
            cached.entries[key] = entry
        added = (entry.nbytes if entry else 0) - (before.nbytes if before else 0)
        self._bytes += added
        self._state_bytes += added if key[0] == STATE else 0

    def _remove(self, token: str) -> None:
        cached = self._tokens.pop(token, None)
        if cached is not None:
            for (what, _), entry in cached.entries.items():
                self._bytes -= entry.nbytes
                self._state_bytes -= entry.nbytes if what == STATE else 0
            if cached.folder is not None:
                cached.folder.remove()


def _folder(cached: _Cached) -> Path | None:
    """Return where files go; None where there is no place for them."""
    if cached.folder is None and cached.writable:
        try:
            cached.folder = ScratchFolder("emtau-cache-", dask.config.get("temporary-directory", None))
        except OSError:
            cached.writable = False
    return cached.folder.path if cached.folder is not None and cached.writable else None


_STORE = RowStore()


def process_store() -> RowStore:
    """Return what this process caches."""
    return _STORE


def release_rows(token: str) -> None:
    """Remove all that this process caches for a token; nothing will be cached for it again."""
    process_store().release(token)


@dataclass(frozen=True)
class RowCache:
    """The rows and row state that belong to one token, in whatever process it is; travels into tasks.

    Attributes
    ----------
    token : str
        Of one fit alone.
    limit : int
        Bytes that a process may cache in memory, for all tokens together.
    """

    token: str
    limit: int

    def find(self, chunk: int, positions: NDArray[Any]) -> tuple[CachedRows, int] | None:
        """Return rows of a chunk, among them all those at ``positions``, and the bytes read for them.

        Returns
        -------
        tuple of (CachedRows, int) or None
            0 bytes for rows in memory. None where this process does not have them all.
        """
        found = process_store().look(self.token, ROWS, chunk)
        if isinstance(found, CachedRows) and _covers(found.positions, positions):
            return found, 0
        with suppress(OSError, ValueError, EOFError):
            return found.read(positions) if isinstance(found, _File) else None
        return None

    def keep(self, chunk: int, found: CachedRows) -> None:
        """Cache rows of a chunk instead of those that were cached of it before.

        In memory where they fit, else in a file where that is smaller than what
        would have to be read from the source. Where neither can be, what was
        cached before stays.
        """
        process_store().keep_rows(self.token, chunk, found, self.limit)

    def drop(self, chunk: int) -> None:
        """Remove the rows of a chunk."""
        process_store().drop(self.token, ROWS, chunk)

    def find_state(self, chunk: int, sha256: str) -> Mapping[str, NDArray[Any]] | None:
        """Return the state of a chunk's rows, by name, from memory.

        None where this process does not have the one that is stored in an object of this digest.
        """
        found = process_store().look(self.token, STATE, chunk)
        return found.values if isinstance(found, _State) and found.sha256 == sha256 else None

    def keep_state(self, chunk: int, sha256: str, values: Mapping[str, NDArray[Any]]) -> None:
        """Cache the state of a chunk's rows, where a quarter of the limit has room, instead of that before.

        Parameters
        ----------
        chunk : int
        sha256 : str
            Of the object that it is stored in.
        values : mapping of str to ndarray
            Made read-only.
        """
        for array in values.values():
            array.setflags(write=False)
        process_store().keep_state(self.token, chunk, _State(sha256, values), self.limit)

    def drop_state(self, chunk: int) -> None:
        """Remove the state of a chunk's rows."""
        process_store().drop(self.token, STATE, chunk)
