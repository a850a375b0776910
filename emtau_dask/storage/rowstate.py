"""Row state in zarr, by slot: which rows are active, and what a policy keeps about each.

Data chunk i owns zarr chunk i (its *slot*) of regular arrays padded to the
longest chunk, so no two tasks ever write one zarr chunk. State is never changed
in place: iteration t reads what an earlier iteration wrote and writes a new
*generation*; a chunk that is skipped writes nothing and its last copy stays
the one referred to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

__all__ = ["Generation", "RowStateStore"]


@dataclass(frozen=True, eq=False)
class Generation:
    """The row arrays that one iteration writes; travels into tasks.

    Attributes
    ----------
    arrays : mapping of str to zarr.Array
        Each of shape (n_slots · slot_rows,), one zarr chunk for each slot.
    slot_rows : int
        Rows of a slot: of the longest data chunk.
    """

    arrays: Mapping[str, zarr.Array[Any]]
    slot_rows: int

    def read(self, slot: int, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return the values of the ``n_rows`` rows of a data chunk, by array name."""
        start = slot * self.slot_rows
        return {name: np.asarray(array[start : start + n_rows]) for name, array in self.arrays.items()}

    def write(self, slot: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Write a data chunk's values, as one whole zarr chunk an array."""
        start = slot * self.slot_rows
        for name, array in self.arrays.items():
            padded = np.zeros(self.slot_rows, dtype=array.dtype)
            padded[: len(values[name])] = values[name]
            array[start : start + self.slot_rows] = padded


class RowStateStore:
    """The generations of a fit, and which of them holds each slot's last state.

    Parameters
    ----------
    group : zarr.Group
        Empty; owned by this store.
    chunk_rows : tuple of int
        Rows of the data chunks.
    dtypes : mapping of str to dtype
        The arrays to keep.
    """

    def __init__(
        self, group: zarr.Group, chunk_rows: tuple[int, ...], dtypes: Mapping[str, np.dtype[Any]]
    ) -> None:
        self._group = group
        self._chunk_rows = chunk_rows
        self._dtypes = dict(dtypes)
        self._generations: dict[int, Generation] = {}
        self._latest: dict[int, int] = {}

    def begin(self, iteration: int) -> Generation:
        """Create the arrays that ``iteration`` writes."""
        slot_rows = max(self._chunk_rows)
        group = self._group.create_group(str(iteration))
        arrays = {
            name: group.create_array(
                name,
                shape=(len(self._chunk_rows) * slot_rows,),
                chunks=(slot_rows,),
                dtype=dtype,
                fill_value=0,
                config={"write_empty_chunks": True},
            )
            for name, dtype in self._dtypes.items()
        }
        generation = Generation(arrays, slot_rows)
        self._generations[iteration] = generation
        return generation

    def latest(self, slot: int) -> Generation | None:
        """Return the generation that holds a slot's last state, None where there is none."""
        iteration = self._latest.get(slot)
        return None if iteration is None else self._generations[iteration]

    def commit(self, iteration: int, written: Iterable[int], forgotten: Iterable[int] = ()) -> None:
        """Let ``written`` slots refer to ``iteration``, drop ``forgotten`` ones, remove the unreferenced."""
        self._latest.update(dict.fromkeys(written, iteration))
        for slot in forgotten:
            self._latest.pop(slot, None)
        for unused in set(self._generations) - set(self._latest.values()):
            del self._generations[unused]
            del self._group[str(unused)]

    def read(self, slot: int) -> dict[str, NDArray[Any]]:
        """Return the last state of a slot's rows; raises KeyError where there is none."""
        return self._generations[self._latest[slot]].read(slot, self._chunk_rows[slot])
