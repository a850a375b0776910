"""Reads past the page cache.

The page cache drops data larger than memory before they are read again. It then saves no read, and each read
costs a copy and the management of pages: several times the CPU time of the transfer
(`benchmarks/out_of_core.py`). Linux can read straight into aligned memory (O_DIRECT).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emtau_dask.dask_config import choice_setting
from emtau_dask.storage.files import fill

KEY = "emtau.direct-reads"
LEAST_BYTES = 2**20
"""Minimum decoded bytes of a direct read; for fewer, a transfer of their own takes too long."""
ALIGNED = 4096
"""Alignment of offsets, lengths and addresses (bytes), enough for nearly all disks."""
CACHED_SHARE = 0.75
"""Maximum size of data that the page cache can hold, as a share of the memory that this process may use."""
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = {
    "": ("/sys/fs/cgroup", ("memory.max", "memory.high")),
    "memory": ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes",)),
}
"""Folders of limits and names of their files, for versions 2 and 1 of cgroups."""


def passes_cache(n_bytes: int) -> bool:
    """Return whether data of ``n_bytes`` on disk, all of which each pass reads, are better read directly.

    dask's ``emtau.direct-reads`` of this process decides; "auto" means data of more than three quarters of
    the memory that this process may use. Raises `ConfigError` for an unknown value.
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


def read_directly(path: Path, begin: int = 0, size: int | None = None) -> NDArray[np.uint8] | None:
    """Return ``size`` bytes of a file, by default all from ``begin`` on, past the page cache.

    None if the file has fewer, or if this system or file system has no direct reads. Also None if the
    file cannot be read at all: an ordinary read will raise the error.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            first = begin // ALIGNED * ALIGNED
            wanted = (os.fstat(descriptor).st_size if size is None else begin + size) - first
            length = -(-wanted // ALIGNED) * ALIGNED
            held = np.empty(length + ALIGNED, np.uint8)
            room = held[-held.ctypes.data % ALIGNED :][:length]
            return room[begin - first : wanted] if fill(room, wanted, descriptor, first) >= wanted else None
        finally:
            os.close(descriptor)
    except OSError:
        return None
