"""Reading a fit from its commits; everything is verified.

Every object that a commit refers to is read once. If one is missing or altered, or if the commit contradicts
itself, the commit before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.checkpoint.codec import FormatError
from emtau_dask.checkpoint.manifest import (
    HEAD,
    MAX_CHUNKS,
    ROW_DTYPES,
    ArrayRef,
    Attempt,
    Content,
    Manifest,
    array_layouts,
)
from emtau_dask.checkpoint.state import CODEC, CONTENT, MANIFEST, Frame
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import FitState
from emtau_dask.errors import CheckpointCorruptError, InvalidDataError, short
from emtau_dask.storage.commits import CommitLog
from emtau_dask.storage.files import each
from emtau_dask.storage.objects import ObjectStore, decode, read_verified
from emtau_dask.storage.row_state import StateObject, most_object_rows

MAX_OBJECT_ROWS, MAX_FIELDS = 2**40, 16
"""Maximum rows of an object of row state, and maximum fields."""
ATTEMPT = r"[0-9]{1,15}-[0-9a-f]{32}"
ATTEMPT_ID = re.compile(ATTEMPT)
ARRAY_KEY = re.compile(rf"attempts/{ATTEMPT}/[a-z_]{{1,40}}/c(\.[0-9]{{1,15}}){{1,4}}")
REFERENCE = CODEC.record(ArrayRef)


@dataclass(frozen=True, eq=False)
class SavedFit:
    """A fit as stored in a commit; every object that the commit refers to is verified.

    Attributes
    ----------
    log : CommitLog
    manifest : Manifest
    content : Content
    known : mapping of (str, str) to str
        The keys of its arrays, by name and digest.
    row_state : frozenset of StateObject
        The objects of row state.
    passed_over : tuple of str
        Why newer commits are not used, one message for each.
    """

    log: CommitLog
    manifest: Manifest
    content: Content
    known: Mapping[tuple[str, str], str]
    row_state: frozenset[StateObject]
    passed_over: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """The commit's number."""
        return self.manifest.number

    @property
    def config(self) -> EmSettings:
        """The settings of the fit."""
        return replace(self.manifest.config, given=self.content.given)

    @property
    def state(self) -> FitState:
        """The state of the fit."""
        return self.content.fit

    @property
    def digests(self) -> dict[tuple[str, str], dict[int, bytes]]:
        """The digest of each chunk of the data, see `DataVerifier`."""
        return {
            (one.source, one.made_on): {
                int(chunk): one.digests[chunk].tobytes() for chunk in np.flatnonzero(one.digests.any(axis=1))
            }
            for one in self.content.contents
        }

    @property
    def references(self) -> frozenset[str]:
        """Keys of all objects that the commit refers to."""
        return frozenset({*self.known.values(), *(stored.key for stored in self.row_state)})


@dataclass(frozen=True, eq=False)
class _StoredArrays:
    """The arrays of a commit: ``data`` are its objects, ``found`` those decoded, by name, digest and key."""

    location: str
    frame: Frame
    data: Mapping[ArrayRef, bytes]
    found: dict[tuple[str, str, str], NDArray[Any]] = field(default_factory=dict)

    def get(self, name: str, json: Any) -> NDArray[Any]:
        reference, layout = REFERENCE.decode(json, None), self.frame.layouts.get(name)
        if layout is None:
            raise FormatError("needs acceleration, which the settings do not have")
        place = name, reference.sha256, reference.key
        if place in self.found:
            return self.found[place]
        values = decode(self.data[reference], layout, f"{reference.key} in {self.location}")
        if not np.isfinite(values).all():
            raise FormatError("holds NaN or infinity")
        self.found[place] = values
        return values


def _objects_of(content: Mapping[str, Any], objects: ObjectStore, frame: Frame) -> dict[ArrayRef, bytes]:
    """Return the objects that the content of a commit refers to, read in parallel and verified."""
    most = max(math.prod(one.chunks) * np.dtype(one.dtype).itemsize for one in frame.layouts.values())
    found, todo = set(), list(content.values())
    while todo:
        value = todo.pop()
        if isinstance(value, dict) and value.keys() == {"key", "sha256"}:
            found.add(REFERENCE.decode(value, None))
        elif isinstance(value, (dict, list)):
            todo.extend(value.values() if isinstance(value, dict) else value)
    for reference in found:
        if ARRAY_KEY.fullmatch(reference.key) is None:
            raise FormatError(f"refers to {short(reference.key)}, which is no array of a run")
    read = each(lambda one: read_verified(objects, one.key, one.sha256, most), found)
    return dict(zip(found, read, strict=True))


def read_commit(log: CommitLog, number: int) -> SavedFit:
    """Return a commit after reading every object that it refers to, except row state.

    Its settings, which are bounded, give the sizes that its objects must have. Raises
    `CheckpointCorruptError` if the commit or an object is missing or altered, or if the commit contradicts
    itself.
    """
    json = log.read(number)
    try:
        manifest = MANIFEST.decode({name: json[name] for name in HEAD if name in json}, None)
        rest, frame = {name: json[name] for name in json if name not in HEAD}, _frame(manifest)
        arrays = _StoredArrays(log.objects.location, frame, _objects_of(rest, log.objects, frame))
        content = CONTENT.decode(rest, arrays)
        _check_state(content.fit, manifest.config)
        sources = {(one.source, one.made_on) for one in content.contents}
        if len(sources) < len(content.contents):
            raise FormatError("says twice what a source holds", ("contents",))
    except FormatError as error:
        raise CheckpointCorruptError(
            f"commit {number} in {log.objects.location} cannot be: {error}."
        ) from error
    runs = [run for run in (content.fit.current, content.fit.best) if run is not None]
    row_state = frozenset(stored.object for run in runs for stored in run.row_state.values())
    known = {(name, sha256): key for name, sha256, key in arrays.found}
    return SavedFit(log, manifest, content, known, row_state)


def verify_row_state(saved: SavedFit) -> SavedFit:
    """Read every object of a commit's row state; raises `CheckpointCorruptError` as `read_commit` does."""

    def verify(stored: StateObject) -> None:
        read_verified(saved.log.objects, stored.key, stored.sha256, stored.fields.most_bytes)

    each(verify, saved.row_state)
    return saved


def _frame(manifest: Manifest) -> Frame:
    """Return the frame of a commit's arrays; raises `FormatError` if its parts contradict each other."""
    config, data, attempts = manifest.config, manifest.data, manifest.attempts
    n_chunks = sum(count for _, count in data.chunks)
    most_rows = most_object_rows(data.chunks)
    rows = sum(rows * count for rows, count in data.chunks)
    fits = len(data.shape) == 2 and data.shape[0] == rows
    if not fits or n_chunks > MAX_CHUNKS or most_rows > MAX_OBJECT_ROWS:
        raise FormatError(
            f"is of {data.shape} rows x features in {n_chunks} chunks of {rows} rows", ("data",)
        )
    for attempt in attempts:
        _check_attempt(attempt, most_rows)
    if len({attempt.id for attempt in attempts}) < len(attempts):
        raise FormatError("has an id twice", ("attempts",))
    try:
        layouts = array_layouts(config, data.shape[1], n_chunks, prefix="", n_steps=1)
    except InvalidDataError as error:
        raise FormatError(f"is impossible: {error}", ("config",)) from error
    chunk_rows = np.repeat(*np.array(data.chunks, dtype=np.int64).reshape(-1, 2).T)
    return Frame(config.requested.covariance_type, layouts, chunk_rows, attempts)


def _check_attempt(attempt: Attempt, most_rows: int) -> None:
    if ATTEMPT_ID.fullmatch(attempt.id) is None:
        raise FormatError(f"is {short(attempt.id)}: it must be that of an attempt", ("attempts", "id"))
    each_once = 0 < len(set(attempt.fields)) == len(attempt.fields) == len(attempt.dtypes) <= MAX_FIELDS
    if not each_once or not ROW_DTYPES.issuperset(attempt.dtypes):
        raise FormatError(f"are {short(attempt.fields)} of {short(attempt.dtypes)}", ("attempts", "fields"))
    if not set(attempt.kept) <= set(attempt.fields):
        raise FormatError(f"are {short(attempt.kept)} of {short(attempt.fields)}", ("attempts", "kept"))
    if attempt.object_rows > most_rows:
        raise FormatError(
            f"is {attempt.object_rows:,}, where chunks like these need {most_rows:,} at most",
            ("attempts", "object_rows"),
        )


def _check_state(fit: FitState, config: EmSettings) -> None:
    """Raise `FormatError` for a state that no fit can reach."""
    if fit.run >= len(config.seeds):
        raise FormatError(f"is in run {fit.run + 1} of {len(config.seeds)}", ("fit",))
    if fit.finished and (fit.current is None or fit.current.stop_reason is None):
        raise FormatError("is finished without a run that stopped", ("fit",))
    compared = fit.best is not None and fit.best.progress is not None and not fit.best.progress.chosen
    if fit.best is not None and fit.best.stop_reason is None and not compared:
        raise FormatError("has a best run that has not stopped", ("fit",))


def read_newest(log: CommitLog) -> SavedFit:
    """Return the newest intact commit, row state included, even if another process is committing.

    Raises `CheckpointCorruptError` if no commit is intact; the message says what is wrong with the newest.
    """
    return _newest(log, lambda number: verify_row_state(read_commit(log, number)))


def open_newest(log: CommitLog) -> SavedFit:
    """Return the same as `read_newest`, without reading row state."""
    return _newest(log, partial(read_commit, log))


def _newest(log: CommitLog, read: Callable[[int], SavedFit]) -> SavedFit:
    while True:
        numbers = log.numbers()
        log.last = max(numbers, default=log.last)
        passed_over: list[str] = []
        for number in reversed(numbers):
            try:
                return replace(read(number), passed_over=tuple(passed_over))
            except CheckpointCorruptError as error:
                passed_over.append(str(error))
                if max(log.numbers(), default=-1) > log.last:
                    break
        else:
            why = passed_over[0] if passed_over else "There is none."
            raise CheckpointCorruptError(f"no commit is whole. {why}")
