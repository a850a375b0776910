"""Some rows of chunks, and the state of all, kept in this process so that they need not be read again.

What a process keeps belongs to a token; it stays in memory up to a number of
bytes for all tokens together, beyond that rows go to files of a temporary folder. It is
only a cache: whatever it lacks, or cannot write or read back, is read from where it came.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import dask
import numpy as np
from numpy.typing import NDArray

from emtau_dask.io.files import ScratchFolder

IDLE_SECONDS = 1800.0
"""A token that no task has used for so long makes room when another one comes."""
STATE_SHARE = 4
"""One part in so many of the bytes that row state may take: it is kept from the first pass on, rows later."""
RELEASED_TOKENS = 256
"""How many released tokens a process remembers, lest tasks that outlive their fit leave anything."""


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
        """All that is kept."""
        found = (self.positions, self.rows)
        return found if self.weights is None else (*found, self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def _covers(held: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if len(wanted) > len(held):
        return False
    found = np.searchsorted(held, wanted)
    return not len(wanted) or bool(found[-1] < len(held) and (held[found] == wanted).all())


@dataclass(frozen=True)
class _File:
    """Cached rows in a file: their arrays, one after another, in NumPy's format.

    Attributes
    ----------
    path : Path
    weighted : bool
    source_bytes : int
    """

    path: Path
    weighted: bool
    source_bytes: int

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
    """A chunk's row state, and the digest of the object that holds it."""

    sha256: str
    values: Mapping[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.values.values())


@dataclass
class _Kept:
    """What is kept for one token.

    Attributes
    ----------
    rows : dict of int to CachedRows
        In memory, by chunk.
    files : dict of int to _File
        The other chunks that are there.
    states : dict of int to _State
        In memory, by chunk.
    folder : ScratchFolder or None
        Where files are; None before the first one.
    writable : bool
        False once a file could not be written.
    used : float
        When, by the monotonic clock, in seconds.
    """

    rows: dict[int, CachedRows] = field(default_factory=dict)
    files: dict[int, _File] = field(default_factory=dict)
    states: dict[int, _State] = field(default_factory=dict)
    folder: ScratchFolder | None = None
    writable: bool = True
    used: float = 0.0


class _Store:
    """All that a process keeps, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._released: deque[str] = deque(maxlen=RELEASED_TOKENS)
        self._held = 0
        self._held_of_states = 0

    def look(self, token: str, chunk: int) -> CachedRows | _File | None:
        with self._lock:
            kept = self._of(token)
            return None if kept is None else kept.rows.get(chunk) or kept.files.get(chunk)

    def keep_in_memory(self, token: str, chunk: int, found: CachedRows, limit: int) -> bool:
        """Return whether there was room for the rows, or is no need to keep them."""
        with self._lock:
            kept = self._of(token)
            if kept is None:
                return True
            before = kept.rows.get(chunk)
            if self._held - (before.nbytes if before else 0) + found.nbytes > limit:
                return False
            self._forget(kept, chunk)
            kept.rows[chunk] = found
            self._held += found.nbytes
            return True

    def keep_in_file(self, token: str, chunk: int, found: CachedRows) -> None:
        with self._lock:
            kept = self._of(token)
            folder = None if kept is None or not kept.writable else self._folder(kept)
        if folder is None:
            return
        file = None
        with suppress(OSError):
            file = _File.write(folder, found)
        with self._lock:
            kept = self._of(token)
            if kept is not None:
                kept.writable = file is not None
                if file is not None:
                    self._forget(kept, chunk)
                    kept.files[chunk] = file
                return
        shutil.rmtree(folder, ignore_errors=True)

    def drop(self, token: str, chunk: int) -> None:
        with self._lock:
            kept = self._of(token)
            if kept is not None:
                self._forget(kept, chunk)

    def look_at_state(self, token: str, chunk: int) -> _State | None:
        with self._lock:
            kept = self._of(token)
            return None if kept is None else kept.states.get(chunk)

    def keep_state(self, token: str, chunk: int, state: _State, limit: int) -> None:
        """Keep a chunk's state, where there is room, instead of that kept before."""
        with self._lock:
            kept = self._of(token)
            if kept is None:
                return
            self._forget_state(kept, chunk)
            room = min(limit - self._held, limit // STATE_SHARE - self._held_of_states)
            if state.nbytes <= room:
                kept.states[chunk] = state
                self._hold_state(state.nbytes)

    def drop_state(self, token: str, chunk: int) -> None:
        with self._lock:
            kept = self._of(token)
            if kept is not None:
                self._forget_state(kept, chunk)

    def release(self, token: str) -> None:
        with self._lock:
            self._released.append(token)
            self._remove(token)

    def _of(self, token: str) -> _Kept | None:
        """Return what is kept for a token, nothing yet for a new one; None for one that was released."""
        if token in self._released:
            return None
        now = time.monotonic()
        if token not in self._kept:
            for idle in [other for other, kept in self._kept.items() if now - kept.used > IDLE_SECONDS]:
                self._remove(idle)
            self._kept[token] = _Kept()
        self._kept[token].used = now
        return self._kept[token]

    def _folder(self, kept: _Kept) -> Path | None:
        """Return where files go; None where there is no place for them."""
        if kept.folder is None:
            try:
                kept.folder = ScratchFolder("emtau-cache-", dask.config.get("temporary-directory", None))
            except OSError:
                kept.writable = False
                return None
        return kept.folder.path

    def _forget(self, kept: _Kept, chunk: int) -> None:
        rows, file = kept.rows.pop(chunk, None), kept.files.pop(chunk, None)
        if rows is not None:
            self._held -= rows.nbytes
        if file is not None:
            with suppress(OSError):
                file.path.unlink()

    def _forget_state(self, kept: _Kept, chunk: int) -> None:
        state = kept.states.pop(chunk, None)
        if state is not None:
            self._hold_state(-state.nbytes)

    def _hold_state(self, n_bytes: int) -> None:
        self._held += n_bytes
        self._held_of_states += n_bytes

    def _remove(self, token: str) -> None:
        kept = self._kept.pop(token, None)
        if kept is not None:
            self._held -= sum(rows.nbytes for rows in kept.rows.values())
            self._hold_state(-sum(state.nbytes for state in kept.states.values()))
            if kept.folder is not None:
                kept.folder.remove()


_STORE = _Store()


def release_rows(token: str) -> None:
    """Remove all that this process keeps for a token; nothing will be kept for it again."""
    _STORE.release(token)


@dataclass(frozen=True)
class RowCache:
    """The rows and row state that belong to one token, in whatever process it is; travels into tasks.

    Attributes
    ----------
    token : str
        Nobody else's, ever.
    limit : int
        Bytes that a process may hold in memory, for all tokens together.
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
        found = _STORE.look(self.token, chunk)
        if isinstance(found, CachedRows):
            return (found, 0) if _covers(found.positions, positions) else None
        try:
            return None if found is None else found.read(positions)
        except (OSError, ValueError, EOFError):
            return None

    def keep(self, chunk: int, found: CachedRows) -> None:
        """Keep rows of a chunk instead of those that were kept of it before.

        In memory where they fit, else in a file where that is smaller than what
        would have to be read from the source. Where neither can be, what was
        kept before stays.
        """
        kept = _STORE.keep_in_memory(self.token, chunk, found, self.limit)
        if not kept and found.nbytes < found.source_bytes:
            _STORE.keep_in_file(self.token, chunk, found)

    def drop(self, chunk: int) -> None:
        """Remove the rows of a chunk."""
        _STORE.drop(self.token, chunk)

    def find_state(self, chunk: int, sha256: str) -> Mapping[str, NDArray[Any]] | None:
        """Return the state of a chunk's rows, by name, from memory.

        None where this process does not have the one that is stored in an object of this digest.
        """
        found = _STORE.look_at_state(self.token, chunk)
        return found.values if found is not None and found.sha256 == sha256 else None

    def keep_state(self, chunk: int, sha256: str, values: Mapping[str, NDArray[Any]]) -> None:
        """Keep the state of a chunk's rows, where a quarter of the limit has room, instead of that before.

        Parameters
        ----------
        chunk : int
        sha256 : str
            Of the object that holds it.
        values : mapping of str to ndarray
            Not to be written from now on.
        """
        for array in values.values():
            array.setflags(write=False)
        _STORE.keep_state(self.token, chunk, _State(sha256, values), self.limit)

    def drop_state(self, chunk: int) -> None:
        """Remove the state of a chunk's rows."""
        _STORE.drop_state(self.token, chunk)
