"""The port by which the states of a fit are saved, and a temporary store without a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol
from uuid import uuid4

import dask
import numpy as np

from emtau_dask.data.source import Source
from emtau_dask.em.state import FitState, RunState
from emtau_dask.em.verification import DataVerifier
from emtau_dask.errors import CheckpointError, ConfigError, StorageError
from emtau_dask.policies.policy import ACTIVE, ActivityPolicy, checked_row_arrays
from emtau_dask.storage.files import ScratchFolder
from emtau_dask.storage.row_state import RowFields, RowStateWriter, StoreMarker, most_object_rows, rows_layout
from emtau_dask.storage.stores import LocalObjects

MARKER = "marker"
"""Key of the object in a temporary folder by which other processes verify that they see the folder."""
REMEDY = (
    "set dask's temporary-directory (DASK_TEMPORARY_DIRECTORY=FOLDER before a command, in Python "
    "dask.config.set(temporary_directory=FOLDER)) to another folder"
)


class StateStore(Protocol):
    """Saves the states of a fit."""

    @property
    def state(self) -> FitState:
        """The last state saved: where the fit begins, or is resumed."""
        ...

    @property
    def fields(self) -> RowFields | None:
        """The fields of row state; None if the policy keeps none."""
        ...

    @property
    def verifier(self) -> DataVerifier:
        """The digests of the data read so far."""
        ...

    def writer(self) -> RowStateWriter | None:
        """Return the writer of the next iteration's row state; None if none is kept."""
        ...

    def save(self, state: FitState, *, commit: bool) -> None:
        """Save a new state; with ``commit``, so that it survives this process."""
        ...

    def due(self, step: int) -> bool:
        """Return whether the state after iteration (or k-means pass) ``step`` is committed."""
        ...

    def explained_errors(self) -> AbstractContextManager[None]:
        """Add to the store's errors what can be resumed, or that another process has continued the fit."""
        ...


def row_fields(rows: Source, n_components: int, policy: ActivityPolicy, max_iter: int) -> RowFields | None:
    """Return the row arrays that ``policy`` keeps, with the active mask; None if it keeps none."""
    arrays = checked_row_arrays(policy, n_components, max_iter)
    if arrays is None:
        return None
    dtypes = {ACTIVE: np.dtype(np.bool_)} | {array.name: array.dtype for array in arrays}
    kept = [array.name for array in arrays if array.keep]
    longest = max(rows.chunk_rows, default=1)
    if not rows.addressable:  # Each chunk has a task of its own.
        return RowFields.of(dtypes, longest, kept)
    return RowFields.of(dtypes, max(1, most_object_rows((length, 1) for length in rows.chunk_rows)), kept)


class TemporaryStateStore:
    """Keeps row state in a temporary folder; nothing survives the process.

    ``objects`` and ``fields`` are None if the policy keeps no row state.
    """

    def __init__(self, objects: LocalObjects | None, fields: RowFields | None, n_chunks: int) -> None:
        self.state, self.verifier = FitState(), DataVerifier()
        self.objects = objects
        self.fields, self._n_chunks = fields, n_chunks
        self._step = 0
        self._keys: set[str] = set()
        self._marker: StoreMarker | None = None
        if objects is not None:
            data = uuid4().bytes
            objects.put(MARKER, data)
            self._marker = StoreMarker.of(MARKER, data)

    def writer(self) -> RowStateWriter | None:
        """Return a writer to unused keys; None if the policy keeps no row state."""
        if self.objects is None or self._marker is None or self.fields is None:
            return None
        self._step += 1
        layout = rows_layout("rows", self.fields, self._step + 1, self._n_chunks)
        return RowStateWriter(self.objects, layout, self.fields, self._step, self._marker)

    def save(self, state: FitState, *, commit: bool) -> None:
        """Remove the row state that the new one replaces."""
        self.state = state
        self.retain(*(run for run in (state.current, state.best) if run is not None))

    def retain(self, *runs: RunState) -> None:
        """Remove all row state except that of ``runs``."""
        keys = {stored.object.key for run in runs for stored in run.row_state.values()}
        if self.objects is not None:
            self.objects.delete(self._keys - keys)
        self._keys = keys

    def due(self, step: int) -> bool:
        """Never: nothing is committed."""
        return False

    def explained_errors(self) -> AbstractContextManager[None]:
        """Add nothing: see `temporary_state_store`."""
        return nullcontext()


@contextmanager
def _scratch_errors() -> Iterator[None]:
    """Raise `StorageError` for errors of the folder: without a checkpoint nothing can be resumed."""
    try:
        yield
    except CheckpointError as error:
        raise StorageError(
            f"{error} It is the temporary folder for the state of rows. The fit has no checkpoint, so "
            f"nothing can be resumed. To fit again, {REMEDY}."
        ) from error


@contextmanager
def temporary_state_store(fields: RowFields | None, n_chunks: int) -> Iterator[TemporaryStateStore]:
    """Open a temporary store, with a local folder for row state unless ``fields`` is None.

    The folder is in dask's ``temporary-directory``, or the system's; folders of killed processes are removed
    first.

    Raises
    ------
    ConfigError
        The folder cannot be created.
    StorageError
        An object cannot be written there, or has vanished.
    """
    if fields is None:
        yield TemporaryStateStore(None, None, n_chunks)
        return
    place = dask.config.get("temporary-directory", None)
    with _scratch_errors(), ExitStack() as stack:
        try:
            folder = ScratchFolder("emtau-state-", place)
            stack.callback(folder.remove)
            objects = folder.path.absolute() / "objects"
            objects.mkdir()
        except OSError as error:
            raise ConfigError(
                f"row state cannot be kept in {place or tempfile.gettempdir()}: {error}. To fit, {REMEDY}."
            ) from error
        yield TemporaryStateStore(LocalObjects(str(objects)), fields, n_chunks)
