"""Writing a fit to a checkpoint: the state store, and the content of a commit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.checkpoint.codec import FormatError
from emtau_dask.checkpoint.manifest import (
    Attempt,
    ChunkDigests,
    Content,
    Manifest,
    array_layouts,
    place_of,
)
from emtau_dask.checkpoint.reader import SavedFit
from emtau_dask.checkpoint.rows import remove_rows, write_rows
from emtau_dask.checkpoint.state import CONTENT, MANIFEST, Frame, digest_table
from emtau_dask.em.starts import MAX_KMEANS_PASSES
from emtau_dask.em.state import FitState
from emtau_dask.em.verification import DataVerifier
from emtau_dask.errors import CheckpointError, CheckpointMismatchError, StoreUnreachableError
from emtau_dask.process import numerical_environment
from emtau_dask.storage.commits import CommitLog, new_attempt
from emtau_dask.storage.files import each
from emtau_dask.storage.objects import ObjectStore, digest, encode, group_document
from emtau_dask.storage.row_state import RowFields, RowStateWriter, StateObject, StoreMarker, rows_layout

STEPS_PER_PASS = 8
"""Maximum number of objects that a pass and its commit write for one array."""

LOG = logging.getLogger(__name__)


def _stored_by(state: FitState) -> dict[str, StateObject]:
    """Return the objects of row state of a commit, by key."""
    runs = (run for run in (state.current, state.best) if run is not None)
    return {stored.object.key: stored.object for run in runs for stored in run.row_state.values()}


class CheckpointStateStore:
    """Commits the states of a fit to a checkpoint; its methods raise `CheckpointError` if the store fails.

    Parameters
    ----------
    log : CommitLog
        Of a new run, or of one that this process resumes.
    manifest : Manifest
        The part that all commits have in common.
    fields : RowFields or None
        None if the policy keeps no row state.
    verifier : DataVerifier

    Attributes
    ----------
    verifier : DataVerifier
    state : FitState
        The newest state, or the one with which the fit begins or is resumed.
    """

    def __init__(
        self,
        log: CommitLog,
        manifest: Manifest,
        fields: RowFields | None,
        verifier: DataVerifier,
    ) -> None:
        self._log = log
        self.fields, self.verifier, self.state = fields, verifier, FitState()
        self._manifest = replace(
            manifest,
            run=log.run,
            attempt=new_attempt(max(log.last, 0)),
            environment=numerical_environment(compiled=manifest.config.compiled),
        )
        self._prefix = f"attempts/{self._manifest.attempt}"
        config, data = manifest.config, manifest.data
        self._chunk_rows = np.repeat(*np.array(data.chunks, dtype=np.int64).reshape(-1, 2).T)
        n_chunks = len(self._chunk_rows)
        passes = config.max_iter + MAX_KMEANS_PASSES + config.requested.n_components + 4
        n_steps = STEPS_PER_PASS * len(config.seeds) * passes + 1
        self._layouts = array_layouts(config, data.shape[1], n_chunks, self._prefix, n_steps)
        if fields is not None:
            self._layouts["rows"] = rows_layout(f"{self._prefix}/rows", fields, n_steps, n_chunks)
        self._marker: StoreMarker | None = None
        self._step = 0
        self._known: Mapping[tuple[str, str], str] = {}
        self._seen: set[str] = set()
        self._unsynced: set[str] = set()
        self._swept = log.last < 0

    def inherit(self, saved: SavedFit, state: FitState) -> None:
        """Continue from ``saved``, whose objects are stored already, at ``state``.

        Raises `CheckpointMismatchError` if its row state has other arrays than the policy keeps.
        """
        ours = () if self.fields is None else self.fields.names
        for attempt in saved.manifest.attempts:
            if attempt.fields != ours:
                raise CheckpointMismatchError(
                    f"the policy keeps the row arrays {list(ours)}; the checkpointed run had "
                    f"{list(attempt.fields)}. Give the policy that the run was begun with."
                )
        if saved.state.finished and not state.finished:
            remove_rows(self.objects)
        self.state = state
        self._log.keep(saved.number, saved.references)
        self._seen = set(_stored_by(saved.state))
        self._known = saved.known

    @property
    def run(self) -> str:
        """The run's id."""
        return self._log.run

    @property
    def objects(self) -> ObjectStore:
        """The store of all objects."""
        return self._log.objects

    def _write_documents(self) -> StoreMarker:
        """Write the documents of this process's arrays, once and before its objects; return their marker."""
        if self._marker is None:
            documents = {f"{layout.name}/zarr.json": layout.document() for layout in self._layouts.values()}
            own = f"{self._prefix}/zarr.json"
            documents[own] = group_document({"environment": self._manifest.environment})
            each(lambda item: self.objects.put(*item), documents.items())
            self.objects.sync(documents)
            self._marker = StoreMarker.of(own, documents[own])
        return self._marker

    def writer(self) -> RowStateWriter | None:
        """Return a writer to unused keys; None if the policy keeps no row state."""
        if self.fields is None:
            return None
        self._step += 1
        return RowStateWriter(
            self.objects, self._layouts["rows"], self.fields, self._step, self._write_documents()
        )

    def due(self, step: int) -> bool:
        """Return whether ``step`` is divisible by ``checkpoint_every``."""
        return step % self._manifest.config.requested.checkpoint_every == 0

    @contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Add to the store's errors what can be resumed, or that another process has continued the run."""
        try:
            with self._log.takeover_errors():
                yield
        except StoreUnreachableError as error:
            raise StoreUnreachableError(f"{error} {self._log.offline_advice()}") from error
        except CheckpointError as error:
            if type(error) is not CheckpointError:
                raise
            raise CheckpointError(f"{error} {self._log.resume_advice()}") from error

    def save(self, state: FitState, *, commit: bool) -> None:
        """Keep a new state; with ``commit`` write it as a commit.

        Raises `CheckpointTakenError` if another process has continued or replaced this run, and
        `CheckpointError` if the store failed, or if a commit cannot have such a state.
        """
        self.state = state
        keys = set(_stored_by(state))
        self._log.written(keys)
        self._unsynced |= keys - self._seen
        self._seen = keys
        if commit:
            self._commit(state, keys)

    def _commit(self, state: FitState, row_state: set[str]) -> None:
        self._write_documents()
        self._step += 1
        covariance_type = self._manifest.config.requested.covariance_type
        frame = Frame(covariance_type, self._layouts, self._chunk_rows, _attempts_of(state))
        arrays = _NewArrays(frame, self._step, self._known)
        manifest = replace(
            self._manifest,
            number=self._log.last + 1,
            attempts=frame.attempts,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        contents = tuple(
            ChunkDigests(*key, digest_table(found, frame, "contents"))
            for key, found in sorted(self.verifier.known.items())
        )
        try:
            json = MANIFEST.encode(manifest, arrays)
            json |= CONTENT.encode(Content(manifest.config.given, state, contents), arrays)
        except FormatError as error:
            raise CheckpointError(
                f"the fit has come to a state that cannot be committed ({error}). See whether the data and "
                "the settings are what they should be."
            ) from error
        each(lambda item: self.objects.put(*item), arrays.writes.items())
        self._log.written(arrays.writes)
        references = {*arrays.used.values(), *row_state}
        self.objects.sync([*arrays.writes, *(self._unsynced & references)])
        self._log.append(json, references)
        LOG.debug("commit %d", self._log.last)
        self._unsynced -= references
        self._known, self._step = arrays.used, arrays.last_step
        if state.finished and state.current is not None and self.fields is not None:
            write_rows(self.objects, self._log.last, self.fields, self._chunk_rows.tolist(), state.current)
        if state.finished or not self._swept:
            self._log.sweep_everything(self._manifest.attempt)
            self._swept = True


def _attempts_of(state: FitState) -> tuple[Attempt, ...]:
    """Return the attempts that wrote the row state of a fit, in a fixed order."""
    fields = {place_of(stored)[0]: stored.fields for stored in _stored_by(state).values()}
    return tuple(
        Attempt(name, of.names, of.dtypes, of.object_rows, of.kept) for name, of in sorted(fields.items())
    )


class _NewArrays:
    """The arrays of a new commit; an array of the same bytes as one of the last commit is not written again.

    Parameters
    ----------
    frame : Frame
    step : int
        Step of the new objects; a second object of the same array has the next step.
    known : mapping of (str, str) to str
        The keys of the arrays of the last commit, by name and digest.

    Attributes
    ----------
    writes : dict of str to bytes
        New objects.
    used : dict of (str, str) to str
        The keys of all arrays of the new commit, like ``known``.
    last_step : int
    """

    def __init__(self, frame: Frame, step: int, known: Mapping[tuple[str, str], str]) -> None:
        self.frame, self.last_step = frame, step
        self._step, self._known = step, known
        self.writes: dict[str, bytes] = {}
        self.used: dict[tuple[str, str], str] = {}

    def put(self, name: str, values: NDArray[Any]) -> dict[str, str]:
        """Return the reference to an array."""
        data = encode(values)
        sha256, step = digest(data), self._step
        key = self.used.get((name, sha256)) or self._known.get((name, sha256), "")
        if not key:
            while (key := self.frame.layouts[name].chunk_key(step)) in self.writes:
                step += 1
            self.last_step = max(self.last_step, step)
            self.writes[key] = data
        self.used[name, sha256] = key
        return {"key": key, "sha256": sha256}
