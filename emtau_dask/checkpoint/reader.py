"""Reading a fit back from its commits; everything is verified.

Every object that a commit refers to is read once. Where one is missing or altered, an earlier commit is
used. A commit whose objects are whole, but whose content is impossible, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from emtau_dask.checkpoint.manifest import (
    COLUMNS,
    MAX_CHUNKS,
    MAX_COUNT,
    PARAMETERS,
    PLACE_COLUMNS,
    STATISTICS,
    ArrayRef,
    ConfigEntry,
    FrozenEntry,
    Manifest,
    ParametersEntry,
    ProgressEntry,
    RunEntry,
    Stored,
    array_layouts,
    first_problem,
    references_of,
    state_key,
    unpacked,
)
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import FitState, KMeansProgress, Progress, RunState
from emtau_dask.em.sums import FrozenRows
from emtau_dask.errors import CheckpointCorruptError, EmtauError
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.process import threads_side_by_side
from emtau_dask.storage.commits import CommitLog
from emtau_dask.storage.files import each
from emtau_dask.storage.objects import ArrayLayout, decode, read_verified
from emtau_dask.storage.row_state import RowFields, SlotState, StateObject, most_object_rows

MAX_OBJECT_ROWS = 2**40
MAX_FIELDS = 16


@dataclass(frozen=True, eq=False)
class SavedFit:
    """A fit as a commit has it; every object that the commit refers to is verified.

    ``given`` are starting parameters from the user. ``contents`` says what each chunk of the data holds,
    see `Contents`. ``stored`` says where the arrays of these and of ``state`` are. ``references`` are keys
    of all objects that the commit refers to. ``passed_over`` says why newer commits are not used.
    """

    log: CommitLog
    manifest: Manifest
    given: GivenParameters
    state: FitState
    contents: Mapping[tuple[str, str], Mapping[int, bytes]]
    stored: tuple[Stored, ...]
    references: frozenset[str]
    passed_over: tuple[str, ...]

    @property
    def number(self) -> int:
        """The commit's number."""
        return self.manifest.number

    @property
    def config(self) -> ConfigEntry:
        """The settings of the fit."""
        return self.manifest.config


@dataclass(frozen=True, eq=False)
class WholeCommit:
    """A commit whose objects are all there and unaltered; their content is not checked yet.

    ``objects`` are those of its arrays, without row state. ``stored`` collects the arrays decoded from them.
    """

    log: CommitLog
    manifest: Manifest
    layouts: Mapping[str, ArrayLayout]
    most_object_rows: int
    objects: Mapping[ArrayRef, bytes]
    stored: list[Stored] = field(default_factory=list)

    @cached_property
    def slots(self) -> dict[tuple[ArrayRef, ArrayRef | None], dict[int, SlotState]]:
        """Where the row state of each run is, by chunk; the references of its two tables identify a run."""
        self._check_attempts()
        runs = (self.manifest.fit.current, self.manifest.fit.best)
        return {(run.chunks, run.digests): self._slots_of(run) for run in runs if run is not None}

    @property
    def row_state(self) -> frozenset[StateObject]:
        """The objects that hold all row state."""
        by_id = {id(slot.object): slot.object for slots in self.slots.values() for slot in slots.values()}
        return frozenset(by_id.values())

    @property
    def references(self) -> frozenset[str]:
        """Keys of all objects that the commit refers to."""
        return frozenset({ref.key for ref in self.objects} | {stored.key for stored in self.row_state})

    def saved(self, passed_over: Sequence[str] = ()) -> SavedFit:
        """Return the fit; raises `CheckpointCorruptError` where the content is impossible."""
        contents: dict[tuple[str, str], dict[int, bytes]] = {}
        for entry in self.manifest.fit.contents:
            if (entry.source, entry.made_on) in contents:
                raise self._impossible(f"it says twice what {entry.source} holds")
            table = self._array("contents", entry.digests)
            found = {int(chunk): table[chunk].tobytes() for chunk in np.flatnonzero(table.any(axis=1))}
            contents[entry.source, entry.made_on] = found
            self.stored.append(("contents", found, entry.digests))
        given, state = self._given(), self._state()
        stored = tuple(self.stored)
        return SavedFit(
            self.log, self.manifest, given, state, contents, stored, self.references, tuple(passed_over)
        )

    def _given(self) -> GivenParameters:
        entry = self.manifest.config.given
        arrays = {name: self._finite(name, ref) for name, ref in entry if ref is not None}
        precisions = None
        if "covariances" in arrays and "precisions_cholesky" in arrays:
            precisions = arrays["covariances"], arrays["precisions_cholesky"]
        return GivenParameters(arrays.get("weights"), arrays.get("means"), precisions)

    def _state(self) -> FitState:
        fit, seeds = self.manifest.fit, self.manifest.config.seeds
        if fit.run >= len(seeds):
            raise self._impossible(f"it is in run {fit.run + 1} of {len(seeds)}")
        if fit.finished and (fit.current is None or fit.current.stop_reason is None):
            raise self._impossible("it is finished without a run that stopped")
        compared = fit.best is not None and fit.best.progress is not None and not fit.best.progress.chosen
        if fit.best is not None and fit.best.stop_reason is None and not compared:
            raise self._impossible("its best run has not stopped")
        start = None
        if fit.start is not None:
            centres = self._finite("centres", fit.start.centres)
            start = KMeansProgress(centres, fit.start.tolerance, fit.start.n_iter)
        return FitState(
            run=fit.run,
            start=start,
            current=None if fit.current is None else self._run(fit.current),
            best=None if fit.best is None else self._run(fit.best),
            left_out=tuple(fit.left_out),
            finished=fit.finished,
            notes=tuple(fit.notes),
        )

    def _run(self, entry: RunEntry) -> RunState:
        columns = [_without_none(getattr(entry.history, name)) for name in COLUMNS]
        if len({len(column) for column in columns}) != 1:
            raise self._impossible("columns of its history differ in length")
        n_iter = len(entry.history.iteration)
        if entry.history.iteration != list(range(1, n_iter + 1)) or entry.since_reset > n_iter:
            raise self._impossible("its iterations are not numbered from 1")
        frozen = None if entry.frozen is None else self._frozen(entry.frozen)
        left = self._table(entry)[:, PLACE_COLUMNS].tolist()
        remaining = {chunk: rows for chunk, rows in enumerate(left) if rows}
        cycle = entry.progress is not None and entry.progress.cycle is not None
        if not entry.afresh and frozen is None and not remaining and not cycle:
            raise self._impossible("no row is active and none is inactive")
        slots = self.slots[entry.chunks, entry.digests]
        self.stored.append(("chunks", slots, entry.chunks))
        if entry.digests is not None:
            self.stored.append(("digests", slots, entry.digests))
        return RunState(
            self._parameters(entry.parameters),
            entry.bound,
            tuple(IterationRecord(*values) for values in zip(*columns, strict=True)),
            frozen,
            entry.since_reset,
            entry.afresh,
            remaining,
            slots,
            entry.stop_reason,
            None if entry.progress is None else self._progress(entry.progress),
        )

    def _progress(self, entry: ProgressEntry) -> Progress:
        if self.manifest.config.climbing is None:
            raise self._impossible("it has steps that its settings do not have")
        origins, moments = self._array("origins", entry.origins), self._array("moments", entry.moments)
        if not (np.isfinite(origins).all() and np.isfinite(moments).all()):
            raise self._impossible("its moments hold NaN or infinity")
        try:
            progress = unpacked(entry, self._parameters, origins, moments)
        except (IndexError, StopIteration, RuntimeError) as error:
            raise self._impossible("it counts more moments than it has") from error
        self.stored.append(("origins", progress, entry.origins))
        self.stored.append(("moments", progress, entry.moments))
        return progress

    def _frozen(self, entry: FrozenEntry) -> FrozenRows:
        arrays = (self._finite(f"frozen_{name}", getattr(entry, name)) for name in STATISTICS)
        statistics = SufficientStatistics(*arrays)
        if (statistics.weights < 0).any():
            raise self._impossible("its inactive rows weigh less than nothing")
        return FrozenRows(statistics, entry.entropy)

    def _parameters(self, entry: ParametersEntry) -> MixtureParameters:
        refs = {name: ref for name, ref in entry if ref is not None}
        if set(refs) != set(PARAMETERS):
            raise self._impossible(f"its run has only {sorted(refs)}")
        arrays = [self._finite(name, refs[name]) for name in PARAMETERS]
        try:
            parameters = MixtureParameters(self.manifest.config.covariance_type, *arrays)
        except EmtauError as error:
            raise self._impossible(str(error)) from error
        if parameters.structure.solving_for(parameters.n_features) is None:
            return parameters
        with threads_side_by_side():
            return parameters.factorised()

    def _check_attempts(self) -> None:
        if len({attempt.id for attempt in self.manifest.attempts}) < len(self.manifest.attempts):
            raise self._impossible("two of its attempts have the same id")
        for attempt in self.manifest.attempts:
            n_fields = len(set(attempt.fields))
            if not 0 < n_fields == len(attempt.fields) == len(attempt.dtypes) <= MAX_FIELDS:
                raise self._impossible(f"the row arrays {attempt.fields} have the dtypes {attempt.dtypes}")
            if not set(attempt.kept) <= set(attempt.fields):
                raise self._impossible(f"it keeps {attempt.kept} of the row arrays {attempt.fields}")
            if attempt.object_rows > self.most_object_rows:
                raise self._impossible(
                    f"an object of row state has {attempt.object_rows:,} rows, where chunks like these need "
                    f"{self.most_object_rows:,} at most"
                )

    def _slots_of(self, entry: RunEntry) -> dict[int, SlotState]:
        if entry.digests is None:
            return {}
        table, digests = self._table(entry), self._array("digests", entry.digests)
        attempts = self.manifest.attempts
        fields = [
            RowFields(tuple(one.fields), tuple(one.dtypes), one.object_rows, tuple(one.kept))
            for one in attempts
        ]
        found: dict[tuple[int, int, int, bytes], StateObject] = {}
        slots = {}
        for chunk, (number, step, first, row, _) in enumerate(table.tolist()):
            if number < 0:
                continue
            place = number, step, first, digests[chunk].tobytes()
            if place not in found:
                key = state_key(attempts[number].id, step, first)
                found[place] = StateObject(key, place[-1].hex(), fields[number])
            slots[chunk] = SlotState(found[place], row)
        return slots

    def _table(self, entry: RunEntry) -> NDArray[np.int64]:
        """Return where the state of each chunk is, see `PLACE_COLUMNS`, and how many rows it has active."""
        table = self._array("chunks", entry.chunks)
        lengths, counts = zip(*self.manifest.data.chunks, strict=True) if len(table) else ((), ())
        rows = np.repeat(np.asarray(lengths, dtype=np.int64), np.asarray(counts, dtype=np.int64))
        places, left = table[:, :PLACE_COLUMNS], table[:, PLACE_COLUMNS]
        stored = places[:, 0] >= 0
        here, kept = places[stored], rows[stored]
        longest = np.array([attempt.object_rows for attempt in self.manifest.attempts], dtype=np.int64)
        most = [len(longest) - 1, MAX_COUNT, len(table) - 1, MAX_COUNT]
        within = (
            (places[~stored] == -1).all()
            and (places <= most).all()
            and (here >= 0).all()
            and (here[:, 2] <= np.flatnonzero(stored)).all()
            and (here[:, 3] + kept <= longest[here[:, 0]]).all()
            and (left >= 0).all()
            and (left <= rows).all()
        )
        if not within or _overlap(here, kept):
            raise self._impossible("its table of chunks is out of range")
        return table

    def _array(self, name: str, ref: ArrayRef) -> NDArray[Any]:
        return decode(self.objects[ref], self.layouts[name], f"{ref.key} in {self.log.objects.location}")

    def _finite(self, name: str, ref: ArrayRef) -> NDArray[Any]:
        values = self._array(name, ref)
        if not np.isfinite(values).all():
            raise self._impossible(f"{name} in {ref.key} hold NaN or infinity")
        self.stored.append((name, values, ref))
        return values

    def _impossible(self, why: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"commit {self.manifest.number} in {self.log.objects.location} cannot be: {why}."
        )


def _overlap(places: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
    """Return whether chunks of so many rows have rows of an object in common."""
    order = np.lexsort(places.T[::-1])
    ordered, ends = places[order], (places[:, -1] + rows)[order]
    together = (ordered[1:, :-1] == ordered[:-1, :-1]).all(axis=1)
    return bool((ordered[1:, -1] < ends[:-1])[together].any())


def _without_none(column: list[Any]) -> list[Any]:
    """Return a column with NaN for what is not known."""
    return [math.nan if value is None else value for value in column]


def _manifest(log: CommitLog, number: int) -> Manifest:
    content = log.read(number)
    try:
        manifest = Manifest.model_validate(content)
        manifest.config.model_dump(mode="json")
    except (ValidationError, PydanticSerializationError, ValueError, RecursionError) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise CheckpointCorruptError(
            f"commit {number} in {log.objects.location} is not one of this format: {why}."
        ) from error
    return manifest


def read_commit(log: CommitLog, number: int) -> WholeCommit:
    """Return a commit after reading every object that it refers to, but for row state.

    Its settings, which are bounded, give the sizes that its objects must have. Raises
    `CheckpointCorruptError` where the commit or an object is missing or altered, or where sizes contradict
    each other.
    """
    manifest = _manifest(log, number)
    config, data = manifest.config, manifest.data
    n_chunks = sum(count for _, count in data.chunks)
    most_rows = most_object_rows((rows, count) for rows, count in data.chunks)
    consistent = (
        data.shape == [sum(rows * count for rows, count in data.chunks), config.n_features]
        and n_chunks <= MAX_CHUNKS
        and most_rows <= MAX_OBJECT_ROWS
        and len(config.seeds) == config.n_init
    )
    if not consistent:
        raise CheckpointCorruptError(
            f"commit {number} in {log.objects.location} contradicts itself: {data.shape} rows x "
            f"features in {n_chunks} chunks, {config.n_features} features."
        )
    layouts = array_layouts(config, n_chunks, prefix="", n_steps=1)
    limit = 2 * max(8 * math.prod(layout.chunks) for layout in layouts.values()) + 1024

    def read(ref: ArrayRef) -> bytes:
        return read_verified(log.objects, ref.key, ref.sha256, limit)

    refs = set(references_of(manifest))
    return WholeCommit(log, manifest, layouts, most_rows, dict(zip(refs, each(read, refs), strict=True)))


def verify_row_state(commit: WholeCommit) -> WholeCommit:
    """Read every object of a commit's row state; raises `CheckpointCorruptError` as `read_commit` does."""
    objects = commit.log.objects
    each(
        lambda stored: len(read_verified(objects, stored.key, stored.sha256, stored.fields.most_bytes)),
        commit.row_state,
    )  # Without keeping the bytes.
    return commit


def read_newest(log: CommitLog) -> SavedFit:
    """Return the newest whole commit, row state included, also where another process commits meanwhile.

    Raises `CheckpointCorruptError` where no commit is whole, and says what is wrong with the newest; or where
    the content of the newest whole one is impossible.
    """
    return _newest(log, lambda number: verify_row_state(read_commit(log, number)))


def open_newest(log: CommitLog) -> SavedFit:
    """Return what `read_newest` does, without reading row state."""
    return _newest(log, partial(read_commit, log))


def _newest(log: CommitLog, read: Callable[[int], WholeCommit]) -> SavedFit:
    while True:
        numbers = log.numbers()
        log.last = max(numbers, default=log.last)
        passed_over: list[str] = []
        for number in reversed(numbers):
            try:
                commit = read(number)
            except CheckpointCorruptError as error:
                passed_over.append(str(error))
                if max(log.numbers(), default=-1) > log.last:
                    break
            else:
                return commit.saved(passed_over)
        else:
            why = passed_over[0] if passed_over else "There is none."
            raise CheckpointCorruptError(f"no commit is whole. {why}")
