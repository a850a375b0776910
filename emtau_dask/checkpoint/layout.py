"""The arrays of a checkpoint: their names, shapes and dtypes, and the keys of row state."""

from __future__ import annotations

import dataclasses
import math

from emtau_dask.checkpoint.progress import ORIGINS, moments_kept
from emtau_dask.checkpoint.schema import ArrayRef, ConfigEntry
from emtau_dask.em import IterationRecord
from emtau_dask.io.objects import ArrayLayout, StateObject
from emtau_dask.io.sources import DIGEST_BYTES
from emtau_dask.mixture.covariance import structure_named

COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
CHUNK_COLUMNS = ("attempt", "step", "first_chunk", "first_row", "remaining")
PLACE_COLUMNS = 4
"""Of these, those that say where the row state of a chunk is."""
STATE_DIGEST_BYTES = 32
PARAMETERS = ("weights", "means", "covariances", "precisions_cholesky")
STATISTICS = ("weights", "means", "scatter")

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
