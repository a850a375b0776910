"""The schema of a commit: records that are only stored, names on disk, arrays.

`NAMES` has the names on disk, so that a field can be renamed in Python without a new format. The records of
this module exist only to be stored, under the names of their fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.row_random import Samples
from emtau_dask.data.source import DIGEST_BYTES
from emtau_dask.em.acceleration import EvaluatedPoint, Pair, Proposal, QuasiNewtonState
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.moments import FrozenMoments
from emtau_dask.em.settings import Acceleration, EmSettings
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import Cycle, FitState, KMeansProgress, Progress, RunState
from emtau_dask.em.sums import FrozenStatistics
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.settings import STORED, Settings
from emtau_dask.storage.objects import ArrayLayout
from emtau_dask.storage.row_state import StateObject

MAX_CHUNKS = 2**24
OTHER_MOMENTS = 3
"""Moments of a quasi-Newton state in addition to its pairs: of the point, its response, and the proposal."""
ORIGINS = 3
"""Origins of a run: of its quasi-Newton state, of that before the cycle, and of the frozen moments."""
CHUNK_COLUMNS = ("attempt", "step", "first_chunk", "first_row", "remaining")
PLACE_COLUMNS = 4
"""The first columns, which say where the row state of a chunk is."""
STATE_DIGEST_BYTES = 32
ROW_DTYPES = frozenset({"bool", "uint8", "uint16", "uint32", "uint64"})
TABLES = ("chunks", "digests", "origins", "moments")
"""The arrays of a run in addition to those of its records, under these names; null for empty ones."""


@dataclass(frozen=True)
class ArrayRef:
    """An object: a chunk of an array of an attempt."""

    key: str
    sha256: str


@dataclass(frozen=True)
class SourceEntry:
    """A source without its values; ``chunks`` are runs of (rows, count)."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Attempt:
    """A process that wrote row state of a commit; ``kept`` are the fields that inactive rows keep."""

    id: str
    fields: tuple[str, ...]
    dtypes: tuple[str, ...]
    object_rows: int
    kept: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Manifest:
    """A commit without the state of the fit; the state store fills in the fields with defaults."""

    config: EmSettings
    feature_names: tuple[str, ...] | None
    run_config: dict[str, Any] | None
    data: SourceEntry
    sample_weight: SourceEntry | None
    responsibilities_init: SourceEntry | None
    run: str = ""
    number: int = 0
    attempt: str = ""
    attempts: tuple[Attempt, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    written: str = ""

    @property
    def sources(self) -> dict[str, SourceEntry | None]:
        """The sources of the fit, by the names of the fields."""
        return {name: getattr(self, name) for name in ("data", "sample_weight", "responsibilities_init")}


@dataclass(frozen=True, eq=False)
class ChunkDigests:
    """The digests of the chunks of a source: a row for each, zeros if unknown."""

    source: str
    made_on: str
    digests: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Content:
    """The state of the fit in a commit; ``given`` are starting parameters from the user."""

    given: GivenParameters
    fit: FitState
    contents: tuple[ChunkDigests, ...]


HEAD = tuple(each.name for each in fields(Manifest))


def _named(attributes: str) -> Mapping[str, str]:
    """Return the names on disk of attributes: ``"a b=c"`` stores ``a`` under its own name, ``b`` as ``c``."""
    pairs = (attribute.partition("=") for attribute in attributes.split())
    return {attribute: name or attribute for attribute, _, name in pairs}


NAMES: Mapping[type, Mapping[str, str]] = MappingProxyType(
    {
        FitState: _named("run start current best left_out finished notes"),
        GivenParameters: _named("weights means precisions"),
        KMeansProgress: _named("centres tolerance n_iter=passes"),
        RunState: _named(  # and the arrays of `TABLES`
            "parameters bound frozen stop_reason progress since_full_pass full_pass_next records=history"
        ),
        MixtureParameters: _named("weights means covariances precisions_cholesky"),
        IterationRecord: _named(
            "iteration lower_bound active_rows full_pass chunks_processed chunks_skipped bytes_read seconds "
            "rows accepted gap repeated"
        ),
        FrozenStatistics: _named("statistics entropy"),
        SufficientStatistics: _named("weights=frozen_weights means=frozen_means scatter=frozen_scatter"),
        Progress: _named(
            "quasi_newton=ascent cycle damping chosen failed_cycles uncertainty gap_margin gap_of_all_rows "
            "sample_index=sample sample_began annealed_passes=annealed_passes_left"
        ),
        Cycle: _named("outer frozen=held gap"),
        FrozenMoments: _named("origins moments entropy"),
        QuasiNewtonState: _named("origins pairs point proposal=trial radius"),
        Pair: _named("step decrease"),
        EvaluatedPoint: _named("parameters objective moments response"),
        Proposal: _named("moments kind length predicted=predicted_gain"),
        Settings: _named(" ".join(STORED)),
        EmSettings: _named(
            "tol gap_tol acceleration seeds previous_bound requested=settings policy=algorithm"
        ),
        Acceleration: _named("memory samples annealed"),
        Samples: _named("seed shares"),
        ChunkDigests: _named("source made_on digests=contents"),
    }
)
"""The stored attributes of each record, with their names on disk, which are also those of arrays."""

NOT_FINITE: Mapping[tuple[type, str], float] = MappingProxyType(
    {
        (IterationRecord, "gap"): math.nan,
        (Cycle, "gap"): math.nan,
        (Progress, "uncertainty"): math.nan,
        (Proposal, "predicted"): math.nan,
        (QuasiNewtonState, "radius"): math.inf,
    }
)
"""Attributes for which null means this value, which JSON does not have."""

BY_COLUMN = frozenset({IterationRecord})


def moments_kept(memory: int) -> int:
    """Return the maximum number of vectors of moments of a run."""
    return 2 * (2 * memory + OTHER_MOMENTS) + 1


def array_layouts(
    settings: EmSettings, n_features: int, n_chunks: int, prefix: str, n_steps: int
) -> dict[str, ArrayLayout]:
    """Return the zarr arrays of a fit below ``prefix``, by name; a step is one chunk of each."""
    K, d = settings.requested.n_components, n_features
    matrices = settings.structure.shape(K, d)
    arrays: dict[str, tuple[tuple[int, ...], str]] = {
        "weights": ((K,), "float64"),
        "means": ((K, d), "float64"),
        "covariances": (matrices, "float64"),
        "precisions_cholesky": (matrices, "float64"),
        "precisions": (matrices, "float64"),
        "frozen_weights": ((K,), "float64"),
        "frozen_means": ((K, d), "float64"),
        "frozen_scatter": (matrices, "float64"),
        "centres": ((K, d), "float64"),
        "chunks": ((n_chunks, len(CHUNK_COLUMNS)), "int64"),
        "digests": ((n_chunks, STATE_DIGEST_BYTES), "uint8"),
        "contents": ((n_chunks, DIGEST_BYTES), "uint8"),
    }
    if settings.acceleration is not None:
        arrays["origins"] = ((ORIGINS, K, d), "float64")
        size = K + K * d + math.prod(matrices)
        arrays["moments"] = ((moments_kept(settings.acceleration.memory), size), "float64")
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
    """Return the attempt and the step that wrote an object of row state, and the first of its chunks."""
    _, attempt, _, name = stored.key.split("/")
    _, step, first, *_ = name.split(".")
    return attempt, int(step), int(first)


def state_key(attempt: str, step: int, first: int) -> str:
    """Return the key of an object of row state; the inverse of `place_of`."""
    return f"attempts/{attempt}/rows/c.{step}.{first}.0.0"
