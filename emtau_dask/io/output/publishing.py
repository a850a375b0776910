"""Folders that appear at their place complete, or not at all, also where several processes write.

A folder is written in a scratch folder beside its place, which its process locks (`io.files.scratch`), and
is renamed when it is complete. What it replaces is first moved into the same scratch folder. If the
process is killed in between, the next one that writes there moves that back.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from emtau_dask.errors import EmtauError, PathTakenError
from emtau_dask.io.files import ScratchFolder

NEW, OLD, OUTDATED = "new", "old", "outdated"
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


@contextmanager
def published(path: Path, *, replaceable: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield where to make a folder that appears at ``path`` when the block ends without an error.

    What is yielded is a path, on the same file system, at which nothing is yet. Of several processes that
    do this at once one succeeds; with ``replaceable`` the last result stays.

    Parameters
    ----------
    path : Path
        A local path; folders above it are made. An empty folder there is replaced.
    replaceable : callable (Path) -> bool, optional
        Whether what is at ``path`` may be replaced, asked when the block has ended; by default nothing may.

    Raises
    ------
    PathTakenError
        Something is at ``path`` that may not be replaced.
    EmtauError
        Nothing can be written there, or what was there cannot be put back.
    """
    target = path.absolute()
    try:
        folder = ScratchFolder(f".{target.name}.emtau-", str(target.parent), partial(_rescue, target))
    except OSError as error:
        raise EmtauError(
            f"nothing can be written in {target.parent} ({error}); choose another place"
        ) from error
    try:
        yield folder.path / NEW
        _publish(folder.path, target, replaceable)
    finally:
        try:
            folder.remove()
        except OSError as error:
            raise EmtauError(
                f"what was at {target} cannot be put back ({error}); it is {folder.path / OLD}, move it"
            ) from error


def _publish(folder: Path, target: Path, replaceable: Callable[[Path], bool] | None) -> None:
    try:
        while not _moved(folder / NEW, target):
            if replaceable is not None and replaceable(target):
                _set_aside(folder, target)
            elif os.path.lexists(target):
                raise PathTakenError(
                    f"{target} already exists, made meanwhile; it was left as it is. Choose another place"
                )
    except OSError as error:
        raise EmtauError(f"{target} cannot be written ({error}); choose another place") from error


def _moved(source: Path, target: Path) -> bool:
    """Move a folder to its place; return False where something else is there."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _set_aside(folder: Path, target: Path) -> None:
    """Move what is at ``target``, if it is still there, to `OLD`."""
    with suppress(FileNotFoundError):
        (folder / OLD).rename(folder / f"{OUTDATED}-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        target.rename(folder / OLD)


def _rescue(target: Path, folder: Path) -> None:
    """Put back what was set aside, unless something else is in its place by now."""
    old = folder / OLD
    while os.path.lexists(old):
        if os.path.lexists(target):
            old.rename(folder / f"{OUTDATED}-{uuid.uuid4().hex}")
        else:
            _moved(old, target)
