"""Writing a fit to a checkpoint: the journal, and the content of a commit."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from emtau_dask.checkpoint.manifest import (
    COLUMNS,
    MAX_CONTENTS,
    PARAMETERS,
    PLACE_COLUMNS,
    STATISTICS,
    ArrayRef,
    AttemptEntry,
    ConfigEntry,
    ContentsEntry,
    FitEntry,
    FrozenEntry,
    HistoryEntry,
    Manifest,
    ParametersEntry,
    ProgressEntry,
    RunEntry,
    SourceEntry,
    SourceName,
    StartEntry,
    Stored,
    array_layouts,
    first_problem,
    packed,
    place_of,
    references_of,
)
from emtau_dask.checkpoint.reader import SavedFit
from emtau_dask.checkpoint.rows import remove_rows, write_rows
from emtau_dask.em.contents import Contents
from emtau_dask.em.starts import KMEANS_PASSES, GivenParameters
from emtau_dask.em.state import FitState, Progress, RunState
from emtau_dask.errors import CheckpointError, CheckpointMismatchError, StoreUnreachableError
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.process import numerical_environment
from emtau_dask.storage.commits import CommitLog, new_attempt
from emtau_dask.storage.files import each
from emtau_dask.storage.objects import ArrayLayout, ObjectStore, digest, encode, group_document
from emtau_dask.storage.row_state import RowFields, RowStateWriter, StateObject, Witness, rows_layout

STEPS_PER_PASS = 8
"""Upper bound of the objects that a pass and its commit write of one array."""

LOG = logging.getLogger(__name__)


def _stored_by(state: FitState) -> dict[str, StateObject]:
    """Return the objects that hold the row state of a commit, by key."""
    runs = (run for run in (state.current, state.best) if run is not None)
    return {slot.object.key: slot.object for run in runs for slot in run.slots.values()}


class CheckpointJournal:
    """Commits a fit to a checkpoint; where the store fails, its methods raise `CheckpointError`.

    Parameters
    ----------
    log : CommitLog
        Of a new run, or of one that this process resumes.
    config : ConfigEntry
    given : GivenParameters
        Starting parameters from the user.
    sources : mapping of str to SourceEntry or None
        ``data``, ``sample_weight`` and ``responsibilities_init``.
    fields : RowFields or None
        None where the policy keeps no row state.
    contents : Contents
        What the data is found to hold.
    compiled : bool
        Whether the fit uses compiled tiles.

    Attributes
    ----------
    contents : Contents
    state : FitState
        The newest state, or that with which the fit begins or is resumed.
    """

    def __init__(
        self,
        log: CommitLog,
        config: ConfigEntry,
        given: GivenParameters,
        sources: Mapping[str, SourceEntry | None],
        fields: RowFields | None,
        contents: Contents,
        *,
        compiled: bool,
    ) -> None:
        data = sources["data"]
        assert data is not None
        self._log, self._config, self._given, self._sources = log, config, given, sources
        self.fields, self.contents, self.state = fields, contents, FitState()
        self._environment = numerical_environment(compiled=compiled)
        self._attempt = new_attempt(max(log.last, 0))
        self._prefix = f"attempts/{self._attempt}"
        self._data = data
        n_chunks = sum(count for _, count in data.chunks)
        passes = config.max_iter + KMEANS_PASSES + config.n_components + 4
        n_steps = STEPS_PER_PASS * config.n_init * passes + 1
        self._layouts = array_layouts(config, n_chunks, self._prefix, n_steps)
        if fields is not None:
            self._layouts["rows"] = rows_layout(f"{self._prefix}/rows", fields, n_steps, n_chunks)
        self._witness: Witness | None = None
        self._step = 0
        self._stored: Sequence[Stored] = ()
        self._attempts: Sequence[str] = ()
        self._seen: set[str] = set()
        self._unsynced: set[str] = set()
        self._swept = log.last < 0

    def inherit(self, saved: SavedFit, state: FitState) -> None:
        """Continue from ``saved``, whose objects are stored already, at ``state``.

        Raises `CheckpointMismatchError` where its row state has other arrays than the policy keeps.
        """
        ours = () if self.fields is None else self.fields.names
        for attempt in saved.manifest.attempts:
            if tuple(attempt.fields) != ours:
                raise CheckpointMismatchError(
                    f"the policy keeps the row arrays {list(ours)}; the checkpointed run had "
                    f"{attempt.fields}. Give the policy that the run was begun with."
                )
        if saved.state.finished and not state.finished:
            remove_rows(self.objects)
        self.state = state
        self._log.keep(saved.number, saved.references)
        self._seen = set(_stored_by(saved.state))
        self._stored = saved.stored
        self._attempts = [attempt.id for attempt in saved.manifest.attempts]

    @property
    def run(self) -> str:
        """The run's id."""
        return self._log.run

    @property
    def objects(self) -> ObjectStore:
        """Where everything goes."""
        return self._log.objects

    def _begun(self) -> Witness:
        """Write the documents of this process's arrays, before all else, and return their witness."""
        if self._witness is None:
            documents = {f"{layout.name}/zarr.json": layout.document() for layout in self._layouts.values()}
            own = f"{self._prefix}/zarr.json"
            documents[own] = group_document({"environment": self._environment})
            each(lambda item: self.objects.put(*item), documents.items())
            self.objects.sync(documents)
            self._witness = Witness.of(own, documents[own])
        return self._witness

    def writer(self) -> RowStateWriter | None:
        """Return a writer to unused keys; None where the policy keeps no row state."""
        if self.fields is None:
            return None
        self._step += 1
        return RowStateWriter(self.objects, self._layouts["rows"], self.fields, self._step, self._begun())

    def due(self, step: int) -> bool:
        """Return whether ``step`` is divisible by ``checkpoint_every``."""
        return step % self._config.checkpoint_every == 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Add to errors of the store what can be resumed; name another process that continued the run."""
        try:
            with self._log.watched():
                yield
        except StoreUnreachableError as error:
            raise StoreUnreachableError(f"{error} {self._log.remembered()}") from error
        except CheckpointError as error:
            if type(error) is not CheckpointError:
                raise
            raise CheckpointError(f"{error} {self._log.standing()}") from error

    def save(self, state: FitState, *, commit: bool) -> None:
        """Remember a new state, and write it as a commit where ``commit`` says so.

        Raises `CheckpointTakenError` where another process has continued or replaced this run, and
        `CheckpointError` where the store failed, or where a commit cannot have such a state.
        """
        self.state = state
        keys = set(_stored_by(state))
        self._log.written(keys)
        self._unsynced |= keys - self._seen
        self._seen = keys
        if commit:
            self._commit(state, keys)

    def _commit(self, state: FitState, row_state: set[str]) -> None:
        self._begun()
        self._step += 1
        entries = _Entries(self._layouts, self._step, self._stored, self._attempts)
        content = {
            "run": self._log.run,
            "number": self._log.last + 1,
            "attempt": self._attempt,
            "attempts": entries.attempts_of(state),
            "environment": self._environment,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self._config.model_copy(update={"given": entries.given(self._given)}),
            "fit": entries.fit(state, self.contents.known),
            **self._sources,
        }
        try:
            manifest = Manifest.model_validate(content)
        except ValidationError as error:
            raise CheckpointError(
                f"the fit has come to a state that cannot be committed ({first_problem(error)}). See whether "
                "the data and the settings are what they should be."
            ) from error
        each(lambda item: self.objects.put(*item), entries.writes.items())
        self._log.written(entries.writes)
        references = {ref.key for ref in references_of(manifest)} | row_state
        self.objects.sync([*entries.writes, *(self._unsynced & references)])
        self._log.append(manifest.model_dump(mode="json", exclude={"run", "number"}), references)
        LOG.debug("commit %d", self._log.last)
        self._unsynced -= references
        self._stored, self._attempts, self._step = entries.stored, entries.attempts, entries.last_step
        self._leave_rows(state)
        if state.finished or not self._swept:
            self._log.sweep_everything(self._attempt)
            self._swept = True

    def _leave_rows(self, state: FitState) -> None:
        """Leave the row state of a fit that has ended as plain arrays."""
        if state.finished and state.current is not None and self.fields is not None:
            chunk_rows = [rows for rows, count in self._data.chunks for _ in range(count)]
            write_rows(self.objects, self._log.last, self.fields, chunk_rows, state.current)


class _Entries:
    """Turns the records of one commit into entries of its manifest, and collects the objects to write.

    New objects go to ``step``, those of a second run to the next one. What is among ``known``, by identity,
    is stored already. Tables of chunks there refer to ``attempts`` by number.
    """

    def __init__(
        self, layouts: Mapping[str, ArrayLayout], step: int, known: Sequence[Stored], attempts: Sequence[str]
    ) -> None:
        self._layouts, self._step, self._known = layouts, step, known
        self.attempts, self.last_step = attempts, step
        self.stored: list[Stored] = []
        self.writes: dict[str, bytes] = {}

    def attempts_of(self, state: FitState) -> list[AttemptEntry]:
        """Return who wrote the row state of ``state``, in a fixed order; to be called before `fit`."""
        fields = {place_of(stored)[0]: stored.fields for stored in _stored_by(state).values()}
        attempts = sorted(fields)
        if attempts != list(self.attempts):
            self._known = [entry for entry in self._known if entry[0] != "chunks"]
        self.attempts = attempts
        return [
            AttemptEntry.model_validate(
                {
                    "id": name,
                    "fields": list(fields[name].names),
                    "dtypes": list(fields[name].dtypes),
                    "kept": list(fields[name].kept),
                    "object_rows": fields[name].object_rows,
                }
            )
            for name in attempts
        ]

    def given(self, given: GivenParameters) -> ParametersEntry:
        """Return the entry of starting parameters."""
        covariances, factors = given.precisions or (None, None)
        arrays = zip(PARAMETERS, (given.weights, given.means, covariances, factors), strict=True)
        return ParametersEntry(
            **{name: self._itself(name, array) for name, array in arrays if array is not None}
        )

    def fit(self, state: FitState, contents: Mapping[tuple[str, str], Mapping[int, bytes]]) -> FitEntry:
        """Return the entry of a fit whose chunks hold ``contents``, see `Contents`."""
        start = None
        if state.start is not None:
            centres = self._itself("centres", state.start.centres)
            start = StartEntry(centres=centres, tolerance=state.start.tolerance, n_iter=state.start.n_iter)
        return FitEntry(
            run=state.run,
            start=start,
            current=None if state.current is None else self._run(state.current),
            best=None if state.best is None else self._run(state.best),
            left_out=list(state.left_out),
            finished=state.finished,
            notes=list(state.notes),
            contents=[
                ContentsEntry(
                    source=cast("SourceName", source),
                    made_on=made_on,
                    digests=self._bytes_table("contents", digests, digests),
                )
                for (source, made_on), digests in sorted(contents.items())[:MAX_CONTENTS]
            ],
        )

    def _run(self, run: RunState) -> RunEntry:
        frozen = None
        if run.frozen is not None:
            values = {name: getattr(run.frozen.statistics, name) for name in STATISTICS}
            refs = {name: self._itself(f"frozen_{name}", array) for name, array in values.items()}
            frozen = FrozenEntry(entropy=run.frozen.entropy, **refs)
        columns = {name: [getattr(record, name) for record in run.records] for name in COLUMNS}
        columns["gap"] = [gap if math.isfinite(gap) else None for gap in columns["gap"]]
        digests = {chunk: bytes.fromhex(slot.object.sha256) for chunk, slot in run.slots.items()}
        return RunEntry.model_validate(
            {
                "parameters": self._parameters(run.parameters),
                "bound": run.bound,
                "history": HistoryEntry(**columns),
                "frozen": frozen,
                "since_reset": run.since_reset,
                "afresh": run.afresh,
                "chunks": self._array("chunks", run.slots, self._chunks(run)),
                "digests": self._bytes_table("digests", run.slots, digests) if digests else None,
                "stop_reason": run.stop_reason,
                "progress": None if run.progress is None else self._progress(run.progress),
            }
        )

    def _parameters(self, parameters: MixtureParameters) -> ParametersEntry:
        return ParametersEntry(**{name: self._itself(name, getattr(parameters, name)) for name in PARAMETERS})

    def _progress(self, progress: Progress) -> ProgressEntry:
        origins, moments = (np.zeros(self._layouts[name].chunks[1:]) for name in ("origins", "moments"))
        fields = packed(progress, self._parameters, origins, moments)
        return ProgressEntry(
            **fields,
            origins=self._array("origins", progress, origins),
            moments=self._array("moments", progress, moments),
        )

    def _chunks(self, run: RunState) -> NDArray[np.int64]:
        table = np.full(self._layouts["chunks"].chunks[1:], -1, dtype=np.int64)
        table[:, PLACE_COLUMNS] = 0
        numbers = {attempt: number for number, attempt in enumerate(self.attempts)}
        places: dict[str, tuple[int, int, int]] = {}
        found = []
        for slot in run.slots.values():
            key = slot.object.key
            if key not in places:
                attempt, step, first = place_of(slot.object)
                places[key] = numbers[attempt], step, first
            found.append((*places[key], slot.first_row))
        if found:
            table[list(run.slots), :PLACE_COLUMNS] = np.array(found)
        if run.remaining:
            table[list(run.remaining), PLACE_COLUMNS] = list(run.remaining.values())
        return table

    def _bytes_table(self, name: str, source: object, rows: Mapping[int, bytes]) -> ArrayRef:
        table = np.zeros(self._layouts[name].chunks[1:], dtype=np.uint8)
        table[list(rows)] = np.frombuffer(b"".join(rows.values()), dtype=np.uint8).reshape(len(rows), -1)
        return self._array(name, source, table)

    def _itself(self, name: str, values: NDArray[Any]) -> ArrayRef:
        return self._array(name, values, values)

    def _array(self, name: str, source: object, values: NDArray[Any]) -> ArrayRef:
        """Return where ``values`` are stored; the object ``source`` identifies them."""
        ref = next((r for n, known, r in self._known if n == name and known is source), None)
        if ref is None:
            data, step = encode(values), self._step
            while (key := self._layouts[name].chunk_key(step)) in self.writes:
                step += 1
            self.last_step = max(self.last_step, step)
            ref = ArrayRef(key=key, sha256=digest(data))
            self.writes[key] = data
        self.stored.append((name, source, ref))
        return ref
