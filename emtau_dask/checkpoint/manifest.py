"""The content of a commit: what is stored of a fit, in which arrays, and as which JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from emtau_dask.data.source import DIGEST_BYTES
from emtau_dask.em.acceleration import Ascent, Kind, Pair, Point, Trial
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.moments import HeldMoments
from emtau_dask.em.state import Cycle, Progress
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.storage.objects import ArrayLayout
from emtau_dask.storage.row_state import StateObject

MAX_COUNT = 2**48
MAX_CHUNKS = 2**24
MAX_SHARES = 16
MAX_PAIRS = 64
MAX_CONTENTS, MAX_TEXT = 24, 1000
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Attempt = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,15}-[0-9a-f]{32}$")]
ArrayKey = Annotated[
    str, StringConstraints(pattern=r"^attempts/[0-9]{1,15}-[0-9a-f]{32}/[a-z_]{1,40}/c(\.[0-9]{1,15}){1,4}$")
]
SourceName = Literal["X", "sample_weight", "responsibilities_init"]
StopReason = Literal["tol", "no-active-rows", "max-iter"]
BESIDE_PAIRS = 3
"""Moments of an ascent beside its pairs: the point's, its response, and the trial's."""
ORIGINS = 3
"""Of the ascent, of that of all rows, and of the held moments."""
COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
CHUNK_COLUMNS = ("attempt", "step", "first_chunk", "first_row", "remaining")
PLACE_COLUMNS = 4
"""Of these, those that say where the row state of a chunk is."""
STATE_DIGEST_BYTES = 32
PARAMETERS = ("weights", "means", "covariances", "precisions_cholesky")
STATISTICS = ("weights", "means", "scatter")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ArrayRef(_Entry):
    """An object: a chunk of an array of an attempt."""

    key: ArrayKey
    sha256: Sha256


class ParametersEntry(_Entry):
    """Mixture parameters; None for those that are not given."""

    weights: ArrayRef | None = None
    means: ArrayRef | None = None
    covariances: ArrayRef | None = None
    precisions_cholesky: ArrayRef | None = None


class FrozenEntry(_Entry):
    """The statistics of inactive rows."""

    weights: ArrayRef
    means: ArrayRef
    scatter: ArrayRef
    entropy: Number


class HistoryEntry(_Entry):
    """The records of a run, by column."""

    iteration: list[Positive]
    lower_bound: list[Number]
    active_rows: list[Count]
    full_pass: list[bool]
    chunks_processed: list[Count]
    chunks_skipped: list[Count]
    bytes_read: list[Count]
    seconds: list[Number]
    rows: list[Positive]
    accepted: list[bool]
    gap: list[Number | None]
    repeated: list[bool]


class PointEntry(_Entry):
    """An accepted point; its moments are in the run's array of moments."""

    parameters: ParametersEntry
    objective: Number


class AscentEntry(_Entry):
    """What quasi-Newton steps remember: so many pairs, and whether the trial's moments are known."""

    pairs: Annotated[int, Field(ge=0, le=MAX_PAIRS)]
    point: PointEntry | None
    trial: bool
    kind: Literal["given", "plain", "extrapolated", "cycle"]
    length: Number
    predicted: Number | None
    radius: Number | None


class CycleEntry(_Entry):
    """Partial passes over rows that stand for all."""

    outer: AscentEntry
    entropy: Number
    gap: Number | None


class ProgressEntry(_Entry):
    """Where a run is that may extrapolate; see `em.Progress`."""

    level: Count
    level_began: Count
    damping: Number
    failures: Count
    unsure: Number | None
    heat: Count
    chosen: bool
    doubt: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    measure_all: bool
    ascent: AscentEntry
    cycle: CycleEntry | None
    origins: ArrayRef
    moments: ArrayRef


class ClimbingEntry(_Entry):
    """How a run extrapolates, and its samples; see `em.Climbing`."""

    memory: Annotated[int, Field(ge=0, le=MAX_PAIRS)]
    seed: Count
    annealed: bool
    shares: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(max_length=MAX_SHARES)]


class RunEntry(_Entry):
    """One run between two iterations."""

    parameters: ParametersEntry
    bound: Number | None
    history: HistoryEntry
    frozen: FrozenEntry | None
    since_reset: Count
    afresh: bool
    chunks: ArrayRef
    digests: ArrayRef | None
    stop_reason: StopReason | None
    progress: ProgressEntry | None


class StartEntry(_Entry):
    """K-means between two passes."""

    centres: ArrayRef
    tolerance: Number
    n_iter: Count


class ContentsEntry(_Entry):
    """The digests of a source's chunks; ``made_on`` as in `rows.ChunkContents`."""

    source: SourceName
    made_on: Annotated[str, StringConstraints(max_length=MAX_TEXT)]
    digests: ArrayRef


class FitEntry(_Entry):
    """The state of the fit."""

    run: Count
    start: StartEntry | None
    current: RunEntry | None
    best: RunEntry | None
    left_out: list[str]
    finished: bool
    notes: list[str]
    contents: Annotated[list[ContentsEntry], Field(max_length=MAX_CONTENTS)]


class AttemptEntry(_Entry):
    """A process that wrote row state of this commit."""

    id: Attempt
    fields: list[str]
    dtypes: list[Literal["bool", "uint8", "uint16", "uint32", "uint64"]]
    kept: list[str]
    object_rows: Count


class AlgorithmEntry(_Entry):
    """The policy; ``name`` is None for a user's own."""

    name: str | None
    kind: str
    params: dict[str, Any]


class SourceEntry(_Entry):
    """What a source is, without its values."""

    shape: Annotated[list[Count], Field(min_length=1, max_length=2)]
    dtype: str
    chunks: Annotated[
        list[Annotated[list[Count], Field(min_length=2, max_length=2)]], Field(max_length=MAX_CHUNKS)
    ]


class ConfigEntry(_Entry):
    """The settings of the fit."""

    n_components: Positive
    n_features: Positive
    covariance_type: Annotated[str, AfterValidator(lambda name: structure_named(name).name)]
    algorithm: AlgorithmEntry
    tol: Annotated[Number, Field(ge=0)]
    gap_tol: Annotated[Number, Field(ge=0)]
    climbing: ClimbingEntry | None
    words: dict[Literal["algorithm", "tol", "n_init", "acceleration"], str | None]
    missing: Literal["raise", "marginalise"] = "raise"
    reg_covar: Annotated[Number, Field(ge=0)]
    max_iter: Count
    n_init: Positive
    init_params: Literal["kmeans", "k-means++", "random", "random_from_data"]
    checkpoint_every: Positive
    random_state: Count | None
    warm_start: bool
    seeds: Annotated[list[Count], Field(min_length=1)]
    given: ParametersEntry
    previous_bound: Number | None
    feature_names: list[str] | None
    run_config: dict[str, Any] | None


class Manifest(_Entry):
    """All that a commit says."""

    run: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    number: Count
    attempt: Attempt
    attempts: list[AttemptEntry]
    environment: dict[str, str]
    written: str
    config: ConfigEntry
    data: SourceEntry
    sample_weight: SourceEntry | None
    responsibilities_init: SourceEntry | None
    fit: FitEntry


def references_of(entry: BaseModel) -> Iterator[ArrayRef]:
    """Yield every array that an entry of a manifest refers to, at any depth."""
    for _, value in entry:
        if isinstance(value, ArrayRef):
            yield value
        elif isinstance(value, BaseModel):
            yield from references_of(value)
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, BaseModel):
                    yield from references_of(each)


def first_problem(error: ValidationError) -> str:
    """Return the first error in a manifest: where, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


Write = Callable[[MixtureParameters], ParametersEntry]
Read = Callable[[ParametersEntry], MixtureParameters]


def moments_kept(memory: int) -> int:
    """Return how many vectors of moments a run has at most."""
    return 2 * (2 * memory + BESIDE_PAIRS) + 1


def packed(progress: Progress, write: Write, origins: NDArray[Any], moments: NDArray[Any]) -> dict[str, Any]:
    """Write a run's origins and moments into two arrays, in order; return the entry's other fields.

    ``write`` stores parameters.
    """
    place = iter(range(len(moments)))
    cycle = progress.cycle
    fields: dict[str, Any] = {
        "level": progress.level,
        "level_began": progress.level_began,
        "damping": progress.damping,
        "failures": progress.failures,
        "unsure": _or_none(progress.unsure),
        "heat": progress.heat,
        "chosen": progress.chosen,
        "doubt": progress.doubt,
        "measure_all": progress.measure_all,
        "ascent": _ascent(progress.ascent, write, moments, place),
        "cycle": None,
    }
    origins[0] = progress.ascent.origins
    if cycle is not None:
        outer = _ascent(cycle.outer, write, moments, place)
        moments[next(place)] = cycle.held.moments
        origins[1], origins[2] = cycle.outer.origins, cycle.held.origins
        fields["cycle"] = CycleEntry(outer=outer, entropy=cycle.held.entropy, gap=_or_none(cycle.gap))
    return fields


def _ascent(ascent: Ascent, write: Write, moments: NDArray[Any], place: Iterator[int]) -> AscentEntry:
    for pair in ascent.pairs:
        moments[next(place)] = pair.step
        moments[next(place)] = pair.decrease
    point, trial = ascent.point, ascent.trial
    if point is not None:
        moments[next(place)] = point.moments
        moments[next(place)] = point.response
    if trial.moments is not None:
        moments[next(place)] = trial.moments
    return AscentEntry(
        pairs=len(ascent.pairs),
        point=None
        if point is None
        else PointEntry(parameters=write(point.parameters), objective=point.objective),
        trial=trial.moments is not None,
        kind=trial.kind.value,
        length=trial.length,
        predicted=_or_none(trial.predicted),
        radius=_or_none(ascent.radius),
    )


def unpacked(entry: ProgressEntry, read: Read, origins: NDArray[Any], moments: NDArray[Any]) -> Progress:
    """Return what `packed` wrote; raises `IndexError` or `StopIteration` for counts that cannot be."""
    place = iter(range(len(moments)))
    ascent = _read_ascent(entry.ascent, read, origins[0], moments, place)
    cycle = None
    if entry.cycle is not None:
        outer = _read_ascent(entry.cycle.outer, read, origins[1], moments, place)
        held = HeldMoments(origins[2], moments[next(place)], entry.cycle.entropy)
        cycle = Cycle(outer, held, _or_nan(entry.cycle.gap))
    return Progress(
        ascent,
        entry.level,
        entry.level_began,
        cycle,
        entry.damping,
        entry.failures,
        _or_nan(entry.unsure),
        entry.heat,
        entry.chosen,
        entry.doubt,
        entry.measure_all,
    )


def _read_ascent(
    entry: AscentEntry, read: Read, origins: NDArray[Any], moments: NDArray[Any], place: Iterator[int]
) -> Ascent:
    pairs = tuple(Pair(moments[next(place)], moments[next(place)]) for _ in range(entry.pairs))
    point = None
    if entry.point is not None:
        found = read(entry.point.parameters)
        point = Point(found, entry.point.objective, moments[next(place)], moments[next(place)])
    trial = Trial(
        moments[next(place)] if entry.trial else None,
        Kind(entry.kind),
        entry.length,
        _or_nan(entry.predicted),
    )
    radius = math.inf if entry.radius is None else entry.radius
    return Ascent(origins, pairs, point, trial, radius)


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


Stored = tuple[str, object, ArrayRef]
"""The name of an array, the object of this process that has its values, and where they are stored."""


def array_layouts(config: ConfigEntry, n_chunks: int, prefix: str, n_steps: int) -> dict[str, ArrayLayout]:
    """Return the zarr arrays of a fit below ``prefix``, by name; a step is one chunk of each."""
    K, d = config.n_components, config.n_features
    matrices = structure_named(config.covariance_type).shape(K, d)
    arrays: dict[str, tuple[tuple[int, ...], str]] = {
        "weights": ((K,), "float64"),
        "means": ((K, d), "float64"),
        "covariances": (matrices, "float64"),
        "precisions_cholesky": (matrices, "float64"),
        "frozen_weights": ((K,), "float64"),
        "frozen_means": ((K, d), "float64"),
        "frozen_scatter": (matrices, "float64"),
        "centres": ((K, d), "float64"),
        "chunks": ((n_chunks, len(CHUNK_COLUMNS)), "int64"),
        "digests": ((n_chunks, STATE_DIGEST_BYTES), "uint8"),
        "contents": ((n_chunks, DIGEST_BYTES), "uint8"),
    }
    if config.climbing is not None:
        arrays["origins"] = ((ORIGINS, K, d), "float64")
        size = K + K * d + math.prod(matrices)
        arrays["moments"] = ((moments_kept(config.climbing.memory), size), "float64")
    return {
        name: ArrayLayout(
            f"{prefix}/{name}",
            (n_steps, *shape),
            (1, *shape),
            dtype,
            ("step", *(f"axis_{i}" for i in range(len(shape)))),
            attributes={"columns": list(CHUNK_COLUMNS)} if name == "chunks" else None,
        )
        for name, (shape, dtype) in arrays.items()
    }


def place_of(stored: StateObject) -> tuple[str, int, int]:
    """Return the attempt and the step in which row state was written, and the first chunk that it is of."""
    _, attempt, _, name = stored.key.split("/")
    _, step, first, *_ = name.split(".")
    return attempt, int(step), int(first)


def state_key(attempt: str, step: int, first: int) -> str:
    """Return the key of an object of row state, of which `place_of` returns this."""
    return f"attempts/{attempt}/rows/c.{step}.{first}.0.0"
