"""Temporary folders that do not outlive their process, even where it is killed.

Each holds a file that its process keeps locked. The kernel lifts the lock when
the process ends, however it ends; whoever makes a folder in the same place later
removes those whose lock it gets. The names carry the id of the kernel's boot and
the number that it gave the mounted file system, since some network file systems
keep the locks of each host, or of each mount, to themselves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["ScratchFolder"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK, UNLOCKED = "lock", "lock.new"


class ScratchFolder:
    """A temporary folder; leftovers of processes of this user that died on this host are removed.

    A folder is never taken for a leftover where there is no boot id or no lock,
    or where it was made through another mount.

    Parameters
    ----------
    prefix : str
        Of its name, and of those among which leftovers are looked for.
    place : str or None
        The folder that it is made in, which need not be there yet; None for the
        default of `tempfile`.

    Attributes
    ----------
    path : Path

    Raises
    ------
    OSError
        It cannot be made.
    """

    def __init__(self, prefix: str, place: str | None) -> None:
        above = Path(tempfile.gettempdir() if place is None else place)
        above.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            prefix += f"{BOOT_ID.read_text().strip()}-{_mount(above)}-"
            _remove_leftovers(above, prefix)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=above, ignore_cleanup_errors=True)
        with ExitStack() as making:
            self.path = Path(making.enter_context(folder))
            self._lock = _locked(self.path)
            self._made = making.pop_all()

    def remove(self) -> None:
        """Remove it with all that it holds."""
        if self._lock is not None:
            self._lock.close()
        self._made.close()


def _mount(folder: Path) -> str:
    """Return the kernel's number for a folder's file system; mounts with locks of their own differ in it."""
    return f"{folder.stat().st_dev:x}"


def _locked(folder: Path) -> BinaryIO | None:
    """Return a folder's lock, held until it is closed; None where there can be none.

    It has its name only once it is locked, lest it be taken for a leftover's.
    """
    with suppress(OSError), ExitStack() as opened:
        file = opened.enter_context((folder / UNLOCKED).open("xb"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / UNLOCKED).rename(folder / LOCK)
        opened.pop_all()
        return file
    return None


def _remove_leftovers(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose lock nobody holds; raises `OSError` for one that has none, or a held one."""
    with (folder / LOCK).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
