"""The state of a fit as JSON and arrays: its records by the codec, and the tables of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.checkpoint.codec import MAX_COUNT, Codec, Form, FormatError, as_object
from emtau_dask.checkpoint.manifest import (
    BY_COLUMN,
    NAMES,
    NOT_FINITE,
    PLACE_COLUMNS,
    TABLES,
    Attempt,
    Content,
    Manifest,
    place_of,
    state_key,
)
from emtau_dask.constraints import NONE, choice, either
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state import RunState
from emtau_dask.errors import ConfigError, EmtauError
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.policies.policy import ActivityPolicy
from emtau_dask.policies.registry import DescribedPolicy, describe_policy, policy_described
from emtau_dask.settings import AUTO, POLICIES, NamedOrPolicy
from emtau_dask.storage.objects import ArrayLayout
from emtau_dask.storage.row_state import RowFields, RowStateRef, StateObject

ROWS_OF: Mapping[str, str] = MappingProxyType(
    {"origins": "origins", **dict.fromkeys(("step", "decrease", "moments", "response"), "moments")}
)
"""The array that has each vector of a run's `Progress` as a row; the number of the row is stored for it."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The arguments of a commit's arrays.

    Attributes
    ----------
    covariance_type : str
    layouts : mapping of str to ArrayLayout
        See `array_layouts`.
    chunk_rows : ndarray
        Rows of each chunk of the data.
    attempts : tuple of Attempt
        See `Manifest`.
    """

    covariance_type: str
    layouts: Mapping[str, ArrayLayout]
    chunk_rows: NDArray[np.int64]
    attempts: tuple[Attempt, ...]

    def zeros(self, name: str) -> NDArray[Any]:
        """Return an array of this name, all zeros."""
        layout = self.layouts[name]
        return np.zeros(layout.chunks[1:], dtype=layout.dtype)


@dataclass(frozen=True, eq=False)
class _RunArrays:
    """The arrays of a commit for one of its runs; the vectors of its `Progress` are rows of two of them."""

    whole: Any
    rows: Mapping[str, list[NDArray[Any]]] = field(default_factory=lambda: {"origins": [], "moments": []})

    @property
    def frame(self) -> Frame:
        frame: Frame = self.whole.frame
        return frame

    def put(self, name: str, values: NDArray[Any]) -> Any:
        if name not in ROWS_OF:
            return self.whole.put(name, values)
        rows = self.rows[ROWS_OF[name]]
        rows.append(values)
        return len(rows) - 1

    def get(self, name: str, json: Any) -> NDArray[Any]:
        if name not in ROWS_OF:
            values: NDArray[Any] = self.whole.get(name, json)
            return values
        rows = self.rows[ROWS_OF[name]]
        if type(json) is not int or not 0 <= json < len(rows):
            raise FormatError(f"is {json!r}: it must be the number of one of {len(rows)} rows")
        return rows[json]


def _encode_run(run: RunState, arrays: Any) -> dict[str, Any]:
    own = _RunArrays(arrays)
    json: dict[str, Any] = _RUN.encode(run, own)
    tables = _tables_of(run, arrays.frame)
    for name, rows in own.rows.items():
        if rows:
            tables[name] = arrays.frame.zeros(name)
            tables[name][: len(rows)] = rows
    return json | {name: arrays.put(name, tables[name]) if name in tables else None for name in TABLES}


def _decode_run(json: Any, arrays: Any) -> RunState:
    json = dict(as_object(json))
    refs = {name: json.pop(name, None) for name in TABLES}
    tables = {name: arrays.get(name, ref) for name, ref in refs.items() if ref is not None}
    own = _RunArrays(arrays, {name: list(tables.get(name, ())) for name in ("origins", "moments")})
    fields = _RUN.decode(json, own)
    if "chunks" not in tables:
        raise FormatError("has no table of chunks")
    row_state, n_active = _read_tables(tables, arrays.frame)
    n_iter = len(fields["records"])
    if [record.iteration for record in fields["records"]] != list(range(1, n_iter + 1)):
        raise FormatError("has iterations that are not numbered from 1")
    if any(record.rows < 1 for record in fields["records"]) or fields["since_full_pass"] > n_iter:
        raise FormatError("has an impossible history")
    run = RunState(**fields, n_active=n_active, row_state=row_state)
    cycle = run.progress is not None and run.progress.cycle is not None
    if not (run.full_pass_next or run.frozen or n_active or cycle):
        raise FormatError("has neither active nor inactive rows")
    return run


def _tables_of(run: RunState, frame: Frame) -> dict[str, NDArray[Any]]:
    """Return the tables of a run: places of row state and active rows of chunks, and digests of objects."""
    table, numbers = frame.zeros("chunks"), {each.id: number for number, each in enumerate(frame.attempts)}
    table[:, :PLACE_COLUMNS] = -1
    if run.n_active:
        table[list(run.n_active), PLACE_COLUMNS] = list(run.n_active.values())
    if not run.row_state:
        return {"chunks": table}
    objects = {ref.object.key: ref.object for ref in run.row_state.values()}
    places = {key: place_of(stored) for key, stored in objects.items()}
    found = [(*places[ref.object.key], ref.first_row) for ref in run.row_state.values()]
    table[list(run.row_state), :PLACE_COLUMNS] = [(numbers[attempt], *rest) for attempt, *rest in found]
    rows = {chunk: bytes.fromhex(ref.object.sha256) for chunk, ref in run.row_state.items()}
    return {"chunks": table, "digests": digest_table(rows, frame, "digests")}


def digest_table(rows: Mapping[int, bytes], frame: Frame, name: str) -> NDArray[np.uint8]:
    """Return a table of the digests of chunks, zeros for those without one."""
    table = frame.zeros(name)
    table[list(rows)] = np.frombuffer(b"".join(rows.values()), dtype=np.uint8).reshape(len(rows), -1)
    return table


def _read_tables(
    tables: Mapping[str, NDArray[Any]], frame: Frame
) -> tuple[Mapping[int, RowStateRef], Mapping[int, int]]:
    """Return the places of the row state of chunks, and the number of active rows of those with any."""
    table, rows, attempts = tables["chunks"], frame.chunk_rows, frame.attempts
    places, active = table[:, :PLACE_COLUMNS], table[:, PLACE_COLUMNS]
    stored = places[:, 0] >= 0
    here, kept = places[stored], rows[stored]
    longest = np.array([attempt.object_rows for attempt in attempts], dtype=np.int64)
    within = (
        (places[~stored] == -1).all()
        and (places <= [len(attempts) - 1, MAX_COUNT, len(table) - 1, MAX_COUNT]).all()
        and (here >= 0).all()
        and (here[:, 2] <= np.flatnonzero(stored)).all()
        and (here[:, 3] + kept <= longest[here[:, 0]]).all()
        and (active >= 0).all()
        and (active <= rows).all()
        and (("digests" in tables) == stored.any())
    )
    if not within or _overlap(here, kept):
        raise FormatError("has a table of chunks that is out of range")
    n_active = {chunk: count for chunk, count in enumerate(active.tolist()) if count}
    if not stored.any():
        return {}, n_active
    fields = [RowFields(each.fields, each.dtypes, each.object_rows, each.kept) for each in attempts]
    found: dict[tuple[int, int, int, bytes], StateObject] = {}
    row_state = {}
    for chunk in np.flatnonzero(stored).tolist():
        number, step, first, row = places[chunk].tolist()
        place = number, step, first, tables["digests"][chunk].tobytes()
        if place not in found:
            key = state_key(attempts[number].id, step, first)
            found[place] = StateObject(key, place[-1].hex(), fields[number])
        row_state[chunk] = RowStateRef(found[place], row)
    return row_state, n_active


def _overlap(places: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
    """Return whether two chunks, of ``rows`` rows each, share rows of an object."""
    order = np.lexsort(places.T[::-1])
    ordered, ends = places[order], (places[:, -1] + rows)[order]
    together = (ordered[1:, :-1] == ordered[:-1, :-1]).all(axis=1)
    return bool((ordered[1:, -1] < ends[:-1])[together].any())


def _parameters(arrays: Any, values: dict[str, NDArray[Any]]) -> MixtureParameters:
    try:
        return MixtureParameters(arrays.frame.covariance_type, *values.values())
    except EmtauError as error:
        raise FormatError(f"cannot be: {error}") from error


def _statistics(_: Any, values: dict[str, NDArray[Any]]) -> SufficientStatistics:
    if (values["weights"] < 0).any():
        raise FormatError("has negative weights")
    return SufficientStatistics(*values.values())


def _encode_algorithm(algorithm: Any, _: Any) -> Any:
    """Return the JSON of a policy, or a name unchanged; null for a policy that is not stored."""
    if algorithm is None or isinstance(algorithm, str):
        return _NAME.encode(algorithm, None)
    return _POLICY.encode(describe_policy(algorithm), None)


def _decode_algorithm(json: Any, _: Any) -> Any:
    return _decode_policy(json, None) if isinstance(json, dict) else _NAME.decode(json, None)


def _decode_policy(json: Any, _: Any) -> ActivityPolicy:
    try:
        return policy_described(_POLICY.decode(json, None))
    except ConfigError as error:
        raise FormatError(f"cannot be: {error}") from error


_POLICY = Codec().record(DescribedPolicy)
_NAME = Codec().form(Annotated[str | None, either(choice(AUTO, *POLICIES), NONE)])
CODEC = Codec(
    NAMES,
    MappingProxyType(
        {
            MixtureParameters: _parameters,
            SufficientStatistics: _statistics,
            RunState: lambda _, values: values,
        }
    ),
    NOT_FINITE,
    BY_COLUMN,
    MappingProxyType(
        {
            ActivityPolicy: Form(_encode_algorithm, _decode_policy),
            NamedOrPolicy: Form(_encode_algorithm, _decode_algorithm),
        }
    ),
)
_RUN = CODEC.record(RunState)
CONFIG, MANIFEST = CODEC.record(EmSettings), CODEC.record(Manifest)
CONTENT = replace(CODEC, special=MappingProxyType({RunState: Form(_encode_run, _decode_run)})).record(Content)
