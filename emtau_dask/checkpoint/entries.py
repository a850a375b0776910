"""What a commit says of a fit: its records as entries of a manifest, and the objects that these refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.checkpoint.layout import (
    CHUNK_COLUMNS,
    COLUMNS,
    DIGEST_BYTES,
    PARAMETERS,
    STATISTICS,
    attempt_of,
    step_of,
)
from emtau_dask.checkpoint.reader import SavedFit
from emtau_dask.checkpoint.schema import (
    ArrayRef,
    AttemptEntry,
    FitEntry,
    HeldEntry,
    HistoryEntry,
    ParametersEntry,
    RunEntry,
    StartEntry,
)
from emtau_dask.em import FitState, RunState
from emtau_dask.init import GivenParameters
from emtau_dask.io.objects import ArrayLayout, digest, encode

Stored = tuple[str, object, ArrayRef]
"""A name, the object of this process that it stands for, and where that is stored."""


def runs_of(state: FitState) -> list[RunState]:
    """Return the runs of which a commit says anything."""
    return [run for run in (state.current, state.best) if run is not None]


def stored_in(
    saved: SavedFit, state: FitState, given: GivenParameters, contents: Mapping[int, bytes]
) -> list[Stored]:
    """Return which objects, as read from a commit, are stored where."""
    fit = saved.manifest.fit
    found: list[Stored] = [
        (name, values, getattr(saved.config.given, name)) for name, values in _given_arrays(given).items()
    ]
    if fit.contents is not None:
        found.append(("contents", contents, fit.contents))
    if fit.start is not None and state.start is not None:
        found.append(("centres", state.start.centres, fit.start.centres))
    for entry, run in ((fit.current, state.current), (fit.best, state.best)):
        if entry is not None and run is not None:
            found += _stored_run(entry, run)
    return found


def _given_arrays(given: GivenParameters) -> dict[str, NDArray[Any]]:
    covariances, factors = given.precisions or (None, None)
    values = zip(PARAMETERS, (given.weights, given.means, covariances, factors), strict=True)
    return {name: array for name, array in values if array is not None}


def _stored_run(entry: RunEntry, run: RunState) -> list[Stored]:
    found: list[Stored] = [("chunks", run.slots, entry.chunks)]
    if entry.digests is not None:
        found.append(("digests", run.slots, entry.digests))
    for name, ref in entry.parameters:
        found.append((name, getattr(run.parameters, name), ref))
    if entry.held is not None and run.held is not None:
        for name in STATISTICS:
            ref = getattr(entry.held, name)
            found.append((f"held_{name}", getattr(run.held.statistics, name), ref))
    return found


class Entries:
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
        stored: Sequence[Stored],
        numbers: Mapping[str, int],
    ) -> None:
        self._layouts, self._step, self._known = layouts, step, stored
        self.numbers, self.last_step = numbers, step
        self.stored: list[Stored] = []
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
        for run in runs_of(state):
            for slot in run.slots.values():
                name = attempt_of(slot)
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

    def fit(self, state: FitState, contents: Mapping[int, bytes]) -> FitEntry:
        """Return the entry of a fit, and of what its data holds; after `attempts`."""
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
            contents=self.array("contents", contents, self._contents(contents)) if contents else None,
        )

    def _run(self, run: RunState) -> RunEntry:
        parameters = {
            name: self.array(name, values, values)
            for name in PARAMETERS
            for values in [getattr(run.parameters, name)]
        }
        held = None
        if run.held is not None:
            statistics = {
                name: self.array(f"held_{name}", values, values)
                for name in STATISTICS
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
            table[chunk, :2] = self.numbers[attempt_of(slot)], step_of(slot)
        for chunk, remaining in run.remaining.items():
            table[chunk, 2] = remaining
        return table

    def _digests(self, run: RunState) -> NDArray[np.uint8]:
        table = np.zeros((self._layouts["digests"].shape[1], DIGEST_BYTES), dtype=np.uint8)
        for chunk, slot in run.slots.items():
            table[chunk] = np.frombuffer(bytes.fromhex(slot.sha256), dtype=np.uint8)
        return table

    def _contents(self, contents: Mapping[int, bytes]) -> NDArray[np.uint8]:
        table = np.zeros(self._layouts["contents"].shape[1:], dtype=np.uint8)
        for chunk, told in contents.items():
            table[chunk] = np.frombuffer(told, dtype=np.uint8)
        return table
