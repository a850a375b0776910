"""A fit in commits: how `FitState` becomes objects and a manifest, and comes back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from emtau_dask.engine.cluster import environment
from emtau_dask.engine.fingerprint import Fingerprint
from emtau_dask.engine.history import IterationRecord
from emtau_dask.engine.manifest import (
    ArrayRef,
    AttemptEntry,
    ConfigEntry,
    FitEntry,
    HeldEntry,
    HistoryEntry,
    Manifest,
    ParametersEntry,
    RunEntry,
    SourceEntry,
    StartEntry,
)
from emtau_dask.engine.scoring import HeldRows
from emtau_dask.engine.starts import KMEANS_PASSES, GivenParameters
from emtau_dask.engine.state import FitState, KMeansProgress, RunState
from emtau_dask.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    EmtauError,
)
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.storage import (
    ArrayLayout,
    CommitLog,
    ObjectStore,
    RowFields,
    RowStateWriter,
    SlotState,
    each,
    new_attempt,
    rows_layout,
)
from emtau_dask.storage.stored import digest, encode, group_document, read_array, read_verified

__all__ = ["CheckpointJournal", "SavedFit", "fingerprint_of", "read_commit", "read_newest", "source_entry"]

MAX_CHUNKS = 2**24
MAX_SLOT_ROWS = 2**40
MAX_STEPS = 2**48
MAX_FIELDS = 16
COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
CHUNK_COLUMNS = ("attempt", "step", "remaining")
DIGEST_BYTES = 32
_PARAMETERS = ("weights", "means", "covariances", "precisions_cholesky")
_STATISTICS = ("weights", "means", "scatter")


def source_entry(fingerprint: Fingerprint) -> SourceEntry:
    """Return a fingerprint as a manifest has it."""
    return SourceEntry(
        shape=list(fingerprint.shape),
        dtype=fingerprint.dtype,
        chunks=[list(run) for run in fingerprint.chunks],
        sha256=fingerprint.sha256,
    )


def fingerprint_of(entry: SourceEntry | None) -> Fingerprint | None:
    """Return what `source_entry` turned into an entry."""
    if entry is None:
        return None
    chunks = tuple((rows, count) for rows, count in entry.chunks)
    return Fingerprint(tuple(entry.shape), entry.dtype, chunks, entry.sha256)


def _references(entry: BaseModel) -> Iterator[ArrayRef]:
    """Yield every array that an entry of a manifest refers to, at any depth."""
    for _, value in entry:
        if isinstance(value, ArrayRef):
            yield value
        elif isinstance(value, BaseModel):
            yield from _references(value)


@dataclass(frozen=True, eq=False)
class _Shapes:
    """The shapes of a fit's arrays, by name."""

    sizes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, covariance_type: str, n_components: int, n_features: int, n_chunks: int) -> _Shapes:
        K, d = n_components, n_features
        matrices = structure_named(covariance_type).shape(K, d)
        return cls(
            {
                "weights": (K,),
                "means": (K, d),
                "covariances": matrices,
                "precisions_cholesky": matrices,
                "held_weights": (K,),
                "held_means": (K, d),
                "held_scatter": matrices,
                "centres": (K, d),
                "chunks": (n_chunks, len(CHUNK_COLUMNS)),
                "digests": (n_chunks, DIGEST_BYTES),
            }
        )

    @staticmethod
    def dtype(name: str) -> np.dtype[Any]:
        return np.dtype({"chunks": "int64", "digests": "uint8"}.get(name, "float64"))

    def layouts(self, prefix: str, n_steps: int) -> dict[str, ArrayLayout]:
        return {
            name: ArrayLayout(
                f"{prefix}/{name}",
                (n_steps, *shape),
                (1, *shape),
                self.dtype(name).name,
                ("step", *(f"axis_{i}" for i in range(len(shape)))),
                attributes={"columns": list(CHUNK_COLUMNS)} if name == "chunks" else None,
            )
            for name, shape in self.sizes.items()
        }


class CheckpointJournal:
    """Commits a fit to a checkpoint.

    Parameters
    ----------
    log : CommitLog
        Of a new run, or of one that this process goes on with.
    config : ConfigEntry
    given : GivenParameters
        Starting parameters of the user's.
    sources : mapping of str to SourceEntry or None
        ``data``, ``sample_weight`` and ``responsibilities_init``.
    fields : RowFields or None
        None where the policy keeps no row state.

    Raises
    ------
    CheckpointError
        The store failed.
    """

    def __init__(
        self,
        log: CommitLog,
        config: ConfigEntry,
        given: GivenParameters,
        sources: Mapping[str, SourceEntry | None],
        fields: RowFields | None,
    ) -> None:
        data = fingerprint_of(sources["data"])
        assert data is not None
        self._log, self._config, self._given = log, config, given
        self._sources, self._fields = sources, fields
        self._n_chunks = len(data.chunk_rows)
        self._attempt = new_attempt(max(log.last, 0))
        shapes = _Shapes.of(config.covariance_type, config.n_components, config.n_features, self._n_chunks)
        passes = config.max_iter + KMEANS_PASSES + config.n_components + 4
        n_steps = 4 * config.n_init * passes + 1
        prefix = f"attempts/{self._attempt}"
        self._layouts = shapes.layouts(prefix, n_steps)
        self._rows = (
            None if fields is None else rows_layout(f"{prefix}/rows", fields, n_steps, self._n_chunks)
        )
        self._step = 0
        self._stored: list[_Stored] = []
        self._numbers: Mapping[str, int] = {}
        self._seen: set[str] = set()
        self._unsynced: set[str] = set()
        self._begun = False
        self._swept = log.last < 0

    def inherit(self, saved: SavedFit, state: FitState, given: GivenParameters) -> None:
        """Go on from ``saved``, which ``state`` and ``given`` were read from: what it refers to is stored.

        Raises
        ------
        CheckpointMismatchError
            Its row state has other arrays than the policy keeps.
        """
        ours = () if self._fields is None else self._fields.names
        for attempt in saved.manifest.attempts:
            if tuple(attempt.fields) != ours:
                raise CheckpointMismatchError(
                    f"the policy keeps the row arrays {list(ours)}; the checkpointed run had "
                    f"{attempt.fields}. Give the policy that the run was begun with."
                )
        references = saved.references()
        self._log.keep(saved.number, references)
        self._seen = {slot.key for run in _runs(state) for slot in run.slots.values()}
        self._stored = saved.stored(state, given)
        self._numbers = {attempt.id: n for n, attempt in enumerate(saved.manifest.attempts)}

    @property
    def objects(self) -> ObjectStore:
        """Where everything goes."""
        return self._log.objects

    def _begin(self) -> None:
        """Write the documents of this process's arrays."""
        prefix = f"attempts/{self._attempt}"
        layouts = [*self._layouts.values(), *([] if self._rows is None else [self._rows])]
        documents = {f"{layout.name}/zarr.json": layout.document() for layout in layouts}
        documents[f"{prefix}/zarr.json"] = group_document({"environment": environment()})
        each(lambda item: self.objects.put(*item), documents.items())
        self.objects.sync(documents)
        self._begun = True

    def writer(self) -> RowStateWriter | None:
        """Return a writer to places not used before."""
        if self._rows is None or self._fields is None:
            return None
        self._step += 1
        return RowStateWriter(self.objects, self._rows, self._fields, self._step)

    def due(self, step: int) -> bool:
        """Return whether ``step`` is divisible by ``checkpoint_every``."""
        return step % self._config.checkpoint_every == 0

    def watched(self) -> AbstractContextManager[None]:
        """Turn errors that come of another process having continued the fit into `CheckpointTakenError`."""
        return self._log.watched()

    def save(self, state: FitState, *, commit: bool) -> None:
        """Take note of row state; write a commit where asked to."""
        slots = {slot.key for run in _runs(state) for slot in run.slots.values()}
        self._log.written(slots)
        self._unsynced |= slots - self._seen
        self._seen = slots
        if commit:
            self._commit(state, slots)

    def _commit(self, state: FitState, slots: set[str]) -> None:
        if not self._begun:
            self._begin()
        self._step += 1
        entries = _Entries(self._layouts, self._step, self._stored, self._numbers)
        config = self._config.model_copy(update={"given": entries.given(self._given)})
        manifest = _validated(
            {
                "run": self._log.run,
                "number": self._log.last + 1,
                "attempt": self._attempt,
                "attempts": entries.attempts(state),
                "environment": environment(),
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
                "config": config,
                "fit": entries.fit(state),
                **self._sources,
            }
        )
        each(lambda item: self.objects.put(*item), entries.writes.items())
        self._log.written(entries.writes)
        references = {ref.key for ref in _references(manifest)} | slots
        self.objects.sync([*entries.writes, *(self._unsynced & references)])
        self._log.append(manifest.model_dump(mode="json", exclude={"run", "number"}), references)
        self._unsynced -= references
        self._stored, self._numbers, self._step = entries.stored, entries.numbers, entries.last_step
        if state.finished or not self._swept:
            self._log.sweep_everything(self._attempt)
            self._swept = True


def _validated(manifest: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(manifest)
    except ValidationError as error:
        raise CheckpointError(
            f"the fit has come to a state that cannot be committed ({_first(error)}). The last commit is "
            "intact; see whether the data and the settings are what they should be."
        ) from error


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _given_arrays(given: GivenParameters) -> dict[str, NDArray[Any]]:
    covariances, factors = given.precisions or (None, None)
    values = zip(_PARAMETERS, (given.weights, given.means, covariances, factors), strict=True)
    return {name: array for name, array in values if array is not None}


def _stored_run(entry: RunEntry, run: RunState) -> list[_Stored]:
    found: list[_Stored] = [("chunks", run.slots, entry.chunks)]
    if entry.digests is not None:
        found.append(("digests", run.slots, entry.digests))
    for name, ref in entry.parameters:
        found.append((name, getattr(run.parameters, name), ref))
    if entry.held is not None and run.held is not None:
        for name in _STATISTICS:
            ref = getattr(entry.held, name)
            found.append((f"held_{name}", getattr(run.held.statistics, name), ref))
    return found


def _runs(state: FitState) -> list[RunState]:
    return [run for run in (state.current, state.best) if run is not None]


_Stored = tuple[str, object, ArrayRef]


class _Entries:
    """Turns records into entries of a manifest, collecting the objects to write.

    Parameters
    ----------
    layouts : mapping of str to ArrayLayout
    step : int
        Where new objects go; those of a second run, in the next one.
    stored : sequence of (name, object, ArrayRef)
        What is stored already; an object is known again by its identity.
    numbers : mapping of str to int
        The numbers by which the tables of chunks among them name attempts.
    """

    def __init__(
        self,
        layouts: Mapping[str, ArrayLayout],
        step: int,
        stored: Sequence[_Stored],
        numbers: Mapping[str, int],
    ) -> None:
        self._layouts, self._step, self._known = layouts, step, stored
        self.numbers, self.last_step = numbers, step
        self.stored: list[_Stored] = []
        self.writes: dict[str, bytes] = {}

    def array(self, name: str, source: object, values: NDArray[Any]) -> ArrayRef:
        """Return where ``values`` are; ``source`` is the object that stands for them."""
        ref = next((r for n, known, r in self._known if n == name and known is source), None)
        if ref is None:
            data, step = encode(values, compressed=False), self._step
            while (key := self._layouts[name].chunk_key(step)) in self.writes:
                step += 1
            self.last_step = max(self.last_step, step)
            ref = ArrayRef(key=key, sha256=digest(data))
            self.writes[key] = data
        self.stored.append((name, source, ref))
        return ref

    def given(self, given: GivenParameters) -> ParametersEntry:
        """Return the entry of starting parameters."""
        arrays = _given_arrays(given)
        return ParametersEntry(**{name: self.array(name, array, array) for name, array in arrays.items()})

    def attempts(self, state: FitState) -> list[AttemptEntry]:
        """Return who wrote the row state that ``state`` refers to, in a fixed order."""
        found: dict[str, AttemptEntry] = {}
        for run in _runs(state):
            for slot in run.slots.values():
                name = _attempt_of(slot)
                if name not in found:
                    fields, dtypes = list(slot.fields.names), list(slot.fields.dtypes)
                    found[name] = AttemptEntry.model_validate(
                        {"id": name, "fields": fields, "dtypes": dtypes}
                    )
        numbers = {name: number for number, name in enumerate(sorted(found))}
        if numbers != self.numbers:
            self._known = [entry for entry in self._known if entry[0] != "chunks"]
        self.numbers = numbers
        return [found[name] for name in numbers]

    def fit(self, state: FitState) -> FitEntry:
        """Return the entry of a fit; after `attempts`."""
        start = None
        if state.start is not None:
            centres = self.array("centres", state.start.centres, state.start.centres)
            start = StartEntry(centres=centres, tolerance=state.start.tolerance, n_iter=state.start.n_iter)
        return FitEntry(
            run=state.run,
            start=start,
            current=None if state.current is None else self._run(state.current),
            best=None if state.best is None else self._run(state.best),
            left_out=list(state.left_out),
            finished=state.finished,
            notes=list(state.notes),
        )

    def _run(self, run: RunState) -> RunEntry:
        parameters = {
            name: self.array(name, values, values)
            for name in _PARAMETERS
            for values in [getattr(run.parameters, name)]
        }
        held = None
        if run.held is not None:
            statistics = {
                name: self.array(f"held_{name}", values, values)
                for name in _STATISTICS
                for values in [getattr(run.held.statistics, name)]
            }
            held = HeldEntry(entropy=run.held.entropy, **statistics)
        columns = {name: [getattr(record, name) for record in run.records] for name in COLUMNS}
        return RunEntry.model_validate(
            {
                "parameters": ParametersEntry(**parameters),
                "bound": run.bound,
                "history": HistoryEntry(**columns),
                "held": held,
                "since_reset": run.since_reset,
                "afresh": run.afresh,
                "chunks": self.array("chunks", run.slots, self._chunks(run)),
                "digests": self.array("digests", run.slots, self._digests(run)) if run.slots else None,
                "stop_reason": run.stop_reason,
            }
        )

    def _chunks(self, run: RunState) -> NDArray[np.int64]:
        table = np.full((self._layouts["chunks"].shape[1], len(CHUNK_COLUMNS)), -1, dtype=np.int64)
        table[:, CHUNK_COLUMNS.index("remaining")] = 0
        for chunk, slot in run.slots.items():
            table[chunk, :2] = self.numbers[_attempt_of(slot)], _step_of(slot)
        for chunk, remaining in run.remaining.items():
            table[chunk, 2] = remaining
        return table

    def _digests(self, run: RunState) -> NDArray[np.uint8]:
        table = np.zeros((self._layouts["digests"].shape[1], DIGEST_BYTES), dtype=np.uint8)
        for chunk, slot in run.slots.items():
            table[chunk] = np.frombuffer(bytes.fromhex(slot.sha256), dtype=np.uint8)
        return table


def _attempt_of(slot: SlotState) -> str:
    return slot.key.split("/")[1]


def _step_of(slot: SlotState) -> int:
    return int(slot.key.rpartition("/")[2].split(".")[1])


def _slot_key(attempt: str, step: int, chunk: int) -> str:
    return f"attempts/{attempt}/rows/c.{step}.{chunk}.0.0"


@dataclass(frozen=True, eq=False)
class SavedFit:
    """A commit that was read, every object that it refers to verified.

    Attributes
    ----------
    log : CommitLog
    number : int
    manifest : Manifest
    passed_over : tuple of str
        Why newer commits are not used.
    """

    log: CommitLog
    number: int
    manifest: Manifest
    passed_over: tuple[str, ...]

    @property
    def config(self) -> ConfigEntry:
        """The settings of the fit."""
        return self.manifest.config

    @property
    def _reader(self) -> _Reader:
        return _Reader.of(self.log.objects, self.manifest)

    def given(self) -> GivenParameters:
        """Return the starting parameters that the user gave."""
        with self.log.watched():
            reader, entry = self._reader, self.config.given
            arrays = {name: reader.finite(name, ref) for name, ref in entry if ref is not None}
        precisions = None
        if "covariances" in arrays and "precisions_cholesky" in arrays:
            precisions = arrays["covariances"], arrays["precisions_cholesky"]
        return GivenParameters(arrays.get("weights"), arrays.get("means"), precisions)

    def state(self) -> FitState:
        """Return the fit as it was.

        Raises
        ------
        CheckpointCorruptError
            What it says cannot be.
        CheckpointTakenError
            Another process has gone on with the run, and removed it.
        """
        with self.log.watched():
            return self._state()

    def _state(self) -> FitState:
        reader, fit = self._reader, self.manifest.fit
        if fit.run >= len(self.config.seeds):
            raise reader.impossible(f"it is in run {fit.run + 1} of {len(self.config.seeds)}")
        if fit.finished and (fit.current is None or fit.current.stop_reason is None):
            raise reader.impossible("it is finished without a run that stopped")
        if fit.best is not None and fit.best.stop_reason is None:
            raise reader.impossible("its best run has not stopped")
        start = None
        if fit.start is not None:
            centres = reader.finite("centres", fit.start.centres)
            start = KMeansProgress(centres, fit.start.tolerance, fit.start.n_iter)
        return FitState(
            run=fit.run,
            start=start,
            current=None if fit.current is None else reader.run(fit.current),
            best=None if fit.best is None else reader.run(fit.best),
            left_out=tuple(fit.left_out),
            finished=fit.finished,
            notes=tuple(fit.notes),
        )

    def references(self) -> set[str]:
        """Return the keys of every object that the commit refers to."""
        with self.log.watched():
            return self._reader.references()

    def stored(self, state: FitState, given: GivenParameters) -> list[_Stored]:
        """Return which objects of ``state`` and ``given``, as read from here, are stored where."""
        fit = self.manifest.fit
        found: list[_Stored] = [
            (name, values, getattr(self.config.given, name)) for name, values in _given_arrays(given).items()
        ]
        if fit.start is not None and state.start is not None:
            found.append(("centres", state.start.centres, fit.start.centres))
        for entry, run in ((fit.current, state.current), (fit.best, state.best)):
            if entry is not None and run is not None:
                found += _stored_run(entry, run)
        return found


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads what a manifest refers to; sizes come from its settings, which are bounded, and are checked."""

    objects: ObjectStore
    manifest: Manifest
    shapes: _Shapes
    slot_rows: int

    @classmethod
    def of(cls, objects: ObjectStore, manifest: Manifest) -> _Reader:
        config, data = manifest.config, manifest.data
        n_chunks = sum(count for _, count in data.chunks)
        longest = max((rows for rows, count in data.chunks if count), default=0)
        consistent = (
            len(data.shape) == 2
            and data.shape[1] == config.n_features
            and n_chunks <= MAX_CHUNKS
            and sum(rows * count for rows, count in data.chunks) == data.shape[0]
            and longest <= MAX_SLOT_ROWS
            and len(config.seeds) == config.n_init
        )
        if not consistent:
            raise CheckpointCorruptError(
                f"commit {manifest.number} in {objects.location} contradicts itself: {data.shape} rows "
                "x features "
                f"in {n_chunks} chunks, {config.n_features} features."
            )
        shapes = _Shapes.of(config.covariance_type, config.n_components, config.n_features, n_chunks)
        return cls(objects, manifest, shapes, longest)

    def array(self, name: str, ref: ArrayRef) -> NDArray[Any]:
        values = read_array(self.objects, ref.key, ref.sha256, self.shapes.sizes[name], _Shapes.dtype(name))
        values.setflags(write=False)
        return values

    def finite(self, name: str, ref: ArrayRef) -> NDArray[Any]:
        values = self.array(name, ref)
        if not np.isfinite(values).all():
            raise self.impossible(f"{name} in {ref.key} hold NaN or infinity")
        return values

    def run(self, entry: RunEntry) -> RunState:
        columns = [getattr(entry.history, name) for name in COLUMNS]
        if len({len(column) for column in columns}) != 1:
            raise self.impossible("columns of its history differ in length")
        n_iter = len(entry.history.iteration)
        if entry.history.iteration != list(range(1, n_iter + 1)) or entry.since_reset > n_iter:
            raise self.impossible("its iterations are not numbered from 1")
        held = None
        if entry.held is not None:
            arrays = (self.finite(f"held_{name}", getattr(entry.held, name)) for name in _STATISTICS)
            held = HeldRows(SufficientStatistics(*arrays), entry.held.entropy)
            if (held.statistics.weights < 0).any():
                raise self.impossible("its inactive rows weigh less than nothing")
        remaining = dict(enumerate(self._table(entry)[:, 2].tolist()))
        if not entry.afresh and held is None and not any(remaining.values()):
            raise self.impossible("no row is active and none is held")
        return RunState(
            self._parameters(entry.parameters),
            entry.bound,
            tuple(IterationRecord(*values) for values in zip(*columns, strict=True)),
            held,
            entry.since_reset,
            entry.afresh,
            {chunk: rows for chunk, rows in remaining.items() if rows},
            self._slots(entry),
            entry.stop_reason,
        )

    def _parameters(self, entry: ParametersEntry) -> MixtureParameters:
        refs = {name: ref for name, ref in entry if ref is not None}
        if set(refs) != set(_PARAMETERS):
            raise self.impossible(f"its run has only {sorted(refs)}")
        arrays = {name: self.finite(name, ref) for name, ref in refs.items()}
        try:
            return MixtureParameters(self.manifest.config.covariance_type, **arrays)
        except EmtauError as error:
            raise self.impossible(str(error)) from error

    def _table(self, entry: RunEntry) -> NDArray[np.int64]:
        """Return who wrote the state of each chunk, in which step, and how many rows it has active."""
        table = self.array("chunks", entry.chunks)
        lengths, counts = zip(*self.manifest.data.chunks, strict=True) if len(table) else ((), ())
        rows = np.repeat(np.asarray(lengths, dtype=np.int64), np.asarray(counts, dtype=np.int64))
        within = (table >= [-1, -1, 0]).all() and (table[:, 2] <= rows).all()
        if not within or (table[:, :2] > [len(self.manifest.attempts) - 1, MAX_STEPS]).any():
            raise self.impossible("its table of chunks is out of range")
        return table

    def _slots(self, entry: RunEntry) -> dict[int, SlotState]:
        if entry.digests is None:
            return {}
        table, digests = self._table(entry), self.array("digests", entry.digests)
        for attempt in self.manifest.attempts:
            n_fields = len(set(attempt.fields))
            if not 0 < n_fields == len(attempt.fields) == len(attempt.dtypes) <= MAX_FIELDS:
                raise self.impossible(f"the row arrays {attempt.fields} have the dtypes {attempt.dtypes}")
        fields = [
            RowFields(tuple(attempt.fields), tuple(attempt.dtypes), self.slot_rows)
            for attempt in self.manifest.attempts
        ]
        return {
            chunk: SlotState(
                _slot_key(self.manifest.attempts[number].id, step, chunk),
                digests[chunk].tobytes().hex(),
                fields[number],
            )
            for chunk, (number, step, _) in enumerate(table.tolist())
            if number >= 0
        }

    def impossible(self, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"commit {self.manifest.number} in {self.objects.location} cannot be: {why}."
        )

    def slots(self) -> list[SlotState]:
        entries = (self.manifest.fit.current, self.manifest.fit.best)
        return [slot for entry in entries if entry is not None for slot in self._slots(entry).values()]

    def references(self) -> set[str]:
        return {ref.key for ref in _references(self.manifest)} | {slot.key for slot in self.slots()}

    def verify(self) -> None:
        """Raise `CheckpointCorruptError` unless every object is there and is what was written."""
        slots = self.slots()
        wanted = {ref.key: ref.sha256 for ref in _references(self.manifest)}
        wanted |= {slot.key: slot.sha256 for slot in slots}
        widest = max((slot.fields.stored.itemsize * len(slot.fields.names) for slot in slots), default=1)
        arrays = max(math.prod(shape) * 8 for shape in self.shapes.sizes.values())
        limit = 2 * max(arrays, widest * self.slot_rows) + 1024
        each(lambda item: read_verified(self.objects, *item, limit), wanted.items())


def _manifest(log: CommitLog, number: int) -> Manifest:
    commit = log.read(number)
    try:
        manifest = Manifest.model_validate(commit.manifest)
        manifest.config.model_dump(mode="json")
    except (ValidationError, PydanticSerializationError, ValueError, RecursionError) as error:
        why = _first(error) if isinstance(error, ValidationError) else str(error)
        raise CheckpointCorruptError(
            f"commit {number} in {log.objects.location} is not one of this format: {why}."
        ) from error
    return manifest


def read_commit(log: CommitLog, number: int) -> SavedFit:
    """Return a commit after verifying every object that it refers to.

    Raises
    ------
    CheckpointCorruptError
        The commit or an object is missing or altered.
    """
    manifest = _manifest(log, number)
    _Reader.of(log.objects, manifest).verify()
    return SavedFit(log, number, manifest, ())


def read_newest(log: CommitLog) -> SavedFit:
    """Return the newest commit that is whole, also where another process commits meanwhile.

    Raises
    ------
    CheckpointCorruptError
        None is; says what is wrong with the newest.
    """
    while True:
        numbers = log.numbers()
        log.last = max(numbers, default=log.last)
        passed_over: list[str] = []
        for number in reversed(numbers):
            try:
                saved = read_commit(log, number)
            except CheckpointCorruptError as error:
                passed_over.append(str(error))
                if max(log.numbers(), default=-1) > log.last:
                    break
            else:
                return dataclasses.replace(saved, passed_over=tuple(passed_over))
        else:
            why = passed_over[0] if passed_over else "There is none."
            raise CheckpointCorruptError(f"no commit is whole. {why}")
