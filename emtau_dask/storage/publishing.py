"""Results that appear at their path complete or not at all: zarr groups, tables, pages.

A folder or file is written in a scratch folder next to its path, which its process locks (`storage.files`),
and is renamed when it is complete. The old result is first moved into the scratch folder. If the process is
killed in between, the next process that writes there moves the old result back.
"""

from __future__ import annotations

import errno
import math
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, ZstdCodec

from emtau_dask.errors import EmtauError, InvalidDataError, PathTakenError
from emtau_dask.storage.errors import writing_errors
from emtau_dask.storage.files import ScratchFolder, followed, give_free_name, read_regular
from emtau_dask.storage.locations import kind_by_ending
from emtau_dask.storage.urls import is_url, plain_path
from emtau_dask.storage.zarr_check import own_group

NEW, OLD, OUTDATED = "new", "old", "outdated"
LATE_SECONDS = 0.1
"""Wait before the folder of a failed block is removed (seconds). If one write of zarr fails, its threads
finish others that have begun, and make their folders once more."""
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})
CHUNK_BYTES = 4 * 2**20
ENDINGS = (".html", ".htm")
BEGINNING = 2**12
_OURS = re.compile(
    r'<meta name="generator" content="emtau_dask [^"<>]*">\s*<meta name="emtau-run" content="(\w*)">'
)
"""Marks a page that emtau wrote, with the id of its run."""


@contextmanager
def published(path: Path, *, replaceable: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield a free path for a folder or file that appears at ``path`` when the block ends without an error.

    The free path is on the same file system. Of several processes that publish at once, one succeeds; with
    ``replaceable`` the last result stays.

    Parameters
    ----------
    path : Path
        A local path; folders above it are made. An empty folder is replaced.
    replaceable : callable (Path) -> bool, optional
        Whether what is at ``path`` may be replaced, asked when the block has ended; by default nothing may.

    Raises
    ------
    PathTakenError
        Something is at ``path`` that may not be replaced.
    EmtauError
        The old result cannot be put back.
    OSError
        Nothing can be written there; see `writing_errors`.
    """
    target = path.absolute()
    folder = ScratchFolder(f".{target.name}.emtau-", str(target.parent), partial(_rescue, target))
    try:
        yield folder.path / NEW
        _publish(folder.path, target, replaceable)
    except BaseException:
        time.sleep(LATE_SECONDS)
        raise
    finally:
        try:
            folder.remove()
        except OSError as error:
            raise EmtauError(
                f"what was at {target} cannot be put back ({error}); it is at {folder.path / OLD}, move it"
            ) from error


def _publish(folder: Path, target: Path, replaceable: Callable[[Path], bool] | None) -> None:
    while not _moved(folder / NEW, target):
        if replaceable is not None and replaceable(target):
            _set_aside(folder, target)
        elif os.path.lexists(target):
            raise PathTakenError(
                f"{target} already exists: another process has made it meanwhile. Choose another place"
            )


def _moved(source: Path, target: Path) -> bool:
    """Move a folder or file to its place; return False if something else is there."""
    try:
        if source.is_dir():
            source.rename(target)
        else:
            give_free_name(source, target)
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
    """Put back the old result, unless something else is in its place by now."""
    old = folder / OLD
    while os.path.lexists(old):
        if os.path.lexists(target):
            old.rename(folder / f"{OUTDATED}-{uuid.uuid4().hex}")
        else:
            _moved(old, target)


@dataclass(frozen=True)
class ResultKind:
    """A kind of result: what its name may be, and which of those that lie at a place emtau wrote."""

    check_name: Callable[[Path], None]
    is_ours: Callable[[Path], bool]


def _check_group_name(path: Path) -> None:
    ending = kind_by_ending(str(path))
    if ending is not None:
        raise EmtauError(
            f"{path} is the name of {ending}, but results are zarr groups; give a name such as "
            f"{path.with_suffix('.zarr')}"
        )


def attributes_at(place: str | Path) -> Mapping[str, Any]:
    """Return the attributes of the zarr group at a path or URL; {} without a readable group."""
    try:
        group = own_group(place)
    except EmtauError:
        return {}
    return {} if group is None else group.attributes


def _is_our_group(path: Path) -> bool:
    attributes = attributes_at(path)
    return "dataset" in attributes or str(attributes.get("format", "")).startswith("emtau-")


GROUP = ResultKind(_check_group_name, _is_our_group)


def refuse_existing(
    path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = (), kind: ResultKind = GROUP
) -> None:
    """Raise `EmtauError` unless a result may be written at the local path ``path``, by default a zarr group.

    With ``overwrite`` it may replace one of its kind that emtau wrote, and nothing else. It never replaces
    what the run reads, ``inputs``.
    """
    refuse_url(path)
    kind.check_name(path)
    refuse_inputs(path, inputs)
    if _is_taken(path, "the result", overwrite) and not kind.is_ours(path):
        raise EmtauError(
            f"{path} was not written by emtau, so --overwrite does not replace it; choose another place"
        )


def _is_taken(path: Path, what: str, overwrite: bool) -> bool:
    """Return whether something is at ``path``; raise `EmtauError` if it may not be replaced."""
    with writing_errors(what, path):
        taken = path.exists()
    if taken and not overwrite:
        raise PathTakenError(f"{path} already exists; use --overwrite to replace it, or choose another place")
    return taken


def refuse_url(path: Path) -> None:
    """Raise `EmtauError` for a path that was made from a URL."""
    if path.parts and path.parts[0].endswith(":") and len(path.parts[0]) > 2:
        raise EmtauError(f"{path} is a URL, but results are written to local folders only; give a local path")


def refuse_inputs(path: Path, inputs: Sequence[str | Path]) -> None:
    """Raise `EmtauError` if a result would be at, in or around an input of its run."""
    for source in (plain_path(str(each)) for each in inputs):
        if is_url(source):
            continue
        ours, theirs = followed(path), followed(source)
        if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
            raise EmtauError(
                f"{path} is, contains or is inside {source}, which this run reads; choose another place"
            )


def check_writable(path: Path) -> None:
    """Raise `EmtauError` unless files can be written next to ``path``; folders above it are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EmtauError(
            f"nothing can be written in {path.parent} ({error.strerror}); choose another place"
        ) from error


def mark_as_of(path: Path, run: str | None, run_config: Mapping[str, Any]) -> None:
    """Store in a zarr group the id of its run, if that has one, and its config."""
    marks = {"run": run, "run_config": run_config}
    zarr.open_group(str(path), mode="r+", zarr_format=3).attrs.update(marks)


def run_that_wrote(path: Path) -> object:
    """Return the id that `mark_as_of` stored at a path, or None."""
    return attributes_at(path).get("run")


@contextmanager
def replacing(path: Path, *, overwrite: bool, kind: ResultKind = GROUP) -> Iterator[Path]:
    """Yield a free path for a result that appears at ``path`` after the block; see `published`.

    With ``overwrite`` it replaces one of its kind that emtau wrote, even one that appears during the block.
    Raises `EmtauError` if something else is at ``path``, before the block or after it.
    """
    with (
        writing_errors("the result", path),
        published(path, replaceable=lambda found: overwrite and kind.is_ours(found)) as private,
    ):
        refuse_existing(path, overwrite, kind=kind)
        yield private


@contextmanager
def new_group(path: Path, *, overwrite: bool) -> Iterator[zarr.Group]:
    """Yield a new zarr v3 group; see `replacing`."""
    with replacing(path, overwrite=overwrite) as private:
        yield zarr.create_group(str(private), zarr_format=3)


class RowWriter:
    """Appends rows to a new array of a group, one whole zarr chunk at a time.

    Parameters
    ----------
    group : zarr.Group
        Where the array is created.
    name : str
    shape : tuple of int
        The array's final shape, rows first.
    dtype : numpy dtype
    chunk_rows : int or None
        Rows of a chunk, which are buffered in memory; by default as many as fit in 4 MiB.
    compressed : bool
        False for values that do not compress, such as random float64.
    """

    def __init__(
        self,
        group: zarr.Group,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        chunk_rows: int | None = None,
        compressed: bool = True,
    ) -> None:
        fitting = CHUNK_BYTES // max(dtype.itemsize * math.prod(shape[1:]), 1)
        chunks = (max(1, min(chunk_rows or fitting, shape[0])), *shape[1:])
        compressor = _compressor(dtype) if compressed else None
        self._array = group.create_array(
            name, shape=shape, dtype=dtype, chunks=chunks, compressors=compressor
        )
        self._buffer: NDArray[Any] = np.empty(chunks, dtype=dtype)
        self._written = self._buffered = 0

    def append(self, values: NDArray[Any]) -> int:
        """Add rows, write every chunk that they fill, and return the number of these chunks."""
        start, written = 0, 0
        while start < len(values):
            stop = min(len(values), start + len(self._buffer) - self._buffered)
            self._buffer[self._buffered : self._buffered + stop - start] = values[start:stop]
            self._buffered += stop - start
            start = stop
            if self._buffered == len(self._buffer):
                written += self.flush()
        return written

    def flush(self) -> int:
        """Write the rows that are still buffered; return the number of chunks, 0 or 1."""
        if not self._buffered:
            return 0
        stop = self._written + self._buffered
        self._array[self._written : stop] = self._buffer[: self._buffered]
        self._written, self._buffered = stop, 0
        return 1


def _compressor(dtype: np.dtype[Any]) -> BloscCodec | ZstdCodec:
    """Return the codec for values of a type; transposed bits of responsibilities would take more bytes."""
    if dtype.kind == "f":
        return ZstdCodec(level=1)
    return BloscCodec(cname="lz4", clevel=1, shuffle="bitshuffle")


def refuse_existing_page(path: Path, overwrite: bool, *, inputs: Sequence[str | Path] = ()) -> None:
    """Raise `EmtauError` unless a page may be written at the local path ``path``.

    With ``overwrite`` it may replace a page that emtau wrote, and nothing else. It never replaces what is
    read for it, ``inputs``.
    """
    refuse_url(path)
    if path.suffix.lower() not in ENDINGS:
        raise EmtauError(
            f"a report is a page of HTML, but the name {path} has another ending; give a name such as "
            f"{path.with_suffix(ENDINGS[0])}"
        )
    refuse_inputs(path, inputs)
    if _is_taken(path, "the report", overwrite) and _written_by_us(path) is None:
        raise EmtauError(
            f"{path} is no report that emtau wrote, so --overwrite does not replace it; choose another place"
        )


def run_of_page(path: Path) -> str | None:
    """Return the id of the run of a report; None if it names none, or is no report."""
    found = _written_by_us(path)
    return None if found is None else found[1] or None


def _written_by_us(path: Path) -> re.Match[str] | None:
    try:
        beginning = read_regular(path, 0, BEGINNING).tobytes()
    except (OSError, InvalidDataError):
        return None
    return _OURS.search(beginning.decode("utf-8", "replace"))


def write_page(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a page to a free path; with ``overwrite`` also in place of a page that emtau wrote.

    Raises
    ------
    EmtauError
        Something else is there by now, or nothing can be written there.
    """
    with writing_errors("the report", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.emtau-", dir=path.parent) as folder:
            private = Path(folder) / path.name
            private.write_text(text, encoding="utf-8")
            try:
                give_free_name(private, path)
            except FileExistsError:
                refuse_existing_page(path, overwrite)
                private.replace(path)
