"""The schema of a commit: records that are only stored, names on disk, arrays.

A field is renamed in Python without a new format, since `NAMES` has its name on disk; another name there is
another format. The records of this module exist only to be stored: their fields' names are those on disk.
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
from emtau_dask.em.acceleration import Ascent, Pair, Point, Trial
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.moments import HeldMoments
from emtau_dask.em.settings import Acceleration, EmSettings
from emtau_dask.em.starts import GivenParameters
from emtau_dask.em.state import Cycle, FitState, KMeansProgress, Progress, RunState
from emtau_dask.em.sums import FrozenRows
from emtau_dask.mixture.parameters import MixtureParameters
from emtau_dask.mixture.statistics import SufficientStatistics
from emtau_dask.settings import STORED, Settings
from emtau_dask.storage.objects import ArrayLayout
from emtau_dask.storage.row_state import StateObject

MAX_CHUNKS = 2**24
BESIDE_PAIRS = 3
"""Moments of an ascent beside its pairs: the point's, its response, and the trial's."""
ORIGINS = 3
"""Of the ascent, of that of all rows, and of the held moments."""
CHUNK_COLUMNS = ("attempt", "step", "first_chunk", "first_row", "remaining")
PLACE_COLUMNS = 4
"""Of these, those that say where the row state of a chunk is."""
STATE_DIGEST_BYTES = 32
ROW_DTYPES = frozenset({"bool", "uint8", "uint16", "uint32", "uint64"})
TABLES = ("chunks", "digests", "origins", "moments")
"""The arrays of a run beside those of its records, under these names too; null for those without rows."""


@dataclass(frozen=True)
class ArrayRef:
    """An object: a chunk of an array of an attempt."""

    key: str
    sha256: str


@dataclass(frozen=True)
class SourceEntry:
    """What a source is, without its values; ``chunks`` are runs of (rows, count)."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Attempt:
    """A process that wrote row state of a commit; ``kept`` are the fields that inactive rows have too."""

    id: str
    fields: tuple[str, ...]
    dtypes: tuple[str, ...]
    object_rows: int
    kept: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Manifest:
    """All that a commit says but the state of the fit; the journal knows what has a default here."""

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
        """What the data of the fit are, by the names of the fields."""
        return {name: getattr(self, name) for name in ("data", "sample_weight", "responsibilities_init")}


@dataclass(frozen=True, eq=False)
class ChunkDigests:
    """What chunks of a source hold: a row of ``digests`` for each, zeros where that is not known."""

    source: str
    made_on: str
    digests: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Content:
    """What a commit says of the fit; ``given`` are starting parameters from the user."""

    given: GivenParameters
    fit: FitState
    contents: tuple[ChunkDigests, ...]


HEAD = tuple(each.name for each in fields(Manifest))


def _named(same: str, **others: str) -> Mapping[str, str]:
    """Return the names on disk of attributes: of those that are called so there too, and of the others."""
    return {name: name for name in same.split()} | others


NAMES: Mapping[type, Mapping[str, str]] = MappingProxyType(
    {
        FitState: _named("run start current best left_out finished notes"),
        GivenParameters: _named("weights means precisions"),
        KMeansProgress: _named("centres tolerance", n_iter="passes"),
        RunState: _named(  # and the arrays of `TABLES`
            "parameters bound frozen stop_reason progress since_full_pass full_pass_next",
            records="history",
        ),
        MixtureParameters: _named("weights means covariances precisions_cholesky"),
        IterationRecord: _named(
            "iteration lower_bound active_rows full_pass chunks_processed chunks_skipped bytes_read seconds "
            "rows accepted gap repeated"
        ),
        FrozenRows: _named("statistics entropy"),
        SufficientStatistics: _named(
            "", weights="frozen_weights", means="frozen_means", scatter="frozen_scatter"
        ),
        Progress: _named(
            "ascent cycle damping chosen failed_cycles uncertainty gap_margin gap_of_all_rows",
            level="sample",
            level_began="sample_began",
            annealed_passes="annealed_passes_left",
        ),
        Cycle: _named("outer held gap"),
        HeldMoments: _named("origins moments entropy"),
        Ascent: _named("origins pairs point trial radius"),
        Pair: _named("step decrease"),
        Point: _named("parameters objective moments response"),
        Trial: _named("moments kind length", predicted="predicted_gain"),
        Settings: _named(" ".join(STORED)),
        EmSettings: _named(
            "tol gap_tol acceleration seeds previous_bound", asked="settings", policy="algorithm"
        ),
        Acceleration: _named("memory samples annealed"),
        Samples: _named("seed shares"),
        ChunkDigests: _named("source made_on", digests="contents"),
    }
)
"""The records of a fit, what is stored of them, and its names on disk; those of arrays too."""

NOT_FINITE: Mapping[tuple[type, str], float] = MappingProxyType(
    {
        (IterationRecord, "gap"): math.nan,
        (Cycle, "gap"): math.nan,
        (Progress, "uncertainty"): math.nan,
        (Trial, "predicted"): math.nan,
        (Ascent, "radius"): math.inf,
    }
)
"""Where null stands for a value that JSON does not have."""

BY_COLUMN = frozenset({IterationRecord})


def moments_kept(memory: int) -> int:
    """Return how many vectors of moments a run has at most."""
    return 2 * (2 * memory + BESIDE_PAIRS) + 1


def array_layouts(
    settings: EmSettings, n_features: int, n_chunks: int, prefix: str, n_steps: int
) -> dict[str, ArrayLayout]:
    """Return the zarr arrays of a fit below ``prefix``, by name; a step is one chunk of each."""
    K, d = settings.asked.n_components, n_features
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
    """Return the attempt and the step in which row state was written, and the first chunk that it is of."""
    _, attempt, _, name = stored.key.split("/")
    _, step, first, *_ = name.split(".")
    return attempt, int(step), int(first)


def state_key(attempt: str, step: int, first: int) -> str:
    """Return the key of an object of row state, of which `place_of` returns this."""
    return f"attempts/{attempt}/rows/c.{step}.{first}.0.0"
