"""The manifest of a commit; anything else in it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from emtau_dask.mixture.covariance import structure_named

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
