"""Giving a whole file its name in one step, only where the name is free."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What ``link`` says on file systems that have no hard links, such as FAT and many of FUSE and SMB."""
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def give_free_name(source: Path, target: Path) -> None:
    """Give the file ``source`` the name ``target``; its old name may be gone afterwards.

    By a hard link; where there are none, by Linux's rename that replaces nothing.

    Raises
    ------
    FileExistsError
        There is a ``target`` already, which is left as it is.
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
    """Return the C library's function; None where it has none, as on other systems than Linux."""
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
