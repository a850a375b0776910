"""Row state in zarr: which rows are active, and the row arrays of a policy.

A task writes the state of its chunks as one object: the rows of the chunks one after another, padded to one
length. The key of the object has the number of its first chunk, so no two tasks write the same object. State
is never changed in place: each step writes new objects. Nothing is written for a chunk that is skipped or
whose state does not change; its object stays in use.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import CheckpointCorruptError, CheckpointError
from emtau_dask.process import VerifiedTokens, of_process, this_process
from emtau_dask.storage.objects import ArrayLayout, ObjectStore, compress, decompress, digest, read_verified

MAX_MARKER_BYTES = 2**16
"""Maximum size of a marker (bytes)."""
SHARING_ROWS = 2**14
"""Maximum rows of a chunk that shares an object; longer chunks are written before their task ends."""
OBJECT_ROWS = 2**16
"""Maximum rows of an object that several chunks share."""
RECENT_BYTES = 2**24
"""Maximum size of the decoded shared objects that a process caches (bytes)."""


def most_object_rows(chunk_rows: Iterable[tuple[int, int]]) -> int:
    """Return the maximum rows of an object: of the longest chunk, or of all chunks that may share one.

    ``chunk_rows`` are pairs of length and number of chunks.
    """
    longest = sharing = 0
    for rows, count in chunk_rows:
        if count:
            longest = max(longest, rows)
            sharing += rows * count if rows <= SHARING_ROWS else 0
    return max(longest, min(sharing, OBJECT_ROWS))


@dataclass(frozen=True)
class RowFields:
    """The row arrays of a policy, as fields of one array; ``object_rows`` is the length of every object.

    Each of ``dtypes`` is the smallest that fits its array; all are stored as the widest of them. Inactive
    rows keep their values in the arrays ``kept``, and have 0 in the others.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    object_rows: int
    kept: tuple[str, ...] = ()

    @classmethod
    def of(cls, dtypes: Mapping[str, np.dtype[Any]], object_rows: int, kept: Iterable[str] = ()) -> RowFields:
        """Return the fields of arrays by name."""
        return cls(tuple(dtypes), tuple(dtype.name for dtype in dtypes.values()), object_rows, tuple(kept))

    @property
    def by_name(self) -> dict[str, np.dtype[Any]]:
        """The dtype of each field, by name."""
        return {name: np.dtype(dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)}

    @property
    def stored(self) -> np.dtype[Any]:
        """The unsigned integer dtype that holds every field."""
        return np.dtype(f"u{max(np.dtype(name).itemsize for name in self.dtypes)}")

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of an object's array: fields, rows."""
        return len(self.names), self.object_rows

    @property
    def nbytes(self) -> int:
        """The bytes of an object's array."""
        return math.prod(self.shape) * self.stored.itemsize

    @property
    def most_bytes(self) -> int:
        """The maximum size of an object (bytes); zstd adds little to values that it cannot compress."""
        return self.nbytes + self.nbytes // 128 + 1024


@dataclass(frozen=True, slots=True)
class StateObject:
    """An object that holds row state, with the fields of the process that wrote it."""

    key: str
    sha256: str
    fields: RowFields

    def read(self, objects: ObjectStore) -> NDArray[Any]:
        """Return the values of all rows, (fields, rows).

        Raises `CheckpointCorruptError` if the object is missing or altered, or cannot be decoded.
        """
        data = read_verified(objects, self.key, self.sha256, self.fields.most_bytes)
        return decompress(data, self.fields.shape, self.fields.stored, f"{self.key} in {objects.location}")


@dataclass(frozen=True, slots=True)
class RowStateRef:
    """A reference to the newest row state of a chunk: an object, and the chunk's first row there."""

    object: StateObject
    first_row: int

    @property
    def place(self) -> tuple[str, int]:
        """The digest of the object and the first row, which identify the values."""
        return self.object.sha256, self.first_row

    def read(self, objects: ObjectStore, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return the values of a chunk's rows, of shape (n_rows,) each, by name.

        Raises `CheckpointCorruptError` as `StateObject.read` does, and for values out of a field's range.
        """
        return self.taken_from(self.object.read(objects), n_rows, objects)

    def taken_from(self, values: NDArray[Any], n_rows: int, objects: ObjectStore) -> dict[str, NDArray[Any]]:
        """Return the result of `read`, from the values of the object."""
        where, fields = f"{self.object.key} in {objects.location}", self.object.fields
        own = values[:, self.first_row : self.first_row + n_rows]
        if own.shape[1] != n_rows:
            raise CheckpointCorruptError(f"{where} ends before row {self.first_row + n_rows} of it.")
        state = {}
        for name, dtype, row in zip(fields.names, fields.dtypes, own, strict=True):
            limit = 1 if dtype == "bool" else np.iinfo(dtype).max
            if (row > limit).any():
                raise CheckpointCorruptError(f"{where}: {name} is above {limit}.")
            state[name] = row.astype(dtype)
        return state


class RecentObjects:
    """A cache of the shared objects that a process has decoded last; all threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[tuple[str, StateObject], Future[NDArray[Any]]] = {}

    def read(self, stored: StateObject, objects: ObjectStore) -> NDArray[Any]:
        """Return the same as `StateObject.read`; if another thread is reading the object, wait for it."""
        name = objects.location, stored
        own: Future[NDArray[Any]] | None = None
        with self._lock:
            found = self._recent.pop(name, None)
            if found is None:
                found = own = Future()
            self._recent[name] = found
        if own is None:
            try:
                return found.result()
            except CancelledError:  # The other thread could not read it.
                return stored.read(objects)
        try:
            values = stored.read(objects)
            own.set_result(values)
        except BaseException:
            with self._lock:
                self._recent.pop(name, None)
            own.cancel()
            raise
        self._forget_oldest()
        return values

    def _forget_oldest(self) -> None:
        with self._lock:
            done = [name for name, found in self._recent.items() if found.done()]
            held = sum(self._recent[name].result().nbytes for name in done)
            for name in done:
                if held <= RECENT_BYTES:
                    break
                held -= self._recent.pop(name).result().nbytes


def read_row_state(state: RowStateRef, objects: ObjectStore, n_rows: int) -> dict[str, NDArray[Any]]:
    """Return the same as `RowStateRef.read`, from a cache of decoded objects that chunks share."""
    if n_rows > SHARING_ROWS:
        return state.read(objects, n_rows)
    values = of_process(RecentObjects).read(state.object, objects)
    return state.taken_from(values, n_rows, objects)


@dataclass(frozen=True)
class StoreMarker:
    """An object of the fitting process; another process that finds it sees the same store.

    A process that has found it remembers the ``token``, and does not look again.
    """

    key: str
    sha256: str
    token: str

    @classmethod
    def of(cls, key: str, data: bytes) -> StoreMarker:
        """Return the marker for an object that this process has written."""
        marker = cls(key, digest(data), uuid4().hex)
        of_process(VerifiedTokens).add(marker.token)
        return marker

    def check(self, objects: ObjectStore) -> None:
        """Raise `CheckpointError` if this process does not find the object; it looks once."""
        of_process(VerifiedTokens).once(self.token, lambda: self._verify(objects))

    def _verify(self, objects: ObjectStore) -> None:
        found = objects.get(self.key, MAX_MARKER_BYTES)
        if found is None or digest(found) != self.sha256:
            raise CheckpointError(
                f"{this_process()} cannot use {objects.location}, where row state goes: it does not find "
                "there what the process that fits wrote. Give a checkpoint (or, without one, a dask "
                "temporary-directory) that every worker sees under the same path, or the URL of an object "
                "store."
            )


@dataclass(frozen=True)
class RowStateWriter:
    """Writes the row state of one step, and reads that of earlier steps; tasks carry it.

    The array of ``layout`` has the shape (steps, chunks, fields, rows of an object).
    """

    objects: ObjectStore
    layout: ArrayLayout
    fields: RowFields
    step: int
    marker: StoreMarker

    def write(self, states: Mapping[int, Mapping[str, NDArray[Any]]]) -> dict[int, RowStateRef]:
        """Write the values of chunks, by chunk, to as few objects as possible; return the references.

        Equal values make equal objects. Raises `CheckpointError` if this process does not see the
        store, or cannot write there.
        """
        self.marker.check(self.objects)
        lengths = {chunk: len(values[self.fields.names[0]]) for chunk, values in states.items()}
        refs: dict[int, RowStateRef] = {}
        for chunks in _groups(lengths, self.fields.object_rows):
            ends = list(accumulate([lengths[chunk] for chunk in chunks]))
            refs |= self._write_object({chunk: states[chunk] for chunk in chunks}, ends)
        return refs

    def _write_object(
        self, group: Mapping[int, Mapping[str, NDArray[Any]]], ends: Sequence[int]
    ) -> dict[int, RowStateRef]:
        """Write chunks to one object; ``ends`` are the ends of their rows there."""
        fields = self.fields
        padded = np.zeros(fields.shape, dtype=fields.stored)
        for row, name in zip(padded, fields.names, strict=True):
            np.concatenate([values[name] for values in group.values()], out=row[: ends[-1]])
        data = compress(padded)
        key = self.layout.chunk_key(self.step, min(group))
        self.objects.put(key, data)
        stored = StateObject(key, digest(data), fields)
        begins = [0, *ends[:-1]]
        return {chunk: RowStateRef(stored, begin) for chunk, begin in zip(group, begins, strict=True)}

    def read(self, state: RowStateRef, n_rows: int) -> dict[str, NDArray[Any]]:
        """Do as `read_row_state`; raises `CheckpointError` also if this process does not see the store."""
        self.marker.check(self.objects)
        return read_row_state(state, self.objects, n_rows)


def _groups(lengths: Mapping[int, int], most: int) -> Iterator[list[int]]:
    """Yield the chunks of each object, ascending, with at most ``most`` rows together."""
    group: list[int] = []
    rows = 0
    for chunk in sorted(lengths):
        rows += lengths[chunk]
        if group and rows > most:
            yield group
            group, rows = [], lengths[chunk]
        group.append(chunk)
    if group:
        yield group


def rows_layout(name: str, fields: RowFields, n_steps: int, n_chunks: int) -> ArrayLayout:
    """Return the layout of the array that holds the state of all steps."""
    return ArrayLayout(
        name,
        (n_steps, n_chunks, *fields.shape),
        (1, 1, *fields.shape),
        fields.stored.name,
        ("step", "first_chunk", "field", "row"),
        compressed=True,
        attributes={"fields": list(fields.names), "dtypes": list(fields.dtypes)},
    )
