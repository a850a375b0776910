"""Local files: read if regular, named in one step, scratch folders that go with their process.

Each scratch folder holds a file that its process keeps locked. The kernel lifts the lock when the process
ends, however it ends. A process that later makes a folder in the same place removes all folders whose lock
it gets. Some network file systems keep the locks of each host, or of each mount, apart; so the names
contain the id of the kernel's boot and the number of the mounted file system. A forked process never
removes its parent's folders.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError
from emtau_dask.interrupts import Calls, Stop, Threads
from emtau_dask.process import of_process

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of ``link`` on file systems without hard links, such as FAT and many of FUSE and SMB."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
T = TypeVar("T")
R = TypeVar("R")
MAX_THREADS = 16
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK, UNLOCKED = "lock", "lock.new"


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


def with_home(path: str) -> str:
    """Return a path with ``~`` or ``~user`` at its beginning replaced, if there is such a user."""
    return os.path.expanduser(path)  # noqa: PTH111  # Path's raises for an unknown user.


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


def read_regular(path: str | Path, start: int, stop: int | None) -> NDArray[np.uint8]:
    """Return bytes ``start`` to ``stop`` of a file, those that it has; from its end if ``start`` < 0.

    Raises as `opened_regular` does.
    """
    with opened_regular(path) as (descriptor, size):
        begin = max(0, size + start) if start < 0 else min(start, size)
        wanted = max(0, (size if stop is None else min(stop, size)) - begin)
        room = np.empty(wanted, np.uint8)
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
        Whether other processes may make and remove folders at the same time, even this one.

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
    """Raise `OSError` if a folder cannot be listed."""
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


def give_free_name(source: Path, target: Path) -> None:
    """Give the file ``source`` the name ``target``; its old name may be gone afterwards.

    It makes a hard link; on file systems without them, it uses Linux's rename that replaces nothing.

    Raises
    ------
    FileExistsError
        There is a ``target`` already, which is unchanged.
    OSError
        With ``ENOTSUP`` where the file system can do neither.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_to_free_name(source, target)


@cache
def _renameat2() -> Any:
    """Return the C library's function; None if there is none, as on other systems than Linux."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _rename_to_free_name(source: Path, target: Path) -> None:
    rename = _renameat2()
    number = errno.ENOTSUP
    if rename is not None:
        old, new = os.fsencode(source), os.fsencode(target)
        if rename(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
            number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), str(source), None, str(target))


class WaitingThreads:
    """Threads that a process keeps, because starting them takes longer than most calls."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._threads = Threads(MAX_THREADS, "emtau-objects")

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``function`` of every item, computed in parallel.

        It returns after all calls have ended, even if one of them raises; after an interrupt it waits for
        them for at most a second. Of several errors it raises that of the first item. Nested calls compute
        their items one after another.
        """
        todo = list(items)
        if len(todo) < 2 or getattr(self._own, "inside", False):
            return [function(item) for item in todo]
        failed: dict[int, Exception] = {}

        def call(place: int) -> R:
            self._own.inside = True
            try:
                return function(todo[place])
            except Exception as error:
                failed[place] = error
                raise

        try:
            with Calls[int, R](self._threads.submit, Stop()) as calls:
                for place in range(len(todo)):
                    calls.begin(place, partial(call, place))
                found = dict(calls.take() for _ in todo)
                return [found[place] for place in range(len(todo))]
        except Exception:
            if not failed:
                raise
        raise failed.pop(min(failed))


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of every item, by this process's `WaitingThreads`."""
    return of_process(WaitingThreads).each(function, items)


class ScratchFolder:
    """A temporary folder; leftovers of processes of this user that died on this host are removed.

    A folder without boot id or lock, or made through another mount, is never removed as a leftover. The
    folder is removed with this object, at the latest when the interpreter of its process ends.

    Parameters
    ----------
    prefix : str
        Of its name, and of the names of leftovers.
    place : str or None
        The folder that it is made in, which need not exist; None for the default of `tempfile`.
    rescue : callable (Path) -> None
        Called with every folder before it is removed, this one or a leftover; if it
        raises, the folder stays.

    Attributes
    ----------
    path : Path

    Raises
    ------
    OSError
        It cannot be made.
    """

    def __init__(
        self, prefix: str, place: str | None, rescue: Callable[[Path], None] = lambda folder: None
    ) -> None:
        above = Path(tempfile.gettempdir() if place is None else place)
        above.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            prefix += f"{BOOT_ID.read_text().strip()}-{_mount(above)}-"
            _remove_leftovers(above, prefix, rescue)
        self.path = above / f"{prefix}{token_hex(8)}"
        self._lock: BinaryIO | None = None
        self._maker, self._rescue = os.getpid(), rescue
        # Before the folder is made: an interrupt may fall between any two steps.
        self._finalizer = weakref.finalize(self, _remove_own, self.path, self._maker, rescue)
        try:
            self.path.mkdir(mode=0o700)
        except OSError:
            self._finalizer.detach()
            raise
        try:
            self._lock = _locked(self.path)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder and its contents."""
        if os.getpid() == self._maker:
            self._rescue(self.path)  # While it is locked: nobody else takes it for a leftover yet.
        if self._lock is not None:
            self._lock.close()
        self._finalizer()


def _remove_own(folder: Path, maker: int, rescue: Callable[[Path], None]) -> None:
    if os.getpid() == maker:
        rescue(folder)
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last, so that after a kill meanwhile it is still a leftover."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _mount(folder: Path) -> str:
    """Return the kernel's number of a folder's file system; it differs where locks are separate."""
    return f"{folder.stat().st_dev:x}"


def _locked(folder: Path) -> BinaryIO | None:
    """Return a folder's lock, which lasts until it is closed; None if it cannot be locked.

    It gets its name only when it is locked; else another process could take the folder for a leftover.
    """
    with suppress(OSError), ExitStack() as opened:
        file = opened.enter_context((folder / UNLOCKED).open("xb"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / UNLOCKED).rename(folder / LOCK)
        opened.pop_all()
        return file
    return None


def _remove_leftovers(place: Path, prefix: str, rescue: Callable[[Path], None]) -> None:
    """Remove this user's folders of that prefix that nobody has locked; after an OSError a folder stays."""
    for folder in place.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rescue(folder)
                _remove(folder)
