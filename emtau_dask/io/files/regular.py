"""Files that may be read: regular ones, no longer than expected; a pipe would wait for ever."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError


@contextmanager
def opened_regular(path: str | Path) -> Iterator[tuple[int, int]]:
    """Open a file; yield its descriptor and its size in bytes.

    Raises
    ------
    InvalidDataError
        It is a pipe, a socket or a device.
    OSError
        It cannot be opened, or is a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(about.st_mode):
            raise InvalidDataError(f"{path} is no regular file but {_kind(about.st_mode)}; give a file.")
        yield descriptor, about.st_size
    finally:
        os.close(descriptor)


def check_regular(path: str | Path) -> int:
    """Return the size of a file in bytes; raises as `opened_regular` does."""
    with opened_regular(path) as (_, size):
        return size


def stream_at(path: str) -> str | None:
    """Return what is at a path that is neither a file nor a folder, with an article; it is not opened."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  a URL, too, is the path of nothing
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _kind(mode)


def fresh(size: int) -> NDArray[np.uint8]:
    """Return ``size`` bytes of any values."""
    return np.empty(size, np.uint8)


def read_regular(
    path: str | Path,
    start: int,
    stop: int | None,
    limit: int,
    room_for: Callable[[int], NDArray[np.uint8]] = fresh,
) -> NDArray[np.uint8]:
    """Return bytes ``start`` to ``stop`` of a file, those that it has; from its end if ``start`` < 0.

    They lie in what ``room_for`` returns for their number.

    Raises
    ------
    InvalidDataError
        They are more than ``limit`` bytes; or as `opened_regular` raises, which also raises OSError.
    """
    with opened_regular(path) as (descriptor, size):
        begin = max(0, size + start) if start < 0 else min(start, size)
        wanted = max(0, (size if stop is None else min(stop, size)) - begin)
        if wanted > limit:
            raise InvalidDataError(
                f"{path} has {wanted:,} bytes to read, but at most {limit:,} belong to what is declared. "
                "Restore it, or write it again."
            )
        room = room_for(wanted)
        return room[: fill(room, wanted, descriptor, begin)]


def fill(room: NDArray[np.uint8], wanted: int, descriptor: int, begin: int) -> int:
    """Read from ``begin`` on until ``wanted`` bytes are there or the file ends; return how many there are.

    There may be more, where the room is longer than ``wanted``.
    """
    done = 0
    while done < wanted and (count := os.preadv(descriptor, [room.data[done:]], begin + done)):
        done += count
    return done


def paths_below(folder: str | Path, *, changing: bool = False) -> Iterator[str]:
    """Yield the paths of all files below a folder, at any depth; links to folders are not followed.

    Parameters
    ----------
    folder : str or Path
    changing : bool, default=False
        Whether folders may come and go meanwhile, this one too.

    Raises
    ------
    OSError
        A folder cannot be listed. Python's own `Path.rglob` and `os.walk` take that for an empty one.
    """

    def unlisted(error: OSError) -> None:
        if not (changing and isinstance(error, FileNotFoundError)):
            raise error

    for inner, _, names in os.walk(folder, onerror=unlisted):
        yield from (f"{inner}/{name}" for name in names)


def check_listed(folder: str | Path) -> None:
    """Raise `OSError` where a folder cannot be listed."""
    with os.scandir(folder):
        pass


def followed(path: str | Path) -> Path:
    """Return where a path leads, links followed; a link that leads to itself stays as it is.

    Up to Python 3.12 `Path.resolve` raises a RuntimeError for such a link.
    """
    return Path(os.path.realpath(path))


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"
