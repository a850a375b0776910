"""Row state in zarr, by slot: which rows are active, and what a policy keeps about each.

Data chunk i owns slot i of one regular array, padded to the longest chunk, so
no two tasks ever write one object. State is never changed in place: a step
reads what an earlier step wrote and writes anew; for a chunk that is skipped, or whose
state does not change, nothing is written, and its last copy stays the one referred to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import CheckpointCorruptError
from emtau_dask.storage.objects import ObjectStore
from emtau_dask.storage.stored import ArrayLayout, digest, encode, read_array

__all__ = ["RowFields", "RowStateWriter", "SlotState", "rows_layout"]


@dataclass(frozen=True)
class RowFields:
    """The row arrays of a policy, held side by side in one array.

    Attributes
    ----------
    names : tuple of str
    dtypes : tuple of str
        The smallest that fits each; they are stored in the widest of them.
    slot_rows : int
        Rows of the longest chunk.
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
        """The type of each, by name."""
        return {name: np.dtype(dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)}

    @property
    def stored(self) -> np.dtype[Any]:
        """The unsigned integer type that holds every field."""
        return np.dtype(f"u{max(np.dtype(name).itemsize for name in self.dtypes)}")


@dataclass(frozen=True)
class SlotState:
    """Where a slot's last state is; travels into tasks.

    Attributes
    ----------
    key : str
    sha256 : str
    fields : RowFields
        Of those who wrote it.
    """

    key: str
    sha256: str
    fields: RowFields

    def read(self, objects: ObjectStore, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return the values of a chunk's rows, by name.

        Raises
        ------
        CheckpointCorruptError
            The object is missing or altered, or says what no policy can have written.
        """
        fields = self.fields
        shape = (len(fields.names), fields.slot_rows)
        values = read_array(objects, self.key, self.sha256, shape, fields.stored, compressed=True)
        state = {}
        for name, dtype, row in zip(fields.names, fields.dtypes, values[:, :n_rows], strict=True):
            limit = 1 if dtype == "bool" else np.iinfo(dtype).max
            if (row > limit).any():
                raise CheckpointCorruptError(f"{self.key} in {objects.location}: {name} is above {limit}.")
            state[name] = row.astype(dtype)
        return state


@dataclass(frozen=True)
class RowStateWriter:
    """Where the tasks of one step write.

    Attributes
    ----------
    objects : ObjectStore
    layout : ArrayLayout
        Of shape (steps, slots, fields, slot rows).
    fields : RowFields
    step : int
    """

    objects: ObjectStore
    layout: ArrayLayout
    fields: RowFields
    step: int

    def write(self, slot: int, values: Mapping[str, NDArray[Any]]) -> SlotState:
        """Write a chunk's values as one object; again with the same values, the same object."""
        fields = self.fields
        padded = np.zeros((len(fields.names), fields.slot_rows), dtype=fields.stored)
        for row, name in zip(padded, fields.names, strict=True):
            row[: len(values[name])] = values[name]
        data = encode(padded, compressed=True)
        key = self.layout.chunk_key(self.step, slot)
        self.objects.put(key, data)
        return SlotState(key, digest(data), fields)


def rows_layout(name: str, fields: RowFields, n_steps: int, n_slots: int) -> ArrayLayout:
    """Return the layout of the array that holds the state of all steps."""
    inner = (len(fields.names), fields.slot_rows)
    return ArrayLayout(
        name,
        (n_steps, n_slots, *inner),
        (1, 1, *inner),
        fields.stored.name,
        ("step", "slot", "field", "row"),
        compressed=True,
        attributes={"fields": list(fields.names), "dtypes": list(fields.dtypes)},
    )
