"""Reads past the page cache, into buffers that are used again.

Data larger than memory push themselves out of the page cache before they are read again. The
cache then saves no read, and each costs a copy and the upkeep of pages: several times the CPU time
of the transfer (`benchmarks/out_of_core.py`). Linux can read straight into aligned memory (O_DIRECT).

Fresh memory comes from the system page by page, each filled with zeros, which takes half as long as a copy
from the page cache. malloc keeps little of what large arrays leave, and nothing of more than 32 MiB.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.dask_config import choice_setting
from emtau_dask.storage.files import fill, fresh

KEY = "emtau.direct-reads"
LEAST_BYTES = 2**20
"""Fewer bytes, decoded, are not read directly: a transfer of their own would take long."""
ALIGNED = 4096
"""Bytes; offsets, lengths and addresses are multiples of it, as nearly all disks demand."""
CACHED_SHARE = 0.75
"""Larger data, as a share of the memory that this process may use, are not expected in the page cache."""
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = {
    "": ("/sys/fs/cgroup", ("memory.max", "memory.high")),
    "memory": ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes",)),
}
"""Where limits are, and the names of their files, for versions 2 and 1 of cgroups."""
LEAST_REUSED = 2**20
"""Less is malloc's: it keeps that."""
KEPT_BYTES = 2**26
"""The most that is kept for the next reads, unless a single read takes more."""


def passes_cache(n_bytes: int) -> bool:
    """Return whether data of ``n_bytes`` on disk, all of which each pass reads, are better read directly.

    As dask's ``emtau.direct-reads`` says in this process; with "auto", where they take more than three
    quarters of the memory that this process may use. Raises `ConfigError` for any other word.
    """
    setting = choice_setting(KEY)
    if setting == "auto":
        return hasattr(os, "O_DIRECT") and n_bytes > CACHED_SHARE * usable_memory()
    return setting == "always"


@cache
def usable_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or what its cgroups allow."""
    return min(_memory_limits())


def _memory_limits() -> Iterator[int]:
    yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _lines(OWN_CGROUPS):
        _, controllers, group = line.split(":", 2)
        for controller in CGROUPS.keys() & controllers.split(","):
            root, names = CGROUPS[controller]
            inner = Path(group.lstrip("/"))
            for place, name in product((inner, *inner.parents), names):
                yield from (int(limit) for limit in _lines(root / place / name) if limit.isdigit())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def read_directly(
    path: Path,
    begin: int = 0,
    size: int | None = None,
    room_for: Callable[[int], NDArray[np.uint8]] = fresh,
) -> NDArray[np.uint8] | None:
    """Return ``size`` bytes of a file, by default all from ``begin`` on, past the page cache.

    They lie in what ``room_for`` returns for some more bytes.

    None where the file has fewer, or where this system or file system has no direct reads. Also None
    where the file cannot be read at all: an ordinary read will say why.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            first = begin // ALIGNED * ALIGNED
            wanted = (os.fstat(descriptor).st_size if size is None else begin + size) - first
            length = -(-wanted // ALIGNED) * ALIGNED
            held = room_for(length + ALIGNED)
            room = held[-held.ctypes.data % ALIGNED :][:length]
            return room[begin - first : wanted] if fill(room, wanted, descriptor, first) >= wanted else None
        finally:
            os.close(descriptor)
    except OSError:
        return None


class ReusedMemory:
    """Gives memory for reads; takes it back when the last array that lies in it is gone.

    What came back is kept only while other memory of this is in use: nothing is kept between passes, and in a
    pass of equal chunks no more is held than was in use at once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Reentrant: while it is held, Python may collect what holds other memory."""
        self._in_use = 0
        self._kept: deque[NDArray[np.uint8]] = deque()

    def room(self, size: int) -> NDArray[np.uint8]:
        """Return ``size`` bytes of any values, that nothing else refers to."""
        if size < LEAST_REUSED:
            return np.empty(size, np.uint8)
        with self._lock:
            memory = self._kept.pop() if self._kept else None
        if memory is None or len(memory) != size:
            memory = np.empty(size, np.uint8)
        with self._lock:
            self._in_use += 1
        return np.asarray(_Lent(memory, self))

    def take_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep memory to which nothing refers any more, or let it go."""
        with self._lock:
            self._in_use -= 1
            if self._in_use == 0:
                self._kept.clear()
            elif not self._kept or sum(map(len, self._kept)) + len(memory) <= KEPT_BYTES:
                self._kept.append(memory)


class _Lent:
    """Owner of memory that arrays lie in: all views of them refer to this, so it goes after the last one."""

    def __init__(self, memory: NDArray[np.uint8], reused: ReusedMemory) -> None:
        self._memory, self._reused = memory, reused

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._reused.take_back(self._memory)
