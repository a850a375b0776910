"""Temporary folders that do not outlive their process, even where it is killed.

Each holds a file that its process keeps locked. The kernel lifts the lock when the process ends,
however it ends. A process that later makes a folder in the same place removes all folders whose lock
it gets. Some network file systems keep the locks of each host, or of each mount, apart; so the names
contain the id of the kernel's boot and the number of the mounted file system. A forked process never
removes its parent's folders.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK, UNLOCKED = "lock", "lock.new"


class ScratchFolder:
    """A temporary folder; leftovers of processes of this user that died on this host are removed.

    A folder is no leftover where there is no boot id or no lock, or where it was made through another
    mount. The folder is removed with this object, at the latest when the interpreter of its process ends.

    Parameters
    ----------
    prefix : str
        Of its name, and of the names of leftovers.
    place : str or None
        The folder that it is made in, which need not exist; None for the default of `tempfile`.
    rescue : callable (Path) -> None
        Called with every folder before it is removed, this one or a leftover; where it
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
        """Remove the folder with all that it holds."""
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
    """Return a folder's lock, held until it is closed; None where there can be none.

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
    """Remove this user's folders of that prefix whose lock nobody holds; each OSError leaves one as it is."""
    for folder in place.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rescue(folder)
                _remove(folder)
