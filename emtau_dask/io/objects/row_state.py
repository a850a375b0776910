"""Row state in zarr, by slot: which rows are active, and what a policy keeps about each.

Chunk i of the data owns slot i of one regular array, padded to the longest chunk, so no two tasks ever
write one object. State is never changed in place: a step writes new objects. It writes none for a chunk
that is skipped or whose state does not change; the object written last remains in use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import CheckpointCorruptError, CheckpointError
from emtau_dask.io.files import Proofs, this_process
from emtau_dask.io.objects.base import ObjectStore
from emtau_dask.io.objects.documents import digest
from emtau_dask.io.objects.encoding import ArrayLayout, compress, decompress, read_verified
from emtau_dask.process import of_process

MAX_WITNESS_BYTES = 2**16


@dataclass(frozen=True)
class RowFields:
    """The row arrays of a policy, as fields of one array; ``slot_rows`` is the length of the longest chunk.

    Each of ``dtypes`` is the smallest that fits its array. They are stored in the widest of them.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    slot_rows: int

    @classmethod
    def of(cls, dtypes: Mapping[str, np.dtype[Any]], slot_rows: int) -> RowFields:
        """Return the fields of arrays by name."""
        return cls(tuple(dtypes), tuple(dtype.name for dtype in dtypes.values()), slot_rows)

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
        """The shape of a slot's array: fields, rows."""
        return len(self.names), self.slot_rows

    @property
    def most_bytes(self) -> int:
        """The most bytes of a slot's object; zstd adds little to what it cannot compress."""
        size = math.prod(self.shape) * self.stored.itemsize
        return size + size // 128 + 1024


@dataclass(frozen=True)
class SlotState:
    """The object of a slot's newest state, with the fields of the process that wrote it; goes into tasks."""

    key: str
    sha256: str
    fields: RowFields

    def read(self, objects: ObjectStore, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return the values of a chunk's rows, of shape (n_rows,) each, by name.

        Raises `CheckpointCorruptError` where the object is missing or altered, or holds values that no
        policy can have written.
        """
        fields, where = self.fields, f"{self.key} in {objects.location}"
        data = read_verified(objects, self.key, self.sha256, fields.most_bytes)
        values = decompress(data, fields.shape, fields.stored, where)
        state = {}
        for name, dtype, row in zip(fields.names, fields.dtypes, values[:, :n_rows], strict=True):
            limit = 1 if dtype == "bool" else np.iinfo(dtype).max
            if (row > limit).any():
                raise CheckpointCorruptError(f"{where}: {name} is above {limit}.")
            state[name] = row.astype(dtype)
        return state


@dataclass(frozen=True)
class Witness:
    """An object that the fitting process wrote: a process that finds it sees the same store.

    A process that has found it remembers ``token``, and does not look again.
    """

    key: str
    sha256: str
    token: str

    @classmethod
    def of(cls, key: str, data: bytes) -> Witness:
        """Return the witness of an object that this process has written."""
        witness = cls(key, digest(data), uuid4().hex)
        of_process(Proofs).settle(witness.token)
        return witness

    def check(self, objects: ObjectStore) -> None:
        """Raise `CheckpointError` in a process that does not find the object; looks once."""
        of_process(Proofs).once(self.token, lambda: self._look(objects))

    def _look(self, objects: ObjectStore) -> None:
        found = objects.get(self.key, MAX_WITNESS_BYTES)
        if found is None or digest(found) != self.sha256:
            raise CheckpointError(
                f"{this_process()} cannot use {objects.location}, where row state goes: it does not find "
                "there what the process that fits wrote. Give a checkpoint (or, without one, a dask "
                "temporary-directory) that every worker sees under the same path, or the URL of an object "
                "store."
            )


@dataclass(frozen=True)
class RowStateWriter:
    """Where the tasks of one step write row state, and read what earlier steps wrote.

    The array of ``layout`` has the shape (steps, slots, fields, slot rows).
    """

    objects: ObjectStore
    layout: ArrayLayout
    fields: RowFields
    step: int
    witness: Witness

    def write(self, slot: int, values: Mapping[str, NDArray[Any]]) -> SlotState:
        """Write a chunk's values as one object; the same values make the same object.

        Raises `CheckpointError` where this process does not see the store, or cannot write there.
        """
        self.witness.check(self.objects)
        fields = self.fields
        padded = np.zeros(fields.shape, dtype=fields.stored)
        for row, name in zip(padded, fields.names, strict=True):
            row[: len(values[name])] = values[name]
        data = compress(padded)
        key = self.layout.chunk_key(self.step, slot)
        self.objects.put(key, data)
        return SlotState(key, digest(data), fields)

    def read(self, state: SlotState, n_rows: int) -> dict[str, NDArray[Any]]:
        """Do as `SlotState.read`; raises `CheckpointError` too where this process does not see the store."""
        self.witness.check(self.objects)
        return state.read(self.objects, n_rows)


def rows_layout(name: str, fields: RowFields, n_steps: int, n_slots: int) -> ArrayLayout:
    """Return the layout of the array that holds the state of all steps."""
    return ArrayLayout(
        name,
        (n_steps, n_slots, *fields.shape),
        (1, 1, *fields.shape),
        fields.stored.name,
        ("step", "slot", "field", "row"),
        compressed=True,
        attributes={"fields": list(fields.names), "dtypes": list(fields.dtypes)},
    )
