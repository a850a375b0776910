"""Reading a fit back from its commits: nothing is believed that is not verified."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from emtau_dask.checkpoint.layout import COLUMNS, PARAMETERS, STATISTICS, Shapes, slot_key
from emtau_dask.checkpoint.schema import (
    ArrayRef,
    ConfigEntry,
    Manifest,
    ParametersEntry,
    RunEntry,
    first_problem,
    references_of,
)
from emtau_dask.em import FitState, HeldRows, IterationRecord, KMeansProgress, RunState
from emtau_dask.errors import CheckpointCorruptError, EmtauError
from emtau_dask.init import GivenParameters
from emtau_dask.io.files import each
from emtau_dask.io.objects import CommitLog, ObjectStore, RowFields, SlotState, read_array, read_verified
from emtau_dask.mixture.model import MixtureParameters, SufficientStatistics

MAX_CHUNKS = 2**24
MAX_SLOT_ROWS = 2**40
MAX_STEPS = 2**48
MAX_FIELDS = 16


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

    def contents(self) -> dict[int, bytes]:
        """Return what the chunks of the data were found to hold, by chunk."""
        ref = self.manifest.fit.contents
        if ref is None:
            return {}
        with self.log.watched():
            table = self._reader.array("contents", ref)
        return {int(chunk): table[chunk].tobytes() for chunk in np.flatnonzero(table.any(axis=1))}

    def references(self) -> set[str]:
        """Return the keys of every object that the commit refers to."""
        with self.log.watched():
            return self._reader.references()


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads what a manifest refers to; sizes come from its settings, which are bounded, and are checked."""

    objects: ObjectStore
    manifest: Manifest
    shapes: Shapes
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
        shapes = Shapes.of(config.covariance_type, config.n_components, config.n_features, n_chunks)
        return cls(objects, manifest, shapes, longest)

    def array(self, name: str, ref: ArrayRef) -> NDArray[Any]:
        values = read_array(self.objects, ref.key, ref.sha256, self.shapes.sizes[name], Shapes.dtype(name))
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
            arrays = (self.finite(f"held_{name}", getattr(entry.held, name)) for name in STATISTICS)
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
        if set(refs) != set(PARAMETERS):
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
                slot_key(self.manifest.attempts[number].id, step, chunk),
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
        return {ref.key for ref in references_of(self.manifest)} | {slot.key for slot in self.slots()}

    def verify(self) -> None:
        """Raise `CheckpointCorruptError` unless every object is there and is what was written."""
        slots = self.slots()
        wanted = {ref.key: ref.sha256 for ref in references_of(self.manifest)}
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
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
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
