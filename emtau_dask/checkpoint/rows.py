"""Row state in the order of the data's rows: by chunk, and as plain arrays at the end of a fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import ChunkRange, chunk_ranges
from emtau_dask.em.state import RunState
from emtau_dask.errors import CheckpointCorruptError, CheckpointError
from emtau_dask.policies.policy import ACTIVE
from emtau_dask.storage.files import each
from emtau_dask.storage.objects import ArrayLayout, ObjectStore, compress, group_document
from emtau_dask.storage.row_state import RowFields, RowStateRef, read_row_state

FOLDER = "rows"
"""Folder of the arrays of a fit that has ended."""
MAX_ARRAY_ROWS = 2**20
"""Maximum rows of a chunk of these arrays, unless a chunk of the data has more."""


@dataclass(frozen=True)
class ScoredNext:
    """Which rows of a chunk without row state the next iteration scores: all, or those of a sample.

    Attributes
    ----------
    samples : Samples or None
    index : int
        Of the sample.
    """

    samples: Samples | None = None
    index: int = 0

    def __call__(self, chunk_range: ChunkRange) -> NDArray[np.bool_]:
        """Return the mask of a chunk's rows, of shape (n_rows,)."""
        positions = np.arange(chunk_range.n_rows)
        if self.samples is None:
            return np.ones(len(positions), np.bool_)
        return self.samples.numbers(chunk_range, positions) < self.samples.shares[self.index]


@dataclass(frozen=True)
class CommittedRows:
    """Reads the row state of a commit; picklable.

    Attributes
    ----------
    objects : ObjectStore
    number : int
        Of the commit.
    fields : RowFields
    scored_next : ScoredNext or None
        None if row state alone says which rows are active.
    """

    objects: ObjectStore
    number: int
    fields: RowFields
    scored_next: ScoredNext | None

    def read(self, chunk_range: ChunkRange, stored: RowStateRef | None) -> dict[str, NDArray[Any]]:
        """Return the arrays of a chunk's rows, of shape (n_rows,) each, by name.

        Arrays that the policy does not keep for inactive rows are masked there. Rows that were not scored yet
        have zeros.

        Raises
        ------
        CheckpointError
            The run has gone on and removed the object.
        CheckpointCorruptError
            The object was altered.
        """
        n_rows = chunk_range.n_rows
        if stored is None:
            found = {name: np.zeros(n_rows, dtype) for name, dtype in self.fields.by_name.items()}
        else:
            found = self._read(stored, n_rows)
        active = found.pop(ACTIVE)
        masked = {
            name: values if name in self.fields.kept else np.ma.MaskedArray(values, ~active)
            for name, values in found.items()
        }
        if stored is None or self.scored_next is not None:
            active = (self.scored_next or ScoredNext())(chunk_range)
        return {ACTIVE: active, **masked}

    def _read(self, stored: RowStateRef, n_rows: int) -> dict[str, NDArray[Any]]:
        try:
            return read_row_state(stored, self.objects, n_rows)
        except CheckpointCorruptError as error:
            if self.objects.get(stored.object.key, 0) is not None:
                raise
            raise CheckpointError(
                f"the run in {self.objects.location} has moved on: the state of rows that its commit "
                f"{self.number} refers to is gone. Open it again (emtau_dask.open_run)."
            ) from error


def write_rows(
    objects: ObjectStore, number: int, fields: RowFields, chunk_rows: Sequence[int], state: RunState
) -> None:
    """Write the row state of a run as a plain zarr array for each field, of shape (rows,), 0 where masked.

    The metadata document of an array is written last, so that nobody reads an array with missing rows.

    Parameters
    ----------
    objects : ObjectStore
    number : int
        Of the commit with this state. It is an attribute of every array, as are the iteration, and whether
        the values are of all rows or of active ones only.
    fields : RowFields
    chunk_rows : sequence of int
        Of the data.
    state : RunState

    Raises
    ------
    CheckpointError
        The store failed.
    """
    rows = CommittedRows(objects, number, fields, ScoredNext() if state.full_pass_next else None)
    longest = max(chunk_rows)
    length = longest * max(1, min(MAX_ARRAY_ROWS, sum(chunk_rows)) // longest)
    layouts = {
        name: ArrayLayout(
            f"{FOLDER}/{name}",
            (sum(chunk_rows),),
            (length,),
            dtype.name,
            ("row",),
            compressed=True,
            attributes={
                "commit": number,
                "iteration": state.iteration,
                "of": "all rows" if name in (ACTIVE, *fields.kept) else "active rows",
            },
        )
        for name, dtype in fields.by_name.items()
    }
    for index, parts in enumerate(_pieces(chunk_rows, length)):
        found = [
            (rows.read(chunk_range, state.row_state.get(chunk_range.chunk)), own)
            for chunk_range, own in parts
        ]
        objects_of_piece = {}
        for name, layout in layouts.items():
            values = np.concatenate([np.ma.getdata(values[name])[own] for values, own in found])
            padded = np.zeros(length, layout.dtype)
            padded[: len(values)] = values
            objects_of_piece[layout.chunk_key(index)] = compress(padded)
        each(lambda item: objects.put(*item), objects_of_piece.items())
    documents = {f"{layout.name}/zarr.json": layout.document() for layout in layouts.values()}
    for key, document in {**documents, f"{FOLDER}/zarr.json": group_document({})}.items():
        objects.put(key, document)


def remove_rows(objects: ObjectStore) -> None:
    """Remove the arrays of a fit that is continued, their documents first."""
    keys = objects.list(f"{FOLDER}/")
    documents = [key for key in keys if key.endswith("/zarr.json")]
    objects.delete(documents)
    objects.delete(set(keys) - set(documents))


def _pieces(chunk_rows: Sequence[int], length: int) -> Iterator[list[tuple[ChunkRange, slice]]]:
    """Yield the chunks of every ``length`` rows, and which of their rows these are."""
    piece: list[tuple[ChunkRange, slice]] = []
    begin = 0
    for chunk_range in chunk_ranges(chunk_rows).values():
        while begin + length <= chunk_range.stop:
            piece.append((chunk_range, _own(chunk_range, begin, begin + length)))
            yield piece
            piece, begin = [], begin + length
        if begin < chunk_range.stop:
            piece.append((chunk_range, _own(chunk_range, begin, begin + length)))
    if piece:
        yield piece


def _own(chunk_range: ChunkRange, begin: int, end: int) -> slice:
    return slice(max(0, begin - chunk_range.start), min(end, chunk_range.stop) - chunk_range.start)
