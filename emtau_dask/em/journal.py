"""How the states of a fit are saved: the port, and a journal that ends with the process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol
from uuid import uuid4

import dask
import numpy as np

from emtau_dask.data.source import Source
from emtau_dask.em.contents import Contents
from emtau_dask.em.state import FitState, RunState
from emtau_dask.errors import CheckpointError, ConfigError, StorageError
from emtau_dask.policies.policy import ACTIVE, ActivityPolicy, checked_row_arrays
from emtau_dask.storage.files import ScratchFolder
from emtau_dask.storage.row_state import RowFields, RowStateWriter, Witness, most_object_rows, rows_layout
from emtau_dask.storage.stores import LocalObjects

WITNESS = "witness"
"""Key of what a temporary folder holds beside row state."""
ELSEWHERE = (
    "set dask's temporary-directory (DASK_TEMPORARY_DIRECTORY=FOLDER before a command, in Python "
    "dask.config.set(temporary_directory=FOLDER)) to another folder"
)


class Journal(Protocol):
    """Saves the states of a fit."""

    @property
    def state(self) -> FitState:
        """The last state saved: where the fit begins, or is resumed."""
        ...

    @property
    def fields(self) -> RowFields | None:
        """The fields of row state; None for policies that keep none."""
        ...

    @property
    def contents(self) -> Contents:
        """What the data read so far was found to hold."""
        ...

    def writer(self) -> RowStateWriter | None:
        """Return what writes the next iteration's row state; None where none is kept."""
        ...

    def save(self, state: FitState, *, commit: bool) -> None:
        """Save a new state; with ``commit`` it must outlast this process."""
        ...

    def due(self, step: int) -> bool:
        """Return whether the state after iteration (or k-means pass) ``step`` is to be committed."""
        ...

    def watched(self) -> AbstractContextManager[None]:
        """Add to errors of the store what can be resumed, or that another process has continued the fit."""
        ...


def row_fields(rows: Source, n_components: int, policy: ActivityPolicy, max_iter: int) -> RowFields | None:
    """Return the row arrays that ``policy`` keeps, with the active mask; None where it keeps none."""
    arrays = checked_row_arrays(policy, n_components, max_iter)
    if arrays is None:
        return None
    dtypes = {ACTIVE: np.dtype(np.bool_)} | {array.name: array.dtype for array in arrays}
    kept = [array.name for array in arrays if array.keep]
    longest = max(rows.chunk_rows, default=1)
    if not rows.addressable:  # Each chunk has a task of its own.
        return RowFields.of(dtypes, longest, kept)
    return RowFields.of(dtypes, max(1, most_object_rows((length, 1) for length in rows.chunk_rows)), kept)


class TemporaryJournal:
    """Row state in a temporary folder; nothing outlasts the process.

    ``objects`` and ``fields`` are None where the policy keeps no row state; ``n_slots`` counts the chunks.
    """

    def __init__(self, objects: LocalObjects | None, fields: RowFields | None, n_slots: int) -> None:
        self.state, self.contents = FitState(), Contents()
        self.objects = objects
        self.fields, self._n_slots = fields, n_slots
        self._step = 0
        self._keys: set[str] = set()
        self._witness: Witness | None = None
        if objects is not None:
            data = uuid4().bytes
            objects.put(WITNESS, data)
            self._witness = Witness.of(WITNESS, data)

    def writer(self) -> RowStateWriter | None:
        """Return a writer to places not used before."""
        if self.objects is None or self._witness is None or self.fields is None:
            return None
        self._step += 1
        layout = rows_layout("rows", self.fields, self._step + 1, self._n_slots)
        return RowStateWriter(self.objects, layout, self.fields, self._step, self._witness)

    def save(self, state: FitState, *, commit: bool) -> None:
        """Remove the row state that the new one replaces."""
        self.state = state
        self.retain(*(run for run in (state.current, state.best) if run is not None))

    def retain(self, *runs: RunState) -> None:
        """Remove all row state but that of ``runs``."""
        keys = {slot.object.key for run in runs for slot in run.slots.values()}
        if self.objects is not None:
            self.objects.delete(self._keys - keys)
        self._keys = keys

    def due(self, step: int) -> bool:
        """Never: nothing is committed."""
        return False

    def watched(self) -> AbstractContextManager[None]:
        """Add nothing: see `temporary_journal`."""
        return nullcontext()


@contextmanager
def _errors_of_scratch() -> Iterator[None]:
    """Raise `StorageError` for errors of the store: there is no checkpoint, and nothing to resume."""
    try:
        yield
    except CheckpointError as error:
        raise StorageError(
            f"{error} It is the temporary folder for the state of rows. The fit has no checkpoint, so "
            f"nothing can be resumed. To fit again, {ELSEWHERE}."
        ) from error


@contextmanager
def temporary_journal(fields: RowFields | None, n_slots: int) -> Iterator[TemporaryJournal]:
    """Open a journal, with a temporary local folder for row state unless ``fields`` is None.

    The folder is in dask's ``temporary-directory``, or the system's; what killed processes left there
    is removed first.

    Raises
    ------
    ConfigError
        The folder cannot be created.
    StorageError
        Something cannot be written there, or is gone, before the block ends.
    """
    if fields is None:
        yield TemporaryJournal(None, None, n_slots)
        return
    place = dask.config.get("temporary-directory", None)
    with _errors_of_scratch(), ExitStack() as stack:
        try:
            folder = ScratchFolder("emtau-state-", place)
            stack.callback(folder.remove)
            objects = folder.path.absolute() / "objects"
            objects.mkdir()
        except OSError as error:
            raise ConfigError(
                f"row state cannot be kept in {place or tempfile.gettempdir()}: {error}. To fit, {ELSEWHERE}."
            ) from error
        yield TemporaryJournal(LocalObjects(str(objects)), fields, n_slots)
