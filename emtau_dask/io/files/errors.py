"""Errors of the operating system about files, translated into words that name the remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emtau_dask.errors import EmtauError, StorageError

_REMEDIES = {
    errno.ENOSPC: "The disk is full{room}: free space",
    errno.EDQUOT: "The quota is used up: free space",
    errno.EFBIG: "The file would be larger than this process may write: raise the limit (ulimit -f)",
    errno.EROFS: "The file system is read-only: make it writable",
    errno.EACCES: "Permission is denied: make it readable and writable for this user",
    errno.ENOTSUP: "The file system has neither hard links nor a rename that replaces nothing, one of which "
    "commits need: choose a place on another",
    errno.EPERM: "The file system does not permit it: make it writable for this user",
    errno.ENOENT: "The folder has vanished: restore it",
    errno.ESTALE: "The folder has vanished: mount it again",
    errno.ENOTDIR: "A file lies where a folder should be: remove it",
    errno.EISDIR: "A folder lies where a file should be: remove it",
    errno.ENAMETOOLONG: "The name is too long for the file system: give a shorter one",
    errno.EMFILE: "Too many files are open: raise this process's limit (ulimit -n)",
    errno.ENFILE: "Too many files are open on this host: close some",
    errno.EIO: "The device failed: see the system's log, and restore it",
}


def reason_of(error: BaseException) -> str:
    """Return the kind of an error and what it says, on one line without a full stop."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(" .:")


def remedy_of(
    error: BaseException, place: str | Path | None = None, otherwise: str = "Restore access to it"
) -> str:
    """Return what is wrong and what to do about it, without a full stop.

    Where a disk is full, it says how much room there is at the local path ``place``. For errors without
    a known remedy it is ``otherwise``.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = _REMEDIES.get(number or 0, otherwise)
    return text.replace("{room}", _room_at(place)) if "{room}" in text else text


@contextmanager
def writing_errors(what: str, place: str | Path) -> Iterator[None]:
    """Raise `StorageError` for whatever the system says while ``what`` is written to a local path."""
    try:
        yield
    except EmtauError:
        raise
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written to {place} ({reason_of(error)}). {remedy_of(error, place)}, or choose "
            "another place. What was there is as it was."
        ) from error


def _room_at(place: str | Path | None) -> str:
    """Return how much of a path's file system is free, in brackets; nothing where that is not known."""
    if place is None:
        return ""
    path = Path(place)
    try:
        above = next(folder for folder in (path, *path.parents) if folder.exists())
        bytes_free, files = shutil.disk_usage(above).free, os.statvfs(above)
    except OSError:
        return ""
    names = f", {files.f_favail:,} more files" if files.f_files else ""
    return f" ({bytes_free / 1e6:,.1f} MB free{names})"
