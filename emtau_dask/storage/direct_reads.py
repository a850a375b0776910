"""Reads past the page cache.

Data larger than memory push themselves out of the page cache before they are read again. The
cache then saves no read, and each costs a copy and the upkeep of pages: several times the CPU time
of the transfer (`benchmarks/out_of_core.py`). Linux can read straight into aligned memory (O_DIRECT).
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


def read_directly(path: Path, begin: int = 0, size: int | None = None) -> NDArray[np.uint8] | None:
    """Return ``size`` bytes of a file, by default all from ``begin`` on, past the page cache.

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
            held = np.empty(length + ALIGNED, np.uint8)
            room = held[-held.ctypes.data % ALIGNED :][:length]
            return room[begin - first : wanted] if fill(room, wanted, descriptor, first) >= wanted else None
        finally:
            os.close(descriptor)
    except OSError:
        return None
